"""`--checkpointing`: what the layers of a model keep for backward, by transformers' own switch."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from autoshard.errors import ConfigError

CHECKPOINTING = ("none", "full", "selective")


def checkpoint_layers(model: nn.Module, how: str) -> None:
    """Have each layer compute again in backward what it does not keep.

    how: "none": the model stays as it is. "full": a layer keeps its input. "selective": and the
    results of attention and of every second product. ConfigError for a model without the switch.
    """
    if how == "none":
        return
    switch = getattr(model, "activation_checkpointing_enable", None)
    if switch is None or not getattr(model, "supports_gradient_checkpointing", True):
        raise ConfigError(
            f"{type(model).__name__} has no switch for activation checkpointing",
            remedy="Call torch.utils.checkpoint in the model that the factory returns.",
        )
    given: dict[str, Any] = {"use_reentrant": False}
    if how == "selective":
        given["context_fn"] = _every_second_product
    switch(activation_checkpointing_kwargs=given)
    model.train()


def _every_second_product() -> Any:
    return create_selective_checkpoint_contexts(partial(_keeps, [0]))  # type: ignore[no-untyped-call]


def _keeps(products: list[int], ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
    if operator is torch.ops.aten.mm.default:
        products[0] += 1
        kept = products[0] % 2 == 1
    else:
        kept = "scaled_dot_product" in str(operator)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
