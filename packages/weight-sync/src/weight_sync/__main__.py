"""`python -m weight_sync serve`: the WeightService and this host's receiver."""

from service_kit.cli import service_app

from weight_sync.app import serve
from weight_sync.config import WeightSyncConfig

app = service_app(
    "weight-sync",
    WeightSyncConfig,
    serve,
    summary="Publishes policy versions to inference engines: WeightService and receiver.",
)

if __name__ == "__main__":
    app()
