"""`autoshard explain`: a model by name, on no machine, as text and as a page."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from autoshard.cli import main
from autoshard.cli.arguments import mesh_sizes, named_value

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 256,
}


def test_a_directory_with_a_configuration_and_no_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    page = tmp_path / "page.html"
    command = ["explain", str(tmp_path), "--mesh", "tp=4", "--sequence", "32", "--html", str(page)]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert said.startswith("autoshard: tp=4, 12 parameters, ")
    assert "\nDearest: " in said and "modeling_llama.py:" in said and "on h100" in said
    assert said.endswith(f"wrote {page}\n") and "</html>" in page.read_text()


def test_a_factory_says_how_it_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "explained_model.py").write_text(
        "import torch\nfrom models_plain import MLP\n\n"
        "def batch():\n    return MLP(), {'x': torch.ones(8, 64)}\n\n"
        "def tuple_batch():\n    return MLP(), (torch.ones(8, 64),)\n\n"
        "def number():\n    return 3\n\n"
        "def language():\n"
        "    from transformers import LlamaConfig, LlamaForCausalLM\n"
        "    return LlamaForCausalLM(LlamaConfig(hidden_size=64, intermediate_size=128,\n"
        "        num_hidden_layers=1, num_attention_heads=4, vocab_size=96))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    arguments = ["--mesh", "dp_shard=2,tp=2", "--hardware", "cpu"]
    assert main(["explain", "explained_model:batch", *arguments]) == 0
    assert "dp_shard" in capsys.readouterr().out
    assert main(["explain", "explained_model:tuple_batch", *arguments]) == 0
    assert main(["explain", "explained_model:language", *arguments, "--sequence", "16"]) == 0
    assert "embed_tokens" in capsys.readouterr().out
    for wrong, why in (
        (["explained_model:number", *arguments], "returned a int, not a torch.nn.Module"),
        (["explained_model:nothing"], "cannot be found"),
        (["nowhere"], "no directory with a config.json, no module:factory"),
        (["explained_model:batch", "--option", "zeroo=2"], "Did you mean 'zero'"),
        (["explained_model:batch", "--option", "mesh=2"], "given by --mesh"),
        (["explained_model:batch", "--hardware", "h10"], "Did you mean 'h100'"),
    ):
        assert main(["explain", *wrong]) == 2
        assert why in capsys.readouterr().err


def test_options_are_those_of_the_backend_or_of_the_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {**CONFIG, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    given = [
        "num_hidden_layers=1",
        "planner.sequence_parallel=False",
        "precision={'param': 'float16'}",
    ]
    more = [part for text in given for part in ("--option", text)]
    assert main(["explain", str(tmp_path), "--mesh", "tp=2", "--sequence", "32", *more]) == 0
    said = capsys.readouterr().out
    assert said.startswith("autoshard: tp=2, 12 parameters, ") and "reduce_scatter" not in said


def test_spellings(capsys: pytest.CaptureFixture[str]) -> None:
    assert mesh_sizes("dp_shard=2, tp=4") == {"dp_shard": 2, "tp": 4}
    for wrong in ("8", "tp=", "=2", "tp=two", "tp=2,tp=2", ""):
        with pytest.raises(argparse.ArgumentTypeError, match="is no mesh"):
            mesh_sizes(wrong)
    read = [named_value(text) for text in ("zero=2", "inner=eager", "strict=True", "a=[1, 'b']")]
    assert read == [("zero", 2), ("inner", "eager"), ("strict", True), ("a", [1, "b"])]
    for wrong, why in (
        (["--mesh", "tp:2"], "'tp:2' is no mesh"),
        (["--option", "depth"], "'depth' is not NAME=VALUE"),
        (["--batch", "0"], "'0' is not a positive number"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["explain", "m:f", *wrong])
        assert ended.value.code == 2 and why in capsys.readouterr().err
