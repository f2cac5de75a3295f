"""Inductor: private parts of torch that compile a graph, or show what would be compiled."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils._ordered_set import OrderedSet

from autoshard.runtime.compat.aot import (
    AfterCut,
    CutGraph,
    Doing,
    Finish,
    Graphs,
    Short,
    cut_in_two,
    is_backward,
    memory_of,
    not_cut,
    print_late,
    taking_a_list,
)
from autoshard.runtime.compat.inductor_artifacts import Once, first_compiles
from autoshard.runtime.compat.version import probe_compilers
from autoshard.runtime.graph_meta import HOST

DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {}
"""Operators that Inductor gets in smaller ones, which it fuses: not before it compiles a graph, as
those of a layer's draws are twice as many as all its others."""

Order = Callable[[fx.Graph], dict[fx.Node, list[fx.Node]]]
"""The nodes of a graph that each of its nodes must come after, besides those it reads."""


def inductor_compile(
    gm: fx.GraphModule,
    fakes: Sequence[Any],
    cut: AfterCut,
    finish: Finish | None = None,
    digest: str = "",
    order: Order | None = None,
    settings: Mapping[str, Any] | None = None,
    fixed: Sequence[int] | None = None,
    takes_list: bool = False,
    once: Once | None = None,
    regions: CutGraph | None = None,
    doing: Doing = contextlib.nullcontext,
    short: Short | None = None,
) -> Callable[..., Any]:
    """AOTAutograd and Inductor.

    digest: what `finish` depends on besides the graph. order: what Inductor must keep. settings:
    of `torch._inductor.config`. fixed: positions of the inputs that lie where they lay in the
    last call, for CUDA graphs; None: what Dynamo has said of the graph. takes_list: see
    `taking_a_list`. once: entered around a compilation that other hosts may share. regions: the
    parts of a graph, of which equal ones are compiled once. doing: entered around each compilation.
    short: is traced in the place of `gm`.
    """
    probe_compilers()
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    from autoshard.runtime.compat.inductor_regions import in_regions

    moving: set[str] = set()
    grown: list[bool] = []

    def inner_compile(graph: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        if short is not None and not grown:
            not_cut()
        backward = bool(options.get("is_backward"))
        work = f"compile {'backward' if backward else 'forward'}"
        if fixed is not None and backward:
            options["static_input_idxs"] = _not_among(graph, options["static_input_idxs"], moving)
        elif fixed is not None:
            # AOTAutograd puts constants of the graph before its inputs
            own = len([*gm.named_parameters(), *gm.named_buffers()])
            options["static_input_idxs"] = [*range(own), *(own + i for i in fixed)]
            moving.update(_made_outside(graph))
        passes: dict[str, Any] = {"post_grad_custom_pre_pass": expand()}
        shared: Any = contextlib.nullcontext()
        if finish is not None:
            print_late(graph)
            finish(graph, backward)
            passes["post_grad_custom_post_pass"] = keep_order(order)
            shared = first_compiles(graph, once)
        with doing(work), config.patch(passes), shared, in_regions(regions, doing), _unlogged():
            return compile_fx_inner(graph, inputs, **options)

    keep_renames()
    # AOTAutograd's cache takes only functions it is told of; the value becomes part of the key.
    known = config.unsafe_marked_cacheable_functions
    digest = f"{digest}{short and short.key}"
    keys = _cache_keys(gm, digest if fixed is None else f"{digest} {list(fixed)}")
    cached = {"unsafe_marked_cacheable_functions": {**known, **keys}}
    with (
        config.patch(**cached, **partitioner(gm, cut, short, grown), **_growing(short, grown)),
        _unlogged(),
    ):
        given: Any = gm if short is None else short.module
        _keep_copies(given, fakes)
        given = taking_a_list(given) if takes_list else given
        compiled: Any = compile_fx(
            given, fakes, inner_compile=inner_compile, config_patches=dict(settings or {})
        )
    return compiled  # type: ignore[no-any-return]


@contextlib.contextmanager
def _unlogged() -> Iterator[None]:
    """Without what torch makes of whole graphs for its logs alone, where nobody reads them: their
    texts, a hash of each input, a copy for a repro. It grows with the layers."""
    from torch._dynamo import config
    from torch._functorch._aot_autograd import graph_compile
    from torch._inductor import codecache, compile_fx

    def read(log: logging.Logger) -> bool:
        return bool(logging.getLogger("torch.__trace").handlers) or log.isEnabledFor(logging.INFO)

    left_out: dict[tuple[Any, str], Any] = {}
    if not (read(graph_compile.aot_graphs_log) or read(graph_compile.aot_joint_log)):
        left_out[graph_compile, "_log_joint_graph"] = None
        left_out[graph_compile, "_log_fw_bw_graphs"] = (None, None)
    if not read(codecache.log):
        left_out[codecache.FxGraphCachePickler, "debug_lines"] = []
    with contextlib.ExitStack() as stack:
        for (where, name), result in left_out.items():
            stack.enter_context(mock.patch.object(where, name, lambda *_, result=result: result))
        if config.repro_after is None:
            same = mock.patch.object(compile_fx, "wrap_compiler_debug", lambda inner, **_: inner)
            stack.enter_context(same)
        yield


def cuda_graphs_are_set() -> bool:
    """Whether Inductor's own configuration asks for CUDA graphs."""
    from torch._inductor import config

    return bool(config.triton.cudagraphs)


def inductor_settings() -> list[str]:
    """The names in Inductor's configuration."""
    from torch._inductor import config

    return list(config.get_config_copy())


def mode_settings(mode: str) -> dict[str, Any]:
    """What torch.compile's `mode` sets in Inductor's configuration."""
    from torch._inductor import list_mode_options

    return dict(list_mode_options(mode))


def _made_outside(graph: fx.GraphModule) -> set[str]:
    """The values that a CUDA graph of `graph` has from outside, from operators that cannot be
    captured: they lie elsewhere in each call, also when backward reads them."""
    found: set[fx.Node] = set()
    for node in graph.graph.nodes:
        if node.op != "call_function":
            continue
        tags = getattr(node.target, "tags", ())
        views = getattr(node.target, "is_view", False) and set(node.all_input_nodes) & found
        if torch.Tag.cudagraph_unsafe in tags or views:
            found.add(node)
    return {node.name for node in found}


def _not_among(graph: fx.GraphModule, positions: Sequence[int], names: set[str]) -> list[int]:
    inputs = graph.graph.find_nodes(op="placeholder")
    return [i for i in positions if inputs[i].name not in names]


def expand() -> Any:
    """Inductor's first pass over what it compiles, one region or a whole graph: that which is set
    there already, then `DECOMPOSITIONS`."""
    files = {smaller.__code__.co_filename for smaller in DECOMPOSITIONS.values()}
    return _behind("post_grad_custom_pre_pass", _expanded, *sorted(files))


def _expanded(graph: fx.Graph) -> None:
    from torch._guards import detect_fake_mode
    from torch._inductor.pattern_matcher import fwd_only

    for one, smaller in DECOMPOSITIONS.items():
        for node in graph.find_nodes(op="call_function", target=one):
            leaves, spec = pytree.tree_flatten(node.args)  # what is traced takes no lists
            values: Any = fx.node.map_arg(leaves, lambda n: n.meta["val"])

            def run(*leaves: Any, smaller: Any = smaller, spec: Any = spec) -> Any:
                return smaller(*pytree.tree_unflatten(leaves, spec))

            with detect_fake_mode(values):  # type: ignore[union-attr]
                traced = fwd_only(run, values, run_functional_passes=False).graph
            with graph.inserting_before(node):
                given = dict(zip(traced.find_nodes(op="placeholder"), leaves))
                made: Any = graph.graph_copy(traced, given)  # type: ignore[arg-type]
            for item in list(node.users):
                item.replace_all_uses_with(made[item.args[1]])
                graph.erase_node(item)
            graph.erase_node(node)


def keep_renames() -> None:
    """Have a node whose loops Inductor makes anew, to fuse it on the CPU, still come after what
    writes the buffers that it reads.

    torch 2.13 forgets that (pytorch#185509), older ones all of the node's order (pytorch#177631):
    a kernel then reads the result of a collective before the wait for it.
    """
    from torch._inductor.dependencies import StarDep, WeakDep
    from torch._inductor.scheduler import SchedulerNode

    theirs = SchedulerNode.recompute_size_and_body
    if theirs.__module__ == __name__:
        return

    def recompute_size_and_body(self: Any, *args: Any, **options: Any) -> None:
        reads = self.read_writes.reads
        order = OrderedSet(dep for dep in reads if isinstance(dep, (StarDep, WeakDep)))
        theirs(self, *args, **options)
        anew = self.read_writes.with_read(order)
        self.set_read_writes(anew.rename(self.mutation_renames))

    SchedulerNode.recompute_size_and_body = recompute_size_and_body  # type: ignore[method-assign]


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
        tag.append(node.meta.get("custom", {}).get(HOST))
        if any(t is not None for t in tag):
            tags.append(f"{node.name} {tag}")
    key = hashlib.sha256("\n".join(tags).encode()).hexdigest()
    return {name: key for name in sorted(functions)}


def _growing(short: Short | None, grown: list[bool]) -> dict[str, Any]:
    """Inductor's settings for a graph that is traced as a short one, with what grows the joint
    graph: in front of all passes over it where it draws, whose draws Inductor numbers; behind those
    of Inductor where others are set, or another partitioner, which come after. Else what is cut of
    it grows. grown: gets an entry.

    Only a class with a `uuid` lets Inductor cache what it compiles.
    """
    if short is None:
        return {}
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomGraphPass
    from torch._inductor.pattern_matcher import stable_topological_sort

    grow, cuts = short.grow, config.custom_partitioner_fn is not None

    class Grow(CustomGraphPass):
        def __init__(self, name: str) -> None:
            theirs: Any = getattr(config, name)
            several = isinstance(theirs, (list, tuple))
            self.first = "pre" in name
            self.passes = theirs if several else [theirs] * (theirs is not None)

        def __call__(self, graph: fx.Graph) -> None:
            others = cuts or self.passes
            if not grown and (any(map(_draws, graph.nodes)) if self.first else others):
                stable_topological_sort(graph)
                grow(graph)
                grown.append(True)
            for each in self.passes:
                each(graph)

        def uuid(self) -> Any:
            return _joint_key(self.passes)

    return {name: Grow(name) for name in ("joint_custom_pre_pass", "joint_custom_post_pass")}


def _joint_key(theirs: Sequence[Any], *files: str) -> Any:
    """A key for Inductor's cache of what this file does, and the passes set there; None: one of
    them has none."""
    from torch._inductor.custom_graph_pass import get_hash_for_files

    keys = [each.uuid() if hasattr(each, "uuid") else None for each in theirs]
    return None if None in keys else (get_hash_for_files((__file__, *files)), *keys)


def _draws(node: fx.Node) -> bool:
    aten = torch.ops.aten
    return getattr(node.target, "overloadpacket", None) in (aten.rand, aten.randn, aten.randint)


def partitioner(
    gm: fx.GraphModule,
    after: AfterCut,
    short: Short | None = None,
    grown: list[bool] | None = None,
) -> dict[str, Any]:
    """Inductor's settings for a graph that is cut: the partitioner that it has, and what comes
    `after` it. short, grown: see `_growing`; it gets an entry where that did not."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomPartitionerFn
    from torch._inductor.pattern_matcher import stable_topological_sort

    theirs: Any = config.custom_partitioner_fn
    hosted = any(node.meta.get("custom", {}).get(HOST) for node in gm.graph.nodes)

    key = _joint_key(() if theirs is None else (theirs,))

    class Partitioner(CustomPartitionerFn):
        def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **options: Any) -> Any:
            for node in gm.graph.nodes:
                # parts of a derivative carry the tag of the operator that it is of
                if hosted and is_backward(node):
                    node.meta.pop("recompute", None)
            cut: Any = theirs or min_cut_rematerialization_partition

            def in_two(gm: fx.GraphModule) -> Graphs:
                return cut(gm, joint_inputs, **options)  # type: ignore[no-any-return]

            grows = None if grown else short
            if grows is not None and grown is not None:
                grown.append(True)
                stable_topological_sort(gm.graph)
            return cut_in_two(gm, in_two, after, options["num_fwd_outputs"], grows)

        def uuid(self) -> Any:
            return key

        def __reduce__(self) -> Any:  # AOTAutograd's cache is keyed by what is pickled of it
            return tuple, ((key, theirs),)

    return {"custom_partitioner_fn": Partitioner()}


def _keep_copies(gm: fx.GraphModule, fakes: Sequence[Any]) -> None:
    """Have the copies of inputs that are not trained stay, under a name that Inductor leaves alone:
    it takes a clone for nothing, and has backward read the input, which may be written by then."""
    fixed = [not (isinstance(f, torch.Tensor) and f.requires_grad) for f in fakes]
    if all(fixed):  # nothing is, and no backward reads anything
        return
    inputs = dict(zip(gm.graph.find_nodes(op="placeholder"), fixed))
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default):
        if inputs.get(memory_of(node.args[0])):
            node.target = torch.ops.prims.clone.default


def keep_order(order: Order | None) -> Any:
    """Inductor's last pass over a graph: that which is set there already, then the dependencies."""
    from torch._inductor import config

    if order is None:
        return config.post_grad_custom_post_pass
    chosen = order

    def ordered(graph: fx.Graph) -> None:
        from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering

        needed = chosen(graph)
        preserve_node_ordering(graph, {n: OrderedSet(deps) for n, deps in needed.items()})

    return _behind("post_grad_custom_post_pass", ordered, chosen.__code__.co_filename)


def _behind(name: str, ours: Callable[[fx.Graph], None], *files: str) -> Any:
    """The pass that Inductor has under a name in its configuration, then ours, of `files`.

    Only a class with a `uuid` lets Inductor cache what it compiles.
    """
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomGraphPass

    theirs: Any = getattr(config, name)

    class Both(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            if theirs is not None:
                theirs(graph)
            ours(graph)

        def uuid(self) -> Any:
            return _joint_key(() if theirs is None else (theirs,), *files)

    return Both()
