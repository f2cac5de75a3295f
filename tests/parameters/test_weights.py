"""Safetensors into sharded, whole and meta models: the rank's own bytes, and the right values."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes

import autoshard
from autoshard.errors import AutoshardError
from autoshard.parameters.safetensors import initialise_buffers
from autoshard.verification.comparison import furthest
from joined_batch import Sizes, part
from live_storages import LiveStorages
from models import CASES
from side_by_side import difference, whole


class Counted:
    """safetensors' reader, and the bytes that were read through it."""

    def __init__(self, reader: Any, total: list[int]) -> None:
        self.reader, self.total = reader, total

    def __enter__(self) -> Counted:
        self.opened = self.reader.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.reader.__exit__(*error)

    def keys(self) -> list[str]:
        return list(self.opened.keys())

    def get_slice(self, name: str) -> Any:
        outer, inner = self, self.opened.get_slice(name)

        class Slice:
            get_shape, get_dtype = inner.get_shape, inner.get_dtype

            def __getitem__(self, index: Any) -> torch.Tensor:
                with _disable_current_modes():  # a view of the mapped file: nothing allocated
                    value: torch.Tensor = inner[index]
                outer.total[0] += value.nbytes
                return value

        return Slice()


def from_file(name: str, sizes: Sizes, source: str, target: str) -> dict[str, Any]:
    """A meta model, stored, loaded, trained a step, loaded again and saved, on one mesh."""
    import safetensors

    from autoshard.parameters import storage as storing
    from autoshard.runtime.mesh import init_mesh

    case = CASES[name]
    serial = case.make_model()
    with torch.device("meta"):
        model = case.make_model()
    mesh = init_mesh(sizes, "cpu")
    outer, inner = mesh.axis("dp_replicate"), mesh.axis("dp_shard")
    ranks, rank = outer.size * inner.size, outer.rank * inner.size + inner.rank
    batch = case.make_batch(0)
    options = {"mesh": sizes, "inner": "aot_eager"}
    total, live, result = [0], LiveStorages(), {}
    reader, store = safetensors.safe_open, storing.store

    def watched(*args: Any) -> Any:
        with live:
            return store(*args)

    try:
        storing.store = watched
        safetensors.safe_open = lambda *a, **k: Counted(reader(*a, **k), total)
        autoshard.shard(model, (), part(batch, ranks, rank), **options)
        with live:
            autoshard.load_safetensors(model, source)
    finally:
        storing.store, safetensors.safe_open = store, reader
        live.restore()
    local = {key: p.to_local() for key, p in model.named_parameters()}
    result["own"] = sum(p.nbytes for p in local.values())
    result["read"], result["peak"] = total[0], live.peak
    result["largest"] = max(p.nbytes for p in local.values())
    result["whole"] = sum(p.nbytes for p in serial.parameters())
    result["values"] = values(model, serial)
    compiled = torch.compile(model, backend="autoshard", options=options)
    loss = case.loss(compiled, part(batch, ranks, rank))
    loss.backward()
    expected = case.loss(serial, part(batch, ranks, rank))
    case.loss(serial, batch).backward()
    result["loss"] = float((loss - expected).detach().abs())
    wanted = dict(serial.named_parameters())
    result["gradient"] = furthest(
        difference(p.grad, wanted[key].grad, 1.0) for key, p in model.named_parameters()
    )
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    autoshard.load_safetensors(compiled, source)
    result["again"] = values(model, serial)
    autoshard.export.huggingface(compiled, target)
    return result


def values(model: nn.Module, serial: nn.Module) -> bool:
    wanted = serial.state_dict()
    return all(torch.equal(whole(v), wanted[key]) for key, v in model.state_dict().items())


def through_files(pool: Any, folder: Path, name: str, sizes: Sizes) -> list[dict[str, Any]]:
    """`from_file` on every rank, from several files; the saved directory holds the same."""
    source, target = folder / "source", folder / "target"
    serial = CASES[name].make_model()
    autoshard.export.huggingface(serial, source, max_shard_bytes=100_000)
    assert (source / "model.safetensors.index.json").exists()
    results = pool(from_file, name, sizes, str(source), str(target))
    for result in results:
        assert result["read"] == result["own"], "exactly the bytes of the rank's own parts"
        assert result["values"] and result["again"], result
        assert result["loss"] < 1e-5 and result["gradient"] < 1e-5, result
        # the shards, and at most one more, converted on its way: nothing is ever whole
        assert result["peak"] <= result["own"] + result["largest"] + 4096, result
    opened = type(serial).from_pretrained(target)
    for key, value in serial.state_dict().items():
        assert torch.equal(opened.state_dict()[key], value), key
    return results


def test_tensor_parallel(gloo2: Any, tmp_path: Path) -> None:
    for result in through_files(gloo2, tmp_path, "llama_uneven", {"tp": 2}):
        assert result["own"] < 0.55 * result["whole"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("llama_uneven", {"dp_shard": 2, "tp": 2}),
        ("llama_tied", {"dp_replicate": 2, "dp_shard": 2}),
        ("llama", {"dp_shard": 4}),
    ],
)
def test_other_meshes(gloo4: Any, tmp_path: Path, name: str, sizes: Sizes) -> None:
    ranks = sizes.get("dp_shard", 1) * sizes.get("tp", 1)
    for result in through_files(gloo4, tmp_path, name, sizes):
        assert result["own"] < 1.1 / ranks * result["whole"]


class Net(nn.Module):
    """A tied pair, a buffer in the state dict and one that is not."""

    def __init__(self, out: int = 3) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 3, bias=False), nn.Linear(4, out, bias=False)
        self.last.weight = self.first.weight if out == 3 else self.last.weight
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("scale", torch.tensor([2.0]), persistent=False)


def saved(model: nn.Module, folder: Path, **changes: Any) -> Path:
    state = {k: v.clone() for k, v in model.state_dict().items() if k != "last.weight"}
    state.update(changes)
    save_file({k: v for k, v in state.items() if v is not None}, folder / "net.safetensors")
    return folder / "net.safetensors"


def test_one_process_on_meta(tmp_path: Path) -> None:
    net = Net()
    file = saved(net, tmp_path)
    with torch.device("meta"):
        model = Net()
    with pytest.raises(AutoshardError, match=r"1 buffers are on the meta device.*: scale\. .*lost"):
        autoshard.load_safetensors(model, file)
    model.register_buffer("scale", torch.tensor([2.0]), persistent=False)
    assert autoshard.load_safetensors(model, tmp_path) == ([], [])  # a directory without an index
    assert model.last.weight is model.first.weight
    assert isinstance(model.first.weight, nn.Parameter) and model.first.weight.requires_grad
    for key, value in net.state_dict().items():
        assert torch.equal(model.state_dict()[key], value), key


def test_names_that_one_side_lacks(tmp_path: Path) -> None:
    net = Net()
    before = copy.deepcopy(net.state_dict())
    changes = {"norm.bias": None, "more": torch.ones(1), "norm.weight": torch.full((3,), 7.0)}
    file = saved(net, tmp_path, **changes)
    with pytest.raises(AutoshardError) as caught:
        autoshard.load_safetensors(net, file)
    assert "1 names of the model are not in it: norm.bias" in str(caught.value)
    assert "1 of its names are not in the model: more" in str(caught.value)
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items()), "nothing written"
    assert autoshard.load_safetensors(net, file, strict=False) == (["norm.bias"], ["more"])
    assert net.norm.weight.tolist() == [7.0] * 3
    with pytest.raises(AutoshardError, match="neither a safetensors file nor a directory"):
        autoshard.load_safetensors(net, tmp_path / "none")


def test_shapes_and_dtypes(tmp_path: Path) -> None:
    net = Net()
    file = saved(net, tmp_path, **{"norm.weight": torch.ones(5), "norm.bias": torch.ones(3)})
    with pytest.raises(AutoshardError) as caught:
        autoshard.load_safetensors(net, file)
    text = str(caught.value)
    assert f"norm.weight has shape (5,) in {file}, and (3,) in the model" in text
    assert not net.norm.bias.any(), "nothing is written before every shape is checked"
    half = Net().to(torch.bfloat16)
    autoshard.load_safetensors(net, saved(half, tmp_path))
    assert net.first.weight.dtype == torch.float32
    assert torch.equal(net.first.weight, half.first.weight.float())


def test_rotary_frequencies_of_a_meta_model() -> None:
    serial = CASES["llama"].make_model()
    with torch.device("meta"):
        model = CASES["llama"].make_model()
    initialise_buffers(model, "cpu")
    wanted = dict(serial.named_buffers())
    assert wanted, "the model has buffers to lose"
    for name, buffer in model.named_buffers():
        assert not buffer.is_meta and torch.equal(buffer, wanted[name]), name
    assert all(p.is_meta for p in model.parameters())


def test_saving_is_the_export(tmp_path: Path) -> None:
    autoshard.export.huggingface(Net(), tmp_path / "out")
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == set(Net().state_dict()) - {
        "last.weight"
    }
    assert not isinstance(Net().first.weight, DTensor)
