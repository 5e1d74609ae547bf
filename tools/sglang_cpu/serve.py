"""Runs a command beside a real SGLang server on the CPU.

Usage: python tools/sglang_cpu/serve.py COMMAND [ARGUMENT ...]

Installs SGLang if need be (install.py), starts it with a tiny model and runs the command with
TAILRACE_SGLANG_URL and TAILRACE_SGLANG_MODELS (two checkpoints of one architecture, the first is
served) in its environment. The server ends with the command. Starting takes 40 s on two idle cores
and minutes on busy ones.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from sglang_cpu.install import install

START_S = 600.0
STOP_S = 20.0
TOKENS = 8192
TAIL_BYTES = 4000


def main() -> int:
    if len(sys.argv) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    # So that whoever stops this does not leave the server behind.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    python = install()
    with tempfile.TemporaryDirectory() as scratch, serving(python, Path(scratch)) as environment:
        return subprocess.run(sys.argv[1:], env=os.environ | environment, check=False).returncode


@contextmanager
def serving(python: Path, folder: Path) -> Iterator[dict[str, str]]:
    """Serve a tiny model from a folder; yield the variables that say where.

    Raises:
        RuntimeError: it does not come up; the message has the end of its log.
    """
    here = Path(__file__).resolve().parent
    subprocess.run([python, here / "tiny_models.py", folder], check=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    log = folder / "server.log"
    command = [
        str(python), "-m", "sglang.launch_server", "--model-path", str(folder / "a"),
        "--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch",
        "--host", "127.0.0.1", "--port", str(port), "--max-total-tokens", str(TOKENS),
        "--sleep-on-idle",
    ]  # fmt: skip
    environment = os.environ | {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("wb") as output:
        server = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    try:
        _wait_until_healthy(server, url, log)
        yield {
            "TAILRACE_SGLANG_URL": url,
            "TAILRACE_SGLANG_MODELS": f"{folder / 'a'}:{folder / 'b'}",
        }
    finally:
        server.terminate()  # it ends its own children
        try:
            server.wait(STOP_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _wait_until_healthy(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    ends_s = time.monotonic() + START_S
    while server.poll() is None and time.monotonic() < ends_s:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=10) as reply:
                if reply.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    tail = log.read_bytes()[-TAIL_BYTES:].decode(errors="replace")
    state = "not healthy" if server.poll() is None else f"ended with {server.returncode}"
    raise RuntimeError(f"SGLang is {state} after {START_S:g} s at most. Its log ends:\n{tail}")


if __name__ == "__main__":
    sys.exit(main())
