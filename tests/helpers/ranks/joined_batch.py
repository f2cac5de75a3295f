"""Training data parallel and serially side by side, on the joined batch."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autoshard.verification.comparison import finite, furthest, norm
from model_case import Batch, Case
from models import CASES
from side_by_side import difference, difference_by_norm, whole

Sizes = dict[str, int]

#: (mesh, ZeRO stage)
MATRIX = [
    ({"dp_replicate": 2}, 3),
    ({"dp_shard": 2}, 1),
    ({"dp_shard": 2}, 2),
    ({"dp_shard": 2}, 3),
    ({"dp_replicate": 2, "dp_shard": 2}, 3),
    ({"dp_shard": 2, "tp": 2}, 3),
]


def part(batch: Batch, n: int, index: int) -> Batch:
    """The rows of one of n ranks."""
    return {key: value.chunk(n)[index] for key, value in batch.items()}


def load(model: nn.Module, buffers: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])


def serial_backward(
    case: Case, model: nn.Module, batch: Batch, buffers: list[dict[str, torch.Tensor]], scale: float
) -> list[torch.Tensor]:
    """Backward of the mean of the ranks' losses; each rank's buffers are its own, as in DDP.

    Without BatchNorm and with rows of equal weight that mean is the loss of the joined batch.
    """
    losses = []
    for rank, own in enumerate(buffers):
        load(model, own)
        loss = case.loss(model, part(batch, len(buffers), rank))
        (loss * scale / len(buffers)).backward()
        own.update({name: b.clone() for name, b in model.named_buffers()})
        losses.append(loss.detach())
    return losses


def compare(model: nn.Module, serial: nn.Module, worst: dict[str, Any]) -> None:
    """Each gradient relative to its own norm, or to a thirtieth of the largest where that is more:
    some (a bias before BatchNorm, of an attention's keys) are nothing but rounding of its terms."""
    wanted = dict(serial.named_parameters())
    assert dict(model.named_parameters()).keys() == wanted.keys()
    floor = max(norm(finite(p.grad)) for p in wanted.values() if p.grad is not None) / 30
    for key, p in model.named_parameters():
        want = wanted[key].grad
        assert (p.grad is None) == (want is None), f"{key}: gradient {p.grad}, serial {want}"
        if want is None or p.grad is None:
            continue
        assert isinstance(p.grad, DTensor) and p.grad.placements == p.placements, key
        error = difference_by_norm(p.grad, want, floor)
        worst["gradient"] = furthest([worst["gradient"], error])
        if worst["gradient"] == error:
            worst["where"] = key


def train(
    name: str,
    sizes: Sizes,
    micro: Sequence[int],
    options: dict[str, Any],
    foreach: bool = True,
    wait: bool = False,
    adam: bool = False,
) -> dict[str, Any]:
    """Train a case on the mesh and serially side by side; the worst relative differences.

    micro: microbatches of each step. wait: all microbatches but the last run in `no_sync`. adam:
    with AdamW, instead of SGD with momentum.
    """
    import autoshard
    from autoshard.runtime.mesh import data_coordinate, init_mesh

    case = CASES[name]
    model = case.make_model()
    serial = copy.deepcopy(model)
    mesh = init_mesh(sizes, "cpu")
    ranks, rank = mesh.batches, data_coordinate(mesh)
    if rank:
        with torch.no_grad():  # rank 0's weights are everyone's
            for p in model.parameters():
                p.add_(1.0)
    kind: Any = torch.optim.AdamW if adam else torch.optim.SGD
    # eps: of a gradient that is rounding, AdamW makes a step of its sign
    more = {"lr": 1e-2, "eps": 1e-3} if adam else {"lr": 0.05, "momentum": 0.9}
    optimizer, reference = (
        kind(one.parameters(), foreach=foreach, **more) for one in (model, serial)
    )
    compiled = torch.compile(
        model, backend="autoshard", options={"mesh": sizes, "inner": "aot_eager", **options}
    )
    buffers = [{k: b.clone() for k, b in serial.named_buffers()} for _ in range(ranks)]
    worst: dict[str, Any] = {"loss": 0.0, "gradient": 0.0, "norm": 0.0, "where": ""}
    batches = (case.make_batch(number) for number in itertools.count())
    for count in micro:
        for i in range(count):
            batch = next(batches)
            expected = serial_backward(case, serial, batch, buffers, 1 / count)[rank]
            early = wait and i + 1 < count
            with autoshard.no_sync(compiled) if early else contextlib.nullcontext():
                loss = case.loss(compiled, part(batch, ranks, rank))
                (loss / count).backward()
            worst["loss"] = furthest([worst["loss"], difference(loss, expected)])
        compare(model, serial, worst)
        found = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        want = torch.nn.utils.clip_grad_norm_(serial.parameters(), 1.0)
        worst["norm"] = furthest([worst["norm"], difference(found, want)])
        for one in (optimizer, reference):
            one.step()
            one.zero_grad()
    wanted = dict(serial.named_parameters())
    worst["parameter"] = furthest(
        difference(p, wanted[key], 1.0) for key, p in model.named_parameters()
    )
    worst["buffer"] = furthest(
        [0.0, *(difference(b, buffers[rank][key], 1.0) for key, b in model.named_buffers())]
    )
    worst["programs"] = len(autoshard.programs(model))
    worst["local"] = sum(
        (p.to_local() if isinstance(p, DTensor) else p).numel() for p in model.parameters()
    )
    worst["total"] = sum(p.numel() for p in model.parameters())
    return worst


def check(results: list[dict[str, Any]], split: int, programs: int = 1) -> None:
    for result in results:
        for kind in ("loss", "gradient", "norm", "parameter", "buffer"):
            assert result[kind] < 1e-5, result
        assert result["programs"] == programs, result
        assert result["total"] / split <= result["local"] <= 1.1 * result["total"] / split, result


def one_step(
    model: nn.Module, compiled: Any, optimizer: Any, ranks: int, rank: int, name: str
) -> None:
    case = CASES[name]
    case.loss(compiled, part(case.make_batch(0), ranks, rank)).backward()
    optimizer.step()
    optimizer.zero_grad()


def trained(
    sizes: Sizes, name: str = "mlp", ep_exchange: str = "auto", **adam: Any
) -> tuple[nn.Module, Any, Any]:
    """A model after one AdamW step on the mesh, its optimizer, and a function that steps again."""
    from autoshard.runtime.mesh import data_coordinate, init_mesh

    mesh = init_mesh(sizes, "cpu")
    ranks, rank = mesh.batches, data_coordinate(mesh)
    model = CASES[name].make_model()
    optimizer = torch.optim.AdamW(model.parameters(), eps=1e-3, **adam)
    options = {"mesh": sizes, "inner": "aot_eager", "planner": {"ep_exchange": ep_exchange}}
    compiled = torch.compile(model, backend="autoshard", options=options)

    def step() -> None:
        one_step(model, compiled, optimizer, ranks, rank, name)

    step()
    return model, optimizer, step


def everything(model: nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    """Whole parameters and optimizer state, by name."""
    found = {}
    for name, p in model.named_parameters():
        found[name] = whole(p.detach())
        for key in ("exp_avg", "exp_avg_sq", "step"):
            found[f"{name} {key}"] = whole(optimizer.state[p][key])
    return found
