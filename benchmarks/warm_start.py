"""What a first step costs whose programs were compiled before: by an earlier start, or by a rank.

    python benchmarks/warm_start.py [--layers 4] [--mesh tp=2] [--json PATH]

Starts two gloo processes three times, each with Inductor's cache as named: "cold", an empty one;
"restart", what the ranks left there; "of rank 0", where a rank finds only what rank 0 compiled. The
table has each rank's first training step in seconds, its ratio to the cold one, and how many graphs
it compiled and how many it loaded.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RANKS = 2


def start(arguments: argparse.Namespace, caches: list[Path]) -> list[dict[str, Any]]:
    """The first step of each rank in processes of its own, each with its cache."""
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(RANKS):
            environment = {
                **os.environ,
                "TORCHINDUCTOR_CACHE_DIR": str(caches[rank]),
                **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)},
                **{"STORE": f"{folder}/store", "RESULT": f"{folder}/{rank}.json"},
            }
            command = [sys.executable, __file__, "--rank", "--layers", str(arguments.layers)]
            command += ["--mesh", arguments.mesh]
            processes.append(subprocess.Popen(command, env=environment))
        if any([process.wait() for process in processes]):
            raise SystemExit("a rank failed")
        return [json.loads(Path(f"{folder}/{rank}.json").read_text()) for rank in range(RANKS)]


def first_step(arguments: argparse.Namespace) -> None:
    """One rank: the first training step, from the call of the compiled model to its gradients."""
    import torch
    import torch.distributed as dist
    from torch._dynamo.utils import counters

    from llama_model import Llama, Shape, WithLoss

    dist.init_process_group(
        "gloo",
        init_method=f"file://{os.environ['STORE']}",
        rank=int(os.environ["RANK"]),
        world_size=RANKS,
    )
    name, size = arguments.mesh.split("=")
    torch.manual_seed(0)
    model = WithLoss(Llama(Shape(layers=arguments.layers)))
    ids = torch.randint(0, Shape().vocab, (2, Shape().length))
    call = torch.compile(model, backend="autoshard", options={"mesh": {name: int(size)}})
    dist.barrier()
    started = time.perf_counter()
    call(ids).backward()
    seconds = time.perf_counter() - started
    counted = counters["inductor"]
    found = {
        "seconds": seconds,
        "compiled": counted["fxgraph_cache_miss"] + counted["fxgraph_cache_bypass"],
        "loaded": counted["fxgraph_cache_hit"],
    }
    Path(os.environ["RESULT"]).write_text(json.dumps(found))
    dist.destroy_process_group()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--mesh", default="tp=2", help="one axis of two ranks")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        return first_step(args)
    folder = Path(tempfile.mkdtemp())
    try:
        shared = folder / "shared"
        rows = {"cold": start(args, [shared, shared])}
        rows["restart"] = start(args, [shared, shared])
        start(args, [folder / "first", folder / "other"])
        rows["of rank 0"] = start(args, [folder / "first", folder / "first"])
    finally:
        shutil.rmtree(folder)
    print(f"{'cache':12}{'rank':>6}{'first s':>10}{'ratio':>8}{'compiled':>10}{'loaded':>8}")
    for name, ranks in rows.items():
        for rank, row in enumerate(ranks):
            ratio = row["seconds"] / rows["cold"][rank]["seconds"]
            print(
                f"{name:12}{rank:6}{row['seconds']:10.1f}{ratio:8.2f}"
                f"{row['compiled']:10}{row['loaded']:8}"
            )
    if args.json:
        args.json.write_text(json.dumps({"rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
