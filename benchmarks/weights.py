"""Weights of a running job to another mesh: by the plan, beside whole tensors that are broadcast.

    torchrun --nproc-per-node=4 benchmarks/weights.py [--layers 8] [--rounds 5] [--json PATH]

Ranks 0 and 1 hold a Llama on dp_shard=2, ranks 2 and 3 take its weights on tp=2. `gather,
broadcast` is what trainers do that know of no layout but the whole: each parameter is gathered by
the ranks that train, rank 0 broadcasts it to those that generate, and each cuts its part. Seconds
are of the slowest rank, the best of rounds that take turns; both end with the same bits, or the run
is an error. Bytes are those of the fullest link, by two readings: what the fullest process sends
and receives, over the one link that it has; and what the fullest pair of processes exchanges, one
way. They are counted by the plan, and for a broadcast once for each tensor and receiver.

Of a pair no plan is better than the bound beside it: of the elements that one process alone holds
and another one wants, all go from the one to the other. On dp_shard=2 that is every element: half
of what tp=2 divides by the same dim, a fourth of what it divides by another.

Below stands the case of 470 GB on paper, by the formula that is printed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import autoshard
from autoshard.runtime.mesh import axes_of
from autoshard.runtime.parameters import local_part, stored_states
from autoshard.weights import parts_of
from autoshard.weights.boxes import common, elements
from llama_model import Llama, Shape

GB = 1e9


def stored(shape: Shape, ranks: list[int], axis: str, seed: int) -> nn.Module:
    """A Llama of drawn weights, stored on a mesh of one axis of some ranks."""
    mesh = DeviceMesh("cpu", torch.tensor(ranks), mesh_dim_names=(axis,))
    model = Llama(shape)
    if dist.get_rank() in ranks:
        torch.manual_seed(seed)
        for parameter in model.parameters():
            nn.init.normal_(parameter)
        ids = torch.zeros(4, shape.length, dtype=torch.int64)
        autoshard.shard(model, (ids,), mesh=mesh, inner="aot_eager")
    return model


def broadcast(trainer: nn.Module, generator: nn.Module, group: Any) -> None:
    """Each parameter whole: gathered on ranks 0 and 1, sent by rank 0, cut on ranks 2 and 3."""
    for given, taken in zip(trainer.parameters(), generator.parameters(), strict=True):
        if dist.get_rank() < 2:
            assert isinstance(given, DTensor)
            whole = given.detach().full_tensor()
        else:
            whole = torch.empty(taken.shape, dtype=taken.dtype)
        if dist.get_rank() != 1:
            dist.broadcast(whole, 0, group=group)
        if dist.get_rank() >= 2:
            assert isinstance(taken, DTensor)
            part = local_part(whole, stored_states(taken), axes_of(taken.device_mesh))
            taken.detach().to_local().copy_(part)


def planned(trainer: nn.Module, generator: nn.Module, buffer: int) -> Any:
    """One update by the plan."""
    if dist.get_rank() < 2:
        return autoshard.weights.send(trainer, buffer=buffer).wait()
    return autoshard.weights.receive(generator, buffer=buffer).wait()


def fullest_pair(trainer: nn.Module, generator: nn.Module) -> int:
    """The least bytes of the fullest pair by any plan, where each element has one holder."""
    model = trainer if dist.get_rank() < 2 else generator
    parts = {
        name: (part.box, part.tensor.element_size()) for name, part in parts_of(model)[0].items()
    }
    each: list[Any] = [None] * 4
    dist.all_gather_object(each, parts)
    return max(
        sum(
            elements(both) * size
            for name, (box, size) in each[sender].items()
            if (both := common(box, each[receiver][name][0])) is not None
        )
        for sender in (0, 1)
        for receiver in (2, 3)
    )


def on_paper(weights: float, senders: int, receivers: int, tp: int, rate: float) -> dict[str, Any]:
    """Seconds of an update on links of `rate` bytes a second, one a rank, full duplex.

    Whole tensors: every rank that receives takes all W bytes over its link, W / rate. Planned: it
    takes its W / tp, and the receivers / tp replicas of the weights leave `senders` links.
    """
    replicas = receivers / tp
    planned = max(weights / tp, weights * replicas / senders) / rate
    return {
        "gigabytes": weights / GB,
        "senders": senders,
        "receivers": receivers,
        "tp": tp,
        "whole_s": weights / rate,
        "planned_s": planned,
        "ratio": planned * rate / weights,
    }


def main() -> None:
    """Time both and print a table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--buffer", type=int, default=16 * 2**20)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    shape = Shape(width=args.width, hidden=args.width * 11 // 4, layers=args.layers, heads=16)
    group = dist.new_group([0, 2, 3])
    trainer = stored(shape, [0, 1], "dp_shard", seed=1)
    generator = stored(shape, [2, 3], "tp", seed=2)
    size = sum(p.numel() * p.element_size() for p in trainer.parameters())
    reports: list[Any] = []
    ways: dict[str, Callable[[], object]] = {
        "gather, broadcast": lambda: broadcast(trainer, generator, group),
        "planned": lambda: reports.append(planned(trainer, generator, args.buffer)),
    }
    best, sums = dict.fromkeys(ways, float("inf")), {}
    for _ in range(args.rounds):
        for name, way in ways.items():
            for parameter in generator.parameters() if rank >= 2 else ():
                parameter.detach().zero_()
            dist.barrier()
            started = time.perf_counter()
            way()
            seconds = torch.tensor(time.perf_counter() - started)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            best[name] = min(best[name], seconds.item())
            held = [p.detach().to_local() for p in generator.parameters()] if rank >= 2 else []  # type: ignore[operator]
            sums[name] = [part.clone() for part in held]
    equal = all(torch.equal(a, b) for a, b in zip(*sums.values(), strict=True))
    assert equal, "the two ways end with other bits"
    report = reports[-1]
    through = torch.tensor(report.sent + report.received)
    dist.all_reduce(through, dist.ReduceOp.MAX)
    # rank 0 gets rank 1's half and gives its own, and a whole to each of ranks 2 and 3
    processes = {"gather, broadcast": 3 * size, "planned": int(through)}
    pairs = {"gather, broadcast": size, "planned": report.link}
    bound = fullest_pair(trainer, generator)
    paper = [on_paper(470 * GB, n, n, tp, 50 * GB) for n, tp in ((16, 16), (64, 16), (64, 8))]
    if rank == 0:
        print(
            f"{size / 1e6:.0f} MB on dp_shard=2 to tp=2, gloo; buffer {report.buffer / 1e6:.1f} MB"
        )
        print(f"{'':20}{'s':>8}{'MB a process':>15}{'MB a pair':>12}")
        for name in ways:
            line = f"{name:20}{best[name]:8.3f}{processes[name] / 1e6:15.1f}"
            print(f"{line}{pairs[name] / 1e6:12.1f}")
        ratios = [by["planned"] / by["gather, broadcast"] for by in (best, processes, pairs)]
        print(f"{'ratio':20}{ratios[0]:8.2f}{ratios[1]:15.2f}{ratios[2]:12.2f}")
        print(f"{'bound of a pair':20}{bound / 1e6:35.1f}, {bound / size:.2f} of the whole")
        print(
            "\non paper, links of 50 GB/s: whole W / rate, "
            "planned max(W / tp, W replicas / senders) / rate"
        )
        for row in paper:
            print(
                f"{row['gigabytes']:.0f} GB, {row['senders']} to {row['receivers']} ranks, "
                f"tp={row['tp']}: {row['whole_s']:.2f} s whole, {row['planned_s']:.2f} s planned"
            )
        if args.json is not None:
            result = {"bytes": size, "seconds": best, "process": processes, "pair": pairs}
            result |= {"bound": bound, "paper": paper}
            args.json.write_text(json.dumps(result, indent=2))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
