"""Changes to what Dynamo traces and what it guards: private parts of torch."""

from __future__ import annotations

import enum
import functools
import operator
import re
import sys
from collections.abc import Callable, Container, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace as changed
from typing import Any

import torch
from torch import nn
from torch._dynamo.exc import unimplemented
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.source import AttrSource, TypeSource
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import wrap_fx_proxy
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.tensor import TensorVariable
from torch._guards import Guard
from torch.distributed.tensor import DTensor
from torch.utils.weak import TensorWeakRef

from autoshard.runtime.compat.frames import (
    RESTARTS,
    GraphInput,
    RestartTrace,
    name_of,
    skips_tensors,
)

MOVED = "_autoshard_moved"
"""Of Dynamo's output graph: the parameters that were stored while it stood, by the old ones."""

OURS = "_autoshard_backend"
"""Attribute of the backend functions whose traces `trace_as_ours` extends."""


def trace_as_ours(backend: Callable[..., Any]) -> None:
    """Let Dynamo trace more than it would of the frames that are compiled with `backend`.

    It has no option of a single compile for any of these:

    - nn.LSTM and its kin, which it leaves to eager code because compiling one is slow. In eager
      code each weight of the model around one is gathered by itself; traced, the RNN is one
      operator among others.
    - `x.requires_grad = True` on a value made in the graph, as nothing at all. Hugging Face's T5
      and its kin write it on a tensor of zeros in every checkpointed layer, and the break would
      turn each layer into graphs of its own and its checkpoint into eager code. Nothing in a graph
      needs the gradient of such a value: only `x.grad` would hold it, which stays None.
    - a set of names that is there before the frame, in the order of the names. Its own is that of
      the process's hashes: Gemma 4 walks through its kinds of layers, and each rank would get
      another graph.
    - a stored tensor that eager code gives to a frame as an argument, as the whole (`READ_WHOLE`),
      as a module's own parameter is: Dynamo's DTensor does not meet plain tensors in an operator.
    - `p.data = x` of a stored tensor, by leaving it to eager code, which stores the part of `x`: it
      would give the DTensor the memory of a plain tensor (the key encoder of a MoCo, in forward).

    Frames of other backends are traced by torch's own functions, with the user's settings; of a
    stored tensor the attribute `data` is a stored tensor in these, too, and no DTensor.
    """
    setattr(backend, OURS, True)
    variables = "torch._dynamo.variables"
    replace(f"{variables}.builder", "VariableBuilder.wrap_module", _wrap_module)
    replace(f"{variables}.builder", "VariableBuilder.wrap_tensor", _wrap_tensor)
    replace(f"{variables}.tensor", "TensorVariable.method_attr_data", _stored_data)
    replace(variables, "SetVariable.__init__", _sort_names)
    for setter in ("SetAttrBuiltinVariable._call_setattr", "BuiltinVariable.call_setattr"):
        replace(f"{variables}.builtin", setter, _set_attribute)  # the first since torch 2.13


_REPLACED = "_autoshard_replaced"


def replace(module: str, name: str, by: Callable[..., Any]) -> None:
    """Have callers of the function `name` of `module` call `by(original, *args, **kwargs)`.

    name: such as "Class.method". Does nothing where the module is not imported, or has no such
    function, as in other versions of a library; a function is replaced once. Of these libraries no
    hook exists that is called before they read the parameters.
    """
    owner: Any = sys.modules.get(module)
    *path, last = name.split(".")
    for part in path:
        owner = getattr(owner, part, None)
    original = getattr(owner, last, None)
    if original is None or hasattr(original, _REPLACED):
        return

    @functools.wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return by(original, *args, **kwargs)

    setattr(replaced, _REPLACED, True)
    setattr(owner, last, replaced)


def _wrap_module(original: Callable[..., Any], self: Any, value: Any) -> Any:
    if isinstance(value, nn.RNNBase) and is_ours(self.tx.output.compiler_fn):
        with torch._dynamo.config.patch(allow_rnn=True):
            return original(self, value)
    return original(self, value)


def _set_attribute(
    original: Callable[..., Any], self: Any, tx: Any, obj: Any, name: Any, value: Any
) -> Any:
    written = name.is_python_constant() and name.as_python_constant() == "data"
    if written and obj.is_tensor() and _fake_class(obj) in READ_WHOLE:
        unimplemented(
            gb_type="autoshard: p.data = x of a stored parameter",
            context=str(obj),
            explanation="Each rank stores its part of x.",
            hints=["Write p.data.copy_(x), which the graph has."],
        )
    if (
        name.is_python_constant()
        and name.as_python_constant() == "requires_grad"
        and obj.is_tensor()
        and obj.source is None
        and value.is_python_constant()
        and value.as_python_constant() is True
        and is_ours(tx.output.compiler_fn)
    ):
        obj.requires_grad = True  # what the traced code reads from now on
        return value
    return original(self, tx, obj, name, value)


def _sort_names(original: Callable[..., Any], self: Any, items: Any, **kwargs: Any) -> None:
    original(self, items, **kwargs)
    given = type(self).__name__ in _UNORDERED and kwargs.get("source") is not None
    if not given or not traced_as_ours():
        return
    constants = [key.vt for key in self.items if key.vt.is_python_constant()]
    names = [str(each.as_python_constant()) for each in constants if _is_name(each)]
    if len(names) == len(self.items):
        order = sorted(zip(names, self.items), key=operator.itemgetter(0))
        self.items = {key: self.items[key] for _, key in order}


_UNORDERED = ("SetVariable", "FrozensetVariable")


def _is_name(constant: Any) -> bool:
    return isinstance(constant.as_python_constant(), (str, enum.Enum))


READ_WHOLE: dict[type, Callable[[Any], torch.Tensor]] = {}
"""By class of a tensor, the function by which our graphs read what it stands for."""

ONLY_IN_OURS: set[type] = set()
"""Classes of tensors that graphs of other backends do not take."""


def _wrap_tensor(original: Callable[..., Any], self: Any, value: Any) -> Any:
    read, output = READ_WHOLE.get(type(value)), self.tx.output
    if read is None and type(value) not in ONLY_IN_OURS:
        return original(self, value)
    if not is_ours(output.compiler_fn):
        if read is None or not value.is_leaf:  # whose fake would be a DTensor
            unimplemented(
                gb_type="autoshard: what eager code made of a stored parameter",
                context=f"{type(value).__name__} of shape {tuple(value.shape)}",
                explanation="Writes and gradients go to the parameter by way of eager code.",
                hints=["Hand over the parameter, under no_grad, and make the value of it there."],
            )
        with torch._dynamo.config.patch(_STATIC):
            return original(self, value)
    found = original(self, value)
    held = getattr(getattr(self.source, "base", None), "member", None) == "_parameters"
    if read is None or held:
        return found  # of `_parameters`: `access` reads it itself
    wholes = output.__dict__.setdefault("_autoshard_wholes", {})
    if self.source not in wholes:
        proxy = output.create_proxy("call_function", read, (found.as_proxy(),), {})
        wholes[self.source] = wrap_fx_proxy(self.tx, proxy)
    return wholes[self.source]


_STATIC = {"automatic_dynamic_shapes": False, "assume_static_by_default": True}
"""Settings for stored tensors: Dynamo has no source for the symbolic sizes of their parts."""


def at_first_call() -> AbstractContextManager[None]:
    """Traces as a process does that has traced nothing before: Dynamo remembers sizes by a model's
    code, and makes those symbols that another trace had different."""
    found: AbstractContextManager[None] = torch._dynamo.config.patch(automatic_dynamic_shapes=False)
    return found


def _stored_data(original: Callable[..., Any], self: Any, tx: Any) -> Any:
    if _fake_class(self) in READ_WHOLE:
        return self.call_method(tx, "detach", [], {})
    return original(self, tx)


def _fake_class(variable: Any) -> type:
    """The class of what a tensor of Dynamo's is traced with."""
    return type(variable.proxy.node.meta.get("example_value"))


def is_ours(backend: Any) -> bool:
    """Whether `backend`, or what Dynamo and torch.compile wrapped, was given to `trace_as_ours`."""
    for _ in range(8):
        if backend is None or hasattr(backend, OURS):
            return backend is not None
        backend = getattr(backend, "__wrapped__", None) or getattr(backend, "compiler_fn", None)
    return False


@torch.compiler.assume_constant_result
def traced_as_ours() -> bool:
    """Whether what Dynamo traces now is compiled by our backend; a constant in that trace."""
    tx: Any = InstructionTranslator.current_tx()
    return is_ours(tx.output.compiler_fn)


READS_AS = "_autoshard_sync"
"""The attribute of a module with stored parameters that says as what a graph reads them."""


def store_in_trace(
    inputs: list[GraphInput],
    parameters: Container[torch.Tensor],
    store: Callable[[], Mapping[nn.Parameter, nn.Parameter]],
) -> None:
    """`store` replaces `parameters`, also among the inputs of the graph that a backend compiles.

    Where the trace in progress, of plain parameters, is not also that of stored ones, Dynamo traces
    again (`RestartTrace`). A guard is made of what its expression says after the backend's call,
    and the frame finds its inputs by theirs. So the trace stands where each parameter was reached
    in the dict of its module, where nothing but the whole value was asked of it, and where it
    neither is handed out nor kept by the frame. What was asked of a module's class is then asked of
    the one that the class of `access` extends.
    """
    tx: Any = InstructionTranslator.current_tx()
    scope = {"L": tx.output.local_scope, "G": tx.output.global_scope}
    guards = tx.output.guards.inner
    found = {item.source for item in inputs if item.real is not None and item.real in parameters}
    classes: dict[str, tuple[list[Guard], type]] = {}
    readers: dict[str, Any] = {}
    stands = all(map(_PARAMETER.fullmatch, found)) and not _escapes(tx) and not skips_tensors()
    for guard in guards if stands else ():
        read = _is_read(guard, found)
        stands = stands and read is not None
        if read:
            module = guard.originating_source.base.base  # what has the dict that it is in
            readers[name_of(module)] = module
        compared = _chain(guard.originating_source) + _chain(_other(guard))
        for of in filter(None, map(_of_class, compared)):
            if isinstance(module := _said(of, scope), nn.Module):
                classes.setdefault(of, ([], type(module)))[0].append(guard)
            stands = stands and not isinstance(module, _Unsaid)
    moved: Mapping[Any, nn.Parameter] = store()
    now = [i if i.real is None else changed(i, real=moved.get(i.real, i.real)) for i in inputs]
    reading = [_said(name, scope) for name in readers]  # in `no_sync` not as their class has it
    replaced = {of for of, (_, cls) in classes.items() if type(_said(of, scope)) is not cls}
    if (
        not stands
        or any(classes[of][1] is not _extended(type(_said(of, scope))) for of in replaced)
        or any(getattr(m, READS_AS, 0) != getattr(type(m), READS_AS, 0) for m in reading)
        or any(i.real is not None and not i.is_as_traced(_said(i.source, scope)) for i in now)
    ):
        raise RestartTrace(keep=moved)
    for guard in {id(guard): guard for of in replaced for guard in classes[of][0]}.values():
        source = _of_extended(guard.originating_source, replaced)
        create: Any = guard.create_fn
        if other := _other(guard):
            create = functools.partial(create, source_b=_of_extended(other, replaced))
        guards.discard(guard)
        guards.add(Guard(source, create, stack=guard.stack, user_stack=guard.user_stack))
    for module in readers.values():
        guards.add(AttrSource(module, READS_AS).make_guard(GuardBuilder.CONSTANT_MATCH))
    tx.output.__dict__[MOVED] = moved  # Dynamo's records go by their ids
    inputs[:] = now


def kind_of_restart(error: Exception) -> int:
    """What another rank gives to `restart_of` to do as the one that has raised this."""
    return next(i for i, kind in enumerate(RESTARTS) if isinstance(error, kind))


def restart_of(kind: int) -> Exception:
    """An exception of RESTARTS, by what `kind_of_restart` has said of one."""
    made: Any = RESTARTS[kind]
    return made("what another rank computes")  # type: ignore[no-any-return]


def trace_again(error: Exception) -> None:
    """Have Dynamo take an exception of RESTARTS for what it is: where a graph has an operator that
    `allow_in_graph` lets in, such as ours that unshards a parameter, it would be the user's. Where
    this trace has stored parameters, the next one reads others, and Dynamo would find it astray:
    raises RestartTrace, after which the exception comes again."""
    if torch._guards.CompileContext.current_compile_id() is not None:
        translator: Any = torch._dynamo.symbolic_convert.InstructionTranslator.current_tx()
        translator.output.has_user_defined_allowed_in_graph = False
        moved = vars(translator.output).get(MOVED)
        if moved is not None and not isinstance(error, RestartTrace):
            raise RestartTrace(keep=moved)


_PARAMETER = re.compile(r"([LG]\[.+?)\._parameters\['[^']+'\]")


class _Unsaid:
    """The class of what an expression says that is more than attributes and items."""


def _said(expression: str, scope: dict[str, Any]) -> Any:
    try:
        return eval(expression, scope)
    except Exception:
        return _Unsaid()


def _extended(cls: type) -> Any:
    """The module's own class, which a class of `access` extends."""
    return getattr(getattr(cls, "_autoshard", None), "cls", None)


def _chain(source: Any) -> list[Any]:
    """A source and those that it is reached by."""
    return [] if source is None else [source, *_chain(getattr(source, "base", None))]


def _other(guard: Guard) -> Any:
    """The source that a guard compares with its own."""
    return getattr(guard.create_fn, "keywords", {}).get("source_b")


def _of_class(source: Any) -> str:
    """What a source is the class of, as an expression; "": it is of none."""
    is_one = isinstance(source, TypeSource) or getattr(source, "member", "") == "__class__"
    return name_of(source.base) if is_one else ""


def _of_extended(source: Any, replaced: Container[str]) -> Any:
    """A source with the class that those of `replaced` have got extended in place of theirs."""
    base = getattr(source, "base", None)
    if base is None:
        return source
    made, at = (
        changed(source, base=_of_extended(base, replaced)),
        _of_class(source) in replaced,
    )
    return AttrSource(AttrSource(made, "_autoshard"), "cls") if at else made


def _is_read(guard: Guard, sources: Container[str]) -> bool | None:
    """Whether a guard says of a module that it has one of the parameters, like it was, or the same
    as another module; None: it says something else of one."""
    said: Mapping[str, Any] = getattr(guard.create_fn, "keywords", {})
    owner = _PARAMETER.search(guard.name)
    if name_of(_other(guard)) in sources:
        return True if owner and owner[0] == guard.name else None
    if owner and owner[0] in sources:
        alike = guard.create_fn_name() == "TENSOR_MATCH" and owner[0] == guard.name
        return True if alike else None
    held = said.get("value")
    held = held() if isinstance(held, TensorWeakRef) else held
    return None if isinstance(held, nn.Parameter) and not isinstance(held, DTensor) else False


def _escapes(tx: Any) -> bool:
    """Whether a parameter, as it was read, is an output of the frame or on its way to another one,
    or is written where the frame's code will."""
    effects, found = tx.output.side_effects, []

    def look(value: Any) -> None:
        found.append(any(map(_of_class, _chain(value.source))))
        if issubclass(type(value), LazyVariableTracker):  # which isinstance would make an input
            found.append(isinstance(value.peek_value(), nn.Parameter))
        elif isinstance(value, TensorVariable) and value.proxy.node.op == "placeholder":
            found.append(issubclass(value.class_type, nn.Parameter))

    written = [one for one in effects.id_to_variable.values() if effects.is_modified(one)]
    values = [tx.stack, tx.symbolic_locals, written, list(effects.store_attr_mutations.values())]
    VariableTracker.visit(look, values)
    return any(found) or bool(effects.tensor_hooks)
