"""Engines with quantized weights: the numbers of the Hugging Face directory, on every rank."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autoshard
from autoshard.export import EngineSpec, ExportError, huggingface
from autoshard.export.quantization import FILE, LAYOUTS, block_scaled
from autoshard.export.quantization.layouts import layout
from autoshard.export.rank_graph.operators import dequantize
from autoshard.export.to_tensorrt import networks
from autoshard.export.to_tensorrt.interpreted_layers import unpacked
from families import FAMILIES
from network_runs import interpret

pytest.importorskip("tensorrt_rtx")
transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")

SLOW = pytest.mark.slow


def small(name: str, **sizes: int) -> nn.Module:
    sizes = {"num_hidden_layers": 1, "hidden_size": 256, "intermediate_size": 512, **sizes}
    return FAMILIES[name].make(**sizes)


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize(
    ("name", "kind", "tp"),
    [
        ("Llama", "int4", 2),
        ("Mixtral", "fp8", 2),
        *(pytest.param("Llama", kind, 4, marks=SLOW) for kind in LAYOUTS),
        *(pytest.param("Mixtral", kind, 4, marks=SLOW) for kind in ("fp8_channel", "int4")),
    ],
)
def test_ranks_say_what_transformers_says(name: str, kind: str, tp: int, tmp_path: Path) -> None:
    """The networks of all ranks beside the quantized directory, which transformers reads."""
    pytest.importorskip("accelerate" if kind == "fp8" else "compressed_tensors")
    model, call = small(name), FAMILIES[name].call(2, 8)
    sizes = {"batch": (1, 2, 4), "sequence": (1, 8, 16)}
    ranks = networks(model, EngineSpec(mesh={"tp": tp}, dynamic=sizes, quantize=kind))
    definition = ranks[0].definition
    layers = [definition.get_layer(i) for i in range(definition.num_layers)]
    types = [one.get_input(0).dtype.name for one in layers if one.type.name == "DEQUANTIZE"]
    wanted = {"int8": "INT8", "int4": "INT4"}.get(kind, "FP8")
    assert types == [wanted] * (7 if name == "Llama" else 6)
    huggingface(model, tmp_path / "hf", quantize=kind)
    config = {"fp8": "FineGrainedFP8Config"}.get(kind, "CompressedTensorsConfig")
    loaded: Any = type(model)
    loaded = loaded.from_pretrained(
        tmp_path / "hf",
        dtype=torch.float32,
        quantization_config=getattr(transformers, config)(dequantize=True),
    )
    with torch.no_grad():
        want, own = loaded.eval()(**call).logits, model(**call).logits
    for outputs in interpret(ranks, [call]):
        have = outputs[0]["logits"]
        assert (have - want).norm() < 1e-5 * want.norm() < 1e-3 * (want - own).norm()


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize(("shape", "rows"), [((192, 256), 192), ((3, 128, 384), 64)])
def test_a_part_is_a_part_of_the_whole(kind: str, shape: tuple[int, ...], rows: int) -> None:
    """Along every dim, in two and in four, of matrices that were quantized each by itself."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).half()
    how = layout(kind)
    each = [how.restored(how.quantized(one)).half() for one in weight.reshape(-1, rows, shape[-1])]
    whole, made = torch.cat(each).reshape(shape), block_scaled(kind, weight, rows)
    empty = block_scaled(kind, weight.to("meta"), rows)
    for field in ("values", "scale"):
        have, want = getattr(empty, field), getattr(made, field)
        assert (have.shape, have.dtype) == (want.shape, want.dtype)
    for dim, size in enumerate(shape):
        parts = 3 if size == 3 else 4
        for start in range(0, size, size // parts):
            cut = made.part(dim, start, size // parts).matrix
            have = dequantize(cut.values, cut.scale, list(cut.block), dtype=torch.float16)
            want = whole.narrow(dim, start, size // parts)
            assert torch.equal(have, want.flatten(0, -2))


def test_numbers_of_four_bits_lie_as_onnx_has_them() -> None:
    """Which is how TensorRT's parser hands them on."""
    numpy_helper = pytest.importorskip("onnx.numpy_helper")
    from autoshard.export.to_tensorrt.converters.network import Lowering

    class Layer:
        name = "values"

        def get_output(self, number: int) -> None:
            return None

    trt = importlib.import_module("tensorrt_rtx")
    low = Lowering.__new__(Lowering)
    low.trt, low.constants = trt, {}
    low.add = lambda *args: Layer()  # type: ignore[method-assign]
    values = torch.arange(-8, 8, dtype=torch.int8).repeat(2).reshape(4, 8)
    low.quantized_constant(values, "INT4")
    kept = low.constants["values"]
    assert torch.equal(unpacked(kept, (4, 8)), values)
    theirs = numpy_helper._unpack_4bit(kept.numpy(), [4, 8]).view("int8")
    signed = torch.from_numpy(theirs.copy())
    assert torch.equal(torch.where(signed > 7, signed - 16, signed), values)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(1024, 4096), nn.Linear(4096, 1024)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def export(out: Path, model: nn.Module, quantize: str | None, **options: Any) -> dict[str, Any]:
    example = ((torch.zeros(2, 8, 1024),), {}) if isinstance(model, Mlp) else None
    given = {"mesh": {"tp": 2}, "dynamic": {"batch": (1, 2, 4)}, **options}
    autoshard.export.tensorrt(model, out, example=example, quantize=quantize, **given)
    config: dict[str, Any] = json.loads((out / "config.json").read_text())
    return config


def test_an_engine_is_as_small_as_its_weights(tmp_path: Path) -> None:
    numbers, model = 4096 * 1024, Mlp()  # of a rank
    for kind, size in ((None, 2.0), ("int8", 1.0), ("fp8", 1.0), ("int4", 0.52)):
        out = tmp_path / str(kind)
        assert export(out, model, kind)["quantize"] == kind
        engine = (out / "rank1.engine").stat().st_size
        assert size * numbers < engine < size * numbers + 5e5
        assert (out / FILE).exists() == (kind is not None)


def test_a_directory_says_how_accurate_it_is(tmp_path: Path) -> None:
    """As the Hugging Face directory of the same layout and dtype does; with a cache, whose tokens
    are compared at the export, and of a model in another dtype than the engine."""
    model = small("Llama")
    sizes = {"batch": (1, 2, 4), "sequence": (1, 8, 16)}
    config = export(tmp_path / "out", model, "int8", dynamic=sizes, max_length=32)
    entry = config["ranks"][0]["weights"]["model.layers.0.mlp.up_proj.weight"]
    assert entry["quantized"] == "int8" and len(entry["scale_sha256"]) == 64
    assert "quantized" not in config["ranks"][0]["weights"]["lm_head.weight"]
    huggingface(model, tmp_path / "hf", quantize="int8", dtype="float16")
    ours, theirs = ((tmp_path / where / FILE).read_text() for where in ("out", "hf"))
    assert ours == theirs and json.loads(ours)["outputs"]["relative_error"] < 0.1


@pytest.mark.parametrize(
    ("name", "kind", "options", "said"),
    [
        ("Llama", "int3", {}, "cannot be quantized to 'int3'.*fp8, fp8_channel, int8, int4"),
        ("Llama", "fp8", {"compute_capability": "8.6"}, "8.6 has no weights of fp8, .* need 8.9"),
        ("gpt-oss", "fp8", {}, "experts in one tensor of 3 dims"),
        ("GPT-2", "int8", {}, "GPT2LMHeadModel has no weight to quantize"),
    ],
)
def test_what_has_no_layer_leaves_nothing(
    name: str, kind: str, options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    model = small(name) if name == "Llama" else FAMILIES[name].make()
    with pytest.raises(ExportError, match=said):
        export(tmp_path / "out", model, kind, **options)
    assert not list(tmp_path.iterdir())
