"""The parent of `collective_worker`: sends it commands, and ends it at a deadline."""

import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from weight_sync.config import CollectiveConfig
from weight_sync.errors import NotOffered, TransportFailed, TransportUnavailable

_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_KILL_S = 5.0


class CollectiveWorker:
    """One worker process, started at the first command and after each failure.

    For one thread at a time; others wait for their turn.
    """

    def __init__(self, settings: CollectiveConfig) -> None:
        """Remember the settings.

        Raises:
            TransportUnavailable: torch is not installed.
        """
        if find_spec("torch") is None:
            raise TransportUnavailable(
                "collectives need torch, which is not installed. Install weight-sync[collective], "
                "or on a ROCm host the image's torch; or choose another transport"
            )
        self.settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self._turn = threading.Lock()
        self._rest = b""

    def start(self) -> None:
        """Start the process now, not with the first command: importing torch takes seconds."""
        with self._turn:
            self._started()

    def call(self, op: str, *, timeout_s: float, **arguments: object) -> dict[str, Any]:
        """Send a command and return the answer.

        Raises:
            NotOffered: the sender has closed the door, or never offered this file.
            TransportFailed: it failed, or took too long; the worker is gone and its groups are.
        """
        settings = self.settings
        command = {
            "op": op,
            "host": settings.host,
            "port": settings.port,
            "backend": settings.backend,
            "timeout_s": timeout_s,
            "chunk_bytes": settings.chunk_bytes,
            "join_s": settings.join_s,
        } | arguments
        with self._turn:
            fresh = self._process is None or self._process.poll() is not None
            # A little longer than the worker's own deadline, which says more about the cause.
            limit_s = timeout_s + settings.join_s + _KILL_S + (settings.start_s if fresh else 0.0)
            answer = self._exchange(command, limit_s)
            if not answer["ok"]:
                if answer["late"]:
                    raise NotOffered(str(answer["error"]))
                # What the libraries hold after a failure is not known.
                self._end()
                raise TransportFailed(f"collective {op}: {answer['error']}")
            return answer

    def interrupt(self) -> None:
        """Make a call that another thread waits for fail now."""
        process = self._process
        if process is not None:
            process.kill()

    def close(self) -> None:
        """End the worker."""
        with self._turn:
            self._end()

    def _exchange(self, command: Mapping[str, object], limit_s: float) -> dict[str, Any]:
        process = self._started()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(command).encode() + b"\n")
            process.stdin.flush()
            line = self._line(process, limit_s)
        except OSError as error:
            line = b""
            reason = str(error)
        else:
            reason = f"exit code {process.poll()}" if line == b"" else ""
        if not line:
            self._end()
            raise TransportFailed(
                f"collective {command['op']}: the worker gave no answer within {limit_s:g} s "
                f"({reason or 'killed'}). a member of the group may be gone; the next try forms "
                "another"
            )
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._end()
            environment = dict.fromkeys(_INTERFACE_VARIABLES, self.settings.interface)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "weight_sync.transports.collective_worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=os.environ | environment,
            )
        return self._process

    def _line(self, process: subprocess.Popen[bytes], limit_s: float) -> bytes:
        """Return the next line; empty if there is none in time or the worker ended."""
        assert process.stdout is not None
        descriptor = process.stdout.fileno()
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        ends_s = time.monotonic() + limit_s
        while b"\n" not in self._rest:
            left_s = ends_s - time.monotonic()
            ready = left_s > 0 and poll.poll(left_s * 1000)
            data = os.read(descriptor, 1 << 16) if ready else b""
            if not data:
                return b""
            self._rest += data
        line, self._rest = self._rest.split(b"\n", 1)
        return line

    def _end(self) -> None:
        process, self._process, self._rest = self._process, None, b""
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
