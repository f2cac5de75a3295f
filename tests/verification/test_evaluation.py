"""Evaluation of a model on two axes, before it is trained and after: the graphs that no backward
follows are rewritten by passes of their own."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from autoshard.verification.comparison import furthest
from model_case import Batch
from models import CASES
from side_by_side import TOLERANCE, Pair, difference

MODELS = ("llama", "llama_gqa", "gemma3", "qwen3", "mixtral", "gpt2", "bert", "t5", "vit")
MESHES: dict[str, dict[str, int]] = {
    "dp_shard, tp": {"dp_shard": 2, "tp": 2},
    "cp, tp": {"cp": 2, "tp": 2},
    "dp_shard, cp": {"dp_shard": 2, "cp": 2},
    "dp_replicate, tp": {"dp_replicate": 2, "tp": 2},
}
WAYS = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}
OF_16_BITS = 2e-2


def evaluate(name: str, mesh: dict[str, int]) -> list[str]:
    """What is not the serial model's: logits of a model that is evaluated first under each way,
    then trained a step, and evaluated again; the last batch has three rows, others four."""
    case = CASES[name]
    pair = Pair(case.make_model(), mesh=mesh)
    wrong = []

    def compare(way: str, batch: Batch) -> None:
        pair.model.eval()
        pair.serial.eval()
        with torch.no_grad(), WAYS[way]():
            got, want = (model(**batch).logits for model in (pair.compiled, pair.serial))
        off = difference(got, want)
        if not off < (OF_16_BITS if way == "autocast" else TOLERANCE):
            wrong.append(f"{way} of {len(want)} rows: {off:.2g} off")

    for way in WAYS:
        compare(way, case.make_batch(0))
    pair.model.train()
    pair.serial.train()
    pair.train([functools.partial(case.loss, batch=case.make_batch(0))])
    if not furthest([pair.loss, pair.gradient]) < TOLERANCE:
        wrong.append(f"trained: {pair.result()}")
    compare("no_grad", {key: value[:3] for key, value in case.make_batch(1).items()})
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_serial_model(gloo4: Any, name: str, mesh: str) -> None:
    assert gloo4(evaluate, name, MESHES[mesh], pool_timeout=400.0) == [[]] * 4
