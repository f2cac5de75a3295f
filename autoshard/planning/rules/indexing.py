"""Operators that read or write by index."""

from collections.abc import Iterator

import torch

from autoshard.planning.rules.call import OpCall, differentiable
from autoshard.planning.rules.language import TextRule
from autoshard.planning.sizes import is_one, same
from autoshard.planning.strategy import Strategy
from autoshard.runtime.collectives import I, P, R, S
from autoshard.runtime.operators import Bound, vocab_parallel_embedding

_BY_COLUMN = TextRule("* V d, I... -> I... d")
_BY_TOKEN_OR_COLUMN = TextRule("* V d, ... -> ... d")


def looked_up(call: OpCall) -> Iterator[Strategy]:
    """embedding: by token, by column, or by vocabulary: each rank looks up its own rows."""
    # scaling by frequency needs to count all the tokens
    yield from (_BY_COLUMN if call["scale_grad_by_freq"] else _BY_TOKEN_OR_COLUMN)(call)
    rows = call.given("weight")[0].shape[0]
    label = f"{call.op}: vocabulary"
    if call["scale_grad_by_freq"] or call["sparse"]:
        call.decline(f"{label} with scale_grad_by_freq or sparse")
    elif not isinstance(rows, int):
        call.decline(f"{label} of symbolic size")
    elif call.fits(rows, label):
        impl = Bound.of(vocab_parallel_embedding, rows=rows)
        yield call.strategy({"weight": S(0), "indices": I}, P, impl)


def gathered(call: OpCall) -> Iterator[Strategy]:
    """gather: the other dims where both sides agree; along its dim, the index may be sharded."""
    source, index = call.given("self", "index")
    for d in range(index.dim()):
        label = f"{call.op}: dim {d}"
        if d == call["dim"] % max(index.dim(), 1):
            if call.fits(index.shape[d], label):
                yield call.strategy({"self": R, "index": S(d)}, S(d))
        elif _agree(call, label, d, source, index) and call.fits(index.shape[d], label):
            yield call.strategy({"self": S(d), "index": S(d)}, S(d))
    if differentiable(call.result):
        yield call.strategy({"self": P}, P)


def scattered(call: OpCall) -> Iterator[Strategy]:
    """scatter, scatter_add: the dims but its own, where all sizes agree."""
    target, index = call.given("self", "index")
    source = call.tensor("src") if "src" in call else None
    for d in range(target.dim()):
        label = f"{call.op}: dim {d}"
        if d == call["dim"] % target.dim():
            continue
        others = [index] if source is None else [index, source]
        if _agree(call, label, d, target, *others) and call.fits(target.shape[d], label):
            yield call.strategy({"self": S(d), "index": S(d), "src": S(d)}, S(d))
    if source is not None and differentiable(call.result):
        yield call.strategy({"self": P, "src": P}, P)


def _agree(call: OpCall, label: str, d: int, *tensors: torch.Tensor) -> bool:
    if all(same(tensor.shape[d], tensors[0].shape[d]) for tensor in tensors):
        return True
    call.decline(f"{label} has different sizes {[tensor.shape[d] for tensor in tensors]}")
    return False


def index_selected(call: OpCall) -> Iterator[Strategy]:
    """index_select: the other dims; along its dim, the index may be sharded."""
    source, index = call.given("self", "index")
    if not source.dim() or not index.dim():
        return
    dim = call["dim"] % source.dim()
    for d in range(source.dim()):
        size = index.shape[0] if d == dim else source.shape[d]
        if call.fits(size, f"{call.op}: dim {d}"):
            states = {"self": R, "index": S(0)} if d == dim else {"self": S(d), "index": I}
            yield call.strategy(states, S(d))
    if differentiable(call.result):
        yield call.strategy({"self": P}, P)


def index_written(call: OpCall) -> Iterator[Strategy]:
    """index_add, index_copy: the dims but its own; partial values into a partial tensor."""
    target, source = call.given("self", "source")
    dim = call["dim"] % max(target.dim(), 1)
    for d in call.split_dims(target.shape, dim) if target.dim() == source.dim() else ():
        yield call.strategy({"self": S(d), "index": I, "source": S(d)}, S(d))
    if differentiable(call.result):
        yield call.strategy({"self": P, "source": P}, P)


def index_added(call: OpCall) -> Iterator[Strategy]:
    """index_add also takes each rank's share of the rows to add."""
    yield from index_written(call)
    source, index = call.given("source", "index")
    if source.dim() and index.dim() and differentiable(call.result):
        dim = call["dim"] % source.dim()
        if call.fits(source.shape[dim], f"{call.op}: rows to add"):
            yield call.strategy({"self": P, "index": S(0), "source": S(dim)}, P)


def part_written(call: OpCall) -> Iterator[Strategy]:
    """select_scatter, slice_scatter: the dims but the one of which a part is written."""
    target, source = call.given("self", "src")
    dim = call["dim"] % target.dim()
    dropped = target.dim() - source.dim()
    for d in call.split_dims(target.shape, dim):
        yield call.strategy({"self": S(d), "src": S(d - dropped * (d > dim))}, S(d))
    if differentiable(call.result) and differentiable(source):
        yield call.strategy({"self": P, "src": P}, P)


def _advanced(call: OpCall) -> tuple[dict[int, int], list[int], int] | None:
    """The layout of the dims of x[indices]: kept dims, where they go, and the index block.

    Returns ({dim of self: dim of result}, [dims of the block in the result], indexed dims); None
    with masks, whose result has a size known only at run time.
    """
    indices, (source,) = list(call["indices"]), call.given("self")
    tensors = call.tensors("indices")
    if any(index.dtype in (torch.bool, torch.uint8) for index in tensors):
        call.decline(f"{call.op}: a mask as index")
        return None
    indices += [None] * (source.dim() - len(indices))
    at = [d for d, index in enumerate(indices) if index is not None]
    block = max(tensor.dim() for tensor in tensors)
    together = at == list(range(at[0], at[0] + len(at)))
    first = at[0] if together else 0
    kept = [d for d in range(source.dim()) if d not in at]
    places = {d: e + (block if e >= first else 0) for e, d in enumerate(kept)}
    return places, list(range(first, first + block)), len(at)


def advanced_indexed(call: OpCall) -> Iterator[Strategy]:
    """index.Tensor: dims that no index touches, or the dims of the indices themselves."""
    layout = _advanced(call)
    if layout is None:
        return
    places, block, _ = layout
    (source,), tensors = call.given("self"), call.tensors("indices")
    for d, e in places.items():
        if call.fits(source.shape[d], f"{call.op}: dim {d}"):
            yield call.strategy({"self": S(d), "indices": [I] * len(tensors)}, S(e))
    for position, e in enumerate(block):
        if call.fits(call.result.shape[e], f"{call.op}: result dim {e}"):
            states = [_index_state(index, position - len(block)) for index in tensors]
            yield call.strategy({"self": R, "indices": states}, S(e))
    if differentiable(call.result):
        yield call.strategy({"self": P, "indices": [I] * len(tensors)}, P)


def _index_state(index: torch.Tensor, from_right: int) -> str:
    d = index.dim() + from_right
    return S(d) if d >= 0 and not is_one(index.shape[d]) else I


def advanced_written(call: OpCall) -> Iterator[Strategy]:
    """index_put: the dims that no index touches; partial values into a partial tensor."""
    layout = _advanced(call)
    if layout is None:
        return
    places, block, indexed = layout
    target, values = call.given("self", "values")
    rank = target.dim() - indexed + len(block)
    count = len(call.tensors("indices"))
    for d, e in places.items():
        if call.fits(target.shape[d], f"{call.op}: dim {d}"):
            v = values.dim() - rank + e
            state = S(v) if v >= 0 and not is_one(values.shape[v]) else R
            yield call.strategy({"self": S(d), "indices": [I] * count, "values": state}, S(d))
    if differentiable(call.result):
        yield call.strategy({"self": P, "indices": [I] * count, "values": P}, P)


def metadata_read(call: OpCall) -> Iterator[Strategy]:
    """new_zeros and the like look at dtype and device only: a shard serves as well, and what they
    make has its local size."""
    (tensor,), result = call.given("self"), call.result
    split = list(call.split_dims(tensor.shape))
    for d in split:
        yield call.strategy({"self": S(d)}, I)
    for e in call.split_dims(result.shape):
        yield call.strategy({}, S(e))
        if e in split:
            yield call.strategy({"self": S(e)}, S(e))
    if differentiable(tensor):
        yield call.strategy({"self": P}, I)
