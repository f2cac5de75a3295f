"""What torch.compile is given with our backend, and the methods of what it returns."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch._dynamo.eval_frame import _TorchDynamoContext
from torch.utils import _pytree as pytree

from autoshard.runtime.compat.dynamo import OURS, is_ours
from autoshard.runtime.compat.frames import never_a_frame
from autoshard.runtime.compat.replaced import replace
from autoshard.runtime.method_source import IN_PARTS, WHOLE, way_to_run

Given = Callable[[nn.Module, dict[str, Any], bool], None]
Called = Callable[[list[nn.Module], dict[str, Any]], None]


def watch_compiles(given: Given, called: Called) -> None:
    """Have two functions told of what is compiled with our backend, whose own calls come late or,
    of frames that Dynamo skips, never; and have methods of a compiled module compiled, too.

    given: `given(model, options, disabled)`, of a module when torch.compile gets it, or a method of
    it; disabled: whether torch.compile returns it as it is, as TORCHDYNAMO_DISABLE=1 makes it do.
    called: `called(models, options)`, after the first call of each thing that is compiled. models:
    those that the call concerns: the module itself, by `torch.compile(model)` or
    `model.compile()`; of a function those among its arguments, closure and globals.
    """
    original = _TorchDynamoContext.__call__
    if hasattr(original, OURS):
        return

    def watched(self: Any, fn: Any) -> Any:
        made, options = original(self, fn), _options_of(self)
        if options is None or not isinstance(fn, FunctionType | MethodType):
            return made  # of a module, this is called with the module's `__call__` as well
        waiting = [options]

        @never_a_frame
        @functools.wraps(made)
        def call(*args: Any, **kwargs: Any) -> Any:
            result = made(*args, **kwargs)
            if waiting:
                called(_models_of_call(fn, args, kwargs), waiting.pop())
            return result

        return call

    @functools.wraps(original)
    def compile_function(self: Any, fn: Any) -> Any:
        if (options := _options_of(self)) is not None:
            _tell(given, fn, options, False)
        return watched(self, fn)

    def optimize(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        made, backend = original(*args, **kwargs), kwargs.get("backend")
        if not isinstance(made, contextlib.nullcontext) or not is_ours(backend):
            return made
        options = getattr(backend, "kwargs", {}).get("options") or {}

        def leave(fn: Any) -> Any:
            _tell(given, fn, options, True)
            return fn

        return leave

    setattr(compile_function, OURS, True)
    _TorchDynamoContext.__call__ = compile_function  # type: ignore[method-assign]
    replace("torch._dynamo", "optimize", optimize)
    module: Any = torch._dynamo.OptimizedModule
    module.__getattr__ = _with_methods(module.__getattr__, watched, called)


def _options_of(context: Any) -> dict[str, Any] | None:
    """The options of what torch.compile made; None of another backend's."""
    backend = getattr(context, "callback", None)
    while backend is not None and not hasattr(backend, "compiler_fn"):
        backend = getattr(backend, "_torchdynamo_orig_backend", None)
    return (getattr(backend, "kwargs", {}).get("options") or {}) if is_ours(backend) else None


def _tell(given: Given, fn: Any, options: dict[str, Any], disabled: bool) -> None:
    owner = fn if isinstance(fn, nn.Module) else getattr(fn, "__self__", None)
    if isinstance(owner, nn.Module):
        given(owner, options, disabled)


def _with_methods(
    original: Callable[..., Any], watched: Callable[..., Any], called: Called
) -> Callable[..., Any]:
    """How attributes of a compiled module are read, which torch hands on to the module it wraps: a
    method of that one is compiled as its forward is. nn.Module's own never come here."""

    @never_a_frame  # Dynamo takes the compiled module that it is given for the one inside
    @functools.wraps(original)
    def read(self: Any, name: str) -> Any:
        found = original(self, name)
        if not isinstance(found, MethodType) or not isinstance(found.__func__, FunctionType):
            return found
        context = self.__dict__.get("dynamo_ctx")
        options = _options_of(context)
        if options is None or not isinstance(found.__self__, nn.Module):
            return found
        methods = self.__dict__.setdefault("_autoshard_methods", {})
        if getattr(methods.get(name), "__wrapped__", None) is not found.__func__:
            compile_ = functools.partial(watched, context)
            methods[name] = _method(compile_, found, [options], called)
        return MethodType(methods[name], found.__self__)

    return read


def _method(
    compile_: Callable[[Any], Any], bound: MethodType, waiting: list[Any], called: Called
) -> Any:
    """A method that is compiled where it is given data, and else runs as it is; `self(...)` in it
    is the compiled call, as after `model.compile()`."""
    function, owner = bound.__func__, bound.__self__

    @functools.cache
    def compiled() -> Callable[..., Any] | None:
        way, looping = way_to_run(owner, function)  # type: ignore[arg-type]
        if way != IN_PARTS:
            return compile_(bound) if way == WHOLE else None

        def parts(model: nn.Module, *args: Any, **kwargs: Any) -> Any:  # of torch.no_grad's
            return function(model, *args, **kwargs)  # wrapper torch would make a frame

        for code in (parts.__code__, *looping):
            _leave_frame(code)
        return compile_(MethodType(parts, owner))  # type: ignore[no-any-return]

    forward = functools.cache(lambda: compile_(owner._call_impl))  # type: ignore[attr-defined]

    @never_a_frame
    @functools.wraps(function)
    def method(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if _has_data((args, kwargs)) and (run := compiled()) is not None:
            return run(*args, **kwargs)
        own, name = model.__dict__, "_compiled_call_impl"
        before = {name: own[name]} if name in own else {}
        own[name] = forward()
        try:
            result = function(model, *args, **kwargs)
        finally:
            del own[name]
            own.update(before)
        if waiting and any(getattr(x, "requires_grad", False) for x in pytree.tree_leaves(result)):
            called([model], waiting.pop())
        return result

    return method


def _has_data(arguments: Any) -> bool:
    """Whether there is a tensor among arguments, or in a mapping (a batch of transformers')."""
    leaves = pytree.tree_leaves(arguments)
    leaves += [x for leaf in leaves if isinstance(leaf, Mapping) for x in leaf.values()]
    return any(isinstance(x, torch.Tensor) and not isinstance(x, nn.Parameter) for x in leaves)


def _leave_frame(code: CodeType) -> None:
    """Have Dynamo leave frames of `code` to eager code, and compile what they call."""
    frames: Any = torch._dynamo.types
    strategy = frames.FrameExecStrategy(frames.FrameAction.SKIP, frames.FrameAction.DEFAULT)
    torch._C._dynamo.eval_frame.set_code_exec_strategy(code, strategy)


def _models_of_call(
    fn: FunctionType | MethodType, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[nn.Module]:
    """The modules that a call of a function can name, in the same order on every rank."""
    function = fn.__func__ if isinstance(fn, MethodType) else fn
    closure = getattr(function, "__closure__", None) or ()
    names = function.__code__.co_names if hasattr(function, "__code__") else ()
    found = [getattr(fn, "__self__", None), *args, *kwargs.values()]
    for cell in closure:
        with contextlib.suppress(ValueError):  # empty
            found.append(cell.cell_contents)
    found += [getattr(function, "__globals__", {}).get(name) for name in names]
    return list({id(each): each for each in found if isinstance(each, nn.Module)}.values())
