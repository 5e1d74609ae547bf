"""What is left of an agent's diff for grading: pure functions over its bytes.

The diff is cut into its per-file sections. Sections that change tests or what decides how tests run
are dropped, which is the same as restoring those files afterwards. Links, submodules and paths
outside the work folder refuse the whole diff. The sandbox applies what is left, and says which
paths it changed; the caller compares (`unexpected_paths`), so that a diff which two parsers read
differently can't slip through.
"""

import itertools
import re
import sys
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from swe_eval.core.verdict import GradeReason

_PROTECTED_NAMES = frozenset(
    {
        ".coveragerc",
        ".pytest.ini",
        ".pytest.toml",
        "conftest.py",
        "noxfile.py",
        "pyproject.toml",
        "pytest.ini",
        "pytest.toml",
        "runtests.py",
        "setup.cfg",
        "sitecustomize.py",
        "tox.ini",
        "usercustomize.py",
    }
)
# Compiled modules stand in for the source that they were made from, of tests too.
_PROTECTED_FOLDERS = frozenset({".git", "__pycache__", "test", "tests"})
_TEST_FILE = re.compile(r"test_.*\.py|.*_test\.py|tests?\.py|.*\.(pth|pyc|pyo)")
# Their entry points are plug-ins of pytest wherever the work folder is on the path.
_METADATA_FOLDERS = (".dist-info", ".egg-info")
# A new module of such a name would be imported in place of the one that the test run means.
_IMPORTED_BY_RUNNERS = sys.stdlib_module_names | {
    "_pytest",
    "exceptiongroup",
    "iniconfig",
    "packaging",
    "pluggy",
    "py",
    "pygments",
    "pytest",
    "sitecustomize",
    "tomli",
    "usercustomize",
}
_LINK_MODES = (b"120000", b"160000")


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedDiff:
    """What will be applied."""

    patch: bytes
    paths: frozenset[str]
    """Every path that the patch names."""
    dropped: tuple[str, ...] = ()
    """Protected paths whose changes are left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RefusedDiff:
    """A diff that is unsolved without a run."""

    reason: GradeReason
    detail: str


def prepare_diff(
    diff: bytes, *, max_bytes: int, hidden_tests: Collection[str] = (), protect: bool = True
) -> PreparedDiff | RefusedDiff:
    """Checks and filters a git-format diff.

    Args:
        diff: As the agent's sandbox gave it.
        max_bytes: A larger diff is refused.
        hidden_tests: Paths of the hidden tests, protected whatever their names.
        protect: Whether to drop changes to tests and test configuration.
    """
    if not diff.strip():
        return RefusedDiff(reason=GradeReason.EMPTY_DIFF, detail="nothing was changed")
    if len(diff) > max_bytes:
        return RefusedDiff(
            reason=GradeReason.DIFF_TOO_LARGE,
            detail=f"{len(diff)} bytes; at most {max_bytes} are graded",
        )
    kept: list[bytes] = []
    paths: set[str] = set()
    dropped: list[str] = []
    sections = _sections(diff)
    for section in sections:
        try:
            change = _read_section(section)
        except ValueError as error:
            return RefusedDiff(reason=GradeReason.DIFF_MALFORMED, detail=str(error))
        refusal = _unsafe(change)
        if refusal is not None:
            return refusal
        if protect and any(
            is_protected(path, hidden_tests=hidden_tests, is_new=change.is_new)
            for path in change.paths
        ):
            dropped.extend(change.paths)
        else:
            kept.append(section)
            paths.update(change.paths)
    if not sections:
        return RefusedDiff(
            reason=GradeReason.DIFF_MALFORMED, detail="no `diff --git` line; expected git's format"
        )
    if not kept:
        return RefusedDiff(
            reason=GradeReason.ONLY_PROTECTED_FILES,
            detail="it changes only tests and test configuration: " + ", ".join(dropped[:10]),
        )
    return PreparedDiff(patch=b"".join(kept), paths=frozenset(paths), dropped=tuple(dropped))


def is_protected(path: str, *, hidden_tests: Collection[str] = (), is_new: bool = False) -> bool:
    """Whether grading ignores changes to this path.

    Protected are tests, their folders and configuration, what Python runs at start-up, and new
    modules that shadow the standard library or the test runner.
    """
    parts = path.split("/")
    if path in hidden_tests or parts[-1] in _PROTECTED_NAMES or _TEST_FILE.fullmatch(parts[-1]):
        return True
    if not _PROTECTED_FOLDERS.isdisjoint(parts[:-1]) or parts[-1] == ".git":
        return True
    if any(part.endswith(_METADATA_FOLDERS) for part in parts):
        return True
    # A package, a source or an extension module: `random/`, `random.py`, `random.abi3.so`.
    return is_new and parts[0].partition(".")[0] in _IMPORTED_BY_RUNNERS


def unexpected_paths(changed: Iterable[str], prepared: PreparedDiff) -> list[str]:
    """Paths that applying has changed though the prepared diff does not name them."""
    return sorted(set(changed) - prepared.paths)


@dataclass(frozen=True, slots=True)
class _Change:
    paths: tuple[str, ...]
    is_new: bool
    is_link: bool


def _sections(diff: bytes) -> list[bytes]:
    """The parts that start with `diff --git`; text before the first is dropped."""
    starts = [match.start() for match in re.finditer(rb"^diff --git ", diff, re.MULTILINE)]
    return [diff[start:end] for start, end in itertools.pairwise([*starts, len(diff)])]


def _read_section(section: bytes) -> _Change:
    """Raises ValueError when no path can be told."""
    header, *lines = section.split(b"\n")
    paths: list[bytes] = []
    is_new = is_link = False
    for line in lines:
        line = line.rstrip(b"\r")
        if line.startswith((b"@@ ", b"GIT binary patch", b"Binary files ")):
            break
        if line.startswith((b"--- ", b"+++ ")):
            name = _unquoted(line[4:].split(b"\t")[0] if line[4:5] != b'"' else line[4:])
            if name != b"/dev/null":
                paths.append(_without_prefix(name))
        elif line.startswith((b"rename from ", b"rename to ", b"copy from ", b"copy to ")):
            paths.append(_unquoted(line.split(b" ", 2)[2]))
            is_new = True  # where it goes to
        elif line.startswith((b"new file mode ", b"new mode ", b"deleted file mode ")):
            is_new = is_new or line.startswith(b"new file")
            is_link = is_link or (line.endswith(_LINK_MODES) and not line.startswith(b"deleted"))
        elif line.startswith(b"index "):
            is_link = is_link or line.endswith(_LINK_MODES)
    if not paths:
        paths = _header_paths(header[len(b"diff --git ") :].rstrip(b"\r"))
    named = tuple(dict.fromkeys(path.decode("utf-8", "surrogateescape") for path in paths))
    return _Change(named, is_new, is_link)


def _header_paths(header: bytes) -> list[bytes]:
    """Both paths of the first line, needed where only a mode or a binary file changes."""
    if header.startswith(b'"'):
        end = re.match(rb'"(?:[^"\\]|\\.)*"', header)
        if end is not None:
            names = [end[0], header[end.end() + 1 :]]
            return [_without_prefix(_unquoted(name)) for name in names]
    middle = len(header) // 2
    old, new = header[:middle], header[middle + 1 :]
    if header[middle : middle + 1] == b" " and _without_prefix(old) == _without_prefix(new):
        return [_without_prefix(old)]
    raise ValueError(f"can't tell the path in {header[:200]!r}")


_ESCAPES = {b"a": 7, b"b": 8, b"t": 9, b"n": 10, b"v": 11, b"f": 12, b"r": 13}


def _unquoted(name: bytes) -> bytes:
    if not (name.startswith(b'"') and name.endswith(b'"') and len(name) > 1):
        return name

    def character(match: re.Match[bytes]) -> bytes:
        code = match[1]
        if code.isdigit():
            return bytes([int(code, 8) & 0xFF])
        return bytes([_ESCAPES.get(code, code[0])])

    return re.sub(rb"\\([0-7]{1,3}|.)", character, name[1:-1])


def _without_prefix(name: bytes) -> bytes:
    prefix, slash, rest = name.partition(b"/")
    return rest if slash and len(prefix) == 1 else name


def _unsafe(change: _Change) -> RefusedDiff | None:
    for path in change.paths:
        parts = path.split("/")
        if path.startswith("/") or ".." in parts or "" in parts or "\0" in path:
            return RefusedDiff(
                reason=GradeReason.UNSAFE_PATH, detail=f"{path!r} leaves the work folder"
            )
    if change.is_link:
        return RefusedDiff(
            reason=GradeReason.UNSAFE_PATH,
            detail=f"{change.paths[0]!r} is a link or a submodule; only files are graded",
        )
    return None
