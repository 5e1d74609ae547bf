"""Patches in git's format, turned round."""

import re

_HUNK = re.compile(r"@@ -(\d+(?:,\d+)?) \+(\d+(?:,\d+)?) @@(.*)", re.DOTALL)
_SWAPS = (
    (re.compile(r"diff --git a/(.+) b/(.+)"), r"diff --git a/\2 b/\1"),
    (re.compile(r"index ([0-9a-f]+)\.\.([0-9a-f]+)(.*)"), r"index \2..\1\3"),
    (re.compile(r"new file mode (\d+)"), r"deleted file mode \1"),
    (re.compile(r"deleted file mode (\d+)"), r"new file mode \1"),
    (re.compile(r"old mode (\d+)"), r"new mode \1"),
    (re.compile(r"new mode (\d+)"), r"old mode \1"),
    (re.compile(r"rename from (.+)"), r"rename to \1"),
    (re.compile(r"rename to (.+)"), r"rename from \1"),
)
_FINAL = ("GIT binary patch", "Binary files ", "copy from ")
_TURNED = {"-": "+", "+": "-"}


class MalformedPatchError(ValueError):
    """Something that can't be turned round; the message says which line and why."""


def reverse_patch(patch: str) -> str:
    """The patch that undoes another.

    Raises:
        MalformedPatchError: it is no patch, or it copies files or changes binary ones, which can't
            be undone by its text.
    """
    out: list[str] = []
    old = new = 0  # lines of the hunk that are still to come
    end = "\n" if patch.endswith("\n") else ""
    for number, line in enumerate(patch.removesuffix("\n").split("\n"), start=1):
        sign = line[:1]
        if old or new or sign == "\\":
            old -= sign in ("-", " ", "")  # some tools strip the blank of an empty line
            new -= sign in ("+", " ", "")
            if (sign and sign not in "-+ \\") or old < 0 or new < 0:
                raise MalformedPatchError(f"line {number} is no line of a hunk: {line[:80]!r}")
            out.append(_TURNED.get(sign, sign) + line[1:])
        elif (hunk := _HUNK.fullmatch(line)) is not None:
            old, new = (int(part.partition(",")[2] or 1) for part in hunk.groups()[:2])
            out.append(f"@@ -{hunk[2]} +{hunk[1]} @@{hunk[3]}")
        elif line.startswith(_FINAL):
            raise MalformedPatchError(f"line {number} can't be turned round: {line[:80]!r}")
        elif line.startswith("+++ ") and out and out[-1].startswith("--- "):
            before = out.pop()[4:]
            out += ["--- " + _renamed(line[4:], "b/", "a/"), "+++ " + _renamed(before, "a/", "b/")]
        else:
            out.append(_turned_header(line))
    if old or new:
        raise MalformedPatchError("the last hunk is cut off")
    return "\n".join(out) + end


def _renamed(name: str, prefix: str, other: str) -> str:
    quote = '"' if name.startswith('"') else ""
    start = quote + prefix
    return quote + other + name[len(start) :] if name.startswith(start) else name


def _turned_header(line: str) -> str:
    for pattern, turned in _SWAPS:
        match = pattern.fullmatch(line)
        if match is not None:
            return match.expand(turned)
    return line
