"""Networks of all ranks run on the CPU by the interpreter, in lockstep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from autoshard.export.to_tensorrt.build import Network
from autoshard.export.to_tensorrt.engine import NetworkInterpreter
from autoshard.runtime.collectives import Axis, run_ranks


def interpret(
    networks: Sequence[Network],
    feeds: Sequence[Mapping[str, torch.Tensor]],
    held: Sequence[Mapping[str, torch.Tensor]] | None = None,
) -> list[list[dict[str, torch.Tensor]]]:
    """For each rank, the outputs of each of `feeds`, which every rank gets, beside its own `held`.

    A cache output becomes the cache input of the next feed; the first begins with zeros.
    """
    ranks = len(networks)

    def work(axis: Axis) -> list[dict[str, torch.Tensor]]:
        network = networks[axis.rank]
        runner = NetworkInterpreter(network, axis if ranks > 1 else None)
        graph = network.lowering.graph
        caches: dict[str, torch.Tensor] = {}
        results = []
        for feed in feeds:
            rows = next(iter(feed.values())).shape[0]
            for port in graph.inputs:
                if port.role.endswith("cache") and port.name not in caches:
                    shape = [rows if s == "batch" else int(s) for s in port.shape]
                    caches[port.name] = torch.zeros(shape, dtype=port.dtype)
            out = runner({**feed, **(held[axis.rank] if held else {}), **caches})
            caches = {name: out[f"{name}_out"] for name in caches}
            results.append(out)
        return results

    return run_ranks(ranks, work, timeout=300)
