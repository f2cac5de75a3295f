"""The sum of a cross entropy over rows, and its gradients, as one operator that goes by chunks.

    autoshard::chunked_loss(hidden, weight, bias, target, class_weight, ...)
        -> (sum, gradient of hidden, of weight, of bias)

`hidden` [rows, width], `weight` [classes, width], `bias` [classes] or None, `target` [rows], class
numbers. The logits of a chunk of rows are made, their loss and at once their gradients, as Liger
Kernel does it (Hsu et al. 2024, arXiv:2410.10989, section 3.2): the derivative of a loss is a
number, by which backward multiplies. So each of the three products is done once, and nothing of
rows x classes exists. It is an operator, and not its parts in the graph, since a partitioner would
put what only gradients need into the backward, and keep the logits of all chunks for it.

Gradients of weight and bias are sums over the chunks, in float32 or wider; each chunk's product has
the dtype of the weight, as the whole product would have.

Where an axis splits the classes, a chunk's maxima and sums are reduced over it: what
`vocab_parallel_cross_entropy` reduces (runtime/operators/vocabulary.py), in as many parts as there
are chunks, and the gradient of hidden is a partial sum.

What stands between the product and the loss is given as text, functions of each number of the
logits: an operator takes strings. It is a JSON list of [name, *arguments], in their order.

    [["div", 30.0], ["tanh"], ["mul", 30.0], ["to", "float32"]]     the softcap of Gemma 2

Each has its derivative beside it: inside an operator autograd records nothing.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from autoshard.runtime import compat
from autoshard.runtime.collectives import Axis, all_reduce, chunk_bounds, chunk_size
from autoshard.runtime.operators.vocabulary import MEAN, token_weight

RowFunction = tuple[Any, ...]
"""(name, *arguments)"""


class _Derivable(NamedTuple):
    """apply(x, *arguments). pull(gradient of the result, result, *arguments): that of x. keeps:
    whether `pull` reads the result."""

    apply: Callable[..., Tensor]
    pull: Callable[..., Tensor]
    keeps: bool = False


def _cut(x: Tensor, start: int, end: int, classes: int) -> Tensor:
    return x[:, start:end]


def _padded(gradient: Tensor, _: None, start: int, end: int, classes: int) -> Tensor:
    return torch.nn.functional.pad(gradient, (start, classes - end))


_FUNCTIONS = {
    "to": _Derivable(lambda x, dtype: x.to(getattr(torch, dtype)), lambda g, _, dtype: g),
    "mul": _Derivable(lambda x, a: x * a, lambda g, _, a: g * a),
    "div": _Derivable(lambda x, a: x / a, lambda g, _, a: g / a),
    "add": _Derivable(lambda x, a: x + a, lambda g, _, a: g),
    "sub": _Derivable(lambda x, a: x - a, lambda g, _, a: g),
    "tanh": _Derivable(torch.tanh, torch.ops.aten.tanh_backward.default, keeps=True),
    # of a vocabulary that was padded: classes from start to end of so many
    "cut": _Derivable(_cut, _padded),
}


_KEEPING = frozenset(name for name, one in _FUNCTIONS.items() if one.keeps)
"""Names of those of which a result is kept for the derivative."""


def as_text(functions: Sequence[RowFunction]) -> str:
    """The text of functions."""
    return json.dumps(functions)


def parsed(text: str) -> list[RowFunction]:
    """The functions of a text."""
    return [tuple(one) for one in json.loads(text)]


class Applied(NamedTuple):
    """Functions applied to a chunk of logits. result: what they make of it."""

    functions: Sequence[RowFunction]
    result: Tensor
    kept: Sequence[Tensor | None]
    dtypes: Sequence[torch.dtype]

    @property
    def keeps_result(self) -> bool:
        """Whether `pull` reads the result, which then must not be written to."""
        return bool(self.kept) and self.kept[-1] is not None

    def pull(self, gradient: Tensor) -> Tensor:
        """The gradient of what they were applied to, of that of the result."""
        for one, kept, dtype in zip(
            reversed(self.functions), reversed(self.kept), reversed(self.dtypes)
        ):
            name, *arguments = one
            gradient = _FUNCTIONS[name].pull(gradient, kept, *arguments).to(dtype)
        return gradient


def apply(x: Tensor, functions: Sequence[RowFunction]) -> Applied:
    """x: [rows, classes]."""
    kept: list[Tensor | None] = []
    dtypes = []
    for name, *arguments in functions:
        dtypes.append(x.dtype)
        x = _FUNCTIONS[name].apply(x, *arguments)
        kept.append(x if _FUNCTIONS[name].keeps else None)
    return Applied(functions, x, kept, dtypes)


def result_dtype(dtype: torch.dtype, functions: Sequence[RowFunction]) -> torch.dtype:
    """The dtype of what functions make of values of `dtype`."""
    casts = [one[1] for one in functions if one[0] == "to"]
    return getattr(torch, casts[-1]) if casts else dtype


def kept_by(functions: Sequence[RowFunction]) -> int:
    """How many results of functions their derivatives read."""
    return sum(one[0] in _KEEPING for one in functions)


def copies_of(functions: Sequence[RowFunction]) -> int:
    """How many values of a chunk's size there are beside its scores, while functions are applied
    and their derivatives are waited for."""
    return bool(functions) + kept_by(functions)


_FEWEST_ROWS = 256
"""Below this a matrix product is too small to be quick."""


def rows_a_chunk(rows: int, classes: int, width: int) -> int:
    """Rows of which the logits are about as large as the whole hidden states.

    The rule of Liger Kernel (Hsu et al. 2024, arXiv:2410.10989, section 3.2): as many chunks as
    classes over width, the rows of one rounded up to a power of two. classes: those of the rank
    that has most, so that all ranks have the same chunks.
    """
    chunks = max(1, -(-classes // width))
    size = 1 << (-(-rows // chunks) - 1).bit_length() if rows > chunks else 1
    return max(size, _FEWEST_ROWS)


PARTS = 8
"""In which a chunk's product is added to a wider sum: the product is never whole."""


def scratch_bytes(
    rows: int, own: int, classes: int, width: int, wide: int, narrow: int, copies: int
) -> int:
    """Bytes that the operator has inside at most: what it makes of a chunk's logits, and a part of
    the weight's gradient.

    own: the rank's classes. classes: those of the rank that has most. wide, narrow: bytes of an
    element of the scores as the loss is computed, and of the weight. copies: `copies_of` what is
    between.
    """
    size = min(rows, rows_a_chunk(rows, classes, width))
    part = 0 if narrow == wide else -(-own // PARTS) * width * narrow
    return size * own * (wide + narrow * copies) + part


# As in runtime/randomness/draws.py: count up when the operator gives other numbers.
_VERSION = "v1"


def _chunked_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    functions: str,
    ignore_index: int,
    label_smoothing: float,
    classes: int,
    needs: list[bool],
    rank: int,
    ranks: int,
    group: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    steps, eps = parsed(functions), label_smoothing
    axis = Axis("", ranks, rank, group)
    first, own = chunk_bounds(classes, axis)
    total, by_hidden, by_weight, by_bias = _results(hidden, weight, bias, functions, needs)
    for sums in (total, by_weight, by_bias):
        sums.zero_()
    wide = total.dtype
    share = whole = None
    if eps:
        each = torch.ones(classes, dtype=wide, device=hidden.device)
        each = (each if class_weight is None else class_weight.to(wide)) / classes
        share, whole = each.narrow(0, first, own), each.sum()
    rows = hidden.shape[0]
    size = rows_a_chunk(rows, chunk_size(classes, ranks), hidden.shape[1])
    for start in range(0, rows, size):
        h, t = hidden[start : start + size], target[start : start + size]
        applied = apply(F.linear(h, weight, bias), steps)
        x = applied.result.to(wide)
        top = x.amax(-1)
        if ranks > 1:
            top = all_reduce(top, "max", axis)
        x = x - top.unsqueeze(-1) if applied.keeps_result else x.sub_(top.unsqueeze(-1))
        at = t - first
        owned = (at >= 0) & (at < own)
        at = at.clamp(0, own - 1).unsqueeze(-1)
        picked = x.gather(-1, at).squeeze(-1).masked_fill(~owned, 0)
        spread = [] if share is None else [x @ share]
        x.exp_()
        sums = torch.stack([x.sum(-1), picked, *spread])
        if ranks > 1:
            sums = all_reduce(sums, "sum", axis)
        log_sum = sums[0].log()
        counted = (1 - eps) * token_weight(t, class_weight, ignore_index, wide)
        losses, scale = (log_sum - sums[1]) * counted, counted
        if share is not None and whole is not None:
            valid = eps * (t != ignore_index).to(wide)
            losses = losses + valid * (whole * log_sum - sums[2])
            scale = scale + valid * whole
        total += losses.sum()
        if any(needs):
            x.mul_((scale / sums[0]).unsqueeze(-1))
            x.scatter_add_(-1, at, -(counted * owned).unsqueeze(-1))
            if share is not None:
                x.addr_(valid, share, alpha=-1)
            x = applied.pull(x.to(applied.result.dtype))
        if needs[0]:
            torch.mm(x, weight, out=by_hidden[start : start + size])
        if needs[1]:
            _add_product(by_weight, x, h)
        if needs[2]:
            by_bias += x.sum(0, dtype=by_bias.dtype)
        del applied, x  # before the next chunk's logits are made
    return total, by_hidden, by_weight, by_bias


def _add_product(sums: Tensor, gradient: Tensor, h: Tensor) -> None:
    """sums += gradient.T @ h, in place."""
    if sums.dtype == h.dtype:
        sums.addmm_(gradient.t(), h)
        return
    step = -(-sums.shape[0] // PARTS)
    for part, of in zip(sums.split(step), gradient.split(step, 1)):
        part += of.t() @ h


def _results(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, functions: str, needs: list[bool]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Empty ones; a gradient that is not needed has no elements."""
    wide = torch.promote_types(result_dtype(hidden.dtype, parsed(functions)), torch.float32)
    sums = torch.promote_types(weight.dtype, torch.float32)
    return (
        hidden.new_empty((), dtype=wide),
        hidden.new_empty(hidden.shape if needs[0] else (0,)),
        weight.new_empty(weight.shape if needs[1] else (0,), dtype=sums),
        weight.new_empty(weight.shape[:1] if needs[2] else (0,), dtype=sums),
    )


CHUNKED_LOSS = compat.define_operator(
    f"chunked_loss.{_VERSION}(Tensor hidden, Tensor weight, Tensor? bias, Tensor target, "
    "Tensor? class_weight, str functions, int ignore_index, float label_smoothing, int classes, "
    "bool[] needs, int rank, int ranks, str group) -> (Tensor, Tensor, Tensor, Tensor)",
    _chunked_loss,
    lambda hidden, weight, bias, *more: _results(hidden, weight, bias, more[2], more[6]),
)


def scratch_of(rows: int, wide: torch.dtype, hidden: Tensor, weight: Tensor, *more: Any) -> int:
    """Bytes that the operator has inside at most: what it makes of a chunk's logits, and a part of
    the weight's gradient. wide: the dtype of its first result; then come its arguments."""
    own, width = weight.shape
    most = chunk_size(more[6], more[9])
    narrow = weight.dtype.itemsize
    return scratch_bytes(rows, own, most, width, wide.itemsize, narrow, copies_of(parsed(more[3])))


def reductions_of(rows: int, wide: torch.dtype, hidden: Tensor, *more: Any) -> list[int]:
    """Bytes of each all-reduce that the operator does, in order: of a chunk's maxima, and of its
    sums. wide: the dtype of its first result; then come its arguments."""
    smoothing, classes, ranks = more[6], more[7], more[10]
    size = rows_a_chunk(rows, chunk_size(classes, ranks), hidden.shape[1])
    lengths = [min(size, rows - start) for start in range(0, rows, size)]
    sums = 3 if smoothing else 2
    return [n * wide.itemsize * length for length in lengths for n in (1, sums)]


class _Sum(torch.autograd.Function):
    """The sum of the losses, over `count` where that is given."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        class_weight: Tensor | None,
        count: Tensor | None,
        *options: Any,
    ) -> Tensor:
        total, *found = CHUNKED_LOSS(hidden, weight, bias, target, class_weight, *options)
        ctx.save_for_backward(*found, count)
        ctx.dtypes = [None if x is None else x.dtype for x in (hidden, weight, bias)]
        made: Tensor = total if count is None else total / count
        return made

    @staticmethod
    @once_differentiable  # the gradients of the gradients are not at hand
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *found, count = ctx.saved_tensors
        # as torch has it: where no token counts, the mean is NaN and the gradients are 0
        scale = grad if count is None else torch.where(count == 0, 0, grad / count)
        gradients = [
            (x * scale).to(dtype) if needed else None
            for x, dtype, needed in zip(found, ctx.dtypes, ctx.needs_input_grad)
        ]
        return (*gradients, *[None] * (len(ctx.needs_input_grad) - len(gradients)))


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    *,
    functions: str,
    dtype: torch.dtype,
    classes: int,
    axis: Axis | None = None,
    over: tuple[Axis, ...] = (),
) -> Tensor:
    """aten.cross_entropy_loss of `linear(hidden, weight, bias)`, after `functions`, a sum or a
    mean, by chunks of rows (operator.py).

    hidden: [..., width]; target: its shape without width, or any other of as many tokens in the
    same order. functions: `row_functions.as_text`. dtype: of the loss. axis: splits the classes,
    of which there are `classes`; then the result is replicated on it. over: axes that split the
    tokens, on which the result is partial; a mean counts those of all ranks, one all-reduce of a
    number each.
    """
    rows, tokens = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1)
    count = None
    if reduction == MEAN:
        wide = torch.promote_types(dtype, torch.float32)
        count = token_weight(tokens, class_weight, ignore_index, wide).sum()
        for one in over:
            count = all_reduce(count, "sum", one)
    record = torch.is_grad_enabled()
    needs = [record and x is not None and x.requires_grad for x in (rows, weight, bias)]
    place = (0, 1, "") if axis is None else (axis.rank, axis.size, axis.group)
    options = (functions, ignore_index, label_smoothing, classes, needs, *place)
    found: Tensor = _Sum.apply(rows, weight, bias, tokens, class_weight, count, *options)
    return found.to(dtype)
