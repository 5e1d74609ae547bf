"""`python -m grpo_trainer serve`: TrainerService over one run folder."""

from service_kit.cli import service_app

from grpo_trainer.app import serve
from grpo_trainer.config import TrainerConfig

app = service_app(
    "grpo-trainer",
    TrainerConfig,
    serve,
    summary="Trains coding agents: SFT and fully asynchronous GRPO, as TrainerService.",
)

if __name__ == "__main__":
    app()
