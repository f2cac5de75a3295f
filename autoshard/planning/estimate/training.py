"""What training keeps for each parameter: dtypes and optimizer, as bytes an element."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autoshard.runtime.errors import ConfigError, message

#: Tensors of a parameter's size that the optimizer keeps.
MOMENTS = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}

RECIPES = ("pure", "mixed", "master")

STATES = ("device", "host")


@dataclass(frozen=True)
class Training:
    """How a model is trained.

    optimizer: a key of MOMENTS.
    microbatches: batches whose gradients are summed before the optimizer's step.
    compiled: whether neighbouring operators are joined into kernels; else each reads and writes
        memory, and keeps what its own derivative reads.
    float8: products of activations with parameters in float8, but the last, which makes logits.
    recipe: "pure": everything in the model's dtype, which is what a bfloat16 model under
        torch's AdamW does (8 bytes a parameter). "mixed": parameters, gradients and moments in
        float32, computed with, and gathered, in the model's dtype (FSDP2's mixed precision: 16
        bytes). "master": parameters in the model's dtype beside gradients, moments and a copy of
        the parameters in float32 (Megatron-Core's distributed optimizer: 18 bytes).
    states: where the optimizer's states and those copies are, and where it steps. On the host,
        "master" has its gradients in the model's dtype, as `autoshard.offload_optimizer` has.
    """

    optimizer: str = "adamw"
    recipe: str = "pure"
    microbatches: int = 1
    compiled: bool = True
    float8: bool = False
    states: str = "device"

    def __post_init__(self) -> None:
        allowed: dict[str, tuple[Any, ...]] = {
            "optimizer": tuple(MOMENTS),
            "recipe": RECIPES,
            "states": STATES,
        }
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise ConfigError(
                    message(
                        f"{name} {getattr(self, name)!r} is not known",
                        remedy=f"It is one of {', '.join(values)}.",
                    )
                )

    def stored(self, itemsize: int) -> int:
        """Bytes of one stored element of a parameter that is computed with in `itemsize`."""
        return 4 if self.recipe == "mixed" else itemsize

    def gradient(self, itemsize: int) -> int:
        """Bytes of one element of its gradient, stored and reduced."""
        narrow = self.recipe == "pure" or (self.recipe == "master" and self.states == "host")
        return itemsize if narrow else 4

    def state(self, itemsize: int) -> int:
        """Bytes of optimizer state of one element on the device."""
        return self.all_state(itemsize) if self.states == "device" else 0

    def all_state(self, itemsize: int) -> int:
        """Bytes of optimizer state of one element, wherever it is."""
        each = itemsize if self.recipe == "pure" else 4
        return MOMENTS[self.optimizer] * each + (4 if self.recipe == "master" else 0)

    def sent(self, itemsize: int, reduced: int | None) -> int:
        """Bytes of one element of a gradient while it is reduced. reduced: where that is told."""
        return self.gradient(itemsize) if reduced is None else reduced
