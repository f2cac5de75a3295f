"""Losses over a sharded vocabulary in whole models, against float64 dense results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autoshard.planning.plan import Plan
from autoshard.program import Program
from autoshard.runtime.collectives.axis import Axis, chunk_bounds
from autoshard.runtime.collectives.lockstep import run_mesh
from autoshard.runtime.operators.vocabulary import (
    own_tokens,
    share_of_tokens,
    stand_in_targets,
    stand_in_weight,
    vocab_parallel_cross_entropy,
    vocab_parallel_nll,
)
from autoshard.verification.program_check import verify_program
from steps import serial_step, sharded_step
from traced import programs

T = torch.Tensor
TOKENS, HIDDEN, VOCAB = 96, 64, 1026  # 4 ranks hold 257, 257, 257 and 255 classes
IGNORED = -100


class Head(nn.Module):
    """Hidden states to scores to `loss`."""

    def __init__(self, loss: Callable[[T, T], T], logits: bool = False) -> None:
        super().__init__()
        self.loss, self.logits = loss, logits
        self.body, self.head = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, VOCAB)

    def forward(self, x: T, target: T) -> Any:
        scores = self.head(torch.tanh(self.body(x)))
        loss = self.loss(scores, target)
        return (loss, scores) if self.logits else loss


WEIGHT = torch.rand(VOCAB, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.1


def z_loss(scores: T, target: T) -> T:
    return F.cross_entropy(scores, target) + 1e-2 * scores.logsumexp(-1).square().mean()


def hugging_face(scores: T, target: T) -> T:
    from transformers.loss.loss_utils import ForCausalLMLoss

    return ForCausalLMLoss(scores[None], target[None], VOCAB)


def counted_by_hugging_face(scores: T, target: T) -> T:
    """The trainer's way to average over the tokens of several batches."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    return ForCausalLMLoss(scores[None], target[None], VOCAB, num_items_in_batch=131)


LOSSES: dict[str, Callable[[T, T], T]] = {
    "mean": F.cross_entropy,
    "sum": lambda s, t: F.cross_entropy(s, t, reduction="sum"),
    "none": lambda s, t: F.cross_entropy(s, t, reduction="none"),
    "weights": lambda s, t: F.cross_entropy(s, t, WEIGHT),
    "weights, sum": lambda s, t: F.cross_entropy(s, t, WEIGHT, reduction="sum"),
    "smoothing": lambda s, t: F.cross_entropy(s, t, label_smoothing=0.2),
    "smoothing, none": lambda s, t: F.cross_entropy(s, t, reduction="none", label_smoothing=0.2),
    "smoothing, weights": lambda s, t: F.cross_entropy(s, t, WEIGHT, label_smoothing=0.3),
    "smoothing, weights, sum": lambda s, t: F.cross_entropy(
        s, t, WEIGHT, reduction="sum", label_smoothing=0.3
    ),
    "another index": lambda s, t: F.cross_entropy(s, t.clamp_min(3), ignore_index=3),
    "log_softmax and nll": lambda s, t: F.nll_loss(F.log_softmax(s, -1), t),
    "z-loss": z_loss,
    "Hugging Face": hugging_face,
    "Hugging Face, counted": counted_by_hugging_face,
}


def case(loss: Callable[[T, T], T], logits: bool = False) -> tuple[Head, T, T]:
    torch.manual_seed(0)
    target = torch.randint(VOCAB, (TOKENS,))
    target[::5] = IGNORED
    return Head(loss, logits).double(), torch.randn(TOKENS, HIDDEN).double(), target


def sharded(n: int) -> dict[str, Any]:
    """Options with a plan that stores the head by classes; the rest is searched."""
    plan = Plan("tp", n, {"head.weight": "S(0)", "head.bias": "S(0)"}, {})
    return {"mesh": {"tp": n}, "plan": plan}


def traced(loss: str) -> tuple[list[Program], list[Any]]:
    torch.compiler.reset()
    model, x, target = case(LOSSES[loss])
    return programs(model, (x, target), [sharded(2), sharded(4)])


def by_classes(program: Program) -> bool:
    inside = {n.target for n in program.graph_module.graph.nodes if n.op == "call_function"}
    return bool({vocab_parallel_cross_entropy, vocab_parallel_nll} & inside)


@pytest.mark.parametrize("loss", LOSSES)
def test_loss_and_gradients_are_those_of_the_dense_model(loss: str) -> None:
    made, values = traced(loss)
    model, x, target = case(LOSSES[loss])
    want = model(x, target)
    tolerance = 1e-6 if "Hugging Face" in loss else 1e-11  # it computes in float32
    for program in made:
        serial = program.serial(*values)[0]
        torch.testing.assert_close(serial, want, rtol=tolerance, atol=tolerance)
        worst = verify_program(program, values).worst
        assert worst[1] < tolerance, worst
        assert by_classes(program), "the plan splits something else"
        # logits stay: nothing of their size crosses the axis
        largest = max(c.bytes for c in program.collectives())
        assert largest <= TOKENS * HIDDEN * 8 < TOKENS * VOCAB * 8 / 4, program.explain()


@pytest.mark.parametrize(("loss", "sums"), [("mean", 2), ("smoothing", 3), ("weights", 2)])
def test_two_reductions_of_a_number_for_each_token(loss: str, sums: int) -> None:
    """The maximum, and one packed sum: exponentials, the target's score, with smoothing all."""
    for program in traced(loss)[0]:
        inside = [
            c.bytes
            for c in program.collectives()
            if c.phase == "forward" and "cross_entropy" in c.change
        ]
        assert inside == [TOKENS * 8, sums * TOKENS * 8]


@pytest.mark.parametrize("outputs", ["lazy", "replicate"])
def test_logits_that_nobody_reads_cost_nothing(outputs: str) -> None:
    model, x, target = case(F.cross_entropy, logits=True)
    torch.compiler.reset()
    (program,), _ = programs(model, (x, target), [{**sharded(2), "outputs": outputs}])
    gathered = [
        c for c in program.collectives() if c.op == "all_gather" and c.bytes >= TOKENS * VOCAB * 8
    ]
    assert len(gathered) == (outputs == "replicate")


def test_16_bit_scores_are_reduced_in_fp32() -> None:
    """The loss of bf16 scores, against float64: no worse than the serial one."""
    for loss in ("mean", "smoothing", "z-loss"):
        torch.compiler.reset()
        torch.manual_seed(0)
        model, x, target = case(LOSSES[loss])
        exact = model(x, target).detach()
        half, given = model.bfloat16(), x.bfloat16()
        (program,), values = programs(half, (given, target), [sharded(2)])
        serial, sharded_loss = (step(program, values).loss for step in (serial_step, sharded_step))
        own = abs(float(serial) - float(exact)) / float(exact)
        assert abs(float(sharded_loss) - float(exact)) / float(exact) <= max(own, 2.0**-8), loss


@pytest.mark.parametrize("ignored", [IGNORED, 0])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("split", [False, True])
def test_no_tokens_in_every_form_of_the_loss(
    ignored: int, weighted: bool, smoothing: float, split: bool
) -> None:
    """Two data-parallel ranks, the first without tokens, of two ranks that split the classes."""
    classes, tokens = 9, 6
    weight = torch.rand(classes) + 0.1 if weighted else None
    scores, target = torch.randn(2, tokens, classes), torch.randint(1, classes, (2, tokens))
    target[0], target[1, 2] = ignored, ignored
    want = scores.clone().requires_grad_()
    whole = F.cross_entropy(
        want.flatten(0, 1),
        target.flatten(),
        weight,
        ignore_index=ignored,
        label_smoothing=smoothing,
    )
    whole.backward()

    def rank(axes: tuple[Axis, ...]) -> tuple[T, T]:
        dp, tp = axes
        own = own_tokens(target[dp.rank], weight, ignored, ())
        given = stand_in_targets(target[dp.rank], own, ignored)
        counts = None if weight is None else stand_in_weight(weight, own)
        if split:
            start, length = chunk_bounds(classes, tp)
            mine = scores[dp.rank].narrow(-1, start, length).clone().requires_grad_()
            loss = vocab_parallel_cross_entropy(
                mine, given, counts, 1, ignored, smoothing, classes=classes, axis=tp
            )
        else:
            mine = scores[dp.rank].clone().requires_grad_()
            loss = F.cross_entropy(
                mine, given, counts, ignore_index=ignored, label_smoothing=smoothing
            )
        shared = share_of_tokens(loss, own, (dp,))
        shared.backward()
        assert mine.grad is not None
        return shared.detach(), mine.grad

    found = run_mesh({"dp_replicate": 2, "tp": 2}, rank)
    torch.testing.assert_close((found[0][0] + found[2][0]) / 2, whole.detach())
    assert want.grad is not None
    for data in range(2):
        pieces = [found[2 * data + i][1] for i in range(2)]
        grad = torch.cat(pieces, -1) if split else pieces[0]
        torch.testing.assert_close(grad / 2, want.grad[data])


def test_no_tokens_anywhere_is_the_mean_of_nothing() -> None:
    scores = torch.randn(4, 5, requires_grad=True)
    target = torch.full((4,), IGNORED)

    def rank(axes: tuple[Axis, ...]) -> T:
        own = own_tokens(target, None, IGNORED, ())
        mean = F.cross_entropy(scores, stand_in_targets(target, own, IGNORED))
        return share_of_tokens(mean, own, axes).detach()

    assert all(bool(loss.isnan()) for loss in run_mesh({"dp_replicate": 2}, rank))
