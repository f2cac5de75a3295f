"""Models with dropout 0.1 on every mesh: three training steps, and every mask, as on one device."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import autoshard
from autoshard.program import Program
from autoshard.runtime.randomness.philox import Draw, Part
from models_dropout import dropped
from side_by_side import whole
from steps import error, placeholders, serial_step, sharded_step
from traced import WithLoss, programs

TOLERANCE = 1e-5
Drawn = list[tuple[int, Part | None, torch.Tensor]]
MESHES = [(1, True), *((n, sequence) for n in (2, 4) for sequence in (True, False))]


class Masks:
    """Every mask that is drawn: the number of its call, its part of the whole, its values."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: Drawn = []
        lock, keep = threading.Lock(), Draw.keep

        def recorded(draw: Draw, shape: Any, p: float) -> torch.Tensor:
            mask = keep(draw, shape, p)
            if not isinstance(mask, torch._subclasses.FakeTensor):
                with lock:
                    self.found.append((draw.call, draw.part, mask))
            return mask

        monkeypatch.setattr(Draw, "keep", recorded)

    def take(self) -> Drawn:
        found, self.found = self.found, []
        return found


def compare_masks(serial: Drawn, sharded: Drawn, n: int) -> None:
    """Each rank's mask is its slice of the serial one, bit for bit."""
    whole = {call: mask for call, part, mask in serial}
    assert len(whole) == len(serial) >= 3 and len(sharded) == n * len(serial)
    for call, part, mask in sharded:
        want = whole[call]
        if part is not None:
            want = want.narrow(part.dim, part.start, mask.shape[part.dim])
        assert torch.equal(mask, want), call


def descend(values: list[Any], program: Program, gradients: dict[str, torch.Tensor]) -> list[Any]:
    """The values after one step of SGD."""
    found = list(values)
    for i, node in enumerate(placeholders(program)):
        gradient = gradients.get(program.parameters.get(node, ""))
        if gradient is not None:
            found[i] = values[i].detach() - 0.05 * gradient
    return found


def made(name: str, checkpointing: bool) -> WithLoss:
    """The model with dropout everywhere and its loss."""
    torch.compiler.reset()
    model = WithLoss(dropped(name))
    if name == "gpt2":
        model.model.loss_type = "ForCausalLM"  # it would log that it guesses, and break the graph
    if checkpointing:
        model.model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def train(name: str, checkpointing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(name, checkpointing)
    case = model.case
    options = [
        {"mesh": {"tp": n}, "planner": {"sequence_parallel": sequence}} for n, sequence in MESHES
    ]
    found, values = programs(model, (case.make_batch(0),), options)
    masks = Masks(monkeypatch)
    for program in found:
        ours, theirs = list(values), list(values)
        for step in range(3):
            want = serial_step(program, theirs, seed=step)
            drawn = masks.take()
            got = sharded_step(program, ours, seed=step)
            compare_masks(drawn, masks.take(), program.axis.size)
            torch.testing.assert_close(got.loss, want.loss, rtol=TOLERANCE, atol=0)
            assert error(got, want) < TOLERANCE, (program.axis.size, step)
            ours = descend(ours, program, got.gradients)
            theirs = descend(theirs, program, want.gradients)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
@pytest.mark.parametrize(
    ("name", "checkpointing"),
    [
        ("vit", False),
        *[
            pytest.param(name, again, marks=pytest.mark.slow)
            for name in ("vit", "gpt2", "bert", "t5")
            for again in (False, True)
            if (name, again) != ("vit", False)
        ],
    ],
)
def test_three_steps_on_every_mesh(
    name: str, checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(name, checkpointing, monkeypatch)


def three_steps(
    name: str, checkpointing: bool, options: dict[str, Any], steps: int = 3
) -> tuple[list[float], list[torch.Tensor], int]:
    """Losses, then the whole trained parameters, through torch.compile and AOTAutograd's graphs,
    where a checkpointed region is computed again; and how many programs it took."""
    model = made(name, checkpointing)
    compiled: Any = torch.compile(
        model, backend="autoshard", options={"inner": "aot_eager", **options}
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        loss = compiled(model.case.make_batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    trained = [whole(p).detach() for p in model.parameters()]
    return losses, trained, len(autoshard.programs(model))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
@pytest.mark.parametrize(("name", "sequence"), [("t5", True), ("gpt2", False)])
def test_checkpointed_on_processes_and_not_on_one(gloo2: Any, name: str, sequence: bool) -> None:
    """What two ranks train with recomputation is what one process trains without."""
    options = {"mesh": {"tp": 2}, "planner": {"sequence_parallel": sequence}}
    losses, trained, _ = three_steps(name, False, {"rng": "invariant"})
    start = [p.detach() for p in made(name, False).parameters()]
    for got, parameters, graphs in gloo2(three_steps, name, True, options):
        assert graphs == 1, "the graph breaks"
        assert got == pytest.approx(losses, rel=TOLERANCE)
        off = sum((g - w).double().square().sum() for g, w in zip(parameters, trained))
        way = sum((w - s).double().square().sum() for w, s in zip(trained, start))
        assert float(off / way) ** 0.5 < TOLERANCE


def test_the_comparison_sees_one_wrong_element() -> None:
    mask = torch.rand(3, 8) > 0.5
    serial: Drawn = [(call, None, mask) for call in range(3)]
    parts: Drawn = [
        (call, Part(1, 4 * rank, 8), mask[:, 4 * rank : 4 * rank + 4].clone())
        for call in range(3)
        for rank in range(2)
    ]
    compare_masks(serial, parts, 2)
    parts[4][2][0, 0] ^= True
    with pytest.raises(AssertionError):
        compare_masks(serial, parts, 2)
