"""Run every benchmark, or those named, one after the other: a table each, and a JSON file each.

    python benchmarks/run_all.py [planning dropout ...] [--out build/benchmarks]

`make bench` runs this. What compares contestants interleaves them inside its own run, so that other
load on the machine meets all of them alike.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
TWO = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
RUNS: dict[str, tuple[str, ...]] = {
    "planning": (str(HERE / "planning.py"),),
    "batch_axis": (str(HERE / "batch_axis.py"),),
    "expert_axis": (str(HERE / "expert_axis.py"),),
    "published_runs": (str(HERE / "published_runs.py"),),
    "dropout": (str(HERE / "dropout.py"),),
    "world_one": (str(HERE / "world_one.py"),),
    "host_overhead": (*TWO, str(HERE / "host_overhead.py")),
    "memory": (*TWO, str(HERE / "memory.py")),
    "two_ranks": (*TWO, str(HERE / "two_ranks.py")),
    "rank_of_many": (str(HERE / "rank_of_many.py"),),
    "data_parallel": (*TWO, str(HERE / "data_parallel.py")),
    "pipeline": (*TWO, str(HERE / "pipeline.py")),
    "recompute": (str(HERE / "recompute.py"),),
    "export": (str(HERE / "export.py"),),
    "long_context": (*TWO, str(HERE / "long_context.py")),
    "chunked_loss": (str(HERE / "chunked_loss.py"),),
    "masked_attention": (str(HERE / "masked_attention.py"),),
    "experts": (*TWO, str(HERE / "experts.py")),
    "training": (*TWO, str(HERE / "training.py")),
    "generate": (*TWO, str(HERE / "generate.py")),
    "host_states": (str(HERE / "host_states.py"),),
    "optimizer": (*TWO, str(HERE / "optimizer.py")),
    "warm_start": (str(HERE / "warm_start.py"),),
    "first_step": (str(HERE / "first_step.py"),),
    "agreement": (str(HERE / "agreement.py"),),
    "flat": (*TWO, str(HERE / "flat.py")),
    "faulty_ranks": (str(HERE / "faulty_ranks.py"),),
    "small_sums": (*TWO, str(HERE / "small_sums.py")),
    "read_outputs": (*TWO, str(HERE / "read_outputs.py")),
    "fused": (*TWO, str(HERE / "fused.py")),
    "weights": (*TWO[:-1], "--nproc-per-node=4", str(HERE / "weights.py")),
}


def main() -> int:
    """The number of benchmarks that failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(RUNS)}")
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"))
    args = parser.parse_args()
    unknown = [name for name in args.names if name not in RUNS]
    if unknown:
        parser.error(f"no benchmark is named {', '.join(unknown)}; there are {', '.join(RUNS)}")
    args.out.mkdir(parents=True, exist_ok=True)
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    failed = 0
    for name in args.names or RUNS:
        target = args.out / f"{name}.json"
        print(f"== {name}", flush=True)
        started = time.monotonic()
        command = [sys.executable, *RUNS[name], "--json", str(target)]
        code = subprocess.run(command, env=environment, check=False).returncode
        failed += code != 0
        said = f"exit status {code}" if code else f"written to {target}"
        print(f"-- {name}: {time.monotonic() - started:.0f} s, {said}\n", flush=True)
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
