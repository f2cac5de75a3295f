"""What was compiled before is found in the caches of AOTAutograd and Inductor: what an earlier
start left there, and what another rank compiles."""

from __future__ import annotations

import copy
import hashlib
import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from autoshard.cli import main
from autoshard.errors import ConfigError
from autoshard.runtime.agreement.compiled_once import Ahead
from gloo_pool import GlooPool

Found = tuple[dict[str, int], list[torch.Tensor]]


def compile_again(bucket_bytes: list[int | None]) -> list[Found]:
    """For each setting, from nothing but the disk: the counters of the caches, the gradients."""
    from torch._dynamo.utils import counters
    from torch._inductor.utils import fresh_cache

    torch.manual_seed(0)
    # the middle width is read sharded: a rule's own algorithm is in the graph too
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))
    ids = torch.arange(12)
    found = []
    with fresh_cache():
        for size in bucket_bytes:
            torch._dynamo.reset()
            counters.clear()
            own = copy.deepcopy(model)
            options = {"mesh": {"dp_shard": 2}, "planner": {"bucket_bytes": size}}
            logits = torch.compile(own, backend="autoshard", options=options)(ids)
            nn.functional.cross_entropy(logits, ids % 16).backward()
            gradients = [p.grad.full_tensor() for p in own.parameters()]
            found.append((dict(counters["aot_autograd"]), gradients))
    return found


@pytest.mark.slow
def test_warm_start(gloo2: GlooPool) -> None:
    for first, second, other in gloo2(compile_again, [None, None, 1]):
        assert first[0].get("autograd_cache_miss") == 1, first[0]
        assert second[0].get("autograd_cache_hit") == 1, second[0]
        # what the passes over AOTAutograd's graphs depend on is part of the key
        assert other[0].get("autograd_cache_miss") == 1, other[0]
        for one in (second, other):
            for got, want in zip(one[1], first[1], strict=True):
                torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)


def compile_together(folders: list[str]) -> tuple[dict[str, int], torch.Tensor, set[str]]:
    """From an empty cache in the rank's folder, at the same time: the counters of Inductor's, a
    gradient, and the names of what is in the folder: kernels are named by their code."""
    from torch._dynamo.utils import counters
    from torch._inductor.utils import clear_caches

    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))
    own = folders[int(os.environ["RANK"]) % len(folders)]
    with mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=own):
        clear_caches()
        call = torch.compile(model, backend="autoshard", options={"mesh": {"tp": 2}})
        call(torch.arange(12)).square().sum().backward()
    clear_caches()
    programs = {path.name for path in Path(own).rglob("*.py")}
    return dict(counters["inductor"]), model[0].weight.grad.full_tensor(), programs


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [1, 2])
def test_one_rank_compiles_and_the_other_loads(gloo2: GlooPool, tmp_path: Path, hosts: int) -> None:
    """Of one folder, and of two, as of hosts that have none in common."""
    folders = [str(tmp_path / f"{host}") for host in range(hosts)]
    found = gloo2(compile_together, folders)
    for name in ("fxgraph_cache_miss", "fxgraph_cache_hit"):  # of forward and of backward
        assert sum(counted.get(name, 0) for counted, _, _ in found) == 2, found
    assert found[0][2] == found[1][2], "the same code, with the same collectives, runs on both"
    assert torch.equal(found[0][1], found[1][1])


MODEL = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))
    return model, (torch.arange(12),)
"""


def job(folder: str, mesh: dict[str, int], source: str, caches: str) -> dict[str, Any]:
    """A job that is given the folder, on a host of its own: what it compiles, and a gradient beside
    serial's."""
    from torch._dynamo.utils import counters
    from torch._inductor.cpp_builder import CppBuilder
    from torch._inductor.cpu_vec_isa import pick_vec_isa
    from torch._inductor.utils import clear_caches

    torch._dynamo.reset()
    counters.clear()
    names: dict[str, Any] = {}
    exec(source, names)
    model, args = names["make"]()
    serial = copy.deepcopy(model)
    own, built = f"{caches}/{os.environ['RANK']}", mock.Mock()
    clear_caches()
    pick_vec_isa()  # builds a library to ask the processor
    with (
        mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=own),
        mock.patch.object(CppBuilder, "build", built),
    ):
        call = torch.compile(model, backend="autoshard", options={"mesh": mesh, "plan": folder})
        call(*args).square().sum().backward()
    clear_caches()
    serial(*args).square().sum().backward()
    error = (model[0].weight.grad.full_tensor() - serial[0].weight.grad).abs().max()
    return {"cache": dict(counters["inductor"]), "built": built.call_count, "error": error.item()}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["tp=2", "dp_shard=2,tp=2"])
def test_what_one_process_made_ahead_is_all_that_ranks_run(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mesh: str
) -> None:
    sizes = {name: int(size) for name, size in (axis.split("=") for axis in mesh.split(","))}
    (tmp_path / "ahead_model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    folder = str(tmp_path / "made")
    assert main(["compile", "ahead_model:make", "--mesh", mesh, "--out", folder]) == 0
    pool = request.getfixturevalue(f"gloo{2 ** len(sizes)}")
    for found in pool(job, folder, sizes, MODEL, str(tmp_path), pool_timeout=500):
        assert found["cache"].get("fxgraph_cache_hit") and not found["built"], found
        assert not found["cache"].get("fxgraph_cache_miss") and found["error"] < 1e-5, found


def test_what_was_made_ahead_is_read_of_ones_own_folder_and_for_the_same_job(
    tmp_path: Path,
) -> None:
    facts = {kind: [f"{kind} 1"] for kind in ("model", "options", "versions", "device")}
    made = {**facts, "graphs": ["a"], "hash": hashlib.sha256(b"code").hexdigest()}
    (tmp_path / "made.json").write_text(json.dumps(made))
    (tmp_path / "artifacts").write_bytes(b"code")
    for kind in facts:
        with pytest.warns(UserWarning, match=f"another job, and this one compiles: {kind}: other"):
            assert Ahead().load(tmp_path, {**facts, kind: ["other"]}) == {kind}
    with pytest.raises(ConfigError, match="artifacts cannot be loaded"):
        Ahead().load(tmp_path, facts)
    (tmp_path / "artifacts").write_bytes(b"core")
    with pytest.raises(ConfigError, match="artifacts: its 4 bytes are not those that were made"):
        Ahead().load(tmp_path, facts)
    (tmp_path / "artifacts").chmod(0o666)
    with pytest.raises(ConfigError, match="others than this user may write to .*artifacts"):
        Ahead().load(tmp_path, facts)
    (tmp_path / "made.json").write_text("{")
    with pytest.raises(ConfigError, match="made.json is not JSON"):
        Ahead().load(tmp_path, facts)
