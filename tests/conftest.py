"""Fixtures shared by all tests: deterministic seeds, and worlds of gloo processes."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator

import pytest

from exhaustive import drawn, is_left_to_others, rests, seed
from gloo_pool import COLLECTION, GlooPool

# Before anything imports torch: the suite runs several processes on few cores, and never
# reaches for a network.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Inductor's vectorized code takes it half as long again to write and the compiler half as long
# again to read; how its loops look is torch's to test. Tests that are about it unset this.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
# A trace makes a million objects that live: fewer looks at all those of torch and transformers.
gc.set_threshold(*COLLECTION)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that CI leaves out at this commit."""
    slow = [item for item in items if item.get_closest_marker("slow")]
    left = [
        item
        for item in slow
        if is_left_to_others(item.nodeid) or item.get_closest_marker("exhaustive")
    ]
    by, slow_ones, rows = seed(), set(slow), set(left)
    chosen = drawn([item.nodeid for item in left], by)
    for item in items:
        if item not in rows and rests(item.nodeid, by, item in slow_ones):
            item.add_marker(pytest.mark.exhaustive)
    for item in left:
        item.own_markers[:] = [mark for mark in item.own_markers if mark.name != "exhaustive"]
        if item.nodeid not in chosen:
            item.add_marker(pytest.mark.exhaustive)


def pytest_report_header(config: pytest.Config) -> list[str]:
    """What repeats this draw of rows."""
    del config
    return [f"rows of tests/exhaustive.py are drawn by AUTOSHARD_ROWS={seed() or '(none)'}"]


@pytest.fixture(autouse=True)
def _fresh_torch() -> None:
    """Each test starts from seed 0 and an empty compile cache."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
    if "torch._dynamo" in sys.modules:
        sys.modules["torch"].compiler.reset()


@pytest.fixture
def world_of_four() -> Iterator[None]:
    """This process is the first of four that do not exist."""
    import torch.distributed as dist

    dist.init_process_group("fake", rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def _pool(size: int) -> Iterator[GlooPool]:
    pool = GlooPool(size)
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def gloo2() -> Iterator[GlooPool]:
    """Two processes; `gloo2(fn, *args)` runs fn in both and returns the results by rank."""
    yield from _pool(2)


@pytest.fixture(scope="session")
def gloo4() -> Iterator[GlooPool]:
    """Four processes; see `gloo2`."""
    yield from _pool(4)
