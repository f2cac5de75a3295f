"""The batch of a call before its graph runs: compared over the group, or sent by its first rank.

Its values decide what a mask of attention means: an `attention_mask` of ones hides nothing, and
positions that count up are of one document. Eager models look at the values; a graph cannot. So a
program is built for a batch of which they are true, another for any batch, and each call is checked
before it picks one (`autoshard.backend`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autoshard.config import Config
from autoshard.passes import ONES, POSITIONS
from autoshard.runtime import compat
from autoshard.runtime.agreement import Input, compare_batch, from_first, send_batch
from autoshard.runtime.collectives import Axis
from autoshard.runtime.errors import BatchMismatchError
from autoshard.runtime.lazy_gather import LazyGather


def batch_facts(inputs: Sequence[compat.GraphInput]) -> dict[int, str]:
    """ONES or POSITIONS by index of the placeholder, for this call's integers and booleans of at
    most two dims. What has no values (the meta device, a trace inside another) has no facts."""
    found = {}
    for index, item in _tensors(inputs):
        real: Any = item.real
        whole = type(real) is torch.Tensor and real.layout == torch.strided and not item.of_model
        integral = not (real.dtype.is_floating_point or real.dtype.is_complex)
        if not whole or real.is_meta or not integral or not 1 <= real.dim() <= 2:
            continue
        for fact in (ONES, POSITIONS):
            if holds({index: fact}, {index: real}):
                found[index] = fact
                break
    return found


def agreed_facts(
    inputs: Sequence[compat.GraphInput], axes: Sequence[Axis], config: Config
) -> dict[int, str]:
    """`batch_facts` of the batch that the ranks of all these axes will compute with."""
    facts = batch_facts(inputs) if config.recover_masks else {}
    for axis in axes if config.batches == "broadcast" else ():
        sent = from_first([[i, fact] for i, fact in facts.items()], "facts of the batch", axis)
        facts = {i: fact for i, fact in sent}
    return facts


def holds(facts: Mapping[int, str], values: Sequence[Any] | Mapping[int, Any]) -> bool:
    """Whether the facts are true of a call's arguments. On an accelerator the host waits for the
    answer, as it does in eager models."""
    if not facts:
        return True  # most programs: leaving the caller's modes would be felt at every step
    with compat.real_tensors(), torch.no_grad():
        for index, fact in facts.items():
            value = values[index]
            if fact == ONES:
                expected: Any = 1
            elif value.dtype == torch.bool:
                return False
            else:
                expected = torch.arange(value.shape[-1], device=value.device)
            if value.numel() == 0 or not bool((value == expected).all()):
                return False
    return True


CHECKED = 2
"""First calls of a graph that are compared; the second is often the first with its own batch."""


def batch_inputs(inputs: Sequence[compat.GraphInput]) -> list[Input]:
    """The inputs of a graph that the caller gave: tensors that are no parameters or buffers."""
    return [
        Input(index, item.name.removeprefix("L."))
        for index, item in _tensors(inputs)
        if item.source.startswith("L[") and not item.of_model
    ]


def _held_inputs(inputs: Sequence[compat.GraphInput]) -> list[Input]:
    """The tensors of a graph that the model holds as attributes: the caller may have set them.
    Buffers are rank 0's where the model has parameters, which were stored with them."""
    trained = any(isinstance(item.real, nn.Parameter) for item in inputs)
    return [
        Input(index, f"self.{item.name}")
        for index, item in _tensors(inputs)
        if item.of_model and not (trained and "._buffers[" in item.source)
    ]


def _tensors(inputs: Sequence[compat.GraphInput]) -> Iterator[tuple[int, compat.GraphInput]]:
    """The inputs that are tensors and no parameters, with their places."""
    for index, item in enumerate(inputs):
        if isinstance(item.real, torch.Tensor) and not isinstance(item.real, nn.Parameter):
            yield index, item


def batch_shapes(inputs: Sequence[compat.GraphInput]) -> str:
    """The shapes of this rank's batch, for error texts."""
    given = ((item.name, inputs[item.position].real) for item in batch_inputs(inputs))
    return ", ".join(f"{name} {tuple(t.shape)}" for name, t in given if t is not None)


def batch_checker(
    inputs: Sequence[compat.GraphInput], axes: Sequence[Axis], config: Config
) -> Callable[[list[Any]], None] | None:
    """A function that checks or replaces the batch in the arguments of each call of one graph; None
    where the options ask for neither. axes: those whose ranks are given the same."""
    batch, held = batch_inputs(inputs), _held_inputs(inputs)
    axes = [axis for axis in axes if axis.size > 1]
    if not axes or not (batch or held) or config.batches == "never":
        return None
    settled = _settled(inputs)
    sizes = [
        index
        for index, item in enumerate(inputs)
        if item.real is None and not compat.size_symbols(item.fake) <= settled
    ]
    return _BatchCheck(batch, held, sizes, axes, config.batches)


def _settled(inputs: Sequence[compat.GraphInput]) -> set[Any]:
    """The symbols of sizes of what earlier graphs made, whose batches were compared: a cache that
    grows by a token is no new size."""
    made = [item.fake for item in inputs if isinstance(item.real, LazyGather)]
    shapes = [tensor.shape for fake in made for tensor in (fake, fake.part)]
    sizes = [size for shape in shapes for size in shape if isinstance(size, torch.SymInt)]
    return {symbol for size in sizes for symbol in compat.size_symbols(size)}


@dataclass(eq=False)
class _BatchCheck:
    """The batch of one graph: compared in the first calls and at new sizes, or sent. held: what
    the model holds is compared only, since graphs may write to it. checks: the option."""

    batch: list[Input]
    held: list[Input]
    sizes: list[int]
    axes: Sequence[Axis]
    checks: str
    calls: int = 0
    seen: set[tuple[int, ...]] = field(default_factory=set)

    def __call__(self, values: list[Any]) -> None:
        self.calls += 1
        # A graph for any size is compared again at sizes it has not had, those of caches aside:
        # ranks that were given the same batches all find them new.
        key = tuple(int(values[index]) for index in self.sizes)
        often = self.checks == "always" or self.calls <= CHECKED
        if often or key not in self.seen:
            self.seen.add(key)
            self._compare(values, often)
        for axis in self.axes if self.checks == "broadcast" else ():
            send_batch(values, self.batch, axis)

    def _compare(self, values: list[Any], contents: bool) -> None:
        """Compare over one axis after the other, and raise on all ranks of all where any differ."""
        failed: BatchMismatchError | None = None
        call, often = f"call {self.calls}", self.checks == "always" and self.calls > CHECKED
        for axis in self.axes:
            try:
                differs = failed is not None
                if self.batch:
                    own = contents and self.checks != "broadcast"
                    compare_batch(values, self.batch, axis, call, own, differs, often)
                if self.held:
                    compare_batch(values, self.held, axis, call, contents, differs, often)
            except BatchMismatchError as error:
                failed = failed or error
        if failed is not None:
            raise failed
