"""Export from a running sharded job: every file holds what the gathered parameters say."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DTensor

import autoshard
from autoshard.export.serial_graph import WeightSource, unwrapped
from autoshard.runtime.mesh import init_mesh
from autoshard.runtime.parameters.shard import shard_parameters
from gloo_pool import GlooPool
from test_export_trtllm import CASES, REFERENCES
from trtllm_oracle import make

pytestmark = pytest.mark.slow

IDS = torch.arange(3, 19).view(2, 8)


def trained(name: str, rank: int, mesh: dict[str, int]) -> nn.Module:
    """A model after one step of the backend. Ranks start apart: rank 0's weights count."""
    model = make(name, seed=rank).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    compiled = torch.compile(
        model, backend="autoshard", options={"mesh": mesh, "inner": "aot_eager"}
    )
    compiled(IDS, labels=IDS, use_cache=False).loss.backward()
    optimizer.step()
    assert any(isinstance(p, DTensor) for p in model.parameters())
    return compiled  # type: ignore[no-any-return]


def sharded(name: str, rank: int) -> nn.Module:
    """A model whose parameters are stored in states no planner chose: rows, columns, whole."""
    return shards(make(name, seed=rank).eval())


def shards(model: nn.Module) -> nn.Module:
    states = {}
    for i, parameter in enumerate(model.parameters()):
        states[parameter] = {"tp": f"S({i % 3})" if i % 3 < parameter.dim() else "I"}
    shard_parameters(states, init_mesh({"tp": 2}, "cpu"), broadcast=True)
    return model


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """The gathered state dict."""
    return {
        key: (value.full_tensor() if isinstance(value, DTensor) else value).detach()
        for key, value in unwrapped(model).state_dict().items()
    }


class Counted(WeightSource):
    """Remembers every source that was made."""

    made: list[WeightSource] = []

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        Counted.made.append(self)


def export(name: str, folder: str, splits: list[tuple[int, int]]) -> tuple[list[list[str]], float]:
    """Export at each tp x pp, and as Hugging Face directory; save the gathered values beside.
    Returns the parameters each export had to gather, and the loss of the model after them."""
    from autoshard.export import to_huggingface as hf_directory
    from autoshard.export.to_trtllm import checkpoint as trtllm_checkpoint

    rank = int(os.environ["RANK"])
    model = trained(name, rank, {"tp": 2}) if name == "llama" else sharded(name, rank)
    values = whole(model)
    if rank == 0:
        torch.save(values, Path(folder, "values.pt"))
    Counted.made = []
    modules: list[Any] = [hf_directory, trtllm_checkpoint]
    for module in modules:
        module.WeightSource = Counted
    try:
        for tp, pp in splits:
            out = Path(folder, f"{tp}_{pp}")
            autoshard.export.trtllm(model, out, mesh={"tp": tp, "pp": pp}, dtype="bfloat16")
        autoshard.export.huggingface(model, Path(folder, "hf"), max_shard_bytes=5000)
    finally:
        for module in modules:
            module.WeightSource = WeightSource
    with torch.no_grad():
        after = model(IDS, labels=IDS, use_cache=False).loss.item() if name == "llama" else 0.0
    return [one.gathered for one in Counted.made], after


def assert_file(path: Path, wanted: dict[str, torch.Tensor]) -> None:
    found = load_file(path)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype, (path.name, name)
        assert torch.equal(found[name], value), (path.name, name)


@pytest.mark.parametrize(
    ("name", "splits"),
    [("llama", [(2, 1), (4, 1), (1, 2)]), ("gpt2", [(2, 1)]), ("mixtral", [(1, 2)])],
)
def test_job_of_two_writes_what_its_parameters_are(
    name: str, splits: list[tuple[int, int]], gloo2: GlooPool, tmp_path: Path
) -> None:
    (gathered, loss), (others, _) = gloo2(export, name, str(tmp_path), splits)
    plain = make(name).eval()
    plain.load_state_dict(torch.load(tmp_path / "values.pt"))
    for tp, pp in splits:
        alone = tmp_path / f"alone_{tp}_{pp}"
        autoshard.export.trtllm(plain, alone, mesh={"tp": tp, "pp": pp}, dtype="bfloat16")
        for file in alone.iterdir():
            assert (tmp_path / f"{tp}_{pp}" / file.name).read_bytes() == file.read_bytes()
    plain.save_pretrained(tmp_path / "theirs")  # in the form of published checkpoints
    values = load_file(tmp_path / "theirs" / "model.safetensors")
    files = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())["weight_map"]
    for file in set(files.values()):
        assert_file(tmp_path / "hf" / file, {n: values[n] for n in files if files[n] == file})
    assert files.keys() == values.keys()
    assert gathered == others
    if name == "llama":
        # what each rank holds at tp=2 is what the file of its number needs
        assert not [n for n in gathered[0] if "proj" in n], gathered[0]
        assert plain(IDS, labels=IDS).loss.item() == pytest.approx(loss, rel=1e-5)


def export_references(folder: str) -> None:
    import transformers

    for case in CASES:
        source, tp, pp = re.match(r"(.*)_tp(\d+)_pp(\d+)$", case).groups()  # type: ignore[union-attr]
        path = REFERENCES / f"{source}_hf"
        model = shards(transformers.AutoModelForCausalLM.from_pretrained(path))
        mesh = {"tp": int(tp), "pp": int(pp)}
        autoshard.export.trtllm(model, Path(folder, case), mesh=mesh)


@pytest.mark.skipif(not REFERENCES.exists(), reason="no reference checkpoints beside the checkout")
def test_references_from_a_job_of_two(gloo2: GlooPool, tmp_path: Path) -> None:
    gloo2(export_references, str(tmp_path))
    for case in CASES:
        for path in (REFERENCES / case).iterdir():
            mine = tmp_path / case / path.name
            if path.suffix == ".json":
                assert json.loads(mine.read_text()) == json.loads(path.read_text())
            else:
                assert_file(mine, load_file(path))


def fails_on_one_rank(folder: str) -> str:
    from autoshard.export.destination import SafetensorsFile

    rank = int(os.environ["RANK"])
    model = sharded("llama", rank)
    write = SafetensorsFile.write

    def full(self: SafetensorsFile, name: str, *args: Any) -> None:
        if rank == 1 and "layers.1" in name:
            raise OSError("no space left")
        write(self, name, *args)

    SafetensorsFile.write = full  # type: ignore[method-assign]
    try:
        autoshard.export.trtllm(model, Path(folder) / "out", mesh={"tp": 2})
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        SafetensorsFile.write = write  # type: ignore[method-assign]
    return "no error"


def test_one_failing_rank_leaves_nothing(gloo2: GlooPool, tmp_path: Path) -> None:
    first, second = gloo2(fails_on_one_rank, str(tmp_path))
    assert second == "OSError: no space left"
    assert first.startswith("ExportError: rank 1 failed: OSError: no space left")
    assert list(tmp_path.iterdir()) == []
