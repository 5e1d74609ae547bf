"""Building a template without a container engine.

Its steps are carried out in a sandbox, whose files are then kept as a snapshot. No image is pulled.
"""

import gzip
import posixpath
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import IO

from service_kit.errors import ServiceError

from sandbox_client.config import SandboxServiceConfig
from sandbox_client.e2b_api.catalog import EMPTY_TREE, Template
from sandbox_client.e2b_api.errors import ApiError
from sandbox_client.e2b_api.messages import BuildStart, BuildStep
from sandbox_client.e2b_api.sandboxes import ApiSandbox, Sandboxes
from sandbox_client.manager import SandboxManager
from sandbox_client.types import Command

__all__ = ["BuildError", "TemplateBuilder"]

_UNPACKED = "/tmp/.e2b-build"  # noqa: S108 -- inside the sandbox
_COPY = """
if [ -d "$1" ] && [ ! -L "$1" ]; then mkdir -p -- "$2" && cp -a -- "$1/." "$2"
else case $2 in
  */) mkdir -p -- "$2" && cp -a -- "$1" "$2" ;;
  *) mkdir -p -- "$(dirname -- "$2")" && cp -aT -- "$1" "$2" ;;
esac; fi && { [ -z "$3" ] || chmod -R "$3" -- "$2"; }
"""
_CHUNK_BYTES = 256 * 1024


class BuildError(Exception):
    """A template cannot be built so; the message says why. `step` counts from 0, None: no step."""

    def __init__(self, message: str, step: int | None = None) -> None:
        super().__init__(message)
        self.step = step


@dataclass
class _State:
    """Where a build is."""

    sandbox: ApiSandbox
    cwd: str
    env: dict[str, str] = field(default_factory=dict)


class TemplateBuilder:
    """Builds templates, each in a sandbox of its own."""

    def __init__(
        self, manager: SandboxManager, sandboxes: Sandboxes, config: SandboxServiceConfig
    ) -> None:
        self._manager = manager
        self._sandboxes = sandboxes
        self._config = config

    async def build(
        self,
        wanted: Template,
        body: BuildStart,
        files: Mapping[str, IO[bytes]],
        log: Callable[[str], None],
    ) -> Template:
        """The finished template.

        Args:
            wanted: Its id, names and limits.
            body: What it is built from, and how.
            files: The uploaded archives (tar, gzipped or not) by their hash.
            log: Takes what the build has to say.

        Raises:
            BuildError: a step failed or is not offered.
        """
        base = self._base(body)
        workdir = _workdir(base, body.steps)
        environment = replace(base.environment, workdir=workdir)
        try:
            sandbox = await self._sandboxes.make(
                replace(base, environment=environment, limits=wanted.limits),
                timeout_s=self._config.lease.max_s,
                metadata={},
                env={},
                network=self._config.e2b_api.network,
            )
        except ServiceError as error:
            raise BuildError(f"no sandbox to build in: {error.message}") from error
        try:
            state = _State(sandbox, workdir)
            for number, step in enumerate(body.steps):
                log(f"[{number + 1}/{len(body.steps)}] {step.type} {' '.join(step.args)}")
                try:
                    await self._step(state, step, files, log)
                except (ApiError, ServiceError) as error:
                    raise BuildError(error.message, number) from error
                except BuildError as error:
                    raise BuildError(str(error), number) from error
            try:
                kept = await self._sandboxes.keep(sandbox, self._config.lease.max_s)
            except ServiceError as error:
                raise BuildError(f"the files cannot be kept: {error.message}") from error
        finally:
            await self._sandboxes.unmake(sandbox)
        return replace(wanted, environment=replace(kept, env={**kept.env, **state.env}))

    def _base(self, body: BuildStart) -> Template:
        if body.startCmd:
            raise BuildError("this endpoint runs no start command; leave it out")
        images = self._config.e2b_api.base_images
        name = body.fromTemplate or images.get(body.fromImage) or images.get("*", "")
        if not name:
            known = ", ".join(images) or "none"
            raise BuildError(
                f"this endpoint pulls no images, found {body.fromImage!r}; name a template that "
                f"stands in for it in e2b_api.base_images (known: {known})"
            )
        found = self._sandboxes.catalog.find(name)
        if found is None:
            raise BuildError(f"template '{name}' not found")
        return found

    async def _step(
        self,
        state: _State,
        step: BuildStep,
        files: Mapping[str, IO[bytes]],
        log: Callable[[str], None],
    ) -> None:
        args = step.args
        match step.type:
            case "ENV":
                state.env |= dict(zip(args[::2], args[1::2], strict=False))
            case "WORKDIR" if args:
                state.cwd = posixpath.normpath(posixpath.join(state.cwd, args[0]))
                await self._run(state, ("mkdir", "-p", "--", state.cwd), log, cwd="/")
            case "USER" if args:
                self._check_user(args[0])
            case "RUN" if args:
                self._check_user(args[1] if len(args) > 1 else "")
                await self._run(state, ("/bin/bash", "-c", args[0]), log)
            case "COPY" if len(args) > 1:
                archive = files.get(step.filesHash)
                if archive is None:
                    raise BuildError(f"the files of {args[0]!r} were not uploaded")
                mode = args[3] if len(args) > 3 else ""
                await self._copy(state, archive, args[0], args[1], mode, log)
            case _:
                raise BuildError(f"this endpoint does not offer {step.type} {args}")

    def _check_user(self, user: str) -> None:
        users = self._config.e2b_api.users
        if user and user not in users:
            raise BuildError(
                f"invalid username: '{user}'; this endpoint knows {', '.join(users)} "
                "(e2b_api.users)"
            )

    async def _copy(
        self,
        state: _State,
        archive: IO[bytes],
        source: str,
        target: str,
        mode: str,
        log: Callable[[str], None],
    ) -> None:
        async with self._manager.spool.collected(_unzipped(archive)) as plain:
            await self._sandboxes.access(state.sandbox).upload_tree(plain, _UNPACKED)
        unpacked = posixpath.normpath(f"{_UNPACKED}/{source}")
        await self._run(state, ("/bin/sh", "-c", _COPY, "sh", unpacked, target, mode), log)
        await self._run(state, ("rm", "-rf", "--", _UNPACKED), log)

    async def _run(
        self,
        state: _State,
        argv: tuple[str, ...],
        log: Callable[[str], None],
        *,
        cwd: str = "",
    ) -> None:
        command = Command(
            argv=argv,
            cwd=cwd or state.cwd,
            env=state.env,
            timeout_s=self._config.exec.max_timeout_s,
            merge_stderr=True,
        )
        result = await self._manager.run(state.sandbox.sandbox_id, command)
        if result.stdout:
            log(result.stdout.rstrip("\n"))
        if result.exit_code:
            raise BuildError(f"exit status {result.exit_code}: {result.stdout[-1000:].strip()}")


def _workdir(base: Template, steps: list[BuildStep]) -> str:
    """The template's work folder: the last WORKDIR."""
    workdir = base.environment.workdir
    for step in steps:
        if step.type == "WORKDIR" and step.args:
            workdir = posixpath.normpath(posixpath.join(workdir, step.args[0]))
    is_empty = base.environment.tree_digest == EMPTY_TREE.digest
    if not is_empty and workdir != base.environment.workdir:
        raise BuildError(
            f"the template has the work folder {base.environment.workdir} of the one it is built "
            f"from; its last WORKDIR cannot be {workdir}"
        )
    return workdir


async def _unzipped(archive: IO[bytes]) -> AsyncIterator[bytes]:
    packed = archive.read(2) == b"\x1f\x8b"
    archive.seek(0)
    source: IO[bytes] | gzip.GzipFile = (
        gzip.GzipFile(fileobj=archive, mode="rb") if packed else archive
    )
    try:
        while chunk := source.read(_CHUNK_BYTES):
            yield chunk
    except (OSError, EOFError) as error:
        raise BuildError(f"the uploaded files are unreadable: {error}") from None
