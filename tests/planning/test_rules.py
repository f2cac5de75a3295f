"""Every rule and every strategy it offers, against the dense operator."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from autoshard.planning.rules import registry
from autoshard.planning.rules.call import OpCall
from autoshard.planning.rules.registry import strategies
from autoshard.planning.strategy import Strategy
from autoshard.runtime.collectives.states import I, P, R, S
from oracle import Sample, check, node_of, prove
from rule_samples import all_samples

SAMPLES = all_samples()


@pytest.mark.parametrize("op", sorted({sample.op for sample in SAMPLES}))
def test_every_strategy_is_right(op: str) -> None:
    for sample in SAMPLES:
        if sample.op == op:
            prove(sample)


def test_every_rule_is_proved() -> None:
    """A rule is proved where some sample of its operator gets a strategy beyond I and R."""
    proved = set()
    for sample in SAMPLES:
        node, _ = node_of(sample.overload, sample.args, sample.kwargs)
        if any(set(s.inputs) - {I, R} or s.impl for s in strategies(node, 2)[0]):
            proved |= {str(sample.overload), str(sample.overload.overloadpacket)}
    assert [name for name in registry._rules if name not in proved] == []


X = torch.randn(4, 8).double()
WRONG = {
    "a softmax over a sharded dim": ("aten.softmax.int", (X, 1), "... -> ..."),
    "a partial value through relu": ("aten.relu", (X,), "* ... -> ..."),
    "a bias that is added on every rank": (
        "aten.linear",
        tuple(torch.randn(s).double() for s in [(4, 8), (6, 8), (6,)]),
        "... k, n k, n -> ... n",
    ),
    "a weight that is not summed": (
        "aten.linear",
        tuple(torch.randn(s).double() for s in [(4, 8), (6, 8), (6,)]),
        lambda call: [call.strategy({"input": S(0), "weight": I, "bias": I}, S(0))],
    ),
    "an output said to be whole": (
        "aten.mm",
        tuple(torch.randn(s).double() for s in [(4, 8), (8, 6)]),
        lambda call: [call.strategy({"self": S(1), "mat2": S(0)}, I)],
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_oracle_sees_a_wrong_rule(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    op, args, rule = WRONG[name]
    prove(Sample(op, args))
    monkeypatch.setattr(registry, "_rules", dict(registry._rules))
    registry.sharding_rule(op, rule)
    with pytest.raises(AssertionError, match=op):
        prove(Sample(op, args))


def test_the_first_strategy_is_replicated_and_unknown_operators_are_only_that() -> None:
    x = torch.randn(4, 4, dtype=torch.float64)
    node, _ = node_of(torch.ops.aten.linalg_inv.default, (x,), {})
    found, reasons = strategies(node, 2)
    assert found == [Strategy((I,), I), Strategy((R,), R)]
    assert reasons == ["aten.linalg_inv.default has no sharding rule (see autoshard.sharding_rule)"]


@pytest.mark.parametrize(
    ("args", "n", "reason"),
    [
        ((torch.randn(2, 8, 36), [2, 8, 6, 6]), 4, "aten.reshape.default: result dim 2 6 % 4 != 0"),
        ((torch.randn(3, 9), [9, 3]), 4, "aten.reshape.default: result dim 0 9 % 4 != 0"),
        ((torch.randn(3, 8), [3, 8]), 4, "aten.reshape.default: dim 0 3 < 4"),
        (
            (torch.randn(5, 8), [5, 8]),
            4,
            "aten.reshape.default: dim 0 5 rows in chunks of 2 leave a rank of 4 empty",
        ),
    ],
)
def test_a_declined_view_says_why(args: tuple[object, ...], n: int, reason: str) -> None:
    node, _ = node_of(torch.ops.aten.reshape.default, args, {})
    assert reason in strategies(node, n)[1]


def test_users_add_rules_for_their_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_rules", dict(registry._rules))
    with torch.library._scoped_library("autoshard_test", "DEF") as library:
        library.define("scale_rows(Tensor x, Tensor s) -> Tensor")
        library.impl("scale_rows", lambda x, s: x * s[:, None], "CompositeImplicitAutograd")
        op = torch.ops.autoshard_test.scale_rows
        args = (torch.randn(4, 6).double(), torch.randn(4).double())
        registry.sharding_rule("autoshard_test::scale_rows", "* r c, * r -> r c")
        node, tensors = node_of(op.default, args, {})
        found, _ = strategies(node, 2)
        assert Strategy((S(0), S(0)), S(0)) in found
        assert Strategy((S(1), R), S(1)) in found
        assert Strategy((P, R), P) in found
        for strategy in found:
            check(node, tensors, strategy, 2)

        def by_column(call: OpCall) -> Iterable[Strategy]:
            yield call.strategy({"x": S(1)}, S(1))

        registry.sharding_rule(op, by_column)
        assert strategies(node, 2)[0][2:] == [Strategy((S(1), R), S(1))]


def test_vocab_parallel_loss_of_16_bits_is_that_of_fp32() -> None:
    """Serial bf16 rounds log-probabilities; the sharded loss must not be less precise."""
    scores, target = torch.randn(16, 32).bfloat16(), torch.randint(32, (16,))
    node, tensors = node_of(torch.ops.aten.cross_entropy_loss.default, (scores, target), {})
    by_class = [s for s in strategies(node, 2)[0] if s.inputs[0] == S(1)]
    from autoshard.runtime.collectives.lockstep import run_ranks

    (strategy,) = by_class
    parts = scores.chunk(2, 1)
    results = run_ranks(2, lambda axis: strategy.impl(parts[axis.rank], target, axis=axis))
    exact = torch.nn.functional.cross_entropy(scores.double(), target)
    for result in results:
        assert result.dtype == torch.bfloat16
        assert abs(result.double() - exact) <= abs(exact) * 2**-8
