"""The README's example runs as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def test_the_example_solves_its_task(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("('SOLVED', 1.0, ") == 4


def test_the_package_and_its_client_import_without_torch() -> None:
    code = (
        "import sys, rollout_engine, rollout_engine.client, rollout_engine.testing\n"
        "import rollout_engine.app, rollout_engine.agents.template\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_every_public_name_exists() -> None:
    import rollout_engine

    assert all(hasattr(rollout_engine, name) for name in rollout_engine.__all__)
    assert sorted(rollout_engine.__all__) == rollout_engine.__all__
