"""The second half of capture: the trace becomes the graph that is handed out.

The trace has extra inputs (constants, values of opaque operators), extra outputs (operands of
opaque operators) and marks of no_grad regions. Here they are joined, and every node gets `diff`.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from autoshard.capture.interpreter import Extra, Hop, TraceState
from autoshard.capture.memories import Slot, Versions
from autoshard.planning import view_chain
from autoshard.runtime import compat
from autoshard.runtime.graph_meta import DIFF, MUTATED, N_OUTPUTS, NO_GRAD, REWRITTEN

aten = torch.ops.aten

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


class Seen(NamedTuple):
    """The record of a trace of a Dynamo graph, besides its operators.

    n_outputs: the number of the user's outputs, flattened. mutated: the indices of inputs that
    have a new value; the new values follow the user's outputs, and then come the operands of
    opaque operators.
    """

    state: TraceState
    n_outputs: int
    mutated: tuple[int, ...]


class Rebuild:
    """The trace -> the graph that is handed out: readable names, joined extras, `diff`.

    gm: Dynamo's graph. traced: its trace, whose inputs are `inputs`, then `extra`.
    hidden: of each value that name 0 of a memory reads and did not write, the value alone, and what
    it was before. history: of each other name, the value that has its gradient.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        traced: fx.GraphModule,
        seen: Seen,
        inputs: list[Any],
        extra: list[Extra],
    ) -> None:
        self.gm, self.traced, self.seen = gm, traced, seen
        self.inputs, self.extra = inputs, extra
        self.graph = fx.Graph()
        self.root = torch.nn.Module()
        self.env: dict[fx.Node, fx.Node] = {}
        self.detached: dict[fx.Node, fx.Node] = {}
        self.hops: dict[int, Hop] = {}
        for hop in seen.state.hops:
            self.hops.update(dict.fromkeys(range(hop.first, hop.first + hop.n_values), hop))
        self.hop_values: dict[int, fx.Node] = {}
        self.placeholders: list[fx.Node] = []
        self.position: dict[fx.Node, int] = {}
        self.outputs: list[Any] = []
        self.hidden: dict[fx.Node, tuple[fx.Node, fx.Node]] = {}
        self.memories: Versions
        self.history: dict[int, fx.Node] = {}

    def run(self) -> fx.GraphModule:
        """The graph, with `meta[N_OUTPUTS]` and `meta[MUTATED]`."""
        nodes = list(self.traced.graph.nodes)
        self.outputs = list(nodes[-1].args[0])
        self.memories = Versions(self.seen.state.names, self._output)
        self.placeholders = [node for node in nodes if node.op == "placeholder"]
        self.position = {node: i for i, node in enumerate(self.placeholders)}
        sources = [node for node in self.gm.graph.nodes if node.op == "placeholder"]
        for node, source, val in zip(self.placeholders, sources, self.inputs):
            new = self.graph.placeholder(source.name)
            new.meta = {k: v for k, v in source.meta.items() if k != "example_value"}
            self._value(new, val, _requires_grad(val))
            self.env[node] = new
        for node in nodes:
            if node.op == "call_function" and node.target is not compat.SET_GRAD:
                self._call(node)
            elif node.op == "get_attr":
                self._get_attr(node)
        count = self.seen.n_outputs + len(self.seen.mutated)
        kept = [self._at(v) if isinstance(v, fx.Node) else v for v in self.outputs[:count]]
        viewed = {view for out in kept[: self.seen.n_outputs] for view in view_chain(out)}
        for i, place in enumerate(self.seen.mutated, self.seen.n_outputs):
            given = sources[place].meta.get("example_value", self.inputs[place])
            first = kept[i]
            while first in self.hidden:
                first = self.hidden[first][1]
            input_ = self.env[self.placeholders[place]]
            if first is not input_ and given.requires_grad and not given.is_leaf:
                input_.meta[REWRITTEN] = True
            elif kept[i] in self.hidden and kept[i] not in viewed:
                alone = self.hidden[kept[i]][0]
                kept[i] = kept[i] if alone.meta.get(DIFF) else alone
        output = self.graph.output(tuple(kept))
        output.meta["val"] = tuple(v.meta.get("val") if isinstance(v, fx.Node) else v for v in kept)
        self.graph.eliminate_dead_code()
        result = fx.GraphModule(self.root, self.graph)
        result.meta[N_OUTPUTS] = self.seen.n_outputs
        result.meta[MUTATED] = self.seen.mutated
        return result

    def _output(self, slot: Slot) -> Any:
        """An extra output of the trace."""
        return self.outputs[self.seen.n_outputs + len(self.seen.mutated) + slot.position]

    def _at(self, node: fx.Node) -> fx.Node:
        """The new node of a traced one; constants and opaque values are made at first use."""
        if node not in self.env:
            self.env[node] = self._extra(self.position[node] - len(self.inputs))
        return self.env[node]

    def _extra(self, index: int) -> fx.Node:
        item = self.extra[index]
        if item.constant is None:
            if index not in self.hop_values:  # all values of an opaque node are made at once
                self._hop(self.hops[index])
            return self.hop_values[index]
        name = self._attribute(item.constant, item.value)
        new = self.graph.get_attr(name)
        traced = self.placeholders[index + len(self.inputs)]
        self._value(new, traced.meta["val"], _requires_grad(item.value))
        return new

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
            options: dict[str, Any] = {"dtype": value.dtype, "device": value.device}
            new = self.graph.call_function(aten.full.default, ([], value.item()), options)
        else:
            new = self.graph.get_attr(self._attribute(str(node.target).lstrip("_"), value))
        self._value(new, node.meta.get("val", value), False)
        self.env[node] = new

    def _call(self, node: fx.Node) -> None:
        if (name := self.memories.name(node)) is not None:
            self.env[node] = self._read(node, name)
            return
        is_hidden = _is_hidden(node.meta)
        if is_hidden and node.target is aten.detach.default:
            source = self._at(node.args[0])  # type: ignore[arg-type]
            if not source.meta.get(DIFF):
                self.env[node] = source
                return
        if node.target is aten.copy.default:
            self.env[node] = self._as_read(node, self._copy(node))
            return
        new = self.graph.node_copy(node, self._at)
        new.meta = _kept(node.meta)
        # a view that is traced anew may serve what follows the region, too
        if is_hidden and not (self.seen.state.trains and view_chain(node)[1:]):
            self._detach_operands(new, new.all_input_nodes)
        old, name = self.memories.versions.get(node, (None, 0))
        if name and old is not None and node.args[0] is old:
            # around what was written, the memory is another name's
            self._detach_operands(new, [self._at(old)])
        self._value(new, node.meta.get("val"), self._is_differentiable(new))
        self._apply_policy(new)
        if node.target is aten.as_strided_scatter.default:
            new = self._scattered(node, new)
        self.env[node] = self._as_read(node, new)

    def _read(self, node: fx.Node, name: int) -> fx.Node:
        """What a detached tensor is after writes: the memory's value, with the name's history."""
        views = view_chain(node)
        place = next((i for i, view in enumerate(views) if view in self.memories.versions), None)
        if place is not None and self.memories.versions[views[place]][1] == name:
            value = self._at(views[place])
            value = self.hidden.get(value, (value,))[0]
            for view in reversed(views[:place]):
                if view.target is not aten.detach.default:
                    args, kwargs = fx.node.map_arg((view.args[1:], view.kwargs), self._at)
                    value = self._derived(view, view.target, (value, *args), kwargs)
            self.history[name] = value
            if value.meta.get(DIFF):
                return value
        value = self._derived(node, node.target, (self._at(node.args[0]),), {})  # type: ignore[arg-type]
        return self._with_history(node, value, self.history.get(name))

    def _as_read(self, node: fx.Node, new: fx.Node) -> fx.Node:
        """The value of a memory as name 0 reads it after a write, which another may have made, or a
        region without gradients: then it has the gradient that it had."""
        if node not in self.memories.versions:
            return new
        old, name = self.memories.versions[node]
        is_copy = view_chain(node)[-1].target is aten.copy.default
        if name == 0 and (is_copy or new.meta.get(DIFF)):
            return new  # what an operator writes by a name inside of it, autograd does not see
        before = self._at(old)
        value = self._detached(new, node) if new.meta.get(DIFF) else new
        value = self._with_history(node, value, before)
        if value is not new:
            self.hidden[value] = new, before
        return value

    def _with_history(self, like: fx.Node, value: fx.Node, history: fx.Node | None) -> fx.Node:
        """A value whose gradient reaches another: `value + (x - x.detach())`, which is exact; an
        infinite `x` gives no NaN."""
        if history is None or not history.meta.get(DIFF):
            return value
        zero = self._derived(like, aten.sub.Tensor, (history, self._detached(history, like)), {})
        zero = self._derived(like, aten.nan_to_num.default, (zero,), {})
        return self._derived(like, aten.add.Tensor, (value, zero), {})

    def _scattered(self, node: fx.Node, new: fx.Node) -> fx.Node:
        """`as_strided_scatter`; torch (2.13) has no gradient of what that does not write."""
        memory, source, *place = new.args
        if not memory.meta.get(DIFF):  # type: ignore[union-attr]
            return new
        options = {"dtype": torch.bool}
        mask = self._derived(node, aten.zeros_like.default, (memory,), options)
        ones = self._derived(node, aten.ones_like.default, (source,), options)
        mask = self._derived(node, node.target, (mask, ones, *place), new.kwargs)
        rest = self._derived(node, aten.masked_fill.Scalar, (memory, mask, 0), {})
        self._detach_operands(new, [memory])  # type: ignore[list-item]
        return self._with_history(node, new, rest)

    def _copy(self, node: fx.Node) -> fx.Node:
        """`copy(destination, source)`, which has no derivative, as cast or clone and expand."""
        destination, source = (self._at(arg) for arg in node.args[:2])  # type: ignore[arg-type]
        hidden = _is_hidden(node.meta)
        if hidden and source.meta[DIFF]:
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
        # as_strided finds the elements of what was written to by its strides, not by the source's
        self._value(source, want, source.meta[DIFF])
        return source

    def _derived(self, like: fx.Node, target: Any, args: Any, kwargs: Any) -> fx.Node:
        """A node that is not in the trace, made on behalf of a traced node."""
        new = self.graph.call_function(target, args, kwargs)
        new.meta = _kept(like.meta)
        values = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        self._value(new, target(*values[0], **values[1]), self._is_differentiable(new))
        return new

    def _detach_operands(self, node: fx.Node, operands: list[fx.Node]) -> None:
        with self.graph.inserting_before(node):
            for operand in operands:
                if operand.meta.get(DIFF):
                    node.replace_input_with(operand, self._detached(operand, node))

    def _detached(self, operand: fx.Node, user: fx.Node) -> fx.Node:
        """The one detached copy of a value that enters no_grad regions."""
        if operand not in self.detached:
            self.detached[operand] = self._derived(user, aten.detach.default, (operand,), {})
        return self.detached[operand]

    def _hop(self, hop: Hop) -> None:
        operands: list[Any] = []
        for operand in hop.operands:
            if isinstance(operand, Slot):
                slot = self._output(operand)
                operand = self._at(slot) if isinstance(slot, fx.Node) else slot
            elif isinstance(operand, fx.GraphModule):
                name = self._attribute("body", operand)
                operand = self.graph.get_attr(name)
            operands.append(operand)
        args, kwargs = pytree.tree_unflatten(operands, hop.spec)
        new = self.graph.call_function(hop.node.target, args, kwargs)  # type: ignore[arg-type]
        new.meta = _kept(hop.meta)
        if _is_hidden(hop.meta):
            self._detach_operands(new, new.all_input_nodes)
        val = hop.node.meta["example_value"]
        self._value(new, val, self._is_differentiable(new))
        if not isinstance(val, (tuple, list)):
            self.hop_values[hop.first] = new
            return
        for i, element in enumerate(val):
            item = self.graph.call_function(operator.getitem, (new, i))
            item.meta = {k: v for k, v in new.meta.items() if k not in ("val", DIFF)}
            self._value(item, element, new.meta[DIFF])
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
        return any(operand.meta.get(DIFF) for operand in node.all_input_nodes)

    def _apply_policy(self, node: fx.Node) -> None:
        """Ask the user's policy of a selectively checkpointed region about one node."""
        policy = self.seen.state.policies.get(node.meta.get("ac_graph_id", -1))
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
            node.meta[DIFF] = differentiable and any(
                t.dtype.is_floating_point or t.dtype.is_complex for t in tensors
            )


def _kept(meta: dict[str, Any]) -> dict[str, Any]:
    """What a node has of the metadata of the traced one that it stands for."""
    kept = {key: meta[key] for key in _KEPT_META if key in meta}
    custom = {k: v for k, v in meta.get("custom", {}).items() if k != NO_GRAD}
    return {**kept, "custom": custom} if custom else kept


def _is_hidden(meta: dict[str, Any]) -> bool:
    """Whether a node was traced in a region without gradients."""
    return bool(meta.get("custom", {}).get(NO_GRAD))


def _requires_grad(val: Any) -> bool:
    return isinstance(val, torch.Tensor) and val.requires_grad
