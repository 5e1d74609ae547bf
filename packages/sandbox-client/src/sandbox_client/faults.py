"""Injected faults and waits, for tests and benchmarks of whoever uses sandboxes.

What is drawn depends on the seed and on the names of the thing alone, so a run can be repeated
whatever order its calls come in.
"""

import hashlib
import math
import random

from sandbox_client.config import DelayConfig, FaultConfig
from sandbox_client.errors import InjectedFault

__all__ = ["DelayInjector", "FaultInjector"]


class FaultInjector:
    """Fails a share of creates and commands as a broken host would."""

    def __init__(self, config: FaultConfig) -> None:
        self._config = config
        self._tries: dict[tuple[str, str], int] = {}

    def on_create(self, key: str) -> None:
        """Raises `InjectedFault` for a share of the creates."""
        self._draw("create", key, self._config.create_rate)

    def on_exec(self, sandbox_id: str) -> None:
        """Raises `InjectedFault` for a share of the commands."""
        self._draw("exec", sandbox_id, self._config.exec_rate)

    def forget(self, *names: str) -> None:
        """Drops the counts of a sandbox that is gone."""
        for name in names:
            self._tries.pop(("create", name), None)
            self._tries.pop(("exec", name), None)

    def _draw(self, kind: str, name: str, rate: float) -> None:
        if rate <= 0:
            return
        tried = self._tries.get((kind, name), 0)
        self._tries[(kind, name)] = tried + 1
        if _random(self._config.seed, kind, name, tried).random() < rate:
            raise InjectedFault(
                f"injected fault: {kind} of {name} (faults.{kind}_rate is {rate:g}; a test "
                "configuration asked for it)"
            )


class DelayInjector:
    """Draws log-normal waits for commands."""

    def __init__(self, config: DelayConfig) -> None:
        self._config = config
        self._commands: dict[str, int] = {}

    def wait_s(self, sandbox_key: str) -> float:
        """The wait before a sandbox's next command; 0 if the delay is off."""
        config = self._config
        if config.median_s <= 0:
            return 0.0
        number = 0
        if not config.per_sandbox:
            number = self._commands.get(sandbox_key, 0)
            self._commands[sandbox_key] = number + 1
        drawn = _random(config.seed, "delay", sandbox_key, number).gauss(0.0, config.sigma)
        return min(config.max_s, config.median_s * math.exp(drawn))

    def forget(self, sandbox_key: str) -> None:
        """Drops the count of a sandbox that is gone."""
        self._commands.pop(sandbox_key, None)


def _random(seed: int, kind: str, name: str, number: int) -> random.Random:
    digest = hashlib.sha256(f"{seed}\0{kind}\0{name}\0{number}".encode()).digest()
    return random.Random(int.from_bytes(digest[:8], "big"))  # noqa: S311 -- not for secrets
