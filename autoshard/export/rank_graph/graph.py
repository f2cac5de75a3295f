"""One rank's inference graph: few operators, its own weights, one process group, named ports.

`InferencePlan.rank_graph(r)` makes it, for a lowering to any engine:

- operators are those of `core_operators.CORE` and of `operators` (attention, update_cache);
- placeholders are the inputs, then this rank's parts of the weights, then constants;
- a size is an int, a `sym_size` of an input (for rows of experts, of their choices), or integer
  arithmetic on those;
- a collective names one process group, that of the axis tp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import fx

from autoshard.export.spec import Extent
from autoshard.runtime.collectives import Axis, State


@dataclass(frozen=True)
class Port:
    """An input or an output. shape: sizes, or names of dynamic dims or expressions of them.

    role: "input", "output", "lengths" (how many tokens of each row are cached, int32 [batch]),
    "last_tokens" (the place in a call of each row's last token, whose logits are made, int32
    [batch]), "encoded" (what the encoder's engine makes), "key_cache", "value_cache" (inputs, and
    the outputs of the same name that are their memory).
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int | str, ...]
    role: str
    output: bool = False

    @property
    def tensor(self) -> str:
        """The name of the engine's tensor; an updated cache output is `<name>_out`."""
        return f"{self.name}_out" if self.output and self.role.endswith("cache") else self.name


@dataclass(frozen=True)
class QuantizedForm:
    """How a weight is quantized. kind: of the layouts that `quantize=` has. rows: of each matrix
    that is quantized by itself. scale: target of the placeholder of its scales.
    """

    kind: str
    rows: int
    scale: str


@dataclass(frozen=True)
class RankWeight:
    """A parameter of the model, of which a rank holds a part.

    name: as in `named_parameters()`. shape: of the whole. state: how the part is cut from it on
    the axis tp, I or S(dim). dtype: that of the engine, in which it is computed with. quantized:
    how it is held instead, None where it is as it is.
    """

    name: str
    shape: tuple[int, ...]
    state: State
    dtype: torch.dtype
    quantized: QuantizedForm | None = None


@dataclass(frozen=True, kw_only=True)
class RankGraph:
    """See the module's text.

    weights, constants: by the target of their placeholder. symbols: the dynamic dims by name.
    sizes: the name of each symbol of the placeholders' fake values. axis: tp, as this rank sees
    it; its `group` is what collectives name. max_length: tokens a cache holds, None without one.
    whole, whole_constants: with a cache, the graph of whole sequences that it continues, and the
    constants of that one. encoder: what an encoder-decoder computes once a text, whose outputs are
    the inputs of role "encoded".
    """

    module: fx.GraphModule
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    weights: Mapping[str, RankWeight]
    constants: Mapping[str, torch.Tensor]
    symbols: Mapping[str, Extent]
    sizes: Mapping[str, str]
    axis: Axis
    max_length: int | None
    whole: fx.GraphModule | None = None
    whole_constants: Mapping[str, torch.Tensor] = field(default_factory=dict)
    encoder: RankGraph | None = None

    @property
    def tp(self) -> int:
        """The number of ranks."""
        return self.axis.size

    @property
    def profiles(self) -> list[dict[str, Extent]]:
        """The sizes that are optimised for: those of `symbols`; with a cache, also a call of the
        fewest tokens, which all but the first of a text are."""
        found = [dict(self.symbols)]
        sequence = self.symbols.get("sequence")
        if self.max_length is not None and sequence is not None:
            fewest = sequence.minimum
            if fewest < sequence.maximum:
                found.append({**self.symbols, "sequence": Extent(fewest, fewest, fewest)})
        return found

    @property
    def rank(self) -> int:
        """This rank's number."""
        return self.axis.rank
