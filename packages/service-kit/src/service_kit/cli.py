"""The command line of a service: `serve` and `config`, with clear errors and exit code 2."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import pydantic
import typer

from service_kit.config import ConfigKey, describe_config, load_config
from service_kit.errors import ServiceError, StartupError, leaf_errors
from service_kit.logs import Level, setup_logging
from service_kit.server import Server
from service_kit.telemetry import TelemetryConfig, setup_telemetry

logger = logging.getLogger(__name__)
C = TypeVar("C", bound=pydantic.BaseModel)

EXIT_USAGE = 2
_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.ENOENT}

ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE.toml", help="Settings; see the `config` command."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="One setting, as server.bind=127.0.0.1:0."),
]
LevelOption = Annotated[str, typer.Option("--log-level", help="debug, info, warning or error.")]
JsonOption = Annotated[bool, typer.Option("--log-json", help="Log as JSON, one object a line.")]


def env_prefix(package: str) -> str:
    """Return the prefix of a package's environment variables, as `TAILRACE_SWE_EVAL`."""
    return "TAILRACE_" + package.replace("-", "_").upper()


def service_app(
    package: str,
    config_model: type[C],
    run: Callable[[C], Coroutine[Any, Any, None]],
    *,
    summary: str = "",
) -> typer.Typer:
    """Make the command line of a package that is a service.

    Args:
        package: Name of the package; also of the environment's prefix.
        config_model: Its configuration. A field `telemetry: TelemetryConfig` is set up and shut
            down around `run`.
        run: Runs the service until it is told to stop, usually by `run_until_signal`.
        summary: One line on the service, for `--help`.

    Returns:
        An app with `serve` and `config`; add further commands with `@app.command()`. A further one
        named `serve`, over `serve_settings`, takes the place of the plain one.
    """
    app = typer.Typer(
        name=package,
        help=summary,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        add_completion=False,
    )

    @app.callback()
    def root() -> None:
        """Keep `serve` a command of its own even while it is the only one."""

    root.__doc__ = summary

    @app.command()
    def serve(
        config: ConfigOption = None,
        set_: SetOption = None,
        log_level: LevelOption = "info",
        log_json: JsonOption = False,
    ) -> None:
        """Serve until SIGTERM or SIGINT, then drain."""
        serve_settings(package, config_model, run, config, set_, log_level, log_json=log_json)

    @app.command("config")
    def show_config(config: ConfigOption = None, set_: SetOption = None) -> None:
        """Print every setting with its value, default and meaning."""
        with clear_errors():
            settings = _load(package, config_model, config, set_)
            typer.echo(_config_text(settings, describe_config(config_model)))

    return app


def serve_settings(
    package: str,
    config_model: type[C],
    run: Callable[[C], Coroutine[Any, Any, None]],
    config: Path | None,
    overrides: Sequence[str] | None,
    log_level: str,
    *,
    log_json: bool,
) -> None:
    """What `serve` does: sets up logging, loads the settings, runs the service to its end.

    Arguments as for `service_app`, and the values of the command's options.
    """
    with clear_errors():
        setup_logging(_level(log_level), log_json)
        settings = _load(package, config_model, config, overrides)
        telemetry = getattr(settings, "telemetry", None)
        if not isinstance(telemetry, TelemetryConfig):
            asyncio.run(run(settings))
            return
        recording = setup_telemetry(telemetry, package)
        try:
            asyncio.run(run(settings))
        finally:
            recording.shutdown()


def _load(package: str, model: type[C], file: Path | None, overrides: Sequence[str] | None) -> C:
    return load_config(
        model,
        file=file,
        environ=os.environ,
        env_prefix=env_prefix(package),
        overrides=overrides or (),
    )


def _level(text: str) -> Level:
    match text.lower():
        case "debug" | "info" | "warning" | "error" as level:
            return level
    raise StartupError(f"--log-level: expected debug, info, warning or error, found {text!r}")


def _config_text(settings: pydantic.BaseModel, keys: Sequence[ConfigKey]) -> str:
    lines = []
    for key in keys:
        node: Any = settings
        for part in key.key.split("."):
            node = getattr(node, part, None)
        shown = key.default if "*" in key.key else _plain(node, secret=key.secret)
        changed = "" if shown == key.default else f"  (default: {key.default or 'none, required'})"
        lines.append(f"{key.key} = {shown}{changed}")
        lines.append(f"    {key.type}. {key.description}".rstrip())
    return "\n".join(lines)


def _plain(value: Any, *, secret: bool) -> str:
    if value is None:
        return "null"
    return "***" if secret else str(value)


@contextlib.contextmanager
def clear_errors() -> Iterator[None]:
    """Turn what an operator can mend into one message on stderr and exit code 2.

    That is `StartupError` with its kin (`ConfigError`, `BusyPort`), `ServiceError` and errors of
    the file system. Everything else is a bug, and keeps its traceback.
    """
    try:
        yield
    except Exception as error:
        leaves = list(leaf_errors(error))
        known = [message for leaf in leaves if (message := _message(leaf)) is not None]
        if len(known) < len(leaves):
            raise
        logger.debug("failed", exc_info=error)
        sys.stderr.write("".join(f"error: {message}\n" for message in dict.fromkeys(known)))
        raise typer.Exit(EXIT_USAGE) from None


def _message(error: BaseException) -> str | None:
    if isinstance(error, StartupError):
        return str(error)
    if isinstance(error, ServiceError):
        return f"{error.message} [{error.reason.value}]"
    if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
        return f"{error.strerror}: {error.filename}" if error.filename else str(error)
    return None


async def run_until_signal(
    server: Server, background: Sequence[Coroutine[Any, Any, Any]] = ()
) -> None:
    """Serve until SIGTERM or SIGINT, then drain. A second signal ends the process at once.

    Args:
        server: Started here if it is not yet.
        background: Work beside it, such as a reaper. It is cancelled after the drain; if one of it
            fails, the server drains and the failure is raised.

    Raises:
        BusyPort, StartupError: From starting the server.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(number: signal.Signals) -> None:
        if stop.is_set():
            logger.warning("second %s: stopping at once", number.name)
            os._exit(128 + number)
        logger.info("%s: draining", number.name)
        stop.set()

    signals = (signal.SIGTERM, signal.SIGINT)
    for number in signals:
        loop.add_signal_handler(number, on_signal, number)
    try:
        await _serve(server, background, stop)
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


async def _serve(
    server: Server, background: Sequence[Coroutine[Any, Any, Any]], stop: asyncio.Event
) -> None:
    try:
        await server.start_once()
    except BaseException:
        for work in background:
            work.close()
        raise
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in background]
            await stop.wait()
            await server.drain()
            for task in tasks:
                task.cancel()
    finally:
        await server.drain()
