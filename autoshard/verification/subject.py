"""What `autoshard.verify` verifies: a model, its batch, its loss, and one training step of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autoshard.errors import ConfigError
from autoshard.model_source import callable_named, copied, model_and_call
from autoshard.runtime.lazy_gather import LazyGather
from autoshard.runtime.pipeline import Withheld
from autoshard.runtime.randomness import draw_for

Key = tuple[str, str, int | None]
"""What is compared: its kind ("loss", "output", "gradient", "parameter" or "buffer"), its name, and
the data-parallel rank whose own it is; None where all ranks have the same."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model and a call of it; `source` is a model, a callable that makes one, or its name.

    source: an nn.Module; or a callable, or "module:function", that returns the model, or the tuple
    (model, args) or (model, args, kwargs). args, kwargs: the batch, of all data-parallel ranks
    together; they take the place of the factory's where given. dtype: what the model and the
    floating-point tensors of the batch are converted to. loss: makes a scalar of the model's
    output.
    """

    source: Any
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] | None = None
    dtype: torch.dtype | None = None
    loss: Callable[[Any], torch.Tensor] | None = None
    seed: int = 0

    def load(self) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
        """The model and its whole batch, on the CPU, the same at each call."""
        torch.manual_seed(self.seed)
        source = callable_named(self.source) if isinstance(self.source, str) else self.source
        given = (tuple(self.args), dict(self.kwargs or {}))
        made: Any = copied(source) if isinstance(source, nn.Module) else source()
        model, args, kwargs = model_and_call(made, "the factory")
        if any(given):
            args, kwargs = given
        if any(isinstance(p, DTensor) for p in model.parameters()):
            raise ConfigError(
                "the model is sharded already", remedy="Give the model as it was made."
            )
        if any(t.is_meta for t in model.parameters()):
            raise ConfigError(
                "the model to verify is on the meta device",
                remedy="Give one with values: both sides are run.",
            )
        model = model.cpu() if self.dtype is None else model.to("cpu", self.dtype)
        batch = pytree.tree_map_only(torch.Tensor, lambda t: t.detach().cpu(), (args, kwargs))
        return (model, *(batch if self.dtype is None else in_dtype(batch, self.dtype)))

    def loss_of(self, output: Any) -> torch.Tensor:
        """The scalar that is differentiated.

        In this order: the caller's `loss` of the output; its `loss` entry; the output, if it is a
        scalar; else every floating-point output times noise, which sees all of its elements.
        """
        if self.loss is not None:
            return self.loss(output)
        entry = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if isinstance(entry, torch.Tensor):
            return entry
        leaves = [t for _, t in tensors(output) if t.is_floating_point() or t.is_complex()]
        if len(leaves) == 1 and leaves[0].dim() == 0:
            return leaves[0]
        if not leaves:
            raise ConfigError(
                f"the model returns {type(output).__name__}, which has no loss and no tensor",
                remedy="Give loss=..., a function of the output.",
            )
        generator = torch.Generator().manual_seed(self.seed)
        noisy = [t * torch.randn(t.shape, generator=generator).to(t.dtype) for t in leaves]
        return torch.stack([t.abs().sum() if t.is_complex() else t.sum() for t in noisy]).sum()


def in_dtype(batch: Any, dtype: torch.dtype) -> Any:
    """The batch with its floating-point tensors in `dtype`."""
    return pytree.tree_map_only(
        torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, batch
    )


def chunks(batch: Any, n: int) -> list[Any]:
    """The batch of each of n data-parallel ranks.

    The first tensor with dims tells the batch size; every tensor of that many rows is split, the
    others are for everyone. Raises ConfigError where n does not divide the batch size.
    """
    if n == 1:
        return [batch]
    sized = [t for t in pytree.tree_leaves(batch) if isinstance(t, torch.Tensor) and t.dim()]
    rows = sized[0].shape[0] if sized else 0
    if not rows or rows % n:
        raise ConfigError(
            f"a batch of {rows} rows cannot be split over {n} data-parallel ranks",
            remedy=f"Give a batch whose first dimension {n} divides.",
        )

    def part(index: int) -> Any:
        return pytree.tree_map_only(
            torch.Tensor,
            lambda t: t.chunk(n)[index] if t.dim() and t.shape[0] == rows else t,
            batch,
        )

    return [part(index) for index in range(n)]


def tensors(value: Any) -> list[tuple[str, torch.Tensor]]:
    """The tensors of a model's output with their names in it."""
    if not pytree.tree_is_leaf(value) or isinstance(value, torch.Tensor):
        leaves, _ = pytree.tree_flatten_with_path(value)
    else:
        leaves = [((pytree.GetAttrKey(k),), v) for k, v in getattr(value, "__dict__", {}).items()]
    return [(pytree.keystr(path), leaf) for path, leaf in leaves if isinstance(leaf, torch.Tensor)]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A plain copy of a tensor that may be stored or returned in parts; collective where it is."""
    if isinstance(tensor, (DTensor, LazyGather)):
        tensor = tensor.full_tensor()
    return tensor.detach().clone()


class Run:
    """A model in training: `step` is one step of SGD, and everything there is to compare.

    call: what is called, the model itself or its compiled form. parts: the batches, by
    data-parallel rank; one process runs several of them one after another, with the mean of their
    losses, and each with buffers of its own, as data-parallel ranks do.
    """

    def __init__(
        self, subject: Subject, model: nn.Module, call: Any, parts: Mapping[int, Any], lr: float
    ) -> None:
        self.subject, self.model, self.call, self.parts = subject, model, call, parts
        trained = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(trained, lr=lr) if trained else None
        self.buffers: dict[int, dict[str, torch.Tensor]] = {}

    def step(self, number: int) -> dict[Key, torch.Tensor]:
        """Forward, backward, optimizer."""
        found: dict[Key, torch.Tensor] = {}
        for index, batch in self.parts.items():
            found.update(self._backward(number, index, batch))
        for name, p in self.model.named_parameters():
            if p.grad is not None:
                found["gradient", name, None] = whole(p.grad)
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()
        for name, p in self.model.named_parameters():
            found["parameter", name, None] = whole(p)
        return found

    def _backward(self, number: int, index: int, batch: Any) -> dict[Key, torch.Tensor]:
        if len(self.parts) > 1:
            self._use_buffers(index)
            draw_for(index)
        torch.manual_seed(self.subject.seed + number)
        args, kwargs = batch
        output = self.call(*args, **kwargs)
        loss = self.subject.loss_of(output)
        if loss.requires_grad:
            (loss / len(self.parts)).backward()
        found: dict[Key, torch.Tensor] = {("loss", "loss", index): whole(loss)}
        others = [pair for pair in tensors(output) if pair[1] is not loss]
        if any(isinstance(tensor, Withheld) for _, tensor in others):
            others = self._evaluated(number, batch, [name for name, _ in others])
        for name, tensor in others:
            found["output", f"output{name}", index] = whole(tensor)
        for name, buffer in self.model.named_buffers():
            found["buffer", name, index] = whole(buffer)
        return found

    def _evaluated(
        self, number: int, batch: Any, names: Sequence[str]
    ) -> list[tuple[str, torch.Tensor]]:
        """The outputs of those names, with the step's random numbers: a step may withhold large
        ones."""
        torch.manual_seed(self.subject.seed + number)
        args, kwargs = batch
        with torch.no_grad():
            output = self.call(*args, **kwargs)
        return [pair for pair in tensors(output) if pair[0] in names]

    def _use_buffers(self, index: int) -> None:
        """Put this data-parallel rank's buffers into the model, and keep those of the last one."""
        current = dict(self.model.named_buffers())
        if not self.buffers:
            for each in self.parts:
                self.buffers[each] = {name: b.clone() for name, b in current.items()}
        else:
            last = list(self.parts)[list(self.parts).index(index) - 1]
            self.buffers[last] = {name: b.clone() for name, b in current.items()}
        with torch.no_grad():
            for name, buffer in current.items():
                buffer.copy_(self.buffers[index][name])
