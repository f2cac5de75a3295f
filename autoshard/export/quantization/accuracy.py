"""How far quantized weights are from the model's: the weights themselves, and what it then says.

Activations are not quantized here, as servers do it in their own ways.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from autoshard.export.serial_graph import unwrapped

FILE = "quantization_accuracy.json"
_TOKENS = (2, 64)

Inputs = Mapping[str, torch.Tensor]
"""The keyword arguments of a call."""


@dataclass
class Accuracy:
    """What is known of the weights so far. errors: of each, relative to its norm. values: those of
    the parameters with quantized weights, where they are kept for a call of the model."""

    keep: bool
    errors: dict[str, float] = field(default_factory=dict)
    values: dict[str, torch.Tensor] = field(default_factory=dict)
    _squares: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def add(self, name: str, weight: torch.Tensor, restored: torch.Tensor) -> None:
        """One weight, by its published name."""
        difference = float((weight.double() - restored.double()).square().sum())
        norm = float(weight.double().square().sum())
        self.errors[name] = math.sqrt(difference / max(norm, 1e-300))
        self._squares = [a + b for a, b in zip(self._squares, (difference, norm))]

    def keep_values(
        self,
        parameters: Mapping[str, torch.Tensor],
        published: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]],
        restored: Mapping[str, torch.Tensor],
    ) -> None:
        """The values of parameters whose published form is partly `restored`.

        published: what parameters become in the published form. It only moves entries, so numbered
        ones say where each came from.
        """
        if not self.keep or not restored:
            return
        start, numbered, flat = 0, {}, []
        for name, one in parameters.items():
            numbered[name] = torch.arange(start, start + one.numel()).view(one.shape)
            flat.append(one.reshape(-1))
            start += one.numel()
        values = torch.cat(flat)
        for name, places in published(numbered).items():
            if name in restored:
                values[places.reshape(-1)] = restored[name].reshape(-1).to(values.dtype)
        pieces = values.split([one.numel() for one in parameters.values()])
        for (name, one), piece in zip(parameters.items(), pieces):
            self.values[name] = piece.view(one.shape)

    def weights(self) -> dict[str, Any]:
        """How many, how far all of them together are from the model's, and which is farthest."""
        worst = max(self.errors, key=self.errors.__getitem__)
        difference, norm = self._squares
        return {
            "quantized": len(self.errors),
            "relative_error": math.sqrt(difference / max(norm, 1e-300)),
            "largest": {"name": worst, "relative_error": self.errors[worst]},
        }


def example(model: nn.Module) -> Inputs | None:
    """Random token ids, where the model takes them; else None."""
    inner = unwrapped(model)
    rows = getattr(getattr(inner, "config", None), "vocab_size", None)
    required = [
        name
        for name, one in inspect.signature(inner.forward).parameters.items()
        if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD
    ]
    takes = "input_ids" in inspect.signature(inner.forward).parameters
    if rows is None or not takes or set(required) - {"input_ids"}:
        return None
    if getattr(inner.config, "is_encoder_decoder", False):
        return None
    generator = torch.Generator().manual_seed(0)
    device = next(inner.parameters()).device
    return {"input_ids": torch.randint(rows, _TOKENS, generator=generator).to(device)}


def compared(model: nn.Module, accuracy: Accuracy, inputs: Inputs) -> dict[str, Any]:
    """The model's first output with its own weights and with quantized ones; where that is the
    logits of token ids, also the loss of each next token and how often both say the same one. Both
    are computed in the model's own dtype."""
    inner = unwrapped(model)
    own_dtypes = {name: one.dtype for name, one in inner.state_dict().items()}
    values = {name: one.to(own_dtypes[name]) for name, one in accuracy.values.items()}
    with torch.no_grad():
        own = _first(inner(**inputs))
        other = _first(functional_call(inner, values, (), dict(inputs)))
    own, other = own.double(), other.double()
    found: dict[str, Any] = {"relative_error": float((own - other).norm() / own.norm())}
    ids = inputs.get("input_ids")
    if ids is None or own.dim() != 3 or own.shape[:2] != ids.shape:
        return found
    found["same_token"] = float((own.argmax(-1) == other.argmax(-1)).double().mean())
    targets = ids[:, 1:].reshape(-1)
    for name, logits in (("loss", own), ("loss_quantized", other)):
        rows = logits[:, :-1].reshape(len(targets), -1)
        found[name] = float(nn.functional.cross_entropy(rows, targets))
    return found


def _first(outputs: Any) -> torch.Tensor:
    """The logits of a model of transformers, else the first tensor."""
    logits = getattr(outputs, "logits", None)
    if isinstance(logits, torch.Tensor):
        return logits
    leaves = pytree.tree_leaves(outputs)
    return next(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
