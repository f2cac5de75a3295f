"""Clusters: machines, the links that the ranks of a mesh axis use, and files that describe them.

A cluster is nodes of equal devices. Ranks are laid out with `tp` innermost, then `cp`, `dp_shard`
and `dp_replicate`, as `runtime.mesh.AXIS_ORDER` has it and torchrun numbers them, so the layout
says which axis stays inside a node. A description in a file (JSON, or YAML with the extra):

    name: eight-h100
    devices_per_node: 8
    memory: {gigabytes: 80, gigabytes_per_second: 3350}
    tera_flops: {float8: 1979, half: 989, float32: 67, float64: 67}
    inside: {microseconds: 1.5, gigabytes_per_second: 450}
    between: {microseconds: 5, gigabytes_per_second: 50}
    host: {microseconds: 10, gigabytes_per_second: 64, memory_gigabytes_per_second: 76.8}
    efficiency: {compute: 0.58, memory: 0.8, links: 0.8, fits: 0.92, attention: 0.38}

Bandwidths are one rank's, in one direction. `host`, its memory and `efficiency` may be left out,
and so may `kind`, which is gpu, or cpu. The
machine that a process runs on is described by what its device and its launcher say.
"""

from __future__ import annotations

import difflib
import importlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autoshard.planning.cost.machines import (
    EFFICIENCIES,
    AcrossNodes,
    Efficiency,
    Hardware,
    Link,
    RowExchange,
    dtype_class,
)
from autoshard.planning.cost.model import OperatorWork
from autoshard.runtime.errors import ConfigError
from autoshard.runtime.files import MOST_RANKS, FileEntry, parsed, read_json
from autoshard.runtime.mesh import AXIS_ORDER

MOST_BYTES = 2**16
"""Bytes of the largest cluster file: PyYAML reads about a megabyte in ten seconds."""

LEAST, MOST = 1e-6, 1e9
"""The bounds of a figure in a cluster file: what is divided by is not 0, and sums stay finite."""

_HOST_MEMORY = "memory_gigabytes_per_second"
_MORE = ("tera_flops", "host", "efficiency", "rows")
_RATES = ("float8", "half", "float32", "float64")
_SIZES = {
    "memory": ("gigabytes", "gigabytes_per_second"),
    "inside": ("microseconds", "gigabytes_per_second"),
    "between": ("microseconds", "gigabytes_per_second"),
}


@dataclass(frozen=True)
class Cluster:
    """Nodes of `per_node` equal devices; `inside` and `between` are the links of one rank. rows:
    how rows travel to experts. assumed: the built-in machine whose efficiencies it has, where its
    description leaves them out."""

    device: Hardware
    per_node: int
    inside: Link
    between: Link
    efficiency: Efficiency = Efficiency()
    rows: RowExchange = RowExchange()
    assumed: str = ""

    @property
    def name(self) -> str:
        """The device's name."""
        return self.device.name

    @property
    def usable_bytes(self) -> int:
        """Bytes of a device that a rank's tensors may fill."""
        return int(self.device.memory_bytes * self.efficiency.fits)

    def link(self, size: int, stride: int) -> Link:
        """The link of an axis of `size` ranks that are `stride` ranks apart.

        Inside a node, the node's link. An axis with m of its ranks in each node crosses to the
        next node once for these m, over the m links to the network that they own: a ring gets the
        slower of the node's link and m of the network's (the picture behind the "bus bandwidth" of
        nccl-tests). Its latency is the mean over the ring's steps.
        """
        if size * stride <= self.per_node:
            return replace(self.inside, rows=self.rows)
        here = max(1, self.per_node // stride)
        crossing = 1 / here
        leaving = (size - min(here, size)) / max(1, size - 1)
        return Link(
            self.between.latency * crossing + self.inside.latency * (1 - crossing),
            min(self.inside.bandwidth, here * self.between.bandwidth),
            self.inside.copy_bandwidth,
            AcrossNodes(leaving, self.between.bandwidth, max(1, size // here)),
            self.rows,
        )

    def on(self, sizes: Mapping[str, int]) -> Machine:
        """The cluster with its ranks laid out as a mesh of these sizes, by axis name."""
        links, stride = {}, 1
        for name in reversed(AXIS_ORDER):
            size = sizes.get(name, 1)
            links[name] = self.link(size, stride)
            stride *= size
        own = {one.name: getattr(self, one.name) for one in fields(Cluster)}
        return Machine(**own, links=links)

    def host_seconds(self, nbytes: int) -> float:
        """Seconds to send bytes to the host, or to fetch them; infinite where no link is known."""
        if self.device.host is None:
            return math.inf
        return self.real(self.device.host).seconds(nbytes)

    def seconds(self, work: OperatorWork) -> float:
        """Roofline time of an operator at the rates that a program gets: the slower of its
        arithmetic and its memory traffic (S. Williams, A. Waterman, D. Patterson, "Roofline",
        Communications of the ACM 52(4), 2009)."""
        share, flops = self.efficiency, work.flops / self.efficiency.compute
        if work.attention:
            flops /= share.attention
        elif flops and share.narrow:
            flops *= 1 + share.narrow / work.narrowest
        if dtype_class(work.dtype) == "float8":
            flops /= share.float8
        moved = work.nbytes / share.memory
        return max(flops / self.device.peak(work.dtype), moved / self.device.memory_bandwidth)

    @cached_property
    def sheet(self) -> Cluster:
        """The cluster at the data sheet's rates, at which plans are compared."""
        return replace(self, efficiency=Efficiency(1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0))

    def real(self, link: Link) -> Link:
        """The link at the rate that a program gets of it."""
        share, across = self.efficiency, link.across
        return replace(
            link,
            bandwidth=link.bandwidth * share.links,
            copy_bandwidth=link.copy_bandwidth * share.memory,
            across=across and replace(across, way=across.way * share.links),
        )


@dataclass(frozen=True)
class Machine(Cluster):
    """A cluster whose ranks are laid out as a mesh: the one description that every price of a plan
    is taken from. links: of each axis of the mesh, at the data sheet's rates."""

    links: Mapping[str, Link] = field(default_factory=dict, hash=False)

    @cached_property
    def real_links(self) -> Mapping[str, Link]:
        """The link of each axis at the rate that a program gets of it."""
        return {axis: self.real(link) for axis, link in self.links.items()}


def _machine(
    name: str,
    *,
    tera_flops: Sequence[float],
    memory: Sequence[float],
    inside: Sequence[float],
    between: Sequence[float],
    host: Sequence[float] = (),
    host_memory: float | None = None,
    kind: str = "gpu",
    per_node: int = 8,
) -> Cluster:
    """memory: (GB, GB/s); inside a node, between nodes, host: (microseconds, GB/s a rank);
    host_memory: GB/s a rank."""
    size, bandwidth = memory

    def link(latency: float, rate: float) -> Link:
        return Link(latency * 1e-6, rate * 1e9, bandwidth * 1e9)

    device = Hardware(
        name,
        {kind: rate * 1e12 for kind, rate in zip(_RATES, tera_flops, strict=True)},
        bandwidth * 1e9,
        int(size * 1e9),
        link(*host) if host else None,
        Hardware.host_memory_bandwidth if host_memory is None else host_memory * 1e9,
        kind,
    )
    efficiency = EFFICIENCIES.get(name, Efficiency())
    return Cluster(device, per_node, link(*inside), link(*between), efficiency)


# Data sheets of the manufacturers: dense rates (without structured sparsity), memory as sold, and
# links in one direction. They are used to compare plans; what predicts a step's time takes parts
# of them. float32 is the rate torch uses unless told otherwise (no TF32). Latencies are no figures
# of data sheets: about what one step of a small collective takes on NVLink and on InfiniBand. The
# host is reached over PCIe of 16 lanes: generation 4 (a100), else 5. Of its memory a rank has an
# eighth of the bandwidth: a DGX has two processors of eight channels, of 8 bytes, by their data
# sheets DDR4-3200 (EPYC 7742, DGX A100), DDR5-4800 (Xeon 8480C, DGX H100 and H200) and DDR5-5600
# (Xeon 8570, DGX B200).
HARDWARE: Mapping[str, Cluster] = {
    machine.name: machine
    for machine in (
        _machine(
            "a100",
            tera_flops=(312, 312, 19.5, 19.5),  # no float8: it runs as half
            memory=(80, 2039),
            inside=(1.5, 300),
            between=(5, 25),
            host=(10, 32),
            host_memory=51.2,
        ),
        _machine(
            "h100",
            tera_flops=(1979, 989, 67, 67),
            memory=(80, 3350),
            inside=(1.5, 450),
            between=(5, 50),
            host=(10, 64),
            host_memory=76.8,
        ),
        _machine(
            "h200",
            tera_flops=(1979, 989, 67, 67),
            memory=(141, 4800),
            inside=(1.5, 450),
            between=(5, 50),
            host=(10, 64),
            host_memory=76.8,
        ),
        _machine(
            "b200",
            tera_flops=(4500, 2250, 75, 37),
            memory=(180, 7700),
            inside=(1.5, 900),
            between=(5, 50),
            host=(10, 64),
            host_memory=89.6,
        ),
        # A few cores of a server, and gloo between processes of one machine: typical, not sold.
        _machine(
            "cpu",
            tera_flops=(0.05, 0.05, 0.1, 0.05),
            memory=(16, 20),
            inside=(20, 2),
            between=(50, 1),
            host=(5, 10),
            host_memory=20,
            kind="cpu",
        ),
    )
}


DEFAULT_HARDWARE = "h100"
"""The machine to plan for where nobody names one, and what an unknown GPU counts as."""


def cluster(source: str | Cluster) -> Cluster:
    """A built-in cluster (a key of HARDWARE: eight GPUs or CPU processes a node), or
    the one that a .json, .yaml or .yml file describes. ConfigError where there is neither."""
    if isinstance(source, Cluster):
        return source
    if Path(source).suffix in (".json", ".yaml", ".yml"):
        return read_cluster(Path(source))
    if source in HARDWARE:
        return HARDWARE[source]
    near = difflib.get_close_matches(source, HARDWARE, n=1)
    meant = f" Did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"unknown hardware {source!r}; known: {', '.join(HARDWARE)}.{meant}")


def read_cluster(path: Path) -> Cluster:
    """The cluster that a file describes; ConfigError names the file and the entry."""
    what, remedy = "cluster file", "docs/planning.md shows a complete file."
    if path.suffix == ".json":
        body = read_json(path, what, ConfigError, remedy, MOST_BYTES)
    else:
        body = parsed(path, what, ConfigError, _yaml(path), "YAML", remedy, MOST_BYTES)
    body.only((*_SIZES, "name", "kind", "devices_per_node", *_MORE))
    figures = {name: _figures(body.entry(name), sizes) for name, sizes in _SIZES.items()}
    host: list[float] = []
    if (given := body.optional("host", {})).entries():
        names = _SIZES["inside"]
        told = [name for name in (*names, _HOST_MEMORY) if name in (*names, *given.entries())]
        host = _figures(given, told)
    described = _machine(
        tera_flops=_figures(body.entry("tera_flops"), _RATES),
        name=body.entry("name").text(),
        **figures,
        host=host[:2],
        host_memory=next(iter(host[2:]), None),
        kind=body.optional("kind", "gpu").text("gpu", "cpu"),
        per_node=body.entry("devices_per_node").integer(1, MOST_RANKS),
    )
    given = body.optional("efficiency", {})
    given.only(field.name for field in fields(Efficiency))
    shares = {
        name: share.number(0, MOST) if name == "narrow" else share.number(LEAST, 1)
        for name, share in given.entries().items()
    }
    known = nearest(described.device) if described.device.kind == "gpu" else ""
    efficiency = replace(EFFICIENCIES.get(known, Efficiency()), **shares)
    assumed = known if len(shares) < len(fields(Efficiency)) else ""
    travel = body.optional("rows", {})
    travel.only(field.name for field in fields(RowExchange))
    rows = RowExchange(
        travel.optional("deduplicated", False).flag(),
        travel.optional("overlap", 0).number(0, 1),
    )
    return replace(described, efficiency=efficiency, rows=rows, assumed=assumed)


def nearest(device: Hardware) -> str:
    """The built-in GPU whose rates of half-precision products and of memory are least far, as
    ratios, from a device's."""

    def apart(name: str) -> float:
        known = HARDWARE[name].device
        rates = (device.flops["half"], known.flops["half"])
        widths = (device.memory_bandwidth, known.memory_bandwidth)
        return sum(abs(math.log(own / other)) for own, other in (rates, widths))

    return min(EFFICIENCIES, key=apart)


def _figures(entry: FileEntry, names: Sequence[str]) -> list[float]:
    """The figures of these names, of which only a latency may be 0."""
    entry.only(names)
    return [
        entry.entry(name).number(0 if name == "microseconds" else LEAST, MOST) for name in names
    ]


def _yaml(path: Path) -> Callable[[str], Any]:
    try:
        return importlib.import_module("yaml").safe_load  # type: ignore[no-any-return]
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the cluster file {path} needs PyYAML, which is not installed",
            remedy="pip install 'autoshard[yaml]', or write it as JSON.",
        ) from error


#: What a CPU process may fill of its part of the machine's memory.
_FITS_CPU = 0.8


def cluster_of(device: str) -> Cluster:
    """The cluster of this process's device: its kind and memory, nodes as torchrun says.

    device: "cuda", or anything else for the CPU. A GPU that is not known counts as an h100 with its
    own memory; where there is none (planning offline, on fake devices) as an h100. Links are
    those of the data sheet. A process that no launcher started plans for nodes of the built-in
    machine's size, or of the devices that it sees, where those are several.
    """
    here = _ranks_a_node()
    if device != "cuda":
        base = cluster("cpu")
        world = dist.get_world_size() if dist.is_initialized() else 1
        ranks = here or max(world, base.per_node)
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks
        return _resized(base, memory, ranks, Efficiency(fits=_FITS_CPU))
    if not torch.cuda.is_available():
        return cluster(DEFAULT_HARDWARE)
    seen = torch.cuda.get_device_properties(torch.cuda.current_device())
    name = next((known for known in HARDWARE if known in seen.name.lower()), DEFAULT_HARDWARE)
    base, seen_here = cluster(name), torch.cuda.device_count()
    ranks = here or (seen_here if seen_here > 1 else base.per_node)
    return _resized(base, seen.total_memory, ranks, base.efficiency)


def _ranks_a_node() -> int:
    """As torchrun says, the mean where nodes differ, alike on all ranks; 0 without it."""
    world, nodes = (int(os.environ.get(name, 0)) for name in ("WORLD_SIZE", "GROUP_WORLD_SIZE"))
    return world // nodes if nodes else int(os.environ.get("LOCAL_WORLD_SIZE", 0))


def _resized(base: Cluster, memory_bytes: int, per_node: int, share: Efficiency) -> Cluster:
    device = replace(base.device, memory_bytes=memory_bytes)
    return replace(base, device=device, per_node=per_node, efficiency=share)
