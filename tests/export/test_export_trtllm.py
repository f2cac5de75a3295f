"""TensorRT-LLM checkpoints from one process: given references, configurations, refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autoshard
from autoshard.export import ExportError, trtllm_build
from autoshard.export.decoder.hf_config import config_facts
from autoshard.export.decoder.reading import read_decoder
from autoshard.export.serial_graph import model_graph
from trtllm_oracle import MODELS, make

REFERENCES = Path(__file__).parents[3] / "shared" / "reference" / "trtllm_checkpoints"
CASES = sorted(p.name for p in REFERENCES.glob("*_tp*_pp*")) if REFERENCES.exists() else ["absent"]


def tensors(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(path)


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


@pytest.mark.skipif(not REFERENCES.exists(), reason="no reference checkpoints beside the checkout")
@pytest.mark.parametrize("case", CASES)
def test_reference_is_reproduced(case: str, tmp_path: Path) -> None:
    import transformers

    source, tp, pp = re.match(r"(.*)_tp(\d+)_pp(\d+)$", case).groups()  # type: ignore[union-attr]
    model = transformers.AutoModelForCausalLM.from_pretrained(REFERENCES / f"{source}_hf")
    autoshard.export.trtllm(model, tmp_path / "out", mesh={"tp": int(tp), "pp": int(pp)})
    names = {path.name for path in (REFERENCES / case).iterdir()}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    for name in names:
        mine, theirs = tmp_path / "out" / name, REFERENCES / case / name
        if name == "config.json":
            assert json.loads(mine.read_text()) == json.loads(theirs.read_text())
        else:
            assert_equal(tensors(mine), tensors(theirs))


def test_without_configuration_the_graph_tells(tmp_path: Path) -> None:
    model = make("llama")

    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.inner(ids, use_cache=False).logits  # type: ignore[no-any-return]

    with pytest.raises(ExportError, match="max_position_embeddings="):
        autoshard.export.trtllm(Bare(), tmp_path / "none", mesh={"tp": 1})
    autoshard.export.trtllm(Bare(), tmp_path / "bare", mesh={"tp": 2}, max_position_embeddings=64)
    autoshard.export.trtllm(model, tmp_path / "hf", mesh={"tp": 2})
    for name in ("config.json", "rank0.safetensors", "rank1.safetensors"):
        assert (tmp_path / "bare" / name).read_bytes() == (tmp_path / "hf" / name).read_bytes()


def test_halved_model(tmp_path: Path) -> None:
    """`model.to(bfloat16)` rounds the rotary frequencies; the configuration still agrees."""
    model = make("llama").to(torch.bfloat16)
    autoshard.export.trtllm(model, tmp_path / "out", mesh={"tp": 2}, dtype="bfloat16")
    autoshard.export.trtllm(make("llama"), tmp_path / "wide", mesh={"tp": 2}, dtype="bfloat16")
    for name in ("config.json", "rank0.safetensors", "rank1.safetensors"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "wide" / name).read_bytes()
    del model.config.rope_parameters
    with pytest.raises(ExportError, match="no configuration says their base"):
        autoshard.export.trtllm(model, tmp_path / "unknown", mesh={"tp": 1})


def test_llama3_rotary_scaling(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    MODELS["scaled"] = (
        *MODELS["llama"][:2],
        {**MODELS["llama"][2], "rope_parameters": {"rope_theta": 5e5, **scaling}},
    )
    try:
        model = make("scaled")
    finally:
        del MODELS["scaled"]
    autoshard.export.trtllm(model, tmp_path / "out", mesh={"tp": 1})
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["rotary_base"], config["rotary_scaling"]) == (5e5, scaling)
    model.config.rope_parameters["factor"] = 4.0
    with pytest.raises(ExportError, match="the graph has"):
        autoshard.export.trtllm(model, tmp_path / "changed", mesh={"tp": 1})


@pytest.mark.parametrize(
    ("field", "value", "match"),
    [
        ("num_key_value_heads", 4, "num_key_value_heads 4, the graph has 2"),
        ("rms_norm_eps", 1e-3, "rms_norm_eps 0.001, the graph has 1e-06"),
        ("final_logit_softcapping", 3.0, "softcapping 3.0, the graph has None"),
        ("vocab_size", 64, "vocab_size 64, the graph has 61"),
        ("hidden_act", "gelu", "gelu, the graph has silu"),
        ("tie_word_embeddings", True, "tie_word_embeddings True, the graph has False"),
        ("architectures", ["Qwen2ForCausalLM"], "architecture Qwen2ForCausalLM"),
    ],
)
def test_configuration_that_disagrees(field: str, value: Any, match: str, tmp_path: Path) -> None:
    model = make("llama")
    decoder = read_decoder(model_graph(model))
    setattr(model.config, field, value)
    with pytest.raises(ExportError, match=match):
        config_facts(decoder, ("LlamaForCausalLM", "MistralForCausalLM"), model.config)


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        ("llama", {"mesh": {"tp": 3}}, "heads 4 % tp 3 = 1"),
        ("llama", {"mesh": {"pp": 3}}, "layers 2 % pp 3 = 2"),
        ("llama", {"mesh": {"dp_shard": 2}}, "dp_shard of size 2: a checkpoint is divided among"),
        ("llama", {"dtype": "int8"}, "dtype 'int8'"),
        ("gemma", {"mesh": {"pp": 2}}, "pp 2: TensorRT-LLM shares"),
    ],
)
def test_impossible_requests_leave_nothing(
    name: str, options: dict[str, Any], match: str, tmp_path: Path
) -> None:
    with pytest.raises(ExportError, match=match):
        autoshard.export.trtllm(make(name), tmp_path / "out", **{"mesh": {"tp": 1}, **options})
    assert list(tmp_path.iterdir()) == []


def test_failure_while_writing_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from autoshard.export.destination import SafetensorsFile

    def full(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(SafetensorsFile, "write", full)
    with pytest.raises(OSError, match="no space left"):
        autoshard.export.trtllm(make("llama"), tmp_path / "out", mesh={"tp": 1})
    assert list(tmp_path.iterdir()) == []


def test_build_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ExportError, match="trtllm-build is not installed"):
        trtllm_build(tmp_path, tmp_path / "engines")
    program = tmp_path / "trtllm-build"
    program.write_text('#!/bin/sh\necho "$@" > "$2/called"\n')
    program.chmod(0o755)
    trtllm_build(tmp_path, tmp_path / "engines", "--gemm_plugin", "auto")
    called = (tmp_path / "called").read_text()
    assert called == (
        f"--checkpoint_dir {tmp_path} --output_dir {tmp_path / 'engines'} --gemm_plugin auto\n"
    )


def test_what_is_no_decoder_of_token_ids_is_refused_in_a_line(tmp_path: Path) -> None:
    from transformers import ViTConfig, ViTModel

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = ViTModel(ViTConfig(**sizes, intermediate_size=16, image_size=8, patch_size=4))
    told = "ViTModel takes pixel_values", "cannot be traced with token ids alone"
    for refused, match in zip((model, nn.Linear(4, 4)), told, strict=True):
        with pytest.raises(ExportError, match=match) as found:
            autoshard.export.trtllm(refused, tmp_path / "out", mesh={"tp": 1})
        assert "\n" not in str(found.value) and not [*tmp_path.iterdir()]
