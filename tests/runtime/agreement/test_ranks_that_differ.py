"""Ranks that differ in an option, a constant or what they train: an error on all."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn

LIMIT = 30.0


class Normed(nn.Module):
    """A constant of the graph that is an attribute of a module, and one that is the length's."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(64, eps=eps), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.out(self.norm(x)) - y).square().sum() * (1.0 / x.shape[1])


def mine() -> bool:
    return os.environ["RANK"] == "1"


def told(what: str, mesh: dict[str, int], rows: int) -> tuple[str, str]:
    """What two steps raise on this rank, where rank 1 differs in `what`, and in its length."""
    from autoshard.runtime import compat

    other = mine()
    torch.manual_seed(0)
    model: Any = Normed(1e-3 if what == "eps" and other else 1e-5)
    if what == "requires_grad" and other:
        model.out.weight.requires_grad_(False)
    options: dict[str, Any] = {"inner": "eager", "mesh": mesh, "timeout": LIMIT}
    changes: dict[str, Any] = {
        "zero": 2,
        "gradients": {"reduction": "sum"},
        "precision": {"reduce": "bfloat16"},
    }
    if what in changes and other:
        options[what] = changes[what]
    step = torch.compile(model, backend="autoshard", options=options)
    if what == "unsharded" and other:
        os.environ["AUTOSHARD_UNSHARDED"] = "1"
    try:
        for number in range(3):
            x = torch.ones(4, 8 + (rows if other else 0), 64)
            if what == "later" and number == 1 and other:
                model.out._parameters["weight"].requires_grad_(False)
                # nobody else comes to the comparison: rank 0 is here only to be missed
            if what == "later" and number == 1 and not other:
                return "", ""
            step(x=x, y=x).backward()
    except Exception as error:
        cause = compat.backend_error(error) or error
        return type(cause).__name__, str(cause)
    finally:
        os.environ.pop("AUTOSHARD_UNSHARDED", None)
    return "", ""


SHARD, REPLICATE = {"dp_shard": 2}, {"dp_replicate": 2}
CASES = [
    ("requires_grad", SHARD, 0, ["out.weight", "requires_grad True", "requires_grad False"]),
    ("requires_grad", REPLICATE, 1, ["out.weight", "requires_grad True", "requires_grad False"]),
    ("eps", SHARD, 0, ["rank 0: ", "1e-05", "rank 1: ", "0.001"]),
    ("eps", REPLICATE, 1, ["LayerNorm.eps = 1e-05", "LayerNorm.eps = 0.001"]),
    ("zero", SHARD, 0, ["rank 0: option zero: 3", "rank 1: option zero: 2"]),
    ("gradients", REPLICATE, 0, ["'average'", "option gradients.reduction: 'sum'"]),
    ("requires_grad", {"pp": 2}, 0, ["out.weight", "requires_grad True", "requires_grad False"]),
    ("unsharded", {"tp": 2}, 0, ["AUTOSHARD_UNSHARDED=0", "rank 1: AUTOSHARD_UNSHARDED=1"]),
    ("precision", SHARD, 1, ["rank 0: option precision: None", "bfloat16"]),
]


@pytest.mark.parametrize(("what", "mesh", "rows", "texts"), CASES)
def test_ranks_that_differ(
    gloo2: Any, what: str, mesh: dict[str, int], rows: int, texts: list[str]
) -> None:
    results = gloo2(told, what, mesh, rows)
    for kind, text in results:
        assert kind == "PlanMismatchError", results
        assert all(each in text for each in texts), text
    assert results[0] == results[1], "the ranks tell two stories"


def test_lengths_may_differ(gloo2: Any) -> None:
    assert gloo2(told, "", {"dp_shard": 2}, 1) == [("", "")] * 2


def lonely(limit: float) -> tuple[str, str]:
    global LIMIT
    LIMIT = limit
    return told("later", {"dp_shard": 2}, 0)


def test_a_rank_that_freezes_later_is_told_so(gloo2: Any) -> None:
    """Rank 0 does not compile again: it would wait in a collective."""
    kind, text = gloo2(lonely, 2.0)[1]
    assert kind == "PlanMismatchError", text
    assert "did not arrive within 2 seconds" in text
    assert "requires_grad of out.weight was set" in text


def reads_alone() -> tuple[str, str]:
    """Rank 0 reads a parameter; rank 1 calls the model with another length."""
    from autoshard.runtime import compat
    from autoshard.runtime.agreement import announced
    from autoshard.runtime.mesh import init_mesh

    torch.manual_seed(0)
    step: Any = torch.compile(
        Normed(1e-5),
        backend="autoshard",
        options={"inner": "eager", "mesh": {"tp": 2}, "timeout": LIMIT},
    )
    axes = init_mesh({"tp": 2}, "cpu").axes
    for rows in (8, 8, 9):
        x = torch.ones(4, rows, 64)
        try:
            with announced("read of out.weight", axes):
                pass  # together, which is right
            if rows == 9 and not mine():
                with announced("read of out.weight", axes):
                    raise AssertionError("rank 1 is elsewhere")
            step(x=x, y=x)
        except Exception as error:
            cause = compat.backend_error(error) or error
            return type(cause).__name__, str(cause)
    return "", ""


def test_a_rank_that_reads_alone(gloo2: Any) -> None:
    for kind, text in gloo2(reads_alone):
        assert kind in ("CollectiveError", "PlanMismatchError"), text
        assert "rank 0: read of out.weight (" in text and "rank 1: plan (" in text
        assert "test_ranks_that_differ.py:" in text and "every rank has to do it" in text


def forks() -> tuple[str, bool]:
    """What a step raises after a child of rank 1 has ended; whether the child was refused."""
    from autoshard.errors import AutoshardError
    from autoshard.runtime.agreement import worlds

    torch.manual_seed(0)
    options = {"inner": "eager", "mesh": {"tp": 2}, "timeout": LIMIT}
    step: Any = torch.compile(Normed(1e-5), backend="autoshard", options=options)
    step(x=torch.ones(4, 8, 64), y=torch.ones(4, 8, 64))
    refused = True
    if mine():
        child = os.fork()
        if child == 0:
            try:
                worlds.current_exchange()
            except AutoshardError:
                worlds._leave()
                os._exit(7)
            os._exit(0)
        refused = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    try:
        step(x=torch.ones(4, 9, 64), y=torch.ones(4, 9, 64))
    except Exception as error:
        return str(error), refused
    return "", refused


def test_a_forked_child_is_no_rank(gloo2: Any) -> None:
    assert gloo2(forks) == [("", True)] * 2
