"""`autoshard plan`: how the model is trained, by flags."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from autoshard.cli import main
from autoshard.cli.checkpointing import checkpoint_layers
from autoshard.errors import ConfigError

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}
ASKED = ["plan", "LlamaConfig", "--world", "2", "--mesh", "dp_shard=2", "--sequence", "64"]


def row(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    entries = [f"--option={name}={size}" for name, size in SMALL.items()]
    assert main([*ASKED, *entries, "--json", *flags]) == 0
    (found,) = json.loads(capsys.readouterr().out)["rows"]
    return found


def test_layers_are_checkpointed_by_transformers_own_switch(
    capsys: pytest.CaptureFixture[str],
) -> None:
    free = row(capsys)
    selective = row(capsys, "--checkpointing", "selective")["recomputation"]
    full = row(capsys, "--checkpointing", "full", "--microbatches", "2", "--float8", "--uncompiled")
    assert free["recomputation"] is None
    assert 0 < full["recomputation"]["kept_bytes"] < selective["kept_bytes"]
    assert full["seconds"]["compute"] > 2 * free["seconds"]["compute"]
    assert full["seconds"]["optimizer"] == free["seconds"]["optimizer"]


def test_states_on_the_host(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    here, there = row(capsys), row(capsys, "--optimizer-states", "host", "--recipe", "master")
    assert here["host_update"] is None and there["memory_bytes"]["optimizer"] == 0
    assert there["host_update"]["host_bytes"] == 3 * here["memory_bytes"]["optimizer"]
    assert there["seconds"]["optimizer"] == there["host_update"]["seconds"]
    flags = ["--optimizer-states", "host", "--out", str(tmp_path / "plan.json")]
    assert main([*ASKED, *(f"--option={name}={size}" for name, size in SMALL.items()), *flags]) == 0
    printed = capsys.readouterr().out
    assert "states on host" in printed and "'optimizer_states': 'host'" in printed


def test_a_model_without_the_switch_is_told() -> None:
    with pytest.raises(ConfigError, match="Linear has no switch for activation checkpointing"):
        checkpoint_layers(torch.nn.Linear(2, 2), "full")
