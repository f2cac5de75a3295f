"""Inductor: private parts of torch that compile a graph, or show what would be compiled."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx
from torch.utils._ordered_set import OrderedSet

from autoshard.runtime.compat.aot import Finish
from autoshard.runtime.compat.version import probe_compilers

DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {}
"""Operators that Inductor gets in smaller ones, which it fuses."""


Order = Callable[[fx.Graph], dict[fx.Node, list[fx.Node]]]
"""The nodes of a graph that each of its nodes must come after, besides those it reads."""


def inductor_compile(
    gm: fx.GraphModule,
    fakes: Sequence[Any],
    finish: Finish | None = None,
    digest: str = "",
    order: Order | None = None,
) -> Callable[..., Any]:
    """AOTAutograd and Inductor. digest: what `finish` depends on besides the graph. order: what
    Inductor must keep."""
    probe_compilers()
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def inner_compile(graph: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        if finish is None:
            return compile_fx_inner(graph, inputs, **options)
        finish(graph, bool(options.get("is_backward")))
        with config.patch(post_grad_custom_post_pass=keep_order(order)):
            return compile_fx_inner(graph, inputs, **options)

    add_decompositions()
    # AOTAutograd's cache takes only functions it is told of; the value becomes part of the key.
    known = config.unsafe_marked_cacheable_functions
    with config.patch(unsafe_marked_cacheable_functions={**known, **_cache_keys(gm, digest)}):
        compiled: Any = compile_fx(gm, fakes, inner_compile=inner_compile)
    return compiled  # type: ignore[no-any-return]


def add_decompositions() -> None:
    """Give Inductor `DECOMPOSITIONS`.

    In its own table: a table given by argument is part of the key of Inductor's cache, which
    cannot write it down, and then caches nothing.
    """
    from torch._inductor.decomposition import decompositions, fast_random_decomps

    if not decompositions.keys() >= DECOMPOSITIONS.keys():
        decompositions.update(DECOMPOSITIONS)
        fast_random_decomps.cache_clear()


def _cache_keys(gm: fx.GraphModule, digest: str) -> dict[str, str]:
    """A key for each of our functions in the graph: `digest`, and what the graph's text lacks.

    One entry is there without any: a graph of torch's operators alone has tags too.
    """
    functions, tags = {"autoshard"}, [digest]
    for node in gm.graph.nodes:
        module = getattr(node.target, "__module__", None) or ""
        if node.op == "call_function" and module.startswith("autoshard."):
            functions.add(f"{module}.{node.target.__name__}")
        tag = [node.meta.get(key) for key in ("recompute", "ac_graph_id")]
        if any(t is not None for t in tag):
            tags.append(f"{node.name} {tag}")
    key = hashlib.sha256("\n".join(tags).encode()).hexdigest()
    return {name: key for name in sorted(functions)}


def keep_order(order: Order | None) -> Any:
    """Inductor's last pass over a graph: the pass that is set there already, then the dependencies.

    Only a class with a `uuid` lets Inductor cache what it compiles.
    """
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    theirs: Any = config.post_grad_custom_post_pass
    if order is None:
        return theirs
    chosen = order

    class KeepOrder(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering

            if theirs is not None:
                theirs(graph)
            needed = chosen(graph)
            preserve_node_ordering(graph, {n: OrderedSet(deps) for n, deps in needed.items()})

        def uuid(self) -> Any:
            ours = get_hash_for_files((__file__, chosen.__code__.co_filename))
            if theirs is None:
                return ours
            other = theirs.uuid() if isinstance(theirs, CustomGraphPass) else None
            return other and (ours, other)

    return KeepOrder()
