"""Engine directories: complete or absent, from one process; their configuration."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autoshard
import engine_cases as cases
from autoshard.cli import main
from autoshard.export import ExportError
from autoshard.export.rank_graph.files import digest
from autoshard.runtime.engine import read_config

trt = pytest.importorskip("tensorrt_rtx")


class Mlp(nn.Module):
    """Enough for engines of two ranks with one all-reduce."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(1024, 4096), nn.Linear(4096, 1024)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


class Unknown(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.special.bessel_j0(x)


X = torch.zeros(2, 8, 1024)


def export(out: Path, model: nn.Module | None = None, **options: Any) -> Path:
    given = {"mesh": {"tp": 2}, "dynamic": {"batch": (1, 2, 4)}, **options}
    return autoshard.export.tensorrt(model or Mlp(), out, example=((X,), {}), **given)


def test_a_directory_says_what_it_holds(tmp_path: Path) -> None:
    model, out = Mlp(), tmp_path / "engines"
    seen: list[tuple[str, int, int]] = []
    assert export(out, model, compute_capability="8.9", progress=lambda *a: seen.append(a)) == out
    assert sorted(p.name for p in tmp_path.iterdir()) == ["engines"]
    config = read_config(out)
    assert sorted(p.name for p in out.iterdir()) == ["config.json", "rank0.engine", "rank1.engine"]
    assert (config["format"], config["format_version"]) == ("autoshard-engine", 1)
    assert config["builder"] == {
        "module": "tensorrt_rtx",
        "version": trt.__version__,
        "compute_capabilities": ["8.9"],
    }
    assert (config["mesh"], config["dtype"]) == ({"tp": 2}, "float16")
    assert config["kv_cache"] is None
    port = {"name": "x", "dtype": "float16", "shape": ["batch", 8, 1024], "role": "input"}
    assert config["inputs"] == [port]
    bounds = {"minimum": 1, "optimum": 2, "maximum": 4}
    assert config["profiles"] == [{"batch": bounds}]
    for rank, entry in enumerate(config["ranks"]):
        data = (out / entry["file"]).read_bytes()
        assert entry["sha256"] == hashlib.sha256(data).hexdigest()
        weight = entry["weights"]["up.weight"]
        part = model.up.weight.detach().half().chunk(2, int(weight["state"][2]))[rank]
        assert weight["sha256"] == digest(part) and weight["shape"] == list(part.shape)
    steps = [(0, "planning"), (0, "graph of the first rank")]
    for rank in range(2):
        file = f"rank{rank}.engine"
        steps += [(rank, f"making rank {rank}"), (rank, f"writing {file}"), (rank + 1, file)]
    assert seen == [(what, done, 2) for done, what in steps]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"compute_capability": "7.5"}, "7.5 has no collectives inside engines"),
        ({"compute_capability": "9.0"}, "builds no engine for compute capability 9.0.*SM89"),
        ({"model": Unknown()}, r"for aten\.special_bessel_j0\S* .*test_trt_export.py:\d\d"),
        ({"builder": "no_such_builder"}, "no no_such_builder is installed"),
    ],
)
def test_what_cannot_be_built_leaves_nothing(
    options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ExportError, match=said):
        export(tmp_path / "engines", **options)
    assert not list(tmp_path.iterdir())


def test_compute_capability_7_5_serves_one_rank(tmp_path: Path) -> None:
    export(tmp_path / "engines", mesh={"tp": 1}, compute_capability="7.5")
    assert (tmp_path / "engines" / "rank0.engine").stat().st_size > 2 * 8 * 2**20


@pytest.mark.slow
def test_the_benchmark_of_engines_measures_each_step() -> None:
    from export import measure

    found = measure(layers=1, width=128, vocab=256, tp=2, dtype=torch.float16)
    steps = [row["step"] for row in found["steps"]]
    assert steps == ["plan", "graph", "weights", "convert", "build"]
    assert found["weight_bytes"] == 2 * found["parameters"] > 0.49 * found["model_bytes"] / 2
    assert found["engine_bytes"] > found["weight_bytes"]


@pytest.mark.slow
def test_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a_decoder.py").write_text(
        "from engine_cases import make\n\n"
        "def tiny():\n    return make('llama', num_hidden_layers=1)\n"
    )
    monkeypatch.chdir(tmp_path)
    sizes = ["--batch", "2", "--sequence", "16", "--max-length", "32"]
    wanted = ["--mesh", "tp=2", "--dtype", "bfloat16", "--compute-capability", "8.0", "12.0"]
    assert main(["export", "tensorrt", "a_decoder:tiny", "out", *wanted, *sizes]) == 0
    said = capsys.readouterr()
    assert "2 ranks of bfloat16" in said.out and "[2/2] rank1.engine" in said.err
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["kv_cache"]["max_length"] == 32
    assert config["kv_cache"]["heads_per_rank"] == [2]
    assert main(["export", "tensorrt", "a_decoder:tiny", "out"]) == 1
    assert "exists" in capsys.readouterr().err
    assert cases.SIZES["num_key_value_heads"] == 4
