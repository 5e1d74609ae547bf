"""`tailrace tasks make`: tasks from any repository that has a pytest suite."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text
from sandbox_client import SandboxClient
from service_kit.channel import ChannelConfig
from service_kit.config import ConfigError
from swe_eval.errors import RepositoryError
from swe_eval.generate.mutate import KINDS
from swe_eval.making.maker import MakeOptions, Summary, make_tasks
from swe_eval.making.packages import PythonPackages, copy_pytest, look_into, own_packages
from swe_eval.making.source_tree import SourceTree, read_repository
from swe_eval.making.words import ChatWriter

from tailrace_cli.sandbox_service import sandbox_service
from tailrace_cli.shell import INTERRUPTED, first_cause
from tailrace_cli.signals import unless_interrupted
from tailrace_cli.stack import StackSpec

PACKAGES_FOLDER = ".site-packages"
"""Within the folder of tasks: what their tests need beside the repository."""

_CALL_S = 60.0

Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class MakeCommand:
    """What the command line says beside `MakeOptions`."""

    repository: Path
    out: Path
    name: str = ""
    python: Path | None = None
    sandbox: str | None = None
    writer: ChatWriter | None = None


def checked_kinds(names: Sequence[str]) -> tuple[str, ...]:
    """The kinds that are named, separated by commas too; all where none is.

    Raises:
        ConfigError: one is unknown.
    """
    chosen = [part.strip() for name in names for part in name.split(",") if part.strip()]
    unknown = sorted(set(chosen) - set(KINDS))
    if unknown:
        raise ConfigError(f"--kinds: unknown {', '.join(unknown)}; known: {', '.join(KINDS)}")
    return tuple(chosen) or KINDS


async def run_make(
    command: MakeCommand, options: MakeOptions, stack: StackSpec, *, as_json: bool
) -> int:
    """Makes tasks; the exit code: 1 if there are fewer than were asked for.

    Raises:
        ConfigError: nothing can be made of the repository.
        ServiceError, StackError: there is no sandbox service to be had.
    """
    console = Console(stderr=True)
    began = time.monotonic()
    summary: Summary | None = None
    packages: PythonPackages | None = None

    def tell(text: str) -> None:
        console.print(Text(text), soft_wrap=True)

    async def work() -> None:
        nonlocal summary, packages
        tree = read_repository(command.repository, command.name, command.out)
        async with contextlib.AsyncExitStack() as exits:
            exits.enter_context(_locked(command.out))
            packages = _packages(command, tree, tell)
            local = {
                "python": str(packages.python.resolve()),
                "site_packages": str(packages.folder.resolve()),
            }
            service = sandbox_service(command.sandbox, stack, local)
            target = await exits.enter_async_context(service)
            client = await exits.enter_async_context(
                SandboxClient(ChannelConfig(target=target), owner="make", call_timeout_s=_CALL_S)
            )
            await client.status()  # one that was never there is told at once
            summary = await make_tasks(
                tree,
                command.out,
                options,
                client,
                python=packages.version,
                requirements=packages.requirements,
                writer=command.writer,
                tell=tell,
            )

    try:
        finished = await unless_interrupted(work(), lambda: None)
    except* RepositoryError as errors:
        raise ConfigError(str(first_cause(errors))) from errors
    if not finished:
        tell(f"stopped; the tasks in {command.out} are whole: run it again to go on")
        return INTERRUPTED
    assert summary is not None
    assert packages is not None
    took_s = time.monotonic() - began
    show(summary, took_s, Console(stderr=as_json))
    if as_json:
        print(json.dumps({**asdict(summary), "seconds": round(took_s, 1)}))
    hint = f"grade them where local.site_packages = {packages.folder.resolve()}"
    tell(f"{command.out}: {summary.kept} tasks, {summary.new} of them new; {hint}")
    return 0 if summary.kept >= options.count else 1


@contextlib.contextmanager
def _locked(out: Path) -> Iterator[None]:
    """The folder, made if need be, for one making at a time."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(out, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ConfigError(
            f"{out}: expected a folder for tasks, or a place for a new one, but {error}"
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise ConfigError(
            f"{out}: another `tasks make` writes there; wait for its end, or name another folder"
        ) from error
    finally:
        os.close(descriptor)


def _packages(command: MakeCommand, tree: SourceTree, tell: Tell) -> PythonPackages:
    if command.python is None:
        packages = copy_pytest(command.out / PACKAGES_FOLDER)
    else:
        packages = look_into(command.python)
    own = own_packages(tree.sources((), ()), packages.folder)
    if not own:
        return packages
    found = f"{packages.folder} holds {', '.join(own)}, as the repository does"
    if command.python is not None:
        raise ConfigError(
            f"--python: {found}: agents would see it without the bugs; uninstall it there"
        )
    tell(f"warning: {found}, for pytest needs it: agents see it without the bugs")
    return packages


def show(summary: Summary, took_s: float, console: Console) -> None:
    """What became of the candidates, and the kinds of those that were kept."""
    table = Table("candidates", "", box=None)
    for outcome, count in summary.outcomes.items():
        table.add_row(outcome, str(count))
    table.add_row("in all", f"{summary.tried} of {summary.candidates} tried")
    kinds = Table("kind", "kept", box=None)
    for kind, count in summary.kinds.items():
        kinds.add_row(kind, str(count))
    left_out = ", ".join(f"{n} {why}" for why, n in summary.tests_left_out.items())
    tests = f"{summary.tests} tests" + (f" ({left_out}: left out)" if left_out else "")
    console.print(table)
    console.print(kinds)
    console.print(Text(f"{summary.repository}: {tests}; {took_s:.0f} s"), soft_wrap=True)
