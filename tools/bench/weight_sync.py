"""weight-sync against what others do: bytes, CPU time.

The codec part compares ulp-gap with XOR+zstd-1, overwrite+zstd-1 and index+value, in one run and on
the same tensors: Gaussian fp32 masters after an Adam-like update that changes so many percent of
their bf16 casts, and consecutive checkpoints of a short training run. Every result is decoded and
compared bit by bit.

* `bytes_ratio_N`: bytes at N % changed, of those of XOR+zstd-1.
* `bytes_ratio_real`: the same for a training run at 1e-5; `_3e-06` and `_1e-06` at lower rates.
* `encode_cpu_ratio`, `decode_cpu_ratio`: CPU-seconds per GB of model, of those of XOR+zstd-1; the
  worst of the densities up to 8 %. Decoding is from the base's memory into other memory.

CPU time is one thread's; rounds of the rivals alternate. The last line is JSON; spreads are the
lowest and the highest value.
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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=7, help="rounds (default 7)")
    parser.add_argument(
        "--percents", type=float, nargs="+", default=PERCENTS, help="changed, for the codecs"
    )
    arguments = parser.parse_args()
    figures = codec_figures(arguments.runs, arguments.percents)
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
