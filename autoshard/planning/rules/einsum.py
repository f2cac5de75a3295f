"""einsum: its equation is a rule already."""

from __future__ import annotations

from collections.abc import Iterator

from autoshard.planning.rules.call import OpCall, differentiable
from autoshard.planning.sizes import is_one
from autoshard.planning.strategy import Strategy
from autoshard.runtime.collectives import P, R, S, State


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
