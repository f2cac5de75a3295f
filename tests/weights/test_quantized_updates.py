"""Weights that are quantized on the way: what arrives is what the exported directory holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from autoshard import weights
from autoshard.errors import AutoshardError
from autoshard.export import QuantizedModel, huggingface
from autoshard.export.quantization import LAYOUTS
from autoshard.weights import Sender
from families import FAMILIES
from linked import checked, parts, ranks

pytest.importorskip("compressed_tensors")


def small(name: str) -> Any:
    return FAMILIES[name].make(num_hidden_layers=1, hidden_size=256, intermediate_size=640)


def directory(model: Any, kind: str, folder: Path) -> dict[str, torch.Tensor]:
    huggingface(model, folder / "hf", dtype="bfloat16", quantize=kind)
    return load_file(folder / "hf" / "model.safetensors")


@pytest.mark.parametrize(
    ("name", "kind", "stored"),
    [
        *(("Llama", kind, "S(0)") for kind in LAYOUTS),
        ("Llama", "int4", "S(1)"),
        ("Llama", "fp8", "S(1)"),
        ("Mixtral", "fp8", "S(0)"),
    ],
)
def test_what_arrives_is_the_exported_directory(
    name: str, kind: str, stored: str, tmp_path: Path
) -> None:
    """Three ranks send, whose rows no block of scales divides; one takes the whole, one a half of
    each tensor's rows."""
    model = small(name)
    expected = directory(model, kind, tmp_path)
    halves = parts(expected, {"dp_shard": "S(0)"}, {"dp_shard": 2}, 1)
    taken = {n: torch.full_like(t.view(torch.uint8), 7).view(t.dtype) for n, t in expected.items()}

    def run(link: Any) -> Any:
        if link.rank < 3:
            held = parts(model.state_dict(), {"tp": stored}, {"tp": 3}, link.rank)
            source = QuantizedModel(model, kind, dtype="bfloat16")
            return weights.send(Sender(held, None, source), link, version=3).wait()
        if link.rank == 3:
            return weights.receive(taken, link).wait()
        for part in halves.values():
            part.tensor.zero_()
        return weights.receive(weights.Tensors(halves, {n: n for n in halves}), link).wait()

    reports = checked(ranks(5, run))
    for tensor_name, value in expected.items():
        assert torch.equal(taken[tensor_name], value), tensor_name
    again = parts(expected, {"dp_shard": "S(0)"}, {"dp_shard": 2}, 1)
    assert all(torch.equal(halves[n].tensor, part.tensor) for n, part in again.items())
    # numbers travel in their 8 or 4 bits, what is not quantized in bfloat16
    assert reports[3].received == sum(value.nbytes for value in expected.values())
    assert reports[3].version == 3
    before = [report.before for report in reports]
    lacked = sum(one.received for one in before)
    quantized = sum(p.numel() for n, p in model.named_parameters() if "proj" in n or "exp" in n)
    # each number that a sender lacks goes to it once, in bfloat16; of rows, those beside a block
    most = {"S(0)": 0.4, "S(1)": 2 / 3}[stored] if name == "Llama" else 1
    assert 0 < lacked <= most * 2 * quantized * 1.01
    assert before[3].received == before[4].received == 0


def test_a_quantized_tensor_is_not_cast() -> None:
    target = {"w": torch.zeros(3, 4, dtype=torch.float8_e4m3fn)}
    source = Sender(parts({"w": torch.randn(3, 4)}, {}, {"tp": 1}, 0))
    with pytest.raises(AutoshardError, match="w is float8_e4m3fn here, and is sent as float32"):
        weights.transfer(source, target)


def test_all_send_one_form() -> None:
    model = small("Llama")

    def run(link: Any) -> str:
        source = QuantizedModel(model, "fp8") if link.rank else model
        with pytest.raises(AutoshardError) as error:
            weights.send(source, link)
        return str(error.value)

    said = checked(ranks(2, run))
    assert said[0] == said[1] and "send the forms ['None', 'fp8 of its own dtypes']" in said[0]
