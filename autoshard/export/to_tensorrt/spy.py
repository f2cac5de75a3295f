"""A network definition that remembers the arguments TensorRT does not give back.

A layer of collectives does not tell its operation, its reduction or its groups once it is made,
and attention is no layer that can be listed; both are recorded at the call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Recorded:
    """One call of add_dist_collective, as it arrived. layer: what TensorRT returned."""

    operation: str
    reduction: str
    root: Any
    groups: Any
    layer: Any

    @property
    def arguments(self) -> tuple[str, str, Any, Any, int]:
        """What decides what the collective does, the number of ranks as the layer has it now."""
        return self.operation, self.reduction, self.root, self.groups, self.layer.num_ranks


class Spy:
    """Stands in for an INetworkDefinition: forwards everything, and records."""

    def __init__(self, network: Any) -> None:
        self.network = network
        self.collectives: list[Recorded] = []
        self.attentions: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.network, name)

    def add_dist_collective(self, *args: Any) -> Any:
        """As INetworkDefinition's: (input, operation, reduction, root, groups)."""
        layer = self.network.add_dist_collective(*args)
        if layer is not None:
            _, operation, reduction, root, groups = args
            self.collectives.append(Recorded(operation.name, reduction.name, root, groups, layer))
        return layer

    def add_attention_v2(self, *args: Any) -> Any:
        """As INetworkDefinition's."""
        made = self.network.add_attention_v2(*args)
        if made is not None:
            self.attentions.append(made)
        return made
