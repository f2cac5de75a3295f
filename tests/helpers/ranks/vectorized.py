"""Inductor's vectorized code, which tests do without where they can (conftest.py)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def vectorized() -> Iterator[None]:
    """What is compiled here is as vectorized as a user's."""
    from torch._inductor import config, cpu_vec_isa

    cpu_vec_isa.valid_vec_isa_list.cache_clear()  # it remembers what the setting made of it
    with config.patch({"cpp.vec_isa_ok": None}):
        yield
    cpu_vec_isa.valid_vec_isa_list.cache_clear()
