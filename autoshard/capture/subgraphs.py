"""Higher-order operators that are traced through, replaced by the operators of their subgraphs.

    %y = tag_activation_checkpoint(%body, %x, %w)     %y = linear(%x, %w)  [ac_graph_id, recompute]

So layers that are checkpointed are seen as equal layers are, and all that reads the graph reads one
list of nodes. The operators of a checkpointed region are tagged as torch's partitioner reads it.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch._ops import HigherOrderOperator
from torch.utils.checkpoint import CheckpointPolicy

REGION_TAGS = ("ac_graph_id", "recompute")
"""What the operators of a checkpointed region have in their metadata."""

# name -> index of the subgraph's first operand in the node's arguments
_INLINED = {
    "tag_activation_checkpoint": 1,
    "wrap_activation_checkpoint": 1,
    "invoke_subgraph": 2,
    "wrap": 1,
}
_CHECKPOINTS = ("tag_activation_checkpoint", "wrap_activation_checkpoint")

_REGION = itertools.count(1)  # ids increase, as torch's partitioner needs

RegionPolicy = Callable[..., Any]


def subgraph(gm: torch.nn.Module, node: fx.Node) -> fx.GraphModule:
    """The GraphModule that a get_attr node names."""
    return operator.attrgetter(str(node.target))(gm)  # type: ignore[no-any-return]


def execution(gm: fx.GraphModule) -> Iterator[fx.Node]:
    """Every node in the order of its execution, those of inlined subgraphs included."""
    for node in gm.graph.nodes:
        yield node
        if _is_inlined(node):
            yield from execution(subgraph(gm, node.args[0]))


def _is_inlined(node: fx.Node) -> bool:
    is_known = isinstance(node.target, HigherOrderOperator) and node.target.name() in _INLINED
    return is_known and isinstance(node.args[0], fx.Node)


def inline_subgraphs(gm: fx.GraphModule) -> tuple[fx.GraphModule, dict[int, RegionPolicy]]:
    """`gm` itself where it has none, else a copy; the policies of checkpointed regions that have
    one, by `ac_graph_id`."""
    if not any(map(_is_inlined, gm.graph.nodes)):
        return gm, {}
    root = nn.Module()
    root.__dict__.update(gm.__dict__)
    inlining = _Inlining()
    inlining.copy(gm, "", None, None)
    result = fx.GraphModule(root, inlining.graph)
    result.meta = dict(gm.meta)
    return result, inlining.policies


class _Inlining:
    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.policies: dict[int, RegionPolicy] = {}

    def copy(
        self, gm: fx.GraphModule, path: str, operands: Sequence[Any] | None, region: int | None
    ) -> Any:
        """Append the operators of a graph that lies at `path`, in a checkpointed region; what it
        returns. operands: None where its placeholders are those of the whole."""
        env: dict[fx.Node, Any] = {}
        given = iter(operands or ())
        for node in gm.graph.nodes:
            if node.op == "placeholder" and operands is not None:
                env[node] = next(given)
            elif node.op == "output" and operands is not None:
                return fx.node.map_arg(node.args[0], env.__getitem__)
            elif _is_inlined(node):
                env[node] = self._inline(gm, path, node, env, region)
            elif node.op == "get_attr" and node.users and all(map(_is_inlined, node.users)):
                continue  # the subgraph
            elif node.target is operator.getitem and not isinstance(env[node.args[0]], fx.Node):
                env[node] = env[node.args[0]][node.args[1]]
            else:
                env[node] = new = self.graph.node_copy(node, env.__getitem__)
                if node.op == "get_attr":
                    new.target = path + str(node.target)
                if region is not None:
                    tags = (region, CheckpointPolicy.PREFER_RECOMPUTE)
                    new.meta |= dict(zip(REGION_TAGS, tags))
        return None

    def _inline(
        self,
        gm: fx.GraphModule,
        path: str,
        node: fx.Node,
        env: dict[fx.Node, Any],
        region: int | None,
    ) -> Any:
        body, name = subgraph(gm, node.args[0]), node.target.name()  # type: ignore[arg-type, union-attr]
        operands = fx.node.map_arg(node.args[_INLINED[name] :], env.__getitem__)
        if name in _CHECKPOINTS:
            region = next(_REGION)
            if policy := _policy(body):
                self.policies[region] = policy
        return self.copy(body, f"{path}{node.args[0].target}.", operands, region)  # type: ignore[union-attr]


def _policy(body: fx.GraphModule) -> RegionPolicy | None:
    context_fn = body.meta.get("_checkpoint_context_fn")
    if context_fn is None:
        return None
    forward, _ = context_fn()
    policy: RegionPolicy | None = getattr(forward, "policy_fn", None)
    return policy
