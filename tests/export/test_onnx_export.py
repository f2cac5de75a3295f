"""The second route: rank graphs as ONNX, run by ONNX's own evaluator, beside model and network."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import pytest
import torch

import engine_cases as cases
from autoshard.export import ExportError

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

from autoshard.export.to_onnx import onnx_program  # noqa: E402
from onnx_evaluator import collectives_of, evaluate  # noqa: E402


@functools.cache
def models(
    name: str, tp: int, dtype: torch.dtype = torch.float32, length: int | None = None
) -> list[Any]:
    programs = [onnx_program(*cases.rank(name, tp, r, dtype, length)) for r in range(tp)]
    return [program.model_proto for program in programs]


def difference(found: list[Any], name: str, length: int | None) -> float:
    """The largest of any rank from the unsharded fp32 model."""
    return cases.difference(evaluate(found, cases.feeds(length)), name, length)


def test_onnx_says_what_the_model_says_and_what_the_network_says() -> None:
    made = models("llama", 2, length=cases.LENGTH)
    for model in made:
        onnx.checker.check_model(model)
    assert difference(made, "llama", cases.LENGTH) < 1e-5
    inputs = {i.name: i.type.tensor_type.shape.dim for i in made[0].graph.input}
    assert [d.dim_param or d.dim_value for d in inputs["key_cache_0"]] == ["batch", 2, 64, 8]
    assert [d.dim_param for d in inputs["input_ids"]] == ["batch", "sequence"]
    if importlib.util.find_spec("tensorrt_rtx") is None:
        pytest.skip("tensorrt_rtx is not installed: nothing to compare with beside the model")
    import tensorrt_rtx as trt

    from autoshard.export.to_tensorrt.build import checked_network
    from network_runs import interpret

    networks = [checked_network(trt, *cases.rank("llama", 2, r, length=64)) for r in range(2)]
    feeds = cases.feeds(cases.LENGTH)
    for one, other in zip(evaluate(made, feeds), interpret(networks, feeds)):
        for left, right in zip(one, other):
            assert left.keys() == right.keys()
            assert cases.error(list(left.values()), [right[name] for name in left]) < 1e-5
    recorded = [one.arguments for one in networks[0].definition.collectives]
    in_file = [(o.upper(), r.upper(), root, None, n) for o, r, root, n in collectives_of(made[0])]
    assert in_file == recorded


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tp", "dtype", "length"),
    [
        ("qwen3", 2, torch.float16, None),
        ("mixtral", 2, torch.float32, cases.LENGTH),
        ("gpt2", 4, torch.float32, None),
    ],
)
def test_every_kind_of_model(name: str, tp: int, dtype: torch.dtype, length: int | None) -> None:
    assert difference(models(name, tp, dtype, length), name, length) < cases.TOLERANCE[dtype]


def changed(model: Any, attribute: str, value: Any) -> Any:
    """A copy, its first all-reduce with another attribute."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    node = next(
        n
        for n in copy.graph.node
        if any(a.name == "collective_operation" and a.s == b"all_reduce" for a in n.attribute)
    )
    old = next(a for a in node.attribute if a.name == attribute)
    node.attribute.remove(old)
    node.attribute.append(onnx.helper.make_attribute(attribute, value))
    return copy


def test_a_planted_fault_is_noticed() -> None:
    made = models("llama", 2, length=cases.LENGTH)
    wrong = [changed(model, "reduce_op", "max") for model in made]
    assert difference(wrong, "llama", cases.LENGTH) > 1e-2
    with pytest.raises(ExportError, match="all_reduce of 1 ranks with root -1, on 2 ranks"):
        evaluate([changed(model, "nb_rank", 1) for model in made], cases.feeds(cases.LENGTH))
