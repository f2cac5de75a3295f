"""What the first step costs the host beside plain torch.compile, by phase, and what it compiles.

    python benchmarks/first_step.py [--layers 8 32] [--meshes tp=2 dp_shard=2] [--json PATH]
    python benchmarks/first_step.py --kernels --layers 8 [--meshes tp=2]
    python benchmarks/first_step.py --alone --layers 8 126 [--meshes tp=2]
    python benchmarks/first_step.py --checkpointed --layers 8 [--meshes tp=2]
    python benchmarks/first_step.py --dropout --layers 8 [--meshes tp=2]

A Llama 256 wide, forward and backward, each row in a process of its own with empty caches: rank 0
of two, of which the other is not there (collectives return at once). Seconds are CPU time of the
process, one thread. Kernels are not compiled, which is a C++ or Triton compiler's work, in other
processes, and the same at any depth: equal kernels are compiled once. With --kernels they are, also
for `whole`, autoshard with AUTOSHARD_DISABLE=equal_layers, and `step` is the least of 20 steps in
milliseconds, `peak` the most bytes that tensors of a step hold. With --checkpointed backward
computes each layer again; with --dropout a tenth of each attention's and feed-forward's results is
dropped.

`regions` are the pieces of code that Inductor made of forward and backward. `ratio` is that of
seconds to plain torch.compile's at the same depth, which --alone leaves out; `growth` to those of
the same way at the first depth.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

PHASES = {
    "dynamo": ("bytecode_tracing",),
    "joint trace": ("aot_trace_joint_graph", "aot_collect_metadata"),
    "partition": ("min_cut_rematerialization_partition", "Partitioner"),
    "joint passes": ("_recursive_joint_graph_passes",),
    "inductor": ("compile_fx_inner",),
}
"""Names of torch's own timers."""


@contextmanager
def clock(kernels: bool) -> Iterator[dict[str, float]]:
    """Seconds by phase; torch's timers count this process's CPU time."""
    from torch._dynamo import utils
    from torch._inductor.async_compile import AsyncCompile

    from autoshard import backend
    from autoshard.program import Program

    found: dict[str, float] = {}
    counted = SimpleNamespace(**{**vars(time), "time_ns": time.process_time_ns})

    def timed(name: str, function: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                found[name] = found.get(name, 0.0) + time.process_time() - start

        return run

    patches = [
        mock.patch.object(utils, "time", counted),
        mock.patch.object(backend, "build_agreed", timed("plan", backend.build_agreed)),
        mock.patch.object(Program, "finish", timed("passes", Program.finish)),
    ]
    if not kernels:
        nothing = mock.Mock(return_value=lambda *args: None)
        patches.append(mock.patch.object(AsyncCompile, "cpp_pybinding", nothing))
    for patch in patches:
        patch.start()
    yield found
    for patch in patches:
        patch.stop()
    times = {name: sum(all_times) for name, all_times in utils.compilation_time_metrics.items()}
    found.update({phase: sum(times.get(n, 0.0) for n in names) for phase, names in PHASES.items()})


def row(name: str, layers: int, asked: argparse.Namespace) -> dict[str, Any]:
    """The first step of one way, in this process."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch.utils.checkpoint import checkpoint

    from autoshard.runtime.compat import inductor_regions
    from llama_model import Llama, Shape, WithLoss

    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape = Shape(vocab=2048, width=256, hidden=704, layers=layers, heads=8, length=128)
    llama, ids = Llama(shape), torch.randint(2048, (2, 128))
    for block in llama.blocks if asked.dropout else ():
        block.attention.o = torch.nn.Sequential(block.attention.o, torch.nn.Dropout(0.1))
        block.mlp.down = torch.nn.Sequential(block.mlp.down, torch.nn.Dropout(0.1))
    for block in llama.blocks if asked.checkpointed else ():
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    model = WithLoss(llama)
    options: dict[str, Any] = {}
    if name != "plain":
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        axis, size = name.removesuffix(" whole").split("=")
        options = {"backend": "autoshard", "options": {"mesh": {axis: int(size)}}}
    regions: list[int] = []
    compile_parts = inductor_regions.compile_parts

    def counting(*args: Any, **kwargs: Any) -> Any:
        made = compile_parts(*args, **kwargs)
        regions.append(len(made.regions) if made is not None else 1)
        return made

    call = torch.compile(model, **options)
    with (
        mock.patch.object(inductor_regions, "compile_parts", counting),
        clock(asked.kernels) as seconds,
    ):
        start = time.process_time()
        call(ids).backward()
        seconds["total"] = time.process_time() - start
    found: dict[str, Any] = {"seconds": seconds, "regions": sum(regions) or 2}
    if asked.kernels:
        found["step"] = min(step(call, model, ids) for _ in range(20))
        found["peak"] = peak(call, model, ids)
    return found


def step(call: Any, model: Any, ids: Any) -> float:
    """CPU milliseconds of one step."""
    start = time.process_time()
    call(ids).backward()
    taken = time.process_time() - start
    model.zero_grad()
    return 1e3 * taken


def peak(call: Any, model: Any, ids: Any) -> int:
    """The most bytes that the allocations of one step hold at a time."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        call(ids).backward()
    model.zero_grad()
    held, most = 0, 0
    for event in profiled.profiler.kineto_results.events():  # in the order of time
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


def measured(name: str, layers: int, *flags: str) -> dict[str, Any]:
    """`row` in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder, "OMP_NUM_THREADS": "1"}
        if name.endswith("whole"):
            environment["AUTOSHARD_DISABLE"] = "equal_layers"
        result = Path(folder) / "result.json"
        command = [sys.executable, __file__, "--row", name, "--layers", str(layers)]
        command += ["--json", str(result), *flags]
        subprocess.run(command, env=environment, check=True)
        return json.loads(result.read_text())  # type: ignore[no-any-return]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--meshes", nargs="+", default=["tp=2", "dp_shard=2"], help="of two ranks")
    parser.add_argument("--kernels", action="store_true", help="compile and run them")
    parser.add_argument("--checkpointed", action="store_true", help="each layer")
    parser.add_argument("--dropout", action="store_true", help="in each layer")
    parser.add_argument("--alone", action="store_true", help="without plain torch.compile")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--row", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.row:
        args.json.write_text(json.dumps(row(args.row, args.layers[0], args)))
        return
    phases = ["dynamo", "plan", "joint trace", "partition", "joint passes", "passes", "inductor"]
    print(f"{'':16}{'layers':>7}{'regions':>8}{'total s':>8}{'ratio':>7}{'growth':>7}", end="")
    print("".join(f"{phase:>13}" for phase in phases), *["  step ms   peak MB"][: args.kernels])
    rows: dict[str, Any] = {}
    told = ("kernels", "checkpointed", "dropout")
    flags = [f"--{flag}" for flag in told if getattr(args, flag)]
    for layers in args.layers:
        ends = (" whole", "") if args.kernels else ("",)
        ways = [f"{mesh}{end}" for mesh in args.meshes for end in ends]
        for name in [*["plain"][args.alone :], *ways]:
            one = rows[f"{name}, {layers}"] = measured(name, layers, *flags)
            total = one["seconds"]["total"]
            print(f"{name:16}{layers:7}{one['regions']:8}{total:8.1f}", end="")
            for other in (f"plain, {layers}", f"{name}, {args.layers[0]}"):
                beside = rows[other]["seconds"]["total"] if other in rows else math.nan
                print(f"{total / beside:7.2f}", end="")
            print("".join(f"{one['seconds'].get(phase, 0):13.1f}" for phase in phases), end="")
            print(f"{one['step']:10.1f}{one['peak'] / 1e6:10.1f}" if args.kernels else "")
            sys.stdout.flush()
    if args.json:
        args.json.write_text(json.dumps({"rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
