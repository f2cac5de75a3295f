"""The command line.

`autoshard plan`: how the model is trained, by flags.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import autoshard
from autoshard.cli import main
from autoshard.errors import ConfigError
from autoshard.model_source import checkpoint_layers
from trtllm_oracle import make


def test_export_from_directory_to_both_formats(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    model = make("llama").to(torch.bfloat16)
    source, out = tmp_path / "hf", tmp_path / "trtllm"
    autoshard.export.huggingface(model, source)
    asked = ["export", "trtllm", str(source), str(out), "--mesh", "tp=2", "--dtype", "bfloat16"]
    assert main(asked) == 0
    said = capsys.readouterr()
    assert "2 ranks of bfloat16" in said.out and "trtllm-build" in said.out
    assert "[21/21]" in said.err  # every parameter is counted
    autoshard.export.trtllm(model, tmp_path / "direct", mesh={"tp": 2}, dtype="bfloat16")
    for path in (tmp_path / "direct").iterdir():
        assert path.read_bytes() == (out / path.name).read_bytes(), path.name

    again = tmp_path / "again"
    assert (
        main(["export", "huggingface", str(source), str(again), "--max-shard-bytes", "9000"]) == 0
    )
    index = json.loads((again / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == dict(model.named_parameters()).keys()

    build = ["export", "trtllm", str(source), str(tmp_path / "third"), "--engines", "e"]
    assert main(build) == 1
    assert "trtllm-build is not installed" in capsys.readouterr().err
    assert (tmp_path / "third" / "config.json").exists()


def test_export_from_factory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a_model.py").write_text(
        "from trtllm_oracle import make\n\ndef tiny():\n    return make('gpt2')\n\nthree = int\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["export", "huggingface", "a_model:tiny", "out"]) == 0
    assert (tmp_path / "out" / "model.safetensors").exists()
    for wrong, why in (
        ("a_model:none", "cannot be found"),
        ("a_model:three", "returned a int, not a torch.nn.Module"),
        ("nowhere", "no directory with a config.json, no module:factory"),
    ):
        assert main(["export", "huggingface", wrong, "other"]) == 2
        assert why in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


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
