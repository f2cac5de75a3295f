"""`autoshard plan`: models by directory, class and factory, clusters by name and file, output."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import autoshard
from autoshard.cli.main import main
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


def test_a_factory_on_a_cluster_of_ones_own(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "mine.json").write_text(json.dumps(FILE))
    asked = ["plan", "my_nets:net", "--world", "4", "--hardware", "mine.json"]
    assert main([*asked, "--batch", "8", "--sequence", "16", "--out", "plan.json"]) == 0
    said = capsys.readouterr()
    assert "4 x two-of-mine (2 a node, 1 GB each)" in said.out
    assert "* recommended: " in said.out and 'options={"plan": "plan.json"}' in said.out
    for mesh in ("dp_replicate=4", "dp_replicate=2 dp_shard=2", "dp_shard=4", "dp_shard=2 tp=2"):
        assert f"  {mesh}  " in said.out, mesh
    assert "tp=4" not in said.out  # a node has two devices
    assert said.err.splitlines() == [
        "[1/4] tracing", "[2/4] capturing", "[3/4] planning tp=1", "[4/4] planning tp=2",
    ]
    saved = autoshard.Plan.load("plan.json")
    assert saved.mesh and saved.parameters.keys() == {f"{i}.{k}" for i in (0, 2) for k in
                                                      ("weight", "bias")}

    assert main([*asked, "--json", "--mesh", "dp_shard=2,tp=2", "--precision", "master"]) == 0
    body = json.loads(capsys.readouterr().out)
    (row,) = body["rows"]
    assert body["recommended"] == row["mesh"] == {"dp_shard": 2, "tp": 2} and row["fits"]
    held = row["memory_bytes"]
    assert held["total"] == sum(v for k, v in held.items() if k != "total")
    assert held["optimizer"] == 3 * held["gradients"] == 6 * held["parameters"]
    assert row["seconds"]["traffic"].keys() == {"dp_shard", "tp"}


def test_a_directory_and_a_class_are_the_same_model(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import transformers

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1,
             "num_attention_heads": 4, "vocab_size": 96}
    transformers.LlamaConfig(**sizes).save_pretrained(here / "tiny")
    more = [part for key, size in sizes.items() for part in ("--set", f"{key}={size}")]
    found = []
    for model in (["tiny"], ["LlamaConfig", *more]):
        torch.compiler.reset()
        asked = ["plan", *model, "--world", "2", "--hardware", "cpu", "--sequence", "32", "--json"]
        assert main(asked) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] == found[1] and len(found[0]["rows"]) == 3
    assert main(["plan", "tiny", "--world", "2", "--memory-gb", "0.0001", "--sequence", "32"]) == 0
    said = capsys.readouterr().out
    assert "x does not fit:" in said and "nothing fits. Use more ranks" in said


@pytest.mark.parametrize(
    "asked, why",
    [
        (["my_nets:nothing"], "'my_nets:nothing' cannot be found"),
        (["my_nets:number"], "my_nets:number returned a int"),
        (["nowhere"], "no directory with a config.json, no module:factory"),
        (["my_nets:net", "--mesh", "tp"], "'tp' is no mesh"),
        (["my_nets:net", "--mesh", "tp=3"], "the mesh tp 3 has 3 ranks, the world 2"),
        (["my_nets:net", "--mesh", "xp=2"], "unknown mesh axis 'xp'"),
        (["my_nets:net", "--hardware", "h10"], "Did you mean 'h100'"),
        (["my_nets:net", "--hardware", "none.json"], "No such file"),
        (["my_nets:net", "--batch", "0"], "--batch 0 is not positive"),
        (["my_nets:net", "--optimizer", "lion"], "optimizer 'lion' is not known"),
        (["my_nets:net", "--set", "a=1"], "--set is for configurations"),
        (["LlamaConfig", "--set", "hidden_siz=1"], "Did you mean 'hidden_size'?"),
        (["LlamaConfig", "--set", "depth"], "--set 'depth' is not key=value"),
        (["LlamaConfig"], "longer than max_position_embeddings=2048"),
        (["my_nets:net", "--out", "p.json", "--memory-gb", "1e-6"], "no plan was written"),
    ],
)
def test_errors_name_the_remedy(
    here: Path, capsys: pytest.CaptureFixture[str], asked: list[str], why: str
) -> None:
    assert main(["plan", *asked, "--world", "2"]) == 1
    assert why in capsys.readouterr().err
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


def test_a_bar_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    from autoshard.cli.plan import Bar

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    bar = Bar()
    bar("capturing", 1, 2)
    bar("done", 2, 2)
    said = capsys.readouterr().err
    assert "[###############---------------] capturing" in said and said.endswith("\r\x1b[K")
    assert "\n" not in said
