"""The next tokens of logits: the likeliest, or drawn of the likely ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from autoshard.runtime.errors import AutoshardError, message


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a token is chosen.

    temperature: 0 takes the likeliest token; otherwise tokens are drawn from
    softmax(logits / temperature). top_k: of that many likeliest ones. top_p: of the fewest ones
    whose probabilities reach it together (nucleus sampling, Holtzman et al., 2020); after top_k.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        few = self.top_k is not None and self.top_k < 1
        share = self.top_p is not None and not 0 < self.top_p <= 1
        if not self.temperature >= 0 or few or share:
            raise AutoshardError(
                message(
                    f"temperature {self.temperature}, top_k {self.top_k} and top_p {self.top_p}: "
                    "give 0 or more, 1 or more, and more than 0 up to 1"
                )
            )

    def draw(self, logits: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Next tokens, one for each row of [rows, vocabulary]."""
        if self.temperature == 0:
            return logits.argmax(-1)
        scaled = logits.cpu() / self.temperature
        scores, order = scaled.sort(dim=-1, descending=True, stable=True)
        if self.top_k is not None:
            # as many as are no less likely than the k-th
            least = scores[:, min(self.top_k, scores.shape[-1]) - 1, None]
            scores = scores.masked_fill(scores < least, float("-inf"))
        chances = scores.softmax(-1)
        if self.top_p is not None:
            before = chances.cumsum(-1) - chances
            chances = chances.masked_fill(before >= self.top_p, 0.0)
        drawn = torch.multinomial(chances, 1, generator=generator)
        return order.gather(-1, drawn).squeeze(-1)
