"""`autoshard plan`: models by directory, class and factory, clusters by name and file, output."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import autoshard
from autoshard.cli import main
from autoshard.cli.arguments import ProgressLine
from autoshard.mesh_search import search
from autoshard.planning.cost.clusters import cluster

FACTORY = """
import torch

def net(batch=1, sequence=1):
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
    return model, (torch.zeros(batch, sequence, 64, dtype=torch.bfloat16),)

def number():
    return 3
"""

FILE = {
    "name": "two-of-mine",
    "devices_per_node": 2,
    "memory": {"gigabytes": 1, "gigabytes_per_second": 100},
    "tera_flops": {"float8": 2, "half": 2, "float32": 1, "float64": 1},
    "inside": {"microseconds": 1, "gigabytes_per_second": 10},
    "between": {"microseconds": 5, "gigabytes_per_second": 1},
    "efficiency": {"compute": 0.5},
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_nets.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_factory_on_a_cluster_of_ones_own(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "mine.json").write_text(json.dumps(FILE))
    asked = ["plan", "my_nets:net", "--world", "4", "--hardware", "mine.json"]
    assert main([*asked, "--batch", "8", "--sequence", "16", "--out", "plan.json"]) == 0
    said = capsys.readouterr()
    assert "4 x two-of-mine (2 a node, 1 GB each)" in said.out
    assert ", the next of other axes, does " in said.out
    assert "* recommended: " in said.out and "options={'plan': 'plan.json'}" in said.out
    for mesh in ("dp_replicate=4", "dp_replicate=2 dp_shard=2", "dp_shard=4", "dp_shard=2 tp=2"):
        assert f"  {mesh}  " in said.out, mesh
    assert "tp=4" not in said.out  # a node has two devices
    assert said.err.splitlines() == [
        "[1/20] tracing",
        "[2/20] capturing",
        "[3/20] planning tp=1",
        "[4/20] planning cp=2",
        "[5/20] planning tp=2",
        "[6/20] planning cp=2 x tp=2",
        "[7/20] planning cp=2 x tp=1",
        "[20/20] comparing",
    ]
    saved = autoshard.Plan.load("plan.json")
    assert saved.mesh and saved.parameters.keys() == {
        f"{i}.{k}" for i in (0, 2) for k in ("weight", "bias")
    }

    assert main([*asked, "--json", "--mesh", "dp_shard=2,tp=2", "--recipe", "master"]) == 0
    body = json.loads(capsys.readouterr().out)
    (row,) = body["rows"]
    assert body["recommended"] == row["mesh"] == {"dp_shard": 2, "tp": 2} and row["fits"]
    held = row["memory_bytes"]
    assert held["total"] == sum(v for k, v in held.items() if k != "total")
    assert held["optimizer"] == 3 * held["gradients"] == 6 * held["parameters"]
    assert row["seconds"]["traffic"].keys() == {"dp_shard", "tp"}

    asked = [*asked[:6], "--sequence", "16", "--mesh", "dp_shard=4", "--global-batch", "16"]
    assert main(asked) == 0
    said = capsys.readouterr()
    assert "16 x 16 tokens a step" in said.out and ", micro-batches of 4" in said.out


def test_a_directory_and_a_class_are_the_same_model(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import transformers

    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "vocab_size": 96,
    }
    transformers.LlamaConfig(**sizes).save_pretrained(here / "tiny")
    more = [part for key, size in sizes.items() for part in ("--option", f"{key}={size}")]
    found = []
    for model in (["tiny"], ["LlamaConfig", *more]):
        torch.compiler.reset()
        asked = ["plan", *model, "--world", "2", "--hardware", "cpu", "--sequence", "32", "--json"]
        assert main(asked) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] == found[1] and len(found[0]["rows"]) == 4  # tp, cp, and two of data
    small = ["--sequence", "32", "--option", "memory.budget=100_000"]
    assert main(["plan", "tiny", "--world", "2", *small]) == 0
    said = capsys.readouterr().out
    assert "x does not fit:" in said and "nothing fits. Use more ranks" in said


@pytest.mark.parametrize(
    "asked, why",
    [
        (["my_nets:nothing"], "'my_nets:nothing' cannot be found"),
        (["my_nets:number"], "my_nets:number returned a int"),
        (["nowhere"], "no directory with a config.json, no module:factory"),
        (["my_nets:net", "--mesh", "tp=3"], "the mesh tp 3 has 3 ranks, the world 2"),
        (["my_nets:net", "--mesh", "xp=2"], "unknown mesh axis 'xp'"),
        (["my_nets:net", "--hardware", "h10"], "Did you mean 'h100'"),
        (["my_nets:net", "--hardware", "none.json"], "No such file"),
        (["my_nets:net", "--optimizer", "lion"], "optimizer 'lion' is not known"),
        (["my_nets:net", "--batch", "2", "--global-batch", "8"], "--global-batch beside --batch"),
        (["my_nets:net", "--option", "zeroo=1"], "Did you mean 'zero'"),
        (["LlamaConfig", "--option", "hidden_siz=1"], "Did you mean 'hidden_size'?"),
        (["LlamaConfig"], "longer than max_position_embeddings=2048"),
    ],
)
def test_errors_name_the_remedy(
    here: Path, capsys: pytest.CaptureFixture[str], asked: list[str], why: str
) -> None:
    assert main(["plan", *asked, "--world", "2"]) == 2
    assert why in capsys.readouterr().err


def test_what_is_right_and_cannot_be(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--out", "p.json", "--option", "memory.budget=1_000"]
    assert main(["plan", "my_nets:net", "--world", "2", *asked]) == 1
    assert "no plan was written" in capsys.readouterr().err
    assert not (here / "p.json").exists()


def test_cluster_files(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import yaml

    (here / "mine.json").write_text(json.dumps(FILE))
    (here / "mine.yaml").write_text(yaml.safe_dump(FILE))
    read = cluster("mine.json")
    assert read == cluster("mine.yaml") and read.per_node == 2
    assert read.efficiency.compute == 0.5 and read.efficiency.links == 0.8
    assert read.between.bandwidth == 1e9 and read.device.peak(torch.bfloat16) == 2e12
    (here / "half.json").write_text(json.dumps({**FILE, "memory": {"gigabytes": 1}}))
    (here / "broken.json").write_text("{")
    for path, why in (("half.json", "gigabytes_per_second"), ("broken.json", "is not JSON")):
        with pytest.raises(autoshard.AutoshardError, match=why):
            cluster(path)

    def without(name: str, *args: Any) -> Any:
        if name == "yaml":
            raise ModuleNotFoundError("No module named 'yaml'")
        return real(name, *args)

    real = importlib.import_module
    monkeypatch.setattr(importlib, "import_module", without)
    with pytest.raises(autoshard.AutoshardError, match=r"pip install 'autoshard\[yaml\]'"):
        cluster("mine.yaml")


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_is_one_line_on_a_terminal_and_a_few_in_a_pipe(
    terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    progress = ProgressLine()
    for done in range(1, 102):
        progress("weight", done, 101)
    said = capsys.readouterr().err
    assert said.endswith("[101/101] weight\n")
    assert said.count("\n") == (1 if terminal else 21)
    assert said.count("\r\x1b[K") == (101 if terminal else 0)


def llama(mesh: str, world: int, words: int, length: int) -> list[str]:
    """What plans a small Llama and saves the plan."""
    asked = ["plan", "LlamaConfig", "--world", str(world), "--mesh", mesh, "--out", "plan.json"]
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": words}
    for name, size in {**sizes, "max_position_embeddings": length}.items():
        asked += ["--option", f"{name}={size}"]
    return asked


def test_logits_are_withheld_where_nothing_fits_otherwise(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one trace of the model."""
    traces = mock.Mock(wraps=search.capture)
    monkeypatch.setattr(search, "capture", traces)
    asked = [*llama("cp=2", 2, 4096, 2048), "--sequence", "2048"]
    for budget, options in ((100_000_000, ""), (12_000_000, ", 'memory': {'chunk_loss': True}")):
        traces.reset_mock()
        assert main([*asked, "--option", f"memory.budget={budget}"]) == 0
        assert traces.call_count == 1
        said = capsys.readouterr().out
        assert f"options={{'plan': 'plan.json'{options}}}" in said
        assert ("losses by chunks of rows: cp=2" in said) == bool(options)


def test_the_plan_of_a_mesh_with_pp_holds_its_stages(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = llama("pp=2,tp=2", 4, 64, 16)
    assert (
        main([*asked, "--batch", "2", "--sequence", "16", "--option", "pipeline.schedule=zb1"]) == 0
    )
    assert "wrote plan.json: options={'plan': 'plan.json', 'pipeline': {'schedule': 'zb1'}}" in (
        capsys.readouterr().out
    )
    saved = autoshard.Plan.load("plan.json")
    assert saved.mesh == {"pp": 2, "tp": 2} and "S(0)" in saved.parameters.values()
    stages = saved.pipeline
    assert stages is not None and (stages.ranks, stages.schedule) == (2, "zb1")
    assert stages.microbatches == 2 and set(stages.homes.values()) == {0, 1}
