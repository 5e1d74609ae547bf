"""Builds every package's wheel and proves that each installs and imports alone.

Usage: python tools/check_wheels.py [PACKAGE ...]

"Alone" is a clean environment outside the workspace: only the built wheels of its siblings may
serve its declared ranges. None may import torch or another heavy library at top level.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
IMPORTS = {
    "protos": "tailrace.rollout.v1.rollout_service_pb2_grpc",
    "service-kit": "service_kit",
    "sandbox-client": "sandbox_client",
    "rollout-engine": "rollout_engine",
    "weight-sync": "weight_sync",
    "grpo-trainer": "grpo_trainer",
    "swe-eval": "swe_eval",
    "tailrace": "tailrace_cli",
}
PROBE = """
import importlib, sys
importlib.import_module({module!r})
heavy = sorted(m for m in ("torch", "transformers", "sglang", "megatron") if m in sys.modules)
assert not heavy, f"importing {module} brought in {{heavy}}"
assert not any("packages/" in (p or "") for p in sys.path), sys.path
"""


def run(*command: str | Path, cwd: Path | None = None) -> None:
    subprocess.run([str(c) for c in command], check=True, cwd=cwd)


def check(package: str, wheels: Path, scratch: Path) -> None:
    """Installs one wheel in an environment of its own and imports it there."""
    name = tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text())["project"][
        "name"
    ]
    environment = scratch / package
    run("uv", "venv", "-q", "--python", sys.executable, environment)
    python = environment / "bin" / "python"
    run("uv", "pip", "install", "-q", "--python", python, "--find-links", wheels, name, cwd=scratch)
    run("uv", "pip", "check", "-q", "--python", python)
    run(python, "-c", PROBE.format(module=IMPORTS[package]), cwd=scratch)
    print(f"{name}: installs and imports alone", flush=True)


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        wheels = scratch / "wheels"
        run(
            "uv", "build", "-q", "--all-packages", "--no-sources", "--wheel", "-o", wheels, cwd=ROOT
        )
        for package in sys.argv[1:] or IMPORTS:
            check(package, wheels, scratch)
    return 0


if __name__ == "__main__":
    sys.exit(main())
