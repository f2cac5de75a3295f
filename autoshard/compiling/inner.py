"""Inner compilers: the local graph becomes a callable."""

from __future__ import annotations

import functools
import hashlib
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import fx

import autoshard
from autoshard import passes, runtime
from autoshard.compiling.any_rank import for_any_rank
from autoshard.compiling.cuda_graphs import InductorSettings
from autoshard.compiling.inductor_order import hold_order
from autoshard.runtime import compat
from autoshard.runtime.compat import Finish, aot_eager, inductor_compile

# torch-tensorrt's defaults take every mask of attention for the causal one, padding or not, and
# hand back torch's own operators where an engine cannot be built.
_TENSORRT = {"attn_bias_is_causal": False, "pass_through_build_failures": True}


def compile_local(
    gm: fx.GraphModule,
    fakes: list[Any],
    inner: str,
    finish: Finish | None = None,
    settings: str = "",
    inductor: InductorSettings = InductorSettings(),  # noqa: B008 (frozen)
    takes_list: bool = False,
) -> Callable[..., Any]:
    """Compile a local graph with the chosen inner compiler.

    inner: "inductor" (AOTAutograd, then Inductor), "aot_eager" (AOTAutograd's graphs, run
    operator by operator), "eager" (the local graph itself; autograd records as it runs) or
    "tensorrt" (torch-tensorrt's backend; `serving.check_serving` says when).
    finish: rewrites each of AOTAutograd's graphs; "eager" and "tensorrt" have none. settings: all
    that `finish` depends on besides the graph and our source: torch's caches on disk are keyed by
    them. inductor: how Inductor is set. takes_list: the result takes a list of the inputs, which it
    clears, so that they are freed after their last use (but by "eager" and "tensorrt").
    """
    if inner == "eager":
        return (lambda values: gm(*values)) if takes_list else gm
    if inner == "tensorrt":
        importlib.import_module("torch_tensorrt")  # registers its backend
        return compat.registered_backend("torch_tensorrt")(gm, fakes, options=_TENSORRT)
    if inner == "aot_eager":
        return aot_eager(gm, fakes, passes.after_cut, finish, takes_list)
    return inductor_compile(
        for_any_rank(gm),
        fakes,
        passes.after_cut,
        finish,
        settings + _source_digest(),
        hold_order,
        settings=inductor.values,
        fixed=inductor.fixed,
        takes_list=takes_list,
    )


@functools.cache
def _source_digest() -> str:
    """Hash of our source files, part of Inductor's cache key: our passes changed its graphs."""
    folders = [Path(str(package.__file__)).parent for package in (autoshard, runtime, passes)]
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()
