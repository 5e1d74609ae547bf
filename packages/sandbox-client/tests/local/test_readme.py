"""The README's example does what it says."""

import re
import subprocess
import sys
from pathlib import Path

from sandbox_client.testing.service import RunningService

README = Path(__file__).parents[2] / "README.md"


def test_the_example_runs_as_printed(service: RunningService) -> None:
    match = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert match is not None
    code = match[1].replace("127.0.0.1:7101", service.target)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.startswith("3\n")
    assert "+    return a + b" in done.stdout
