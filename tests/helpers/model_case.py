"""A case of the end-to-end tests: a seeded model, its batches and its loss; and batch makers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

BATCH, SEQ = 4, 32
VOCAB, HIDDEN, HEADS, LAYERS = 256, 64, 4, 2

Batch = dict[str, torch.Tensor]


def output_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The loss a Hugging Face model computes from its own labels."""
    loss: torch.Tensor = model(**batch).loss
    return loss


def returned_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """For models whose forward returns the loss."""
    loss: torch.Tensor = model(**batch)
    return loss


@dataclass(frozen=True)
class Case:
    """A model, its batches and its loss. `make_model` and `make_batch` are deterministic."""

    name: str
    build: Callable[[], nn.Module]
    make_batch: Callable[[int], Batch]
    loss: Callable[[nn.Module, Batch], torch.Tensor] = output_loss

    def make_model(self) -> nn.Module:
        """A new copy of the model in train mode, the same weights each time."""
        torch.manual_seed(1234)
        return self.build().train()


def ids(step: int, vocab: int = VOCAB, length: int = SEQ, salt: int = 0) -> torch.Tensor:
    """Token ids [BATCH, length], different at each step."""
    generator = torch.Generator().manual_seed(1000 * salt + step)
    return torch.randint(3, vocab, (BATCH, length), generator=generator)


def floats(step: int, *shape: int) -> torch.Tensor:
    """Standard normal [BATCH, *shape], different at each step."""
    return torch.randn(BATCH, *shape, generator=torch.Generator().manual_seed(step))


def tokens(step: int, vocab: int = VOCAB) -> Batch:
    """A causal language model's batch; the labels are a tensor of their own."""
    text = ids(step, vocab)
    return {"input_ids": text, "labels": text.clone()}


def classes(step: int, n: int = 8) -> torch.Tensor:
    """Class labels [BATCH]."""
    return ids(step, n, 1, salt=1)[:, 0]


def masked(step: int) -> Batch:
    """A masked language model's batch: a padding mask, and labels on a third of the tokens."""
    text = ids(step)
    mask = torch.ones_like(text)
    mask[0, -5:] = 0
    labels = torch.where(torch.arange(SEQ) % 3 == step % 3, text, -100)
    return {"input_ids": text, "attention_mask": mask, "labels": labels}


def seq2seq(step: int) -> Batch:
    """An encoder-decoder's batch, with a shorter target."""
    return {"input_ids": ids(step), "labels": ids(step, length=SEQ // 2, salt=2)}


def images(step: int) -> Batch:
    """Pictures [BATCH, 3, 32, 32] with a class each."""
    return {"pixel_values": floats(step, 3, 32, 32), "labels": classes(step)}
