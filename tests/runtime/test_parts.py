"""Outputs that a rank holds in part, through operators of eager code: equal to the whole's.

Each operator, and chains of them, with drawn arguments, on each state, on one axis and on pairs of
axes: values, dtype, strides, and the gradient through a loss outside of the graph. All numbers are
small integers, so that nothing rounds.
"""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

from autoshard.runtime.collectives import Axis, run_mesh
from autoshard.runtime.lazy_gather import LazyGather, wrap_outputs

SHAPE = (4, 8, 6)
Use = Callable[[torch.Tensor], torch.Tensor]


def cut(whole: torch.Tensor, state: str, size: int, rank: int) -> torch.Tensor:
    """A rank's part of the whole; written apart from `convert`, of which it is the judge."""
    if state == "P":
        addends = [torch.randint(-2, 3, whole.shape, generator=seeded(i)) for i in range(size - 1)]
        addends.append(whole - sum(addends, torch.zeros_like(whole)))
        return addends[rank].to(whole.dtype)
    if state == "I":
        return whole
    dim = int(state[2])
    rows = torch.arange(whole.shape[dim])
    if state[0] == "Z":
        chunks = rows.chunk(2 * size)
        mine = torch.cat([chunks[rank], chunks[2 * size - 1 - rank]])
    else:
        chunks = rows.split(-(-len(rows) // size))
        mine = chunks[rank] if rank < len(chunks) else rows[:0]
    return whole.index_select(dim, mine)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def whole_of(shape: Sequence[int]) -> torch.Tensor:
    return torch.randint(-8, 9, tuple(shape), generator=seeded(7)).float()


# Operators, their arguments drawn for a shape


def _dim(draw: random.Random, shape: Sequence[int]) -> int:
    return draw.randrange(-len(shape), len(shape))


def _along(make: Callable[[torch.Tensor, int], torch.Tensor]) -> Callable[..., Use]:
    def drawn(draw: random.Random, shape: Sequence[int]) -> Use:
        dim = _dim(draw, shape)
        return lambda x: make(x, dim)

    return drawn


def _at(make: Callable[[torch.Tensor, int, int], torch.Tensor]) -> Callable[..., Use]:
    """With a dim and an index of it."""

    def drawn(draw: random.Random, shape: Sequence[int]) -> Use:
        dim = draw.choice([d for d, size in enumerate(shape) if size])
        at = draw.randrange(-shape[dim], shape[dim])
        return lambda x: make(x, dim, at)

    return drawn


def _plain(make: Use) -> Callable[..., Use]:
    return lambda draw, shape: make


def _sliced(draw: random.Random, shape: Sequence[int]) -> Use:
    cuts = [
        draw.choice([slice(None), slice(1, None), slice(None, -1), slice(0, None, 2)])
        for _ in shape
    ]
    return lambda x: x[tuple(cuts)]


def _merged(draw: random.Random, shape: Sequence[int]) -> Use:
    if len(shape) < 2:
        return lambda x: x.view(1, -1)
    dim = draw.randrange(len(shape) - 1)
    return lambda x: x.flatten(dim, dim + 1)


def _viewed(draw: random.Random, shape: Sequence[int]) -> Use:
    dim = draw.choice([d for d, size in enumerate(shape)])
    sizes = [
        *shape[:dim],
        draw.choice([d for d in (1, 2, 3, shape[dim]) if d and shape[dim] % d == 0] or [1]),
        -1,
        *shape[dim + 1 :],
    ]
    return lambda x: x.reshape(sizes) if x.numel() else x


def _rows(count: int, masked: bool = False) -> Callable[..., Use]:
    """Rows by number, of `count` dims at once, or by a mask."""

    def drawn(draw: random.Random, shape: Sequence[int]) -> Use:
        dims = [d for d, size in enumerate(shape) if size]
        dims = draw.sample(dims, min(count, len(dims)))
        sizes = draw.choice([(3,), (2, 2)])
        index: list[Any] = [slice(None)] * len(shape)
        for dim in dims:
            index[dim] = torch.randint(shape[dim], sizes, generator=seeded(draw.randrange(99)))
            if masked:
                index[dim] = torch.arange(shape[dim]) % 2 == 0
        return lambda x: x[tuple(index)]

    return drawn


def _expanded(draw: random.Random, shape: Sequence[int]) -> Use:
    ones = [d for d, size in enumerate(shape) if size == 1]
    if not ones:
        dim = draw.randrange(len(shape) + 1)
        sizes = [*shape[:dim], 3, *shape[dim:]]
        return lambda x: x.unsqueeze(dim).expand(sizes)
    sizes = [2, *(2 if d in ones else -1 for d in range(len(shape)))]
    return lambda x: x.expand(sizes)


def _joined_at(
    join: Any, others: Callable[[torch.Tensor], list[torch.Tensor]]
) -> Callable[..., Use]:
    return _along(lambda x, dim: join(others(x), dim))


def _write(write: Callable[[torch.Tensor], Any]) -> Callable[..., Use]:
    """A write into a view of a copy, of which the whole copy is looked at."""

    def drawn(draw: random.Random, shape: Sequence[int]) -> Use:
        dim = draw.choice([d for d, size in enumerate(shape) if size])
        read = draw.random() < 0.5

        def use(x: torch.Tensor) -> torch.Tensor:
            y = x.clone()
            view = y.select(dim, 0)
            if read:
                view.sum()
            write(view)
            return y

        return use

    return drawn


OPERATORS: Mapping[str, Callable[..., Use]] = {
    "clone": _plain(torch.clone),
    "contiguous": _plain(lambda x: x.contiguous()),
    "double": _plain(lambda x: x.double()),
    "bfloat16": _plain(lambda x: x.bfloat16()),
    "to a copy": _plain(lambda x: x.to(torch.float32, copy=True)),
    "* 1": _plain(lambda x: x * 1),
    "neg": _plain(torch.neg),
    "where": _plain(lambda x: torch.where(x > 0, x, -x)),
    "select": _at(lambda x, dim, at: x.select(dim, at)),
    "slice": _sliced,
    "narrow": _at(lambda x, dim, at: x.narrow(dim, at % x.shape[dim], 1)),
    "rows from behind": _at(lambda x, dim, at: x.narrow(dim, 0, x.shape[dim] - at % x.shape[dim])),
    "unsqueeze": _along(lambda x, dim: x.unsqueeze(dim)),
    "squeeze": _along(lambda x, dim: x.squeeze(dim)),
    "squeeze all": _plain(torch.squeeze),
    "merge": _merged,
    "view": _viewed,
    "view(-1)": _plain(lambda x: x.reshape(-1)),
    "expand": _expanded,
    "index_select": _along(
        lambda x, dim: x.index_select(dim, torch.arange(x.shape[dim]).flip(0).repeat(2))
    ),
    "rows by number": _rows(1),
    "two indices": _rows(2),
    "a mask": _rows(1, masked=True),
    "None and ...": _plain(lambda x: x[None, ..., None]),
    "cat": _joined_at(torch.cat, lambda x: [x, x]),
    "cat with a copy": _joined_at(torch.cat, lambda x: [x.clone(), x]),
    "cat with the whole": _joined_at(torch.cat, lambda x: [x, x * 2]),
    "cat with an empty": _joined_at(torch.cat, lambda x: [torch.tensor([], dtype=x.dtype), x]),
    "cat of views": _joined_at(torch.cat, lambda x: [x[:1], x[-1:]]),
    "stack": _joined_at(torch.stack, lambda x: [x, x.clone()]),
    "stack of rows": _plain(lambda x: torch.stack([x[i] for i in range(len(x))][::-1])),
    "transpose": _along(lambda x, dim: x.transpose(dim, 0)),
    "movedim": _along(lambda x, dim: x.movedim(0, dim)),
    "chunk": _along(lambda x, dim: x.chunk(2, dim)[-1]),
    "split": _along(lambda x, dim: torch.split(x, 1, dim)[0]),
    "unbind": _along(lambda x, dim: x.unbind(dim)[0]),
    "flip": _along(lambda x, dim: x.flip(dim)),
    "roll": _along(lambda x, dim: x.roll(1, dim)),
    "diff": _along(lambda x, dim: x[1:] - x[:-1] if len(x) > 1 else x),
    "cumsum": _along(lambda x, dim: x.cumsum(dim) % 7),
    "sum": _along(lambda x, dim: x.sum(dim, keepdim=True) % 7),
    "amax": _along(lambda x, dim: x.argmax(dim) * 1.0),
    "argmax": _along(lambda x, dim: x.argmax(dim).float()),
    "argmax kept": _along(lambda x, dim: x.argmax(dim, keepdim=True).float()),
    "argmax of all": _plain(lambda x: x.argmax().float()[None]),
    "likeliest values": _along(lambda x, dim: x.gather(dim, x.argmax(dim, keepdim=True))),
    "sort": _along(lambda x, dim: x.sort(dim=dim, stable=True).values),
    "topk": _along(lambda x, dim: x.topk(1, dim).values),
    "repeat": _plain(lambda x: x.repeat(2, *[1] * x.dim())),
    "repeat_interleave": _along(lambda x, dim: x.repeat_interleave(2, dim)),
    "tril": _plain(lambda x: x.tril() if x.dim() > 1 else x),
    "one of a pair": _plain(lambda x: torch.broadcast_tensors(x, x)[0]),
    "zero_": _write(lambda view: view.zero_()),
    "fill_": _write(lambda view: view.fill_(3)),
    "mul_": _write(lambda view: view.mul_(2)),
    "setitem": _write(lambda view: view.__setitem__(..., 5)),
    "copy_": _write(lambda view: view.copy_(view.flip(0) if view.dim() else view)),
    "zeroed": _plain(lambda x: x.clone().zero_()),
    "data": _plain(lambda x: x.data),
    "deepcopy": _plain(lambda x: copy.deepcopy(x.detach())),
    "pickle": _plain(lambda x: pickle.loads(pickle.dumps(x.detach()))),
    "numpy": _plain(lambda x: torch.from_numpy(x.detach().float().numpy())),
    "tolist": _plain(lambda x: torch.tensor(x.tolist())),
    "iteration": _plain(lambda x: sum(x)),  # type: ignore[arg-type, return-value]
}


# What is split how: states by axis, outermost first

LAYOUTS: list[tuple[dict[str, int], dict[str, str], Sequence[int]]] = [
    ({"tp": 2}, {"tp": "S(0)"}, SHAPE),
    ({"tp": 3}, {"tp": "S(1)"}, SHAPE),
    ({"tp": 4}, {"tp": "S(2)"}, SHAPE),
    ({"tp": 2}, {"tp": "S(0)"}, (1, 8, 6)),
    ({"tp": 3}, {"tp": "P"}, SHAPE),
    ({"cp": 2}, {"cp": "Z(1)"}, SHAPE),
    ({"cp": 4}, {"cp": "Z(1)"}, (1, 8, 6)),
    ({"cp": 3}, {"cp": "Z(0)"}, (6, 5)),
    ({"cp": 2}, {"cp": "S(1)"}, (2, 7, 3)),
    ({"cp": 2, "tp": 2}, {"cp": "Z(1)", "tp": "S(2)"}, SHAPE),
    ({"cp": 2, "tp": 3}, {"cp": "Z(1)", "tp": "S(2)"}, (2, 8, 7)),
    ({"cp": 2, "tp": 2}, {"cp": "Z(1)", "tp": "S(1)"}, SHAPE),
    ({"cp": 2, "tp": 2}, {"cp": "Z(1)", "tp": "P"}, SHAPE),
    ({"cp": 2, "tp": 2}, {"cp": "Z(1)", "tp": "I"}, SHAPE),
    ({"cp": 2, "tp": 2}, {"cp": "S(0)", "tp": "S(1)"}, (4, 3)),
    ({"dp_shard": 2, "tp": 2}, {"tp": "S(1)"}, SHAPE),
]


def chains(shape: Sequence[int], count: int, seed: int) -> list[tuple[str, bool, Use]]:
    """Each operator once, and chains of two and three; with gradients, or without."""
    draw = random.Random(seed)
    drawn = [draw.choices(list(OPERATORS), k=draw.choice([2, 3])) for _ in range(count)]
    made = []
    for names in [*([name] for name in OPERATORS), *drawn]:
        x, uses, taken = whole_of(shape), [], []
        for name in names:
            if not x.dim() or not x.numel() or x.numel() > 3000:
                break
            uses.append(OPERATORS[name](draw, x.shape))
            taken.append(name)
            x = uses[-1](x)
        made.append((" -> ".join(taken), draw.random() < 0.6, _chained(uses)))
    return made


def _chained(uses: list[Use]) -> Use:
    def use(x: torch.Tensor) -> torch.Tensor:
        for one in uses:
            x = one(x)
        return x

    return use


def seen(use: Use, whole: torch.Tensor, leaf: torch.Tensor) -> tuple[Any, ...]:
    """Shape, dtype and values of what operators make, and the gradient of a loss on it."""
    made = use(whole)
    strides = made.stride() if isinstance(made, LazyGather) else None
    about = made.shape, made.dtype, made.requires_grad
    if made.requires_grad:
        weights = torch.randint(-3, 4, made.shape, generator=seeded(3))
        (made.double() * weights).sum().backward()
    return about, strides, (made + 0).detach(), leaf.grad


@pytest.mark.parametrize("sizes, states, shape", LAYOUTS, ids=str)
def test_operators_on_a_part_are_operators_on_the_whole(
    sizes: Mapping[str, int], states: Mapping[str, str], shape: Sequence[int]
) -> None:
    drawn = chains(shape, 40, len(sizes) + sum(shape))

    def parts(whole: torch.Tensor, axes: Sequence[Axis]) -> torch.Tensor:
        for axis in axes:
            whole = cut(whole, states.get(axis.name, "I"), axis.size, axis.rank)
        return whole

    def rank(axes: tuple[Axis, ...]) -> list[Any]:
        inner, found = axes[-1], []
        state = states[inner.name]
        dim = int(state[2]) if state[0] in "SZ" else None
        extent = None if dim is None else parts(whole_of(shape), axes[:-1]).shape[dim]
        outer = [(states[axis.name], axis) for axis in axes[:-1] if axis.name in states]
        for name, grad, use in drawn:
            leaf = parts(whole_of(shape), axes).requires_grad_(grad)
            with torch.set_grad_enabled(grad):
                (whole,) = wrap_outputs([leaf * 1], [state], [extent], inner, outer or [None])
                assert isinstance(whole, LazyGather) and whole.shape == tuple(shape)
                try:
                    found.append((axes, *seen(use, whole, leaf)))
                except (RuntimeError, IndexError) as error:
                    error.add_note(name)
                    raise
        return found

    wrong, results = [], run_mesh(sizes, rank)
    for i, (name, grad, use) in enumerate(drawn):
        leaf = whole_of(shape).requires_grad_(grad)
        with torch.set_grad_enabled(grad):
            about, _, values, gradient = seen(use, leaf * 1, leaf)
            strides = use(leaf * 1).stride()
        for axes, got_about, got_strides, got_values, got_gradient in (one[i] for one in results):
            good = got_about == about and torch.equal(got_values, values)
            good = good and got_strides in (None, strides)
            if good and gradient is not None:  # an addend's gradient is the whole's
                split = [axis for axis in axes if states.get(axis.name) != "P"]
                good = torch.equal(got_gradient, parts(gradient, split))
            if not good:
                wrong.append(f"{name}: {got_about} {got_strides} for {about} {strides}")
                break
    assert not wrong, f"{len(wrong)} of {len(drawn)}: {wrong}"
