"""What Inductor makes of a graph before it generates code: its private parts, for reading only."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._dynamo.exc import TensorifyScalarRestartAnalysis
from torch._dynamo.symbolic_convert import TensorifyState

from autoshard.runtime.compat import Finish, add_decompositions


@dataclass(frozen=True)
class Lowered:
    """The two graphs that Inductor lowers to loops and calls.

    backward: None where nothing needs a gradient. names: of the forward's results, in order, as
    the backward's inputs are named; Inductor's passes rename some of the nodes.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule | None
    names: tuple[str, ...]


def inductor_graphs(gm: fx.GraphModule, fakes: Sequence[Any], finish: Finish | None) -> Lowered:
    """The graphs that `compat.inductor` compiles, after Inductor's decompositions, its partition
    and all its passes over graphs; compiles and runs nothing.

    fakes: one a placeholder, of one fake mode. There is no public way to stop Inductor there.
    """
    with torch.inference_mode(False), torch.enable_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="aten::nll_loss")
        # what Inductor imports for its patterns still uses torch.jit
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        try:
            return _until_lowered(gm, fakes, finish)
        except TensorifyScalarRestartAnalysis:
            # asks Dynamo, once, not to make inputs of Python floats; the graph has their values
            made = _until_lowered(gm, fakes, finish)
            TensorifyState.clear()
            return made


def _until_lowered(gm: fx.GraphModule, fakes: Sequence[Any], finish: Finish | None) -> Lowered:
    from torch._functorch import config
    from torch._inductor import config as inductor_config
    from torch._inductor.compile_fx import compile_fx

    found: list[tuple[fx.GraphModule, tuple[str, ...]]] = []

    def inner_compile(graph: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        if finish is not None:
            finish(graph, bool(found))
        results: Any = next(iter(reversed(graph.graph.nodes))).args[0]
        names = tuple(n.name if isinstance(n, fx.Node) else "" for n in results)
        _run_passes(graph, bool(options.get("is_inference")))
        found.append((graph, names))

        def run(*args: Any) -> Any:
            raise AssertionError("this graph was made to be read, not to be run")

        run._boxed_call = True  # type: ignore[attr-defined]  # what AOTAutograd looks for
        return run

    add_decompositions()
    # nothing is compiled, so nothing may be cached; backward is made when forward is, not later
    with (
        config.patch(enable_autograd_cache=False, force_non_lazy_backward_lowering=True),
        inductor_config.patch(fx_graph_cache=False),
    ):
        compile_fx(gm, list(fakes), inner_compile=inner_compile)
    forward, names = found[0]
    return Lowered(forward, found[1][0] if len(found) > 1 else None, names)


def _run_passes(graph: fx.GraphModule, inference: bool) -> None:
    """Inductor's own passes, which join products and sums and reduce in place."""
    from torch._guards import detect_fake_mode
    from torch._inductor.compile_fx import _recursive_post_grad_passes
    from torch._inductor.fx_passes.post_grad import view_to_reshape
    from torch._inductor.virtualized import V

    view_to_reshape(graph)
    values = [n.meta.get("val") for n in graph.graph.nodes if n.op == "placeholder"]
    with V.set_fake_mode(detect_fake_mode(values)), torch.no_grad():
        _recursive_post_grad_passes(graph, is_inference=inference)
