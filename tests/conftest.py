"""Fixtures shared by all tests: deterministic seeds, and worlds of gloo processes."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator

import pytest

from exhaustive import is_left_to_others
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
    """Mark those of the slow tests that `exhaustive.py` lists."""
    for item in items:
        if item.get_closest_marker("slow") and is_left_to_others(item.nodeid):
            item.add_marker(pytest.mark.exhaustive)


@pytest.fixture(autouse=True)
def _fresh_torch() -> None:
    """Each test starts from seed 0 and an empty compile cache."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
    if "torch._dynamo" in sys.modules:
        sys.modules["torch"].compiler.reset()


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
