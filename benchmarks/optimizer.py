"""An optimizer's step on two ranks: `autoshard.optimizer` beside FSDP2's parameters.

    torchrun --nproc-per-node=2 benchmarks/optimizer.py [--parameters 300] [--matrices 8] [--json F]

AdamW on short vectors, so that the host's work is the step: microseconds of its thread a parameter.
Rows are split as this backend stores them (`stored`: stepped by torch's own optimizer) and as
fully_shard does. Contestants take turns in one run, on the same gradients; each figure is a median,
`ratio` is against FSDP2 with the same kernels.

Muon on matrices: milliseconds where every rank gathers and computes all (`gathers`), where as many
matrices of a shape as there are ranks are exchanged at a time and each rank computes one, as
torchtitan does by hand (`titan`), and by owners. `products`: floating-point operations of all ranks
over those of one device; bytes that all send, over those of the formula: of each matrix two bytes
an element there and back, but for the part that its owner has.

`clip_grad_norm_` beside both, with its collectives.

Parameters that are not equal in the end, bit for bit, products counted twice and other bytes than
the formula's are a failure, and the exit status says so.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.flop_counter import flop_registry

import autoshard
from autoshard.runtime import compat
from autoshard.runtime.parameters.eager.stored_tensor import as_parameter, as_stored

aten = torch.ops.aten

KERNELS: dict[str, dict[str, Any]] = {"foreach": {"foreach": True}, "fused": {"fused": True}}


def parameters_of(
    mesh: DeviceMesh, shapes: Sequence[tuple[int, ...]], ours: bool
) -> list[nn.Parameter]:
    """Drawn parameters and gradients, rows split over two ranks, as this backend stores them or as
    fully_shard does."""
    generator = torch.Generator().manual_seed(0)

    def part(shape: tuple[int, ...]) -> DTensor:
        whole = torch.randn(shape, generator=generator)
        local = whole.chunk(2)[mesh.get_local_rank()].clone()
        return DTensor.from_local(local, mesh, [Shard(0)], run_check=False)

    made = []
    for shape in shapes:
        value, gradient = part(shape), part(shape)
        if ours:
            made.append(as_parameter(as_stored(value), True))
            made[-1].grad = as_stored(gradient)
        else:
            made.append(nn.Parameter(value))
            made[-1].grad = gradient
    return made


def measured(
    contestants: dict[str, Any], clock: Callable[[], float], steps: int
) -> dict[str, float]:
    """Seconds of a step of each, which take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(steps):
        for name, optimizer in contestants.items():
            dist.barrier()
            started = clock()
            optimizer.step()
            seconds[name].append(clock() - started)
    return {name: statistics.median(found[3:]) for name, found in seconds.items()}


def orthogonal(x: torch.Tensor) -> torch.Tensor:
    """Newton-Schulz as torch.optim.Muon has it."""
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.T
        gram = torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        x = torch.addmm(x, gram, x, beta=3.4445)
    return x.T if tall else x


class MuonByHand:
    """Muon's step of rows that are split over the ranks, by one of the ways people write it."""

    def __init__(self, parameters: list[nn.Parameter], titan: bool, lr: float = 1e-3) -> None:
        self.held: list[DTensor] = parameters  # type: ignore[assignment]
        self.lr, self.titan = lr, titan
        self.momenta = [torch.zeros_like(p.to_local()) for p in self.held]

    @torch.no_grad()
    def step(self) -> None:
        """One step of all, whose shapes come in runs as long as there are ranks."""
        updates = []
        for p, momentum in zip(self.held, self.momenta):
            gradient = p.grad.to_local()  # type: ignore[union-attr]
            momentum.lerp_(gradient, 0.05)
            updates.append(gradient.lerp(momentum, 0.95).bfloat16())
        ranks, rank = dist.get_world_size(), dist.get_rank()
        for start in range(0, len(updates), ranks):
            rows = updates[start : start + ranks]
            if self.titan:
                whole = torch.cat([torch.empty_like(rows[rank])] * ranks)
                dist.all_to_all_single(whole, torch.cat(rows))
                made = orthogonal(whole).contiguous()
                back = torch.empty_like(made)
                dist.all_to_all_single(back, made)
                rows = list(back.chunk(ranks))
            else:
                for number, row in enumerate(rows):
                    whole = torch.cat([torch.empty_like(row)] * ranks)
                    dist.all_gather_into_tensor(whole, row)
                    rows[number] = orthogonal(whole).chunk(ranks)[rank]
            for p, update in zip(self.held[start:], rows):
                local = p.to_local()
                local.mul_(1 - self.lr * 0.1)
                ratio = max(1, p.shape[0] / p.shape[1]) ** 0.5
                local.add_(update, alpha=-self.lr * ratio)


PRODUCTS = {aten.mm.default: aten.mm, aten.addmm.default: aten.addmm}


class Products(compat.TorchDispatchMode):
    """Floating-point operations of the products that run; those of values without memory do not."""

    flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in PRODUCTS and not out.is_meta:
            count = flop_registry[PRODUCTS[func]]
            self.flops += count(*args, **(kwargs or {}), out_val=out)
        return out


def muon(mesh: DeviceMesh, count: int, side: int, steps: int) -> dict[str, Any]:
    """Seconds, products and bytes of Muon's step, and whether all have the same parameters then."""
    shapes = [(side, side) if i // 2 % 2 else (2 * side, side) for i in range(count)]
    parameters = {n: parameters_of(mesh, shapes, n == "optimizer") for n in ("gathers", "titan")}
    parameters["optimizer"] = parameters_of(mesh, shapes, True)
    ours: Any = autoshard.optimizer(torch.optim.Muon(parameters["optimizer"]))
    contestants: dict[str, Any] = {
        name: MuonByHand(parameters[name], name == "titan") for name in ("gathers", "titan")
    }
    contestants["optimizer"] = ours
    products = {}
    for name, each in contestants.items():
        each.step()  # what the first one records is no product that runs
        with Products() as counted:
            each.step()
        whole = torch.tensor(counted.flops)
        dist.all_reduce(whole)
        products[name] = whole.item()
    alone = torch.optim.Muon([nn.Parameter(torch.zeros(s)) for s in shapes])
    for p in alone.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    with Products() as counted:
        alone.step()
    sent = torch.tensor(ours.__dict__["_autoshard_parts"].owned_steps.sent)
    dist.all_reduce(sent)
    seconds = measured(contestants, time.perf_counter, steps)
    found = {name: wholes(held) for name, held in parameters.items()}
    rows = {
        name: {
            "ms": 1e3 * value,
            "ratio": value / seconds["gathers"],
            "products": products[name] / counted.flops,
        }
        for name, value in seconds.items()
    }
    formula = sum(2 * 2 * n * m * (mesh.size() - 1) // mesh.size() for n, m in shapes)
    same = all(all(map(torch.equal, each, found["gathers"])) for each in found.values())
    same = same and sent.item() == formula and rows["optimizer"]["products"] == 1
    return {"rows": rows, "sent": sent.item() / formula, "same": same}


def wholes(parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    """The parameters' values."""
    return [p.detach().full_tensor() for p in parameters]  # type: ignore[operator]


def adamw(mesh: DeviceMesh, count: int, steps: int) -> dict[str, Any]:
    """Host seconds of AdamW's step, and whether all contestants have the same parameters then."""
    parameters, optimizers = {}, {}
    for kernels, settings in KERNELS.items():
        for name in ("FSDP2", "stored", "optimizer"):
            key = f"{name} {kernels}"
            parameters[key] = parameters_of(mesh, [(256,)] * count, name != "FSDP2")
            made = torch.optim.AdamW(parameters[key], lr=1e-3, **settings)
            optimizers[key] = autoshard.optimizer(made) if name == "optimizer" else made
    seconds = measured(optimizers, time.thread_time, steps)
    found = {name: wholes(held) for name, held in parameters.items()}
    same = all(
        all(map(torch.equal, found[name], found[f"FSDP2 {name.split()[1]}"])) for name in found
    )
    rows = {
        name: {
            "us_a_parameter": 1e6 * value / count,
            "ratio": value / seconds[f"FSDP2 {name.split()[1]}"],
        }
        for name, value in seconds.items()
    }
    return {"rows": rows, "same": same}


def clipping(mesh: DeviceMesh, count: int, steps: int) -> dict[str, Any]:
    """Host seconds and collectives of `clip_grad_norm_`, and whether the norms are the same."""

    def clip(held: list[nn.Parameter]) -> torch.Tensor:
        norm = nn.utils.clip_grad_norm_(held, 1.0)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    given = {
        name: parameters_of(mesh, [(256,)] * count, name != "FSDP2") for name in ("FSDP2", "stored")
    }
    rows: dict[str, Any] = {}
    norms = []
    for name, held in given.items():
        with CommDebugMode() as mode:
            norms.append(clip(held))
        rows[name] = {"collectives": mode.get_total_counts()}
    ways = {name: SimpleNamespace(step=partial(clip, held)) for name, held in given.items()}
    seconds = measured(ways, time.thread_time, steps)
    for name, value in seconds.items():
        rows[name].update(us_a_parameter=1e6 * value / count, ratio=value / seconds["FSDP2"])
    return {"rows": rows, "same": bool((norms[0] - norms[1]).abs() < 1e-6 * norms[0])}


def main() -> int:
    """Measure, print on rank 0; 1 where numbers differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=int, default=300)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--matrices", type=int, default=8)
    parser.add_argument("--side", type=int, default=512)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    found = {"adamw": adamw(mesh, args.parameters, args.steps)}
    found["muon"] = muon(mesh, args.matrices, args.side, max(args.steps // 4, 5))
    found["clip_grad_norm_"] = clipping(mesh, args.parameters, args.steps)
    if dist.get_rank() == 0:
        for name, row in found["adamw"]["rows"].items():
            print(f"AdamW {name:18}{row['us_a_parameter']:8.2f} us a parameter{row['ratio']:7.2f}")
        for name, row in found["clip_grad_norm_"]["rows"].items():
            print(
                f"clip_grad_norm_ {name:10}{row['us_a_parameter']:6.2f} us a parameter"
                f"{row['ratio']:7.2f}, collectives: {row['collectives']}"
            )
        for name, row in found["muon"]["rows"].items():
            print(
                f"Muon {name:19}{row['ms']:8.1f} ms{row['ratio']:7.2f}, products of one device "
                f"{row['products']:.2f} times"
            )
        print(f"Muon by owners sends {found['muon']['sent']:.3f} of the formula's bytes")
        print(f"as it must be: {[part['same'] for part in found.values()]}")
        if args.json:
            args.json.write_text(json.dumps(found, indent=1))
    failed = not all(part["same"] for part in found.values())
    dist.destroy_process_group()
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
