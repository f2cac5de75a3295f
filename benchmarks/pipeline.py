"""Pipelines against torch.distributed.pipelining cut by hand, on gloo processes: time, peak, bytes.

    torchrun --nproc-per-node=2 benchmarks/pipeline.py [--steps 10] [--inner inductor] [--json PATH]
    torchrun --nproc-per-node=4 benchmarks/pipeline.py

One Llama: this backend cuts it by itself, by each of its schedules; for torch it is cut by hand in
equal numbers of layers, with the embedding on the first stage and the head on the last, and run by
the schedule of the same kind. All run operator by operator, or with `--inner inductor` all are
compiled, torch's parts by `nn.Module.compile`. In one run they take turns step by step, so that
other load on the machine meets all of them. A row is the median over steps, each column followed by
its ratio to torch's of the same schedule (zb1: to torch's 1F1B). Before the race the loss of every
contestant is compared with the serial model's.

- step: forward, backward, SGD, zero_grad, between two barriers; the slowest rank counts.
- peak: parameters, and above them the allocations of a step of its own under torch.profiler; of the
  rank that needs most. predicted: what `autoshard.trace(...).memory()` says of that stage, where
  operators run one by one.
- sent: what the kernel says the processes sent over their sockets in a step, together.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

import autoshard
from data_parallel import SETTLING, Contestant, Measured
from llama_model import Llama, Shape, WithLoss, loss_of

SHAPE = Shape(vocab=2048, width=256, hidden=704, layers=8, heads=4, length=64)
RIVALS = {
    "gpipe": "torch GPipe",
    "1f1b": "torch 1F1B",
    "interleaved": "torch Interleaved1F1B",
    "zb1": "torch 1F1B",
}


class Part(nn.Module):
    """Some layers of the model, cut by hand: with the embedding, or the head, at its ends."""

    def __init__(self, model: Llama, number: int, of: int) -> None:
        super().__init__()
        each = len(model.blocks) // of
        self.embedding = model.embedding if number == 0 else None
        self.blocks = model.blocks[number * each : (number + 1) * each]
        self.norm, self.head = (model.norm, model.head) if number == of - 1 else (None, None)
        self.register_buffer("cos", model.cos, persistent=False)
        self.register_buffer("sin", model.sin, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return x if self.head is None else self.head(self.norm(x))


class Step(Measured):
    """A contestant whose call does forward and backward, and returns the loss where it has it."""

    loss = 0.0

    def step(self, x: torch.Tensor) -> None:
        """One training step."""
        self.loss = float(self.contestant.call(x))
        if self.optimizer is None:
            self.optimizer = torch.optim.SGD(self.contestant.module.parameters(), lr=1e-3)
        self.optimizer.step()
        self.optimizer.zero_grad()


def ours(model: Llama, schedule: str, count: int, inner: str) -> Contestant:
    """This backend with one schedule."""
    module = WithLoss(copy.deepcopy(model))
    ranks = dist.get_world_size()
    options = {
        "mesh": {"pp": ranks},
        "pipeline": {"schedule": schedule, "microbatches": count},
        "inner": inner,
    }
    compiled = torch.compile(module, backend="autoshard", options=options)

    def call(ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = compiled(ids)
        loss.backward()
        return loss.detach()

    return Contestant(module, call, RIVALS[schedule])


def by_hand(model: Llama, schedule: Any, chunks: int, count: int, inner: str) -> Contestant:
    """torch's runtime, the model cut by hand."""
    ranks, rank, own = dist.get_world_size(), dist.get_rank(), copy.deepcopy(model)
    total, device = ranks * chunks, torch.device("cpu")
    parts = [Part(own, number, total) for number in range(rank, total, ranks)]
    if inner == "inductor":
        for part in parts:
            part.compile()
    stages = [
        PipelineStage(part, number, total, device)
        for number, part in zip(range(rank, total, ranks), parts)
    ]
    runner = schedule(stages[0] if chunks == 1 else stages, n_microbatches=count, loss_fn=loss_of)

    def call(ids: torch.Tensor) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        last = rank == ranks - 1
        given = {"target": ids, "losses": losses} if last else {}
        runner.step(*([ids] if rank == 0 else []), return_outputs=False, **given)
        loss = torch.stack(losses).mean().detach() if last else torch.zeros(())
        dist.broadcast(loss, ranks - 1)
        return loss

    return Contestant(nn.ModuleList(parts), call, "")


def contestants(model: Llama, count: int, inner: str) -> dict[str, Contestant]:
    """All of them by name, each with a copy of the model."""
    found = {f"autoshard {name}": ours(model, name, count, inner) for name in RIVALS}
    found["torch GPipe"] = by_hand(model, ScheduleGPipe, 1, count, inner)
    found["torch 1F1B"] = by_hand(model, Schedule1F1B, 1, count, inner)
    found["torch Interleaved1F1B"] = by_hand(model, ScheduleInterleaved1F1B, 2, count, inner)
    return found


def predicted(model: Llama, schedule: str, count: int, inner: str, ids: torch.Tensor) -> list[int]:
    """Bytes of each rank's stage at its peak, which are read in the graphs that run operator by
    operator; of several stages a rank, nothing is predicted."""
    if schedule == "interleaved" or inner == "inductor":
        return []
    mesh = {"pp": dist.get_world_size()}
    options: dict[str, Any] = {"pipeline": {"schedule": schedule, "microbatches": count}}
    torch.compiler.reset()
    traced: Any = autoshard.trace(WithLoss(copy.deepcopy(model)), (ids,), mesh=mesh, **options)
    return [stage.peak for stage in traced.memory()]


def over_ranks(value: float, op: Any) -> float:
    """One figure of all ranks."""
    found = torch.tensor(float(value), dtype=torch.float64)
    dist.all_reduce(found, op=op)
    return float(found)


def figures(measured: dict[str, Step], peaks: dict[str, list[int]]) -> dict[str, dict[str, float]]:
    """Per contestant: the figures, and each as a ratio to its rival's."""
    rows: dict[str, dict[str, float]] = {}
    for name, one in measured.items():
        seconds = torch.tensor(one.seconds)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        row = rows[name] = {
            "ms": 1e3 * statistics.median(seconds.tolist()),
            "peak_mb": over_ranks(one.peak, dist.ReduceOp.MAX) / 1e6,
            "sent_mb": over_ranks(one.sent, dist.ReduceOp.SUM) / 1e6,
            "loss": one.loss,
        }
        if peaks.get(name):
            error = peaks[name][dist.get_rank()] / one.peak
            row["predicted_mb"] = max(peaks[name]) / 1e6
            row["predicted_least"] = over_ranks(error, dist.ReduceOp.MIN)
            row["predicted_most"] = over_ranks(error, dist.ReduceOp.MAX)
    for name, row in rows.items():
        rival = rows.get(measured[name].contestant.rival, row)
        for key in ("ms", "peak_mb", "sent_mb"):
            row[f"{key}_ratio"] = row[key] / rival[key] if rival[key] else 1.0
    return rows


def table(rows: dict[str, dict[str, float]]) -> str:
    """The figures, each followed by its ratio."""
    keys = ("ms", "peak_mb", "sent_mb")
    heads = ("ms a step", "peak MB", "sent MB")
    lines = [f"{'':24}" + "".join(f"{h:>10}{'ratio':>7}" for h in heads) + "   predicted/peak"]
    for name, row in rows.items():
        cells = "".join(f"{row[key]:10.1f}{row[key + '_ratio']:7.2f}" for key in keys)
        told = ""
        if "predicted_mb" in row:
            told = f"   {row['predicted_least']:.2f} to {row['predicted_most']:.2f}"
        lines.append(f"{name:24}{cells}{told}")
    return "\n".join(lines)


def check(measured: dict[str, Step], serial: Callable[[], float]) -> None:
    """Raise where a contestant's first loss is not the serial model's."""
    want = serial()
    for name, one in measured.items():
        if not abs(one.loss - want) <= 1e-4 * want:
            raise SystemExit(f"{name}: loss {one.loss}, serial {want}")


def main() -> None:
    """Run all contestants and print the table on rank 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--inner", default="aot_eager", choices=["aot_eager", "inductor"])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Llama(SHAPE)
    ids = torch.randint(SHAPE.vocab, (args.batch, SHAPE.length))
    count, inner = args.microbatches, args.inner
    peaks = {f"autoshard {name}": predicted(model, name, count, inner, ids) for name in RIVALS}
    torch.compiler.reset()
    found = contestants(model, count, inner)
    measured = {name: Step(one) for name, one in found.items()}
    for number in range(SETTLING + args.steps):
        for one in measured.values():
            one.turn(number, ids)
        if number == 0:
            check(measured, lambda: float(WithLoss(model)(ids).detach()))
    rows = figures(measured, peaks)
    if dist.get_rank() == 0:
        print(table(rows))
        if args.json:
            settings = {key: str(value) for key, value in vars(args).items()}
            args.json.write_text(json.dumps({"settings": settings, "rows": rows}, indent=2) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
