from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def test_the_readmes_first_example_runs_as_printed() -> None:
    found = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert found is not None
    done = subprocess.run(
        [sys.executable, "-c", found.group(1)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.splitlines() == [
        "hello you",
        "NOT_FOUND no such person; pass a name",
    ]
