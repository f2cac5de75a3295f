"""The command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import autoshard
from autoshard.cli import main
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
