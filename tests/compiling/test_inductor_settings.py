"""Settings of Inductor reach it, from options and from torch.compile's modes; wrong ones do not."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch._dynamo.backends.debugging import boxed_nop
from torch._inductor import config

from autoshard.compiling import check_inductor
from autoshard.config import Config
from autoshard.errors import ConfigError


def settings(**how: Any) -> list[tuple[bool, bool]]:
    """Whether Inductor shall tune products, and capture CUDA graphs: in the forward and in the
    backward of a model that is compiled with `how`."""
    found = []

    def inner(gm: torch.fx.GraphModule, inputs: Any, **_: Any) -> Any:
        found.append((config.max_autotune, config.triton.cudagraphs))
        return boxed_nop(gm, inputs)

    with (
        mock.patch("torch._inductor.compile_fx.compile_fx_inner", inner),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        torch.compile(nn.Linear(4, 4), backend="autoshard", **how)(
            torch.ones(2, 4)
        ).sum().backward()
    return found


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
def test_settings_reach_inductor() -> None:
    tuned = {"options": {"inductor": {"max_autotune": True}}}
    assert settings(**tuned) == [(True, False)] * 2
    assert settings(mode="max-autotune-no-cudagraphs") == [(True, False)] * 2
    # a mode with CUDA graphs has none on a CPU, as of torch's own backend
    assert settings(mode="reduce-overhead") == [(False, False)] * 2
    assert not config.max_autotune


@pytest.mark.parametrize(
    ("options", "device", "said"),
    [
        ({"cuda_graphs": True}, "cpu", "the model is on cpu"),
        ({"inductor": {"max_autotun": True}}, "cuda", "Did you mean 'max_autotune'"),
        ({"inductor": {"triton.cudagraphs": True}}, "cuda", "Say cuda_graphs=True"),
        ({"cuda_graphs": True, "inner": "eager"}, "cuda", "inner is 'eager'"),
    ],
)
def test_wrong_settings_are_refused(options: dict[str, Any], device: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_inductor(Config.from_options(options), device)
    check_inductor(Config.from_options({"cuda_graphs": True}), "cuda")
