"""Writes to memory that has several names for autograd, of which a trace sees values alone.

Each program is a few lines of views, detaches and writes of `h = self.lin(x)` and `p`, of 4 x 8; it
is equal to the eager one in values, and in the gradients of the weights and of the inputs.
"""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
import torch

from capturing import Fn, check, x48

NAMED = """
y = h.view(-1); y.data.mul_(2); return y.view(4, 8) * p
y = h.view(-1); h.data.mul_(2); return y.sin()
y = h.view(-1); NO_GRAD: y.mul_(2); return y.view(4, 8).sin()
y = h.view(-1); NO_GRAD: y.masked_fill_(y > 0, -inf); y = y.clamp(min=-3); return y.view(4, 8) * p
y = h[:, 0]; y.add_(p[:, 0]); y.data.mul_(2); return y.view(2, 2).sin().sum() + h.cos()
y = h.detach().view(-1); y.add_(p.view(-1)); y.data.mul_(2); return y.view(4, 8) * h
y = h.detach(); y.add_(p); NO_GRAD: y.mul_(2); return y.view(-1).sin()
y = h.detach(); y.add_(p); return h * p + y
y = h.detach(); y[:, 0] = p[0, 0]; return y.sin() + h.cos()
y = h.data; y.add_(p); return y * 3 + h
y = h.detach(); z = h.detach(); y.add_(p); return y * p + z + h
y, z = h.chunk(2); y.data.mul_(2); return h.sin() * z.sum()
y = torch.zeros(4, 8); y[:, 1] = h[:, 1]; z = y.view(-1); NO_GRAD: z.clamp_(0.1); return z.sin()
y = h.t().reshape(-1); y.data.mul_(2); return y.sin()
h.tanh_(); NO_GRAD: y = h.view(-1); return h.sum() + y * p.view(-1)
y = h.as_strided((4,), (2,)); y.copy_(p[0, :4]); return h.sin().sum() + y.cos()
y = h[:, 0]; y = y.data; y.mul_(p[:, 0]); return y.as_strided((4,), (2,)).sin()
y = torch.zeros(4, 8); y.as_strided((4,), (2,)).copy_(p[0, :4]); return y.sin() * h
y = h.view(-1); y.copy_(x.view(-1)); return y.sin() * p.sum() + self.lin(p).sum()
""".strip().splitlines()

VIEWS = """
view(-1)  view(4, 8)  view(8, 4).t()  chunk(2)[1]  [0]  reshape(-1)  [:1]  unsqueeze(0)  float()
as_strided((3,), (2,))  detach()  data  detach().view(-1)  to(torch.float32)  unbind()[0]  mT
contiguous()
"""
WRITES = """
mul_(2)  add_(p.sum())  mul_(p.mean())  [0] = p.sum()  [:1] = 1  copy_(OTHER)  clamp_(min=0.1)
masked_fill_(NAME > 0, 0.5)  add_(OTHER)  fill_(p[0, 0])  tanh_()  sub_(NAME.detach() * 0.5)
view(-1).copy_(x.view(-1)[:NAME.numel()])  zero_()
"""


def function(lines: list[str]) -> Any:
    """`lines` as a method of `Fn`; NO_GRAD in front of one: in a region without gradients."""
    body = ["h = self.lin(x)"]
    for line in lines:
        inner = line.strip().removeprefix("NO_GRAD: ")
        hidden = inner != line.strip()
        body += ["with torch.no_grad():", f"    {inner}"] if hidden else [inner]
    made: dict[str, Any] = {"torch": torch, "inf": float("inf")}
    exec("def fn(self, x, p):\n    " + "\n    ".join(body), made)  # noqa: S102
    return made["fn"]


def agrees(lines: list[str]) -> None:
    check(Fn(function(lines)), [x48(), x48().requires_grad_()], tolerance=1e-5)


@pytest.mark.parametrize("program", NAMED)
def test_each_name_has_its_gradient(program: str) -> None:
    agrees(program.split(";"))


def drawn(seed: int) -> list[str]:
    """A program of three to nine lines, all of whose names are read at its end."""
    draw = random.Random(seed)
    names, lines = ["h", "p * 1"], []
    for i in range(draw.randint(3, 9)):
        name, made = draw.choice(names[:1] + names[2:]), draw.random() < 0.55
        text = draw.choice(re.split(r"\s\s+|\n", (VIEWS if made else WRITES).strip()))
        text = text.replace("NAME", name).replace("OTHER", draw.choice(names))
        text = (name if text[0] == "[" else f"{name}.") + text
        hidden = "NO_GRAD: " * (draw.random() < 0.3)
        lines.append(hidden + (f"n{i} = {text}" if made else text))
        names += [f"n{i}"] * made
    read = " + ".join(f"({name} * {i}).sin().sum()" for i, name in enumerate(names, 1))
    return [*lines, f"return {read} + self.lin(p).sum()"]


def is_eager(lines: list[str]) -> bool:
    """Whether autograd takes a program, also one that it cannot look at through `.data`."""
    for each in (lines, [line.replace(".data", ".detach()") for line in lines]):
        try:
            function(each)(Fn(None), x48(), x48().requires_grad_()).backward()
        except (RuntimeError, IndexError):
            return False
    return True


def test_drawn_programs() -> None:
    programs = [lines for lines in map(drawn, range(100)) if is_eager(lines)]
    assert len(programs) >= 30
    for lines in programs:
        try:
            agrees(lines)
        except Exception as error:
            if "as_strided() is non-compositional" not in str(error):  # torch's own refusal
                raise AssertionError("\n".join(lines)) from error


def test_fewer_rows_are_written_to_a_symbolic_number_of_them() -> None:
    program = function(["y = x * 2", "y.copy_(h[:1])", "return y.sin() * p.sum()"])
    recorder = check(Fn(program), [torch.randn(5, 8), x48()], dynamic=True)
    assert "aten.expand_as.default" in recorder.targets()
