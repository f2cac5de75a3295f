"""The holders of a Parameter object: modules, optimizers, and plain lists and dicts.

The backend is handed parameters, not the model; everything that must see the replacement is found
in one pass over the objects Python's garbage collector tracks.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import chain, compress
from typing import Any, TypeAlias

from torch import nn
from torch.optim import Optimizer

Container: TypeAlias = list[Any] | dict[Any, Any]


class Holders:
    """What is alive in this process and can hold a Parameter: one look at a million objects.

    Kept for the two questions of one moment (`models_of`, `find_owners`), not longer: it holds all
    it has found.
    """

    def __init__(self) -> None:
        objects = _tracked()
        kinds = list(map(_Kinds().__getitem__, map(type, objects)))  # loops of C: a tenth as long
        found: dict[type, list[Any]] = {kind: [] for kind in (nn.Module, Optimizer, list, dict)}
        for item, kind in zip(compress(objects, kinds), filter(None, kinds)):
            found[kind].append(item)
        self.modules: list[nn.Module] = found[nn.Module]
        self.optimizers: list[Optimizer] = found[Optimizer]
        self.lists: list[list[Any]] = found[list]
        self.dicts: list[dict[Any, Any]] = found[dict]


@dataclass(frozen=True)
class Owners:
    """The holders of some parameters.

    modules: for each parameter, the modules that registered it and under which names (several
    where it is tied). optimizers: those with one of them in a param group, in an order that does
    not depend on memory addresses. containers: builtin lists, dicts with one as a
    value, and dicts with one as the key of an optimizer.
    """

    modules: dict[nn.Parameter, list[tuple[nn.Module, str]]]
    optimizers: list[Optimizer]
    containers: list[Container]


def find_owners(parameters: Sequence[nn.Parameter], alive: Holders | None = None) -> Owners:
    """The owners of each parameter, by identity, wherever in the process they are.

    Not found: tuples, sets, closures, attributes of objects that are no module.
    """
    parameters = tuple(parameters)  # a list would be found as a container of them
    alive = alive or Holders()
    ids = {id(parameter): index for index, parameter in enumerate(parameters)}
    modules: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {p: [] for p in parameters}
    registries: set[int] = set()
    for module in alive.modules:
        registry = module.__dict__.get("_parameters") or {}
        registries.add(id(registry))
        for name, parameter in registry.items():
            if id(parameter) in ids:
                modules[parameter].append((module, name))  # type: ignore[index]
    optimizers: list[tuple[str, list[int], Optimizer]] = []
    for optimizer in alive.optimizers:
        groups = getattr(optimizer, "param_groups", ())
        held = [ids[id(p)] for group in groups for p in group["params"] if id(p) in ids]
        if held:
            optimizers.append((type(optimizer).__qualname__, held, optimizer))
    optimizers.sort(key=lambda found: found[:2])
    # The keys of a dict count where a value is an optimizer (`is_keyed`), so its values tell too.
    values = {*ids, *map(id, alive.optimizers)}
    containers = [*_near(values, alive.lists), *_near(values, alive.dicts)]
    return Owners(
        modules,
        [optimizer for _, _, optimizer in optimizers],
        [c for c in containers if id(c) not in registries and _holds(c, ids.keys())],
    )


def related_parameters(parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Every parameter of the models that the given ones belong to, the given ones included.

    Optimizers and gradient clipping mix parameters of one model in one call, and torch does not mix
    DTensors with plain tensors there: parameters that the graph at hand never read must be stored
    as DTensors too.
    """
    found = {id(p): p for p in parameters}
    for model in models_of(parameters):
        for parameter in model.parameters():
            found.setdefault(id(parameter), parameter)
    return list(found.values())


def models_of(parameters: Sequence[nn.Parameter], alive: Holders | None = None) -> list[nn.Module]:
    """The models the parameters belong to: modules that no other module contains.

    In the same order on every rank: by the first of the parameters each holds, then by name.
    """
    parameters = tuple(parameters)
    ids = {id(parameter) for parameter in parameters}
    parents: dict[int, list[nn.Module]] = {}
    climbing: list[nn.Module] = []
    for item in (alive or Holders()).modules:
        for child in (item.__dict__.get("_modules") or {}).values():
            parents.setdefault(id(child), []).append(item)
        if any(id(p) in ids for p in (item.__dict__.get("_parameters") or {}).values()):
            climbing.append(item)
    roots: list[nn.Module] = []
    seen: set[int] = set()
    while climbing:
        module = climbing.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        above = parents.get(id(module), [])
        climbing.extend(above)
        if not above:
            roots.append(module)
    order = {id(p): i for i, p in enumerate(parameters)}

    def rank(root: nn.Module) -> tuple[int, str, list[str]]:
        named = list(root.named_parameters())
        first = min(order.get(id(p), len(order)) for _, p in named)
        return first, type(root).__qualname__, [name for name, _ in named]

    return sorted(roots, key=rank)


def names_of(models: Sequence[nn.Module]) -> dict[nn.Parameter, str]:
    """The parameters of models in their order, each with the first of its names."""
    found: dict[nn.Parameter, str] = {}
    for model in models:
        for name, parameter in model.named_parameters():
            found.setdefault(parameter, name)
    return found


def order_of(names: Sequence[str]) -> str:
    """The place of each name among them all: alike on ranks where names begin otherwise."""
    places = {name: i for i, name in enumerate(sorted(names))}
    return " ".join(str(places[name]) for name in names)


FROZEN_BY_PYTHON = 1_000
"""Fewer frozen objects than these nobody has frozen: Python 3.12 starts with some 400, none of them
a module's variables; a program that freezes has thousands. To climb to them takes seconds a model.
"""


def _tracked() -> list[Any]:
    """The objects that Python's garbage collector tracks, as far as Python code can reach them.

    `gc.get_objects` leaves out frozen ones (`gc.freeze`, which serving processes call before they
    fork). They are found from those that are not, without thawing: `gc.freeze` afterwards would
    freeze everything that is alive.
    """
    objects = gc.get_objects()
    if gc.get_freeze_count() < FROZEN_BY_PYTHON:
        return objects
    known = set(map(id, objects))
    known.add(id(objects))
    roots, copies = _roots()
    known |= copies
    reached = [*roots, *gc.get_referents(*objects)]
    while reached:
        new = {id(o): o for o in reached if gc.is_tracked(o) and id(o) not in known}
        known.update(new)
        objects += new.values()
        reached = gc.get_referents(*new.values())
    return objects


def _roots() -> tuple[list[Any], set[int]]:
    """The roots of all objects: Python's modules, and the variables of what runs in its threads;
    and the ids of the dicts that Python copies these variables to, which own nothing."""
    found: list[Any] = [sys.modules]
    copies: set[int] = set()
    own = threading.get_ident()
    for thread, top in sys._current_frames().items():
        frame = top.f_back if thread == own else top
        while frame is not None:
            if frame.f_code is not _tracked.__code__:  # whose lists hold everything
                variables = frame.f_locals
                copies.add(id(variables))
                found += variables.values()
            frame = frame.f_back
    return found, copies


class _Kinds(dict[type, type | None]):
    """The kind of holder that a class is, if any: looked up for each of a million objects."""

    def __missing__(self, cls: type) -> type | None:
        # issubclass of the type, not isinstance: that asks __class__, and lazy proxies then import
        # what they stand for.
        self[cls] = next(
            (base for base in (nn.Module, Optimizer) if issubclass(cls, base)),
            cls if cls is list or cls is dict else None,
        )
        return self[cls]


def is_keyed(container: Container, ids: Set[int]) -> bool:
    """Whether a dict has an optimizer for a parameter, its key: one that steps in backward."""
    return (
        isinstance(container, dict)
        and not ids.isdisjoint(map(id, container))
        and any(isinstance(value, Optimizer) for value in container.values())
    )


def _near(ids: Set[int], containers: Sequence[Container]) -> Iterator[Container]:
    """The containers, few of many, among which a value is one of ids: a loop of C finds them."""
    for start in range(0, len(containers), 200):
        some = containers[start : start + 200]
        try:
            values = chain.from_iterable(c if type(c) is list else c.values() for c in some)  # type: ignore[union-attr]
            if ids.isdisjoint(map(id, values)):
                continue
        except RuntimeError:  # another thread changed a dict
            pass
        yield from some


def _holds(container: Container, ids: Set[int]) -> bool:
    while True:
        try:
            if type(container) is list:
                return not ids.isdisjoint(map(id, container))
            found = not ids.isdisjoint(map(id, container.values()))  # type: ignore[union-attr]
            return found or is_keyed(container, ids)
        except RuntimeError:  # another thread changed the dict
            continue
