# ruff: noqa: PTH101, PTH102, PTH103, PTH112, PTH113, PTH114, PTH115, PTH120, PTH123, PTH211 -- keeps the fork-server small: no pathlib
"""Building the root folder that all sandboxes share, in a mount namespace of its own.

The root is made of nothing but what is named: system folders read-only, a few files of /etc, the
interpreter, device nodes. Home folders, /run, sockets and everything else of the host are not
masked but absent. Sandboxes get their writable folders as mounts on top.

What the fork-server needs beside that lies in one folder with a mount of its own, which a sandbox
takes away before its first command.
"""

import errno
import os
import shutil
import stat

from sandbox_client.backends.local.jail import kernel
from sandbox_client.backends.local.jail.boot import CODE_FOLDER

__all__ = [
    "ENVIRONMENTS",
    "PYTHON_PREFIX",
    "SHIM_FOLDER",
    "STAGING",
    "build_template",
    "enter",
]

PYTHON_PREFIX = "/opt/python"
SHIM_FOLDER = "/opt/tailrace/bin"
ENVIRONMENTS = f"{CODE_FOLDER}/trees"
STAGING = f"{CODE_FOLDER}/staging"
"""Where a sandbox's own tmpfs stands while the sandbox is being set up."""
_PROC = f"{CODE_FOLDER}/proc"
"""In a user namespace the kernel mounts a /proc only where another one can be seen."""

_MERGED_LINKS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_ETC = (
    "alternatives",
    "bash.bashrc",
    "debian_version",
    "inputrc",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "magic",
    "mime.types",
    "nsswitch.conf",
    "os-release",
    "protocols",
    "services",
    "timezone",
)
_DEVICES = {"null": (1, 3), "zero": (1, 5), "full": (1, 7), "random": (1, 8), "urandom": (1, 9)}


def build_template(
    root: str,
    *,
    visible: list[str],
    masked: list[str],
    python_prefix: str,
    link_python_home: bool,
    shim: str | None,
    python_binary: str,
    site_folders: list[str],
    site_packages: str | None,
    environments: str,
    user: tuple[str, int, int],
    rootless: bool,
) -> None:
    """Mounts and fills the template root at `root`. Only this mount namespace sees any of it.

    Args:
        root: an existing folder to mount on.
        visible: host folders shown at their own path, read-only.
        masked: host folders that must not show through any of those.
        python_prefix: the host's interpreter, shown at `PYTHON_PREFIX`.
        link_python_home: make its own path lead there too (its libraries are found by that path).
        shim: program to stand in for `python` on the sandbox's PATH; None: the interpreter itself.
        python_binary: the interpreter's path below the prefix, such as "bin/python3.11".
        site_folders: the interpreter's folders of installed packages, which are hidden.
        site_packages: folder shown in place of the first of them, if any.
        environments: the host's folder of stored environments.
        user: name, uid and gid that commands run as.
        rootless: this process is root in a user namespace only.
    """
    kernel.unshare(kernel.CLONE_NEWNS)
    kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmpfs", root, "tmpfs", kernel.MS_NOSUID, "mode=755,size=16m")
    for name in ("dev", "etc", "opt", "proc", "run", "sys", "tmp", "var", "var/tmp", "root"):
        os.mkdir(f"{root}/{name}", 0o755)
    os.mkdir(root + CODE_FOLDER, 0o700)
    flags = kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("tmpfs", root + CODE_FOLDER, "tmpfs", flags, "mode=700,size=16m")
    for own in (ENVIRONMENTS, STAGING, _PROC):
        os.mkdir(root + own, 0o700)
    if rootless:
        kernel.mount("proc", root + _PROC, "proc", flags | kernel.MS_NOEXEC)
    _bind_system_folders(root, visible)
    _bind(python_prefix, root + PYTHON_PREFIX)
    _fill_dev(f"{root}/dev")
    _fill_etc(f"{root}/etc", user)
    _place_python(root, shim, python_binary)
    if link_python_home and not os.path.lexists(root + python_prefix):
        os.makedirs(os.path.dirname(root + python_prefix), exist_ok=True)
        os.symlink(PYTHON_PREFIX, root + python_prefix)
    views = [*((v, v) for v in visible), (python_prefix, PYTHON_PREFIX)]
    for folder in dict.fromkeys([*masked, *site_folders]):
        for shown, at in views:
            if folder == shown or folder.startswith(shown.rstrip("/") + "/"):
                _mask(root + at + folder[len(shown) :])
    if site_packages is not None and site_folders[0].startswith(f"{python_prefix}/"):
        _bind(site_packages, root + PYTHON_PREFIX + site_folders[0][len(python_prefix) :])
    kernel.mount(environments, root + ENVIRONMENTS, flags=kernel.MS_BIND)


def enter(root: str) -> None:
    """Makes `root` the root of this process and lets go of the host's file systems."""
    os.chdir(root)
    kernel.pivot_root(".", ".")
    # Old and new root are stacked on "/"; the old one is on top.
    kernel.umount(".")
    os.chdir("/")


def _bind_system_folders(root: str, visible: list[str]) -> None:
    for folder in visible:
        _bind(folder, root + folder)
    for name in _MERGED_LINKS:
        host = f"/{name}"
        if os.path.lexists(root + host) or not os.path.lexists(host):
            continue
        if os.path.islink(host):
            os.symlink(os.readlink(host), root + host)
        else:
            _bind(host, root + host)


def _bind(source: str, target: str) -> None:
    """Shows a host folder read-only, and mounts below it only where they cannot be left out."""
    os.makedirs(target, exist_ok=True)
    try:
        kernel.mount(source, target, flags=kernel.MS_BIND)
    except OSError as error:
        # In a user namespace it is not allowed to look below what the host has mounted there.
        if error.errno != errno.EINVAL:
            raise
        kernel.mount(source, target, flags=kernel.MS_BIND | kernel.MS_REC)
    _restrict(target, kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV)


def _restrict(target: str, flags: int) -> None:
    try:
        kernel.restrict_tree(target, flags)
    except OSError as error:
        # Before Linux 5.12, where a user namespace would not do anyway.
        if error.errno != errno.ENOSYS:
            raise
        kernel.mount("none", target, flags=kernel.MS_BIND | kernel.MS_REMOUNT | flags)


def _mask(target: str) -> None:
    if not os.path.isdir(target):
        return
    flags = kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("tmpfs", target, "tmpfs", flags, "mode=755,size=4k")


def _fill_dev(dev: str) -> None:
    for name, (major, minor) in _DEVICES.items():
        path = f"{dev}/{name}"
        try:
            os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(major, minor))
            os.chmod(path, 0o666)  # noqa: S103 -- a device node
            os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
        except PermissionError:
            # No mknod here (user namespaces, some containers): show the host's node instead.
            with open(path, "wb"):
                pass
            kernel.mount(f"/dev/{name}", path, flags=kernel.MS_BIND)
            _restrict(path, kernel.MS_NOSUID | kernel.MS_NOEXEC)
    for name, target in (
        ("fd", "/proc/self/fd"),
        ("stdin", "/proc/self/fd/0"),
        ("stdout", "/proc/self/fd/1"),
        ("stderr", "/proc/self/fd/2"),
        # Shared memory counts against the sandbox's own tmpfs.
        ("shm", "/tmp"),  # noqa: S108 -- inside the sandbox
    ):
        os.symlink(target, f"{dev}/{name}")


def _fill_etc(etc: str, user: tuple[str, int, int]) -> None:
    for name in _ETC:
        host = f"/etc/{name}"
        if os.path.isdir(host):
            shutil.copytree(host, f"{etc}/{name}", symlinks=True)
        elif os.path.isfile(host):
            shutil.copyfile(host, f"{etc}/{name}")
    name, uid, gid = user
    written = {
        "group": f"root:x:0:\n{name}:x:{gid}:\n",
        "hostname": "sandbox\n",
        "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
        "passwd": f"root:x:0:0:root:/root:/bin/sh\n{name}:x:{uid}:{gid}:{name}:/tmp:/bin/sh\n",
        "resolv.conf": "",
    }
    for file, text in written.items():
        with open(f"{etc}/{file}", "w", encoding="utf-8") as out:
            out.write(text)


def _place_python(root: str, shim: str | None, python_binary: str) -> None:
    folder = root + SHIM_FOLDER
    os.makedirs(folder)
    real = f"{PYTHON_PREFIX}/{python_binary}"
    if shim is not None:
        shutil.copyfile(shim, f"{folder}/python")
        os.chmod(f"{folder}/python", 0o755)  # noqa: S103 -- a program
        os.symlink("python", f"{folder}/python3")
    else:
        os.symlink(real, f"{folder}/python")
        os.symlink(real, f"{folder}/python3")
