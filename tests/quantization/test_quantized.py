"""Quantized weights: written as servers read them, and as accurate as is said."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autoshard.export import ExportError, huggingface
from autoshard.export.quantization import FILE, LAYOUTS, example
from families import FAMILIES

pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

WIDE = {"hidden_size": 128, "intermediate_size": 256}


def small(name: str, **sizes: int) -> nn.Module:
    return FAMILIES[name].make(num_hidden_layers=1, **sizes)


def written(model: nn.Module, out: Path, kind: str, **options: Any) -> tuple[dict[str, Any], Any]:
    """The tensors and what is said of their accuracy."""
    huggingface(model, out, quantize=kind, **options)
    return safetensors.load_file(out / "model.safetensors"), json.loads((out / FILE).read_text())


def test_blocks_of_128_have_a_scale_each(tmp_path: Path) -> None:
    """By DeepSeek's rule, computed a second time; the last blocks are not whole."""
    model = small("Llama", hidden_size=192, intermediate_size=160)
    tensors, said = written(model, tmp_path / "out", "fp8")
    own = model.state_dict()
    for name in ("mlp.gate_proj", "self_attn.k_proj", "mlp.down_proj"):
        name = f"model.layers.0.{name}.weight"
        weight, scale = tensors[name].float(), tensors[f"{name}_scale_inv"]
        assert tensors[name].dtype == torch.float8_e4m3fn and scale.dtype == torch.float32
        assert scale.shape == tuple(-(-size // 128) for size in weight.shape)
        for i in range(scale.shape[0]):
            for j in range(scale.shape[1]):
                block = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
                wanted, largest = own[name][block], own[name][block].abs().max()
                assert scale[i, j] == pytest.approx(float(largest) / 448)
                rounded = (weight[block] * scale[i, j] - wanted).abs()
                assert bool((rounded <= wanted.abs() / 16 + largest / 448 / 512).all())
    for name in ("lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"):
        assert torch.equal(tensors[name], own[name])
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"] == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"],
    }
    assert said["weights"]["quantized"] == 7 and 0.02 < said["weights"]["relative_error"] < 0.03
    assert 0.01 < said["outputs"]["relative_error"] < 0.2
    assert abs(said["outputs"]["loss"] - said["outputs"]["loss_quantized"]) < 0.1


def test_experts_are_quantized_in_their_published_form(tmp_path: Path) -> None:
    """Each by itself, beside a router that is not; and said of the experts that the model holds."""
    model = small("Mixtral")
    tensors, said = written(model, tmp_path / "out", "fp8")
    layer = "model.layers.0.block_sparse_moe"
    assert tensors[f"{layer}.experts.3.w2.weight_scale_inv"].shape == (1, 1)
    assert tensors[f"{layer}.gate.weight"].dtype == torch.float32
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    kept = config["quantization_config"]["modules_to_not_convert"]
    assert kept == ["lm_head", f"{layer}.gate"]
    assert said["weights"]["quantized"] == 4 + 3 * 4
    assert 0.001 < said["outputs"]["relative_error"] < 0.2  # of experts in another order it is 1


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize(
    ("name", "kind"),
    [("Llama", kind) for kind in LAYOUTS]
    + [("Mixtral", kind) for kind in ("fp8", "fp8_channel", "int4")],
)
def test_transformers_reads_what_was_said(name: str, kind: str, tmp_path: Path) -> None:
    """Its own quantizers compute the weights again, and the model then errs as much as is said."""
    pytest.importorskip("accelerate" if kind == "fp8" else "compressed_tensors")
    transformers = pytest.importorskip("transformers")
    model = small(name, **WIDE)
    _, said = written(model, tmp_path / "out", kind)
    kinds = {"fp8": "FineGrainedFP8Config"}
    config = getattr(transformers, kinds.get(kind, "CompressedTensorsConfig"))(dequantize=True)
    loaded: Any = type(model)
    loaded = loaded.from_pretrained(
        tmp_path / "out", dtype=torch.float32, quantization_config=config
    )
    given: Any = example(model)
    with torch.no_grad():
        have, want = loaded.eval()(**given).logits, model(**given).logits
    error = float((have - want).norm() / want.norm())
    assert error == pytest.approx(said["outputs"]["relative_error"], rel=1e-3)


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        ("Llama", "int3", "cannot be quantized to 'int3'.*fp8, fp8_channel, int8, int4"),
        ("GPT-2", "fp8", "GPT2LMHeadModel has no weight to quantize: no linear layer"),
        ("Mixtral", "int8", "int8 has not: transformers reads no experts of it"),
        ("gpt-oss", "fp8", r"experts in one tensor of 3 dims.*\(4, 64, 256\).*fp8 has not"),
    ],
)
def test_what_cannot_be_quantized_leaves_nothing(
    name: str, kind: str, said: str, tmp_path: Path
) -> None:
    if kind == "int8":
        pytest.importorskip("compressed_tensors")
    model = FAMILIES[name].make()
    with pytest.raises(ExportError, match=said):
        huggingface(model, tmp_path / "out", quantize=kind)
    assert not list(tmp_path.iterdir())


def test_a_layout_of_a_library_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "compressed_tensors.quantization", None)
    with pytest.raises(ExportError, match="compressed-tensors is not installed, whose layout"):
        huggingface(small("Llama"), tmp_path / "out", quantize="int4")
    assert not list(tmp_path.iterdir())


def test_other_inputs_are_given() -> None:
    model = small("Llama")
    assert example(FAMILIES["ViT"].make()) is None
    given = example(model)
    assert given is not None and given["input_ids"].shape == (2, 64)
