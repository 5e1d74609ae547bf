"""`python -m sandbox_client serve`: the sandbox service."""

from typing import Annotated

import typer
from service_kit.cli import (
    ConfigOption,
    JsonOption,
    LevelOption,
    SetOption,
    serve_settings,
    service_app,
)

from sandbox_client.app import serve
from sandbox_client.config import SandboxServiceConfig

_NAME = "sandbox-client"

app = service_app(
    _NAME,
    SandboxServiceConfig,
    serve,
    summary="Isolated sandboxes for coding agents: SandboxService over namespaces of this host.",
)

E2BApiOption = Annotated[
    str,
    typer.Option("--e2b-api", metavar="HOST:PORT", help="Serve E2B's API too: e2b_api.bind."),
]


@app.command("serve")
def serve_command(
    config: ConfigOption = None,
    set_: SetOption = None,
    e2b_api: E2BApiOption = "",
    log_level: LevelOption = "info",
    log_json: JsonOption = False,
) -> None:
    """Serve until SIGTERM or SIGINT, then drain."""
    overrides = list(set_ or ())
    if e2b_api:
        overrides.append(f"e2b_api.bind={e2b_api}")
    serve_settings(
        _NAME, SandboxServiceConfig, serve, config, overrides, log_level, log_json=log_json
    )


if __name__ == "__main__":
    app()
