"""Products whose rule is no line of text: einsum, whose equation is one already, and float8.

A mixture of experts as one operator: which part of it a rank of the axis computes.

    tokens split       x S(0), stacks R -> S(0)      weights are gathered
    both split         x S(0), stacks S(0) -> S(0)   rows travel to their experts and back
    experts split      x R, stacks S(0) -> P         whole experts, chosen tokens only
    each expert split  x R, stacks S(inner dim) -> P every expert, a share of its inner dim

Rows of choices travel by all-to-alls inside of the operator, as many as experts are chosen: the
plan prices even loads. What brings x to R and takes P on is the business of the edges: gathered
tokens and a reduce-scatter where the tokens are split around the mixture, an all-reduce where they
are not.
"""

from collections.abc import Iterator

from autoshard.planning.expert_columns import inner_split
from autoshard.planning.mixtures import exchanged, not_of_zero
from autoshard.planning.rules.call import OpCall, differentiable
from autoshard.planning.sizes import count, is_one
from autoshard.planning.strategy import ImplCollective, Strategy
from autoshard.runtime.collectives import P, R, S, State
from autoshard.runtime.operators import (
    FLOAT8_MULTIPLE,
    ROWWISE,
    Bound,
    exchanged_experts,
    owned_experts,
    parse,
    split_experts,
    split_float8_linear,
)

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
    x, weight = call.given("x", "weight")
    last = x.dim() - 1
    for d in call.split_dims(x.shape, last):
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
    x, weight = call.given("x", "weight")
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


def mixture(call: OpCall) -> Iterator[Strategy]:
    """autoshard::experts."""
    yield from _tokens(call)
    if bad := not_of_zero(call["body"]):
        call.decline(f"{call.op}: experts run {bad}, which may not be finite at zero")
    else:
        yield from _exchanged_rows(call)
        yield from _whole_experts(call)
    yield from _inside(call)


def _tokens(call: OpCall) -> Iterator[Strategy]:
    (x,) = call.given("x")
    if call.fits(x.shape[0], f"{call.op}: tokens"):
        yield call.strategy(dict.fromkeys(("x", "ids", "weights"), S(0)), S(0))


def _exchanged_rows(call: OpCall) -> Iterator[Strategy]:
    x, ids, weights = call.given("x", "ids", "weights")
    stacks = call.tensors("stacks")
    experts = stacks[0].shape[0]
    fits = [
        call.fits(x.shape[0], f"{call.op}: tokens"),
        call.fits(experts, f"{call.op}: experts"),
    ]
    if not all(fits):
        return
    assert isinstance(experts, int)
    own = (count(ids.shape) // call.n, 1)  # of this rank's tokens, evenly
    traffic = exchanged(x, ids.new_empty(own), weights, experts, call.n)
    split = call.strategy(
        {**dict.fromkeys(("x", "ids", "weights"), S(0)), "stacks": [S(0)] * len(stacks)},
        S(0),
        Bound.of(exchanged_experts, experts=experts),
        traffic,
    )
    yield split._replace(waits=1)


def _whole_experts(call: OpCall) -> Iterator[Strategy]:
    stacks = call.tensors("stacks")
    experts = stacks[0].shape[0]
    if not call.fits(experts, f"{call.op}: experts"):
        return
    impl = Bound.of(owned_experts, experts=experts)
    yield call.strategy({"stacks": [S(0)] * len(stacks)}, P, impl)


def _inside(call: OpCall) -> Iterator[Strategy]:
    stacks = call.tensors("stacks")
    shapes = [tuple(stack.shape) for stack in stacks]
    if not all(isinstance(size, int) for shape in shapes for size in shape):
        return
    found = inner_split(parse(call["body"]), shapes, call.n, stacks[0].element_size())
    if isinstance(found, str):
        call.decline(f"{call.op}: inside of each expert: {found}")
        return
    impl = None
    if found.body.text() != call["body"] or found.packed:
        impl = Bound.of(split_experts, local_body=found.body.text(), packed=found.packed)
    # gives a rank its share of both halves of a packed stack
    packed = [stacks[i] for i, _, _ in found.packed]
    sizes = [count(each.shape) * each.element_size() // call.n for each in packed]
    traffic = [ImplCollective("all_to_all", size) for size in sizes]
    trained = [one for one, each in zip(traffic, packed) if differentiable(each)]
    traffic += [one._replace(backward=True) for one in trained]
    yield call.strategy({"stacks": list(found.states)}, P, impl, traffic)
