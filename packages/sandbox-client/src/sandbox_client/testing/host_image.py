"""A small root file system made of this host's own programs: an image without any registry."""

import io
import os
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from shutil import which
from types import MappingProxyType
from typing import IO

from sandbox_client.backends.local.host import base_python

__all__ = ["write_host_image"]

_PROGRAMS = (
    "sh bash env "
    "[ base64 basename cat chgrp chmod chown cksum comm cp cut date dd df dirname du echo expr "
    "false fold head id install join ln ls mkdir mkfifo mknod mktemp mv nice nl nohup od paste "
    "printenv printf pwd readlink realpath rm rmdir seq sha256sum shuf sleep sort split stat stty "
    "sync tac tail tee test timeout touch tr true truncate tty uname uniq unlink wc whoami yes "
    "awk cmp diff egrep find getopt git grep gzip kill mount ps sed setsid tar umount unshare xargs"
)
_SKIPPED = {
    *("site-packages", "dist-packages", "test", "tests", "idlelib", "tkinter", "ensurepip"),
    *("lib2to3", "pydoc_data", "turtledemo", "distutils"),
}
_ETC = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/sh\nagent:x:65534:65534:agent:/tmp:/bin/sh\n",
    "etc/group": "root:x:0:\nagent:x:65534:\n",
}
_FOLDERS = "dev proc sys tmp run root home usr/bin usr/sbin usr/lib usr/lib64 var/tmp opt"


def write_host_image(
    out: IO[bytes],
    *,
    programs: Sequence[str] = tuple(_PROGRAMS.split()),
    python: bool = True,
    files: Mapping[str, str | bytes] = MappingProxyType({}),
) -> None:
    """Writes a tar: programs of this host with their libraries, and Python at /opt/python.

    Args:
        out: where to.
        programs: names to look for on this host's PATH; what is not there is left out.
        python: with this interpreter and its standard library.
        files: further files: path without the leading slash -> content.
    """
    with tarfile.open(fileobj=out, mode="w") as tar:
        for folder in _FOLDERS.split():
            _add_folder(tar, folder)
        for name in ("bin", "sbin", "lib", "lib64"):
            _add_link(tar, name, f"usr/{name}")
        for path, content in {**_ETC, **files}.items():
            _add_file(tar, path, content)
        binaries = [Path(found) for name in programs if (found := which(name))]
        for binary in binaries:
            tar.add(os.path.realpath(binary), f"usr/bin/{binary.name}")
        if python:
            binaries += _add_python(tar)
        for path, library in _libraries(binaries).items():
            tar.add(os.path.realpath(library), path)


def _add_python(tar: tarfile.TarFile) -> list[Path]:
    """Adds the interpreter and its standard library; returns what needs libraries."""
    python = base_python()
    binary = python.executable
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    tar.add(os.path.realpath(binary), f"opt/python/bin/{version}")
    for name in ("python", "python3"):
        _add_link(tar, f"opt/python/bin/{name}", version)
    library = Path(sysconfig.get_path("stdlib", vars={"installed_base": str(python.prefix)}))

    def wanted(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
        names = info.name.split("/")
        unwanted = any(n in _SKIPPED or n.startswith("config-") or ".opt-" in n for n in names)
        return None if unwanted else info

    tar.add(library, f"opt/python/lib/{version}", filter=wanted)
    modules = (library / "lib-dynload").glob("*.so")
    return [Path(os.path.realpath(binary)), *(m for m in modules if "tkinter" not in m.name)]


def _libraries(binaries: list[Path]) -> dict[str, str]:
    """Shared libraries, the loader among them: path in the image -> on this host."""
    listing = subprocess.run(
        ["ldd", *map(str, binaries)], capture_output=True, text=True, check=False
    ).stdout
    words = [word for line in listing.splitlines() if line[:1] == "\t" for word in line.split()]
    # Each under the path that it is looked for by; /lib leads to /usr/lib.
    return {
        f"usr{word}" if word.startswith("/lib") else word[1:]: word
        for word in words
        if word.startswith("/")
    }


def _add_folder(tar: tarfile.TarFile, path: str) -> None:
    info = tarfile.TarInfo(path)
    info.type, info.mode = tarfile.DIRTYPE, 0o755
    tar.addfile(info)


def _add_link(tar: tarfile.TarFile, path: str, target: str) -> None:
    info = tarfile.TarInfo(path)
    info.type, info.linkname = tarfile.SYMTYPE, target
    tar.addfile(info)


def _add_file(tar: tarfile.TarFile, path: str, content: str | bytes) -> None:
    data = content.encode() if isinstance(content, str) else content
    info = tarfile.TarInfo(path)
    info.size, info.mode = len(data), 0o755 if data.startswith(b"#!") else 0o644
    tar.addfile(info, io.BytesIO(data))
