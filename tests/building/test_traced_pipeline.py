"""`autoshard.trace` of a mesh with pp: stages, what they send and hold, the picture, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import autoshard
from autoshard.building.pipeline.traced import TracedPipeline
from autoshard.errors import ConfigError

HIDDEN, ROWS, BATCH = 32, 16, 8


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean(), x


def traced(dtype: torch.dtype = torch.float32, **options: Any) -> TracedPipeline:
    torch.compiler.reset()
    with torch.device("meta"):
        model, x = Layers(), torch.empty(BATCH, ROWS, HIDDEN, dtype=dtype)
    found = autoshard.trace(model, (x,), mesh={"pp": 2}, hardware="h100", **options)
    assert isinstance(found, TracedPipeline)
    return found


def test_a_traced_pipeline_says_what_stages_send_and_hold() -> None:
    found = traced()
    value = BATCH // found.microbatches * ROWS * HIDDEN * 4
    assert found.microbatches == 8 and found.sent_bytes == [value]
    weight = HIDDEN * HIDDEN * 4
    first, second = found.memory()
    assert [first.parameters, second.parameters] == [2 * weight] * 2
    assert [first.gradients, second.gradients] == [2 * weight] * 2
    assert (first.live, second.live) == (2, 1)
    # results of two activations, of which the second is sent; the first reads rows of the batch
    assert first.kept == 2 * value and first.shared == BATCH * ROWS * HIDDEN * 4
    # what it received besides; no other output than the loss
    assert second.kept == 3 * value + 4
    text = found.explain()
    assert "schedule 1f1b, 8 micro-batches on 2 stages" in text and found.picture() in text
    assert "2.0 KiB" in text and "layers.0.weight" in text


def test_precision_halves_what_is_sent_and_adds_a_copy_of_what_is_stored() -> None:
    found = traced(torch.bfloat16, precision={"param": "bfloat16", "reduce": "float32"})
    assert found.sent_bytes == [BATCH // found.microbatches * ROWS * HIDDEN * 2]
    weight = HIDDEN * HIDDEN
    for held in found.memory():
        assert (held.parameters, held.gradients) == (2 * weight * (4 + 2), 2 * weight * 4)


def test_every_schedule_is_explained_and_what_is_not_supported_is_refused() -> None:
    four = traced(schedule="interleaved")
    assert len(four.stages) == 4 and "F0a" in four.explain()
    assert "I0 W0" in traced(schedule="zb1").explain()
    with pytest.raises(ConfigError, match="virtual_stages"):
        traced(virtual_stages=2)
    with pytest.raises(ConfigError, match=r"memory_budget.*interleaved"):
        traced(schedule="interleaved", memory_budget=10**9)
    with pytest.raises(ConfigError, match=r"plan.*beside pp.*Leave plan out"):
        traced(plan="plan.json")
    with pytest.raises(ConfigError, match="no plan file holds stages"):
        _ = four.plan
