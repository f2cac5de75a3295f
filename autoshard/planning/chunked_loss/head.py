"""What is between a cross entropy and the product that makes its logits.

hidden, weight -> product -> casts, a softcap, scales, cuts, views -> loss
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autoshard.runtime import operators
from autoshard.runtime.collectives import redistribute
from autoshard.runtime.operators import RowFunction

aten = torch.ops.aten
_WHOLE = aten.cross_entropy_loss.default
_OVER_TOKENS = (operators.loss_over_tokens, operators.loss_over_tokens_and_classes)
NAMES = ("self", "target", "weight", "reduction", "ignore_index", "label_smoothing")
_DEFAULTS = (None, None, None, operators.MEAN, -100, 0.0)
_VIEWS = (aten.reshape.default, aten.view.default, aten._unsafe_view.default)
_SAME = (aten.clone.default, aten.contiguous.default, aten.alias.default)
_COPIES = (*_SAME, aten._to_copy.default)
_BY_NUMBER = {
    aten.mul.Tensor: "mul",
    aten.div.Tensor: "div",
    aten.add.Tensor: "add",
    aten.sub.Tensor: "sub",
}


class LeftWhole(Exception):
    """Why a loss stays as it is."""


@dataclass
class Head:
    """The operators between hidden states and a loss.

    chain: from the scores up to the product, which is the last. functions: of each row, in their
    order. cuts: slices of rows, the last first.
    """

    chain: list[fx.Node] = field(default_factory=list)
    functions: list[RowFunction] = field(default_factory=list)
    cuts: list[fx.Node] = field(default_factory=list)

    @property
    def operands(self) -> tuple[fx.Node, fx.Node, fx.Node | None]:
        """Hidden states, weight and bias of the product."""
        found = _operands(self.chain[-1])
        assert found is not None
        return found

    @property
    def copies(self) -> list[fx.Node]:
        """Copies of logits that the model returns, and nothing else reads: accelerate casts all
        outputs under autocast."""
        found = dict.fromkeys(user for one in self.chain for user in one.users)
        return [
            user
            for user in found
            if user not in self.chain and user.target in _COPIES and _is_result(user)
        ]

    def readers(self, loss: fx.Node) -> list[fx.Node]:
        """What reads logits besides the loss; the output counts where it returns them."""
        own = (*self.chain, *self.copies)
        return [user for one in own for user in one.users if user not in (*own, loss)]


def is_loss(node: fx.Node) -> bool:
    """Whether a node is a cross entropy of class numbers or probabilities, over any axes."""
    if node.target in (_WHOLE, operators.vocab_parallel_cross_entropy):
        return True
    return node.target in _OVER_TOKENS and node.kwargs["op"] is _WHOLE


def arguments_of(loss: fx.Node) -> dict[str, Any]:
    """The arguments of a loss by name. Raises LeftWhole for a loss that no chunks can make."""
    given: dict[str, Any] = {
        **dict(zip(NAMES, _DEFAULTS)),
        **dict(zip(NAMES, loss.args)),
        **loss.kwargs,
    }
    if given["reduction"] == operators.NONE:
        raise LeftWhole("it is a loss of each token")
    if given["target"].meta["val"].is_floating_point():
        raise LeftWhole("its targets are probabilities")
    return given


def head_of(loss: fx.Node) -> Head:
    """What is between a loss and the product that makes its logits. Raises LeftWhole."""
    head = Head()
    at: Any = loss.args[0]
    dims = at.meta["val"].dim()
    if dims < 2:
        raise LeftWhole("it is of one token")
    if dims > 2:  # classes are the second dim of a loss' scores
        if dims > 3 or at.target is not aten.transpose.int:
            raise LeftWhole("the classes of its scores are not their last dim")
        if {dim % 3 for dim in at.args[1:]} != {1, 2}:
            raise LeftWhole("the classes of its scores are not their last dim")
        head.chain.append(at)
        at = at.args[0]
    while _operands(at) is None:
        source = at.args[0] if at.args else None
        if not isinstance(source, fx.Node):
            raise LeftWhole("its logits are made by no product with a weight")
        before, after = source.meta["val"].shape, at.meta["val"].shape
        function = _function(at, source)
        if function is not None:
            head.functions.insert(0, function)
        elif at.target in _VIEWS and before[-1] == after[-1] and not head.cuts:
            pass  # the rows keep their order
        elif at.target is aten.slice.Tensor and before[-1] == after[-1]:
            head.cuts.append(at)
        elif at.target is redistribute:
            raise LeftWhole("the plan sends its logits, or splits them anew")
        elif at.target not in _SAME:
            what = getattr(at.target, "__name__", at.target)
            raise LeftWhole(f"{at.name} ({what}) is between its logits and it")
        head.chain.append(at)
        at = source
    head.chain.append(at)
    return head


def _is_result(node: fx.Node) -> bool:
    """Whether the model returns a value, and nothing else reads it."""
    return [user.op for user in node.users] == ["output"]


def _function(node: fx.Node, source: fx.Node) -> RowFunction | None:
    """The function of each row that a node is, if it is one that the operator knows."""
    before, after = source.meta["val"], node.meta["val"]
    if node.target is aten._to_copy.default:
        cast = set(node.kwargs) <= {"dtype", "device"} and before.device == after.device
        return ("to", str(after.dtype).removeprefix("torch.")) if cast else None
    if node.target is aten.tanh.default:
        return ("tanh",)
    if name := _BY_NUMBER.get(node.target):  # type: ignore[call-overload]
        number = node.args[1] if len(node.args) == 2 else None
        known = type(number) in (int, float) and not node.kwargs and before.dtype == after.dtype
        return (name, number) if known else None
    dim, start, step = (
        node.args[i] if len(node.args) > i else default for i, default in ((1, 0), (2, 0), (4, 1))
    )
    if node.target is aten.slice.Tensor and dim in (-1, before.dim() - 1) and step == 1:
        sizes = (start, start + after.shape[-1], before.shape[-1])  # type: ignore[operator]
        if all(type(size) is int and size >= 0 for size in sizes):
            return ("cut", *sizes)
    return None


def _operands(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None] | None:
    """Hidden states, weight and bias of a product."""
    args: Any = (*node.args, None)
    if node.target is aten.linear.default and not node.kwargs:
        return args[0], args[1], args[2]
    if node.target is aten.mm.default:
        return args[0], args[1], None
    if node.target is aten.addmm.default and not node.kwargs:
        return args[1], args[2], args[0]
    return None
