"""Evaluation of a model on two axes, before it is trained and after: the graphs that no backward
follows are rewritten by passes of their own."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from autoshard.verification.comparison import furthest
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


def evaluate(name: str, mesh: dict[str, int], inner: str) -> list[str]:
    """What is not the serial model's: logits of a model that is evaluated first under each way,
    then trained a step, and evaluated again; the last batch has three rows, others four."""
    case = CASES[name]
    pair = Pair(case.make_model(), inner=inner, mesh=mesh)
    wrong = []
    for step, ways in enumerate([[*WAYS], ["no_grad"]]):
        pair.model.eval()
        pair.serial.eval()
        for way in ways:
            batch = {key: value[: 4 - step] for key, value in case.make_batch(step).items()}
            with torch.no_grad(), WAYS[way]():
                got, want = (model(**batch).logits for model in (pair.compiled, pair.serial))
            off = difference(got, want)
            if not off < (OF_16_BITS if way == "autocast" else TOLERANCE):
                wrong.append(f"step {step}, {way}: {off:.2g} off")
        if step == 0:
            pair.model.train()
            pair.serial.train()
            pair.train([functools.partial(case.loss, batch=case.make_batch(step))])
    if not furthest([pair.loss, pair.gradient]) < TOLERANCE:
        wrong.append(f"trained: {pair.result()}")
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_serial_model(gloo4: Any, name: str, mesh: str) -> None:
    assert gloo4(evaluate, name, MESHES[mesh], "aot_eager", pool_timeout=400.0) == [[]] * 4
