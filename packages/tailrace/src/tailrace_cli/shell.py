"""What every command shares: common options, messages, and exit codes for errors."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from service_kit.addresses import is_unix, split_host_port
from service_kit.config import ConfigError
from service_kit.errors import ServiceError

from tailrace_cli.demo.folder import FolderError
from tailrace_cli.demo.services import StageFailedError
from tailrace_cli.stack import StackError

BAD_INPUT = 2
INTERRUPTED = 130
DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES}
"""What a user can mend: space, a quota, a read-only disk, rights."""

messages = Console(stderr=True)

StackFile = Annotated[Path, typer.Option("--stack", help="Stack file (TOML).")]
StateFolder = Annotated[
    Path | None, typer.Option("--state", help="Folder for logs and state, instead of the file's.")
]
Variables = Annotated[
    list[str] | None,
    typer.Option("--var", help="Variable of the stack file: name=value; repeatable."),
]
Target = Annotated[
    str | None, typer.Option("--target", help="host:port of one service, instead of the stack's.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="Setting of a service: name.dotted.key=value; repeatable."),
]


def fail(message: str, code: int) -> NoReturn:
    """Prints one message and ends with `code`."""
    messages.print(
        f"[bold red]error:[/] {escape(message)}", highlight=False, soft_wrap=True, emoji=False
    )
    raise typer.Exit(code)


def run(work: Callable[[], Coroutine[Any, Any, int]]) -> None:
    """Runs a command's coroutine; errors that a user can act on become messages and exit codes."""
    guarded(lambda: asyncio.run(work()))


def guarded(work: Callable[[], int]) -> None:
    """Runs a command that returns its exit code; its errors become messages and exit codes."""
    try:
        code = work()
    except KeyboardInterrupt:
        messages.print("stopped")
        raise typer.Exit(INTERRUPTED) from None
    except Exception as error:
        cause = first_cause(error)
        match cause:
            case ConfigError() | FolderError():
                fail(str(cause), BAD_INPUT)
            case StackError():
                fail(str(cause), cause.exit_code)
            case ServiceError() | StageFailedError():
                fail(str(cause), 1)
            case OSError() if cause.errno in DISK_ERRORS:
                where = f" at {cause.filename}" if cause.filename else ""
                fail(f"{cause.strerror}{where}; nothing that was finished is lost", BAD_INPUT)
            case _:
                raise
    if code:
        raise typer.Exit(code)


def checked_address(option: str, address: str) -> str:
    """The address, if it is one: `host:port`, or of a Unix socket.

    Raises:
        ConfigError: it is none; the message names the option.
    """
    if not is_unix(address):
        try:
            split_host_port(address)
        except ValueError as error:
            raise ConfigError(f"{option}: {error}") from None
    return address


def first_cause(error: Exception) -> Exception:
    """The first error within nested groups: what went wrong before the rest was cancelled."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error
