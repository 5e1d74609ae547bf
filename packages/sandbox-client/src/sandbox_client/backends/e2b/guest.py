"""Calls into a sandbox: programs of ours that are sent along and answer by lines."""

import base64
import functools
import json
import secrets
import shlex
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from e2b import AsyncSandbox, CommandExitException

from sandbox_client.backends.e2b.config import E2BConfig
from sandbox_client.backends.e2b.errors import sdk_errors
from sandbox_client.backends.e2b.lines import LineReader
from sandbox_client.errors import SandboxUnavailable, TooLarge, WrongRequest

__all__ = ["Guest", "command_line"]

_INSIDE = Path(__file__).parent / "inside"
# One argument of a program holds 128 KiB.
_INLINE_REQUEST_BYTES = 40 * 1024
_INLINE_ANSWER_BYTES = 512 * 1024
_SPOOL_BYTES = 1 << 20
_FILES_TIMEOUT_S = 600


@functools.cache
def _program(name: str) -> str:
    """A program of `inside` as a `-c` argument that unpacks it."""
    packed = base64.b64encode(zlib.compress((_INSIDE / f"{name}.py").read_bytes(), 9)).decode()
    return f"import base64,zlib;exec(zlib.decompress(base64.b64decode('{packed}')))"


def command_line(python: str, name: str, request: dict[str, Any], data: bytes = b"") -> str:
    """The shell command that runs a program of `inside` with a request.

    -I: nothing that lies in the work folder or the environment is imported.
    """
    words = [python, "-I", "-S", "-c", _program(name), _encoded(json.dumps(request).encode())]
    if data:
        words.append(_encoded(data))
    return f"exec {shlex.join(words)}"


def _encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


class Guest:
    """One sandbox's files, worked on from inside."""

    def __init__(self, sandbox: AsyncSandbox, config: E2BConfig, limit_bytes: int) -> None:
        self._sandbox = sandbox
        self._config = config
        self.limit_bytes = limit_bytes
        """The most that is taken from the sandbox at once."""

    async def call(
        self,
        op: str,
        fields: Mapping[str, object],
        data: IO[bytes] | None = None,
        *,
        as_user: bool = False,
    ) -> IO[bytes]:
        """Does something; returns what it handed back, to be read from the start and closed.

        Args:
            op: What to do; see `inside/files.py`.
            fields: What it needs to know.
            data: An archive for it.
            as_user: With the rights of the sandbox's user, not of the administrator.

        Raises:
            WrongRequest, TooLarge: it was refused.
            SandboxGone, SandboxUnavailable: the sandbox could not be reached.
        """
        spool = f"/tmp/.tailrace-{secrets.token_hex(8)}"  # noqa: S108 -- inside the sandbox
        request: dict[str, Any] = {
            "op": op,
            "as_user": self._config.user if as_user and self._drops_rights else "",
            "inline_bytes": _INLINE_ANSWER_BYTES,
            "limit_bytes": self.limit_bytes,
            "spool": f"{spool}-out",
            **fields,
        }
        inline = b""
        if data is not None:
            inline = data.read(_INLINE_REQUEST_BYTES + 1)
            data.seek(0)
            if len(inline) > _INLINE_REQUEST_BYTES:
                inline, request["data"] = b"", f"{spool}-in"
                with sdk_errors(f"uploading to sandbox {self._sandbox.sandbox_id}"):
                    await self._sandbox.files.write(
                        request["data"], data, user=self._config.admin_user
                    )
        held, answer = await self._run(request, inline)
        if "error" in answer:
            held.close()
            kind = TooLarge if answer["error"] in ("full", "too_large") else WrongRequest
            told = str(answer.get("message", ""))
            if answer["error"] == "full":
                told += " (the sandbox's disk limit is reached; delete files or ask for more)"
            raise kind(told)
        if "spooled" in answer:
            held.close()
            return await self._fetch(str(answer["spooled"]))
        held.seek(0)
        return held

    @property
    def _drops_rights(self) -> bool:
        return self._config.user != self._config.admin_user

    async def _run(
        self, request: dict[str, Any], data: bytes
    ) -> tuple[IO[bytes], dict[str, object]]:
        reader = LineReader()
        held: IO[bytes] = tempfile.SpooledTemporaryFile(_SPOOL_BYTES)  # noqa: SIM115
        answers: list[dict[str, object]] = []

        def take(text: str) -> None:
            for letter, payload in reader.feed(text):
                if letter == "x":
                    answers.append(payload)
                else:
                    held.write(payload)

        what = f"{request['op']} in sandbox {self._sandbox.sandbox_id}"
        errors = ""
        try:
            with sdk_errors(what):
                await self._sandbox.commands.run(
                    command_line(self._config.python, "files", request, data),
                    user=self._config.admin_user,
                    cwd="/",  # a command may have closed any other folder
                    timeout=_FILES_TIMEOUT_S,
                    on_stdout=take,
                )
        except CommandExitException as error:
            errors = f"; exit status {error.exit_code}: {(error.stderr or '')[-500:].strip()}"
        except BaseException:
            held.close()
            raise
        if not answers:
            held.close()
            raise SandboxUnavailable(
                f"{what}: it gave no answer (does it have {self._config.python}?){errors}"
            )
        return held, answers[-1]

    async def _fetch(self, path: str) -> IO[bytes]:
        """Takes a file that was left for us."""
        files, user = self._sandbox.files, self._config.admin_user
        held: IO[bytes] = tempfile.SpooledTemporaryFile(_SPOOL_BYTES)  # noqa: SIM115
        try:
            with sdk_errors(f"downloading from sandbox {self._sandbox.sandbox_id}"):
                async with await files.read(path, format="stream", user=user) as parts:
                    async for part in parts:
                        held.write(part)
                await files.remove(path, user=user)
        except BaseException:
            held.close()
            raise
        held.seek(0)
        return held
