"""The rule language: what a line offers, and what its errors say."""

from __future__ import annotations

import pytest
import torch

from autoshard.planning.rules.language import TextRule
from autoshard.planning.rules.registry import sharding_rule, strategies
from autoshard.planning.strategy import Strategy
from autoshard.runtime.collectives.states import I, P, R, S
from oracle import node_of

aten = torch.ops.aten


def offered(
    op: torch._ops.OpOverload, *args: object, n: int = 2, **kwargs: object
) -> list[Strategy]:
    """What is offered beyond all-I and all-R."""
    return strategies(node_of(op, args, kwargs)[0], n)[0][2:]


def test_linear_is_column_parallel_row_parallel_batch_sharded_and_linear() -> None:
    x, weight, bias = torch.randn(3, 4, 6), torch.randn(8, 6), torch.randn(8)
    assert offered(aten.linear.default, x, weight, bias) == [
        Strategy((S(0), R, R), S(0)),
        Strategy((S(1), R, R), S(1)),
        Strategy((S(2), S(1), P), P),
        Strategy((R, S(0), S(0)), S(2)),
        Strategy((P, R, P), P),
        Strategy((R, P, P), P),
    ]


def test_a_missing_operand_and_a_keyword_operand() -> None:
    x, weight, bias = torch.randn(4, 6), torch.randn(8, 6), torch.randn(8)
    assert Strategy((S(1), S(1)), P) in offered(aten.linear.default, x, weight)
    by_keyword = offered(aten.linear.default, x, bias=bias, weight=weight)
    assert Strategy((S(1), P, S(1)), P) in by_keyword


def test_a_broadcast_dim_lacks_the_letter() -> None:
    x, row, column = torch.randn(4, 6), torch.randn(1, 6), torch.randn(4, 1)
    assert offered(aten.maximum.default, x, row) == [
        Strategy((S(0), R), S(0)),
        Strategy((S(1), S(1)), S(1)),
    ]
    assert offered(aten.maximum.default, row, column) == [
        Strategy((R, S(0)), S(0)),
        Strategy((S(1), R), S(1)),
    ]


def test_integers_and_masks_are_r_where_others_would_be_v() -> None:
    mask, x = torch.ones(6, dtype=torch.bool), torch.randn(4, 6)
    found = offered(aten.where.self, mask, x, x)
    assert Strategy((I, S(0), S(0)), S(0)) in found
    assert Strategy((I, P, P), P) in found


def test_a_number_as_a_term_is_not_partial() -> None:
    x = torch.randn(4, 6)
    assert Strategy((P,), P) not in offered(aten.add.Tensor, x, 1.0)
    assert Strategy((P,), P) in offered(aten.mul.Tensor, x, 2.0)


def test_sizes_that_differ_must_both_divide() -> None:
    query, few = torch.randn(2, 8, 4, 16), torch.randn(2, 2, 4, 16)
    sdpa = aten.scaled_dot_product_attention.default
    by_heads = Strategy((S(1), S(1), S(1)), S(1))
    assert by_heads in offered(sdpa, query, few, few, enable_gqa=True)
    node, _ = node_of(sdpa, (query, few, few), {"enable_gqa": True})
    found, reasons = strategies(node, 4)
    assert by_heads not in found
    assert f"{sdpa}: ...0 2 < 4" in reasons


@pytest.mark.parametrize(
    ("rows", "n", "possible"), [(8, 4, True), (7, 4, True), (5, 4, False), (3, 4, False)]
)
def test_uneven_rows_are_offered_where_no_rank_is_empty(rows: int, n: int, possible: bool) -> None:
    x = torch.randn(rows, 16)
    assert (Strategy((S(0),), S(0)) in offered(aten.relu.default, x, n=n)) == possible


@pytest.mark.parametrize(
    ("text", "column", "problem", "remedy"),
    [
        ("... k, n k", 1, 'expected one "->"', "inputs -> outputs"),
        ("a -> a -> a", 3, 'expected one "->"', "inputs -> outputs"),
        ("... k, n k -> ... m", 19, '"m" is in no input', "upper case"),
        ("k -> ... k", 6, '"..." is in no input', "add it"),
        ("a a -> a", 3, '"a" twice in one operand', "its own name"),
        ("... X... -> ...", 5, "a second ellipsis", "one by one"),
        ("a * b -> a b", 3, '"*" in the middle', "in front"),
        ("a, b! -> a", 4, 'cannot read "b!"', "names"),
        ("a, _ b -> a", 3, '"_" beside other dims', "upper case"),
        ("a -> * a", 5, '"*" in a result', "dims only"),
        ("a b -> a b, a", 10, '"b" is in result 0 but not in all', "upper case"),
    ],
)
def test_errors_name_the_column_and_the_remedy(
    text: str, column: int, problem: str, remedy: str
) -> None:
    with pytest.raises(ValueError) as error:
        TextRule(text)
    message = str(error.value)
    assert message.startswith(f'sharding rule "{text}", column {column}: ')
    assert problem in message and remedy in message


def test_a_rule_with_another_number_of_inputs_than_the_operator() -> None:
    expected = r"aten::linear takes 3 tensors \(input, weight, bias\) but the rule has 2 inputs"
    with pytest.raises(ValueError, match=expected):
        sharding_rule("aten.linear", "... k, n k -> ... n")


def test_a_rule_is_needed() -> None:
    with pytest.raises(ValueError, match="give at least one rule"):
        sharding_rule("aten.linear")
