"""What goes from one graph to the next: values that are written there, and views of one memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autoshard.errors import AutoshardError
from autoshard.runtime.collectives import I
from autoshard.runtime.collectives.axis import Axis, chunk_bounds
from autoshard.runtime.collectives.lockstep import run_ranks
from autoshard.runtime.lazy_gather import LazyGather, lazy
from autoshard.runtime.parameters import Arrivals, give_back
from autoshard.verification.comparison import furthest
from side_by_side import TOLERANCE, Pair, difference

WHOLE = torch.arange(28, dtype=torch.float32).view(4, 7).sin()
WIDTH = 32


def wrapped(dim: int, axis: Axis) -> tuple[torch.Tensor, LazyGather]:
    """A leaf that holds this rank's rows or columns of WHOLE, and the lazy whole of them."""
    leaf = WHOLE.narrow(dim, *chunk_bounds(WHOLE.shape[dim], axis)).clone().requires_grad_()
    out = lazy(leaf * 1.0, f"S({dim})", axis, WHOLE.shape[dim])
    assert isinstance(out, LazyGather)
    return leaf, out


@pytest.mark.parametrize("read", [False, True])
def test_a_graph_writes_to_what_came_back(read: bool) -> None:
    """Somebody who has read the whole before sees the write as in an ordinary tensor."""

    def rank(axis: Axis) -> torch.Tensor:
        whole = wrapped(1, axis)[1].detach()
        view = whole[1:] if read else None
        values: list[Any] = [torch.zeros(1), whole, whole]
        taken = Arrivals({1: "S(1)", 2: I}, written=[1]).take(values)
        assert values[1].shape[1] < 7 and values[2].shape[1] == 7
        values[1].mul_(-2)
        give_back(taken)
        if view is not None:
            torch.testing.assert_close(view, -2 * WHOLE[1:], rtol=0, atol=0)
        return whole.add(0)

    for got in run_ranks(2, rank):
        torch.testing.assert_close(got, -2 * WHOLE, rtol=0, atol=0)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("state", ["S", I])
def test_what_a_graph_wrote_has_the_gradient_of_the_new_value(dim: int, state: str) -> None:
    """Given the whole of what came back, or, of a cache without a gradient, the part."""
    serial, factor = WHOLE.clone().requires_grad_(), torch.full((4, 7), 3.0, requires_grad=True)
    x = serial * 1.0 if state == I else WHOLE.clone()
    x.mul_(factor)
    x.square().sum().backward()

    def rank(axis: Axis) -> None:
        leaf, whole = wrapped(dim, axis)
        own, bounds = factor.detach().clone().requires_grad_(), chunk_bounds(WHOLE.shape[dim], axis)
        values: list[Any] = [whole if state == I else whole.detach()]
        x, arrivals = values[0], Arrivals({0: state if state == I else f"S({dim})"}, written=[0])
        taken = arrivals.take(values)
        values[0].mul_(own if state == I else own.narrow(dim, *bounds))
        give_back(taken)
        x.square().sum().backward()
        if state == I:
            torch.testing.assert_close(own.grad, factor.grad)
            torch.testing.assert_close(leaf.grad, serial.grad.narrow(dim, *bounds))
        else:
            pair = [one.grad.narrow(dim, *bounds) for one in (own, factor)]
            torch.testing.assert_close(*pair)

    run_ranks(2, rank)


class Written(nn.Module):
    """A second graph that writes to an activation of the first one, which is returned besides."""

    def __init__(self, loss: bool, masked: bool) -> None:
        super().__init__()
        self.loss, self.masked = loss, masked
        self.fill = nn.Parameter(torch.full((WIDTH,), 0.5))
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.up(x)
        mask = x.detach()[..., 0] > 0
        torch._dynamo.graph_break()
        if self.masked:  # on pp one stage alone finds that it cannot be traced
            x[mask] = self.fill
        else:
            x[:, ::2] = self.fill
        with torch.no_grad():
            x[:, 1] *= 2  # of which the gradient is as if it were not
        y = self.down(x.square())
        return y.square().mean() if self.loss else y, x


def activation_written(axis: str, loss: bool, masked: bool) -> tuple[dict[str, Any], str]:
    """Steps of a loss that reads what was written, where the model returns none; and the error of
    one beside the model's own."""
    torch.manual_seed(0)
    pair, x, refused = Pair(Written(loss, masked), mesh={axis: 2}), torch.randn(4, 8, WIDTH), ""
    for _ in range(2):
        made = pair.compiled(x), pair.serial(x)
        pair.loss = furthest([pair.loss, *map(difference, *made)])
        for y, written in made:
            (y if loss else y.square().sum() + written.sin().sum()).backward()
        pair.compare_gradients()
    try:
        pair.compiled(x)[1].sum().backward()
    except AutoshardError as error:
        refused = str(error)
    return pair.result(), refused


@pytest.mark.parametrize(
    ("axis", "loss", "masked"),
    [
        ("tp", False, False),
        ("pp", False, False),
        ("pp", True, False),
        ("pp", False, True),
        pytest.param("dp_shard", False, True, marks=pytest.mark.slow),
        pytest.param("cp", False, True, marks=pytest.mark.slow),
    ],
)
def test_an_activation_is_written_between_graphs(
    gloo2: Any, axis: str, loss: bool, masked: bool
) -> None:
    for result, refused in gloo2(activation_written, axis, loss, masked):
        assert furthest(result[kind] for kind in ("loss", "gradient")) < TOLERANCE, result
        assert ("what it writes to an input" in refused) == loss, refused


class Chosen(nn.Module):
    """Rows that a mask chooses, as far as there are any (audio tokens in a batch of text)."""

    def __init__(self, above: float) -> None:
        super().__init__()
        self.above = above
        self.up, self.own, self.down = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(x)
        mask = x.detach()[..., 0] > self.above
        torch._dynamo.graph_break()
        rows = x[mask]
        torch._dynamo.graph_break()
        rows = self.own(rows)
        torch._dynamo.graph_break()
        x[mask] = rows
        y: torch.Tensor = self.down(x)
        return y


def stepped(kind: type[nn.Module], how: Any, axis: str) -> dict[str, Any]:
    """A step of a model, made by `kind(how)`, beside the serial one."""
    torch.manual_seed(0)
    pair, x = Pair(kind(how), mesh={axis: 2}), torch.randn(4, 8, WIDTH)
    pair.backward(lambda model: model(x).square().mean())
    pair.compare_gradients()
    return pair.result()


@pytest.mark.parametrize(
    ("axis", "above"),
    [("pp", float("inf")), pytest.param("tp", 0.0, marks=pytest.mark.slow)],
)
def test_rows_that_a_mask_chooses(gloo2: Any, axis: str, above: float) -> None:
    for result in gloo2(stepped, Chosen, above, axis):
        assert furthest(result[kind] for kind in ("loss", "gradient")) < TOLERANCE, result


class Viewed(nn.Module):
    """A view that is made in one graph ("first"), "between" two, or in one that writes to it
    ("written"), and written in the next; a value that is detached in place."""

    def __init__(self, made: str) -> None:
        super().__init__()
        self.made, self.more = made, nn.Parameter(torch.full((WIDTH,), 0.5))
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(x)
        row = x[:, 0] if self.made == "first" else None
        torch._dynamo.graph_break()
        if row is None:
            row = x[:, 0]
            if self.made == "written":
                row = x.view(-1, WIDTH)
                row.mul_(self.more)
                row.data.mul_(0.5)
            torch._dynamo.graph_break()
        row.add_(self.more)
        torch._dynamo.graph_break()
        scale = self.up(x).sin()
        scale.detach_()
        scale.mul_(self.more)
        y: torch.Tensor = self.down(x) * scale
        return y


@pytest.mark.parametrize(
    ("axis", "made"),
    [
        ("tp", "first"),
        ("pp", "between"),
        ("pp", "written"),
        ("tp", "written"),
        pytest.param("tp", "between", marks=pytest.mark.slow),
        pytest.param("cp", "first", marks=pytest.mark.slow),
        pytest.param("dp_shard", "written", marks=pytest.mark.slow),
    ],
)
def test_a_view_is_written_between_graphs(gloo2: Any, axis: str, made: str) -> None:
    for result in gloo2(stepped, Viewed, made, axis):
        assert furthest(result[kind] for kind in ("loss", "gradient")) < TOLERANCE, result


def test_a_write_that_pp_would_lose_is_refused(gloo2: Any) -> None:
    with pytest.raises(AutoshardError, match="a view of another output of it"):
        gloo2(stepped, Viewed, "first", "pp")
