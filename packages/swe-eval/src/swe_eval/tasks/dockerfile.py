"""Reads a Dockerfile as a folder tree, as far as that goes without a container engine."""

import json
import posixpath
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field

from swe_eval.tasks.task import FileTree, TreeFile


@dataclass(frozen=True, kw_only=True)
class TreeImage:
    """What a Dockerfile puts into its work folder."""

    files: FileTree
    """Relative to `workdir`."""
    workdir: str
    env: dict[str, str] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()
    """Instructions that a folder tree can't express; empty means nothing is lost but the base
    image."""


_IGNORED = {"FROM", "LABEL", "MAINTAINER", "EXPOSE", "STOPSIGNAL", "ARG", "CMD"}
_CONTINUED = re.compile(r"\\[ \t]*\n")
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
_MKDIR = re.compile(r"mkdir( -p)?( /?[\w./-]+)+")


def read_as_tree(dockerfile: str, context: FileTree, *, workdir: str | None = None) -> TreeImage:
    """The work folder that a Dockerfile leaves, from its COPY, ADD, WORKDIR and ENV instructions.

    Args:
        dockerfile: Its text.
        context: The build context.
        workdir: Overrides the last WORKDIR.
    """
    reader = _Reader(context)
    for line, instruction, rest in _instructions(dockerfile):
        reader.read(line, instruction, rest)
    final = workdir or reader.workdir
    final = "/workspace" if final == "/" else final
    files: dict[str, TreeFile] = {}
    for path, (file, line) in reader.placed.items():
        if path.startswith(final + "/"):
            files[path[len(final) + 1 :]] = file
        elif line not in reader.skipped:
            reader.skipped.append(line)
    return TreeImage(
        files=files, workdir=final, env=reader.env, skipped=tuple(dict.fromkeys(reader.skipped))
    )


def _instructions(dockerfile: str) -> Iterator[tuple[str, str, str]]:
    lines = [
        line for line in dockerfile.splitlines(keepends=True) if not line.lstrip().startswith("#")
    ]
    for raw in _CONTINUED.sub(" ", "".join(lines)).splitlines():
        line = " ".join(raw.split())
        if line:
            instruction, _, rest = line.partition(" ")
            yield line, instruction.upper(), rest


class _Reader:
    def __init__(self, context: FileTree) -> None:
        self.context = context
        self.workdir = "/"
        self.env: dict[str, str] = {}
        self.placed: dict[str, tuple[TreeFile, str]] = {}
        self.skipped: list[str] = []

    def read(self, line: str, instruction: str, rest: str) -> None:
        if instruction in _IGNORED:
            return
        if instruction == "WORKDIR":
            self.workdir = posixpath.normpath(posixpath.join(self.workdir, self._expand(rest)))
        elif instruction == "ENV":
            self._set_env(rest)
        elif instruction in {"COPY", "ADD"}:
            if not self._copy(line, rest):
                self.skipped.append(line)
        elif instruction != "RUN" or not _MKDIR.fullmatch(rest):
            self.skipped.append(line)

    def _expand(self, text: str) -> str:
        return _VARIABLE.sub(lambda m: self.env.get(m[1] or m[2], ""), text)

    def _set_env(self, rest: str) -> None:
        words = _words(rest)
        if words and "=" not in words[0]:
            self.env[words[0]] = self._expand(rest.partition(" ")[2])
            return
        for word in words:
            name, _, value = word.partition("=")
            self.env[name] = self._expand(value)

    def _copy(self, line: str, rest: str) -> bool:
        words = _copy_words(rest)
        options = [w for w in words if w.startswith("--")]
        paths = [self._expand(w) for w in words if not w.startswith("--")]
        # Owners do not exist in a tree; other options (--from above all) change what is copied.
        if len(paths) < 2 or any(not o.startswith(("--chown=", "--chmod=")) for o in options):
            return False
        *sources, target = paths
        into_folder = target.endswith("/") or target in {".", ".."} or len(sources) > 1
        target = posixpath.normpath(posixpath.join(self.workdir, target))
        found = [self._copy_one(line, source, target, into_folder) for source in sources]
        return all(found)

    def _copy_one(self, line: str, source: str, target: str, into_folder: bool) -> bool:
        source = posixpath.normpath("/" + source)[1:]
        if source in self.context:
            name = posixpath.basename(source)
            at = posixpath.join(target, name) if into_folder else target
            self.placed[at] = (self.context[source], line)
            return True
        start = source + "/" if source else ""
        inside = [path for path in self.context if path.startswith(start)]
        for path in inside:
            # A Dockerfile is part of its context but hardly ever meant to be copied along.
            if path != "Dockerfile":
                self.placed[posixpath.join(target, path[len(start) :])] = (
                    self.context[path],
                    line,
                )
        return bool(inside)


def _copy_words(rest: str) -> list[str]:
    if rest.startswith("["):
        try:
            parsed = json.loads(rest)
        except ValueError:
            return []
        return [str(word) for word in parsed] if isinstance(parsed, list) else []
    return _words(rest)


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:  # an unclosed quote: no instruction we can follow
        return []
