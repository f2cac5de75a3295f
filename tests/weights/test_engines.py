"""Engines that take the weights of a model that trains: what a new export of it would hold."""

from __future__ import annotations

import copy
import sys
import time
from dataclasses import replace
from typing import Any

import pytest
import torch

import engine_cases as cases
from autoshard import weights
from autoshard.errors import AutoshardError
from autoshard.export import ExportError
from autoshard.export.rank_graph import configuration, read_weights
from autoshard.export.rank_graph.graph import QuantizedForm
from autoshard.export.serial_graph import WeightSource
from autoshard.export.to_tensorrt import cpu_engine
from autoshard.export.to_tensorrt.build import checked_network, mark_refittable
from autoshard.export.to_tensorrt.engine import Engines
from autoshard.runtime.engine import Engine, TensorRT
from autoshard.weights import Sender
from linked import checked, parts, ranks
from tensorrt_stand_in import StandIn

trt = pytest.importorskip("tensorrt_rtx")

F16 = torch.float16


def trained(name: str) -> torch.nn.Module:
    """A model after a step."""
    model = copy.deepcopy(cases.model(name))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def exported(name: str, model: torch.nn.Module) -> list[Any]:
    """The networks that an export of a model builds engines of, on two ranks."""
    graphs = [cases.rank(name, 2, rank, F16)[0] for rank in range(2)]
    source = WeightSource(model)
    each = [read_weights(source, graph, rank) for rank, graph in enumerate(graphs)]
    return [checked_network(trt, *one) for one in zip(graphs, each, strict=True)]


def send(model: torch.nn.Module, link: Any) -> Any:
    """As one of two ranks of dp_shard."""
    held = parts(model.state_dict(), {"dp_shard": "S(0)"}, {"dp_shard": 2}, link.rank)
    return weights.send(Sender(held), link).wait()


@pytest.mark.parametrize(
    "name",
    ["llama", *(pytest.param(one, marks=pytest.mark.slow) for one in ("gpt2", "mixtral"))],
)
def test_a_refitted_engine_is_one_that_is_exported_again(name: str) -> None:
    """Every constant of every rank's network, to the bit; and TensorRT has each parameter by its
    name, as one that can be refitted."""
    made = exported(name, cases.model(name))
    before = [{n: t.clone() for n, t in network.lowering.constants.items()} for network in made]
    engines = [cpu_engine(network) for network in made]
    for network in made:
        mark_refittable(network, network.builder.create_builder_config())
        named = network.lowering.weights
        assert named.keys() == {one.name for one in network.lowering.graph.weights.values()}
        assert all(network.definition.are_weights_marked_refittable(name) for name in named)
    model = trained(name)

    def run(link: Any) -> Any:
        if link.rank < 2:
            return send(model, link)
        return weights.receive(engines[link.rank - 2], link).wait()

    reports = checked(ranks(4, run))
    for network, engine, old in zip(exported(name, model), engines, before, strict=True):
        execute: Any = engine.execute
        new = network.lowering.constants
        assert execute.constants.keys() == new.keys()
        assert all(torch.equal(execute.constants[n], value) for n, value in new.items())
        changed = {n for n, value in new.items() if not torch.equal(old[n], value)}
        assert changed == {*network.lowering.weights.values()}
    sizes = [sum(t.nbytes for t in e.new_weights()[0].values.values()) for e in engines]
    assert [report.received for report in reports[2:]] == sizes  # in float16


def described(network: Any) -> dict[str, Any]:
    """The config.json of a refittable directory, of which one rank is loaded."""
    table = cpu_engine(network).new_weights()[0].table
    ranks_ = [{"file": "", "sha256": "", "weights": table}] * 2
    builder = {"module": "tensorrt", "version": "1", "compute_capabilities": []}
    ports = configuration(network.lowering.graph, F16)
    return {**ports, "builder": builder, "refittable": True, "ranks": ranks_}


def test_the_runner_hands_tensorrt_what_a_new_engine_would_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stand-in for TensorRT has a rank's weights by name; it reads the memory that it was given
    when it is refitted, and before all has arrived nothing of it changes."""
    monkeypatch.setitem(sys.modules, "tensorrt", StandIn)
    model = trained("llama")
    network = exported("llama", cases.model("llama"))[1]
    held = {n: network.lowering.constants[at] for n, at in network.lowering.weights.items()}
    monkeypatch.setattr(StandIn, "weights", {n: value.clone() for n, value in held.items()})
    config = described(network)
    engine = Engine(config, TensorRT(config, b"whole", None, rank=1))

    def run(link: Any) -> Any:
        if link.rank < 2:
            return send(model, link)
        update = weights.receive(engine, link, background=True)
        while not update.done:
            time.sleep(0.01)
        assert all(torch.equal(StandIn.weights[n], value) for n, value in held.items())
        return update.wait()

    checked(ranks(3, run))
    again = exported("llama", model)[1]
    for name, at in again.lowering.weights.items():
        assert torch.equal(StandIn.weights[name], again.lowering.constants[at]), name
    # an engine that has another weight beside them refuses before anything travels
    StandIn.weights["rope"] = torch.zeros(3)
    whole = Sender(parts(model.state_dict(), {}, {"tp": 1}, 0))
    with pytest.raises(AutoshardError, match="rope can only be replaced with"):
        weights.transfer(whole, engine)
    fixed = {**config, "refittable": False}
    with pytest.raises(AutoshardError, match="cannot be replaced.*refittable=True"):
        weights.transfer(whole, Engine(fixed, TensorRT(fixed, b"whole", None, rank=1)))
    other = cases.make("llama", intermediate_size=64)
    StandIn.weights.pop("rope")
    with pytest.raises(AutoshardError, match=r"in the engine, and is sent as \[64, 64\]"):
        weights.transfer(Sender(parts(other.state_dict(), {}, {"tp": 1}, 0)), engine)


def test_quantized_engines_are_exported_again() -> None:
    graph, _ = cases.rank("llama", 2, 0, F16)
    form = QuantizedForm("fp8", 64, "scale")
    quantized = {at: replace(one, quantized=form) for at, one in graph.weights.items()}
    with pytest.raises(ExportError, match="is quantized, and an engine is refitted with"):
        Engines(trt, refittable=True).check(replace(graph, weights=quantized))
