"""What the messages say that are more than a word and a number; see `wire`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sandbox_client.backends.local.jail import wire

__all__ = ["Create", "Exec"]


@dataclass(frozen=True)
class Create:
    """Make a sandbox. Beside it: its channel, then files to join its cgroups with."""

    sandbox_id: str
    workdir: str
    rlimits: Sequence[tuple[int, int]]
    """(resource, limit) pairs for this sandbox alone."""
    disk_bytes: int
    inodes: int
    lower: Sequence[str]
    """Stored layers of the work folder, the uppermost first."""
    mounts: Mapping[int, str]
    """Which of the writable folders -> the stored layer that it starts from."""

    def fields(self) -> list[wire.Field]:
        """The message."""
        limits = [number for pair in self.rlimits for number in pair]
        contents = [field for mount in self.mounts.items() for field in mount]
        head: list[wire.Field] = ["create", self.sandbox_id, self.workdir, len(limits), *limits]
        head += [self.disk_bytes, self.inodes, len(self.lower), *self.lower]
        return [*head, len(contents), *contents]

    @classmethod
    def read(cls, fields: wire.Reader) -> "Create":
        """The message, after its first field."""
        sandbox_id, workdir = fields.text(), fields.text()
        limits = [int(text) for text in fields.texts()]
        disk_bytes, inodes, lower = fields.number(), fields.number(), fields.texts()
        contents = fields.texts()
        mounts = {int(n): layer for n, layer in zip(contents[::2], contents[1::2], strict=True)}
        rlimits = tuple(zip(limits[::2], limits[1::2], strict=True))
        return cls(sandbox_id, workdir, rlimits, disk_bytes, inodes, lower, mounts)


@dataclass(frozen=True)
class Exec:
    """Run a command. Beside it: its three standard streams."""

    number: int
    cwd: str
    shell: str | None
    """The command as a shell would read it, if that is how it was given."""
    argv: Sequence[str]
    """The program and its arguments; empty if only a shell can tell."""
    environ: Mapping[str, str]

    def fields(self) -> list[wire.Field]:
        """The message."""
        head: list[wire.Field] = ["exec", self.number, self.cwd]
        head += [int(self.shell is not None), self.shell or "", len(self.argv), *self.argv]
        return [*head, *(f"{name}={value}" for name, value in self.environ.items())]

    @classmethod
    def read(cls, fields: wire.Reader) -> "Exec":
        """The message, after its first field."""
        number, cwd = fields.number(), fields.text()
        has_shell, shell, argv = fields.number(), fields.text(), fields.texts()
        environ = dict(variable.split("=", 1) for variable in fields.rest())
        return cls(number, cwd, shell if has_shell else None, argv, environ)
