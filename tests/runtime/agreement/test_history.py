"""Data-parallel ranks that take other branches: an error on all of them, though sizes agree."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn

from autoshard.runtime.agreement import worlds
from autoshard.runtime.agreement.history import EVERY, Call, History, also


def compared(calls: list[Call]) -> tuple[History, list[int]]:
    """The history of the calls; at which of them, from 1, the ranks compare."""
    history = History()
    return history, [i for i, call in enumerate(calls, 1) if history.add(call)]


def test_a_difference_stays_one() -> None:
    first, second = Call("the forward", ["a", "b"]), Call("the forward", ["a", "c"])
    alike = Call("the forward", ["b", "a"])
    same, at = compared([first] * 3 + [alike] * (2 * EVERY))
    assert at == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    other, _ = compared([first] * 2 + [second] + [alike] * (2 * EVERY))
    assert other.number != same.number and len(same.lines) <= 64
    graphs = [Call(what, ["a"]) for what in ("the forward", "another forward")]
    assert compared(graphs[:1])[0].number != compared(graphs[1:])[0].number
    swapped = compared([second, first])[0], compared([first, second])[0]
    assert swapped[0].number != swapped[1].number
    assert swapped[0].lines[0].startswith("call 1: the forward with 2 parameters (a, c; ")


@pytest.mark.parametrize("every", [1, 10, 1000])
def test_a_user_says_how_late_a_difference_is_found(every: int) -> None:
    history, call = History(), Call("the forward", ["a"])
    at = [i for i in range(1, 2048) if history.add(call, every=every)]
    assert at == sorted({*(1 << i for i in range(11)), *range(every, 2048, every)})


def test_a_call_that_failed_by_itself_is_made_again() -> None:
    call = Call("the forward", ["a"])
    plain, _ = compared([call] * 5)
    history, _ = compared([call] * 3)
    assert history.add(call)  # the fourth
    history.undo()
    assert not history.add(call)  # which the others have compared
    assert not history.add(call)
    assert (history.number, history.lines) == (plain.number, plain.lines)


def test_ranks_are_named_by_their_runs() -> None:
    said = {"": [], " 3": [3], "s 0 to 1": [1, 0], "s 1, 4 to 6, 8": [4, 1, 6, 8, 5]}
    for text, ranks in said.items():
        assert also(ranks) == (f", nor did rank{text}" if ranks else "")


class TwoWays(nn.Module):
    """Two parts of one size, of which a call uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor, way: str) -> torch.Tensor:
        return (self.left if way == "left" else self.right)(x).square().mean()


def steps(mesh: dict[str, int]) -> tuple[int, str]:
    """The step in which ranks that took the same way at first raise, and what."""
    torch.compiler.reset()
    torch.manual_seed(0)
    options = {"mesh": mesh, "inner": "aot_eager", "timeout": 30}
    step: Any = torch.compile(TwoWays(), backend="autoshard", options=options)
    own = ("left", "right")[int(os.environ["RANK"])]
    for number, way in enumerate(["left", "left", "right", "right", own]):
        try:
            step(torch.ones(2, 8), way).backward()
        except Exception as error:
            return number, str(error)
    return -1, ""


def patience() -> list[float | None]:
    """The seconds that ranks wait for each other after a graph that stores nothing, by option."""
    found: list[float | None] = []
    for seconds in (29, 31):
        torch.compiler.reset()
        options = {"mesh": {"tp": 2}, "inner": "eager", "timeout": seconds}
        torch.compile(lambda x: x.sin(), backend="autoshard", options=options)(torch.ones(2))
        exchange = worlds.current_exchange()
        found.append(exchange and exchange.limit)
    return found


def test_ranks_wait_as_long_as_their_graph_says(gloo2: Any) -> None:
    assert gloo2(patience) == [[29, 31]] * 2


def test_other_branches_are_an_error_before_the_step(gloo2: Any) -> None:
    (number, text), other = gloo2(steps, {"dp_shard": 2})
    assert other == (number, text) and number == 4
    assert "the first that differs: rank 0: " in text and "left" in text and "right" in text
    assert "must compute on all ranks" in text
