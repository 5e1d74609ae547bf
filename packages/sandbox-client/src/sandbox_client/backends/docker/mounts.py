"""The writable files of a container, made on this host: a tmpfs of fixed size, overlays in it.

The container gets folders by bind mounts and never sees the upper layer of its work folder, so what
differs from the environment can be read from there. All of it is below `<base>/<sandbox id>`.
"""

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sandbox_client.backends.local.jail import kernel

__all__ = ["Origin", "SandboxMounts", "leftover_mounts", "make_mounts", "remove_mounts"]

_FLAGS = kernel.MS_NOSUID | kernel.MS_NODEV
_OVERLAY = "index=off,metacopy=off,redirect_dir=off,xino=off"
# The layers' paths stand in a comma-separated list, separated by colons.
_AWKWARD = ",:\\"


@dataclass(frozen=True)
class Origin:
    """What a sandbox's folders start from."""

    layers: tuple[Path, ...]
    """The work folder's, the uppermost first."""
    writable: tuple[str, ...]
    """Paths of the other writable folders in the container."""
    contents: Mapping[int, Path] = field(default_factory=dict)
    """The content of those that are not empty at first, by their number."""


@dataclass(frozen=True)
class SandboxMounts:
    """The folders of one sandbox."""

    folder: Path
    origin: Origin

    @property
    def work(self) -> Path:
        """The work folder."""
        return self.folder / "merged"

    @property
    def upper(self) -> Path:
        """The upper layer of its overlay."""
        return self.folder / "upper"

    @property
    def lower(self) -> Path:
        """All that lies below that layer, as one folder."""
        layers = self.origin.layers
        return layers[0] if len(layers) == 1 else self.folder / "view"

    @property
    def binds(self) -> dict[str, Path]:
        """The other writable folders: path in the container -> here."""
        folders = {
            path: self.folder / (f"merged{n}" if n in self.origin.contents else f"mount{n}")
            for n, path in enumerate(self.origin.writable)
        }
        return {**folders, "/dev/shm": self.folder / "shm"}  # noqa: S108 -- in the container


def make_mounts(
    base: Path,
    sandbox_id: str,
    origin: Origin,
    *,
    disk_bytes: int,
    inodes: int,
    owner: tuple[int, int],
) -> SandboxMounts:
    """Makes the folders of a sandbox.

    Raises:
        OSError: the kernel refused a mount; nothing is left behind.
    """
    mounts = SandboxMounts(base / sandbox_id, origin)
    if any(c in f"{base}{origin.layers[0]}" for c in _AWKWARD):
        raise OSError(f"state_dir must not contain any of {_AWKWARD!r}: {base}")
    mounts.folder.mkdir(parents=True)
    try:
        options = f"size={disk_bytes},nr_inodes={inodes},mode=700"
        kernel.mount("tmpfs", str(mounts.folder), "tmpfs", _FLAGS, options)
        names = ["upper", "shm", *(f"mount{n}" for n in range(len(origin.writable)))]
        for name in names:
            _make_folder(mounts.folder / name, owner)
        if len(origin.layers) > 1:
            _mount_overlay(mounts.folder / "view", origin.layers)
        _mount_overlay(mounts.work, origin.layers, mounts.upper, owner)
        for number, content in origin.contents.items():
            upper = mounts.folder / f"mount{number}"
            _mount_overlay(mounts.folder / f"merged{number}", [content], upper, owner)
    except BaseException:
        remove_mounts(mounts.folder)
        raise
    return mounts


def _make_folder(path: Path, owner: tuple[int, int]) -> None:
    path.mkdir()
    path.chmod(0o755)
    os.chown(path, *owner)


def _mount_overlay(
    target: Path,
    layers: Sequence[Path],
    upper: Path | None = None,
    owner: tuple[int, int] = (0, 0),
) -> None:
    """Mounts layers on a new folder, to be written to in `upper` if that is given."""
    target.mkdir()
    data = f"lowerdir={':'.join(map(str, layers))},{_OVERLAY}"
    flags = _FLAGS
    if upper is None:
        flags |= kernel.MS_RDONLY
    else:
        work = upper.with_name(f"{upper.name}-work")
        _make_folder(work, owner)
        data += f",upperdir={upper},workdir={work}"
    kernel.mount("overlay", str(target), "overlay", flags, data)


def remove_mounts(folder: Path) -> None:
    """Removes a sandbox's folders, whatever still uses them."""
    with contextlib.suppress(OSError):  # not mounted
        kernel.umount(str(folder))  # with all that is mounted below
    with contextlib.suppress(FileNotFoundError):
        folder.rmdir()


def leftover_mounts(base: Path) -> list[Path]:
    """Folders of sandboxes that an earlier service has left behind."""
    return sorted(base.iterdir()) if base.is_dir() else []
