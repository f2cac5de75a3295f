"""Capture: Dynamo's torch-level graph -> functional, pre-dispatch ATen graph of serial shapes.

The captured graph is the graph of the unsharded model, whatever is sharded already: a parameter
that is stored as a DTensor enters as a plain fake of its global shape and `materialize` is the
identity. Composite operators (linear, scaled_dot_product_attention, layer_norm, ...) stay whole,
because that is the level at which they are sharded.

What tracing cannot express is made explicit here:

- no_grad regions become `aten.detach` of the values that enter them;
- autocast, in the graph or around the call, becomes casts (autocast.py);
- checkpointed regions are inlined, their nodes tagged as torch's partitioner reads them;
- mutation of an input becomes an additional output;
- higher-order operators that have no ATen form (a custom autograd.Function, flex_attention)
  stay as one opaque node that holds Dynamo's own subgraphs.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.distributed.tensor import DTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from autoshard import autocast
from autoshard.interpreter import (
    NO_GRAD,
    Extra,
    Hop,
    Interpreter,
    Slot,
    TraceState,
    extras,
    turns_grad_on,
    unwrap,
)

aten = torch.ops.aten

GLOBAL_TYPES: list[type] = [DTensor]
"""Tensor subclasses whose own shape is the global one; captured as plain tensors of that shape."""

# Results that depend on an operand's shape only, or on nothing that has a derivative.
_NOT_DIFFERENTIABLE = frozenset(
    """
    detach zeros_like ones_like full_like empty_like rand_like randn_like randint_like new_zeros
    new_ones new_full new_empty new_empty_strided
    """.split()
)
# Elements of a tuple result that carry state, not gradients: new running statistics.
_STATE_ELEMENTS = {
    aten._native_batch_norm_legit_functional.default: (3, 4),
    aten._batch_norm_with_update_functional.default: (3, 4, 5),
}
_KEPT_META = ("stack_trace", "nn_module_stack", "recompute", "ac_graph_id", "unbacked_bindings")

# Kernels under a composite operator, for checkpoint policies, which speak of kernels.
_KERNELS = {
    aten.linear.default: (aten.mm.default, aten.addmm.default),
    aten.matmul.default: (aten.mm.default, aten.bmm.default),
    aten.scaled_dot_product_attention.default: (
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
    ),
}


def capture(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> fx.GraphModule:
    """The functional ATen graph of Dynamo's `gm`, one placeholder for each of its placeholders.

    example_inputs: one a placeholder; used where a placeholder has no `meta["example_value"]`.

    The result has, on every node, `meta["val"]` (fake value, serial shape) and, where that is a
    tensor or holds tensors, `meta["diff"]`: whether a gradient can flow to it. On the module:

    - `meta["n_outputs"]`: the number of the user's outputs, which come first;
    - `meta["mutated"]`: for each further output, the index of the placeholder whose new value it
      is. The node is the same as that of a user's output where both are the mutated input;
    - `meta["enable_grad"]`: True where the caller's grad mode is off and the graph turns it on;
      the result must then be differentiated, that is compiled and run under torch.enable_grad().

    Grad mode, autocast, inference mode and random state are as before when it returns or raises.
    Raises CaptureError.
    """
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    given = list(example_inputs) + [None] * (len(placeholders) - len(example_inputs))
    found = [node.meta.get("example_value", example) for node, example in zip(placeholders, given)]
    mode = _fake_mode(found)
    ambient_grad = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    # With gradients off around the call the graph still says what training needs, unless the
    # model itself turns them on: then its regions count literally.
    literal = not ambient_grad and turns_grad_on(gm) and not torch.is_inference_mode_enabled()
    with torch.inference_mode(False), torch.no_grad():
        inputs = [_plain(value, mode) for value in found]
        extra = extras(gm)
        traced, seen = _trace(gm, inputs, extra, mode, grad=not literal)
        result = _Rebuild(gm, traced, seen, extra, inputs).run()
    outputs = result.graph.output_node().all_input_nodes
    result.meta["enable_grad"] = literal and any(n.meta.get("diff") for n in outputs)
    return result


def _fake_mode(found: list[Any]) -> FakeTensorMode:
    """The mode of the placeholders' fakes; TracingContext's own may be another one."""
    for value in found:
        if isinstance(value, torch.Tensor) and (fake := _inner_fake(value)) is not None:
            return fake.fake_mode
    return FakeTensorMode()


def _inner_fake(value: torch.Tensor) -> FakeTensor | None:
    """The first fake inside a tensor, which may be a subclass around others."""
    if isinstance(value, FakeTensor):
        return value
    if is_traceable_wrapper_subclass(value):
        for name in value.__tensor_flatten__()[0]:
            if (fake := _inner_fake(getattr(value, name))) is not None:
                return fake
    return None


def _plain(value: Any, mode: FakeTensorMode) -> Any:
    """A fake of the global shape, usable outside of inference mode."""
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(value, tuple(GLOBAL_TYPES)) or value.is_inference():
        with mode:
            fake = torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device=value.device
            )
    elif isinstance(value, FakeTensor):
        return value
    else:
        fake = mode.from_tensor(value, static_shapes=True)
    if fake.requires_grad != value.requires_grad:
        fake = fake.detach().requires_grad_(value.requires_grad)
    return fake


class _TraceResult:
    """What is known of a trace besides its graph."""

    state: TraceState
    mutated: tuple[int, ...]
    n_outputs: int


def _trace(
    gm: fx.GraphModule, inputs: list[Any], extra: list[Extra], fake: FakeTensorMode, *, grad: bool
) -> tuple[fx.GraphModule, _TraceResult]:
    ambient = autocast.ambient()
    result = _TraceResult()

    def run(*values: Any) -> list[Any]:
        with autocast.AutocastMode(ambient) as mode:
            wrapped = [
                FunctionalTensor.to_functional(v) if isinstance(v, torch.Tensor) else v
                for v in values
            ]
            mode.parameters = frozenset(
                id(w)
                for w, v in zip(wrapped, inputs)
                if isinstance(v, torch.Tensor) and v.requires_grad and v.is_leaf
            )
            own = wrapped[: len(inputs)]
            result.state = TraceState(mode, wrapped[len(inputs) :], grad)
            returned = Interpreter(gm, result.state).run(*own)
            outputs = pytree.tree_leaves(returned)
            result.n_outputs = len(outputs)
            result.mutated = tuple(i for i, w in enumerate(own) if _mutated(w))
            outputs += [own[i] for i in result.mutated]
            return [unwrap(value) for value in outputs] + result.state.hop_inputs

    with contextlib.ExitStack() as stack:
        for device in ambient:
            stack.enter_context(torch.autocast(device, enabled=False))
        stack.enter_context(fake)
        stack.enter_context(fx.traceback.preserve_node_meta())
        if fake.shape_env is not None:
            stack.enter_context(fake.shape_env.ignore_fresh_unbacked_symbols())
        values = [
            _plain(e.value, fake) if isinstance(e.value, torch.Tensor) else e.value for e in extra
        ]
        return make_fx(run, pre_dispatch=True)(*inputs, *values), result


def _mutated(wrapped: Any) -> bool:
    return isinstance(wrapped, FunctionalTensor) and torch._functionalize_has_data_mutation(
        wrapped.elem
    )


class _Rebuild:
    """The trace -> the graph that is handed out: readable names, joined extras, `diff`."""

    def __init__(
        self,
        gm: fx.GraphModule,
        traced: fx.GraphModule,
        result: _TraceResult,
        extra: list[Extra],
        inputs: list[Any],
    ) -> None:
        self.gm, self.traced, self.result = gm, traced, result
        self.inputs, self.extra = inputs, extra
        self.graph = fx.Graph()
        self.root = torch.nn.Module()
        self.env: dict[fx.Node, fx.Node] = {}
        self.detached: dict[fx.Node, fx.Node] = {}
        self.hops: dict[int, Hop] = {}
        for hop in result.state.hops:
            self.hops.update(dict.fromkeys(range(hop.first, hop.first + hop.count), hop))
        self.hop_values: dict[int, fx.Node] = {}
        self.placeholders: list[fx.Node] = []
        self.position: dict[fx.Node, int] = {}
        self.outputs: list[Any] = []

    def run(self) -> fx.GraphModule:
        nodes = list(self.traced.graph.nodes)
        self.outputs = list(nodes[-1].args[0])
        self.placeholders = [node for node in nodes if node.op == "placeholder"]
        self.position = {node: i for i, node in enumerate(self.placeholders)}
        sources = [node for node in self.gm.graph.nodes if node.op == "placeholder"]
        for node, source, val in zip(self.placeholders, sources, self.inputs):
            new = self.graph.placeholder(source.name)
            new.meta = {k: v for k, v in source.meta.items() if k != "example_value"}
            self._value(new, val, _requires_grad(val))
            self.env[node] = new
        for node in nodes:
            if node.op == "call_function" and node.target is not torch._C._set_grad_enabled:
                self._call(node)
            elif node.op == "get_attr":
                self._get_attr(node)
        count = self.result.n_outputs + len(self.result.mutated)
        kept = [self._at(v) if isinstance(v, fx.Node) else v for v in self.outputs[:count]]
        output = self.graph.output(tuple(kept))
        output.meta["val"] = tuple(v.meta.get("val") if isinstance(v, fx.Node) else v for v in kept)
        self.graph.eliminate_dead_code()
        result = fx.GraphModule(self.root, self.graph)
        result.meta["n_outputs"] = self.result.n_outputs
        result.meta["mutated"] = self.result.mutated
        return result

    def _at(self, node: fx.Node) -> fx.Node:
        """The new node of a traced one; constants and opaque values are made at first use."""
        if node not in self.env:
            self.env[node] = self._extra(self.position[node] - len(self.inputs))
        return self.env[node]

    def _extra(self, index: int) -> fx.Node:
        item = self.extra[index]
        if item.constant is None:
            return self._hop_value(index)
        name = self._attribute(item.constant, item.value)
        new = self.graph.get_attr(name)
        self._value(new, self._traced_input(index).meta["val"], _requires_grad(item.value))
        return new

    def _traced_input(self, index: int) -> fx.Node:
        return self.placeholders[index + len(self.inputs)]

    def _attribute(self, name: str, value: Any) -> str:
        """Attach a constant or a subgraph to the result under a free name."""
        free, count = name, 0
        while hasattr(self.root, free):
            count += 1
            free = f"{name}_{count}"
        if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
            self.root.register_buffer(free, value, persistent=False)
        else:
            setattr(self.root, free, value)
        return free

    def _get_attr(self, node: fx.Node) -> None:
        value = getattr(self.traced, str(node.target))
        if isinstance(value, torch.Tensor) and value.dim() == 0:
            options = {"dtype": value.dtype, "device": value.device}
            new = self.graph.call_function(aten.full.default, ([], value.item()), options)
        else:
            new = self.graph.get_attr(self._attribute(str(node.target).lstrip("_"), value))
        self._value(new, node.meta.get("val", value), False)
        self.env[node] = new

    def _call(self, node: fx.Node) -> None:
        if node.target is aten.copy.default:
            self.env[node] = self._copy(node)
            return
        custom = dict(node.meta.get("custom", {}))
        no_grad = custom.pop(NO_GRAD, False) and node.target is not operator.getitem
        new = self.graph.node_copy(node, self._at)
        new.meta = {key: node.meta[key] for key in _KEPT_META if key in node.meta}
        if custom:
            new.meta["custom"] = custom
        if no_grad:
            self._detach_operands(new)
        self._value(new, node.meta.get("val"), self._is_differentiable(new))
        self._apply_policy(new)
        self.env[node] = new

    def _copy(self, node: fx.Node) -> fx.Node:
        """`copy(destination, source)`, which has no derivative, as a cast or clone and an expand."""
        destination, source = (self._at(arg) for arg in node.args[:2])  # type: ignore[arg-type]
        if node.meta.get("custom", {}).get(NO_GRAD) and source.meta["diff"]:
            source = self._detached(source, node)
        want, have = node.meta["val"], source.meta["val"]
        if (want.dtype, want.device) != (have.dtype, have.device):
            options = {"dtype": want.dtype, "device": want.device}
            source = self._derived(node, aten._to_copy.default, (source,), options)
        else:
            source = self._derived(node, aten.clone.default, (source,), {})
        if want.shape != have.shape:
            if all(isinstance(size, int) for size in want.shape):
                arguments: tuple[Any, ...] = (source, list(want.shape))
                source = self._derived(node, aten.expand.default, arguments, {})
            else:
                source = self._derived(node, aten.expand_as.default, (source, destination), {})
        return source

    def _derived(self, like: fx.Node, target: Any, args: Any, kwargs: Any) -> fx.Node:
        """A node that is not in the trace, on behalf of one that is."""
        new = self.graph.call_function(target, args, kwargs)
        new.meta = {key: like.meta[key] for key in _KEPT_META if key in like.meta}
        custom = {k: v for k, v in like.meta.get("custom", {}).items() if k != NO_GRAD}
        if custom:
            new.meta["custom"] = custom
        values = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        self._value(new, target(*values[0], **values[1]), self._is_differentiable(new))
        return new

    def _detach_operands(self, node: fx.Node) -> None:
        with self.graph.inserting_before(node):
            for operand in node.all_input_nodes:
                if operand.meta.get("diff"):
                    node.replace_input_with(operand, self._detached(operand, node))

    def _detached(self, operand: fx.Node, user: fx.Node) -> fx.Node:
        """The one detached copy of a value that enters no_grad regions."""
        if operand not in self.detached:
            self.detached[operand] = self._derived(user, aten.detach.default, (operand,), {})
        return self.detached[operand]

    def _hop_value(self, index: int) -> fx.Node:
        """One value of an opaque node; all of them are made when the first is needed."""
        hop = self.hops[index]
        if index not in self.hop_values:
            self._hop(hop)
        return self.hop_values[index]

    def _hop(self, hop: Hop) -> None:
        first = self.result.n_outputs + len(self.result.mutated)
        operands: list[Any] = []
        for operand in hop.operands:
            if isinstance(operand, Slot):
                slot = self.outputs[first + operand.index]
                operand = self._at(slot) if isinstance(slot, fx.Node) else slot
            elif isinstance(operand, fx.GraphModule):
                name = self._attribute("body", operand)
                operand = self.graph.get_attr(name)
            operands.append(operand)
        args, kwargs = pytree.tree_unflatten(operands, hop.spec)
        new = self.graph.call_function(hop.node.target, args, kwargs)  # type: ignore[arg-type]
        custom = dict(hop.meta.get("custom", {}))
        new.meta = {key: hop.meta[key] for key in _KEPT_META if key in hop.meta}
        if custom.pop(NO_GRAD, False):
            self._detach_operands(new)
        if custom:
            new.meta["custom"] = custom
        val = hop.node.meta["example_value"]
        self._value(new, val, self._is_differentiable(new))
        if not isinstance(val, (tuple, list)):
            self.hop_values[hop.first] = new
            return
        for i, element in enumerate(val):
            item = self.graph.call_function(operator.getitem, (new, i))
            item.meta = {k: v for k, v in new.meta.items() if k not in ("val", "diff")}
            self._value(item, element, new.meta["diff"])
            self.hop_values[hop.first + i] = item

    def _is_differentiable(self, node: fx.Node) -> bool:
        """Whether a gradient can flow to the node's value, as far as its operands say."""
        target = node.target
        if isinstance(target, torch._ops.OpOverload):
            if target.overloadpacket.__name__ in _NOT_DIFFERENTIABLE:
                return False
        elif target is operator.getitem:
            source = node.args[0]
            assert isinstance(source, fx.Node)
            if node.args[1] in _STATE_ELEMENTS.get(source.target, ()):  # type: ignore[call-overload]
                return False
        return any(operand.meta.get("diff") for operand in node.all_input_nodes)

    def _apply_policy(self, node: fx.Node) -> None:
        """Ask the user's policy of a selectively checkpointed region about one node."""
        policy = self.result.state.policies.get(node.meta.get("ac_graph_id", -1))
        if policy is None or not isinstance(node.target, torch._ops.OpOverload):
            return
        val = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta.get("val"))
        args, kwargs = val
        context = SelectiveCheckpointContext(is_recompute=False)
        for kernel in (node.target, *_KERNELS.get(node.target, ())):
            decided = policy(context, kernel, *args, **kwargs)
            if isinstance(decided, bool):
                decided = CheckpointPolicy.MUST_SAVE if decided else None
            if decided in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE):
                node.meta["recompute"] = decided
                return

    @staticmethod
    def _value(node: fx.Node, val: Any, differentiable: bool) -> None:
        """Set `val`, and `diff` where the value is a tensor or holds tensors."""
        node.meta["val"] = val
        tensors = [t for t in pytree.tree_leaves(val) if isinstance(t, torch.Tensor)]
        if tensors:
            node.meta["diff"] = differentiable and any(
                t.dtype.is_floating_point or t.dtype.is_complex for t in tensors
            )


def _requires_grad(val: Any) -> bool:
    return isinstance(val, torch.Tensor) and val.requires_grad
