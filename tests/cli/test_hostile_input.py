"""Every reader is given damaged files and values: it reads them, or says so in our own errors.

The quick suite tries a few examples of each reader, always the same. Thousands of other ones:

    AUTOSHARD_FUZZ=2000 python -m pytest tests/cli/test_hostile_input.py
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mutations import HOSTILE, damaged, damaged_bytes, damaged_json, json_bytes, values
from safetensors.torch import save
from torch import nn

import autoshard
from autoshard import Plan
from autoshard.cli import arguments
from autoshard.config import Config
from autoshard.errors import AutoshardError, ConfigError, PlanError
from autoshard.export import EngineSpec, ExportError, check_target
from autoshard.model_source import load_model, load_on_meta
from autoshard.planning.cost.clusters import cluster
from autoshard.runtime.engine import Engine, load, loading
from tensorrt_stand_in import StandIn

MANY = int(os.environ.get("AUTOSHARD_FUZZ", 0))
"""Examples a reader, drawn anew in each run; 0: the few of the quick suite."""


def tried(strategy: st.SearchStrategy[Any], few: int = 40) -> Callable[[Any], Any]:
    """A test that is called with examples of the strategy."""

    def decorate(test: Any) -> Any:
        chosen = settings(
            max_examples=MANY or few,
            derandomize=not MANY,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        return chosen(given(strategy)(test))

    return decorate


class Folder:
    """A folder of files for one example."""

    def __enter__(self) -> Path:
        self._folder = tempfile.TemporaryDirectory()
        return Path(self._folder.__enter__())

    def __exit__(self, *error: Any) -> None:
        self._folder.__exit__(*error)


def accepted(read: Callable[[], Any], kind: type[AutoshardError] = AutoshardError) -> Any:
    """What is read; None after an error, which is of this kind and says something."""
    try:
        return read()
    except kind as error:
        assert len(str(error)) > 10
        return None


PLAN = {
    "version": 2,
    "axis": "tp",
    "size": 2,
    "mesh": {"dp_shard": 2, "tp": 2},
    "parameters": {"up.weight": "S(0)", "up.bias": "I"},
    "graphs": {"ab": {"nodes": {"linear": "R, S(0) -> S(1)"}, "copies": {"linear": "R"}}},
}


@tried(damaged_json(PLAN))
def test_plan_file(data: bytes) -> None:
    with Folder() as folder:
        path = folder / "plan.json"
        path.write_bytes(data)
        plan = accepted(lambda: Plan.load(path), PlanError)
        if plan is not None:
            plan.save(path)
            assert Plan.load(path) == plan and 1 <= plan.size <= 2**20


@pytest.fixture(scope="module")
def traced() -> dict[str, Any]:
    """The plan of a small model, as its file has it."""
    body: dict[str, Any] = json.loads(trace(None).plan.text())
    return body


def trace(plan: Plan | None) -> Any:
    torch.compiler.reset()  # Dynamo gives up after some hundreds of traces of one frame
    model, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)), torch.zeros(4, 8)
    return autoshard.trace(model, (x,), mesh={"tp": 2}, plan=plan)


def test_plan_that_is_obeyed(traced: dict[str, Any]) -> None:
    """What reads as a plan is obeyed, or refused by name: its states are exchanged at random."""
    states = st.sampled_from(("I", "R", "P", "S(0)", "S(1)", "S(2)", "S(7)"))
    strategies = st.builds("{}, {}, {} -> {}".format, states, states, states, states)

    @tried(st.data(), few=10)
    def read(data: st.DataObject) -> None:
        body = json.loads(json.dumps(traced))
        (graph,) = body["graphs"].values()
        for entries, drawn in (
            (body["parameters"], states),
            (graph["nodes"], strategies),
            (graph["copies"], states),
        ):
            for name in data.draw(
                st.lists(st.sampled_from(sorted(entries) or ["none"]), max_size=2)
            ):
                entries[name] = data.draw(drawn)
        with Folder() as folder:
            (folder / "plan.json").write_bytes(json_bytes(body))
            plan = accepted(lambda: Plan.load(folder / "plan.json"), PlanError)
        if plan is not None:
            program = accepted(lambda: trace(plan))
            assert program is None or program.plan.parameters == plan.parameters

    read()


CLUSTER = {
    "name": "two-of-mine",
    "devices_per_node": 2,
    "memory": {"gigabytes": 1, "gigabytes_per_second": 100.0},
    "tera_flops": {"float8": 2, "half": 2, "float32": 1, "float64": 1},
    "inside": {"microseconds": 1, "gigabytes_per_second": 10},
    "between": {"microseconds": 0, "gigabytes_per_second": 1},
    "efficiency": {"compute": 0.5},
}


@pytest.mark.parametrize("suffix", [".json", ".yaml"])
def test_cluster_file(suffix: str) -> None:
    @tried(damaged_json(CLUSTER))
    def read(data: bytes) -> None:
        with Folder() as folder:
            path = folder / f"mine{suffix}"
            path.write_bytes(data)
            found = accepted(lambda: cluster(str(path)), ConfigError)
        if found is not None:
            link, device = found.link(4, 2), found.device
            figures = (link.bandwidth, device.memory_bandwidth, *device.flops.values())
            assert all(0 < figure < math.inf for figure in figures) and link.latency >= 0
            assert found.per_node >= 1 and found.usable_bytes >= 0

    read()


WEIGHTS = {"weight": torch.arange(6.0).view(3, 2), "bias": torch.ones(3)}
SAVED = save(WEIGHTS)
HEADER = json.loads(SAVED[8 : 8 + int.from_bytes(SAVED[:8], "little")])


def with_header(header: Any, data: bytes) -> bytes:
    text = json_bytes(header)
    return len(text).to_bytes(8, "little") + text + data


TENSORS = st.one_of(
    damaged_bytes(SAVED),
    damaged(HEADER).map(lambda header: with_header(header, SAVED[-36:])),
    st.sampled_from(("F4", "F8_E8M0", "C64", "I8", "U64", "BOOL", "F64")).map(
        lambda kind: with_header({**HEADER, "bias": {**HEADER["bias"], "dtype": kind}}, SAVED[-36:])
    ),
)


@tried(TENSORS)
def test_safetensors_file(data: bytes) -> None:
    with Folder() as folder:
        (folder / "model.safetensors").write_bytes(data)
        for strict in (True, False):
            model = nn.Linear(2, 3)
            accepted(lambda m=model, s=strict: autoshard.load_safetensors(m, folder, strict=s))


INDEX = {
    "metadata": {"total_size": 36},
    "weight_map": {"weight": "a.safetensors", "bias": "b.safetensors"},
}


@tried(damaged_json(INDEX))
def test_safetensors_index(data: bytes) -> None:
    with Folder() as folder:
        (folder / "model.safetensors.index.json").write_bytes(data)
        for file, name in (("a", "weight"), ("b", "bias")):
            (folder / f"{file}.safetensors").write_bytes(save({name: WEIGHTS[name]}))
        model = nn.Linear(2, 3)
        if accepted(lambda: autoshard.load_safetensors(model, folder)) is not None:
            assert torch.equal(model.weight, WEIGHTS["weight"])


class Strict(StandIn):
    """A TensorRT that is handed the engine it was given, and no other bytes."""

    class Runtime(StandIn.Runtime):
        def deserialize_cuda_engine(self, data: bytes) -> Any:
            assert data == b"whole", "bytes that are not those of config.json were deserialised"
            return self


CACHE = {"dtype": "float16", "shape": ["batch", 1, 16, 4]}
ENGINE = {
    "format": "autoshard-engine",
    "format_version": 1,
    "builder": {"module": "tensorrt", "version": "1", "compute_capabilities": ["8.9"]},
    "mesh": {"tp": 1},
    "dtype": "float16",
    "inputs": [
        {"name": "ids", "dtype": "int64", "shape": ["batch", "sequence"], "role": "input"},
        {"name": "past", "dtype": "int32", "shape": ["batch"], "role": "lengths"},
        {"name": "key_0", "role": "key_cache", **CACHE},
    ],
    "outputs": [
        {"name": "o", "dtype": "float16", "shape": ["batch", "sequence", 9], "role": "output"},
        {"name": "key_0_out", "role": "key_cache", **CACHE},
    ],
    "profiles": [{n: {"minimum": 1, "optimum": 2, "maximum": 8} for n in ("batch", "sequence")}],
    "kv_cache": {"layers": 1, "max_length": 16},
    "ranks": [{"file": "rank0.engine", "sha256": hashlib.sha256(b"whole").hexdigest()}],
}


@pytest.fixture
def imported(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """TensorRT's place is taken; the names that loading an engine imports."""
    seen: list[str] = []

    def watched(name: str, *args: Any) -> Any:
        seen.append(name)
        return Strict if name in ("tensorrt", "tensorrt_rtx") else importlib.import_module(name)

    stand_in = type(sys)("importlib")
    stand_in.import_module = watched  # type: ignore[attr-defined]
    monkeypatch.setattr(loading, "importlib", stand_in)
    yield seen


def test_engine_directory(imported: list[str]) -> None:
    @tried(st.tuples(damaged_json(ENGINE), st.sampled_from((b"whole", b"whole!", b"", None))))
    def read(files: tuple[bytes, bytes | None]) -> None:
        with Folder() as folder:
            engines = folder / "engines"
            engines.mkdir()
            (folder / "outside").write_bytes(b"whole")
            (engines / "config.json").write_bytes(files[0])
            if files[1] is not None:
                (engines / "rank0.engine").write_bytes(files[1])
            found = accepted(lambda: load(engines))
            assert found is None or (isinstance(found, Engine) and files[1] == b"whole")

    read()
    assert set(imported) <= {"tensorrt", "tensorrt_rtx"}


LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "hidden_act": "silu",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "vocab_size": 16,
    "tie_word_embeddings": False,
    "auto_map": {"AutoConfig": "planted.Config", "AutoModelForCausalLM": "planted.Model"},
}
PLANTED = "raise SystemExit('code of the directory was run')"


@pytest.mark.filterwarnings("ignore")  # transformers and torch warn of what they were given
@tried(damaged_json(LLAMA), few=25)
def test_hugging_face_configuration(data: bytes) -> None:
    with Folder() as folder:
        (folder / "config.json").write_bytes(data)
        (folder / "planted.py").write_text(PLANTED)
        call = accepted(lambda: load_on_meta(str(folder), 1, 8, torch.float32), ConfigError)
        assert call is None or isinstance(call.model, nn.Module)


@pytest.fixture(scope="module")
def llama() -> bytes:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**{k: v for k, v in LLAMA.items() if k != "auto_map"}))
    return save({k: v.contiguous() for k, v in model.state_dict().items()})


@pytest.mark.filterwarnings("ignore")
def test_hugging_face_weights(llama: bytes) -> None:
    @tried(damaged_bytes(llama), few=10)
    def read(data: bytes) -> None:
        with Folder() as folder:
            (folder / "config.json").write_bytes(json_bytes(LLAMA))
            (folder / "planted.py").write_text(PLANTED)
            (folder / "model.safetensors").write_bytes(data)
            accepted(lambda: load_model(str(folder)))

    read()


@tried(st.tuples(st.sampled_from(Config.names()), values), few=100)
def test_options(option: tuple[str, Any]) -> None:
    accepted(lambda: Config.from_options(dict([option])), ConfigError)


SPEC = {
    "mesh": {"tp": 2},
    "dtype": "float16",
    "dynamic": {"batch": [1, 2, 4], "sequence": [1, 8, 64]},
    "max_length": 64,
    "hardware": "h100",
}


@tried(damaged(SPEC), few=100)
def test_options_of_an_export(body: Any) -> None:
    if isinstance(body, dict) and "mesh" in body and set(body) <= set(SPEC):
        spec = accepted(lambda: EngineSpec(**body))
        assert spec is None or (spec.tp >= 1 and all(e.minimum >= 1 for e in spec.extents.values()))


WORDS = st.one_of(
    st.text(),
    st.sampled_from([str(value) for value in HOSTILE if value != 10**400]),
    st.builds(
        lambda name, value: f"{name}={value}", st.sampled_from(("tp", "dp_shard")), st.text()
    ),
    st.sampled_from(("[" * 10**5, "x=" + "[" * 10**5, "a=" + "9" * 5000, "tp=" + "9" * 5000)),
)


@tried(WORDS, few=100)
def test_words_of_the_command_line(word: str) -> None:
    readers: tuple[Any, ...] = (
        *(arguments.mesh_sizes, arguments.named_value, arguments.positive, arguments.finite),
        *(arguments.world_size, arguments.batch_size, arguments.seed),
    )
    for read in readers:
        try:
            read(word)
        except argparse.ArgumentTypeError as error:
            assert len(str(error)) < 400
    accepted(lambda: arguments.options_and_entries("m:f", [("x", word)]), ConfigError)


@tried(st.one_of(st.text(), st.sampled_from([v for v in HOSTILE if isinstance(v, str)])))
def test_names_of_directories_to_write(name: str) -> None:
    with Folder() as folder:
        target = accepted(lambda: check_target(f"{folder}/{name}"), ExportError)
        assert target is None or target.is_absolute()
        assert not list(folder.iterdir())
