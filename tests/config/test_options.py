"""Options are validated: what is unknown, wrong or unavailable is an error that says the remedy."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.device_mesh import init_device_mesh

from autoshard.cli.arguments import options_and_entries
from autoshard.config import Config, fields_of, nested
from autoshard.config.groups import KEYS, REMOVED
from autoshard.errors import AutoshardError, ConfigError


def test_defaults_need_no_options() -> None:
    config = Config.from_options(None)
    assert config == Config()
    assert (config.inner, config.outputs, config.strict) == ("inductor", "lazy", False)


def test_options_become_fields() -> None:
    config = Config.from_options(
        {"mesh": {"tp": 4}, "inner": "eager", "memory": {"budget": 1 << 30}}
    )
    assert config.mesh == {"tp": 4}
    assert (config.inner, config.memory_budget) == ("eager", 1 << 30)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.inner = "inductor"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "closest"),
    [
        ("msh", "'mesh'"),
        ("sequence_paralel", "options['planner']['sequence_parallel']"),
        ("mem_budget", "options['memory']['budget']"),
    ],
)
def test_unknown_option_names_the_closest(name: str, closest: str) -> None:
    said = re.escape(f"unknown autoshard option '{name}'. Did you mean {closest}?")
    with pytest.raises(ConfigError, match=said):
        Config.from_options({name: 1})


@pytest.mark.parametrize("name", [*REMOVED, *sorted(KEYS.keys() - {"batches"})])
def test_a_removed_option_says_that_it_was_and_what_to_do(name: str) -> None:
    said = f"option '{name}' was removed: .*(Leave it out|Say options|Write options)"
    with pytest.raises(ConfigError, match=said):
        Config.from_options({name: True})
    with pytest.raises(ConfigError, match=said):  # where other names are a model's own
        options_and_entries("LlamaConfig", [("zero", 2), (name, True)])


def test_unknown_option_like_no_other_lists_all() -> None:
    with pytest.raises(ConfigError, match="The options are mesh, zero, .*, strict"):
        Config.from_options({"qqqq": 1})


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("mesh", {"tensor": 2}, "dp_replicate, dp_shard, ep, cp, tp"),
        ("mesh", {"tp": 0}, "positive int"),
        ("mesh", {"tp": True}, "positive int"),
        ("mesh", {"tp": "2"}, "positive int"),
        ("mesh", 2, "a dict of axis name"),
        ("zero", 4, "1, 2, 3 or 'auto'"),
        ("zero", True, "1, 2, 3 or 'auto'"),
        ("planner.sequence_parallel", 1, "True or False"),
        ("inner", "induct", "'inductor', 'aot_eager', 'eager' or 'tensorrt'"),
        ("plan", 3, "the path of a saved one"),
        ("memory.budget", 0, "positive number of bytes"),
        ("memory.budget", 1.5, "positive number of bytes"),
        ("outputs", "gather", "'lazy', 'sharded', 'replicate' or 'dtensor'"),
        ("same_inputs.weights", None, "'broadcast' or 'trust'"),
        ("strict", "yes", "True or False"),
    ],
)
def test_wrong_value_says_what_is_allowed(option: str, value: Any, allowed: str) -> None:
    with pytest.raises(ConfigError) as caught:
        name, _, entry = option.partition(".")
        Config.from_options({name: {entry: value} if entry else value})
    assert f"autoshard option {option}={value!r} is not allowed" in str(caught.value)
    assert allowed in str(caught.value)


def test_config_error_is_a_value_error_and_ours() -> None:
    assert issubclass(ConfigError, ValueError) and issubclass(ConfigError, AutoshardError)


def test_data_parallel_axes() -> None:
    Config(mesh={"dp_replicate": 1, "dp_shard": 4, "tp": 2}, zero=2)


def test_device_mesh(world_of_four: None) -> None:
    mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=("dp_shard", "tp"))
    assert Config(mesh=mesh).mesh is mesh
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    assert Config(mesh=mesh).mesh is mesh


def test_device_mesh_with_other_names(world_of_four: None) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tp"))
    with pytest.raises(ConfigError, match="mesh=.*data.* is not allowed.*dp_shard"):
        Config(mesh=mesh)


def test_device_mesh_without_names(world_of_four: None) -> None:
    with pytest.raises(ConfigError, match="a DeviceMesh with dimensions of those names"):
        Config(mesh=init_device_mesh("cpu", (4,)))


def test_table_documents_every_option() -> None:
    rows = Config.table().splitlines()[2:]
    names = [row.split("`")[1] for row in rows]
    fields = {".".join(KEYS.get(f.name, (f.name,))) for f in dataclasses.fields(Config)}
    assert set(names) == fields and len(names) == len(fields)
    assert len(Config.names()) <= 16  # one more takes one away


def test_entries_on_the_command_line_are_joined() -> None:
    given = [("memory", 6000), ("memory.host", 7), ("memory", {"chunk_loss": True}), ("layers", 2)]
    options, others = options_and_entries("LlamaConfig", given)
    assert options == {"memory": {"budget": 6000, "host": 7, "chunk_loss": True}}
    assert others == {"layers": 2}


def test_an_entry_of_an_option() -> None:
    with pytest.raises(
        ConfigError, match="unknown entry 'budge' .*'memory'. Did you mean 'budget'"
    ):
        Config.from_options({"memory": {"budge": 1}})
    with pytest.raises(
        ConfigError, match="pipeline=4 is not allowed.*microbatches, schedule, virt"
    ):
        Config.from_options({"pipeline": 4})
    assert Config.from_options({"memory": 6000}) == Config(memory_budget=6000)
    given = {"mesh": {"pp": 2}, "memory": {"host": 7}, "pipeline": {"microbatches": 4}}
    assert nested(fields_of(given)) == given


def test_documented_table_is_the_current_one() -> None:
    text = (Path(__file__).parents[2] / "docs" / "options.md").read_text()
    assert text.endswith("\n" + Config.table() + "\n")
