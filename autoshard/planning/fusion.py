"""Fusion of operators into kernels, as the cost model assumes it of a compiler."""

import operator

import torch
from torch import fx

from autoshard.planning.operators import is_view
from autoshard.planning.strategy import operands, value
from autoshard.planning.values import fusible


class Kernels:
    """The kernels of a graph: what each operator reads from memory, and what it writes there.

    A view has no kernel: who reads it reads its base. Where nothing is fused, each operator is one.
    """

    def __init__(self, gm: fx.GraphModule, fused: bool = True) -> None:
        self._fusible = {node: fusible(node) for node in gm.graph.nodes}
        alone = {node: i for i, node in enumerate(gm.graph.nodes)}
        self.stage = self._stages() if fused else alone
        self._written: dict[fx.Node, bool] = {}
        self.base: dict[fx.Node, fx.Node] = {}
        self.readers: dict[fx.Node, list[fx.Node]] = {}
        for node in gm.graph.nodes:
            source = _viewed(node)
            self.base[node] = node if source is None else self.base[source]
            if source is None:
                for one in dict.fromkeys(self.base[other] for other in node.all_input_nodes):
                    self.readers.setdefault(one, []).append(node)

    def _stages(self) -> dict[fx.Node, int]:
        """Number of unfused operators on the longest way to each node.

        A residual stream is read at the next stage: it is written, whatever fuses.
        """
        found: dict[fx.Node, int] = {}
        for node, fuses in self._fusible.items():
            before = max((found[source] for source in node.all_input_nodes), default=0)
            found[node] = before + (not fuses)
        return found

    def joins(self, source: fx.Node, user: fx.Node) -> bool:
        """Whether `user` reads `source` inside one kernel, so that nothing goes through memory."""
        both = self._fusible[source] and self._fusible[user]
        return both and self.stage[source] == self.stage[user]

    def is_view(self, node: fx.Node) -> bool:
        """Whether `node` is another name for memory that an earlier node made."""
        return self.base[node] is not node

    def reads(self, node: fx.Node) -> list[fx.Node]:
        """The operands that the kernel of `node` reads from memory, each once; none for a view."""
        if self.is_view(node):
            return []
        bases = dict.fromkeys(self.base[tensor] for tensor in operands(node))
        return [base for base in bases if not self.joins(base, node)]

    def writes(self, node: fx.Node) -> bool:
        """Whether the value goes to memory, because another kernel reads it; no for a view."""
        if self.is_view(node):
            return False
        if node not in self._written:
            readers = self.readers.get(node, [])
            every = all(self.joins(node, reader) for reader in readers)
            self._written[node] = not (readers and every)
        return self._written[node]


def _viewed(node: fx.Node) -> fx.Node | None:
    """The node of which `node` is a view or an element."""
    target = node.target
    if target is operator.getitem:
        source = node.args[0]
        return source if isinstance(source, fx.Node) else None
    if is_view(node) and operands(node):
        return operands(node)[0] if isinstance(value(node), (torch.Tensor, tuple, list)) else None
    return None
