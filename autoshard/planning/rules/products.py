"""Products whose rule is no line of text: einsum, whose equation is one already, and float8."""

from __future__ import annotations

from collections.abc import Iterator

from autoshard.planning.rules.call import OpCall, differentiable
from autoshard.planning.sizes import count, is_one
from autoshard.planning.strategy import ImplCollective, Strategy
from autoshard.runtime.collectives import P, R, S, State
from autoshard.runtime.operators import FLOAT8_MULTIPLE, ROWWISE, Bound, split_float8_linear

_SCALE = 4  # bytes


def einsum(call: OpCall) -> Iterator[Strategy]:
    """Each subscript may be sharded; one missing from the result is summed over, giving P."""
    equation = call["equation"].replace(" ", "")
    tensors = call.tensors("tensors")
    left, _, right = equation.partition("->")
    inputs = left.split(",")
    if "->" not in equation:
        letters = sorted(set(left) - {","})
        right = "".join(letter for letter in letters if left.count(letter) == 1)
    if "." in equation:
        call.decline(f'{call.op}: "..." in "{equation}"')
        letters = []
    else:
        letters = list(dict.fromkeys(left.replace(",", "")))
    for letter in letters:
        if any(subscripts.count(letter) > 1 for subscripts in inputs):
            call.decline(f"{call.op}: a diagonal over {letter}")
            continue
        states: list[State] = []
        sizes = []
        for subscripts, tensor in zip(inputs, tensors, strict=True):
            dim = subscripts.find(letter)
            held = dim >= 0 and not is_one(tensor.shape[dim])
            states.append(S(dim) if held else R)
            if held:
                sizes.append(tensor.shape[dim])
        if sizes and call.fits(sizes[0], f"{call.op}: {letter}"):
            if letter in right:
                yield call.strategy({"tensors": states}, S(right.index(letter)))
            elif differentiable(call.result):
                yield call.strategy({"tensors": states}, P)
    if differentiable(call.result):
        for position in range(len(tensors)):
            states = [P if i == position else R for i in range(len(tensors))]
            yield call.strategy({"tensors": states}, P)


def float8_linear(call: OpCall) -> Iterator[Strategy]:
    """autoshard::float8_linear: the splits of `linear`, with a maximum over the ranks for scales.

        rows of x        x S(d), weight R -> S(d)
        column-parallel  x R, weight S(0) -> S(last)
        row-parallel     x S(last), weight S(1) -> P

    Its backward rounds the gradient that arrives, so a gradient in parts is no gradient of it: no
    operand is P, and the result is not R (`registry` offers R of every other operator).
    """
    x, weight = call.tensor("x"), call.tensor("weight")
    assert x is not None and weight is not None
    last = x.dim() - 1
    for d in range(last):
        if call.fits(x.shape[d], f"{call.op}: dim {d}"):
            yield _split(call, "m", {"x": S(d)}, S(d))
    if _fits(call, weight.shape[0], "rows of the weight"):
        yield _split(call, "n", {"weight": S(0)}, S(last))
    if _fits(call, weight.shape[1], "columns of the weight"):
        yield _split(call, "k", {"x": S(last), "weight": S(1)}, P)


def _fits(call: OpCall, size: int, what: str) -> bool:
    """Whether a rank's share of a dim of a weight is one that kernels take."""
    fits = size % (FLOAT8_MULTIPLE * call.n) == 0
    if not fits:
        call.decline(f"{call.op}: {what} {size} % ({FLOAT8_MULTIPLE} x {call.n}) != 0")
    return fits


def _split(call: OpCall, split: str, states: dict[str, str], output: str) -> Strategy:
    impl = Bound.of(split_float8_linear, split=split)
    return call.strategy(states, output, impl, list(_maxima(call, split)))


def _maxima(call: OpCall, split: str) -> Iterator[ImplCollective]:
    x, weight = call.tensor("x"), call.tensor("weight")
    assert x is not None and weight is not None
    n, k = weight.shape
    m = count(x.shape) // k
    if call["recipe"] == ROWWISE:
        forward = {"k": m + n}.get(split, 0)
        backward = {"n": m + k, "m": n + k}.get(split, 0)
    else:
        forward = 2 if split == "k" else 1
        backward = 0 if split == "k" else 1
    if forward:
        yield ImplCollective("all_reduce", _SCALE * forward)
    if backward:
        yield ImplCollective("all_reduce", _SCALE * backward, backward=True)
