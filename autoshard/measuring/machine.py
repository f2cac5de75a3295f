"""Measure the machine that this process runs on, and describe it in a cluster file."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autoshard.errors import ConfigError, message
from autoshard.measuring.device import Product, memory_rate, product_rates
from autoshard.measuring.links import Fit, Sample, collective_times, fitted
from autoshard.planning.cost import Cluster, cluster_of
from autoshard.runtime.agreement import from_first, gather, world_axis
from autoshard.runtime.files import write_whole
from autoshard.runtime.mesh import start_world


@dataclass(frozen=True)
class Effort:
    """How much is measured: (rows, inner, columns) of products, bytes of a tensor of the memory's
    sum, logical bytes of collectives, and seconds for each measurement."""

    products: tuple[tuple[int, int, int], ...]
    memory: int
    collectives: tuple[int, ...]
    budget: float


EFFORTS = {
    "cuda": Effort(
        ((1024, 4096, 4096), (4096, 4096, 4096), (8192, 4096, 14336), (8192, 8192, 8192)),
        2**30,
        tuple(2**power for power in range(12, 29, 2)),
        0.4,
    ),
    "cpu": Effort(
        ((256, 512, 512), (512, 1024, 1024), (1024, 1024, 2048)),
        2**26,
        tuple(2**power for power in range(12, 25, 2)),
        0.4,
    ),
}
"""What a minute allows on each kind of device."""


@dataclass(frozen=True)
class Measured:
    """What was measured, on the ranks that measured.

    base: the machine as its data sheet describes it; its memory's size and ranks a node are used.
    samples, fits: collectives, and the link fitted to them, by "inside" and "between"; without
    those of a kind that this world has no ranks for.
    """

    name: str
    base: Cluster
    products: tuple[Product, ...]
    memory: float
    samples: dict[str, tuple[Sample, ...]]
    fits: dict[str, Fit]

    def rate(self, kind: str) -> float:
        """Operations a second of the fastest product of a kind; "float8" counts as half."""
        kind = "half" if kind == "float8" else kind
        return max(each.rate for each in self.products if each.kind == kind)

    def description(self) -> dict[str, Any]:
        """The body of a cluster file. Rates are what a program gets, so that no efficiency is left
        to be assumed; a link that was not measured is the data sheet's, as is the host's memory."""
        sheet, share, links = self.base.device, self.base.efficiency, {}
        known = {"inside": self.base.inside, "between": self.base.between, "host": sheet.host}
        for kind, link in known.items():
            if one := self.fits.get(kind) or (link and self.base.real(link)):
                links[kind] = {
                    "microseconds": _digits(1e6 * one.latency),
                    "gigabytes_per_second": _digits(one.bandwidth / 1e9),
                }
        if sheet.host is not None:
            rate = share.memory * sheet.host_memory_bandwidth
            links["host"]["memory_gigabytes_per_second"] = _digits(rate / 1e9)
        kinds = ("float8", "half", "float32", "float64")
        return {
            "name": self.name,
            "kind": sheet.kind,
            "devices_per_node": self.base.per_node,
            "memory": {
                "gigabytes": _digits(sheet.memory_bytes / 1e9),
                "gigabytes_per_second": _digits(self.memory / 1e9),
            },
            "tera_flops": {kind: _digits(self.rate(kind) / 1e12) for kind in kinds},
            **links,
            "efficiency": {
                "compute": 1,
                "memory": 1,
                "links": 1,
                "fits": share.fits,
                "attention": share.attention,
                "float8": 1,
                "overlap": share.overlap,
                "narrow": share.narrow,
            },
        }

    def save(self, path: Path) -> None:
        """Write the cluster file."""
        write_whole(path, json.dumps(self.description(), indent=1) + "\n", "cluster file")


def measure_machine(
    device: str,
    effort: Effort | None = None,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Measured:
    """Measure this process's device, and the links between the ranks that torchrun started.

    All ranks call it, at the same time: devices of one node share its power and its memory, as they
    do in a training step. The slowest rank's rates count, and every rank returns the same.
    device: "cpu" or the kind of accelerator. progress: called with (what, number, of how many).
    Raises ConfigError where there is none of it.
    """
    if device != "cpu" and not torch.get_device_module(device).is_available():
        raise ConfigError(
            message(f"there is no {device} device to measure", remedy="Give --device cpu.")
        )
    world = start_world(device)
    base = cluster_of(device)
    effort = effort or EFFORTS.get(device, EFFORTS["cuda"])
    groups = _groups(world, base.per_node)
    total = 3 * len(effort.products) + 1 + 4 * len(effort.collectives) * len(groups)
    done = 0

    def tell(what: str) -> None:
        nonlocal done
        done += 1
        progress(what, done, total)

    products = []
    for each in product_rates(device, list(effort.products), effort.budget):
        products.append(each)
        tell(f"{each.kind} product")
    memory = memory_rate(device, effort.memory, effort.budget)
    tell("memory")
    samples: dict[str, tuple[Sample, ...]] = {}
    for kind, group in groups.items():
        found = []
        for one in collective_times(group, effort.collectives, device, effort.budget):
            found.append(one)
            tell(f"{one.op} {kind} the node" if kind == "inside" else f"{one.op} between nodes")
        samples[kind] = tuple(found)
    everyone = world_axis()
    slowest = [
        min(rates)
        for rates in zip(*gather([memory, *(p.rate for p in products)], "measured rates", everyone))
    ]
    times = from_first(
        {kind: [one.seconds for one in found] for kind, found in samples.items()},
        "measured collectives",
        everyone,
    )
    samples = {
        kind: tuple(one._replace(seconds=t) for one, t in zip(found, times[kind]))
        for kind, found in samples.items()
    }
    return Measured(
        _name(device),
        base,
        tuple(p._replace(rate=rate) for p, rate in zip(products, slowest[1:])),
        slowest[0],
        samples,
        {kind: fitted(found) for kind, found in samples.items()},
    )


def _groups(world: int, per_node: int) -> dict[str, dist.ProcessGroup]:
    """This rank's neighbours in its node, and its likes of other nodes, where it has some. All
    ranks make all groups, in one order, as torch asks."""
    if world == 1:
        return {}
    rank = dist.get_rank()
    found = {}
    inside = [list(range(at, min(at + per_node, world))) for at in range(0, world, per_node)]
    between = [list(range(at, world, per_node)) for at in range(min(per_node, world))]
    for kind, parts in (("inside", inside), ("between", between)):
        for part in parts:
            if len(part) > 1 and len(part) < world:
                group = dist.new_group(part)
                if rank in part:
                    found[kind] = group
            elif len(part) == world:
                found[kind] = dist.group.WORLD
    return found


def _name(device: str) -> str:
    if device == "cpu":
        return "this-cpu"
    return torch.get_device_module(device).get_device_name().lower().replace(" ", "-")  # type: ignore[no-any-return]


def _digits(number: float) -> float:
    return float(f"{number:.4g}")
