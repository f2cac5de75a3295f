"""What torch.compile is given with our backend, and the methods of what it returns.

Functions of torch and of libraries do something of ours where parameters are stored. A method of a
model runs as a frame of Dynamo's by what its source says.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch._dynamo.eval_frame import _TorchDynamoContext
from torch.utils import _pytree as pytree

from autoshard.runtime.compat.dynamo import OURS, is_ours, replace
from autoshard.runtime.compat.frames import leave_frame, never_a_frame


def parametrized_class(module: nn.Module) -> type[nn.Module] | None:
    """The class that torch.nn.utils.parametrize made for this module alone, with a property for
    each parametrised tensor; it is deleted from that class, which must be the module's own."""
    cls = type(module)
    if "parametrizations" not in module._modules or not cls.__name__.startswith("Parametrized"):
        return None
    return cls


def parametrized_subclass(cls: type[nn.Module], made: type[nn.Module]) -> type[nn.Module]:
    """The class that torch would have made, as it made `made`, of another class."""
    own = {k: v for k, v in vars(made).items() if k not in ("__dict__", "__weakref__")}
    metaclass: Any = type(made)
    return metaclass(made.__name__, (cls,), own)  # type: ignore[no-any-return]


WHOLE, IN_PARTS, EAGER = "whole", "in parts", "eager"
"""One frame; eager itself, of which each function that it calls is a frame; none at all."""

_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_LIBRARIES = ("transformers.generation", "transformers.modeling_utils")
_STEPS = frozenset({"backward", "manual_backward", "step"})


def way_to_run(model: nn.Module, method: Callable[..., Any]) -> tuple[str, list[CodeType]]:
    """How `method` of `model` runs, and the code that is to be no frame where it is IN_PARTS.

    Dynamo unrolls loops. One over layers calls each of them once; one over tokens or time calls the
    model, or one method or layer of it, each time round (`generate`, a rollout): IN_PARTS, so that
    what it calls is compiled once. So is a method that calls such a method. EAGER: what calls
    backward or an optimizer, whose code is not the model's; a generator or coroutine, whose frames
    run after the call; what transformers' models inherit (`generate`); and what has no source.
    """
    if (method.__module__ or "").startswith(_LIBRARIES):
        return EAGER, []
    looping: list[CodeType] = []
    try:
        looks = _look(model, method, looping, set())
    except (OSError, TypeError, SyntaxError):
        return EAGER, []
    return (IN_PARTS, looping) if looks == IN_PARTS else (looks, [])


def _look(
    model: nn.Module, method: Callable[..., Any], looping: list[CodeType], seen: set[Any]
) -> str:
    function = inspect.unwrap(method)
    if function in seen or not isinstance(function, FunctionType):
        return WHOLE
    seen.add(function)
    kinds = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    if any(is_kind(function) for is_kind in kinds):
        return EAGER
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    code = function.__code__.co_name
    if code != "<lambda>" and getattr(tree.body[0], "name", None) != code:
        raise OSError  # Python 3.13 has the text of `python -c` for what `exec` defined
    me = function.__code__.co_varnames[:1]
    repeats = any(
        _is_of_the_model(model, name)
        for loop in ast.walk(tree)
        if isinstance(loop, _LOOPS)
        for name, own in _calls(loop, me)
        if own
    )
    for name, own in _calls(tree, me):
        if name in _STEPS and not own:
            return EAGER
        # what forward does is for whoever compiled it to know
        for called in _definitions(model, name) if own and name != "forward" else ():
            looks = _look(model, called, looping, seen)
            if looks == EAGER:
                return EAGER
            repeats = repeats or looks == IN_PARTS
    if repeats:
        looping.append(function.__code__)
    return IN_PARTS if repeats else WHOLE


def _calls(tree: ast.AST, me: tuple[str, ...]) -> Iterator[tuple[str, bool]]:
    """The calls in a piece of source: the name of the attribute, and whether it is one of `self`,
    or of `super()`; `self(...)` is one of "forward"."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name) and node.func.id in me:
            yield "forward", True
        elif isinstance(node.func, ast.Attribute):
            of = node.func.value
            parent = isinstance(of, ast.Call) and getattr(of.func, "id", "") == "super"
            yield node.func.attr, parent or getattr(of, "id", None) in me


def _is_of_the_model(model: nn.Module, name: str) -> bool:
    """Whether an attribute is a method of the model's own class, or a layer with parameters."""
    layer = model._modules.get(name)
    if layer is not None:
        return next(layer.parameters(), None) is not None
    return bool(_definitions(model, name))


def _definitions(model: nn.Module, name: str) -> list[Callable[..., Any]]:
    """The functions of that name in the classes of a model that are not nn.Module's."""
    own = [cls for cls in type(model).__mro__ if not issubclass(nn.Module, cls)]
    found = [vars(cls)[name] for cls in own if name in vars(cls)]
    return [each for each in found if isinstance(each, FunctionType)]


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
            leave_frame(code, "DEFAULT")
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
