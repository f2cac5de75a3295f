"""Machines as the cost model describes them, and the built-in ones.

Figures are the manufacturers' data sheets: dense rates (without structured sparsity), memory as
sold, and links in one direction. They are used to compare plans; what predicts a step's time takes
a part of them (planning/cost/clusters.py).
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from autoshard.runtime.errors import ConfigError


@dataclass(frozen=True)
class Link:
    """The connection between the ranks of one mesh axis.

    latency: seconds of one step of a ring (a message to the neighbour), including its launch.
    bandwidth: bytes a second that one rank sends.
    copy_bandwidth: bytes a second that a rank reads plus writes in its own memory; paid by what
        a collective has to rearrange before or after it, and by slices and pads.
    """

    latency: float
    bandwidth: float
    copy_bandwidth: float


@dataclass(frozen=True)
class Hardware:
    """The device of a rank, and its links.

    flops: peak operations a second of a matrix product, by `dtype_class`.
    memory_bandwidth: bytes a second, read plus written.
    memory_bytes: bytes of device memory.
    links: by mesh axis name ("tp", "cp", "ep", "dp_shard", "dp_replicate").
    host: the connection to the memory of the rank's host, in one direction; None: not known.
    host_memory_bandwidth: bytes a second, read plus written, that each rank of a node has of the
        host's memory while all use it.
    """

    name: str
    flops: Mapping[str, float] = field(hash=False)
    memory_bandwidth: float
    memory_bytes: int
    links: Mapping[str, Link] = field(hash=False)
    host: Link | None = None
    host_memory_bandwidth: float = 50e9

    def peak(self, dtype: torch.dtype) -> float:
        """Operations a second on `dtype`."""
        return self.flops[dtype_class(dtype)]


def dtype_class(dtype: torch.dtype) -> str:
    """The rate that a dtype runs at: "float8", "half", "float32" or "float64".

    Integers and bools count as float32: they are never the cost of a model.
    """
    if dtype.is_complex:
        return "float64" if dtype == torch.complex128 else "float32"
    if dtype.is_floating_point:
        return {1: "float8", 2: "half", 4: "float32", 8: "float64"}[dtype.itemsize]
    return "float32"


def hardware(name: str) -> Hardware:
    """The built-in machine of that name; ConfigError names the closest."""
    if name in HARDWARE:
        return HARDWARE[name]
    near = difflib.get_close_matches(name, HARDWARE, n=1)
    meant = f" Did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"unknown hardware {name!r}; known: {', '.join(HARDWARE)}.{meant}")


def _machine(
    name: str,
    *,
    tera_flops: tuple[float, float, float, float],
    memory: tuple[float, float],
    inside: tuple[float, float],
    between: tuple[float, float],
    host: tuple[float, float],
    host_memory: float,
) -> Hardware:
    """memory: (GB, GB/s); inside a node, between nodes, host: (microseconds, GB/s a rank);
    host_memory: GB/s a rank."""
    rates = dict(zip(("float8", "half", "float32", "float64"), tera_flops, strict=True))
    size, bandwidth = memory

    def link(figures: tuple[float, float]) -> Link:
        return Link(figures[0] * 1e-6, figures[1] * 1e9, bandwidth * 1e9)

    return Hardware(
        name,
        {kind: rate * 1e12 for kind, rate in rates.items()},
        bandwidth * 1e9,
        int(size * 1e9),
        # Tensor and context parallelism stay inside the node; data parallelism is planned for the
        # network.
        {
            **{"tp": link(inside), "cp": link(inside), "ep": link(inside)},
            **{"dp_shard": link(between), "dp_replicate": link(between)},
        },
        link(host),
        host_memory * 1e9,
    )


# float32 is the rate torch uses unless told otherwise (no TF32). Latencies are no data-sheet
# figures: about what one step of a small collective takes on NVLink and on InfiniBand. The host is
# reached over PCIe of 16 lanes: generation 4 (a100), else 5. Of its memory a rank has an eighth of
# the bandwidth: a DGX has two processors of eight channels, of 8 bytes, by their data sheets
# DDR4-3200 (EPYC 7742, DGX A100), DDR5-4800 (Xeon 8480C, DGX H100 and H200) and DDR5-5600 (Xeon
# 8570, DGX B200).
HARDWARE: Mapping[str, Hardware] = {
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
        ),
    )
}


DEFAULT_HARDWARE = "h100"
"""The machine to plan for where nobody names one, and what an unknown GPU counts as."""
