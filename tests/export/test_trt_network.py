"""Networks and engines of TensorRT-RTX: every layer interpreted, every collective recorded."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import io
from pathlib import Path
from typing import Any

import pytest
import torch

import engine_cases as cases
from autoshard.export import ExportError
from autoshard.export.to_tensorrt import generate
from autoshard.export.to_tensorrt.build import (
    Network,
    Spy,
    build,
    check_capabilities,
    check_collectives,
    checked_network,
    make_network,
)
from autoshard.export.to_tensorrt.converters import products
from network_runs import interpret

trt = pytest.importorskip("tensorrt_rtx")

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
Ranks = list[Network]


def networks(name: str, tp: int, dtype: torch.dtype, length: int | None) -> Ranks:
    return [checked_network(trt, *cases.rank(name, tp, r, dtype, length)) for r in range(tp)]


def difference(ranks: Ranks, name: str, length: int | None) -> float:
    """The largest of any rank from the unsharded fp32 model."""
    return cases.difference(interpret(ranks, cases.feeds(length)), name, length)


def check(name: str, tp: int, dtype: torch.dtype, length: int | None) -> None:
    ranks = networks(name, tp, dtype, length)
    assert difference(ranks, name, length) < cases.TOLERANCE[dtype]
    network = ranks[-1]
    levels = check_capabilities(trt, ["8.9", "SM120"], network.lowering.graph)
    file = io.BytesIO()
    build(network, file, levels)
    engine = file.getvalue()
    assert len(engine) > sum(t.nbytes for t in network.lowering.constants.values())
    if tp > 1:
        assert f"world_size = {tp}".encode() in engine


def test_a_network_says_what_the_model_says_and_builds() -> None:
    check("llama", 2, torch.float16, cases.LENGTH)


def test_a_full_disk_is_told_as_one() -> None:
    network, _ = networks("llama", 2, torch.float16, cases.LENGTH)
    full = Path("/dev/full").open("wb", buffering=0)
    with full, pytest.raises(OSError, match="No space"):
        build(network, full)


#: Every model with every number of ranks and with every dtype, every two of them together once.
PAIRS = [
    (name, tp, DTYPES[(i + j) % 3])
    for i, name in enumerate(cases.NAMES)
    for j, tp in enumerate((1, 2, 4))
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tp", "dtype"), PAIRS)
def test_every_model(name: str, tp: int, dtype: torch.dtype) -> None:
    check(name, tp, dtype, None)
    check(name, tp, dtype, cases.LENGTH)


def test_llama_decodes_what_the_model_decodes() -> None:
    ranks = networks("llama", 2, torch.float32, cases.LENGTH)
    assert generate(ranks, cases.PROMPTS, 32) == cases.greedy("llama", cases.PROMPTS, 32)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tp"), [("llama", 1), ("gpt2", 2), ("mixtral", 2), ("qwen3", 4)])
def test_every_model_decodes_what_it_decodes_unsharded(name: str, tp: int) -> None:
    """The first tokens on every number of ranks are compared above; here, many of them."""
    ranks = networks(name, tp, torch.float32, cases.LENGTH)
    assert generate(ranks, cases.PROMPTS, 32) == cases.greedy(name, cases.PROMPTS, 32)


def test_collectives_are_recorded_as_they_were_made() -> None:
    made, second = (
        [recorded.arguments for recorded in network.definition.collectives]
        for network in networks("llama", 2, torch.float32, cases.LENGTH)
    )
    assert made == second
    assert ("ALL_REDUCE", "SUM", -1, None, 2) in made
    assert set(made) <= {("ALL_REDUCE", "SUM", -1, None, 2), ("ALL_GATHER", "NONE", -1, None, 2)}


def test_a_second_process_group_is_refused() -> None:
    graph, weights = cases.rank("llama", 2, 0, length=cases.LENGTH)
    module = copy.deepcopy(graph.module)
    node = next(n for n in module.graph.nodes if "all_reduce" in str(n.target))
    node.args = (*node.args[:-1], "another")
    with pytest.raises(ExportError, match=r"in the group another; an engine has one.*\.py:\d+"):
        make_network(trt, dataclasses.replace(graph, module=module), weights)


class Faulty(Spy):
    """A network that changes what it is told, once."""

    def __init__(self, network: Any, fault: str) -> None:
        super().__init__(network)
        self.fault = fault

    def add_dist_collective(self, *args: Any) -> Any:
        tensor, operation, reduction, *rest = args
        reduces = operation == trt.CollectiveOperation.ALL_REDUCE
        if reduces and self.fault == "reduction":
            reduction = trt.ReduceOperation.MAX
        if reduces and self.fault == "dropped all-reduce":
            self.fault = ""
            return Deaf(self.network.add_identity(tensor))
        layer = super().add_dist_collective(tensor, operation, reduction, *rest)
        return Deaf(layer) if reduces and self.fault == "rank count" else layer

    def add_attention_v2(self, *args: Any) -> Any:
        if self.fault == "causal flag":
            args = (*args[:4], trt.CausalMaskKind.NONE)
        return super().add_attention_v2(*args)


class Deaf:
    """A layer whose number of ranks stays 1."""

    def __init__(self, layer: Any) -> None:
        object.__setattr__(self, "layer", layer)

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "num_ranks":
            setattr(self.layer, name, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)


def planted(fault: str) -> Ranks:
    spy: Any = functools.partial(Faulty, fault=fault)
    return [make_network(trt, *cases.rank("llama", 2, rank), spy) for rank in range(2)]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("reduction", "reduction 'MAX', not 'SUM'"),
        ("rank count", "ranks 1, not 2"),
        ("dropped all-reduce", r"\d collectives in the network, \d in the graph"),
        ("causal flag", None),
        ("scale", None),
        ("", None),
    ],
)
def test_a_planted_fault_is_noticed(
    fault: str, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault == "scale":
        plain = products.elementwise

        def without(low: Any, query: Any, other: Any, operation: str) -> Any:
            return query if operation == "PROD" else plain(low, query, other, operation)

        monkeypatch.setattr(products, "elementwise", without)
    ranks = planted(fault)
    with contextlib.nullcontext() if said is None else pytest.raises(ExportError, match=said):
        check_collectives(ranks[0].definition, cases.rank("llama", 2, 0)[0])
    found = difference(ranks, "llama", None)
    assert found > 1e-2 if fault else found < 1e-5
