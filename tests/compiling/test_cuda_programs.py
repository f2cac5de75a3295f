"""Programs for GPUs, made without one: attention kernels, dtypes, and what the host waits for.

Fake tensors on "cuda" go through capture, plan, rewriting and AOTAutograd; a small library gives a
CPU-only torch what it lacks (helpers/cuda).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(
    torch.version.cuda is not None, reason="a torch for CUDA has what the library stands in for"
)

HELPERS = Path(__file__).parents[1] / "helpers" / "cuda"
FLASH = "aten._scaled_dot_product_flash_attention"
EFFICIENT = "aten._scaled_dot_product_efficient_attention"
SEED = "autoshard.random_seed.default"
LAYERS = 2


def facts(*names: str) -> dict[str, Any]:
    """What `cuda_programs.py` says of each program."""
    script = [sys.executable, str(HELPERS / "cuda_programs.py"), *names]
    run = subprocess.run(script, capture_output=True, text=True, timeout=300, env=os.environ)
    assert run.returncode == 0, run.stderr[-4000:]
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_a_step_has_fused_attention_and_waits_for_nothing() -> None:
    """Of a bfloat16 Llama: a training step, and a token with a static cache that stays sharded.

    As CUDA graphs they read parameters and write the cache where these lie.
    """
    found = facts("llama", "decode")
    forward, backward = found["llama"]["graphs"]
    (decode,) = found["decode"]["graphs"]
    for graph in (forward, backward, decode):
        assert graph["waits"] == []
        assert graph["product_dtypes"] == ["torch.bfloat16"]
        assert "aten.bmm.default" not in graph["operators"], "attention that writes its scores out"
    assert forward["operators"][f"{FLASH}.default"] == LAYERS
    assert backward["operators"][f"{FLASH}_backward.default"] == LAYERS
    # of which tokens are there yet, a mask says: flash takes none
    assert decode["operators"][f"{EFFICIENT}.default"] == LAYERS
    assert decode["cloned_inputs"] == 0, "the cache is written in place"
    forward, backward = found["llama"]["captured"]
    (decode,) = found["decode"]["captured"]
    for graph in (forward, backward, decode):
        assert graph["asked"] and graph["around"] == []
    for graph in (forward, decode):
        assert graph["copied"] == ["L.kwargs.input_ids"]
    assert all(name.startswith("tangents") for name in backward["copied"])
    assert len(decode["written"]) == 3 * LAYERS, "keys, values and the number of tokens"


@pytest.mark.slow
def test_collectives_of_a_large_layer_are_fused_with_its_products() -> None:
    """Where they gain by it: gathers and reduce-scatters, forward and backward."""
    forward, backward = facts("llama_wide")["llama_wide"]["graphs"]
    for graph, gathers, scatters in ((forward, 3, 2), (backward, 2, 3)):
        count = graph["operators"].get
        assert count("autoshard.all_gather_matmul.default") == gathers
        assert count("autoshard.matmul_reduce_scatter.default") == scatters
        assert not [name for name in graph["operators"] if "all_gather_into" in name]
        assert "_c10d_functional.reduce_scatter_tensor.default" not in graph["operators"]
        assert graph["waits"] == []


@pytest.mark.slow
def test_other_steps_wait_for_what_they_must_only() -> None:
    """Weights that are stored wider, dropout, and experts on their ranks or split among them."""
    found = facts(
        *("llama_fsdp", "gpt2_dropout", "mixtral", "mixtral_ep", "gemma3_packed", "prompt")
    )
    for name in ("llama_fsdp", "gpt2_dropout", "mixtral"):
        assert [graph["waits"] for graph in found[name]["graphs"]] == [[], []], name
        assert all(graph["asked"] for graph in found[name]["captured"])
        assert found[name]["captured"][0]["copied"] == ["L.kwargs.input_ids"]
    for graph in found["llama_fsdp"]["graphs"]:
        assert graph["product_dtypes"] == ["torch.bfloat16"]
    forward, backward = found["gpt2_dropout"]["graphs"]
    assert forward["operators"][SEED] == 1, "the one number that a step copies to the device"
    assert SEED not in backward["operators"]
    assert found["gpt2_dropout"]["captured"][0]["around"] == [SEED]
    forward, backward = found["mixtral_ep"]["graphs"]
    # rows that travel are counted, and their counts read, once a layer for all its exchanges
    assert forward["operators"]["autoshard.counts_on_host.default"] == LAYERS
    assert "autoshard.counts_on_host.default" not in backward["operators"]
    around = found["mixtral_ep"]["captured"][0]["around"]
    assert {"autoshard.counts_on_host.default", "autoshard.dispatch_rows.default"} <= set(around)
    forward, backward = found["gemma3_packed"]["graphs"]
    # where documents begin is read once for all layers; of windows and documents no mask exists
    assert forward["operators"]["autoshard.document_bounds.v1"] == 1
    assert "autoshard.document_bounds.v1" not in backward["operators"]
    assert forward["operators"]["autoshard.attend.v1"] == LAYERS
    assert backward["operators"]["autoshard.attend_backward.v1"] == LAYERS
    assert forward["masks"] == backward["masks"] == 0
    # what it hands out is read by all later steps, and its memory must not be written again
    assert found["prompt"]["reason"] == "it makes 4 tensors that later calls take (a cache)"
    assert not found["prompt"]["captured"][0]["asked"]
