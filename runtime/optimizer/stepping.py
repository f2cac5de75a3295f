"""`optimizer`: an optimizer whose step works on this rank's parts, without a dispatch a parameter.

The class's own step runs on the plain tensors that stored parameters, gradients and states are
made of: so its list kernels (foreach, fused) see what they see in one process. Which parameters may
be stepped so is recorded (recording.py); the others are stepped as stored tensors, which are read
whole where their operators need it.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from autoshard.runtime import compat
from autoshard.runtime.agreement import agree
from autoshard.runtime.collectives import home_rank
from autoshard.runtime.mesh import axes_of
from autoshard.runtime.optimizer.derived import (
    AnyOptimizer,
    Derived,
    become,
    proxy_of,
    unhooked_step,
)
from autoshard.runtime.optimizer.matrix_owners import (
    RATES,
    OwnedMatrix,
    Rates,
    assign_owners,
    matrix_of,
)
from autoshard.runtime.optimizer.offloaded import part_of
from autoshard.runtime.optimizer.owned_steps import OwnedSteps
from autoshard.runtime.optimizer.recording import Lane, Stepped, lanes_of, own_attributes
from autoshard.runtime.parameters import is_whole, like, local_bounds, stored_states


def optimizer(optimizer: AnyOptimizer) -> AnyOptimizer:
    """Have an optimizer step this rank's parts as plain tensors; the same object.

        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        optimizer = autoshard.optimizer(optimizer)

    optimizer: any of torch's form, before or after the model's first call, and before its
        learning-rate schedulers. One of `offload_optimizer` works on parts, and stays as it is.

    Raises AutoshardError where something has wrapped its step.
    """
    if not isinstance(optimizer, Derived):
        become(optimizer, _OnParts, "optimizer")
    return optimizer


@compat.not_traced
def ways_of(optimizer: Optimizer) -> WaysOfSteps | None:
    """How an optimizer steps its parameters, sorted now where no step has been; None: not by
    `optimizer`. Collective where no step has been."""
    if not isinstance(optimizer, _OnParts):
        return None
    ways: WaysOfSteps = optimizer.__dict__.setdefault("_autoshard_parts", WaysOfSteps())
    if not ways.lanes:
        with compat.plain_attributes():
            ways.follow(optimizer, unhooked_step(optimizer.base), closure=False)
    return ways


class _OnParts(Derived):
    """What replaces methods of an optimizer that steps parts."""

    def take_step(self, closure: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Step every parameter that has a gradient; what the class's step returns."""
        if args or kwargs:
            return unhooked_step(self.base)(self, closure, *args, **kwargs)
        return _take_step(self, closure)


@compat.not_traced
def _take_step(optimizer: _OnParts, closure: Any) -> Any:
    step = unhooked_step(optimizer.base)
    parts: WaysOfSteps = optimizer.__dict__.setdefault("_autoshard_parts", WaysOfSteps())
    with compat.plain_attributes():
        parts.follow(optimizer, step, closure is not None)
    if not parts.on_parts and not parts.owned:
        return step(optimizer) if closure is None else step(optimizer, closure)
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
        with compat.plain_attributes():
            parts.follow(optimizer, step, True)
    with torch.no_grad():
        parts.step(optimizer, step)
    return loss


class PlainPart:
    """A parameter's part and its state's, plain.

    kept: of each entry of the state what the optimizer holds, and what the step works on.
    """

    def __init__(self, parameter: torch.Tensor) -> None:
        self.parameter = parameter
        self.local = parameter
        self.kept: dict[str, tuple[Any, Any]] = {}
        self.state: dict[str, Any] = {}

    def enter(self, held: dict[str, Any]) -> None:
        """Set the part's gradient and state to those of the parameter."""
        p = self.parameter
        self.local = local = compat.local_of(p) if isinstance(p, DTensor) else p
        if local is not p:
            local.grad = None if p.grad is None else part_of(p, p.grad)
        kept = self.kept
        for name, value in held.items():
            if name not in kept or kept[name][0] is not value:
                break
        else:
            if len(held) == len(kept):
                return
        self.state = {
            name: part_of(p, value) if isinstance(value, torch.Tensor) else value
            for name, value in held.items()
        }
        self.kept = {name: (value, self.state[name]) for name, value in held.items()}

    def leave(self, state: dict[str, Any], held: dict[str, Any]) -> None:
        """Let the optimizer hold what the step has made of its state."""
        p, local, kept = self.parameter, self.local, self.kept
        self.state = state
        for name in [name for name in kept if name not in state]:
            del kept[name], held[name]
        for name, value in state.items():
            if name in kept and kept[name][1] is value:
                continue
            whole = isinstance(value, torch.Tensor) and value.shape == local.shape
            stored = whole and name != "step" and isinstance(p, DTensor)
            held[name] = like(p, value) if stored else value  # type: ignore[arg-type]
            kept[name] = held[name], value


class WaysOfSteps:
    """An optimizer's parameters by the way they are stepped.

    lanes: of each parameter what a step does to it, in the order of the groups. on_parts: those
    that are stepped on parts, by group. owned: those that one rank each steps. rest: the others,
    as they are stored, and why. seconds: of the owner with the most to do, as they are balanced.
    """

    def __init__(self) -> None:
        self.lanes: list[Lane] = []
        self.on_parts: list[list[PlainPart]] = []
        self.owned: list[OwnedMatrix] = []
        self.rest: list[list[torch.Tensor]] = []
        self.why: dict[torch.Tensor, str] = {}
        self.owned_steps = OwnedSteps()
        self.seconds = 0.0
        self._followed: Any = None

    @property
    def rates(self) -> Rates:
        """What the owners are balanced by."""
        return RATES.get(self.owned[0].parameter.device.type, RATES["cuda"])

    def follow(self, optimizer: Optimizer, step: Any, closure: bool) -> None:
        """Sort the parameters, where they, their placements or the settings are not the last
        step's."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        placed = [compat.spec_of(p) if isinstance(p, DTensor) else None for p in parameters]
        settings = [len(group["params"]) for group in optimizer.param_groups]
        found = parameters, placed, [*settings, closure, *map(_settings, optimizer.param_groups)]
        before = self._followed
        if before is not None and found[2] == before[2]:
            pairs = zip([*found[0], *found[1]], [*before[0], *before[1]])
            if all(one is other for one, other in pairs):
                return
        self._followed = found
        self._sort(optimizer, step, closure)

    def _sort(self, optimizer: Optimizer, step: Any, closure: bool) -> None:
        placed = [
            (number, p)
            for number, group in enumerate(optimizer.param_groups)
            for p in group["params"]
        ]
        stored = any(isinstance(p, DTensor) for _, p in placed)
        members = [_member(number, p, optimizer.state.get(p, {})) for number, p in placed]
        self.lanes = lanes_of(optimizer, step, members, closure) if stored else []
        self.on_parts = [[] for _ in optimizer.param_groups]
        self.rest = [[] for _ in optimizer.param_groups]
        self.owned, self.why, known = [], {}, {}  # type: ignore[var-annotated]
        for (number, p), lane in zip(placed, self.lanes):
            if lane.reason and not lane.mixed and isinstance(p, DTensor):
                matrix = matrix_of(optimizer, step, number, p, known)
                if matrix.work.flops:
                    self.owned.append(matrix)
                    continue
                self.why[p] = matrix.work.why
            if not lane.reason or (is_whole(p) and not lane.mixed):
                self.on_parts[number].append(PlainPart(p))
            else:
                self.rest[number].append(p)
                self.why[p] = self.why.get(p) or lane.reason
        pinned = [one.pinned(optimizer.state.get(one.parameter, {})) for one in self.owned]
        if self.owned:
            self.seconds = assign_owners(self.owned, pinned, self.rates)
        _agree(optimizer, placed, self.lanes, self.owned)
        if not any(self.on_parts) and not self.owned:
            self.on_parts = []

    def step(self, optimizer: Optimizer, step: Any) -> None:
        """Step all parameters that have gradients."""
        self.owned_steps.step(self.owned, optimizer, step)
        proxies = [self._of_parts(optimizer)]
        if any(self.rest):
            # both begin with the same settings, which a step may change
            proxies.append(proxy_of(optimizer, self.rest, optimizer.state))
        for proxy in proxies:
            step(proxy)
        for name, value in own_attributes(proxies[0]).items():
            optimizer.__dict__[name] = value
        for group, stepped in zip(optimizer.param_groups, proxies[0].param_groups):
            group.update({name: value for name, value in stepped.items() if name != "params"})
        with compat.plain_attributes():
            stepped = []
            for part in (part for group in self.on_parts for part in group):
                state, p = proxies[0].state.get(part.local), part.parameter
                if p.grad is not None:
                    stepped.append(p)
                if part.local is not p:
                    part.local.grad = None
                if state is not None:
                    part.leave(state, optimizer.state[p])
            increment_version([p for p in stepped if isinstance(p, DTensor)])

    def _of_parts(self, optimizer: Any) -> Any:
        state: defaultdict[torch.Tensor, dict[str, Any]] = defaultdict(dict)
        with compat.plain_attributes():
            for part in (part for group in self.on_parts for part in group):
                part.enter(optimizer.state.get(part.parameter, {}))
                if part.state:
                    state[part.local] = part.state
        groups = [[part.local for part in group] for group in self.on_parts]
        proxy = proxy_of(optimizer, groups, state)
        for name in ("grad_scale", "found_inf"):  # a GradScaler's, for a fused step
            if isinstance(value := proxy.__dict__.get(name), DTensor):
                proxy.__dict__[name] = value.full_tensor()
        return proxy


def _agree(
    optimizer: Any,
    placed: Sequence[tuple[int, torch.Tensor]],
    lanes: Sequence[Lane],
    owned: Sequence[OwnedMatrix],
) -> None:
    """Raise on all ranks where they sort parameters differently: what one of them reads whole, the
    others would not send."""
    name = optimizer.base.__name__
    lines = [
        f"{name}, parameter {at} (group {number}, {tuple(p.shape)}): {lane.reason or 'elementwise'}"
        for at, ((number, p), lane) in enumerate(zip(placed, lanes))
    ]
    lines += [f"rows of {tuple(one.shape)} by owner: {one.rows}" for one in owned]
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    axes = {
        axis: None for _, p in placed if isinstance(p, DTensor) for axis in axes_of(p.device_mesh)
    }
    for axis in axes:
        agree("step of an optimizer", digest, lines, axis, remedy=_ALIKE)


_ALIKE = (
    "Make the same optimizer on every rank: its class, its settings, and the order and groups of "
    "its parameters."
)


def _settings(group: dict[str, Any]) -> list[Any]:
    """What of a group's settings decides which operators run: numbers change from step to step."""
    return [
        bool(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value
        for value in group.values()
        if isinstance(value, (int, float, str, type(None)))
    ]


def _member(group: int, p: torch.Tensor, state: dict[str, Any]) -> Stepped:
    part = p.shape
    if isinstance(p, DTensor):
        states = {n: s for n, s in stored_states(p).items() if home_rank(s) is None}
        axes = [axis._replace(rank=0) for axis in axes_of(p.device_mesh)]
        part = torch.Size([high - low for low, high in local_bounds(p.shape, states, axes)])
    held = pytree.tree_map_only(
        DTensor, lambda x: torch.empty(x.shape, dtype=x.dtype, device="meta"), state
    )
    return Stepped(group, p.shape, part, p.dtype, p.device, held)
