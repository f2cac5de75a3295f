"""Hugging Face transformers: its private and undocumented parts, one function each."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

_NAME = "autoshard_all_experts"


def run_experts_by(
    model: nn.Module, function: Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor], Any]
) -> None:
    """Have the modules of experts run `function(module, hidden, chosen, weights)`.

    Transformers chooses an implementation by a private field of the configuration, out of a
    registry; only modules of experts have `_apply_gate`.
    """
    if "transformers" not in sys.modules:
        return
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError:  # before 5.0, where experts are modules of their own
        return
    ALL_EXPERTS_FUNCTIONS.register(_NAME, function)
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(module, "_apply_gate"):
            config._experts_implementation = _NAME


def apply_gate(experts: Any, hidden: torch.Tensor) -> torch.Tensor:
    """The activation between the products of experts, which families override by a method."""
    gated: torch.Tensor = experts._apply_gate(hidden)
    return gated


def published(model: nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What `save_pretrained` writes of these tensors of a state dict, under their published names.

    Transformers keeps some families in another form in memory than in their checkpoints (experts
    stacked, modules renamed), and converts back by an undocumented function, of all tensors at
    once; before 5.0 the two forms are one, and so they are of other modules.
    """
    module = sys.modules.get("transformers")
    if module is None or not isinstance(model, module.PreTrainedModel):
        return tensors
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        return tensors
    made: dict[str, torch.Tensor] = revert_weight_conversion(model, dict(tensors))
    return made


def uses_cache(model: nn.Module) -> bool:
    """Whether the model returns a cache of keys and values."""
    return bool(getattr(getattr(model, "config", None), "use_cache", False))


def turn_off_cache(model: nn.Module) -> None:
    """Have a model return no cache of keys and values, which would become outputs of its graph."""
    if uses_cache(model):
        model.config.use_cache = False  # type: ignore[union-attr]


def prepare_recording(model: nn.Module) -> None:
    """Let the parts of a model record hidden states before it is traced, as a model does which asks
    its encoder for them (Segformer): at the first call they take a lock, and Dynamo traces none."""
    if "transformers" not in sys.modules:
        return
    try:
        from transformers import PreTrainedModel
        from transformers.utils.output_capturing import maybe_install_capturing_hooks
    except ImportError:  # before 5.0 each model collected them itself
        return
    ready = "_output_capturing_hooks_installed"
    for module in model.modules():  # from the outside in: each prepares the models inside of it,
        if any(getattr(one, ready, False) for one in module.modules()):  # and would do so twice
            continue
        if isinstance(module, PreTrainedModel) and module._can_record_outputs:
            maybe_install_capturing_hooks(module)


def choose_causal_loss(model: Any) -> None:
    """Have a causal language model know its loss; it else logs a guess, which Dynamo cannot
    trace."""
    if getattr(model, "loss_type", None) is None:
        model.loss_type = "ForCausalLM"


def initialiser_of(model: nn.Module, module: nn.Module) -> Callable[[nn.Module], Any] | None:
    """The initialisation that the innermost model around a module does of its modules; only it
    computes again what a module computes when it is made."""
    found: Any = None
    for outer in model.modules():
        if hasattr(outer, "_init_weights") and any(one is module for one in outer.modules()):
            found = outer._init_weights
    return found  # type: ignore[no-any-return]
