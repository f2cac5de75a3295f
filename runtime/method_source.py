"""How a method of a model runs as a frame of Dynamo's, by what its source says."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

from torch import nn

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
