"""The interpreter behind `capture`: runs Dynamo's graph node by node under the tracing modes.

It gives a meaning to what an ATen trace cannot hold: grad-mode and autocast regions (kept as
state, no nodes) and opaque higher-order operators.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._ops import HigherOrderOperator
from torch.utils import _pytree as pytree

from autoshard.capture.autocast import AutocastMode
from autoshard.capture.memories import Names, Slot, unwrap
from autoshard.capture.subgraphs import REGION_TAGS, RegionPolicy
from autoshard.runtime import compat
from autoshard.runtime.compat import FunctionalTensor
from autoshard.runtime.errors import CaptureError, source_line
from autoshard.runtime.graph_meta import NO_GRAD, RANDOM_STATE
from autoshard.runtime.parameters import unshard_parameter
from autoshard.runtime.randomness import region

IDENTITY_TARGETS: set[Callable[..., Any]] = {unshard_parameter}
"""Functions of one tensor that capture reads as the identity."""

# They write into their operands, which a functional graph cannot hold.
_MUTATING = ("triton_kernel_wrapper_mutation", "auto_functionalized", "auto_functionalized_v2")

_DETACHING = (torch.detach, compat.GET_DATA, "detach")


class Hop(NamedTuple):
    """An opaque higher-order node as the trace saw it.

    operands: (args, kwargs) flattened; a tensor or a symbol is replaced by `Slot`.
    first, n_values: its values among the extra inputs.
    """

    node: fx.Node
    operands: list[Any]
    spec: pytree.TreeSpec
    first: int
    n_values: int
    meta: dict[str, Any]


class Extra(NamedTuple):
    """An input of the trace that is not one of the graph: a constant or an opaque node's value."""

    value: Any
    constant: str | None


def extras(gm: fx.GraphModule) -> list[Extra]:
    """The extra inputs that the trace of `gm` needs, in the order in which it meets them."""
    found: list[Extra] = []
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            value: Any = operator.attrgetter(str(node.target))(gm)
            if isinstance(value, torch.Tensor):
                found.append(Extra(value, str(node.target).replace(".", "_")))
        elif node.target is torch.tensor and not node.all_input_nodes and not is_scalar(node.args):
            found.append(Extra(torch.tensor(*node.args, **node.kwargs), node.name))
        elif isinstance(node.target, HigherOrderOperator):
            values, _ = _opaque_values(node)
            found += [Extra(value, None) for value in values]
    return found


def is_scalar(args: Any) -> bool:
    """Whether the arguments of a `torch.tensor` call say one number, or none at all."""
    return args[0] == [] or isinstance(args[0], (bool, int, float, complex))


def _opaque_values(node: fx.Node) -> tuple[list[Any], bool]:
    """The fake values of an opaque node, and whether they come as one tuple."""
    assert isinstance(node.target, HigherOrderOperator)
    name = node.target.name()
    value = node.meta.get("example_value", node.meta.get("val"))
    values = list(value) if isinstance(value, (tuple, list)) else [value]
    flat = all(v is None or isinstance(v, (torch.Tensor, torch.SymInt, int)) for v in values)
    if name in _MUTATING or value is None or not flat:
        reason = "writes into its operands" if name in _MUTATING else "has no flat fake value"
        raise CaptureError(
            f"the higher-order operator {name} cannot be captured: it {reason}",
            where=source_line(node.stack_trace),
            remedy="Call it outside of the compiled model (torch.compiler.disable), or replace it.",
        )
    return values, isinstance(value, (tuple, list))


class Interpreter(fx.Interpreter):
    """Runs a graph without inlined subgraphs."""

    def __init__(self, gm: fx.GraphModule, state: TraceState) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.state = state

    def run_node(self, n: fx.Node) -> Any:
        try:
            self.state.node = n
            return super().run_node(n)
        except CaptureError:
            raise
        except Exception as error:
            what = f"cannot capture {n.target}: {type(error).__name__}: {error}"
            raise CaptureError(what, where=source_line(n.stack_trace)) from error

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        return self.state.next_extra() if isinstance(value, torch.Tensor) else value

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self.state.at(args, kwargs, lambda: self._call_function(target, args, kwargs))

    def _call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        state = self.state
        if target in IDENTITY_TARGETS:
            return args[0]
        if target is compat.GET_DATA:
            return args[0].detach()
        if target is torch.detach_:
            return self._detach(args[0])
        if target is torch.tensor and not state.node.all_input_nodes:
            return self._constant(args, kwargs)
        if region := _REGIONS.get(target):
            return region(state, args)
        if isinstance(target, HigherOrderOperator):
            return state.opaque(args, kwargs)
        return super().call_function(target, args, kwargs)

    def _constant(self, args: Any, kwargs: Any) -> Any:
        """torch.tensor of Python numbers; one number becomes `full`, none `empty`: no attribute."""
        if not is_scalar(args):
            return self.state.next_extra()
        device = kwargs.get("device")
        if args[0] == []:
            return torch.empty((0,), dtype=kwargs.get("dtype"), device=device)
        dtype = kwargs.get("dtype") or torch.result_type(args[0], args[0])
        return torch.full((), args[0], dtype=dtype, device=device)

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target == "set_":
            told = "a tensor is given the memory of another (set_), which a functional graph lacks"
            where = source_line(self.state.node.meta.get("stack_trace"))
            raise CaptureError(told, where=where, remedy="Use the other tensor itself.")
        if target == "detach_":
            return self.state.at(args, kwargs, lambda: self._detach(args[0]))
        method = super().call_method
        return self.state.at(args, kwargs, lambda: method(target, args, kwargs))

    def _detach(self, x: torch.Tensor) -> torch.Tensor:
        """`x.detach_()`, of which a functional trace has nothing: a write of `x` without its
        gradient, which a view of it would see, too."""
        for y in self.env.values():
            if y is not x and isinstance(y, FunctionalTensor) and compat.same_storage(y, x):
                raise CaptureError(
                    "a tensor that has views is detached in place",
                    where=source_line(self.state.node.meta.get("stack_trace")),
                    remedy="Write x = x.detach().",
                )
        return x.copy_(x.detach())


class TraceState:
    """The state of a trace at its present node.

    extra: values of `extras(gm)`, consumed in order. grad: the grad mode at the graph's start, and
    at the present node; trains: whether it was on at the start. policies: of checkpointed regions.
    """

    def __init__(
        self, mode: AutocastMode, extra: list[Any], grad: bool, policies: Mapping[int, RegionPolicy]
    ) -> None:
        self.mode = mode
        self.grad = grad
        self.random_states: list[str] = []  # of the `rng.fork` blocks around the node
        self.policies = policies
        self.hops: list[Hop] = []
        self.extra_outputs: list[Any] = []
        self.names = Names(self.output)
        self.node: fx.Node
        self.trains = grad
        self._extra = extra
        self._position = 0
        self.inference: list[bool] = []  # of the regions around the node

    def next_extra(self) -> Any:
        self._position += 1
        return self._extra[self._position - 1]

    def at(self, args: Any, kwargs: Any, run: Callable[[], Any]) -> Any:
        """The result of `run`, whose nodes are tagged; the operands are looked at before and after.

        Looking applies pending writes to views, whose nodes must not carry the tags.
        """
        leaves = pytree.arg_tree_leaves(*args, **kwargs)
        operands = [x for x in leaves if isinstance(x, FunctionalTensor)]
        meta = fx.traceback.get_current_meta()  # tracing copies it onto every node
        tags = {key: meta.pop(key) for key in REGION_TAGS if key in meta}
        self.names.read(operands)
        before = dict(meta)
        if self.is_hidden:
            meta["custom"] = {**meta.get("custom", {}), NO_GRAD: True}
        if self.random_states:
            meta["custom"] = {**meta.get("custom", {}), RANDOM_STATE: self.random_states[-1]}
        meta |= tags
        result = run()
        detaches, hidden = self.node.target in _DETACHING, self.trains and self.is_hidden
        result = self.names.name(operands, result, detaches, hidden)
        meta.clear()
        meta.update(before)
        self.names.write(operands, self.is_hidden)
        return result

    @property
    def is_hidden(self) -> bool:
        """Whether autograd records nothing here."""
        return not self.grad or any(self.inference)

    def output(self, value: Any) -> Slot:
        """One more output of the trace."""
        self.extra_outputs.append(value)
        return Slot(len(self.extra_outputs) - 1)

    def set_grad(self, args: Any) -> None:
        self.grad = bool(args[0])

    def fork(self, args: Any) -> None:
        if args[0] is None:
            self.random_states.pop()
        else:
            self.random_states.append(args[0])

    def opaque(self, args: Any, kwargs: Any) -> Any:
        """Record an opaque node and return its values, which are extra inputs."""
        values, is_tuple = _opaque_values(self.node)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        operands: list[Any] = []
        # The second body of a custom function is its backward, which runs outside of autocast.
        bodies, backward = 0, self.node.target is torch.ops.higher_order.autograd_function_apply
        for leaf in leaves:
            if isinstance(leaf, (torch.Tensor, torch.SymInt)):
                operands.append(self.output(unwrap(leaf)))
            elif isinstance(leaf, fx.GraphModule) and not (bodies and backward):
                bodies += 1
                operands.append(self.mode.wrap_subgraph(leaf))
            else:
                operands.append(leaf)
        meta = dict(fx.traceback.get_current_meta())
        self.hops.append(Hop(self.node, operands, spec, self._position, len(values), meta))
        found = [self.next_extra() for _ in values]
        return tuple(found) if is_tuple else found[0]


# Functions Dynamo leaves in its graph that set a mode; run as state, they leave no node.
_REGIONS: dict[Any, Callable[[TraceState, Any], Any]] = {
    compat.SET_GRAD: TraceState.set_grad,
    region: TraceState.fork,
    compat.ENTER_AUTOCAST: lambda state, args: state.mode.enter_region(*args),
    compat.EXIT_AUTOCAST: lambda state, args: state.mode.leave_region(),
    compat.ENTER_INFERENCE: lambda state, args: state.inference.append(bool(args[0])),
    compat.EXIT_INFERENCE: lambda state, args: state.inference.pop(),
    # hooks of saved tensors are the caller's; no tensor is saved during a trace
    **dict.fromkeys(compat.SAVED_TENSOR_HOOKS, lambda state, args: None),
}


def turns_grad_on(gm: fx.GraphModule) -> bool:
    """Whether some node of `gm` enables gradients."""
    return any(node.target is compat.SET_GRAD and node.args[0] is True for node in gm.graph.nodes)
