"""Whose ids the service and its sandboxes have: root's, or an ordinary user's in a user namespace.

The service needs root's rights over namespaces of its own. Where it lacks them it starts over in a
user namespace, in which it is root and which gives it no right over anything of the host's.
"""

import json
import os
import pwd
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from sandbox_client.backends.local import jail

__all__ = [
    "Ids",
    "first_subordinate",
    "found_ids",
    "ids_from",
    "inside_user_namespace",
    "lacking_capabilities",
    "subordinate_ids",
    "user_namespace_problem",
    "with_jail_alone",
]

_NEEDED_CAPABILITIES = {"CAP_SYS_ADMIN": 21, "CAP_SETUID": 7, "CAP_SETGID": 6, "CAP_CHOWN": 0}
_TRIAL_TIMEOUT_S = 30.0
# The jail's modules, without what the packages above them would import.
_JAIL_ALONE = """\
import sys, types
for name in ("sandbox_client", "sandbox_client.backends", "sandbox_client.backends.local"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = []
sys.modules[name].__path__ = [sys.argv.pop(1)]
"""
_ENTER = """\
import json, sys
from sandbox_client.backends.local.jail import own_users
own_users.enter(*json.loads(sys.argv[1]))
"""
_TRY = """\
from sandbox_client.backends.local.jail import own_users
own_users.try_isolation()
"""


@dataclass(frozen=True)
class Ids:
    """The sandboxes' user as the service sees it."""

    uid: int
    gid: int
    rootless: bool
    """The service is root in a user namespace only."""

    @property
    def opaque_mark(self) -> str:
        """The attribute by which an overlay marks a folder that hides the one below it."""
        return "user.overlay.opaque" if self.rootless else "trusted.overlay.opaque"

    @property
    def shared(self) -> bool:
        """Commands run under the service's own id."""
        return self.uid == 0


def found_ids(uid: int, gid: int) -> Ids:
    """The ids that commands get here if they are to see `uid` and `gid` as theirs."""
    proc = Path("/proc/self")
    if not (proc / "uid_map").exists():
        return Ids(uid, gid, rootless=False)  # the kernel has no user namespaces
    return ids_from(
        (proc / "uid_map").read_text(encoding="ascii"),
        (proc / "gid_map").read_text(encoding="ascii"),
        uid,
        gid,
    )


def ids_from(uid_map: str, gid_map: str, uid: int, gid: int) -> Ids:
    """The same in a user namespace of these maps; the host's own maps everything to itself."""
    if uid_map.split() == ["0", "0", "4294967295"]:
        return Ids(uid, gid, rootless=False)
    if _is_mapped(uid_map, uid) and _is_mapped(gid_map, gid):
        return Ids(uid, gid, rootless=True)
    return Ids(0, 0, rootless=True)


def _is_mapped(text: str, number: int) -> bool:
    ranges = [[int(field) for field in line.split()] for line in text.splitlines()]
    return any(first <= number < first + count for first, _, count in ranges)


def lacking_capabilities() -> list[str]:
    """Names of what this process lacks of root's rights."""
    effective = 0
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("CapEff:"):
            effective = int(line.split()[1], 16)
    return [name for name, bit in _NEEDED_CAPABILITIES.items() if not effective >> bit & 1]


def inside_user_namespace(argv: list[str], uid: int, gid: int) -> list[str]:
    """The command line that runs `argv` as root of a new user namespace.

    Args:
        argv: program, by its path, and arguments.
        uid: what commands are to see as their user; it gets a subordinate id if there is one.
        gid: the same of their group.
    """
    return with_jail_alone(_ENTER, json.dumps([argv, subordinate_ids(uid, gid)]))


def user_namespace_problem() -> str:
    """What keeps an ordinary user of this host from isolating sandboxes; empty if nothing does."""
    done = subprocess.run(
        with_jail_alone(_TRY), capture_output=True, text=True, check=False, timeout=_TRIAL_TIMEOUT_S
    )
    if done.returncode == 0:
        return ""
    return done.stdout or done.stderr.strip().rpartition("\n")[2] or "the trial ended at once"


def with_jail_alone(program: str, *arguments: str) -> list[str]:
    """The command line of a Python program that imports nothing but the jail: it starts at once."""
    folder = str(Path(jail.__file__).parent.parent)
    program = _JAIL_ALONE + program
    return [sys.executable, "-I", "-S", "-B", "-c", program, folder, *arguments]


def subordinate_ids(uid: int, gid: int) -> dict[str, tuple[int, int]] | None:
    """One subordinate id of each kind, as (id inside, id outside), if this user has any."""
    if not (shutil.which("newuidmap") and shutil.which("newgidmap")):
        return None
    own = os.getuid()
    try:
        name = pwd.getpwuid(own).pw_name
    except KeyError:
        return None  # the two programs serve only users that have a name
    found = {}
    for kind, inside in (("uid", uid), ("gid", gid)):
        file = Path(f"/etc/sub{kind}")
        first = first_subordinate(file.read_text() if file.exists() else "", name, own)
        if first is None:
            return None
        found[kind] = (inside, first)
    return found


def first_subordinate(text: str, name: str, uid: int) -> int | None:
    """The first id that a text in the form of /etc/subuid gives to a user."""
    for line in text.splitlines():
        owner, _, rest = line.partition(":")
        first, _, count = rest.partition(":")
        if owner in (name, str(uid)) and first.isdigit() and count.isdigit() and int(count) > 0:
            return int(first)
    return None
