"""What a first step costs whose programs were compiled before: by an earlier start, or by a rank.

    python benchmarks/warm_start.py [--layers 4] [--mesh tp=2 | dp_shard=2,tp=2] [--json PATH]

Starts gloo processes five times, each with Inductor's cache as named: "cold", an empty one;
"restart", what the ranks left there; "of rank 0", where a rank finds only what rank 0 compiled;
"hosts apart", an empty one for each rank, as on hosts without a common folder, where each compiles
for itself; "hosts", the same, where ranks get what another has compiled through the store. The
table has each rank's first training step in seconds, its ratio to the cold one, how many graphs it
compiled and loaded, and of these the bytes that it got from another host. Losses and gradients are
compared, bit for bit, between the last two.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def mesh_of(text: str) -> dict[str, int]:
    """Sizes by axis, of `dp_shard=2,tp=2`."""
    return {name: int(size) for name, size in (axis.split("=") for axis in text.split(","))}


def start(
    arguments: argparse.Namespace, caches: list[Path], sharing: bool = True
) -> list[dict[str, Any]]:
    """The first step of each rank in processes of its own, each with its cache. sharing: whether
    ranks of several caches compile for each other."""
    ranks = math.prod(mesh_of(arguments.mesh).values())
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(ranks):
            cache = caches[rank % len(caches)]
            cache.mkdir(parents=True, exist_ok=True)
            environment = {
                **os.environ,
                **{"TORCHINDUCTOR_CACHE_DIR": str(cache), "TMPDIR": str(cache)},
                **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)},
                **{"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)},
                **{"RESULT": f"{folder}/{rank}.json"},
                **({} if sharing else {"TORCHINDUCTOR_FX_GRAPH_REMOTE_CACHE": "0"}),
            }
            command = [sys.executable, __file__, "--rank", "--layers", str(arguments.layers)]
            command += ["--mesh", arguments.mesh]
            processes.append(subprocess.Popen(command, env=environment))
        if any([process.wait() for process in processes]):
            raise SystemExit("a rank failed")
        return [json.loads(Path(f"{folder}/{rank}.json").read_text()) for rank in range(ranks)]


def first_step(arguments: argparse.Namespace) -> None:
    """One rank: the first training step, from the call of the compiled model to its gradients."""
    import torch
    import torch.distributed as dist
    from torch._dynamo.utils import counters

    from autoshard.runtime.agreement import compiles
    from llama_model import Llama, Shape, WithLoss

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = WithLoss(Llama(Shape(layers=arguments.layers)))
    ids = torch.randint(0, Shape().vocab, (2, Shape().length))
    call = torch.compile(model, backend="autoshard", options={"mesh": mesh_of(arguments.mesh)})
    dist.barrier()
    started = time.perf_counter()
    loss = call(ids)
    loss.backward()
    seconds = time.perf_counter() - started
    counted, shared = counters["inductor"], compiles()
    digest = hashlib.sha256(loss.detach().numpy().tobytes())
    for parameter in model.parameters():
        digest.update(parameter.grad.to_local().numpy().tobytes())
    found = {
        "seconds": seconds,
        "digest": digest.hexdigest(),
        "from hosts": 0 if shared is None else shared.bytes,
        "alone": [] if shared is None else shared.lines,
        "compiled": counted["fxgraph_cache_miss"] + counted["fxgraph_cache_bypass"],
        "loaded": counted["fxgraph_cache_hit"],
    }
    Path(os.environ["RESULT"]).write_text(json.dumps(found))
    dist.destroy_process_group()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--mesh", default="tp=2", help="sizes by axis: dp_shard=2,tp=2")
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
        start(args, [folder / "first", *(folder / f"other{rank}" for rank in range(1, 16))], False)
        rows["of rank 0"] = start(args, [folder / "first"])
        ranks = range(len(rows["cold"]))
        for name, sharing in (("hosts apart", False), ("hosts", True)):
            hosts = [folder / f"{name.split()[-1]}{rank}" for rank in ranks]
            rows[name] = start(args, hosts, sharing)
    finally:
        shutil.rmtree(folder)
    names = ("first s", "ratio", "compiled", "loaded", "KB got")
    print(f"{'cache':12}{'rank':>6}" + "".join(f"{name:>10}" for name in names))
    for name, found in rows.items():
        for rank, row in enumerate(found):
            ratio = row["seconds"] / rows["cold"][rank]["seconds"]
            print(
                f"{name:12}{rank:6}{row['seconds']:10.1f}{ratio:10.2f}"
                f"{row['compiled']:10}{row['loaded']:10}{row['from hosts'] / 1e3:10.0f}"
            )
    alike = all(
        one["digest"] == other["digest"]
        for one, other in zip(rows["hosts apart"], rows["hosts"], strict=True)
    )
    print(f"losses and gradients of both kinds of hosts are {'' if alike else 'NOT '}the same bits")
    for row in rows["hosts"]:
        print(*row["alone"], sep="\n", end="")
    if args.json:
        args.json.write_text(json.dumps({"rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
