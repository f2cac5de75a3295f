"""Losses over classes: sharded by tokens, or by classes without ever gathering the logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from autoshard.planning.rules.call import OpCall, differentiable
from autoshard.planning.sizes import count, same_shape
from autoshard.planning.strategy import ImplCollective, Strategy
from autoshard.runtime import operators
from autoshard.runtime.collectives import I, P, S
from autoshard.runtime.operators import Bound, share_of_equal_mean

NONE, MEAN, SUM = 0, 1, 2  # at::Reduction


def classified(
    by_classes: Callable[..., Any], output: str
) -> Callable[[OpCall], Iterator[Strategy]]:
    """A rule for cross_entropy_loss and nll_loss.

    by_classes: what runs where the classes are sharded; `output`: the state of its result.
    """

    def rule(call: OpCall) -> Iterator[Strategy]:
        scores, target = call.tensor("self"), call.tensor("target")
        assert scores is not None and target is not None
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
            tokens = max(4, scores.element_size()) * count(target.shape)
            sums = 3 if call.get("label_smoothing") else 2
            sizes = (tokens, sums * tokens)
            traffic = [ImplCollective("all_reduce", nbytes) for nbytes in sizes]
            yield call.strategy(states, output, impl, traffic if output == I else [])
        for d in range(scores.dim()):
            if d == classes or not call.fits(scores.shape[d], f"{call.op}: dim {d}"):
                continue
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
    given, target = call.tensor("self"), call.tensor("target")
    assert given is not None and target is not None
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
