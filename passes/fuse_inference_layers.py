"""fuse_inference_layers: what stands between two matrix products of a layer becomes one operator.

    before (tp=2, no gradients)                     after
    %0: f32[4,8] = linear(%x, %w)                   %0: f32[4,8] = linear(%x, %w)
    %1: f32[4,8] = redistribute(%0, P -> I, tp)     %1 = reduce_add_norm(%0, %h, %g, None, I, tp,
    %2: f32[4,8] = add(%h, %1)                           norm='rms', eps=1e-06)
    %3: f32[4,8] = rms_norm(%2, [8], %g, 1e-06)     %2: f32[4,8] = getitem(%1, 0)
    %4: f32[4,8] = linear(%3, %v)                   %3: f32[4,8] = getitem(%1, 1)
                                                    %4: f32[4,8] = linear(%3, %v)

The region is a reduction of partial sums, the addition to the residual, and a norm over the last
dim: layer_norm, rms_norm, or the operators in which models write the latter. Where the sum is split
along another dim, the gather of the norm is its last part. How the sum is done is chosen when the
operator runs (runtime/collectives/fused.py).

Not done: a norm between the sum and the residual (Gemma), and a sum that others read before it is
added; layers with gradients, whose backward would have to be written.
"""

import operator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from autoshard.passes.base import Context, Pass, Report, maker
from autoshard.planning import arguments, is_trained, reached
from autoshard.runtime.collectives import (
    I,
    P,
    forward_value,
    redistribute,
    reduce_add_norm,
    shard_dim,
)

aten = torch.ops.aten

ADDS = (aten.add.Tensor, aten.add_.Tensor)


class _Norm(NamedTuple):
    """A norm that was found: its last node, its weights, and keywords of `reduce_add_norm`."""

    last: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    options: dict[str, Any]


@dataclass(frozen=True)
class FuseInferenceLayers(Pass, optional=True):
    """The regions between two products of a layer, each as one operator."""

    def rewrite(self, gm: fx.GraphModule, ctx: Context, report: Report) -> None:
        """Rewrite in place the regions of a graph that has no gradients."""
        if is_trained(gm):
            return
        for node in list(gm.graph.nodes):
            if node.target is redistribute and node.args[1] == P:
                reason = self._fuse(gm.graph, node)
                if reason:
                    report.skip(node, reason)
                else:
                    report.hits += 1

    def _fuse(self, graph: fx.Graph, reduced: fx.Node) -> str:
        """Rewrite the region that begins with a reduction; why not, where it is not one."""
        partial, _, state, axis = reduced.args[:4]
        split = shard_dim(str(state))
        summed = reduced
        shaped = _only(reduced, aten.reshape.default) if split is None else None
        if shaped is not None:
            summed = shaped
        if len(summed.users) != 1:
            return f"{len(summed.users)} operators read the sum"
        total = next(iter(summed.users))
        if total.target not in ADDS or len(total.args) != 2 or total.kwargs:
            return "the sum is not added to a residual"
        residual: Any = next((one for one in total.args if one is not summed), None)
        val = total.meta["val"]
        if not isinstance(residual, fx.Node) or residual.meta["val"].shape != val.shape:
            return "the sum is not added to a residual of its shape"
        if residual.meta["val"].dtype != val.dtype or reduced.meta["val"].dtype != val.dtype:
            return "the residual has another dtype"
        norm = _norm_of(total)
        if norm is None:
            return "no norm over the last dim follows"
        if split == val.dim() - 1:
            return "the sum is split along the dim that is normalised"
        order = {node: i for i, node in enumerate(graph.nodes)}
        users = list(norm.last.users)
        gathered = users[0] if len(users) == 1 and _is_gather(users[0], state) else None
        last = gathered or norm.last
        inside = _between(total, norm.last)
        if any(order[user] < order[last] for user in total.users if user not in inside):
            return "the residual is read before it is normalised"
        options = {**norm.options}
        if gathered is not None:
            options["gather"] = True
            if len(gathered.args) > 4 and gathered.args[4] is not None:
                options["extent"] = gathered.args[4]
        forward = I if split is None else forward_value(str(state))
        with graph.inserting_before(last):
            if shaped is not None:
                make = maker(shaped, self.name)
                partial = make(aten.reshape.default, partial, shaped.args[1])
            args = (partial, residual, norm.weight, norm.bias, forward, axis)
            fused = maker(reduced, self.name, value="unknown")(reduce_add_norm, *args, **options)
            fused.meta["val"] = (val, last.meta["val"])
            new = [
                maker(like, self.name, value=like)(operator.getitem, fused, i)
                for i, like in enumerate((total, last))
            ]
        for old, made in zip((total, last), new):
            old.replace_all_uses_with(made, delete_user_cb=lambda user: user not in inside)
        for node in (last, *reversed(inside), total, summed, reduced):
            if not node.users and node in order:
                graph.erase_node(node)
                order.pop(node)
        return ""


def _is_gather(node: fx.Node, state: Any) -> bool:
    target = node.args[2] if node.target is redistribute else None
    return target is not None and node.args[1] == state and forward_value(str(target)) == I


def _between(first: fx.Node, last: fx.Node) -> list[fx.Node]:
    """The nodes by which `last` depends on `first`, `last` among them, in their order."""
    after = reached([first], lambda node: [user for user in node.users if not last < user])
    needed = reached([last], lambda node: after.keys() & node.all_input_nodes)
    return sorted(needed.keys() - {first})


def _norm_of(total: fx.Node) -> _Norm | None:
    for user in total.users:
        if user.target in (aten.layer_norm.default, aten.rms_norm.default):
            found = _whole_norm(total, user)
        else:
            found = _written_norm(total, user)
        if found is not None:
            return found
    return None


def _whole_norm(total: fx.Node, node: fx.Node) -> _Norm | None:
    layer = node.target is aten.layer_norm.default
    given = arguments(node)
    one_dim, weight = len(given["normalized_shape"]) == 1, given["weight"]
    if given["input"] is not total or not one_dim or not isinstance(weight, fx.Node):
        return None
    kind = {"norm": "layer" if layer else "rms", "eps": given["eps"]}
    return _Norm(node, weight, given.get("bias"), kind)


def _written_norm(total: fx.Node, first: fx.Node) -> _Norm | None:
    """Root mean square as models write it: the square's mean over the last dim, its inverse root,
    and a weight before or after the cast back."""
    dtype, wide = total.meta["val"].dtype, None
    source = total
    if first.target is aten._to_copy.default:
        wide = first.kwargs.get("dtype")
        if wide is None or set(first.kwargs) - {"dtype"}:
            return None
        source = first
    square = next((user for user in source.users if _is_square(user, source)), None)
    mean = _only(square, aten.mean.dim)
    if mean is None or list(mean.args[1]) != [-1] or mean.args[2:3] != (True,) or mean.kwargs:  # type: ignore[arg-type]
        return None
    shifted = _only(mean, aten.add.Tensor)
    root = _only(shifted, aten.rsqrt.default)
    scaled = _only(root, aten.mul.Tensor)
    if shifted is None or scaled is None or not isinstance(shifted.args[1], float):
        return None
    if {*scaled.args} != {source, root} or (source is not total and len(source.users) != 2):
        return None
    eps, last, weigh_wide = shifted.args[1], scaled, True
    if wide is not None:
        back = _only(scaled, aten._to_copy.default)
        if back is not None:
            if back.kwargs != {"dtype": dtype}:
                return None
            last, weigh_wide = back, False
    weighed = _only(last, aten.mul.Tensor)
    weight = weighed and next((one for one in weighed.args if one is not last), None)
    if weighed is None or not isinstance(weight, fx.Node) or weight.meta["val"].dim() != 1:
        return None
    last = weighed
    if wide is None:
        weigh_wide = False
    elif weigh_wide:
        cast = _only(weighed, aten._to_copy.default)
        if cast is None or cast.kwargs != {"dtype": dtype}:
            return None
        last = cast
    if last.meta["val"].dtype != dtype:
        return None
    options: dict[str, Any] = {"norm": "written rms", "eps": eps}
    if wide is not None:
        options |= {"wide": wide, "weigh_wide": weigh_wide}
    return _Norm(last, weight, None, options)


def _is_square(node: fx.Node, source: fx.Node) -> bool:
    if node.target is aten.pow.Tensor_Scalar:
        return node.args == (source, 2)
    return node.target is aten.mul.Tensor and node.args == (source, source)


def _only(node: fx.Node | None, target: Any) -> fx.Node | None:
    """The one reader of a node, where it is a `target`."""
    if node is None or len(node.users) != 1:
        return None
    user = next(iter(node.users))
    return user if user.target is target else None
