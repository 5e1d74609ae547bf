"""A generated task: everything the world needs to pose it and the grader to judge it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from swe_eval.generate.names import Split

__all__ = ["GeneratedTask", "unified_patch"]


@dataclass(frozen=True)
class GeneratedTask:
    """One repository with one bug, an issue about it, and the tests that judge a repair."""

    task_id: str
    """Unique: split, index and kind are part of it."""
    repository: str
    """Name of the repository; belongs to one split alone."""
    split: Split
    kind: str
    """Kind of bug, one of `swe_eval.generate.KINDS`."""
    instruction: str
    """The issue: a title, an empty line, a short report."""
    files: Mapping[str, str]
    """What the agent finds, visible tests included: relative path to text."""
    hidden_tests: Mapping[str, str]
    """Test files that exist only while a repair is graded."""
    fail_to_pass: tuple[str, ...]
    """Ids (`file::test`) of hidden tests that fail now and must pass after the repair."""
    pass_to_pass: tuple[str, ...]
    """Ids of hidden tests that pass now and must go on passing."""
    gold_patch: str
    """Unified diff with `a/` and `b/` prefixes that undoes the bug."""
    module: str
    """Path of the file that holds the bug."""
    function: str
    """Name of the broken function or class."""
    line: int
    """First line that the gold patch touches in the broken file, from 1."""
    fingerprint: str
    """Identity of the bug: a digest of the function's text before and after it."""

    @property
    def metadata(self) -> dict[str, str | int]:
        """What reports group by, as plain values."""
        return {
            "repository": self.repository,
            "split": self.split.value,
            "kind": self.kind,
            "module": self.module,
            "function": self.function,
            "line": self.line,
            "fingerprint": self.fingerprint,
        }


def unified_patch(path: str, before: str, after: str) -> str:
    """A diff that `git apply` and `patch -p1` take, turning `before` into `after` at `path`."""
    lines = difflib.unified_diff(
        _lines(before),
        _lines(after),
        fromfile=f"a/{path}",
        tofile=f"b/{path}",
    )
    return f"diff --git a/{path} b/{path}\n" + "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
    )


def _lines(text: str) -> list[str]:
    """As git counts them: `splitlines` also ends lines at form feeds and the like."""
    *lines, last = text.split("\n")
    return [*(f"{line}\n" for line in lines), *([last] if last else [])]
