"""A real service as a process of its own."""

import os
import subprocess
import sys
import time
from pathlib import Path

from service_kit.channel import ChannelConfig

from sandbox_client.client import SandboxClient
from sandbox_client.testing.ordinary_user import OrdinaryUser

__all__ = ["RunningService"]

_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 30.0


class RunningService:
    """`python -m sandbox_client serve`, with its folder and address.

    Args:
        folder: Holds the state folder, the address file and the log.
        settings: As for `--set`.
        environ: Variables of the service's, beside those of this process.
        user: Who runs it, if not the user of this process, who then has to be root.
    """

    def __init__(
        self,
        folder: Path,
        *settings: str,
        environ: dict[str, str] | None = None,
        user: OrdinaryUser | None = None,
    ) -> None:
        self.folder = folder
        self.state_dir = folder / "state"
        self.log = folder / "service.log"
        self.settings = settings
        self._environ = environ or {}
        self._user = user
        self.process: subprocess.Popen[bytes] | None = None
        self.target = ""

    def start(self) -> None:
        """Starts it and waits until it listens."""
        address = self.folder / "address"
        address.unlink(missing_ok=True)
        options = [
            "server.bind=127.0.0.1:0",
            f"server.address_file={address}",
            f"state_dir={self.state_dir}",
            *self.settings,
        ]
        command = [sys.executable, "-m", "sandbox_client", "serve"]
        for option in options:
            command += ["--set", option]
        if self._user is not None:
            os.chown(self.folder, self._user.uid, self._user.uid)
            command = self._user.command(command)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, **self._environ}
            )
        end = time.monotonic() + _START_TIMEOUT_S
        while not address.exists():
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the service did not start:\n{self.log.read_text()}")
            time.sleep(0.02)
        self.target = address.read_text().strip()

    @property
    def pid(self) -> int:
        """Of the running process."""
        assert self.process is not None, "start() comes first"
        return self.process.pid

    @property
    def running(self) -> bool:
        """Whether its process is there."""
        return self.process is not None and self.process.poll() is None

    def stop(self) -> int:
        """Asks it to end; returns its exit code."""
        assert self.process is not None, "start() comes first"
        self.process.terminate()
        return self.process.wait(timeout=_STOP_TIMEOUT_S)

    def kill(self) -> None:
        """Ends it as a crash would."""
        assert self.process is not None, "start() comes first"
        self.process.kill()
        self.process.wait(timeout=_STOP_TIMEOUT_S)

    def client(self, **options: float | str) -> SandboxClient:
        """A client of it, not yet opened."""
        return SandboxClient(ChannelConfig(target=self.target), **options)  # type: ignore[arg-type]
