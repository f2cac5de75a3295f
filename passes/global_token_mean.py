"""global_token_mean: mean losses count every token of every data-parallel rank alike.

    before (dp_replicate=2, one rank)               after (loss_tokens="global")
    %x: f32[6,9]                                    %x: f32[6,9]
    %t: i64[6]                                      %t: i64[6]
    %0: f32[] = cross_entropy_loss(%x, %t)          %0: f32[] = own_tokens(%t, None, -100, ())
                                                    %1: i64[6] = stand_in_targets(%t, %0, -100)
                                                    %2: f32[] = cross_entropy_loss(%x, %1)
                                                    %3: f32[] = share_of_tokens(%2, %0,
                                                        (dp_replicate,))

Runs on the local graph, after `localize`. What ranks average is then the mean over all tokens,
where otherwise it is the mean of the ranks' means.

Not done: losses outside of the compiled model, and means that a model writes by itself.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoshard.passes.base import Context, Pass, Report, maker
from autoshard.planning import LOSSES, packet
from autoshard.runtime import operators
from autoshard.runtime.collectives import Axis
from autoshard.runtime.graph_meta import CHANGE
from autoshard.runtime.operators import (
    own_tokens,
    share_of_tokens,
    stand_in_targets,
    stand_in_weight,
)

aten = torch.ops.aten
_BY_CLASSES = (operators.vocab_parallel_cross_entropy, operators.vocab_parallel_nll)
_OF_ALL_TOKENS: dict[Any, tuple[str, ...]] = {  # the arguments that say which axes split tokens
    operators.loss_over_tokens: ("axis", "outer"),
    operators.loss_over_tokens_and_classes: ("outer",),
}
_NAMES = ("self", "target", "weight", "reduction", "ignore_index")
_DEFAULTS: dict[str, Any] = {"weight": None, "reduction": operators.MEAN, "ignore_index": -100}


@dataclass(frozen=True)
class GlobalTokenMean(Pass):
    """axes: the data-parallel axes."""

    axes: tuple[Axis, ...]

    def rewrite(self, gm: fx.GraphModule, ctx: Context, report: Report) -> None:
        for node in list(gm.graph.nodes):
            split = _split(node)
            if split is None:
                continue
            given = {**_DEFAULTS, **dict(zip(_NAMES, node.args)), **node.kwargs}
            if given["reduction"] != operators.MEAN:
                report.skip(node, "it is not a mean")
                continue
            self._weigh(gm.graph, node, given, split)
            report.hits += 1

    def _weigh(
        self, graph: fx.Graph, node: fx.Node, given: dict[str, Any], split: tuple[Axis, ...]
    ) -> None:
        target, weight, ignored = given["target"], given["weight"], given["ignore_index"]

        def make(value: Any, said: str = "") -> Callable[..., fx.Node]:
            custom = {CHANGE: f"{node.name}: {said}"} if said else None
            return maker(node, self.name, value=value, custom=custom)

        with graph.inserting_before(node):
            own = make("unknown", "tokens of this rank")(own_tokens, target, weight, ignored, split)
            instead = {target: make(target)(stand_in_targets, target, own, ignored)}
            if weight is not None:
                instead[weight] = make(weight)(stand_in_weight, weight, own)
        with graph.inserting_after(node):
            share = make(node, "tokens of all ranks")(share_of_tokens, node, own, self.axes)
        node.replace_all_uses_with(share, delete_user_cb=lambda user: user is not share)
        node.args = fx.node.map_arg(node.args, lambda n: instead.get(n, n))
        node.kwargs = fx.node.map_arg(node.kwargs, lambda n: instead.get(n, n))


def _split(node: fx.Node) -> tuple[Axis, ...] | None:
    """The axes over which a loss' tokens are split; None where the node is no loss over classes."""
    target = node.target
    if names := _OF_ALL_TOKENS.get(target):
        return tuple(node.kwargs[name] for name in names if name in node.kwargs)  # type: ignore[misc]
    if target in _BY_CLASSES:
        return ()
    if packet(node) not in LOSSES:
        return None
    classes = node.args[1].meta.get("val")  # type: ignore[union-attr]
    return None if isinstance(classes, torch.Tensor) and classes.is_floating_point() else ()
