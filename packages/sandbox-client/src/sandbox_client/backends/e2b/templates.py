"""Templates built from recipes: each once, however many sandboxes ask for it."""

import asyncio
import logging
import shutil
import tarfile
import tempfile
from pathlib import Path

from e2b import E2B
from e2b.template.main import TemplateClass

from sandbox_client.backends.e2b.config import E2BConfig
from sandbox_client.backends.e2b.errors import sdk_errors
from sandbox_client.backends.e2b.recipe import ARCHIVE, DOCKERFILE, Recipe
from sandbox_client.core.limits import LimiterStatus
from sandbox_client.errors import SandboxUnavailable, WrongRequest
from sandbox_client.limiter import Limiter

__all__ = ["TemplateShelf"]

logger = logging.getLogger(__name__)

_RETRY_AFTER_S = 10.0


class TemplateShelf:
    """The templates of one E2B account that this service has built or found."""

    def __init__(self, client: E2B, config: E2BConfig, scratch: Path) -> None:
        self._client = client
        self._config = config
        self._scratch = scratch
        self._builds = Limiter("e2b.concurrent_builds", config.concurrent_builds)
        self._known: dict[str, asyncio.Task[None]] = {}

    async def name_of(self, recipe: Recipe, context: Path | None) -> str:
        """The name of the recipe's template, which is there when this returns.

        Args:
            recipe: What it is built from.
            context: The recipe's tree.

        Raises:
            SandboxUnavailable: it is still being built, or cannot be.
            WrongRequest: its Dockerfile is not one that E2B takes.
        """
        name = recipe.name(self._config.template_prefix)
        task = self._known.get(name)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._provide(name, recipe, context))
            self._known[name] = task
            task.add_done_callback(lambda done: self._forget_failed(name, done))
        try:
            async with asyncio.timeout(self._config.build_wait_s):
                # Others wait for the same build: it outlives whoever asked first.
                await asyncio.shield(task)
        except TimeoutError:
            raise SandboxUnavailable(
                f"template {name} is being built for over {self._config.build_wait_s:g} s "
                "(e2b.build_wait_s); ask again later",
                retry_after_s=_RETRY_AFTER_S,
            ) from None
        return name

    async def close(self) -> None:
        """Stops waiting for builds; E2B may finish them by itself."""
        for task in self._known.values():
            task.cancel()
        await asyncio.gather(*self._known.values(), return_exceptions=True)

    def status(self) -> LimiterStatus:
        """Builds that run or wait."""
        return self._builds.status()

    def _forget_failed(self, name: str, task: asyncio.Task[None]) -> None:
        if task.cancelled() or task.exception() is not None:
            del self._known[name]

    async def _provide(self, name: str, recipe: Recipe, context: Path | None) -> None:
        with sdk_errors(f"looking for template {name}"):
            if await self._client.AsyncTemplate.exists(name):
                return
        async with self._builds.slot():
            logger.info("building template %s", name)
            with tempfile.TemporaryDirectory(dir=self._scratch, prefix="build-") as folder:
                template = await asyncio.to_thread(self._template, recipe, context, Path(folder))
                try:
                    async with asyncio.timeout(self._config.build_timeout_s):
                        with sdk_errors(f"building template {name}"):
                            await self._client.AsyncTemplate.build(
                                template,
                                name,
                                cpu_count=recipe.cpus,
                                memory_mb=recipe.memory_mb,
                            )
                except TimeoutError:
                    raise SandboxUnavailable(
                        f"template {name} was not built within "
                        f"{self._config.build_timeout_s:g} s (e2b.build_timeout_s)"
                    ) from None

    def _template(self, recipe: Recipe, context: Path | None, folder: Path) -> TemplateClass:
        admin = recipe.admin_user
        base = self._client.AsyncTemplate(file_context_path=folder)
        if recipe.dockerfile:
            assert context is not None, "a Dockerfile is part of its tree"
            shutil.copytree(context, folder, symlinks=True, dirs_exist_ok=True)
            text = (folder / DOCKERFILE).read_text(encoding="utf-8", errors="replace")
            shutil.rmtree((folder / DOCKERFILE).parent)
            try:
                builder = base.from_dockerfile(text)
            except ValueError as error:
                raise WrongRequest(f"{DOCKERFILE}: {error}") from error
        elif recipe.image:
            builder = base.from_image(recipe.image)
        else:
            builder = base.from_template(recipe.base_template)
        if context is not None and not recipe.dockerfile:
            _pack(context, folder / ARCHIVE)
            builder = builder.copy(ARCHIVE, f"/tmp/{ARCHIVE}")  # noqa: S108 -- in the sandbox
        builder = builder.run_cmd(list(recipe.commands()), user=admin)
        return builder.set_workdir(recipe.workdir)


def _pack(tree: Path, archive: Path) -> None:
    def settle(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.uid = info.gid = 0
        info.uname = info.gname = ""
        return info

    with tarfile.open(archive, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for child in sorted(tree.iterdir()):
            tar.add(child, child.name, filter=settle)
