"""The generator against its published vectors and a reference in Python's integers; its splits."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autoshard.runtime.collectives.axis import Axis, chunk_bounds
from autoshard.runtime.compat.inductor import expand
from autoshard.runtime.randomness import philox
from autoshard.runtime.randomness.draws import draw_apart
from autoshard.runtime.randomness.philox import Draw, Part

SEED = torch.tensor(-1234567890123456789)
#: counter, key, result: the known-answer tests that Random123 publishes for philox4x32-10.
KNOWN = [
    ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([2**32 - 1] * 4, [2**32 - 1] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


def reference(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 as the paper writes it."""
    a, b, c, d = counter
    k, m = key
    for _ in range(10):
        x, y = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (y >> 32) ^ b ^ k, y % 2**32, (x >> 32) ^ d ^ m, x % 2**32
        k, m = (k + 0x9E3779B9) % 2**32, (m + 0xBB67AE85) % 2**32
    return [a, b, c, d]


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_the_reference_gives_the_published_vectors(
    counter: list[int], key: list[int], result: list[int]
) -> None:
    assert reference(counter, key) == result


@pytest.mark.parametrize("start", [0, 2**32 - 2, 5 * 2**40])
@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), -1234567890123456789])
def test_words_are_those_of_the_reference(seed: int, start: int) -> None:
    index = torch.arange(start, start + 8)
    for call in (77, torch.tensor(77)):
        found = philox.words(torch.tensor(seed), index, call, large=True)
        for i, position in enumerate(index.tolist()):
            counter = [position % 2**32, position >> 32, 77, 0]
            expected = reference(counter, [seed % 2**32, (seed >> 32) % 2**32])
            assert [int(word[i]) for word in found] == expected


@pytest.mark.parametrize(
    "shape", [(3, 7), (5, 130, 127), ()], ids=["small", "more than a block", "a scalar"]
)
def test_the_kernel_and_its_composition_agree(shape: tuple[int, ...]) -> None:
    places: list[tuple[int, int, int]] = [(-1, 0, 0)]
    places += [(dim, 2, shape[dim] + 3) for dim in range(len(shape))]
    places += [(0, 2**40, 2**41)] if shape else []
    for place in places:
        arguments = (SEED, shape, *place, torch.tensor(3), 4)
        want = philox.composed(*arguments)
        for got, word in zip(torch.ops.autoshard.philox.v1(*arguments), want, strict=True):
            assert torch.equal(got, word) and got.shape == shape


def parts(shape: tuple[int, ...], dim: int, n: int) -> list[tuple[list[int], Part]]:
    found = []
    for rank in range(n):
        start, length = chunk_bounds(shape[dim], Axis("tp", n, rank, ""))
        found.append(([*shape[:dim], length, *shape[dim + 1 :]], Part(dim, start, shape[dim])))
    return found


DRAWS: dict[str, Callable[..., torch.Tensor]] = {
    "mask": lambda shape, part: Draw(SEED, 3, part).keep(shape, 0.3),
    "float32": lambda shape, part: Draw(SEED, 3, part).uniform(shape, torch.float32),
    "float64": lambda shape, part: Draw(SEED, 3, part).uniform(shape, torch.float64),
    "bfloat16": lambda shape, part: Draw(SEED, 3, part).uniform(shape, torch.bfloat16),
    "normal": lambda shape, part: Draw(SEED, 3, part).normal(shape, torch.float32),
    "exponential": lambda shape, part: Draw(SEED, 3, part).exponential(shape, torch.float32),
}


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("name", DRAWS)
def test_shards_of_any_dim_are_slices_of_the_whole(name: str, n: int) -> None:
    shape = (6, 7, 9)  # 7 and 9 are uneven
    whole = DRAWS[name](shape, None)
    for dim in range(3):
        pieces = [DRAWS[name](local, part) for local, part in parts(shape, dim, n)]
        if name in ("normal", "exponential"):
            torch.testing.assert_close(torch.cat(pieces, dim), whole, rtol=1e-6, atol=1e-6)
        else:
            assert torch.equal(torch.cat(pieces, dim), whole)


def test_a_shard_far_into_a_large_tensor() -> None:
    """Positions beyond 32 bits, without the memory of the whole."""
    part = Part(0, 3 * 2**20, 2**22)
    found = Draw(SEED, 3, part).words((1, 2**12))[0]
    key = [int(SEED) % 2**32, (int(SEED) >> 32) % 2**32]
    for column in (0, 5):
        position = 3 * 2**20 * 2**12 + column
        expected = reference([position % 2**32, position >> 32, 3, 0], key)[0]
        assert int(found[0, column]) == expected


def compiled_draws() -> None:
    """Raise AssertionError where a compiled draw is not the eager one."""
    from torch._inductor import config

    config.post_grad_custom_pre_pass = expand()
    for part in (None, Part(1, 4, 37)):

        def draws(x: torch.Tensor, seed: torch.Tensor, part: Part | None = part) -> Any:
            return [
                x * Draw(seed, 5, part).keep(x.shape, 0.3),
                torch.ones(x.shape) * Draw(seed, 6, part).keep(x.shape, 0.3),
                Draw(seed, 7, part).uniform(x.shape, torch.float32),
                Draw(seed, 8, part).normal(x.shape, torch.float32),
            ]

        x = torch.randn(5, 33)
        expected = draws(x, SEED)
        compiled = torch.compile(draws, dynamic=False)(x, SEED)
        for found, want in zip(compiled[:3], expected[:3]):
            assert torch.equal(found, want)
        torch.testing.assert_close(compiled[3], expected[3], rtol=1e-5, atol=1e-6)
        torch.compiler.reset()


@pytest.mark.slow
def test_compiled_draws_are_eager_ones() -> None:
    """On sizes with vector bodies and scalar tails; 1 makes a constant of the operand.

    In a process of its own: the suite asks Inductor for scalar code (conftest.py), and code for
    vectors is wrong in a process that has compiled scalar code before.
    """
    environment = {k: v for k, v in os.environ.items() if k != "TORCHINDUCTOR_VEC_ISA_OK"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    command = [sys.executable, "-c", "import test_philox; test_philox.compiled_draws()"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_p_of_0_and_1_are_exact_and_others_close() -> None:
    shape = (1000, 100)
    assert Draw(SEED, 0).keep(shape, 0.0).all()
    assert not Draw(SEED, 0).keep(shape, 1.0).any()
    for p in (0.001, 0.1, 0.5, 0.9):
        kept = Draw(SEED, 0).keep(shape, p).double().mean()
        assert abs(kept - (1 - p)) < 5 * math.sqrt(p * (1 - p) / 1e5)


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1])


def test_draws_are_independent() -> None:
    """Of neighbours, of calls, of seeds that differ in one bit, of data-parallel streams."""
    n = 200_000
    bound = 5 / math.sqrt(n)
    x = Draw(SEED, 0).uniform((n,), torch.float64)
    others = {
        "next element": x.roll(1),
        "row of 1024": x.roll(1024),
        "call": Draw(SEED, 1).uniform((n,), torch.float64),
        "seed": Draw(SEED ^ 1, 0).uniform((n,), torch.float64),
        "high bit of the seed": Draw(SEED ^ (1 << 62), 0).uniform((n,), torch.float64),
    }
    for name, other in others.items():
        assert abs(correlation(x, other)) < bound, name


def test_distributions() -> None:
    n = 200_000
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        x = Draw(SEED, 0).uniform((n,), dtype)
        assert x.dtype == dtype and 0 <= x.min() and x.max() < 1
        counts = torch.histc(x.float(), 64, 0, 1)
        chi2 = float(((counts - n / 64) ** 2 / (n / 64)).sum())
        assert 24 < chi2 < 118  # 63 degrees of freedom: five sigma
    x = Draw(SEED, 1).normal((n,), torch.float64)
    for power, moment, sigma in [(1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)]:
        assert abs((x**power).mean() - moment) < 5 * math.sqrt(sigma / n), power
    x = Draw(SEED, 2).exponential((n,), torch.float32).double()
    assert x.min() > 0 and x.isfinite().all()
    assert abs(x.mean() - 1) < 5 / math.sqrt(n)
    assert abs(x.exp().reciprocal().mean() - 0.5) < 5 / math.sqrt(12 * n)


def test_data_parallel_ranks_draw_apart_from_one_generator() -> None:
    def seed(stream: int) -> int:
        draw_apart(stream)
        torch.manual_seed(3)
        return int(torch.ops.autoshard.random_seed(torch.device("cpu")))

    try:
        seeds = [seed(stream) for stream in range(16)]
        assert len(set(seeds)) == 16
        assert seed(5) == seeds[5]
    finally:
        draw_apart(0)


@pytest.mark.parametrize(
    "divisor", [1, 2, 3, 7, 641, 2048, 65535, 65537, 10**6 + 3, 2**30 - 1, 2**30, 2**31 - 1]
)
def test_division_without_a_division(divisor: int) -> None:
    most = 2**31 - 1
    multiples = torch.arange(0, most // divisor + 1, max(1, most // divisor // 1000)) * divisor
    near = torch.cat([multiples - 1, multiples, multiples + 1, torch.arange(64), most - multiples])
    x = near.clamp(0, most)
    assert torch.equal(philox._divided(x, divisor, most + 1), x // divisor)


@pytest.mark.parametrize("part", [Part(0, 2, 8), Part(1, 3, 7), Part(2, 10, 25), Part(2, 0, 5)])
def test_elements_of_a_part(part: Part) -> None:
    shape, whole = [3, 4, 5], [3, 4, 5]
    whole[part.dim] = part.extent
    shape[part.dim] = min(shape[part.dim], part.extent - part.start)
    every = torch.arange(math.prod(whole)).reshape(whole)
    mine = every.narrow(part.dim, part.start, shape[part.dim])
    assert torch.equal(philox.element_index(shape, part, torch.device("cpu")), mine)


def drawn_on_two_meshes() -> list[list[float]]:
    """A dropout of ones on dp_shard from one seed, before and after another mesh was compiled."""

    def compiled(mesh: dict[str, int]) -> Any:
        model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5))
        return torch.compile(model, backend="autoshard", options={"mesh": mesh, "inner": "eager"})

    on_data, on_tp = compiled({"dp_shard": 2}), compiled({"tp": 2})
    drawn = []
    for _ in range(2):
        torch.manual_seed(0)
        drawn.append((on_data(torch.ones(1, 64)) == 0).float().flatten().tolist())
        on_tp(torch.ones(1, 64))
    return drawn


def test_a_model_draws_as_its_own_mesh_has_it(gloo2: Any) -> None:
    (others, _), (before, after) = gloo2(drawn_on_two_meshes)
    assert before == after and before != others
