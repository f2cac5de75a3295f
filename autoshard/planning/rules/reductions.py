"""Operators that reduce a dim: over a sharded one they give a partial result, or communicate.
Losses over classes are sharded by tokens, or by classes without ever gathering the logits."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from autoshard.planning.rules.call import OpCall, differentiable
from autoshard.planning.rules.views import along, except_dims, reducing
from autoshard.planning.sizes import count, hint, same_shape
from autoshard.planning.strategy import ImplCollective, Strategy
from autoshard.runtime import operators
from autoshard.runtime.collectives import I, P, S
from autoshard.runtime.operators import MEAN, NONE, Bound, share_of_equal_mean, share_of_mean


def _reduced(call: OpCall) -> tuple[list[int], list[int]]:
    (tensor,) = call.given("self")
    every = list(range(tensor.dim()))
    return (call.dims("dim", tensor.dim()) if "dim" in call else every), list(tensor.shape)


def summed(call: OpCall) -> Iterator[Strategy]:
    """sum: S(d) of a summed dim gives P; other dims stay; linear."""
    yield from along(reducing("dim" if "dim" in call else None))(call)
    dims, shape = _reduced(call)
    for d in dims:
        if differentiable(call.result) and differentiable(call.tensor("self")):
            if call.fits(shape[d], f"{call.op}: dim {d}"):
                yield call.strategy({"self": S(d)}, P)


def averaged(call: OpCall) -> Iterator[Strategy]:
    """mean: as sum, each rank's mean weighted by its share of the rows."""
    yield from along(reducing("dim" if "dim" in call else None))(call)
    dims, shape = _reduced(call)
    for d in dims:
        if call.fits(shape[d], f"{call.op}: dim {d}"):
            extent = shape[d] if isinstance(shape[d], int) else None
            impl = Bound.of(share_of_mean, op=call.target, sharded_dim=d, extent=extent)
            yield call.strategy({"self": S(d)}, P, impl)


def logsumexp(call: OpCall) -> Iterator[Strategy]:
    """Other dims stay; over one sharded dim, two all-reduces of what is left of the rest."""
    yield from along(reducing(), linear=False)(call)
    dims, shape = _reduced(call)
    for d in dims:
        if len(dims) == 1 and call.fits(shape[d], f"{call.op}: dim {d}"):
            row = call.results[0].element_size() * count(call.results[0].shape)
            traffic = [ImplCollective("all_reduce", row)] * 2
            yield call.strategy({"self": S(d)}, I, operators.logsumexp, traffic)


def normalized_over(dim_impl: Callable[..., Any]) -> Callable[[OpCall], Iterator[Strategy]]:
    """softmax and log_softmax: other dims stay; over the sharded dim, two small all-reduces."""

    def rule(call: OpCall) -> Iterator[Strategy]:
        yield from along(except_dims(), linear=False)(call)
        dims, shape = _reduced(call)
        for d in dims:
            if shape and call.fits(shape[d], f"{call.op}: dim {d}"):
                row = call.results[0].element_size() * count(shape) // (hint(shape[d]) or 1)
                traffic = [ImplCollective("all_reduce", row, back) for back in (False, False, True)]
                yield call.strategy({"self": S(d)}, S(d), dim_impl, traffic)

    return rule


SUM = 2  # at::Reduction


def of_classes(
    scores: torch.Tensor, target: torch.Tensor, smooth: bool
) -> tuple[ImplCollective, ...]:
    """What a cross entropy sends whose classes are split: the maximum of each token, and sums."""
    tokens = max(4, scores.element_size()) * count(target.shape)
    sizes = (tokens, (3 if smooth else 2) * tokens)
    return tuple(ImplCollective("all_reduce", nbytes) for nbytes in sizes)


def classified(
    by_classes: Callable[..., Any], output: str
) -> Callable[[OpCall], Iterator[Strategy]]:
    """A rule for cross_entropy_loss and nll_loss.

    by_classes: what runs where the classes are sharded; `output`: the state of its result.
    """

    def rule(call: OpCall) -> Iterator[Strategy]:
        scores, target = call.given("self", "target")
        if differentiable(target):
            call.decline(f"{call.op}: targets are class probabilities")
            return
        classes = 0 if scores.dim() == 1 else 1
        extent = scores.shape[classes]
        label = f"{call.op}: classes"
        if not isinstance(extent, int):
            call.decline(f"{label} of symbolic number")
        elif call.fits(extent, label):
            impl = Bound.of(by_classes, classes=extent)
            states = {"self": S(classes), "target": I, "weight": I}
            smooth = bool(call.get("label_smoothing"))
            traffic = of_classes(scores, target, smooth) if output == I else ()
            yield call.strategy(states, output, impl, traffic)
        for d in call.split_dims(scores.shape, classes):
            t = d - (d > classes)
            states = {"self": S(d), "target": S(t), "weight": I}
            if call["reduction"] == NONE:
                yield call.strategy(states, S(t))
            elif call["reduction"] == SUM:
                # of more dims, as rows: the kernels for them copy the scores first
                rows = Bound.of(operators.loss_over_tokens, op=call.target)
                yield call.strategy(states, P, rows if scores.dim() > 2 else None)
            else:
                impl = Bound.of(operators.loss_over_tokens, op=call.target)
                yield call.strategy(states, P, impl, [ImplCollective("all_reduce", 8)])

    return rule


def elementwise_loss(call: OpCall) -> Iterator[Strategy]:
    """mse_loss, l1_loss and other losses of one value an element: sharded by any dim.

    The mean is taken over equal shares only.
    """
    given, target = call.given("self", "target")
    if not same_shape(given, target):
        call.decline(f"{call.op}: broadcast operands")
        return
    reduction = call["reduction"]
    for d in range(given.dim()):
        if not call.fits(given.shape[d], f"{call.op}: dim {d}", even=reduction == MEAN):
            continue
        states = {"self": S(d), "target": S(d)}
        if reduction == NONE:
            yield call.strategy(states, S(d))
        else:
            impl = Bound.of(share_of_equal_mean, op=call.target)
            yield call.strategy(states, P, impl if reduction == MEAN else None)
