"""What is loaded from a Hugging Face directory is the directory's model, or an error."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from autoshard.cli import main
from autoshard.model_source import load_model

SMALL = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 2}


def saved(kind: str, directory: Path, **sizes: Any) -> nn.Module:
    made = getattr(transformers, kind)
    torch.manual_seed(0)
    model: Any = made(made.config_class(**sizes))
    model.save_pretrained(directory)
    return model  # type: ignore[no-any-return]


def llama(directory: Path) -> nn.Module:
    return saved("LlamaForCausalLM", directory, **SMALL, **HEADS)


def rewrite(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("LlamaForSequenceClassification", {**SMALL, **HEADS}),
        (
            "T5ForConditionalGeneration",
            {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1},
        ),
        ("ViTForImageClassification", {**SMALL, **HEADS, "image_size": 8, "patch_size": 4}),
        (
            "WhisperForConditionalGeneration",
            {
                "vocab_size": 64,
                "d_model": 16,
                "encoder_layers": 1,
                "decoder_layers": 1,
                "encoder_attention_heads": 2,
                "decoder_attention_heads": 2,
                "pad_token_id": 0,
            },
        ),
    ],
)
def test_the_class_is_the_one_that_the_configuration_names(
    kind: str, sizes: dict[str, Any], tmp_path: Path
) -> None:
    model = saved(kind, tmp_path / "hf", **sizes)
    loaded = load_model(str(tmp_path / "hf"))
    assert type(loaded) is type(model)
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop("lm_head.weight"), r"1 tensors .* not in its files \(lm_head.weight\)"),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(5)}),
            r"1 tensors have other sizes \(model.norm.weight: \(5,\) for \(16,\)\)",
        ),
        (
            lambda t: t.update({"score.weight": t.pop("lm_head.weight")}),
            r"lm_head.weight\); 1 tensors of the files are not the model's \(score.weight\)",
        ),
    ],
)
def test_weights_that_are_not_the_models_are_an_error_before_anything_is_written(
    change: Callable[[dict[str, torch.Tensor]], object],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    llama(tmp_path / "hf")
    rewrite(tmp_path / "hf", change)
    assert main(["export", "huggingface", str(tmp_path / "hf"), str(tmp_path / "out")]) == 2
    assert re.search(said, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def test_what_the_model_has_not_is_left_out_with_a_warning(tmp_path: Path) -> None:
    llama(tmp_path)
    rewrite(tmp_path, lambda t: t.update({"extra.weight": torch.ones(3)}))
    with pytest.warns(UserWarning, match=r"1 tensors of the files are no part.*extra.weight"):
        load_model(str(tmp_path))


def test_a_class_that_transformers_has_not_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    llama(tmp_path / "hf")
    file = tmp_path / "hf" / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "architectures": ["LlamaForDreams"]}))
    assert main(["export", "huggingface", str(tmp_path / "hf"), str(tmp_path / "out")]) == 2
    assert "is a LlamaForDreams, a class that transformers" in capsys.readouterr().err
