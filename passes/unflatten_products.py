"""unflatten_products: a product of flattened tokens becomes one of their sequences, on cp and pp.

    before                                        after
    %x: f32[2,16,8]                               %x: f32[2,16,8]
    %b: f32[24]                                   %b: f32[24]
    %w: f32[8,24]                                 %w: f32[8,24]
    %0: f32[32,8] = reshape(%x, [32, 8])          %0: f32[2,16,24] = matmul(%x, %w)
    %1: f32[32,24] = addmm(%b, %0, %w)            %1: f32[2,16,24] = add(%0, %b)
    %2: f32[2,16,24] = reshape(%1, [2, 16, 24])

Context parallelism splits each sequence, and the flattened tokens of several are no parts of
sequences: layers whose projections are such products (GPT-2's) would be split by the batch, and
their attention exchanged with them. AOTAutograd flattens what a rank has of them. Micro-batches of
pp split the batch, and nn.MultiheadAttention flattens its tokens with the batch inside: those of a
sample are no rows of such a product.

Not done: products that something else reads than reshapes to the tokens of sequences; those of one
sequence, whose tokens are its parts, flattened or not; an addend that is no vector of the features,
or is multiplied.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoshard.passes.base import Context, Pass, Report, maker
from autoshard.planning import is_one, same

aten = torch.ops.aten


@dataclass(frozen=True)
class UnflattenProducts(Pass, optional=True):
    """See the module's text. linear: those of nn.Linear alone."""

    linear: bool = False

    def rewrite(self, gm: fx.GraphModule, ctx: Context, report: Report) -> None:
        for node in list(gm.graph.nodes):
            args: list[Any] = list(node.args)
            if node.target is aten.linear.default:
                flat, weight, *bias = args
            elif node.target in (aten.mm.default, aten.addmm.default) and not self.linear:
                *bias, flat, weight = args
            else:
                continue
            if node.kwargs or flat.target is not aten.reshape.default:
                continue
            if len(node.meta["val"].shape) != 2:
                continue
            users = list(node.users)
            sizes = _sequences(users, node.meta["val"].shape[-1])
            if sizes is None:
                report.skip(node, "it is read otherwise than as tokens of sequences")
                continue
            bias = [one for one in bias if one is not None]
            if bias and bias[0].meta["val"].shape != node.meta["val"].shape[-1:]:
                report.skip(node, "what it adds is no vector of the features")
                continue
            made = maker(node, self.name)
            source, features = flat.args[0], flat.meta["val"].shape[-1]
            with gm.graph.inserting_before(users[0]):
                if not _is_of(source.meta["val"].shape, users[0].meta["val"].shape, features):
                    source = made(aten.reshape.default, source, [*sizes, features])
                if node.target is aten.linear.default:
                    new = made(aten.linear.default, source, weight, *bias)
                else:
                    new = made(aten.matmul.default, source, weight)
                    if bias:
                        new = made(aten.add.Tensor, new, *bias)
            for user in users:
                user.replace_all_uses_with(new)
            report.hits += 1
        gm.graph.eliminate_dead_code()


def _sequences(users: list[fx.Node], features: Any) -> list[Any] | None:
    """The sizes [sequences, tokens] that all users give the tokens, as numbers or as nodes."""
    found: list[Any] | None = None
    for user in users:
        shape: Any = user.meta["val"].shape if user.target is aten.reshape.default else ()
        if len(shape) != 3 or not same(shape[-1], features) or is_one(shape[0]):
            return None
        sizes: Any = user.args[1]
        if found is not None and (list(sizes[:2]) != found):
            return None
        found = list(sizes[:2])
    return found


def _is_of(shape: Any, tokens: Any, features: Any) -> bool:
    """Whether a value has the same sequences and tokens, of so many features."""
    return len(shape) == 3 and all(map(same, shape, (*tokens[:2], features)))
