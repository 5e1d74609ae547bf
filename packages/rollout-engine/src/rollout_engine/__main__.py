"""`python -m rollout_engine`: the service, the embedded engine, and a look into a ledger."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Annotated

import typer
from service_kit.cli import clear_errors, service_app
from service_kit.config import load_config
from service_kit.logs import setup_logging

from rollout_engine.app import serve
from rollout_engine.config import RolloutConfig
from rollout_engine.ledger.inspection import inspect_ledger

app = service_app(
    "rollout-engine",
    RolloutConfig,
    serve,
    summary="Runs groups of agent attempts against SGLang engines and keeps every finished one.",
)
ledger_app = typer.Typer(help="Look into a ledger.", no_args_is_help=True)
app.add_typer(ledger_app, name="ledger")


@app.command()
def engine(
    model: Annotated[
        str | None, typer.Option(help="Model folder in Hugging Face's layout.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on; loopback.")] = None,
    port: Annotated[int | None, typer.Option(help="TCP port; 0 lets the system choose.")] = None,
    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE.toml", help="Settings of the engine.")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="One setting.")
    ] = None,
) -> None:
    """Serve the embedded CPU engine: SGLang's HTTP API over a model folder."""
    # Not above: without the extra `cpu` the other commands still work.
    from rollout_engine.engines.cpu.config import CpuEngineConfig
    from rollout_engine.engines.cpu.main import serve_engine

    given = {"model": model, "host": host, "port": port}
    with clear_errors():
        setup_logging("info", json=False)
        settings = load_config(
            CpuEngineConfig,
            file=config,
            environ=os.environ,
            env_prefix="TAILRACE_CPU_ENGINE",
            overrides=[
                *(f"{key}={value}" for key, value in given.items() if value is not None),
                *(set_ or ()),
            ],
        )
        asyncio.run(serve_engine(settings))


@ledger_app.command()
def inspect(
    folder: Annotated[Path, typer.Argument(help="Folder of the ledger; its engine may run.")],
) -> None:
    """Print what a ledger holds, as JSON."""
    with clear_errors():
        typer.echo(json.dumps(inspect_ledger(folder), indent=2))


if __name__ == "__main__":
    app()
