"""Makes tasks from three public packages and tests them: the figures in `docs/results.md`.

    uv run --with pip python tools/make_public_tasks.py FOLDER [--no-selftest]

Downloads the sdists at pinned versions (pure Python, their tests included), makes tasks of each
with `tailrace tasks make`, and tests all of them with `tailrace tasks selftest`. Needs root, for
the sandboxes. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PACKAGES = {"toolz": ("1.0.0", 80), "sqlparse": ("0.5.1", 80), "cachetools": ("5.5.0", 60)}
"""Version, and how many tasks to make."""


def download(folder: Path) -> dict[str, Path]:
    """The sdists, by package; those that are there already are not downloaded again."""
    found = {}
    for name, (version, _) in PACKAGES.items():
        sdist = folder / f"{name}-{version}.tar.gz"
        if not sdist.exists():
            options = ["--quiet", "--no-deps", "--no-binary", ":all:", "--dest", str(folder)]
            command = [sys.executable, "-m", "pip", "download", *options, f"{name}=={version}"]
            subprocess.run(command, check=True)
        found[name] = sdist
    return found


def tailrace(*arguments: str) -> tuple[dict[str, Any], float]:
    """What a command says as JSON, and the seconds it took; its progress goes to stderr."""
    began = time.monotonic()
    command = [sys.executable, "-m", "tailrace_cli", "tasks", *arguments, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False, text=True)
    if done.returncode not in {0, 1} or not done.stdout:
        raise SystemExit(f"{' '.join(command)} ended with exit code {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1]), time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--no-selftest", action="store_true")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    tasks = options.folder / "tasks"
    load = os.getloadavg()
    made: dict[str, Any] = {}
    seconds = 0.0
    for name, sdist in download(options.folder).items():
        count = str(PACKAGES[name][1])
        made[name], took_s = tailrace("make", "--from", str(sdist), str(tasks), "--count", count)
        seconds += took_s
    result: dict[str, Any] = {
        "figures": {"tasks": sum(m["kept"] for m in made.values()), "make_s": round(seconds, 1)},
        "made": made,
        "load_avg": [round(value, 2) for value in load],
    }
    if not options.no_selftest:
        packages = f"sandbox.local.site_packages={tasks.resolve() / '.site-packages'}"
        records = str(options.folder / "selftest.jsonl")
        where = ("--environment", "tree", "--set", packages, "--out", records)
        jobs = str(os.cpu_count() or 1)
        tested, took_s = tailrace("selftest", str(tasks), *where, "--jobs", jobs)
        result["figures"] |= {"selftest_kept": len(tested["kept"]), "selftest_s": round(took_s, 1)}
        result["selftest"] = {k: v if k == "tasks" else len(v) for k, v in tested.items()}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
