"""Capture: Dynamo's torch-level graph -> functional, pre-dispatch ATen graph of serial shapes.

The captured graph is the graph of the unsharded model, whatever is sharded already: a parameter
that is stored as a DTensor enters as a plain fake of its global shape, and `unshard_parameter` is
the identity. Composite operators (linear, scaled_dot_product_attention, layer_norm, ...) stay
whole, because that is the level at which they are sharded.

What tracing cannot express is made explicit here:

- no_grad regions become `aten.detach` of the values that enter them;
- autocast, in the graph or around the call, becomes casts (autocast.py);
- checkpointed regions are inlined, their nodes tagged (subgraphs.py);
- mutation of an input becomes an additional output;
- higher-order operators that have no ATen form (a custom autograd.Function, flex_attention)
  stay as one opaque node that holds Dynamo's own subgraphs.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import DTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from autoshard.capture import autocast
from autoshard.capture.five_layers import captured_by_layers
from autoshard.capture.interpreter import (
    Extra,
    Interpreter,
    TraceState,
    extras,
    turns_grad_on,
    unwrap,
)
from autoshard.capture.rebuild import Rebuild, Seen
from autoshard.capture.subgraphs import RegionPolicy, inline_subgraphs
from autoshard.capture.transforms import inline_transforms
from autoshard.runtime import compat
from autoshard.runtime.compat import (
    FakeTensor,
    FakeTensorMode,
    FunctionalTensor,
    is_traceable_wrapper_subclass,
)
from autoshard.runtime.errors import CaptureError, source_line
from autoshard.runtime.graph_meta import DIFF, ENABLE_GRAD, WITHOUT_GRADIENTS
from autoshard.runtime.lazy_gather import LazyGather

GLOBAL_TYPES = (DTensor, LazyGather)
"""Tensor subclasses whose own shape is the global one; captured as plain tensors of that shape."""


def capture(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    dtypes: Mapping[int, torch.dtype] | None = None,
    inference: bool = False,
    whole: bool = False,
) -> fx.GraphModule:
    """The functional ATen graph of Dynamo's `gm`, one placeholder for each of its placeholders.

    example_inputs: one a placeholder; used where a placeholder has no `meta["example_value"]`.
    dtypes: {index of a placeholder: dtype it is read in}, for parameters that are stored in
    another one than they are computed with.
    inference: with gradients off around the call, and in all of the model, the graph is captured as
    one that has none; else it says what training needs, so that a model that is evaluated first
    is stored as one that is trained.
    whole: all of equal layers are traced, and not five.

    The result has, on every node, `meta["val"]` (fake value, serial shape) and, where that is a
    tensor or holds tensors, `meta[DIFF]`: whether a gradient can flow to it. On the module:

    - `meta[N_OUTPUTS]`: the number of the user's outputs, which come first;
    - `meta[MUTATED]`: for each further output, the index of the placeholder whose new value it
      is. The node is the same as that of a user's output where both are the mutated input;
    - `meta[ENABLE_GRAD]`: True where the caller's grad mode is off and the graph turns it on;
      the result must then be differentiated, that is compiled and run under torch.enable_grad();
    - `meta[WITHOUT_GRADIENTS]`: True where the caller's grad mode is off and no region turns it on.

    Grad mode, autocast, inference mode and random state are as before when it returns or raises.
    Raises CaptureError.
    """
    gm, policies = inline_subgraphs(gm)

    def trace(gm: fx.GraphModule) -> fx.GraphModule:
        return _capture(gm, policies, example_inputs, dtypes, inference)

    return trace(gm) if whole else captured_by_layers(gm, policies, trace)


def _capture(
    gm: fx.GraphModule,
    policies: Mapping[int, RegionPolicy],
    example_inputs: Sequence[Any],
    dtypes: Mapping[int, torch.dtype] | None,
    inference: bool,
) -> fx.GraphModule:
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    given = list(example_inputs) + [None] * (len(placeholders) - len(example_inputs))
    found = [node.meta.get("example_value", example) for node, example in zip(placeholders, given)]
    made = (node.meta.get("example_value") for node in gm.graph.nodes)
    mode = _fake_mode(itertools.chain(found, made))
    ambient_grad = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    # With gradients off around the call the graph still says what training needs, unless the
    # model itself turns them on: then its regions count literally.
    literal = not ambient_grad and turns_grad_on(gm) and not torch.is_inference_mode_enabled()
    graded = ambient_grad or literal or not inference
    with torch.inference_mode(False), torch.no_grad():
        inputs = [
            _plain(value, mode, (dtypes or {}).get(i), graded) for i, value in enumerate(found)
        ]
        gm = inline_transforms(gm, inputs, mode)
        extra = extras(gm)
        traced, seen = _trace(gm, policies, inputs, extra, mode, grad=not literal)
        _refuse_aliases(placeholders, inputs, seen.mutated)
        result = Rebuild(gm, traced, seen, inputs, extra).run()
    outputs = result.graph.output_node().all_input_nodes
    result.meta[WITHOUT_GRADIENTS] = not ambient_grad and not literal
    result.meta[ENABLE_GRAD] = literal and any(n.meta.get(DIFF) for n in outputs)
    return result


def global_fake(value: torch.Tensor) -> torch.Tensor:
    """An input of a graph as a plain fake of its global shape."""
    fake: torch.Tensor = _plain(value, _fake_mode([value]))
    return fake


def _fake_mode(found: Iterable[Any]) -> FakeTensorMode:
    """The mode of the first fake; TracingContext's own may be another one. A graph may be given no
    tensor, and a transform in it reads what the graph made."""
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


def _plain(
    value: Any, mode: FakeTensorMode, dtype: torch.dtype | None = None, graded: bool = True
) -> Any:
    """A fake of the global shape, usable outside of inference mode; `graded`: which may have a
    gradient."""
    if not isinstance(value, torch.Tensor):
        return value
    dtype = dtype or value.dtype
    if isinstance(value, GLOBAL_TYPES) or value.is_inference() or dtype != value.dtype:
        with mode:
            fake = torch.empty_strided(
                value.shape, value.stride(), dtype=dtype, device=value.device
            )
    elif isinstance(value, FakeTensor):
        fake = value
    else:
        fake = mode.from_tensor(value, static_shapes=True)
    trained = graded and value.requires_grad
    return fake if fake.requires_grad == trained else fake.detach().requires_grad_(trained)


def _trace(
    gm: fx.GraphModule,
    policies: Mapping[int, RegionPolicy],
    inputs: list[Any],
    extra: list[Extra],
    fake: FakeTensorMode,
    *,
    grad: bool,
) -> tuple[fx.GraphModule, Seen]:
    ambient = autocast.ambient()
    seen: list[Seen] = []

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
            state = TraceState(mode, wrapped[len(inputs) :], grad, policies)
            outputs = pytree.tree_leaves(Interpreter(gm, state).run(*own))
            mutated = tuple(
                i
                for i, w in enumerate(own)
                if isinstance(w, FunctionalTensor) and compat.has_data_mutation(w)
            )
            seen.append(Seen(state, len(outputs), mutated))
            outputs += [own[i] for i in mutated]
            return [unwrap(value) for value in outputs] + state.extra_outputs

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
        traced = make_fx(run, pre_dispatch=True)(*inputs, *values)
    return traced, seen[0]


def _refuse_aliases(
    placeholders: list[fx.Node], inputs: list[Any], mutated: tuple[int, ...]
) -> None:
    """Raise where a mutated input shares memory with another, which would not see the write."""
    for i in mutated:
        for j, other in enumerate(inputs):
            if i == j or not isinstance(other, torch.Tensor):
                continue
            if inputs[i].untyped_storage() is other.untyped_storage():
                names = f"{placeholders[i].name} and {placeholders[j].name}"
                raise CaptureError(
                    f"the inputs {names} share memory, and the model writes into the first",
                    where=source_line(placeholders[i].meta.get("stack_trace")),
                    remedy="Pass one of them as a clone().",
                )
