"""canonicalize changes no value; what it leaves alone, it says why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._dynamo.exc import BackendCompilerFailed

from autoshard.passes.base import Context, Report
from autoshard.passes.canonicalize import Canonicalize
from autoshard.runtime.collectives.axis import Axis
from autoshard.runtime.collectives.redistribution import redistribute
from autoshard.runtime.graph_meta import MUTATED
from autoshard.verification.program_check import verify_program
from capturing import Recorder, check
from traced import programs

T = torch.Tensor


class Fn(nn.Module):
    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        self.fn = fn
        self.lin = nn.Linear(8, 8)
        self.register_buffer("cache", torch.ones(4, 8))

    def forward(self, *args: Any) -> Any:
        return self.fn(self, *args)


def canonical(
    fn: Callable[..., Any], *args: T, **kwargs: Any
) -> tuple[list[str], Report, Recorder]:
    """(operators after the pass, its report, the recorder); the model is checked against eager."""
    reports: list[Report] = []

    def rewrite(gm: fx.GraphModule) -> None:
        reports.append(Canonicalize().run(gm, Context(Axis("tp", 2, 0, ""))))

    recorder = check(Fn(fn), args, rewrite=rewrite, tolerance=0, **kwargs)
    names = [target.removeprefix("aten.") for target in recorder.targets()]
    return names, reports[0], recorder


def x48() -> T:
    return torch.randn(4, 8)


def test_views_become_one_reshape() -> None:
    names, report, _ = canonical(lambda m, x: m.lin(x).view(2, 16).view(8, 4).relu(), x48())
    assert names == ["linear.default", "reshape.default", "relu.default"]
    assert report.hits == 2


def test_a_part_written_into_a_complex_tensor_is_joined() -> None:
    def fn(m: Any, x: T) -> T:
        z = torch.complex(m.lin(x), x)
        out = torch.zeros_like(z)
        out[:, :3] = z[:, 5:]
        out[1:3, -2:] = z[:2, :2] * 2
        out[-1] = z[0]
        out[2, 4] = z[3, 3]
        out[3:1] = 1
        return torch.view_as_real(out * z)

    names, _, _ = canonical(fn, x48())
    assert "cat.default" in names and not any("scatter" in name for name in names)


def test_a_strided_part_of_a_complex_tensor_is_kept() -> None:
    def fn(m: Any, x: T) -> T:
        out = torch.complex(x, x)
        out[:, ::2] = 1
        return torch.view_as_real(out)

    names, _, _ = canonical(fn, x48(), backward=False)
    assert "slice_scatter.default" in names


def test_the_size_of_a_repetition_is_not_said_twice() -> None:
    def fn(m: Any, x: T) -> T:
        return torch.repeat_interleave(m.lin(x), 2, dim=0, output_size=8).relu()

    names, report, recorder = canonical(fn, x48())
    assert "repeat_interleave.self_int" in names and report.hits == 1


def test_reshape_with_two_readers_is_kept() -> None:
    def fn(m: Any, x: T) -> T:
        y = m.lin(x).view(32)
        return y.view(8, 4).relu().sum() + y.sum()

    names, _, _ = canonical(fn, x48())
    assert names.count("reshape.default") == 2


def test_what_changes_nothing_goes() -> None:
    def fn(m: Any, x: T) -> T:
        x = x.detach()[:, :].expand(4, 8).transpose(1, 1).permute(0, 1).view(4, 8)
        x = F.dropout(F.dropout(x, 0.5, training=False), 0.0)
        x = x.to(torch.float32).type_as(m.lin.weight).contiguous()
        return m.lin(m.lin(x[0:9]).clone())

    names, _, _ = canonical(fn, x48())
    assert names == ["linear.default"] * 2


def test_what_does_something_stays() -> None:
    def fn(m: Any, x: T) -> T:
        y = m.lin(x)
        y = y[::2] + y[1:3] + y.detach()[:2] + F.dropout(y, 0.5)[2:]
        return y.transpose(0, 1).permute(1, 0).type_as(x.double()).expand(3, 2, 8)

    names, report, _ = canonical(fn, x48())
    kept = "slice.Tensor detach.default dropout.default transpose.int permute.default"
    assert all(name in names for name in (kept + " _to_copy.default expand.default").split())
    assert report.hits == 2  # the assertion that .double() leaves, the copy of what dropout gives


def test_copy_that_reaches_an_output_stays() -> None:
    def fn(m: Any, x: T) -> Any:
        return m.lin(x).clone().t(), x.clone(), m.lin(x).clone() + 1

    names, report, _ = canonical(fn, x48())
    assert names.count("clone.default") == 2
    assert [skip.reason for skip in report.skips] == ["its memory reaches an output"] * 2


def test_copy_of_what_may_be_written_before_the_backward_stays() -> None:
    def fn(m: Any, x: T) -> T:
        return (m.lin(x) * x.t().clone().t()).sum()

    names, report, _ = canonical(fn, x48())
    assert names.count("clone.default") == 1
    (skip,) = report.skips
    assert skip.reason == "its input may be written before the backward that reads it"
    names, _, _ = canonical(fn, x48(), around=torch.no_grad, backward=False)
    assert "clone.default" not in names


def test_copy_of_a_value_that_is_overwritten_stays() -> None:
    def fn(m: Any, x: T) -> Any:
        old = m.cache.clone()
        m.cache.add_(x)
        return old, m.lin(x)

    _, _, recorder = canonical(fn, x48(), steps=2)
    assert len(recorder.graph.meta[MUTATED]) == 1


class Windows(nn.Module):
    """Overlapping windows by as_strided, over heads that are a transposed view (Longformer)."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: T) -> T:
        b, s, _ = x.shape
        h = self.up(x.transpose(0, 1)).view(s, b, 4, 4).transpose(0, 1)
        rows = h.transpose(1, 2).reshape(b * 4, s, 4)
        first, second, last = rows.stride()
        windows = rows.as_strided((b * 4, s - 1, 2, 4), (first, second, second, last))
        pairs = windows.prod(2).view(b, 4, s - 1, 4).transpose(1, 2).reshape(b, s - 1, 16)
        return self.down(pairs)


class Packed(fx.Interpreter):
    """Each value in memory of its own order of dims, as a gathered one is."""

    def run_node(self, n: fx.Node) -> Any:
        made = super().run_node(n)
        return made.contiguous() if isinstance(made, T) else made


def arranged(model: nn.Module, x: T) -> None:
    """The serial graph, its values laid out as rows, has the values and gradients of the model."""
    torch.compiler.reset()
    (program,), values = programs(model, (x,), [{"mesh": {"tp": 2}}])
    weights = list(model.parameters())
    pairs = [Packed(program.serial).run(*values)[0], model(x)]
    noise = torch.randn_like(pairs[1])
    (have, want) = (torch.autograd.grad(y, weights, noise, allow_unused=True) for y in pairs)
    torch.testing.assert_close(pairs[0], pairs[1])
    torch.testing.assert_close(have, want)


def test_as_strided_finds_its_elements_in_values_that_were_gathered() -> None:
    arranged(Windows(), torch.randn(2, 6, 8))


def written_whole(m: Fn, x: T) -> T:
    y = torch.zeros(8, 4)
    y[:, :] = m.lin(x).t()
    return y.as_strided((3, 6), (10, 1)).sin()


def written_in_place(m: Fn, x: T) -> T:
    y = m.lin(x).t() * 1
    y.as_strided((2, 3), (1, 9)).mul_(3)
    return y


def behind_gaps(m: Fn, x: T) -> T:
    return m.lin(x)[1::2, ::2].as_strided((4, 8), (8, 1), 0).sin()


def before_and_after(m: Fn, x: T) -> T:
    return m.lin(x).split(4, -1)[1][1].as_strided((3, 4), (8, 1), 4).sin()


def expanded(m: Fn, x: T) -> T:
    return m.lin(x)[:, None].expand(4, 3, 8).as_strided((4, 2, 6), (8, 0, 1)).sin()


def copied(m: Fn, x: T) -> T:
    made = torch.empty_strided((8, 4), (4, 1)).copy_(m.lin(x).t())
    return torch.as_strided_copy(made, (2, 8), (16, 1)).sin()


@pytest.mark.parametrize(
    "fn", [written_whole, written_in_place, behind_gaps, before_and_after, expanded, copied]
)
def test_memory_is_as_it_was_traced(fn: Callable[..., Any]) -> None:
    """As autograd has it, which sees nothing of what is behind a view."""
    arranged(Fn(fn), torch.randn(4, 8))


def test_as_strided_over_elements_that_share_memory_is_refused_with_the_line() -> None:
    def shared(m: Fn, x: T) -> T:
        return m.lin(x).unfold(1, 2, 1).as_strided((4, 4), (8, 1)) * 2

    told = r"(?s)PlanError: .*gaps.*test_canonicalize.py:.*unfold"
    with pytest.raises(BackendCompilerFailed, match=told):
        canonical(shared, torch.randn(4, 8))


@torch.library.custom_op("memory::as_rows", mutates_args=())
def as_rows(x: T) -> T:
    """As a kernel that was told that its rows are contiguous."""
    return x.as_strided(x.shape, (x.shape[1], 1)).clone()


@as_rows.register_fake
def _(x: T) -> T:
    return torch.empty(x.shape)


as_rows.register_autograd(lambda ctx, grad: grad)


def test_a_kernel_of_the_users_finds_what_was_gathered_unevenly_as_it_was_traced() -> None:
    model = nn.Sequential(nn.Linear(64, 65), nn.ReLU(), Calls(as_rows), nn.Linear(65, 64))
    (program,), values = programs(model, (torch.randn(128, 64),), [{"mesh": {"tp": 2}}])
    gathered = [n for n in program.graph_module.graph.nodes if n.target is redistribute]
    assert any(node.args[4] == 65 for node in gathered)
    assert verify_program(program, values).worst[1] < 1e-5


class Calls(nn.Module):
    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: T) -> T:
        return self.fn(x)


def test_copy_before_an_operator_that_needs_strides_stays() -> None:
    def fn(m: Any, x: T) -> T:
        return m.lin(x).t().contiguous().as_strided((4, 4), (8, 1)) * 2

    names, report, _ = canonical(fn, x48())
    assert "clone.default" in names
    assert report.skips[0].reason.endswith("depends on strides")


def test_whole_write_is_the_value_written() -> None:
    def fn(m: Any, x: T) -> T:
        y = torch.zeros(4, 8)
        y[:, :] = m.lin(x)
        return y * 2

    names, _, _ = canonical(fn, x48())
    assert not any("scatter" in name for name in names)


def test_cat_with_an_empty_cache() -> None:
    def fn(m: Any, x: T) -> Any:
        empty = torch.tensor([])
        y = m.lin(x)
        return torch.cat([empty, y.t()], -1), torch.cat([empty, y, x])

    names, _, _ = canonical(fn, x48())
    assert names.count("cat.default") == 1
    assert "empty.memory_format" not in names


def test_identity_that_is_returned_stays() -> None:
    _, report, _ = canonical(lambda m, x: (m.lin(x), x.detach(), x.view(4, 8)), x48())
    assert [skip.reason for skip in report.skips] == ["the graph returns it"] * 2


def test_symbolic_shapes() -> None:
    def fn(m: Any, x: T) -> T:
        b, s, d = x.shape
        y = m.lin(x).view(b * s, d).view(b, s, 2, d // 2)
        return y[:, :s].reshape(b, s, d)[0:b].expand(b, s, d).relu()

    names, _, _ = canonical(fn, torch.randn(3, 5, 8), dynamic=True)
    assert [n for n in names if "linear" in n or "relu" in n or "slice" in n or "expand" in n] == [
        "linear.default",
        "relu.default",
    ]
