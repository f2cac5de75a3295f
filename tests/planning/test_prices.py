"""Prices of weights: kept whole, gathered and kept until backward, or gathered in both passes."""

from __future__ import annotations

import collections

import pytest
import torch
from torch import nn

import autoshard
from autoshard.explain.alternatives import alternatives
from autoshard.planning import cost
from autoshard.planning.cost.clusters import cluster
from autoshard.planning.estimate.traffic import tp_collectives
from autoshard.planning.prices import AxisPrices, Prices
from autoshard.planning.values import global_bytes
from autoshard.runtime.collectives.states import I
from autoshard.verification.program_check import verify_program
from models_hf import llama
from traced import builder, programs

H100 = cluster("h100").on({"tp": 8})


class Block(nn.Module):
    """A norm and an MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The scalar loss."""
        return (x + self.down(self.up(self.norm(x)).relu())).square().mean()


def test_each_fate_of_a_weight_has_its_cost() -> None:
    with torch.device("meta"):
        program = autoshard.trace(Block(1024), (torch.empty(64, 1024),), mesh={"tp": 8})
    (weight,) = [node for node, name in program.parameters.items() if name == "up.weight"]
    n, nbytes = 8, global_bytes(weight)
    gather = cost.collective_seconds("all_gather", nbytes, n, H100.links["tp"])
    both = gather + cost.collective_seconds("reduce_scatter", nbytes, n, H100.links["tp"])
    for price, again in ((1e-14, False), (1e-6, True)):
        prices = AxisPrices(n, H100, program.parameters, True, Prices(price))
        assert prices.gathers_again(weight, "S(0)", "R") is again
        extra = gather if again else nbytes * price
        charged = prices.change_cost(weight)("S(0)", "R")
        assert charged == pytest.approx(both + extra, rel=0.01)
        # four bytes of training state a byte: what a rank stores whole costs every step
        whole, part = (prices.storage(weight, state) for state in (I, "S(0)"))
        assert (whole, n * part) == pytest.approx((4 * nbytes * price,) * 2)


def test_a_plan_for_long_sequences_leaves_megatrons() -> None:
    """A layer of 8B shape: gathered weights and all-to-alls around attention send less."""
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32}
    more = {"num_key_value_heads": 8, "vocab_size": 32768, "num_hidden_layers": 1}
    with torch.device("meta"):
        model = llama(**sizes, **more)().to(torch.bfloat16)
    took = {}
    for length in (2048, 131072):
        ids = torch.empty(1, length, dtype=torch.int64, device="meta")
        build = builder(model, (), {"input_ids": ids, "labels": ids})
        program = build({"tp": 8}, hardware_name="h100")
        found = {one.name: one.communication for one in alternatives(program)}
        took[length] = found["this plan"] / found["Megatron TP+SP"]
    assert took[131072] < 0.45 and 0.7 < took[2048] <= 1.05, took


def test_a_gather_that_is_cheaper_than_keeping_runs_in_both_passes() -> None:
    options = {"mesh": {"tp": 2}, "hardware": "h100", "outputs": "replicate"}
    (program,), values = programs(Block(256), (torch.randn(16384, 256),), [options])
    both = 2 * 4 * 256 * 1024  # bytes of the two weights
    sent: collections.Counter[tuple[str, str]] = collections.Counter()
    for one in program.collectives():
        sent[one.op, one.phase] += one.bytes
    gathers = {("all_gather", "forward"): both, ("all_gather", "backward"): both}
    assert {key: sent[key] for key in gathers} == gathers
    assert sent["reduce_scatter", "backward"] == both
    predicted: collections.Counter[tuple[str, str]] = collections.Counter()
    for each in tp_collectives(program.serial, program.decisions, 2):
        predicted[each.op, "backward" if each.backward else "forward"] += each.nbytes
    assert predicted == sent
    assert verify_program(program, values).worst[1] < 1e-5
