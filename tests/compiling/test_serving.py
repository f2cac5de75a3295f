"""inner="tensorrt": what torch-tensorrt is handed, and what is refused before it is."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from typing import Any

import pytest
import torch

import engine_cases as cases
from autoshard import backend
from autoshard.compiling import inner
from autoshard.errors import ConfigError


def installed(monkeypatch: pytest.MonkeyPatch) -> list[torch.fx.GraphModule]:
    """A stand-in for torch-tensorrt that runs the graphs it is handed, and keeps them."""
    module = types.ModuleType("torch_tensorrt")
    module.__spec__ = importlib.machinery.ModuleSpec("torch_tensorrt", None)
    monkeypatch.setitem(sys.modules, "torch_tensorrt", module)
    graphs: list[torch.fx.GraphModule] = []

    def standin(gm: torch.fx.GraphModule, example_inputs: Any, options: Any) -> Any:
        from torch._dynamo.backends.common import aot_autograd

        def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:
            graphs.append(graph)
            return graph.forward

        return aot_autograd(fw_compiler=keep)(gm, example_inputs)

    from autoshard.runtime import compat

    real = compat.registered_backend
    monkeypatch.setattr(
        compat,
        "registered_backend",
        lambda name: standin if name == "torch_tensorrt" else real(name),
    )
    return graphs


def serve(mesh: dict[str, int]) -> dict[str, Any]:
    """A Llama served by the stand-in, beside the unsharded model."""
    with pytest.MonkeyPatch.context() as patch:
        graphs = installed(patch)
        patch.setattr(backend, "check_serving", lambda sizes, device: check(sizes, "cuda"))
        model, ids = cases.make("llama", num_hidden_layers=1), torch.arange(16).view(2, 8)
        torch.compiler.reset()
        with torch.no_grad():
            wanted = model(ids, use_cache=False).logits
            options = {"mesh": mesh, "inner": "tensorrt", "outputs": "replicate"}
            compiled = torch.compile(model, backend="autoshard", options=options)
            found = compiled(ids, use_cache=False).logits
        calls = [str(n.target) for g in graphs for n in g.graph.nodes if n.op == "call_function"]
        collectives = [call for call in calls if call.startswith("_c10d_functional")]
        unknown = [call for call in calls if call.startswith("autoshard")]
        return {"error": cases.error([found], [wanted]), "made": collectives, "own": unknown}


check = inner.check_serving


def test_torch_tensorrt_is_handed_the_ranks_graph_with_its_collectives(gloo2: Any) -> None:
    for rank in gloo2(serve, {"tp": 2}):
        assert rank["error"] < 1e-5
        assert "_c10d_functional.all_reduce.default" in rank["made"]
        assert not rank["own"], "operators that torch-tensorrt has no converters of"


def refused(sizes: dict[str, int], said: str, device: str = "cuda") -> None:
    with torch.no_grad(), pytest.raises(ConfigError, match=said):
        check(sizes, device)


def test_what_torch_tensorrt_cannot_serve_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_tensorrt", None)
    with pytest.raises(ConfigError, match=r"not installed. pip install 'autoshard\[torch-tensorrt"):
        check({"tp": 1}, "cuda")
    installed(monkeypatch)
    refused({"tp": 1}, "the model is on cpu, and TensorRT runs on an NVIDIA GPU", "cpu")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    refused({"dp_shard": 2, "tp": 2}, r"dp_shard=2, tp=2 of 4 processes.*Give the mesh {'tp': 4}")
    with pytest.raises(ConfigError, match=r"no backward. Call the model under torch.no_grad"):
        check({"tp": 4}, "cuda")
    with torch.no_grad():
        check({"tp": 4}, "cuda")


def test_the_backend_refuses_before_it_touches_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(sys.modules, "torch_tensorrt", None)
    model = torch.nn.Linear(4, 4)
    compiled = torch.compile(model, backend="autoshard", options={"inner": "tensorrt"})
    with pytest.raises(Exception, match="ConfigError: .*torch_tensorrt is not installed"):
        compiled(torch.zeros(1, 4))
    assert type(model.weight) is torch.nn.Parameter
