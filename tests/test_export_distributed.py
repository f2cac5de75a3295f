"""Export from a running sharded job: the files equal those of one process with the whole model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import autoshard
from autoshard.export import memory
from gloo_pool import GlooPool
from trtllm_oracle import make


def trained(name: str, rank: int, mesh: dict[str, int]) -> nn.Module:
    """A model after one step of the backend. Ranks start apart: rank 0's weights count."""
    model = make(name, seed=rank).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    compiled = torch.compile(
        model, backend="autoshard", options={"mesh": mesh, "inner": "aot_eager"}
    )
    ids = torch.arange(3, 19).view(2, 8)
    compiled(ids, labels=ids, use_cache=False).loss.backward()
    optimizer.step()
    assert any(isinstance(p, DTensor) for p in model.parameters())
    return compiled  # type: ignore[no-any-return]


def whole(name: str, model: nn.Module) -> Any:
    """The same model in one process."""
    plain = make(name)
    state = {
        key: value.full_tensor() if isinstance(value, DTensor) else value
        for key, value in autoshard.export.graph.unwrapped(model).state_dict().items()
    }
    plain.load_state_dict(state)
    return plain


class Counted(memory.Memory):
    """Remembers every Memory that was made."""

    made: list[memory.Memory] = []

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        Counted.made.append(self)


def export(name: str, folder: str, splits: list[tuple[int, int]]) -> list[list[str]]:
    """Export at each tp x pp, and as Hugging Face directory; rank 0 alone does the same from the
    gathered model. Returns the parameters each export had to gather."""
    import torch.distributed as dist

    from autoshard.export import hf_directory, trtllm_checkpoint

    rank = int(os.environ["RANK"])
    model = trained(name, rank, {"tp": 2})
    plain = whole(name, model)
    Counted.made = []
    for module in (hf_directory, trtllm_checkpoint):
        module.Memory = Counted  # type: ignore[attr-defined]
    try:
        for tp, pp in splits:
            options = {"tp": tp, "pp": pp, "dtype": "bfloat16"}
            autoshard.export.trtllm(model, Path(folder, f"job_{tp}_{pp}"), **options)
        autoshard.export.huggingface(model, Path(folder, "job_hf"), max_shard_bytes=5000)
    finally:
        for module in (hf_directory, trtllm_checkpoint):
            module.Memory = memory.Memory  # type: ignore[attr-defined]
    gathered = [one.gathered for one in Counted.made]
    if rank == 0:
        for tp, pp in splits:
            options = {"tp": tp, "pp": pp, "dtype": "bfloat16"}
            autoshard.export.trtllm(plain, Path(folder, f"one_{tp}_{pp}"), **options)
        autoshard.export.huggingface(plain, Path(folder, "one_hf"), max_shard_bytes=5000)
    dist.barrier()
    return gathered


def assert_same_files(folder: Path, what: str) -> None:
    job, one = folder / f"job_{what}", folder / f"one_{what}"
    names = sorted(path.name for path in one.iterdir())
    assert sorted(path.name for path in job.iterdir()) == names
    for name in names:
        assert (job / name).read_bytes() == (one / name).read_bytes(), name


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_job_of_two_writes_what_one_process_writes(
    name: str, gloo2: GlooPool, tmp_path: Path
) -> None:
    splits = [(2, 1), (4, 1), (1, 2)] if name == "llama" else [(2, 1), (1, 2)]
    gathered = gloo2(export, name, str(tmp_path), splits)
    for tp, pp in splits:
        assert_same_files(tmp_path, f"{tp}_{pp}")
    assert_same_files(tmp_path, "hf")
    assert gathered[0] == gathered[1]
    if name == "llama":
        # what each rank holds at tp=2 is what the file of its number needs
        same_mesh = gathered[0][0]
        assert not [n for n in same_mesh if "proj" in n], same_mesh


def fails_on_one_rank(folder: str) -> str:
    from autoshard.export.safetensors_file import SafetensorsFile

    rank = int(os.environ["RANK"])
    model = trained("llama", rank, {"tp": 2})
    write = SafetensorsFile.write

    def full(self: SafetensorsFile, name: str, *args: Any) -> None:
        if rank == 1 and "layers.1" in name:
            raise OSError("no space left")
        write(self, name, *args)

    SafetensorsFile.write = full  # type: ignore[method-assign]
    try:
        autoshard.export.trtllm(model, Path(folder) / "out", tp=2)
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
