"""A device, a link, and what programs get of both, as the cost model describes them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class RowExchange:
    """How rows of tokens travel to their experts.

    deduplicated: whether a token goes to each node once, and from there to all its experts, in
    place of once to each of them. overlap: the part of the exchange that compute hides.
    """

    deduplicated: bool = False
    overlap: float = 0.0


@dataclass(frozen=True)
class AcrossNodes:
    """What an all-to-all of an axis that spans several nodes meets.

    leaving: the part of what a rank sends that leaves its node. way: bytes a second of the rank's
    own way to the network, which a ring shares with the node's other ranks, and this does not.
    """

    leaving: float
    way: float
    nodes: int

    def visited(self, copies: int) -> float:
        """Nodes that a token's `copies` evenly chosen experts are on, for each of them."""
        return self.nodes * (1 - (1 - 1 / self.nodes) ** copies) / copies


@dataclass(frozen=True)
class Link:
    """The connection between the ranks of one mesh axis.

    latency: seconds of one step of a ring (a message to the neighbour), including its launch.
    bandwidth: bytes a second that one rank sends.
    copy_bandwidth: bytes a second that a rank reads plus writes in its own memory; paid by what
        a collective has to rearrange before or after it, and by slices and pads.
    across: of an axis on several nodes. rows: how rows travel over it to experts.
    """

    latency: float
    bandwidth: float
    copy_bandwidth: float
    across: AcrossNodes | None = None
    rows: RowExchange = RowExchange()

    def exchange(self, nbytes: float, copies: int = 0) -> float:
        """Seconds of the bytes that a rank sends of an all-to-all. copies: of rows that go to
        experts, how many a token has."""
        if self.across is None:
            return nbytes / self.bandwidth
        once = self.rows.deduplicated and copies > 1
        out = nbytes * self.across.leaving * (self.across.visited(copies) if once else 1)
        stays = nbytes * (1 - self.across.leaving)
        return max(out / self.across.way, stays / self.bandwidth)

    def seconds(self, nbytes: float, messages: int = 1) -> float:
        """Seconds to send bytes to a neighbour in so many messages."""
        return messages * self.latency + nbytes / self.bandwidth


@dataclass(frozen=True)
class Hardware:
    """The device of a rank.

    flops: peak operations a second of a matrix product, by `dtype_class`.
    memory_bandwidth: bytes a second, read plus written.
    memory_bytes: bytes of device memory.
    host: the connection to the memory of the rank's host, in one direction; None: not known.
    host_memory_bandwidth: bytes a second, read plus written, that each rank of a node has of the
        host's memory while all use it.
    kind: "gpu", or "cpu", whose memory others use too, so that its size is no budget.
    """

    name: str
    flops: Mapping[str, float] = field(hash=False)
    memory_bandwidth: float
    memory_bytes: int
    host: Link | None = None
    host_memory_bandwidth: float = 50e9
    kind: str = "gpu"

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


@dataclass(frozen=True)
class Efficiency:
    """Parts of the data sheet that a program gets.

    compute: of peak arithmetic, in large products; memory, links: of bandwidths. fits: the part of
    device memory that tensors may fill, beside the runtime, communication buffers and
    fragmentation. attention, float8: of `compute`, in attention and in products of float8. overlap:
    of communication beside compute, what costs the compute nothing. narrow: elements of a product's
    smallest extent at which it runs at half its rate.

    The defaults are for machines of which nothing is known. Those of the built-in GPUs are fitted
    to published training runs (docs/published_runs.md).
    """

    compute: float = 0.7
    memory: float = 0.8
    links: float = 0.8
    fits: float = 0.92
    attention: float = 0.5
    float8: float = 0.8
    overlap: float = 0.8
    narrow: float = 0.0


_EVERY_GPU = {"float8": 0.87, "overlap": 0.76, "narrow": 128.0}

#: Of built-in machines, fitted by published runs; those of a b200 but float8 are the h200's.
EFFICIENCIES: Mapping[str, Efficiency] = {
    "a100": Efficiency(compute=0.76, attention=0.77, **_EVERY_GPU),
    "h200": Efficiency(compute=0.74, attention=0.38, **_EVERY_GPU),
    "b200": Efficiency(compute=0.74, attention=0.38, **{**_EVERY_GPU, "float8": 0.7}),
    "h100": Efficiency(compute=0.58, attention=0.38, **_EVERY_GPU),
}
