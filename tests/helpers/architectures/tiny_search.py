"""A tiny model and its batch where names alone do not tell them: found by what running them says.

A draft is run, and what it raises names the next tries: an argument that is missed, another rank or
extent of an input, a field of the configuration that is restored, filled or shrunk further. Of them
the one that reaches the most lines of the library stays, until a step of training runs. Everything
is counted, nothing is timed, so that each process finds the same model.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from tiny_batches import BATCH, SIDE, TEXT, argument_of, batch_of, loss_of
from torch import nn
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode

LARGEST = 100_000_000
"""Parameters of a model that counts as tiny."""
STEPS, TRIES = 20, 80
"""Repairs of a draft, and what is tried for each."""
_OPERATIONS = "floating-point operations"
WORK = 10**12
"""Floating-point operations of a tiny model's forward: a picture may be thousands of words."""
_OF_INPUTS = re.compile(r"channels|vocab|mel|cross_|text|caption|image|sample|patch")


@dataclass(frozen=True)
class Draft:
    """A configuration by the paths of its fields, and what makes a model of other values."""

    published: dict[str, Any]
    shrunk: dict[str, Any]
    make: Callable[[dict[str, Any]], nn.Module]


@dataclass
class Try:
    """Values beside the draft's and a batch (None: the one that names tell); how far they came, and
    what was raised where, with which arguments None."""

    values: dict[str, Any] = field(default_factory=dict)
    batch: dict[str, Any] | None = None
    reached: tuple[int, float] = (0, 0)
    said: str = ""
    where: str = ""
    empty: tuple[str, ...] = ()
    model: nn.Module | None = None


def search(draft: Draft) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values and the batch of a model that trains a step; ValueError of what was said last."""
    at, seen = _run(draft, Try()), set()
    for _ in range(STEPS):
        if at.reached[0] == 4:
            return _with_fewer_layers(draft, at).values, at.batch or {}
        seen.add(at.where)
        aside = None
        for values, batch in itertools.islice(_next(draft, at), TRIES):
            one = _run(draft, Try(values, batch), at)
            if one.reached > at.reached:
                break
            if aside is None and one.reached == at.reached and one.where not in seen:
                aside = one
        else:
            if aside is None:
                break
            one = aside
        at = one
    raise ValueError(at.said)


def _with_fewer_layers(draft: Draft, at: Try) -> Try:
    """With the first of so many named layers, until each name was there twice, if that trains."""
    for names in [v for v in at.values.values() if v and type(v) is list and type(v[0]) is str]:
        n = 1 + max([i for i, one in enumerate(names) if one == name][:2][-1] for name in names)
        size = len(names)
        values = {
            path: n if v == size else v[:n] if isinstance(v, list) and len(v) == size else v
            for path, v in at.values.items()
        }
        fewer = _run(draft, Try(values, at.batch))
        at = fewer if fewer.reached[0] == 4 else at
    return at


def made(draft: Draft, values: dict[str, Any]) -> nn.Module:
    """The model of these values, in training mode; its dropout drops nothing."""
    torch.manual_seed(0)
    model = draft.make(values)
    for module in model.modules():
        dropped = "p" if isinstance(module, nn.modules.dropout._DropoutNd) else "drop_prob"
        for rate in filter(module.__dict__.__contains__, (dropped, "drop_rate")):
            setattr(module, rate, 0.0)  # of values, of a branch, of a head's input
    return model.train()


class _Lines(TorchDispatchMode):
    """The lines of a library that call operators; ValueError before more than `WORK`."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[tuple[str, int]] = set()
        self.work = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame = sys._getframe(1)
        while frame is not None:
            name = frame.f_code.co_filename
            if _of_a_library(name):
                self.found.add((name, frame.f_lineno))
                break
            frame = frame.f_back  # type: ignore[assignment]
        if (count := _WORKS.get(func._overloadpacket)) is not None:
            self.work += count(*args, **(kwargs or {}))
            if self.work > WORK:
                self.found.clear()
                raise ValueError(f"a forward of more than {WORK:,} {_OPERATIONS}")
        return func(*args, **(kwargs or {}))


def _of_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> int:
    return int(flop_counter.sdpa_flop_count(q.shape, k.shape, v.shape))


def _of_convolution(x: torch.Tensor, weight: torch.Tensor, *given: Any, **_: Any) -> int:
    _, stride, _, _, transposed, *_ = given
    places = x.numel() // x.shape[1] // (1 if transposed else math.prod(stride))
    return 2 * places * weight.numel()


_ATEN = torch.ops.aten
_WORKS: dict[Any, Callable[..., int]] = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _of_attention,
    _ATEN.convolution: _of_convolution,
    **{one: flop_counter.flop_registry[one] for one in (_ATEN.mm, _ATEN.addmm, _ATEN.bmm)},
}
"""What may be large though its inputs are not."""


@functools.cache
def _of_a_library(file: str) -> bool:
    return re.search(r"/(transformers|timm|diffusers)/", file) is not None


def _run(draft: Draft, one: Try, before: Try | None = None) -> Try:
    """The try, and how far it came: construction, size, batch, forward, a step."""
    lines, stage = _Lines(), 0
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if before is not None and before.model is not None and before.values == one.values:
                one.model = before.model
            else:
                with torch.device("meta"), lines:
                    count = sum(p.numel() for p in draft.make(one.values).parameters())
                stage = 1
                if count > LARGEST:
                    one.reached, one.said = (1, -count), f"{count:,} parameters are left"
                    return one
                one.model = made(draft, one.values)
            stage, lines.found = 2, set()
            if one.batch is None:
                one.batch = _first_batch(one.model)
            with lines:
                loss = loss_of(one.model(**one.batch))
            stage = 3
            if not loss.isfinite():
                raise ValueError("the loss is not finite")
            loss.backward()
            one.model.zero_grad()
        stage = 4
    except Exception as error:
        one.where, one.empty = _raised(error)
        one.said = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
    one.reached = (stage, len(lines.found) if stage != 4 else 0)
    return one


def _raised(error: Exception) -> tuple[str, tuple[str, ...]]:
    """Where a library raised, without numbers, and the names that were None there."""
    where, names = re.sub(r"\d+", "", str(error)), []
    at = error.__traceback__
    while at is not None:
        if _of_a_library(at.tb_frame.f_code.co_filename):
            where += f" {at.tb_lineno}"
            names = [name for name, value in at.tb_frame.f_locals.items() if value is None] + names
        at = at.tb_next
    return where, tuple(names)


def _first_batch(model: nn.Module) -> dict[str, Any]:
    try:
        batch = dict(batch_of(model))
    except Exception:
        batch = {}
    takes = inspect.signature(model.forward).parameters
    for name, one in takes.items():
        if one.default is one.empty and name not in batch:
            value = argument_of(name, model)
            if value is not None and one.kind is not one.VAR_KEYWORD:
                batch[name] = value
    return {name: value for name, value in batch.items() if name in takes}


def _next(draft: Draft, at: Try) -> Iterator[tuple[dict[str, Any], dict[str, Any] | None]]:
    """What could be tried after what was said, the likeliest first."""
    numbers = list(dict.fromkeys(int(n) for n in re.findall(r"\d+", at.said)))
    numbers = [n for n in numbers if 1 <= n <= 8192][:10]
    if "missing" in at.said and "forward()" in at.said:
        yield from ((at.values, batch) for batch in _batches(at, numbers))
        return
    if at.said.endswith(_OPERATIONS):
        yield from ((at.values, _shorter(at.batch or {}, share)) for share in (4, 16, 64))
        return
    fields = ({**at.values, **changed} for changed in _fields(draft, at, numbers))
    if at.reached[0] < 2 or at.batch is None:
        yield from ((values, None) for values in fields)
        return
    for one, values in itertools.zip_longest(_batches(at, numbers), fields):
        if one is not None:
            yield at.values, one
        if values is not None:
            yield values, at.batch
            if _OF_INPUTS.search(" ".join(values.keys() - at.values.keys())):
                yield values, None


def _batches(at: Try, numbers: list[int]) -> Iterator[dict[str, Any]]:
    """The batch with another argument, another rank or extent of one, or without one."""
    batch, model = dict(at.batch or {}), at.model
    assert model is not None
    takes = inspect.signature(model.forward).parameters
    missed = [name for name in takes if name not in batch and f"'{name}'" in at.said]
    new = {name: argument_of(name, model) for name in missed}
    if None in new.values() and "missing" in at.said:
        return
    if new:
        yield {**batch, **{name: value for name, value in new.items() if value is not None}}
    rank = re.search(r"unpack|dimension|indices|[2-5]-?D\b|dims|shape", at.said)
    if rank:
        yield from _of_other_ranks(batch)
    none = "None" in at.said or re.search("must|should|need|provide|specify", at.said)
    for name in at.empty if none else ():
        if name in takes and name not in batch and argument_of(name, model) is not None:
            yield {**batch, name: argument_of(name, model)}
    floats = {
        name: list(value.shape) for name, value in batch.items()
        if isinstance(value, torch.Tensor) and (value.is_floating_point() or value.dim() == 2)
    }  # fmt: skip
    for name, shape in floats.items():
        for d, n in itertools.product(range(len(shape) - 1, 0, -1), numbers):
            if shape[d] != n and (shape[d] in numbers or d == 1):
                yield {**batch, name: _like(batch[name], [*shape[:d], n, *shape[d + 1 :]])}
    optional = [
        name for name, one in takes.items()
        if name not in batch and one.default is None and argument_of(name, model) is not None
    ]  # fmt: skip
    for name in optional if none else ():
        yield {**batch, name: argument_of(name, model)}
    if not rank:
        yield from _of_other_ranks(batch)
    for name, n in itertools.product(floats, numbers):
        if batch[name].is_floating_point() and "mask" not in name:
            yield {**batch, name: _like(batch[name], [BATCH, SIDE, n])}
    for name, value in batch.items():
        if isinstance(value, torch.Tensor) and value.dtype == torch.long and "mask" in name:
            yield {**batch, name: value.bool()}
            yield {**batch, name: value.float()}
        if takes[name].default is not inspect.Parameter.empty:
            yield {key: other for key, other in batch.items() if key != name}
    for name, shape in floats.items():
        for d in range(1, len(shape)):
            for n in (1, 3, 4, 9, 16, 32, 64, 128):
                if n != shape[d]:
                    yield {**batch, name: _like(batch[name], [*shape[:d], n, *shape[d + 1 :]])}


def _shorter(batch: dict[str, Any], share: int) -> dict[str, Any]:
    """The batch with so much less of sounds and pictures."""
    return {
        name: value[..., : max(value.shape[-1] // share, 1)].clone()
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() > 2
        else value
        for name, value in batch.items()
    }


def _of_other_ranks(batch: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The batch with an input as a video, a picture, a series or words."""
    for name, value in batch.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point() and "mask" not in name:
            shape = list(value.shape)
            channels = shape[-1] if len(shape) == 3 else shape[min(1, len(shape) - 1)]
            side = shape[-1] if len(shape) == 4 else SIDE
            for other in (
                [BATCH, channels, 5, side, side],
                [BATCH, 4, channels, side, side],
                [BATCH, channels, side, side],
                [BATCH, SIDE, channels],
                [BATCH, channels, 64 * SIDE],
                [BATCH * SIDE, channels],
            ):
                if len(other) != len(shape):
                    yield {**batch, name: _like(value, other)}


def _fields(draft: Draft, at: Try, numbers: list[int]) -> Iterator[dict[str, Any]]:
    """Fields of the configuration to set: absent ones, empty ones, shrunk ones, large ones."""
    absent = re.search(r"'(\w+)' object has no attribute '(\w+)'", at.said)
    if absent and "Config" in absent[1]:
        for value in (0, 0.0, 10000.0):
            yield {f"{absent[1]}.{absent[2]}": value}
    now = {**draft.shrunk, **at.values}
    if at.said.endswith("parameters are left"):
        yield from _smaller(draft, now, at)
        return
    shrunk = [
        path for path, value in draft.published.items()
        if now.get(path) != value and not isinstance(value, float)
    ]  # fmt: skip
    says = [p for p in draft.published if re.search(rf"\b{re.escape(p.split('.')[-1])}\b", at.said)]
    empty = [p for p, value in now.items() if value is None and p not in at.values]
    for path in sorted(set(says) & set(empty)):
        for value in (TEXT, 4, 32):
            yield {path: value}
    for path, value in now.items():
        if isinstance(value, int) and value > 1 and value in numbers and not path.startswith("_"):
            yield from ({path: n} for n in numbers if n != value)
        elif _integers(value):
            for i, n in itertools.product(range(len(value)), numbers):
                if value[i] in numbers and n != value[i]:
                    yield {path: type(value)([*value[:i], n, *value[i + 1 :]])}
    for path in sorted(shrunk, key=lambda p: (p not in says, str(now[p]) not in at.said)):
        yield {path: draft.published[path]}
    for path in says:
        for n in numbers:
            if isinstance(now.get(path), int) and not isinstance(now[path], bool):
                yield {path: n}
            elif _integers(now.get(path)) and sum(now[path]) and n % 2 == 0:
                yield {path: _of_sum(now[path], n)}
    for path in empty if "None" in at.said else ():
        for value in (32, 4, TEXT, 2):
            yield {path: value}


def _smaller(draft: Draft, now: dict[str, Any], at: Try) -> Iterator[dict[str, Any]]:
    """The fields that, smaller, leave the fewest parameters: all of them that help, then each."""
    counts: dict[str, tuple[int, Any]] = {}
    for path, value in now.items():
        if path.split(".")[-1].startswith("_") or isinstance(value, bool):
            continue
        if isinstance(value, int) and value > 4:
            small: Any = max(value // 8, 32) if value > 32 else max(value // 4, 2)
        elif _integers(value) and max(value) > 1:
            small = type(value)(max(32, one // 8) if one > 32 else min(one, 1) for one in value)
        else:
            continue
        if small == value:
            continue
        try:
            with torch.device("meta"):
                made = draft.make({**at.values, path: small})
            count = sum(p.numel() for p in made.parameters())
        except Exception:
            continue
        if count < -at.reached[1]:
            counts[path] = (count, small)
    best = sorted(counts, key=lambda path: counts[path][0])
    yield from ({path: counts[path][1] for path in best[:n]} for n in (8, 4, 2, 1))
    yield from ({path: counts[path][1]} for path in best[1:])


def _integers(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(type(v) is int for v in value)


def _of_sum(value: Any, total: int) -> Any:
    """Numbers in the same shares, even, whose sum is another."""
    new = [max(2, round(one * total / sum(value) / 2) * 2) for one in value]
    new[-1] += total - sum(new)
    return type(value)(new)


def _like(value: torch.Tensor, shape: list[int]) -> torch.Tensor:
    if math.prod(shape) > 4_000_000:
        shape = [min(one, SIDE) for one in shape]
    if value.is_floating_point() and len(value.unique()) > 2:
        return torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return value.flatten()[:1].expand(math.prod(shape)).reshape(shape).clone()
