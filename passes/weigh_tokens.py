"""weigh_tokens: mean losses count every token of every data-parallel rank alike.

    before (dp_replicate=2, one rank)               after (loss_tokens="global")
    %x: f32[6,9]                                    %x: f32[6,9]
    %t: i64[6]                                      %t: i64[6]
    %0: f32[] = cross_entropy_loss(%x, %t)          %0: f32[] = cross_entropy_loss(%x, %t)
                                                    %1: f32[] = share_of_tokens(%0, %t, None, -100,
                                                        (), (dp_replicate,))

Runs on the local graph, after `localize`. What ranks average is then the mean over all tokens,
where otherwise it is the mean of the ranks' means.

Not done: losses outside of the compiled model, and means that a model writes by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from autoshard.passes.base import CARRIED, Context, Report
from autoshard.runtime import vocab_parallel
from autoshard.runtime.axis import Axis
from autoshard.runtime.token_mean import share_of_tokens

aten = torch.ops.aten
_LOSSES = (aten.cross_entropy_loss.default, aten.nll_loss.default, aten.nll_loss_nd.default)
_BY_CLASSES = (vocab_parallel.vocab_parallel_cross_entropy, vocab_parallel.vocab_parallel_nll)
_NAMES = ("self", "target", "weight", "reduction", "ignore_index")
_DEFAULTS: dict[str, Any] = {
    "weight": None, "reduction": vocab_parallel.MEAN, "ignore_index": -100
}


@dataclass(frozen=True)
class WeighTokens:
    """axes: the data-parallel axes."""

    name: ClassVar[str] = "weigh_tokens"
    axes: tuple[Axis, ...]

    def run(self, gm: fx.GraphModule, ctx: Context) -> Report:
        """Rewrite `gm.graph` in place."""
        report = Report(self.name)
        for node in list(gm.graph.nodes):
            split = _split(node, ctx.axis)
            if split is None:
                continue
            given = {**_DEFAULTS, **dict(zip(_NAMES, node.args)), **node.kwargs}
            if given["reduction"] != vocab_parallel.MEAN:
                report.skip(node, "it is not a mean")
                continue
            arguments = (node, given["target"], given["weight"], given["ignore_index"])
            with gm.graph.inserting_after(node):
                new = gm.graph.call_function(share_of_tokens, (*arguments, split, self.axes))
            new.meta = {key: node.meta[key] for key in (*CARRIED, "val", "diff")
                        if key in node.meta}
            change = {"autoshard_change": f"{node.name}: tokens of all ranks"}
            new.meta["custom"] = {**new.meta.get("custom", {}), **change}
            node.replace_all_uses_with(new, delete_user_cb=lambda user, new=new: user is not new)
            report.hits += 1
        gm.recompile()
        return report


def _split(node: fx.Node, axis: Axis) -> tuple[Axis, ...] | None:
    """The axes over which a loss' tokens are split; None where the node is no loss over classes."""
    target = node.target
    if target is vocab_parallel.mean_of_all_tokens:
        return (axis,)
    if target in _BY_CLASSES:
        return ()
    if target not in _LOSSES:
        return None
    classes = node.args[1].meta.get("val")  # type: ignore[union-attr]
    return None if isinstance(classes, torch.Tensor) and classes.is_floating_point() else ()
