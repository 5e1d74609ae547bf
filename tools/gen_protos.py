"""Generates packages/protos/src from protos/, or checks that the committed code is up to date.

Usage: python tools/gen_protos.py [--check]

The generated packages carry no `__init__.py`: `tailrace` is a namespace package.
"""

from __future__ import annotations

import argparse
import filecmp
import shutil
import sys
import tempfile
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
OUTPUT = ROOT / "packages" / "protos" / "src"
GENERATED = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py", "*_pb2_grpc.pyi")


def generate(output: Path) -> None:
    sources = sorted(str(p.relative_to(PROTOS)) for p in PROTOS.rglob("*.proto"))
    well_known = Path(grpc_tools.__file__).parent / "_proto"
    code = protoc.main(
        [
            "protoc",
            f"-I{PROTOS}",
            f"-I{well_known}",
            f"--python_out={output}",
            f"--grpc_python_out={output}",
            f"--mypy_out=quiet:{output}",
            f"--mypy_grpc_out=quiet:{output}",
            *sources,
        ]
    )
    if code != 0:
        raise SystemExit(f"protoc failed with exit code {code}; see its messages above")


def generated_files(folder: Path) -> dict[str, Path]:
    return {str(p.relative_to(folder)): p for g in GENERATED for p in folder.rglob(g)}


def differences(fresh: Path, committed: Path) -> list[str]:
    new, old = generated_files(fresh), generated_files(committed)
    changed = [n for n in new.keys() & old.keys() if not filecmp.cmp(new[n], old[n], shallow=False)]
    return sorted(
        [f"missing: {n}" for n in new.keys() - old.keys()]
        + [f"left over: {n}" for n in old.keys() - new.keys()]
        + [f"out of date: {n}" for n in changed]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail on a difference")
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder)
        generate(fresh)
        if check:
            found = differences(fresh, OUTPUT)
            print("\n".join(found) or "generated code is up to date")
            if found:
                print("run: python tools/gen_protos.py", file=sys.stderr)
            return 1 if found else 0
        for stale in generated_files(OUTPUT).values():
            stale.unlink()
        shutil.copytree(fresh, OUTPUT, dirs_exist_ok=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
