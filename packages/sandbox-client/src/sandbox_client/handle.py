"""A sandbox as its user holds it."""

import contextlib
import io
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from service_kit.streams import with_idle_deadline
from tailrace.sandbox.v1 import sandbox_service_pb2 as pb

from sandbox_client import wire
from sandbox_client.connection import Connection, typed_errors
from sandbox_client.environments import EnvironmentTree
from sandbox_client.errors import SandboxGone, SandboxUnavailable
from sandbox_client.types import Command, ExecResult, FileContent, SnapshotInfo

__all__ = ["OutputEvent", "Sandbox", "Snapshot"]

_DEFAULT_OUTPUT_BYTES = 10_000
# Above this a command's call streams, so that its heartbeats show that the service is alive.
_LONG_COMMAND_S = 60.0
_IDLE_S = 30.0
# Nested repositories, submodules and work trees too. The new one has a single commit, so that `git
# diff` shows what is changed from here on; without git there is none.
_FORGET_HISTORY = """\
set -e
found=$(find . -name .git -prune -print | head -1)
test -n "$found" || exit 0
find . -name .git -prune -exec rm -rf {} +
command -v git >/dev/null || exit 0
git() { command git -c safe.directory='*' -c user.name=task -c user.email=task@localhost "$@"; }
git init -q && git add -A && git commit -q --no-verify --allow-empty -m task
"""


@dataclass(frozen=True)
class OutputEvent:
    """A piece of a running command's output."""

    stream: str
    """"stdout" or "stderr"."""
    data: bytes


class Snapshot:
    """A handle for the files that a sandbox had. As a context manager it ends at the end.

    Its lease is renewed by the client that made it. Sandboxes that started from it outlive it.
    """

    def __init__(self, connection: Connection, info: SnapshotInfo) -> None:
        self._connection = connection
        self.id = info.snapshot_id
        self.size_bytes = info.size_bytes
        """What it takes up on the host beside what its sandbox started from."""
        connection.snapshot_ids.add(self.id)

    @property
    def gone(self) -> bool:
        """Whether it has been destroyed, or the service said that it is not there any more."""
        return self.id not in self._connection.snapshot_ids

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.destroy()

    async def destroy(self) -> bool:
        """Ends its lease: nothing new starts from it; False if it was gone already."""
        return await self._connection.destroy_snapshot(self.id)


class Sandbox:
    """A handle for one sandbox. As a context manager it destroys the sandbox at the end."""

    def __init__(self, connection: Connection, sandbox_id: str, workdir: str) -> None:
        self._connection = connection
        self.id = sandbox_id
        self.workdir = workdir
        self.gone = False
        """Set when the service says that it is not living any more."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.destroy()

    async def run(
        self,
        command: Command | str,
        *,
        timeout_s: float = 0.0,
        cwd: str = "",
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
        max_output_bytes: int = _DEFAULT_OUTPUT_BYTES,
        merge_stderr: bool = False,
        user: str = "",
    ) -> ExecResult:
        """Runs a command to its end.

        Args:
            command: a shell command line, or a `Command`, which then says all the rest.
            timeout_s: the command's own time; 60 if 0. After it, everything it started is killed.
            cwd: relative to the work folder.
            env: variables to add.
            stdin: standard input; default: empty.
            max_output_bytes: bytes kept of each stream.
            merge_stderr: standard error goes where standard output goes.
            user: name or number of the user to run as; default: the sandbox's own.

        Returns:
            The result. A command that fails, is not found or runs into its limits is a result too.
        """
        if isinstance(command, str):
            command = Command(
                shell=command,
                cwd=cwd,
                env=env or {},
                timeout_s=timeout_s,
                max_output_bytes=max_output_bytes,
                merge_stderr=merge_stderr,
                user=user,
            )
        command = _explicit(command)
        if stdin is None and command.timeout_s <= _LONG_COMMAND_S:
            with self._call():
                response = await self._connection.stub.Run(
                    pb.RunRequest(command=wire.command_to_proto(self.id, command)),
                    timeout=command.timeout_s + self._connection.timeout_s,
                )
            return wire.result_from_proto(
                response.ended, response.stdout, response.stderr, command.max_output_bytes
            )
        async for event in self.stream(command, stdin=stdin or b""):
            if isinstance(event, ExecResult):
                return event
        raise AssertionError("a stream ends with its result or an error")

    async def stream(
        self, command: Command | str, *, stdin: bytes | AsyncIterator[bytes] = b""
    ) -> AsyncIterator[OutputEvent | ExecResult]:
        """Runs a command and yields its output as it comes, then its result.

        Leaving the iteration early kills the command.
        """
        if isinstance(command, str):
            command = Command(shell=command)
        command = _explicit(command)
        kept: dict[str, list[bytes]] = {"stdout": [], "stderr": []}
        with self._call():
            call = self._connection.stub.Exec(
                _exec_requests(wire.command_to_proto(self.id, command), stdin),
                timeout=command.timeout_s + self._connection.timeout_s,
            )
            events = with_idle_deadline(call, _IDLE_S, f"Exec in sandbox {self.id}")
            async with contextlib.aclosing(events):  # type: ignore[type-var]
                async for event in events:
                    match event.WhichOneof("event"):
                        case "stdout" | "stderr" as stream:
                            data = getattr(event, stream)
                            kept[stream].append(data)
                            yield OutputEvent(stream, data)
                        case "ended":
                            yield wire.result_from_proto(
                                event.ended,
                                b"".join(kept["stdout"]),
                                b"".join(kept["stderr"]),
                                command.max_output_bytes,
                            )

    async def write(self, path: str, content: bytes | str, *, mode: int = 0) -> None:
        """Writes one file."""
        data = content.encode() if isinstance(content, str) else content
        await self.write_files([FileContent(path, data, mode)])

    async def write_files(self, files: Sequence[FileContent]) -> None:
        """Writes small files in one call (together below the message limit of 4 MiB)."""
        request = pb.WriteFilesRequest(
            sandbox_id=self.id, files=[wire.file_to_proto(file) for file in files]
        )
        with self._call():
            await self._connection.stub.WriteFiles(request, timeout=self._connection.timeout_s)

    async def read(self, path: str, *, max_bytes: int = 0) -> bytes:
        """Reads a file; `TooLarge` if it is longer than `max_bytes` (0: the service's limit)."""
        request = pb.ReadFileRequest(sandbox_id=self.id, path=path, max_bytes=max_bytes)
        with self._call():
            call = self._connection.stub.ReadFile(request, timeout=self._connection.timeout_s)
            return b"".join([response.chunk async for response in call])

    async def upload(self, tree: EnvironmentTree, path: str = ".") -> None:
        """Puts a tree's files into a folder of the sandbox."""
        target = pb.UploadTreeTarget(sandbox_id=self.id, path=path)

        async def requests() -> AsyncIterator[pb.UploadTreeRequest]:
            yield pb.UploadTreeRequest(target=target)
            for chunk in wire.chunks(tree.tar_bytes()):
                yield pb.UploadTreeRequest(tar_chunk=chunk)

        with self._call():
            await self._connection.stub.UploadTree(requests(), timeout=self._connection.timeout_s)

    async def download(self, path: str = ".") -> bytes:
        """A folder of the sandbox as a tar archive."""
        request = pb.DownloadTreeRequest(sandbox_id=self.id, path=path)
        out = io.BytesIO()
        with self._call():
            call = self._connection.stub.DownloadTree(request, timeout=self._connection.timeout_s)
            async for response in call:
                out.write(response.tar_chunk)
        return out.getvalue()

    async def diff(self, *, max_bytes: int = 0) -> bytes:
        """The work folder against its environment, in git's format; empty if nothing changed."""
        request = pb.DiffRequest(sandbox_id=self.id, max_bytes=max_bytes)
        with self._call():
            call = self._connection.stub.Diff(request, timeout=self._connection.timeout_s)
            return b"".join([response.chunk async for response in call])

    async def apply_patch(self, patch: bytes) -> list[str]:
        """Applies a git-format diff to the work folder; returns the paths it changed.

        Raises:
            PatchRejected: it does not apply; nothing was changed.
        """
        target = pb.ApplyPatchTarget(sandbox_id=self.id)

        async def requests() -> AsyncIterator[pb.ApplyPatchRequest]:
            yield pb.ApplyPatchRequest(target=target)
            for chunk in wire.chunks(patch):
                yield pb.ApplyPatchRequest(chunk=chunk)

        with self._call():
            response = await self._connection.stub.ApplyPatch(
                requests(), timeout=self._connection.timeout_s
            )
        return list(response.changed_paths)

    async def forget_history(self, *, timeout_s: float = 120.0) -> None:
        """Replaces git's repositories in the work folder by one with a single commit of its files.

        Branches, tags, remotes, stashes, reflogs and objects that nothing refers to go with them.

        Raises:
            SandboxUnavailable: it could not be done.
        """
        result = await self.run(
            Command(shell=_FORGET_HISTORY, timeout_s=timeout_s, merge_stderr=True)
        )
        if result.exit_code != 0:
            said = result.stdout_bytes[-300:].decode("utf-8", "replace")
            raise SandboxUnavailable(
                f"git's history could not be taken out of sandbox {self.id} (exit code "
                f"{result.exit_code}, timed out: {result.timed_out}): {said}"
            )

    async def snapshot(self, *, key: str = "") -> Snapshot:
        """Keeps its files, so that other sandboxes can start from them: `create(snapshot=...)`.

        Processes are not part of it, and no command may be running. A `diff` of a sandbox that
        starts from it shows what was changed since.

        Args:
            key: idempotency key: the same key gives the same snapshot. Default: a new one.

        Raises:
            WrongRequest: a command is running, or the back-end cannot do it.
            QuotaExhausted: there are too many, or they do not fit.
        """
        request = pb.SnapshotSandboxRequest(
            sandbox_id=self.id,
            idempotency_key=key or uuid.uuid4().hex,
            lease_s=self._connection.lease_s,
        )
        with self._call():
            response = await self._connection.stub.SnapshotSandbox(
                request, timeout=self._connection.timeout_s
            )
        return Snapshot(self._connection, wire.snapshot_from_proto(response))

    async def destroy(self) -> bool:
        """Ends the sandbox; False if it was gone already."""
        self.gone = True
        return await self._connection.destroy(self.id)

    @contextlib.contextmanager
    def _call(self) -> Iterator[None]:
        try:
            with typed_errors():
                yield
        except SandboxGone:
            self.gone = True
            raise


def _explicit(command: Command) -> Command:
    """Names the output's bound and the time, which the client needs to know itself."""
    return replace(
        command,
        max_output_bytes=command.max_output_bytes or _DEFAULT_OUTPUT_BYTES,
        timeout_s=command.timeout_s or _LONG_COMMAND_S,
    )


async def _exec_requests(
    command: pb.Command, stdin: bytes | AsyncIterator[bytes]
) -> AsyncIterator[pb.ExecRequest]:
    yield pb.ExecRequest(command=command)
    if isinstance(stdin, bytes):
        for chunk in wire.chunks(stdin):
            yield pb.ExecRequest(stdin=chunk)
    else:
        async for chunk in stdin:
            yield pb.ExecRequest(stdin=chunk)
    yield pb.ExecRequest(stdin_eof=True)
