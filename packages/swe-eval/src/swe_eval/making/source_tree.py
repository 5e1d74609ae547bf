"""Reads the repository that tasks are made from: a folder, or an archive of one."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import posixpath
import re
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path, PurePosixPath

from sandbox_client.environments import EnvironmentTree

from swe_eval.errors import RepositoryError
from swe_eval.grading.prepare import is_protected
from swe_eval.tasks.task import FileTree, TreeFile

__all__ = ["SourceTree", "matches", "read_repository"]

MAX_BYTES = 32 * 1024 * 1024
MAX_SOURCE_BYTES = 512 * 1024
_LEFT_OUT = frozenset(
    {
        ".eggs",
        ".git",
        ".hg",
        ".hypothesis",
        ".mypy_cache",
        ".nox",
        ".pytest_cache",
        ".ruff_cache",
        ".svn",
        ".tox",
        ".venv",
        "__pycache__",
        ".site-packages",
        "node_modules",
        "venv",
    }
)
_BUILT = frozenset({"build", "dist", "env", "htmlcov"})
"""At the top and beside a project's file, where they are no packages: copies of the sources."""
_PROJECT_FILES = frozenset({"pyproject.toml", "setup.cfg", "setup.py"})
_LEFT_OVER = (".pyc", ".pyo", ".orig", ".rej", ".swp", "~")
"""Compiled sources, and what editors and patches leave of them."""
_ARCHIVES = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".zip")
_UNREADABLE = (tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, OSError)
_MAX_LINKS = 40


@dataclass(frozen=True, kw_only=True)
class SourceTree:
    """A repository's files in memory."""

    name: str
    files: FileTree

    @cached_property
    def short_digest(self) -> str:
        """Identity of the files, for metadata."""
        return self.environment_tree.digest[:16]

    @cached_property
    def environment_tree(self) -> EnvironmentTree:
        """The files as a sandbox takes them."""
        return EnvironmentTree(
            files=self.contents,
            executable=frozenset(path for path, file in self.files.items() if file.executable),
        )

    @cached_property
    def contents(self) -> Mapping[str, bytes]:
        """The bytes of all files."""
        return {path: file.content for path, file in self.files.items()}

    @cached_property
    def texts(self) -> Mapping[str, str]:
        """The Python files that are UTF-8 text, by path in order."""
        found = {}
        for path, file in sorted(self.files.items()):
            if path.endswith(".py"):
                try:
                    found[path] = file.content.decode("utf-8")
                except UnicodeDecodeError:
                    continue
        return found

    def sources(self, include: Collection[str], exclude: Collection[str]) -> list[str]:
        """Files where bugs may go: those whose repair grading would not drop as one of tests."""
        return [
            path
            for path, text in self.texts.items()
            if not is_protected(path)
            and len(text) <= MAX_SOURCE_BYTES
            and (not include or matches(path, include))
            and not matches(path, exclude)
        ]


def matches(path: str, globs: Collection[str]) -> bool:
    """Whether a path, or a folder above it, matches one of the globs; `*` matches slashes too."""
    above = [path, *(parent.as_posix() for parent in PurePosixPath(path).parents)]
    return any(fnmatchcase(part, glob.rstrip("/")) for glob in globs for part in above)


def read_repository(path: Path, name: str = "", out: Path | None = None) -> SourceTree:
    """Reads a folder, or an archive (`.tar.gz`, `.zip` and the like) that holds one.

    Version control, caches, virtual environments, what was built and tasks that were made are
    left out; links to files within become files.

    Args:
        path: Where it is.
        name: Its name in tasks; empty: that of the folder or archive.
        out: A folder that is left out: the tasks go there.

    Raises:
        RepositoryError: there is no such thing, it is too large, or it holds no Python.
    """
    if path.is_dir() and out is not None and path.resolve() == out.resolve():
        raise RepositoryError(f"{path} is where the tasks go; name another folder for them")
    if path.is_dir():
        members, stem = _folder_files(path, out), path.resolve().name
    elif path.is_file() and path.name.endswith(_ARCHIVES):
        members, stem = _archive_files(path), re.sub(r"\.(tar\.\w+|tgz|zip)$", "", path.name)
    elif path.exists():
        raise RepositoryError(f"{path} is neither a folder nor an archive ({', '.join(_ARCHIVES)})")
    else:
        raise RepositoryError(f"{path} is not there")
    files: dict[str, TreeFile] = {}
    total = 0
    for relative, file in members:
        if is_left_out(relative):
            continue
        total += len(file.content)
        if total > MAX_BYTES:
            raise RepositoryError(
                f"{path} holds more than {MAX_BYTES} bytes, of which every task gets a copy; "
                "make a copy without what the tests don't need"
            )
        files[relative] = file
    files = _without_copies(files)
    if not any(relative.endswith(".py") for relative in files):
        raise RepositoryError(f"{path} holds no Python files")
    return SourceTree(name=plain_name(name or stem), files=dict(sorted(files.items())))


def is_left_out(path: str) -> bool:
    """Whether a file is version control's, a cache's, an environment's, left over, or was built."""
    parts = path.split("/")
    return (
        not _LEFT_OUT.isdisjoint(parts)
        or path.endswith(_LEFT_OVER)
        or any(part.endswith(".egg-info") for part in parts)
    )


def _without_copies(files: Mapping[str, TreeFile]) -> dict[str, TreeFile]:
    """Without environments, what was built, and tasks made of this or another repository."""
    projects = {
        path.rpartition("/")[0] for path in files if PurePosixPath(path).name in _PROJECT_FILES
    }
    built = (posixpath.join(folder, name) for folder in {"", *projects} for name in _BUILT)
    dropped = {folder for folder in built if f"{folder}/__init__.py" not in files}
    for path, file in files.items():
        folder, _, name = path.rpartition("/")
        if folder and (name == "pyvenv.cfg" or (name == "task.toml" and _is_ours(file.content))):
            dropped.add(folder)
    return {
        path: file
        for path, file in files.items()
        if dropped.isdisjoint(parent.as_posix() for parent in PurePosixPath(path).parents)
    }


def _is_ours(content: bytes) -> bool:
    """Whether a `task.toml` is of a task that was made of a repository."""
    return all(re.search(rb"(?m)^%s = " % key, content) for key in (b"fingerprint", b"source"))


def plain_name(text: str) -> str:
    """A name for tasks: lower case letters, digits, dots, dashes."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.") or "repository"


def _folder_files(folder: Path, out: Path | None) -> Iterator[tuple[str, TreeFile]]:
    real, away = folder.resolve(), out and out.resolve()
    for place, folders, names in os.walk(folder):
        if Path(place) != folder and _holds_copies(Path(place), names):
            folders[:] = []
            continue
        folders[:] = sorted(
            name
            for name in folders
            if not is_left_out(name) and (away is None or Path(place, name).resolve() != away)
        )
        for name in sorted(names):
            path = Path(place, name)
            try:
                inside = path.resolve(strict=True).is_relative_to(real)
                status = path.stat()
            except (OSError, RuntimeError):
                continue  # a link to nowhere, or to itself
            if inside and stat.S_ISREG(status.st_mode):
                if status.st_size > MAX_BYTES:
                    raise RepositoryError(f"{path} is larger than {MAX_BYTES} bytes")
                executable = bool(status.st_mode & 0o100)
                yield path.relative_to(folder).as_posix(), TreeFile(path.read_bytes(), executable)


def _holds_copies(folder: Path, names: Collection[str]) -> bool:
    # Left out later in any case: here so that the size of it doesn't count.
    if "pyvenv.cfg" in names:
        return True
    return "task.toml" in names and _is_ours(folder.joinpath("task.toml").read_bytes())


def _archive_files(path: Path) -> Iterator[tuple[str, TreeFile]]:
    """The files below the archive's one top folder, or all."""
    try:
        found = list(_zip_files(path) if path.suffix == ".zip" else _tar_files(path))
    except (*_UNREADABLE, RuntimeError) as error:  # RuntimeError: encrypted, or packed oddly
        raise RepositoryError(f"{path} can't be read as an archive: {error}") from error
    tops = {name.partition("/")[0] for name, _ in found}
    shared = len(tops) == 1 and all("/" in name for name, _ in found)
    for name, file in found:
        relative = name.partition("/")[2] if shared else name
        if relative and not relative.startswith("/") and ".." not in relative.split("/"):
            yield relative, file


def _tar_files(path: Path) -> Iterator[tuple[str, TreeFile]]:
    with (
        _unpacked(path) as packed,
        tarfile.open(fileobj=packed, mode="r:") as archive,
    ):
        left = MAX_BYTES
        found: dict[str, TreeFile] = {}
        links: dict[str, str] = {}
        for member in archive:
            name = posixpath.normpath(member.name)
            if member.issym():
                links[name] = posixpath.join(posixpath.dirname(name), member.linkname)
            elif member.islnk():
                links[name] = member.linkname
            elif member.isfile():
                left = _spend(left, member.size, path)
                stream = archive.extractfile(member)
                assert stream is not None
                found[name] = TreeFile(stream.read(), bool(member.mode & 0o100))
        _read_to_the_end(archive, packed)
        yield from _with_links(found, links)


def _unpacked(path: Path) -> gzip.GzipFile | bz2.BZ2File | lzma.LZMAFile:
    match path.suffix:
        case ".bz2":
            return bz2.open(path)
        case ".xz":
            return lzma.open(path)
        case _:
            return gzip.open(path)


def _read_to_the_end(archive: tarfile.TarFile, packed: io.BufferedIOBase) -> None:
    """Reads what is behind the last member, where `tarfile` stops: at damage as at the end.

    Raises:
        OSError: it is no end. Or what was packed is not whole.
    """
    packed.seek(archive.offset)
    while part := packed.read(1 << 20):
        if part.strip(b"\0"):
            raise tarfile.ReadError("there is something behind the last file that can be read")


def _with_links(
    found: Mapping[str, TreeFile], links: Mapping[str, str]
) -> Iterator[tuple[str, TreeFile]]:
    """The files, those too that are links to one of them; links to folders are left out."""
    yield from found.items()
    for name in links:
        target = name
        for _ in range(_MAX_LINKS):
            if target not in links:
                break
            target = posixpath.normpath(links[target])
        if target in found:
            yield name, found[target]


def _zip_files(path: Path) -> Iterator[tuple[str, TreeFile]]:
    with zipfile.ZipFile(io.BytesIO(path.read_bytes())) as archive:
        left = MAX_BYTES
        found: dict[str, TreeFile] = {}
        links: dict[str, str] = {}
        for info in archive.infolist():
            if info.is_dir():
                continue
            left = _spend(left, info.file_size, path)
            name, mode = posixpath.normpath(info.filename), info.external_attr >> 16
            content = archive.read(info)
            if stat.S_ISLNK(mode):
                links[name] = posixpath.join(posixpath.dirname(name), os.fsdecode(content))
            else:
                found[name] = TreeFile(content, bool(mode & 0o100))
        yield from _with_links(found, links)


def _spend(left: int, size: int, path: Path) -> int:
    if size > left:
        raise RepositoryError(f"{path} holds more than {MAX_BYTES} bytes")
    return left - size
