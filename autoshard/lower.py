"""The last step: the local graph becomes something to call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from autoshard.passes.keep_order import order_dependencies
from autoshard.runtime import compat


def compile_local(
    gm: fx.GraphModule, fakes: list[Any], inner: str, finish: compat.Finish | None = None
) -> Callable[..., Any]:
    """Compile a local graph with the chosen inner compiler.

    inner: "inductor" (AOTAutograd, then Inductor), "aot_eager" (AOTAutograd's graphs, run
    operator by operator) or "eager" (the local graph itself; autograd records as it runs).
    finish: rewrites each of AOTAutograd's graphs; "eager" has none.
    """
    if inner == "eager":
        return gm
    if inner == "aot_eager":
        return compat.aot_eager(gm, fakes, finish)
    return compat.inductor(gm, fakes, finish, order_dependencies)
