"""Data parallelism against the serial model on the joined batch: losses, gradients, parameters."""

from __future__ import annotations

from typing import Any

import pytest

from joined_batch import MATRIX, Sizes, check, train


@pytest.mark.parametrize(
    ("name", "micro", "sizes", "zero"),
    [
        ("llama", 3, {"dp_shard": 2}, 3),
        pytest.param("llama", 1, {"dp_replicate": 2}, 3, marks=pytest.mark.slow),
        ("gpt2", 1, {"dp_shard": 2}, 2),
        ("convnet", 1, {"dp_replicate": 2}, 3),
        ("convnet", 3, {"dp_shard": 2}, 3),
        ("convnet", 1, {"dp_shard": 2}, 1),
    ],
)
def test_five_steps_two_ranks(gloo2: Any, name: str, micro: int, sizes: Sizes, zero: int) -> None:
    results = gloo2(train, name, sizes, [micro] * 5, {"zero": zero})
    check(results, sizes.get("dp_shard", 1))


@pytest.mark.parametrize("sizes", [{"dp_replicate": 2}, {"dp_shard": 2}])
def test_gradients_that_are_one_tensor_are_not_stored_as_one(gloo2: Any, sizes: Sizes) -> None:
    """Accumulating and clipping write to each of them."""
    check(gloo2(train, "parallel", sizes, [3, 3], {}), 1 if "dp_replicate" in sizes else 2)


@pytest.mark.parametrize(
    ("name", "micro", "sizes"),
    [
        pytest.param("convnet", 3, {"dp_replicate": 2, "dp_shard": 2}, marks=pytest.mark.slow),
        pytest.param("llama", 1, {"dp_shard": 2, "tp": 2}, marks=pytest.mark.slow),
        pytest.param("mlp", 1, {"dp_replicate": 2, "tp": 2}, marks=pytest.mark.slow),
    ],
)
def test_five_steps_four_ranks(gloo4: Any, name: str, micro: int, sizes: Sizes) -> None:
    results = gloo4(train, name, sizes, [micro] * 5, {})
    check(results, sizes.get("dp_shard", 1) * sizes.get("tp", 1))


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"dp_shard": 2}, {"planner": {"bucket_bytes": 60_000}}),
        ({"dp_shard": 2}, {"planner": {"bucket_bytes": 60_000}, "inner": "inductor"}),
        ({"dp_replicate": 2}, {"planner": {"bucket_bytes": 60_000}, "inner": "inductor"}),
    ],
)
def test_several_buckets(gloo2: Any, sizes: Sizes, options: dict[str, Any]) -> None:
    """Three buckets or so, so that they overlap and one bucket's layout differs from another's."""
    results = gloo2(train, "mlp", sizes, [1] * 3, options)
    check(results, sizes.get("dp_shard", 1))


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "zero"), MATRIX)
@pytest.mark.parametrize("name", ["llama", "gpt2", "convnet"])
def test_matrix(gloo2: Any, gloo4: Any, name: str, sizes: Sizes, zero: int) -> None:
    """Steps of one batch, then steps of three, of which the early ones run in `no_sync`: two more
    programs where reductions wait, with which the others' steps are all of three."""
    pool = gloo4 if len(sizes) == 2 else gloo2
    deferred = zero == 1 or "dp_replicate" in sizes
    alone = name == "llama" or not deferred
    micro = (1, 1, 3, 3, 1) if alone else (3, 3, 3)
    results = pool(train, name, sizes, micro, {"zero": zero}, wait=True)
    split = sizes.get("dp_shard", 1) * sizes.get("tp", 1)
    check(results, split, programs=1 + deferred + (deferred and alone))
