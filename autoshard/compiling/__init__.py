"""What one rank compiles: dtypes of its parameters, inner compilers, graph text, dumps."""

from __future__ import annotations

from autoshard.compiling.debugging import DebugWatch, refuse_unsharded, settings
from autoshard.compiling.inductor_order import reduce_in_place
from autoshard.compiling.inner import compile_local
from autoshard.compiling.meta_graphs import off_meta
from autoshard.compiling.parameter_use import lowered_dtypes, say_stored, traced_microbatch, use_by
from autoshard.compiling.rendering import render
from autoshard.compiling.serving import check_serving

__all__ = [
    "DebugWatch",
    "check_serving",
    "compile_local",
    "lowered_dtypes",
    "off_meta",
    "reduce_in_place",
    "refuse_unsharded",
    "render",
    "say_stored",
    "settings",
    "traced_microbatch",
    "use_by",
]
