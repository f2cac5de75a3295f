"""Calls whose values say what a mask means: a program for what they usually say, and one more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import autoshard
from autoshard.passes import recover_masks
from autoshard.verification.comparison import furthest
from model_case import SEQ, ids
from models_hf import llama
from side_by_side import Pair, check, difference

KV = {"num_hidden_layers": 1, "num_key_value_heads": 2}


def batch(step: int, rows: list[int]) -> dict[str, torch.Tensor]:
    """Tokens of which each row hides its first ones, as many as said: left padding."""
    hidden = torch.tensor(rows)[:, None]
    keep = (torch.arange(SEQ) >= hidden).long()
    tokens = ids(step)[: len(rows)]
    labels = torch.where(keep.bool(), tokens, -100)
    return {"input_ids": tokens, "labels": labels, "attention_mask": keep}


def packed(step: int, starts: list[int]) -> dict[str, torch.Tensor]:
    """Tokens of documents that start at these places: positions restart there."""
    positions = torch.arange(SEQ)
    for start in starts:
        positions = torch.where(torch.arange(SEQ) >= start, torch.arange(SEQ) - start, positions)
    tokens = ids(step)[:2]
    return {"input_ids": tokens, "labels": tokens, "position_ids": positions.expand(2, SEQ)}


def masks(model: nn.Module) -> list[list[str]]:
    return [
        [found.meaning for found in program.serial.meta["attention_masks"]]
        for program in autoshard.programs(model)
    ]


def train() -> dict[str, Any]:
    torch.manual_seed(0)
    model = llama(**KV)()
    model.activation_checkpointing_enable()
    pair = Pair(model.train())
    batches = [batch(0, [0, 0]), batch(1, [0, 5])]
    pair.train([lambda m, b=b: m(**b).loss for b in batches])
    return {**pair.result(), "masks": masks(pair.model)}


@pytest.mark.slow
def test_padding_on_two_ranks(gloo2: Any) -> None:
    """Rows that hide nothing run causal; padded rows by their mask, with the same weights."""
    results = gloo2(train)
    check(results, share=0.5)
    assert [result["masks"] for result in results] == [[["causal"], ["dense"]]] * 2


def apart(inner: str) -> list[float]:
    """Training on two data-parallel ranks of which, in turn, one has a padded batch: the worst
    difference of a gradient from the mean of the serial ones."""
    from autoshard.runtime.mesh import init_mesh

    rank = init_mesh({"dp_shard": 2}, "cpu").axis("dp_shard").rank
    torch.manual_seed(0)
    model = llama(**KV)()
    pair = Pair(model, mesh={"dp_shard": 2}, inner=inner)
    worst = []
    for step in range(2):
        rows = [[[0, 0], [4, 9]][(each + step) % 2] for each in (0, 1)]
        for each in (0, 1):
            (pair.serial(**batch(2 * step + each, rows[each])).loss / 2).backward()
        pair.compiled(**batch(2 * step + rank, rows[rank])).loss.backward()
        wanted = {name: p.grad for name, p in pair.serial.named_parameters()}
        for name, parameter in pair.model.named_parameters():
            assert parameter.grad is not None and wanted[name] is not None, name
            worst.append(difference(parameter.grad, wanted[name]))
            parameter.grad = None
        pair.serial.zero_grad()
    assert len(autoshard.programs(pair.model)) == 2 - rank  # the first call of rank 1 is padded
    return worst


def test_data_parallel_ranks_may_run_different_programs(gloo2: Any) -> None:
    """The weights are gathered, and gradients reduced, in one order in both programs."""
    for result in gloo2(apart, "aot_eager"):
        assert furthest(result) < 1e-4, result


@pytest.mark.parametrize("shortest", [0, recover_masks.PADDING_FROM])
@pytest.mark.parametrize(
    "batches,found",
    [
        ([batch(0, [0, 0]), batch(1, [0, 6])], [["causal"], ["padding"]]),
        ([batch(0, [3, 0]), batch(1, [0, 0])], [["padding"]]),
        ([packed(0, []), packed(1, [7, 20])], [["causal"], ["documents"]]),
    ],
)
def test_one_process_recovers_masks_by_name(
    batches: list[dict[str, torch.Tensor]],
    found: list[list[str]],
    shortest: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Padding, a first call that is padded already (one program), and documents."""
    monkeypatch.setattr(recover_masks, "PADDING_FROM", shortest)
    if shortest:
        found = [["dense" if one == "padding" else one for one in masks] for masks in found]
    model = llama(**KV)()
    options = {"planner": {"recover_masks": True}, "inner": "eager", "mesh": {"tp": 1}}
    compiled: Any = torch.compile(model, backend="autoshard", options=options)
    for given in batches:
        losses = [compiled(**given).loss, model(**given).loss]
        torch.testing.assert_close(*losses)
        gradients = [torch.autograd.grad(loss, list(model.parameters())) for loss in losses]
        torch.testing.assert_close(*gradients)
    assert masks(model) == found
    first, last = autoshard.programs(model)[0], autoshard.programs(model)[-1]
    assert "values only a call knows" in last.explain(300)
    assert (": checked at each call" in first.explain(300)) == (len(found) == 2)
