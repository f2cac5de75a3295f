"""One compiled graph of several: Inductor's functions of the regions of a graph, called in order.

A `CompiledFxGraph` like any other to torch's caches: it is stored under the key of the whole graph,
and loaded whole.
"""

from __future__ import annotations

import contextlib
import copy
import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import fx
from torch._inductor import compile_fx, config, utils
from torch._inductor.dtype_propagation import DtypePropagationOpsHandler
from torch._inductor.output_code import CompiledFxGraph
from torch._inductor.utils import BoxedBool, set_tracing_context_output_strides

from autoshard.runtime.compat.aot import CutGraph, Doing


class RegionCall(NamedTuple):
    """A region called: its number, and where inputs come from, outputs go to, and what is dead."""

    region: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    dead: tuple[int, ...]
    """Slots that nobody reads after the call has begun."""
    finished: tuple[int, ...]
    """Slots that nobody reads after the call: what a collective under way was reading."""


class Regions(CompiledFxGraph):
    """The compiled graph. regions: distinct ones. results: slots, or numbers and None."""

    regions: list[CompiledFxGraph]
    calls: list[RegionCall]
    results: list[tuple[bool, Any]]
    slots: int

    def __init__(self, like: CompiledFxGraph, **fields: Any) -> None:
        unowned = {"compiled_fn_runner": None, "recursively_apply_fns": None}
        self.__dict__.update({**like.__dict__, **unowned, **fields})

    def post_compile(self, example_inputs: Any, constants: Any, graph_kwargs: Any) -> None:
        set_tracing_context_output_strides(example_inputs, self)
        with _strides_untold():
            options: Any = {**graph_kwargs, "cudagraphs": BoxedBool(False)}
            for region in self.regions:
                region.post_compile((), constants, options)
        self.current_callable = self._run

    def prepare_for_serialization(self) -> None:
        super().prepare_for_serialization()
        self.regions = [copy.copy(region) for region in self.regions]
        for region in self.regions:
            region.prepare_for_serialization()

    def after_deserialization(self, constants: Any) -> str:
        return [region.after_deserialization(constants) for region in self.regions][0]

    def _run(self, values: Any) -> Any:
        held: list[Any] = [*values, *[None] * (self.slots - len(values))]
        if isinstance(values, list):
            values.clear()
        functions = [region.current_callable for region in self.regions]
        for region, inputs, outputs, dead, finished in self.calls:
            given = [held[i] for i in inputs]
            for i in dead:
                held[i] = None
            for i, value in zip(outputs, functions[region](given)):  # type: ignore[misc]
                held[i] = value
            for i in finished:
                held[i] = None
        return tuple(held[what] if is_slot else what for is_slot, what in self.results)


@contextlib.contextmanager
def in_regions(cut: CutGraph | None, doing: Doing = contextlib.nullcontext) -> Iterator[None]:
    """Have Inductor compile the graphs that it does not find in its caches by their parts."""
    if cut is None or not _possible():
        yield
        return
    whole = compile_fx.fx_codegen_and_compile
    chosen = cut

    def compile_graph(
        gm: fx.GraphModule, inputs: Any, checked: Any, *rest: Any, **options: Any
    ) -> Any:
        if options.get("cudagraphs") or options.get("cpp_wrapper") or options.get("fx_wrapper"):
            return whole(gm, inputs, checked, *rest, **options)
        given = gm.graph.find_nodes(op="placeholder")
        if any(_moved(node.meta.get("val"), value) for node, value in zip(given, inputs)):
            compile_fx.view_to_reshape(gm)  # a view of what lies otherwise now may need a copy
            compile_fx.fake_tensor_prop(gm, inputs)
        marks = _marks(gm, options)
        parts = chosen(gm, marks)
        made = (
            None if parts is None else compile_parts(gm, parts, marks, whole, rest, options, doing)
        )
        return made or whole(gm, inputs, checked, *rest, **options)

    with mock.patch.object(compile_fx, "fx_codegen_and_compile", compile_graph), _rules_told_once():
        yield


def _possible() -> bool:
    """Whether Inductor compiles in this process, and nothing wraps or captures what it makes."""
    mode = getattr(compile_fx, "fx_compile_mode", None)
    elsewhere = mode is not None and mode.name != "NORMAL"
    others = ("fx_compile_async", "fx_compile_progressive")
    elsewhere = elsewhere or any(getattr(compile_fx, name, False) for name in others)
    wrapped = getattr(config, "wrap_inductor_compiled_regions", False) or config.freezing
    return not (elsewhere or wrapped or config.triton.cudagraphs)


def _marks(gm: fx.GraphModule, options: Any) -> dict[fx.Node, bool]:
    """Of each input whether it lies where it lay."""
    static = set(options.get("static_input_idxs") or ())
    return {node: i in static for i, node in enumerate(gm.graph.find_nodes(op="placeholder"))}


def compile_parts(
    gm: fx.GraphModule,
    parts: Sequence[Any],
    marks: Mapping[fx.Node, Any],
    whole: Callable[..., Any],
    rest: Sequence[Any] = (),
    options: Mapping[str, Any] = MappingProxyType({}),
    doing: Doing = contextlib.nullcontext,
) -> Regions | None:
    """The compiled graph of a graph's parts; None where a region returns other strides than those
    that its readers were traced with.

    whole: Inductor's function of one graph; rest, options: of its arguments.
    """
    last = {node: i for i, part in enumerate(parts) for node in part.inputs}
    for part in parts:
        last.update(part.until)
    output: Any = gm.graph.output_node().args[0]
    results = {node for node in output if isinstance(node, fx.Node)}
    given = gm.graph.find_nodes(op="placeholder")
    slot = {node: i for i, node in enumerate(given)}
    numbers, distinct = dict[Any, int](), len({part.key for part in parts})
    given_away = _given_away(given, parts, last, results, options)
    regions: list[CompiledFxGraph] = []
    calls, strides = [], dict[fx.Node, Any]()
    for i, part in enumerate(parts):
        dying = {n: last[n] == i and n not in results for n in part.inputs}
        if part.key not in numbers:
            numbers[part.key] = len(regions)
            with doing(f"region {len(regions) + 1} of {distinct}"):
                free = given_away[part.key]
                regions.append(_region(gm, part, marks, free, whole, rest, options))
        number = numbers[part.key]
        told = regions[number].output_strides or ()
        for node, exact, stride in zip(part.outputs, part.exact, told, strict=True):
            slot.setdefault(node, len(slot))
            strides[node] = stride
            val = part.laid_out.get(node, node.meta.get("val"))
            if exact and isinstance(val, torch.Tensor):
                if stride is None or not _same(stride, val):
                    return None
        finished = [n for n, until in last.items() if until == i and n in slot and n not in results]
        dead = [slot[n] for n in finished if dying.get(n) and n not in part.until]
        calls.append(
            RegionCall(
                number,
                tuple(slot[n] for n in part.inputs),
                tuple(slot[n] for n in part.outputs),
                tuple(dead),
                tuple(slot[n] for n in finished if slot[n] not in dead),
            )
        )
    for node in given:
        val = node.meta.get("val")
        strides.setdefault(node, _text(val) if isinstance(val, torch.Tensor) else None)
    return Regions(
        regions[0],
        regions=regions,
        calls=calls,
        results=[(True, slot[n]) if isinstance(n, fx.Node) else (False, n) for n in output],
        slots=len(slot),
        output_strides=[strides[n] if isinstance(n, fx.Node) else None for n in output],
        counter_deltas=sum((r.counter_deltas for r in regions), Counter()),
        source_code="\n".join(region.source_code for region in regions),
        cache_linemap=None,
        device_types=set().union(*[r.device_types for r in regions]),
        device_idxs=set().union(*[r.device_idxs for r in regions]),
        mutated_inputs=set(),
        mutated_input_idxs=set(),
        inputs_to_check=(),
        current_callable=None,
    )


def _given_away(
    given: Sequence[fx.Node],
    parts: Sequence[Any],
    last: Mapping[fx.Node, int],
    results: Collection[fx.Node],
    options: Mapping[str, Any],
) -> dict[Any, set[int]]:
    """Of each region the inputs in whose memory it may write its results, by position: those that
    AOTAutograd gives away, where none of its parts hands them, or a view of them, to others. A
    backward would hold the logits beside their gradient."""
    context = torch._guards.TracingContext.try_get()
    metadata = context and context.fw_metadata
    away = metadata and options.get("is_backward") and metadata.bw_donated_idxs
    free = {given[i] for i in away or ()} - set(results)
    found: dict[Any, set[int]] = {}
    for i, part in enumerate(parts):
        within = {*part.nodes, *part.constants}.difference(part.outputs)
        own = {n for n in free.intersection(part.inputs) if within.issuperset(_views(n))}
        may = {j for j, node in enumerate(part.inputs) if node in own and last[node] == i}
        found[part.key] = may & found.get(part.key, may)
    return found


def _views(node: fx.Node) -> Iterator[fx.Node]:
    for user in node.users:
        if getattr(user.target, "is_view", False) or user.target is operator.getitem:
            yield user
            yield from _views(user)


def _region(
    gm: fx.GraphModule, part: Any, marks: Any, free: set[int], whole: Any, rest: Any, options: Any
) -> CompiledFxGraph:
    graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
    inputs = []
    for i, node in enumerate(part.inputs):
        made[node] = graph.placeholder(f"arg{i}")
        inputs.append(_input(part.laid_out.get(node, node.meta["val"]), part.in_storage))
        made[node].meta = {**node.meta, "val": inputs[-1]}
    for node in (*part.constants, *part.nodes):
        made[node] = graph.node_copy(node, made.__getitem__)
        if node in part.laid_out:
            result: Any = made[node]
            order: Any = {"memory_format": torch.contiguous_format}
            made[node] = graph.call_function(torch.ops.aten.clone.default, (result,), order)
            made[node].meta = {**node.meta}
    last = graph.output(tuple(made[node] for node in part.outputs))
    last.meta["user_visible_output_idxs"] = [i for i, exact in enumerate(part.exact) if exact]
    static = [i for i, node in enumerate(part.inputs) if marks.get(node)]
    checked = compile_fx.get_input_idxs_to_check(inputs, static)
    with _strides_untold(sorted(free)):
        return whole(  # type: ignore[no-any-return]
            fx.GraphModule(gm, graph),
            inputs,
            checked,
            *rest,
            **{**options, "static_input_idxs": static},
        )


def _input(val: Any, in_storage: bool) -> Any:
    """A value like `val` that is a view of nothing."""
    if in_storage or not isinstance(val, torch.Tensor):
        return val
    mode = torch._guards.detect_fake_mode([val])
    assert mode is not None
    with mode:
        return torch.empty_strided(val.shape, val.stride(), dtype=val.dtype, device=val.device)


@contextlib.contextmanager
def _strides_untold(free: list[int] | None = None) -> Iterator[None]:
    """AOTAutograd waits for the strides of one compiled graph, and says of its inputs which may be
    written to; of a region's, these may."""
    context = torch._guards.TracingContext.try_get()
    with contextlib.ExitStack() as stack:
        if context is not None:
            stack.enter_context(mock.patch.object(context, "output_strides", None))
        if context is not None and context.fw_metadata is not None:
            stack.enter_context(mock.patch.object(context.fw_metadata, "bw_donated_idxs", free))
        yield


def _moved(val: Any, value: Any) -> bool:
    """Whether a value is laid out otherwise than when it was traced: one that a compiled forward
    saved, of a convolution whose results Inductor lays out by channels."""
    tensors = isinstance(val, torch.Tensor) and isinstance(value, torch.Tensor)
    return tensors and _text(val) != _text(value)


def _same(stride: Any, val: torch.Tensor) -> bool:
    """Whether a stride that Inductor tells is that of a value, but for dims of one element."""
    return all(a == b or size == "1" for a, b, size in zip(stride, _text(val), map(str, val.shape)))


def _text(val: torch.Tensor) -> tuple[str, ...]:
    return tuple(str(each) for each in val.stride())


def _rules_told_once() -> Any:
    """Inductor asks one object of the dtypes of operators, and fills it anew for each operator that
    it writes: a third of what it takes to write a draw of random numbers."""
    rules = utils.op_dtype_propagation_rules
    told, fill = -1, DtypePropagationOpsHandler.__init__

    def once(self: DtypePropagationOpsHandler) -> None:
        nonlocal told
        if len(rules) != told:
            fill(self)
            told = len(rules)

    return mock.patch.object(DtypePropagationOpsHandler, "__init__", once)
