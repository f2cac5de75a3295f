"""Every oracle says no: to NaN, to infinity, to what is missing or too much, to another dtype or
shape. One that cannot say no proves nothing of what the suite asks it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import capturing
import engine_cases
import finished_ranks
import joined_batch
import oracle
import sharded
import steps
from autoshard.export.errors import ExportError
from autoshard.export.rank_graph.cache import comparison as cached
from autoshard.program import Program
from autoshard.verification import program_check
from autoshard.verification.comparison import compare, expectations, furthest
from autoshard.verification.program_check import verify_program
from autoshard.verification.proof import Proof, worst
from scenarios.job import differences
from side_by_side import Pair, difference, difference_by_norm
from traced import programs

NAN, INF = math.nan, math.inf
Values = dict[str, torch.Tensor]

#: Masked scores and a NaN of the serial model's own: no difference where both sides have them.
WANT: Values = {
    "a": torch.tensor([[1.0, -2.0], [0.5, -INF]]),
    "b": torch.tensor([[3.0, 4.0, NAN]]),
}


def _with(name: str, column: int, value: float) -> Values:
    changed = WANT[name].clone()
    changed[-1, column] = value
    return {**WANT, name: changed}


WRONG: dict[str, Values] = {
    "NaN": _with("a", 0, NAN),
    "NaN in the second": _with("b", 1, NAN),
    "infinity": _with("b", 0, INF),
    "NaN for infinity": _with("a", 1, NAN),
    "the other infinity": _with("a", 1, INF),
    "a number for NaN": _with("b", 2, 0.0),
    "a number for infinity": _with("a", 1, 0.0),
    "another number": _with("a", 0, 0.6),
    "another shape": {**WANT, "a": WANT["a"][:1]},
    "a shape that broadcasts": {**WANT, "b": WANT["b"][None]},
    "another dtype": {**WANT, "a": WANT["a"].double()},
}
KEYS: dict[str, Values] = {
    "a missing one": {"a": WANT["a"]},
    "one too many": {**WANT, "c": torch.ones(1, 1)},
}


def _keyed(values: Values) -> dict[Any, torch.Tensor]:
    return {("gradient", name, None): value for name, value in values.items()}


def by_verify(got: Values, want: Values) -> bool:
    found = compare(_keyed(got), expectations(_keyed(want), {}, {}), {}, 1, 0)
    return Proof({}, tuple(worst(found)), 1).ok


def _model(gradients: Values) -> nn.Module:
    module = nn.Module()
    for name, value in gradients.items():
        parameter = nn.Parameter(torch.ones_like(value))
        parameter.grad = value.clone()
        for each in (parameter, parameter.grad):
            each.placements = ()  # type: ignore[attr-defined]
        module.register_parameter(name, parameter)
    return module


def by_pair(got: Values, want: Values) -> bool:
    pair = Pair(_model(got))
    pair.serial = _model(want)
    pair.compare_gradients()
    return pair.gradient < 1e-5


def by_joined_batch(got: Values, want: Values) -> bool:
    found = {"gradient": 0.0, "where": ""}
    with mock.patch.object(joined_batch, "DTensor", torch.Tensor):
        joined_batch.compare(_model(got), _model(want), found)
    return float(found["gradient"]) < 1e-5


def by_steps(got: Values, want: Values) -> bool:
    one = torch.ones(())
    return steps.error(steps.Step(one, got), steps.Step(one, want)) < 1e-5


def each(judge: Callable[[torch.Tensor, torch.Tensor], Any]) -> Callable[[Values, Values], bool]:
    """An oracle of two tensors."""
    return lambda got, want: all(judge(got[k], want[k]) in (None, True) for k in want)


#: Those that are given names, or lists, and so can miss one; `None` is a yes.
NAMED: dict[str, Callable[[Values, Values], Any]] = {
    "verify": by_verify,
    "scenarios": lambda got, want: not differences(got, want, 1e-5),
    "Pair": by_pair,
    "joined batch": by_joined_batch,
    "steps": by_steps,
    "sharded": lambda got, want: sharded.assert_same(_model(got), _model(want)),
    "captures": lambda got, want: capturing.close([*want.values()], [*got.values()], 1e-5, ""),
    "engines": lambda got, want: engine_cases.error([*got.values()], [*want.values()]) < 1e-5,
}
ORACLES = {
    **NAMED,
    "difference": each(lambda got, want: difference(got, want) < 1e-5),
    "difference by norm": each(lambda got, want: difference_by_norm(got, want) < 1e-5),
    "verify_program": each(lambda got, want: program_check._difference(got, want) < 1e-5),
    "rules": each(lambda got, want: oracle.close(got, want, "")),
    "cached tokens": each(lambda got, want: cached._compare("logits", got, want, 0)),
}
#: Outputs of engines are compared in float32, whatever they are in.
ANY_DTYPE = ("engines", "cached tokens")


def says_yes(name: str, got: Values) -> bool:
    try:
        return ORACLES[name](got, WANT) in (None, True)
    except (AssertionError, ExportError, KeyError, RuntimeError, ValueError):
        return False


@pytest.mark.parametrize("name", ORACLES)
def test_each_says_yes_to_the_same_and_no_to_what_is_wrong(name: str) -> None:
    assert says_yes(name, {key: value.clone() for key, value in WANT.items()})
    wrong = {**WRONG, **(KEYS if name in NAMED else {})}
    if name in ANY_DTYPE:
        del wrong["another dtype"]
    assert not [what for what, got in wrong.items() if says_yes(name, got)]


def test_furthest_loses_none() -> None:
    assert furthest([0.0, 2.0, 1.0]) == 2.0
    assert furthest([0.0, NAN, 1.0]) == furthest([NAN]) == furthest([]) == INF
    assert program_check.Differences({"a": 0.0}, {"b": NAN, "c": 1.0}).worst[0] == "b"
    assert program_check.Differences({"a": 0.0}, {}, {"b": NAN, "c": 1.0}).worst_by_norm[0] == "b"


def test_integers_and_complex_numbers_are_compared() -> None:
    for value, other in ((torch.tensor([1, 2]), 3), (torch.tensor([1 + 1j, 2]), complex(1, NAN))):
        wrong = value.clone()
        wrong[0] = other
        assert by_verify({"a": value}, {"a": value.clone()}) and difference(value, value) == 0
        assert not by_verify({"a": wrong}, {"a": value}) and difference(wrong, value) > 1e-3


# Whole programs, of which one rank is wrong


@functools.cache
def _program() -> tuple[Program, Sequence[Any]]:
    """A model of which one parameter has no gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    model[0].weight.requires_grad_(False)
    (program,), values = programs(model, (torch.randn(4, 8),), [{"mesh": {"tp": 2}}])
    return program, values


def _spoil(run: Any, how: str) -> Any:
    frozen = next(i for i, v in enumerate(run.values) if v.dim() == 2 and not v.requires_grad)
    trained = next(i for i, v in enumerate(run.values) if v.requires_grad)
    out, grad = run.outputs[0].detach(), run.values[trained].grad
    match how:
        case "NaN" | "inf":
            out[-1, -1] = float(how)
        case "gradient NaN" | "gradient inf":
            grad[-1] = float(how.split()[1])
        case "another dtype":
            out = out.double()
        case "another shape":
            out = out[..., :-1]
        case "no output":
            return run._replace(outputs=[])
        case "no gradient":
            run.values[trained].grad = None
        case "a gradient too many":
            run.values[frozen].grad = torch.ones_like(run.values[frozen])
    return run._replace(outputs=[out])


SPOILS = ("NaN", "inf", "gradient NaN", "gradient inf", "another dtype", "another shape")
SPOILS += ("no output", "no gradient", "a gradient too many")


@pytest.mark.parametrize("how", ["", *SPOILS])
def test_verify_program_sees_what_one_rank_has_wrong(how: str) -> None:
    program, values = _program()
    honest = program_check._rank_run

    def run(*args: Any) -> Any:
        found = honest(*args)
        return found if args[4][-1].rank == 0 else _spoil(found, how)

    with mock.patch.object(program_check, "_rank_run", run):
        try:
            found = verify_program(program, values)
            right = found.worst[1] < 1e-5 and found.worst_by_norm[1] < 1e-5
        except (AssertionError, IndexError, RuntimeError):
            right = False
    assert right == (not how)


@pytest.mark.parametrize("value", [1.0, NAN, INF])
def test_finished_ranks_see_a_value_that_is_wrong(value: float) -> None:
    build, values = finished_ranks.layers(nn.Linear(8, 8), (4, 8))
    honest = finished_ranks.join
    spoiled = iter([1.0, 1.0, value])  # the last that is compared

    def join(*args: Any) -> torch.Tensor:
        return honest(*args) * next(spoiled, 1.0)

    with mock.patch.object(finished_ranks, "join", join):
        error, _ = finished_ranks.worst_difference(build, values, 2)
    assert (error < 1e-5) == (value == 1.0)
