"""Inductor's own account of memory: the buffers that the code it generates allocates and frees.

Inductor lowers, fuses, schedules and generates the code of each graph, and is stopped before that
is compiled. The lines of the code say what is allocated, what gets the memory of a dead buffer, and
what is freed: its memory plan, for whatever backend the graph's device has.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import fx

from autoshard.runtime.compat.aot import AfterCut, Finish, to_be_read, twice
from autoshard.runtime.compat.inductor import (
    Order,
    expand,
    keep_order,
    keep_renames,
    partitioner,
)

ON_HOST: set[Any] = set()
"""Operators whose result is in the host's memory, whatever the graph's device."""


class InductorKernel(NamedTuple):
    """A stretch of generated code: what it allocates, runs, and frees afterwards.

    name: of the last kernel that it runs. made: bytes by buffer. freed: buffers, of which some are
    inputs of the graph.
    """

    name: str
    made: dict[str, int]
    freed: tuple[str, ...]


@dataclass(frozen=True)
class InductorGraph:
    """The memory plan of one graph.

    graph: as it was lowered. names: of its results, as the backward's inputs are named. results:
    the buffer that holds each, or the input; None for what is no tensor. origins: by buffer, the
    name of the node whose value it is, where it is that of one node.
    """

    graph: fx.Graph
    kernels: tuple[InductorKernel, ...]
    names: tuple[str, ...]
    results: tuple[str | None, ...]
    origins: dict[str, str]


@dataclass(frozen=True)
class InductorStep:
    """The memory plans of a forward and of its backward, None where nothing needs a gradient."""

    forward: InductorGraph
    backward: InductorGraph | None


def inductor_step(
    gm: fx.GraphModule,
    fakes: Sequence[Any],
    cut: AfterCut,
    finish: Finish | None,
    order: Order | None,
) -> InductorStep | None:
    """The memory plans of the graphs that `inductor_compile` makes of `gm`; runs nothing.

    fakes: one a placeholder, of one fake mode. None, with a warning, where Inductor cannot generate
    code: another version of torch, or a device whose compiler is not installed here.
    """
    with torch.inference_mode(False), torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the user gets Inductor's warnings where it compiles
        try:
            return twice(lambda: _generated(gm, fakes, cut, finish, order))
        except _Unavailable as error:
            reason = str(error)
    warnings.warn(
        f"Inductor of torch {torch.__version__} cannot say which buffers its code allocates "
        f"({reason}): memory is that of the graphs run operator by operator",
        stacklevel=2,
    )
    return None


class _Unavailable(Exception):
    """Inductor did not come to an end with a graph."""


def _generated(
    gm: fx.GraphModule,
    fakes: Sequence[Any],
    cut: AfterCut,
    finish: Finish | None,
    order: Order | None,
) -> InductorStep:
    from torch._functorch import config
    from torch._inductor import config as inductor_config
    from torch._inductor.compile_fx import compile_fx

    found: list[InductorGraph] = []
    failed: list[Exception] = []

    def inner_compile(graph: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        if finish is not None:
            finish(graph, bool(found))
        inference = bool(options.get("is_inference"))
        try:
            passes = {
                "post_grad_custom_pre_pass": expand(),
                "post_grad_custom_post_pass": keep_order(order),
            }
            with inductor_config.patch(passes):
                found.append(_graph(graph, inputs, inference, bool(found)))
        except Exception as error:
            failed.append(error)
            raise
        return to_be_read

    keep_renames()
    # nothing is compiled, so nothing may be cached; backward is made when forward is, not later
    try:
        with (
            config.patch(enable_autograd_cache=False, force_non_lazy_backward_lowering=True),
            inductor_config.patch(fx_graph_cache=False, **partitioner(gm, cut)),
        ):
            compile_fx(gm, list(fakes), inner_compile=inner_compile)
    except Exception as error:
        if not failed:
            raise
        raise _Unavailable(f"{type(failed[0]).__name__}: {failed[0]}") from error
    return InductorStep(found[0], found[1] if len(found) > 1 else None)


def _graph(gm: fx.GraphModule, inputs: Any, inference: bool, backward: bool) -> InductorGraph:
    from torch._guards import detect_fake_mode
    from torch._inductor.compile_fx import (
        _recursive_post_grad_passes,
        record_original_output_strides,
    )
    from torch._inductor.debug import DebugContext
    from torch._inductor.fx_passes.post_grad import view_to_reshape
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    results: Any = next(iter(reversed(gm.graph.nodes))).args[0]
    names = tuple(n.name if isinstance(n, fx.Node) else "" for n in results)
    mode: Any = detect_fake_mode(inputs)
    record_original_output_strides(gm)
    view_to_reshape(gm)
    # what runs again with a saved random state reads that state, which is no fake tensor
    states = mock.patch.object(mode, "allow_non_fake_inputs", True)
    with states, V.set_fake_mode(mode), torch.no_grad():
        _recursive_post_grad_passes(gm, is_inference=inference)
        lowering = GraphLowering(
            gm,
            example_inputs=inputs,
            shape_env=mode.shape_env,
            is_inference=inference,
            is_backward=backward,
        )
        with (
            V.set_graph_handler(lowering),
            V.set_extern_kernel_nodes([]),
            V.set_debug_handler(DebugContext()),
        ):
            lowering.run(*inputs)
            lowering.codegen()
            plan = _Plan(lowering)
            kernels = tuple(plan.kernels())
            owners = tuple(plan.holds.get(name) for name in lowering.get_output_names())
    return InductorGraph(gm.graph, kernels, names, owners, plan.origins)


class _Plan:
    """The lines of a generated program, read in order.

    holds: by name in the code, the buffer whose memory it is. Memory is freed when the last of its
    names is deleted.
    """

    def __init__(self, lowering: Any) -> None:
        self.lowering = lowering
        self.holds: dict[str, str] = {name: name for name in lowering.graph_input_names}
        self.origins: dict[str, str] = {}
        self.made: dict[str, int] = {}
        self.alive = dict(self.holds)
        self.order = {node: i for i, node in enumerate(lowering.graph.nodes)}

    def kernels(self) -> Iterator[InductorKernel]:
        """Each stretch of code up to where something is freed."""
        name, freed = "", list[str]()
        for line in self.lowering.wrapper_code.lines:
            kind = type(line).__name__
            if freed and (kind in _RUNS or kind in _MAKES):
                yield self._stretch(name, freed)
                freed = []
            gone = self._read(kind, line)
            if kind in _RUNS:
                name = self._name(line)
            freed += gone
        yield self._stretch(name, freed)

    def _name(self, line: Any) -> str:
        """The kernel's name; of an operator that Inductor calls, the node that it is of."""
        if kernel := getattr(line, "kernel_name", None):
            return str(kernel)
        buffer, node = line.node.get_name(), line.node.get_origin_node()
        return self.origins.get(buffer, buffer if node is None else node.name)

    def _stretch(self, name: str, freed: list[str]) -> InductorKernel:
        made, self.made = self.made, {}
        return InductorKernel(name, made, tuple(freed))

    def _read(self, kind: str, line: Any) -> list[str]:
        """Take in one line; the memory that it frees."""
        if kind == "AllocateLine":
            self._make(line.node)
        elif kind == "ReinterpretLine":
            self._alias(line.reused_as.get_name(), line.node.get_name())
        elif kind == "ReuseLine":
            self._alias(line.reused_as.get_name(), line.node.get_name())
            if line.delete_old:
                return self._drop(line.node.get_name())
        elif kind == "ExternKernelAllocLine":
            self._result(line.node)
        elif kind == "MultiOutputLine":
            self._result(self.lowering.get_buffer(line.result_name))
        elif kind == "FreeLine" or (kind == "FreeIfNotReusedLine" and not line.is_reused):
            return self._drop(line.node.get_name())
        return []

    def _result(self, buffer: Any) -> None:
        """Memory of an operator that allocates its result: new, or that of an operand."""
        from torch._inductor import ir

        layout = buffer.get_output_spec()
        if isinstance(layout, ir.MutationLayoutSHOULDREMOVE):
            return
        operands = list(buffer.get_inputs_that_alias_output())
        if not isinstance(layout, ir.Layout):  # its results are buffers of their own
            if operands:
                self._alias(buffer.get_name(), operands[0])
        elif operands and operands[0] in self.holds:
            self._alias(buffer.get_name(), operands[0])
        else:
            self._make(buffer)

    def _make(self, buffer: Any) -> None:
        graph, name = self.lowering, buffer.get_name()
        sizes = graph.sizevars  # torch 2.13 renamed the method
        hint = getattr(sizes, "optimization_hint", None) or sizes.size_hint
        numel = int(hint(graph.get_allocation_storage_size(buffer), fallback=0))
        self.made[name] = numel * buffer.get_dtype().itemsize
        self.holds[name] = self.alive[name] = name
        makers = [buffer, *(getattr(buffer, "inputs", None) or ())][:2]
        if any(getattr(maker, "op_overload", None) in ON_HOST for maker in makers):
            self.made[name] = 0
        if not hasattr(buffer, "origins"):  # what a Triton kernel sums in is no value of the graph
            return
        # of a collective the last origin is the wait for it, and others are those of its operand
        operator = getattr(buffer, "op_overload", None)
        own = [node for node in buffer.origins if node.target is operator]
        node = max(own, key=lambda node: self.order.get(node, -1), default=buffer.get_origin_node())
        origins = [node] if node is not None else list(buffer.origins)
        if len(origins) == 1:
            self.origins[name] = origins[0].name

    def _alias(self, name: str, source: str) -> None:
        if source in self.holds:
            self.holds[name] = self.alive[name] = self.holds[source]

    def _drop(self, name: str) -> list[str]:
        owner = self.alive.pop(name, None)
        return [owner] if owner is not None and owner not in self.alive.values() else []


_MAKES = frozenset({"AllocateLine", "MultiOutputLine"})
_RUNS = frozenset(
    {
        "ExternKernelAllocLine",
        "ExternKernelMultiOutLine",
        "ExternKernelOutLine",
        "IndexPutFallbackLine",
        "KernelCallLine",
        "ScatterFallbackLine",
    }
)
