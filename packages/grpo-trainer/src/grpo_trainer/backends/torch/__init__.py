"""The torch back-end. Needs the extra `torch`."""

from grpo_trainer.backends.torch.backend import TorchBackend

__all__ = ["TorchBackend"]
