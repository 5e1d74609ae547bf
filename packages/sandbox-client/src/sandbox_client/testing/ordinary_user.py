# ruff: noqa: PTH103, PTH110, PTH112, PTH116, PTH123 -- is also a program that imports very little
"""Starting a program as a user who is not root, from a test that is.

The user finds the host as it is, with two exceptions: this interpreter and its packages can be read
where they lie in somebody's home, and the user may have a name and subordinate ids.
"""

import json
import os
import stat
import sys
from dataclasses import dataclass

from sandbox_client.backends.local.jail import kernel

__all__ = ["OrdinaryUser"]


@dataclass(frozen=True)
class OrdinaryUser:
    """A user of the tests' own."""

    uid: int
    subordinate: int = 0
    """The first of the user's subordinate ids; 0 for none."""

    @property
    def commands_uid(self) -> int:
        """The host's id under which the commands of this user's sandboxes run."""
        return self.subordinate or self.uid

    def command(self, argv: list[str]) -> list[str]:
        """The command line by which root starts `argv` as this user, in the same process."""
        from pathlib import Path

        from sandbox_client.backends.local.users import with_jail_alone

        needed = {sys.base_prefix, sys.prefix, *(entry for entry in sys.path if entry)}
        arguments = [argv, self.uid, self.subordinate, sorted(map(os.path.realpath, needed))]
        text = Path(__file__).read_text(encoding="utf-8")
        return with_jail_alone(text, json.dumps(arguments))


def main() -> None:
    """What the started program does; does not return."""
    argv, uid, subordinate, needed = json.loads(sys.argv[1])
    kernel.unshare(kernel.CLONE_NEWNS)
    kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    _show([path for path in needed if os.path.isdir(path)])
    if subordinate:
        _name_user(uid, subordinate)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    os.execv(argv[0], argv)  # noqa: S606


def _show(folders: list[str]) -> None:
    """Makes folders readable at their own paths, and nothing else beside them."""
    sources = {folder: os.open(folder, os.O_PATH) for folder in folders}
    covered: list[str] = []
    for folder in folders:
        closed = _closed_folder_above(folder)
        if closed and not any(f"{closed}/".startswith(f"{c}/") for c in covered):
            covered.append(closed)
    for closed in covered:
        kernel.mount("tmpfs", closed, "tmpfs", kernel.MS_NOSUID, "mode=755")
    shown: list[str] = []
    for folder in folders:  # in their order, so that a folder comes before those below it
        inside = any(f"{folder}/".startswith(f"{c}/") for c in covered)
        if inside and not any(f"{folder}/".startswith(f"{s}/") for s in shown):
            os.makedirs(folder, exist_ok=True)
            kernel.mount(f"/proc/self/fd/{sources[folder]}", folder, flags=kernel.MS_BIND)
            shown.append(folder)


def _closed_folder_above(path: str) -> str:
    """The first folder on the way to `path` that others may not pass; empty if there is none."""
    above = ""
    for part in path.split("/")[1:]:
        above = f"{above}/{part}"
        if not os.stat(above).st_mode & stat.S_IXOTH:
            return above
    return ""


def _name_user(uid: int, subordinate: int) -> None:
    """Puts files on top of those of /etc, for this process and its children."""
    kernel.mount("tmpfs", "/mnt", "tmpfs", kernel.MS_NOSUID, "mode=755")
    with open("/etc/passwd", encoding="utf-8") as file:
        users = file.read()
    ids = f"tester:{subordinate}:65536\n"
    for name, text in (
        ("passwd", f"{users}tester:x:{uid}:{uid}::/:/bin/sh\n"),
        ("subuid", ids),
        ("subgid", ids),
    ):
        with open(f"/mnt/{name}", "w", encoding="utf-8") as file:
            file.write(text)
        if os.path.exists(f"/etc/{name}"):
            kernel.mount(f"/mnt/{name}", f"/etc/{name}", flags=kernel.MS_BIND)


if __name__ == "__main__":
    main()
