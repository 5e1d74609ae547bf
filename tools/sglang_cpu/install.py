"""Sets up the real SGLang 0.5.23 on a CPU, in an environment of its own.

Usage: python tools/sglang_cpu/install.py [FOLDER]      (default: .sglang-cpu in the repository)

Needs Python 3.11 on Linux x86_64 and about 6 GB, most of which are torch's CUDA libraries: PyPI has
no build without them. Where uv's cache holds the workspace's torch, they are linked and not loaded.
Prints the environment's Python. Done before, it does nothing.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).resolve().parent
DEFAULT = HERE.parent.parent / ".sglang-cpu"
PYTHON = "3.11"


def main() -> int:
    folder = Path(sys.argv[1]).absolute() if len(sys.argv) > 1 else DEFAULT
    print(install(folder))
    return 0


def install(folder: Path = DEFAULT) -> Path:
    """Make the environment unless it is there already; return its Python."""
    python = folder / "bin" / "python"
    stamp = folder / "installed"
    wanted = _fingerprint()
    if not stamp.is_file() or stamp.read_text() != wanted:
        uv = [sys.executable, "-m", "uv"] if shutil.which("uv") is None else ["uv"]
        _run(*uv, "venv", "-q", "--clear", "--python", PYTHON, str(folder))
        requirements = str(HERE / "requirements.txt")
        _run(*uv, "pip", "install", "-q", "--python", str(python), "--no-deps", "-r", requirements)
        site = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
        shutil.copytree(HERE / "site", site, dirs_exist_ok=True)
        stamp.write_text(wanted)
    return python


def _fingerprint() -> str:
    hasher = hashlib.sha256()
    for path in [HERE / "requirements.txt", *sorted((HERE / "site").rglob("*.p*"))]:
        if path.is_file() and path.suffix != ".pyc":
            hasher.update(path.read_bytes())
    return hasher.hexdigest()


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


if __name__ == "__main__":
    sys.exit(main())
