"""Settings of Inductor, and CUDA graphs: which programs are captured, and what of them stays.

A CUDA graph replays kernels on the addresses that it was captured with. Shards of parameters and
buffers, and a cache that a program writes to, lie where they lay; torch copies every other input
into memory of the graph, and captures again where one that should stay has moved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autoshard.compiling.built import Built
from autoshard.config import Config
from autoshard.errors import ConfigError, did_you_mean
from autoshard.planning import is_handed_on, is_trained
from autoshard.runtime import compat
from autoshard.runtime.graph_meta import MUTATED, N_OUTPUTS
from autoshard.runtime.lazy_gather import LazyGather
from autoshard.runtime.parameters import SINGLE

CAPTURE = "triton.cudagraphs"
"""What Inductor calls it."""


@dataclass(frozen=True)
class InductorSettings:
    """values: of Inductor's configuration. fixed: positions of the inputs that a CUDA graph finds
    where they lay; None: there is none, or Dynamo has said it."""

    values: Mapping[str, Any] = field(default_factory=dict)
    fixed: tuple[int, ...] | None = None


def options_of(options: Mapping[str, Any], mode: str | None, device: str) -> dict[str, Any]:
    """The options of the backend that torch.compile's `mode` stands for, beside `options`.

    As of Inductor itself, a mode with CUDA graphs has none on another device.
    """
    if mode is None:
        return dict(options)
    known = compat.mode_settings(mode)
    captured = bool(known.pop(CAPTURE, False)) and device == "cuda"
    return {**options, "inductor": known, "cuda_graphs": captured}


def check_inductor(config: Config, device: str) -> None:
    """Raise ConfigError for settings that Inductor does not have, and for CUDA graphs elsewhere."""
    given = config.inductor or {}
    if CAPTURE in given:
        raise ConfigError(
            f"options['inductor'] has {CAPTURE}, which knows nothing of shards",
            remedy="Say cuda_graphs=True instead.",
        )
    known = compat.inductor_settings() if given else []
    for name in sorted(given.keys() - known):
        others = "Those it has are in torch._inductor.list_options()."
        raise ConfigError(
            f"options['inductor']: Inductor has no setting {name!r}",
            remedy=did_you_mean(name, known, others, cutoff=0.5),
        )
    if config.cuda_graphs and device != "cuda":
        raise ConfigError(
            f"options['cuda_graphs'] is True, and the model is on {device}",
            remedy="Move it to a GPU, or leave the option out.",
        )


def unsharded_settings(config: Config) -> InductorSettings:
    """For a graph as Dynamo made it, of whose inputs torch knows which stay."""
    values = dict(config.inductor or {})
    return InductorSettings({**values, CAPTURE: True} if config.cuda_graphs else values)


def rank_settings(program: Built, inputs: Sequence[compat.GraphInput]) -> InductorSettings:
    """For a program of one rank. inputs: the placeholders as Dynamo made them."""
    values = dict(program.config.inductor or {})
    if not program.config.cuda_graphs and not compat.cuda_graphs_are_set():
        return InductorSettings(values)
    if not_captured(program):
        return InductorSettings({**values, CAPTURE: False})
    fixed = set(program.graph_module.meta.get(MUTATED, ()))
    for i, item in enumerate(inputs):
        if item.real is not None and (
            item.of_model
            or isinstance(item.real, (torch.nn.Parameter, LazyGather))
            or compat.is_static_address(item.real)
        ):
            fixed.add(i)
    return InductorSettings({**values, CAPTURE: True}, tuple(sorted(fixed)))


def not_captured(program: Built) -> str:
    """Why a program is not captured as a CUDA graph; "" where it is.

    The memory of a graph is written again by its next replay. What a program without gradients
    hands out for later calls to take, keys and values that it has made, would be lost by then.
    """
    if program.microbatch != SINGLE:
        return "gradients wait in memory that is another one in each accumulation (no_sync)"
    if is_trained(program.serial):
        return ""
    results: Any = program.serial.graph.output_node().args[0]
    made = [one for one in results[: program.serial.meta[N_OUTPUTS]] if _is_kept(one)]
    return f"it makes {len(made)} tensors that later calls take (a cache)" if made else ""


def _is_kept(result: Any) -> bool:
    is_made = isinstance(result, fx.Node) and result.op != "placeholder"
    return is_made and isinstance(result.meta.get("val"), torch.Tensor) and is_handed_on(result)
