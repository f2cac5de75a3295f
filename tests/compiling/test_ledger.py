"""Collectives of an optimizer step on the data-parallel axes, from the graphs, against the ledger.

The ledger is that of the reference system: what each mesh, `zero` and number of microbatches moves,
as the logical size of each collective (an all-reduce's tensor, a gather's output, a scatter's
input), one collective a parameter where nothing is bucketed.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable

import pytest

from autoshard.planning.cost import aligned
from autoshard.program import Program
from joined_batch import MATRIX, Sizes
from models import CASES
from traced import builder

Moved = dict[tuple[str, str], tuple[int, int]]
"""(collectives, bytes) by operator and axis."""

GATHER, SCATTER = ("all_gather", "dp_shard"), ("reduce_scatter", "dp_shard")
REDUCE = ("all_reduce", "dp_replicate")


@functools.cache
def build(name: str) -> Callable[..., Program]:
    case = CASES[name]
    model = case.make_model()
    if name == "gpt2":
        model.loss_type = "ForCausalLM"  # type: ignore[assignment]  # a warning breaks the graph
    return builder(model, (), case.make_batch(0))


@functools.cache
def program(
    name: str, mesh: tuple[tuple[str, int], ...], zero: int, microbatch: str, size: int | None
) -> Program:
    return build(name)(dict(mesh), microbatch=microbatch, zero=zero, planner={"bucket_bytes": size})


def moved(name: str, mesh: Sizes, zero: int, micro: int, size: int | None = 1) -> Moved:
    """What a step of `micro` microbatches moves, all but the last one in `no_sync`."""
    waits = zero == 1 or "dp_replicate" in mesh
    kinds = ["accumulate"] * (micro - 1) + ["flush" if micro > 1 and waits else "single"]
    counts: Counter[tuple[str, str]] = Counter()
    nbytes: Counter[tuple[str, str]] = Counter()
    for kind in kinds:
        for c in program(name, tuple(mesh.items()), zero, kind, size).collectives():
            if c.axis != "tp":
                counts[c.op, c.axis] += 1
                nbytes[c.op, c.axis] += c.bytes
    return {key: (counts[key], nbytes[key]) for key in counts}


def parameters(name: str, mesh: Sizes) -> list[int]:
    """Elements of each parameter, its rows a multiple of the ranks that share them."""
    found = []
    made = program(name, tuple(mesh.items()), 3, "single", 1)
    states, shapes = made.stored(), dict(CASES[name].make_model().named_parameters())
    for path, state in states.items():
        shape = list(shapes[path].shape)
        if state[0] == "S":
            dim = int(str(state)[2:-1])
            shape[dim] = -(-shape[dim] // mesh.get("tp", 1))
        n = mesh.get("dp_shard", 1)
        shape[0] = -(-shape[0] // n) * n
        found.append(math.prod(shape))
    return found


def again(name: str, mesh: Sizes) -> tuple[int, int]:
    """What ZeRO-3's backward gathers a second time: weights that a gradient depends on."""
    found = program(name, tuple(mesh.items()), 3, "single", 1).collectives()
    sizes = [c.bytes for c in found if (c.op, c.axis) == GATHER and c.phase == "backward"]
    return len(sizes), sum(sizes)


def check(name: str, mesh: Sizes, zero: int, micro: int) -> None:
    elements = parameters(name, mesh)
    units, nbytes = len(elements), 4 * sum(elements)
    shard = mesh.get("dp_shard", 1)
    expected: Moved = {}
    if shard > 1:
        count, more = again(name, mesh) if zero == 3 else (0, 0)
        assert (0 < more < nbytes) == (zero == 3)
        expected[GATHER] = (micro * (units + count), micro * (nbytes + more))
        times = 1 if zero == 1 else micro
        expected[SCATTER] = (times * units, times * nbytes)
    if mesh.get("dp_replicate", 1) > 1:
        expected[REDUCE] = (units, nbytes // shard)
    assert moved(name, mesh, zero, micro) == expected


MESHES = [*MATRIX, ({"dp_replicate": 2, "dp_shard": 2}, 1), ({"dp_replicate": 2, "dp_shard": 2}, 2)]


@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize(("mesh", "zero"), MESHES)
def test_a_step_moves_what_the_ledger_says(mesh: Sizes, zero: int, micro: int) -> None:
    check("mlp", mesh, zero, micro)


@pytest.mark.slow
@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize(("mesh", "zero"), MESHES)
@pytest.mark.parametrize("name", ["gpt2", "convnet"])
def test_other_models_move_what_the_ledger_says(
    name: str, mesh: Sizes, zero: int, micro: int
) -> None:
    """A tied weight; convolutions. test_bucketing.py counts a Llama's."""
    check(name, mesh, zero, micro)


@pytest.mark.parametrize(("mesh", "zero"), [case for case in MESHES if "tp" not in case[0]])
def test_bucketed_once_each_with_padding(mesh: Sizes, zero: int) -> None:
    """P' of the ledger: scattered gradients begin at multiples of 64 elements a rank."""
    elements = parameters("mlp", mesh)
    n = mesh.get("dp_shard", 1)
    found = moved("mlp", mesh, zero, 1, None)
    part = aligned([size // n for size in elements], n)[1]
    if n > 1:
        assert found[GATHER][0] == (2 if zero == 3 else 1)
        assert found[SCATTER] == (1, 4 * n * part)
    if "dp_replicate" in mesh:
        assert found[REDUCE][0] == 1
        assert found[REDUCE][1] >= 4 * sum(elements) // n
