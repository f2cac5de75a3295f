"""What an optimizer's step does to each parameter: its own code, run on fake tensors and recorded.

Whether a rank may step its part alone is read off the operators, not off the optimizer's name. Each
parameter is a lane; a value is the parameter's (elementwise in its dims), or more than a part can
give (a norm, a product, another shape), or one number for all elements. The step is exact on parts
where every operator of a lane is elementwise, no value of it was read by the host, no other lane
met it, and a lane of the part's shape is stepped with the same numbers as one of the whole's.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from autoshard.runtime import compat

aten = torch.ops.aten

SAME, PART, WHOLE = "same", "part", "whole"
"""Kinds of a value: every element is one number; elementwise of the parameter; anything else."""

_ELEMENTWISE = {
    *("alias", "clone", "copy", "copy_", "detach", "fill", "fill_", "lift_fresh", "masked_fill"),
    *("masked_fill_", "where", "zero", "zero_", "_to_copy", "zeros_like", "ones_like"),
    *("full_like", "empty_like", "_fused_adam_", "_fused_adamw_", "_fused_sgd_"),
    "_fused_adagrad_",
}
"""Elementwise operators that torch does not tag as pointwise."""

_FACTORIES = {"zeros", "ones", "full", "scalar_tensor", "empty"}
_KEEPS_SHAPE = {"view", "_unsafe_view", "expand", "new_zeros", "new_ones", "new_full", "new_empty"}
READS = {"_local_scalar_dense", "equal", "is_nonzero", "item"}
_RECORDED = 2  # the first makes the states, the second finds them


class KnownValue(NamedTuple):
    """A tensor of the step. lane: the parameter it depends on; None: on none."""

    kind: str
    lane: int | None = None


@dataclass
class Lane:
    """What a step does to one parameter. reason: why a part of it does not suffice, "" where it
    does. mixed: whether even the whole does not."""

    shape: torch.Size
    reason: str = ""
    mixed: bool = False
    trace: list[str] = field(default_factory=list)

    def needs_whole(self, why: str, mixed: bool = False) -> None:
        """Note a reason; the first of the graver kind stays."""
        if not self.reason or (mixed and not self.mixed):
            self.reason, self.mixed = why, mixed


@functools.cache
def is_elementwise(func: Any) -> bool:
    """Whether each element of the results depends on one element of each operand (of a list: of
    the tensors at its place)."""
    name = name_of(func)
    if torch.Tag.pointwise in func.tags or name in _ELEMENTWISE:
        return True
    if not name.startswith("_foreach_") or name in ("_foreach_max", "_foreach_norm"):
        return False
    one = name.removeprefix("_foreach_")
    if one in _ELEMENTWISE:
        return True
    packet = getattr(aten, one, None)
    return packet is not None and any(
        torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads()
    )


def name_of(func: Any) -> str:
    """The name of an operator without its namespace and overload."""
    return str(func._schema.name).rpartition("::")[2]


class Recorder(compat.TorchDispatchMode):
    """The operators that touch each lane, while it is entered."""

    def __init__(self, fakes: Any) -> None:
        super().__init__()
        self.fakes = fakes
        self.lanes: list[Lane] = []
        self.operators = 0
        self._known: dict[int, tuple[torch.Tensor, KnownValue]] = {}

    def add(self, tensor: torch.Tensor, value: KnownValue) -> torch.Tensor:
        """Say what a tensor is. It is kept, so that no other one has its identity."""
        self._known[id(tensor)] = tensor, value
        return tensor

    def value_of(self, tensor: torch.Tensor) -> KnownValue:
        """What a tensor is: of one that nobody told of, one number or many."""
        found = self._known.get(id(tensor))
        return found[1] if found else KnownValue(WHOLE if tensor.numel() > 1 else SAME)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        self.operators += 1
        name = name_of(func)
        groups = _places(name, args, kwargs)
        if name in READS:
            return self._read(func, name, groups[0], args, kwargs)
        kinds = [self._kind(func, name, group) for group in groups]
        sized = name in _FACTORIES and isinstance(args[0], (list, tuple))
        large = sized and torch.Size(args[0]).numel() > 1
        with self.fakes if large else contextlib.nullcontext():
            out = func(*args, **kwargs)
        for place, (group, value) in enumerate(zip(groups, kinds)):
            outs = out[place] if isinstance(out, (list, tuple)) and len(groups) > 1 else out
            self._note(func, name, group, value, outs)
        return out

    def _read(self, func: Any, name: str, group: _Place, args: Any, kwargs: Any) -> Any:
        values = [self.value_of(x) for x in group.tensors]
        for value in values:
            if value.lane is not None:
                self.lanes[value.lane].needs_whole("its step reads a number of it on the host")
        if any(isinstance(x, compat.FakeTensor) for x in group.tensors):
            return name == "equal" or 1.0
        return func(*args, **kwargs)

    def _kind(self, func: Any, name: str, group: _Place) -> KnownValue:
        """What the results of an operator at one place are."""
        values = [self.value_of(x) for x in group.tensors]
        lanes = sorted({v.lane for v in values if v.lane is not None})
        draws = torch.Tag.nondeterministic_seeded in func.tags
        if not lanes:
            plain = all(v.kind == SAME for v in values)
            one = name in _FACTORIES or (is_elementwise(func) and bool(values))
            return KnownValue(SAME if plain and one and not draws else WHOLE)
        lane = self.lanes[lanes[0]]
        if len(lanes) > 1:
            for each in lanes:
                self.lanes[each].needs_whole(f"{name} takes several parameters at once", True)
            return KnownValue(WHOLE, lanes[0])
        if draws:
            lane.needs_whole(f"{name} draws random numbers", True)
            return KnownValue(WHOLE, lanes[0])
        elementwise = (
            is_elementwise(func)
            or (name in _KEEPS_SHAPE and torch.Size(group.numbers[0]) == lane.shape)
            or (name == "index_put_" and _sets_where(*group.tensors))
        )
        if elementwise and all(v.kind != WHOLE for v in values):
            return KnownValue(PART, lanes[0])
        lane.needs_whole(f"{name} is not elementwise")
        return KnownValue(WHOLE, lanes[0])

    def _note(self, func: Any, name: str, group: _Place, value: KnownValue, outs: Any) -> None:
        if value.lane is not None:
            lane = self.lanes[value.lane]
            numbers = [
                "shape" if isinstance(n, (list, tuple)) and torch.Size(n) == lane.shape else repr(n)
                for n in group.numbers
            ]
            one = [x for x in group.tensors if x.numel() == 1 and x.is_cpu]
            known = [repr(x.item()) for x in one if not isinstance(x, compat.FakeTensor)]
            lane.trace.append(f"{func} {numbers} {known}")
        written = group.tensors[:1] if func._schema.is_mutable else []
        if name.startswith("_fused_"):
            written = group.tensors
        for out in [*pytree.tree_leaves(outs), *written]:
            if not isinstance(out, torch.Tensor) or (id(out) in self._known and value.lane is None):
                continue
            if value.kind == PART and out.shape != self.lanes[value.lane or 0].shape:
                if out.numel() == 1 and self.value_of(out).kind == SAME:
                    continue  # a counter that a fused step advances
                self.lanes[value.lane or 0].needs_whole(f"{name} makes another shape of it")
                value = KnownValue(WHOLE, value.lane)
            self.add(out, value)


class _Place(NamedTuple):
    """What an operator takes at one place of its lists; all it takes where it has none."""

    tensors: list[torch.Tensor]
    numbers: list[Any]


def _places(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[_Place]:
    given = [*args, *kwargs.values()]
    if not name.startswith(("_foreach_", "_fused_")):
        tensors = [a for a in pytree.tree_leaves(given) if isinstance(a, torch.Tensor)]
        return [_Place(tensors, [a for a in given if not _holds_tensors(a)])]
    count = len(args[0])
    places = []
    for place in range(count):
        tensors, numbers = [], []
        for a in given:
            one = a[place] if isinstance(a, (list, tuple)) and len(a) == count else a
            if isinstance(one, torch.Tensor):
                tensors.append(one)
            elif not _holds_tensors(one):
                numbers.append(one)
        places.append(_Place(tensors, numbers))
    return places


def _sets_where(x: torch.Tensor, *others: torch.Tensor) -> bool:
    """Whether `x[mask] = number` is what an index_put is."""
    mask, number = others[0], others[-1]
    mine = mask.dtype == torch.bool and mask.shape == x.shape
    return len(others) == 2 and mine and number.numel() == 1


def _holds_tensors(a: Any) -> bool:
    return any(isinstance(x, torch.Tensor) for x in pytree.tree_leaves(a))


@dataclass(frozen=True)
class Stepped:
    """A parameter as a recording takes it. group: the index of its group. part: the shape of the
    first rank's part. state: its entries, with tensors of the whole's shape where they have it."""

    group: int
    shape: torch.Size
    part: torch.Size
    dtype: torch.dtype
    device: torch.device
    state: Mapping[str, Any]

    def key(self) -> tuple[Any, ...]:
        """Equal for parameters that a step treats alike."""
        entries = tuple(
            (name, tuple(value.shape) if isinstance(value, torch.Tensor) else type(value))
            for name, value in self.state.items()
        )
        return self.group, self.shape, self.part, self.dtype, self.device, entries


def lanes_of(
    optimizer: Optimizer, step: Callable[..., Any], members: Sequence[Stepped], closure: bool
) -> list[Lane]:
    """What a step does to each parameter, by recordings of two parameters of each kind."""
    chosen: dict[Any, list[int]] = {}
    for index, member in enumerate(members):
        chosen.setdefault(member.key(), []).append(index)
    taken = [members[i] for alike in chosen.values() for i in alike[:2]]
    failed = Lane(torch.Size(()))
    held = [n for n, value in own_attributes(optimizer).items() if not _is_plain(value)]
    if held:
        failed.needs_whole(f"it has parameters, or more than numbers, in {', '.join(held)}", True)
        return [failed] * len(members)
    try:
        whole = record(optimizer, step, taken, closure, True).lanes
    except Exception as error:  # whatever an optimizer's code does not do on fakes
        why = str(error).partition("\n")[0]
        failed.needs_whole(f"its step on fakes raises {type(error).__name__}: {why}", True)
        return [failed] * len(members)
    try:
        part = record(optimizer, step, taken, closure, False).lanes
    except Exception as error:  # states of the whole's other shapes do not fit a part
        part = [Lane(lane.shape, trace=[repr(error)]) for lane in whole]
    found: dict[int, Lane] = {}
    pairs = iter(zip(whole, part))
    for alike in chosen.values():
        worst = Lane(members[alike[0]].shape)
        for one, other in [next(pairs) for _ in alike[:2]]:
            if one.trace != other.trace:
                one.needs_whole("its numbers depend on its shape")
            if one.reason:
                worst.needs_whole(one.reason, one.mixed)
        found.update(dict.fromkeys(alike, worst))
    return [found[index] for index in range(len(members))]


def record(
    optimizer: Optimizer,
    step: Callable[..., Any],
    members: Sequence[Stepped],
    closure: bool,
    whole: bool,
) -> Recorder:
    """Steps of an optimizer whose parameters are fakes, of the whole's shapes or of the parts'.

    step: of its class, without hooks. closure: whether the step is given one.
    """
    fakes = compat.FakeTensorMode(allow_non_fake_inputs=True)
    recorder = Recorder(fakes)
    proxy: Any = type(optimizer).__new__(type(optimizer))
    proxy.__dict__.update(optimizer.__dict__)
    proxy.__dict__.update(copy.deepcopy(own_attributes(optimizer)))
    proxy.param_groups = [
        {key: _cloned(value) for key, value in group.items() if key != "params"} | {"params": []}
        for group in optimizer.param_groups
    ]
    proxy.state = defaultdict(dict)
    parameters = []
    for number, member in enumerate(members):
        shape = member.shape if whole else member.part
        recorder.lanes.append(Lane(shape))

        make = functools.partial(_fake, recorder, number, member.device)
        parameter = make(shape, member.dtype)
        parameter.grad = make(shape, member.dtype)
        for name, entry in member.state.items():
            state = functools.partial(_fake_state, make, name, of=member.shape, shape=shape)
            proxy.state[parameter][name] = pytree.tree_map(state, entry)
        proxy.param_groups[member.group]["params"].append(parameter)
        parameters.append(parameter)

    def loss() -> torch.Tensor:
        if recorder.operators:
            for lane in recorder.lanes:
                lane.needs_whole("its step calls the closure in its midst", True)
        return torch.zeros(())

    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for _ in range(_RECORDED):
            recorder.operators = 0
            with recorder:
                step(proxy, loss) if closure else step(proxy)
    for lane, parameter in zip(recorder.lanes, parameters):
        for name, value in proxy.state.get(parameter, {}).items():
            if not isinstance(value, torch.Tensor):
                if _holds_tensors(value):
                    lane.needs_whole(f"its state {name} is a collection of tensors")
            elif value.numel() > 1 and value.shape != lane.shape:
                lane.needs_whole(f"its state {name} has the shape {tuple(value.shape)}")
    return recorder


def _fake(
    recorder: Recorder,
    lane: int,
    device: torch.device,
    shape: torch.Size,
    dtype: torch.dtype,
    kind: str = PART,
) -> torch.Tensor:
    with recorder.fakes:
        return recorder.add(torch.empty(shape, dtype=dtype, device=device), KnownValue(kind, lane))


def _fake_state(make: Any, name: str, value: Any, *, of: torch.Size, shape: torch.Size) -> Any:
    """A state's entry beside a parameter of `shape`, whose own shape is `of`."""
    if not isinstance(value, torch.Tensor) or name == "step":
        return _cloned(value)
    if value.shape == of:
        return make(shape, value.dtype)
    stored = value.numel() > 1 or value.is_meta
    return make(value.shape, value.dtype, WHOLE) if stored else _cloned(value)


def own_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """The attributes that are an optimizer's own, and not of torch's base class."""
    return {
        name: value
        for name, value in optimizer.__dict__.items()
        if name not in ("defaults", "state", "param_groups", "step", "grad_scale", "found_inf")
        and not name.startswith(("_optimizer_", "_zero_grad_", "_autoshard_"))
    }


def _is_plain(value: Any) -> bool:
    leaves = pytree.tree_leaves(value)
    plain = (int, float, str, bool, type(None), torch.dtype, torch.device)
    return all(isinstance(leaf, plain) or callable(leaf) for leaf in leaves) and not any(
        isinstance(leaf, (torch.nn.Module, Optimizer)) for leaf in leaves
    )


def _cloned(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.copy(value)
