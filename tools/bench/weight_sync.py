"""weight-sync against what others do: bytes and CPU time of codecs, transports, pauses of engines.

    python tools/sglang_cpu/install.py && python tools/bench/weight_sync.py      everything
    python tools/bench/weight_sync.py --parts codecs

The codec part compares ulp-gap with XOR+zstd-1, overwrite+zstd-1 and index+value, in one run and on
the same tensors: Gaussian fp32 masters after an Adam-like update that changes so many percent of
their bf16 casts, and consecutive checkpoints of a short training run. Every result is decoded and
compared bit by bit.

* `bytes_ratio_N`: bytes at N % changed, of those of XOR+zstd-1.
* `bytes_ratio_real`: the same for a training run at 1e-5; `_3e-06` and `_1e-06` at lower rates.
* `encode_cpu_ratio`, `decode_cpu_ratio`: CPU-seconds per GB of model, of those of XOR+zstd-1; the
  worst of the densities up to 8 % and of the training run, whose steps are put side by side for
  that (`_real`): one of them takes a millisecond. Decoding is from the base's memory into other.

CPU time there is one thread's; rounds of the rivals alternate. What the figures of the other parts
mean stands in `weights/transports.py` and `weights/pauses.py`. The last line is JSON; spreads are
the lowest and the highest value.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
# This script has the name of the package that it measures: Python must not look for that here.
sys.path.pop(0)
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.weights.delta_codecs import PERCENTS, codec_figures
from bench.weights.pauses import pause_figures
from bench.weights.transports import transport_figures

PARTS = ("codecs", "transports", "pauses")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--parts", choices=PARTS, nargs="+", default=PARTS)
    parser.add_argument("--runs", type=int, default=7, help="rounds, or versions (default 7)")
    parser.add_argument("--mib", type=int, default=256, help="size of the payload (default 256)")
    parser.add_argument(
        "--percents", type=float, nargs="+", default=PERCENTS, help="changed, for the codecs"
    )
    arguments = parser.parse_args()
    figures: dict[str, list[float]] = {}
    if "codecs" in arguments.parts:
        figures |= codec_figures(arguments.runs, arguments.percents)
    if "transports" in arguments.parts:
        figures |= transport_figures(arguments.runs, arguments.mib)
    if "pauses" in arguments.parts:
        figures |= pause_figures(arguments.runs)
    print()
    for name, values in figures.items():
        print(f"{name:28s} {statistics.median(values):10.4f}  {min(values):.4f}..{max(values):.4f}")
    print(
        "\n"
        + json.dumps(
            {
                "figures": {n: round(statistics.median(v), 4) for n, v in figures.items()},
                "spread": {n: [round(min(v), 4), round(max(v), 4)] for n, v in figures.items()},
                "runs": arguments.runs,
                "load_avg": os.getloadavg()[0],
            }
        )
    )


if __name__ == "__main__":
    main()
