"""Lower precision: a sharded model is as far from fp32 as the serial one, and no further."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autoshard.program import Program
from models import CASES
from steps import Step, error, serial_step, sharded_step
from traced import WithLoss, programs

NAMES = ["llama", "gpt2", "bert", "vit"]
OPTIONS = [
    {"mesh": {"tp": n}, "planner": {"sequence_parallel": sequence}}
    for n in (2, 4)
    for sequence in (True, False)
]


def traced(
    name: str, dtype: torch.dtype | None, autocast: bool, options: list[dict[str, Any]]
) -> tuple[list[Program], list[Any]]:
    """Programs of a model cast to `dtype`, or under bf16 autocast; the same weights each time."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = WithLoss(CASES[name])
    if name == "gpt2":
        model.model.loss_type = "ForCausalLM"  # it would log that it guesses, and break the graph
    batch = CASES[name].make_batch(0)
    if dtype is not None:
        model = model.to(dtype)
        batch = {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        return programs(model, (batch,), options)


def exact(name: str) -> Step:
    (program,), values = traced(name, None, False, [{"mesh": {"tp": 1}}])
    return serial_step(program, values)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n != "llama" else []) for n in NAMES]
)
def test_autocast_error_is_that_of_the_serial_run(name: str) -> None:
    """The ratio: difference to the serial autocast run, over that run's difference to fp32."""
    want = exact(name)
    made, values = traced(name, None, True, OPTIONS)
    serial = serial_step(made[0], values)
    own = error(serial, want)
    assert own > 1e-4, "autocast changed nothing"
    for program in made:
        got = sharded_step(program, values)
        ratio = error(got, serial) / own
        assert ratio <= 1, (program.axis.size, ratio)
        assert error(got, want) <= 1.5 * own
        for parameter, gradient in got.gradients.items():
            assert gradient.dtype == serial.gradients[parameter].dtype == torch.float32


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param("llama", torch.float16, marks=pytest.mark.slow),
        *[
            pytest.param(n, torch.bfloat16, marks=[pytest.mark.slow] if n != "vit" else [])
            for n in NAMES
        ],
    ],
)
def test_error_of_a_model_cast_as_a_whole(name: str, dtype: torch.dtype) -> None:
    want = exact(name)
    made, values = traced(name, dtype, False, OPTIONS)
    serial = serial_step(made[0], values)
    own = error(serial, want)
    for program in made:
        got = sharded_step(program, values)
        # partial sums of shards are rounded to 16 bits once more than in the serial program
        assert error(got, serial) <= 1.5 * own, (program.axis.size, error(got, serial) / own)
        assert error(got, want) <= 1.5 * own
        assert got.loss.dtype == serial.loss.dtype
        assert abs(float(got.loss) - float(want.loss)) <= 2e-2 * abs(float(want.loss))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(64, 32), nn.LSTM(32, 32, 2, batch_first=True)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return (self.lstm(self.embed(ids))[0].float().square().mean(),)


def test_an_lstm_under_autocast_has_the_gradients_of_eager_torch() -> None:
    """oneDNN has a kernel for inference, which a trace below autograd would take."""
    model, ids = Recurrent(), torch.randint(64, (4, 12))
    try:
        model(ids)[0].backward()
    except RuntimeError as error:  # of processors without kernels for it
        pytest.skip(f"torch itself has no LSTM in bfloat16 here: {error}")
    (program,), values = programs(model, (ids,), [{"mesh": {"tp": 2}}])
    for found in (serial_step(program, values), sharded_step(program, values)):
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(found.gradients[name], parameter.grad, rtol=1e-5, atol=1e-7)
