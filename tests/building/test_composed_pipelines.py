"""Pipelines beside other axes on processes: training, accumulation, checkpoints, errors."""

from __future__ import annotations

import contextlib
import tempfile
from typing import Any

import pytest
import torch

from autoshard.verification.comparison import furthest
from joined_batch import Sizes, part
from models import CASES
from pipelined import batch, clipped_step, differing, evaluated, made, moved, optimizers_of, read
from side_by_side import TOLERANCE, Pair, difference


def train(name: str, sizes: Sizes, micro: int, options: dict[str, Any]) -> dict[str, Any]:
    """Three steps of `micro` backwards each, all but the last in `no_sync`, with clipping, then an
    evaluation, beside the serial model on the batches of all data-parallel ranks."""
    import autoshard
    from autoshard.runtime.mesh import data_coordinate, init_mesh

    mesh = init_mesh(sizes, "cpu")
    ranks, own, case = mesh.batches, data_coordinate(mesh), CASES[name]
    pair = Pair(made(name), mesh=sizes, **{"inner": "eager", **options})
    optimizers = optimizers_of(pair)
    norm = 0.0
    for step in range(3):
        for i in range(micro):
            parts = [part(batch(name, micro * step + i), ranks, k) for k in range(ranks)]
            wants = [case.loss(pair.serial, given) for given in parts]
            # ranks scale as they like, but those whose rows meet
            scales = [1 if "ep" in sizes else k + 1 for k in range(ranks)]
            weighed = [want * scale for want, scale in zip(wants, scales)]
            (torch.stack(weighed).sum() / (ranks * micro)).backward()
            early = i + 1 < micro
            with autoshard.no_sync(pair.model) if early else contextlib.nullcontext():
                got = case.loss(pair.compiled, parts[own])
                (got * scales[own] / micro).backward()
            pair.loss = furthest([pair.loss, difference(got, wants[own])])
        pair.compare_gradients()
        norm = furthest([norm, clipped_step(pair, optimizers)])
    return evaluated(pair, case, part(batch(name, 9), ranks, own), norm)


def check(results: list[dict[str, Any]], copies: int = 1) -> None:
    """copies: of each parameter in the mesh."""
    for result in results:
        assert all(result[kind] < TOLERANCE for kind in ("loss", "gradient", "norm")), result
    assert sum(result["held"] for result in results) == copies * results[0]["all"]


@pytest.mark.parametrize(
    ("name", "sizes", "micro"),
    [
        pytest.param("gpt2", {"pp": 2, "dp_shard": 2}, 1, marks=pytest.mark.slow),
        pytest.param("llama", {"pp": 2, "dp_replicate": 2}, 1, marks=pytest.mark.slow),
        pytest.param("gpt2", {"pp": 2, "dp_replicate": 2}, 2, marks=pytest.mark.slow),
        pytest.param("llama", {"pp": 2, "dp_shard": 2}, 2, marks=pytest.mark.slow),
    ],
)
def test_data_parallel_stages(gloo4: Any, name: str, sizes: Sizes, micro: int) -> None:
    check(gloo4(train, name, sizes, micro, {}), sizes.get("dp_replicate", 1))


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("llama", {"pp": 2, "tp": 2}),
        pytest.param("gpt2", {"pp": 2, "tp": 2}, marks=pytest.mark.slow),
        pytest.param("llama", {"pp": 2, "cp": 2}, marks=pytest.mark.slow),
        pytest.param("gpt2", {"pp": 2, "cp": 2}, marks=pytest.mark.slow),
        pytest.param("mixtral", {"pp": 2, "ep": 2}, marks=pytest.mark.slow),
    ],
)
def test_axes_inside_of_stages(gloo4: Any, name: str, sizes: Sizes) -> None:
    results = gloo4(train, name, sizes, 1, {})
    for result in results:
        assert all(result[kind] < TOLERANCE for kind in ("loss", "gradient", "norm")), result
    held = sum(result["held"] for result in results)
    assert held < 1.1 * results[0]["all"]  # norms, which tp and cp keep whole, twice


def all_tokens(sizes: Sizes) -> dict[str, Any]:
    """A mean over the tokens of all ranks, of which the first has none that counts."""
    import torch.distributed as dist

    from autoshard.runtime.mesh import data_coordinate, init_mesh

    mesh, case, given = init_mesh(sizes, "cpu"), CASES["llama"], batch("llama", 0)
    given["labels"][: len(given["labels"]) // mesh.batches] = -100
    options = {"mesh": sizes, "inner": "eager", "gradients": {"loss_tokens": "global"}}
    pair = Pair(made("llama"), **options)
    want = case.loss(pair.serial, given)
    want.backward()
    got = case.loss(pair.compiled, part(given, mesh.batches, data_coordinate(mesh)))
    got.backward()
    pair.compare_gradients()
    mean = got.detach().clone()
    dist.all_reduce(mean)
    return {"loss": difference(mean / dist.get_world_size(), want), "gradient": pair.gradient}


@pytest.mark.slow
def test_a_mean_over_the_tokens_of_all_ranks(gloo4: Any) -> None:
    for result in gloo4(all_tokens, {"pp": 2, "dp_shard": 2}):
        assert furthest(result.values()) < TOLERANCE, result


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"pp": 2, "dp_shard": 2}, {"dp_shard": 4}),
        ({"dp_shard": 4}, {"pp": 2, "dp_shard": 2}),
        ({"pp": 2, "cp": 2}, {"pp": 2, "tp": 2}),
    ],
)
def test_checkpoints_of_sharded_stages(gloo4: Any, first: Sizes, second: Sizes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert furthest(gloo4(moved, folder, first, second)) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes", [{"pp": 2, "dp_shard": 2}, {"pp": 2, "tp": 2}, {"pp": 2, "cp": 2}]
)
def test_what_eager_code_reads_and_writes_of_shards(gloo4: Any, sizes: Sizes) -> None:
    for found in gloo4(read, "llama", sizes):
        assert found["state"] == 0.0 and found["sum"] < TOLERANCE and found["write"] == 0.0


@pytest.mark.parametrize(
    ("sizes", "axis", "microbatches"),
    [
        ({"pp": 2, "dp_shard": 2}, "dp_shard", [2, 1, 2, 1]),
        ({"pp": 2, "dp_shard": 2}, "pp", [2, 2, 1, 1]),
        ({"pp": 2, "tp": 2}, "tp", [2, 1, 2, 1]),
    ],
)
def test_ranks_of_each_axis_that_differ_all_raise(
    gloo4: Any, sizes: Sizes, axis: str, microbatches: list[int]
) -> None:
    for text in gloo4(differing, sizes, [{"pipeline": {"microbatches": n}} for n in microbatches]):
        assert f"the ranks of axis {axis} disagree" in text and "microbatches" in text


def test_one_rank_whose_batch_does_not_divide_is_an_error_on_all(gloo4: Any) -> None:
    given = [{"pipeline": {"microbatches": n}} for n in (3, 2, 2, 2)]
    for text in gloo4(differing, {"pp": 2, "dp_replicate": 2}, given):
        assert "does not divide into microbatches=3" in text
