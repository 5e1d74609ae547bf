"""`python -m sandbox_client serve`: the sandbox service."""

from service_kit.cli import service_app

from sandbox_client.app import serve
from sandbox_client.config import SandboxServiceConfig

app = service_app(
    "sandbox-client",
    SandboxServiceConfig,
    serve,
    summary="Isolated sandboxes for coding agents: SandboxService over namespaces of this host.",
)

if __name__ == "__main__":
    app()
