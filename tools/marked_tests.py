"""Runs the marked suites that this machine can run, one pytest process per marker.

Usage: python tools/marked_tests.py [MARKER ...]

`docker`, `sglang` and `megatron` come with set-up of their own; a marker without tests is reported
and is no failure. `slow` is the long form of the integration tests, run by hand: name it.
"""

from __future__ import annotations

import subprocess
import sys

MARKERS = ("docker", "e2b", "sglang", "megatron")
BESIDE = {"sglang": [sys.executable, "tools/sglang_cpu/serve.py"]}
"""What a marker's tests need running; it starts that and runs pytest beside it."""
NO_TESTS_COLLECTED = 5


def main() -> int:
    failed = []
    for marker in sys.argv[1:] or MARKERS:
        print(f"-- pytest -m {marker}", flush=True)
        code = subprocess.run(
            [*BESIDE.get(marker, []), sys.executable, "-m", "pytest", "-q", "-m", marker],
            check=False,
        ).returncode
        if code == NO_TESTS_COLLECTED:
            print(f"no test carries the marker {marker} yet")
        elif code != 0:
            failed.append(marker)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
