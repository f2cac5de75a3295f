"""The tensors of a server's tensor-parallel rank, as pieces of a Hugging Face model's parameters.

vLLM and SGLang name their tensors alike and cut them by the same rules, here as data (CUTS, FUSED,
EXPERTS); the server's own names and shapes say which of them it has. A key-value head of which
there are fewer than ranks is on several of them. A vocabulary is padded to a multiple of 64 and
divided; the rows beyond it are zeros. And the weights of a running engine, by the names of the
model it was exported from: where in each of them a rank's lie stands in the engine's config.json.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from autoshard.errors import AutoshardError
from autoshard.runtime.collectives import shard_dim
from autoshard.runtime.engine import Engine, NewWeights
from autoshard.weights.boxes import Box
from autoshard.weights.parts import Offered, Tensors, WantedBox, part_of

#: Layer -> the dim of its weight that is divided: outputs (0), or inputs (1), whose bias is whole.
CUTS = {"o_proj": 1, "down_proj": 1}

VOCABULARIES = ("embed_tokens", "lm_head")

PADDED_TO = 64

#: Layer of a server -> the layers that it joins, along their outputs, each rank's parts together.
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}

#: Tensor of a server's experts -> that of the model, the dim that is divided, and what it joins.
EXPERTS = {"w13_weight": ("gate_up_proj", 1, 2), "w2_weight": ("down_proj", 2, 1)}

#: Tensor of a quantized layer -> the rows and columns of its weight that have one entry of it.
BLOCKS = {"weight_scale_inv": 128}

#: Kind of model -> what the model calls a part of its layers, and what servers do.
NAMES = {"mixtral": (".mlp.", ".block_sparse_moe.")}


class _Piece(NamedTuple):
    """Some indices of a dim of a parameter, and the first index at which they lie here."""

    source: str
    dim: int
    start: int
    length: int
    at: int


class ServerTensors(Tensors):
    """What a tensor-parallel rank of vLLM or SGLang takes, for `autoshard.weights.receive`.

    tensors: its parameters by name, as `dict(model.named_parameters())` of the server's model has
    them. config: the Hugging Face configuration. rank, tp: of the server. Quantized layers are
    those of `fp8`, `fp8_channel` and `int8` as they are loaded, before the server packs them for
    its kernels; models whose layers have other names than Llama's are an error.
    """

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], config: Any, rank: int, tp: int
    ) -> None:
        # not detached: what a server puts into its parameters afterwards is what is overwritten
        super().__init__({n: part_of(t, n)._replace(tensor=t) for n, t in tensors.items()}, {})
        self._rank, self._tp = rank, tp
        self._names = NAMES.get(config.model_type, ("", ""))
        heads = int(config.num_attention_heads)
        kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
        self._head = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
        self._heads = {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads}
        for what, count in (("attention", heads), ("key-value", kv_heads)):
            if count % tp and tp % count or count < tp and what == "attention":
                raise AutoshardError(
                    f"{count} {what} heads cannot be divided by tp={tp}",
                    remedy="Give the tp of the server, and the model's own configuration.",
                )

    def slots(self, offered: Mapping[str, Offered]) -> dict[str, list[WantedBox]]:
        """See Receiver."""
        found: dict[str, list[WantedBox]] = {}
        for name, (tensor, *_) in self.parts.items():
            new = self._new[name] = torch.zeros_like(tensor, memory_format=torch.contiguous_format)
            pieces = list(self._pieces(name, offered))
            for piece in pieces:
                entry = offered[piece.source]
                whole = [(0, size) for size in entry.shape]
                whole[piece.dim : piece.dim + 1] = [(piece.start, piece.start + piece.length)]
                box: Box = tuple(whole)
                place = self._place(name, new, piece, box, pieces)
                if piece.length:
                    found.setdefault(entry.of, []).append(WantedBox(box, place))
        return found

    def _place(
        self, name: str, new: torch.Tensor, piece: _Piece, box: Box, pieces: list[_Piece]
    ) -> torch.Tensor:
        """Where a piece lies in a tensor. Raises where its pieces do not make the tensor."""
        sizes = [high - low for low, high in box]
        dim, fits = piece.dim, new.dim() == len(box)
        if fits and new.dim():
            length = sum(one.length for one in pieces)
            padded = self._layer(name) in VOCABULARIES
            fits = length == new.shape[dim] or (padded and length < new.shape[dim])
            others = [size for i, size in enumerate(new.shape) if i != dim]
            fits = fits and others == [size for i, size in enumerate(sizes) if i != dim]
        if not fits:
            made = ", ".join(f"{sizes} of {one.source}" for one in pieces)
            raise AutoshardError(
                f"{name} has the shape {list(new.shape)} in the server, and its pieces are "
                f"{made}, for rank {self._rank} of tp={self._tp}",
                remedy="Give the rank and tp of the server, and the model's own configuration; "
                "quantized weights are not taken.",
            )
        return new.narrow(dim, piece.at, piece.length) if new.dim() else new

    def _layer(self, name: str) -> str:
        return name.split(".")[-2] if "." in name else ""

    def _pieces(self, name: str, offered: Mapping[str, Offered]) -> Iterator[_Piece]:
        """The pieces of a server's tensor, in its order."""
        ours, theirs = self._names
        path = name.replace(theirs, ours) if theirs else name
        prefix, _, leaf = path.rpartition(".")
        above, _, layer = prefix.rpartition(".")
        at = 0
        if leaf in EXPERTS:
            source, dim, joined = EXPERTS[leaf]
            source = self._known(f"{prefix}.{source}", name, offered)
            size = offered[source].shape[dim] // joined
            for number in range(joined):
                start, length = self._share(size)
                yield _Piece(source, dim, number * size + start, length, at)
                at += length
        elif layer in FUSED:
            before = 0  # rows of a parameter that is fused already
            for one in FUSED[layer]:
                source = f"{above}.{one}.{leaf}"
                alone = source in offered
                source = self._known(source if alone else f"{prefix}.{leaf}", name, offered)
                size = offered[source].shape[0]
                if one in self._heads:
                    size, start, length = self._head_share(self._heads[one], leaf)
                else:
                    size = size if alone else size // len(FUSED[layer])
                    start, length = self._share(size)
                yield _Piece(source, 0, (0 if alone else before) + start, length, at)
                at, before = at + length, before + size
        else:
            source = self._known(path, name, offered)
            shape = offered[source].shape
            if layer in VOCABULARIES:
                part = -(-shape[0] // PADDED_TO) * PADDED_TO // self._tp
                start = min(shape[0], self._rank * part)
                yield _Piece(source, 0, start, min(shape[0] - start, part), 0)
            elif layer in CUTS and len(shape) == 2 and shape[CUTS[layer]] > 1:
                start, length = self._share(shape[CUTS[layer]])
                yield _Piece(source, CUTS[layer], start, length, 0)
            else:
                yield _Piece(source, 0, 0, shape[0] if shape else 1, 0)

    def _known(self, source: str, name: str, offered: Mapping[str, Offered]) -> str:
        if source in offered:
            return source
        raise AutoshardError(
            f"{name} of the server is made of {source}, which is not sent",
            remedy="Serve the model that is trained; its layers must be called as Llama's.",
        )

    def _share(self, size: int) -> tuple[int, int]:
        return self._rank * size // self._tp, size // self._tp

    def _head_share(self, heads: int, leaf: str) -> tuple[int, int, int]:
        """(all rows, the first, how many) of this rank's heads; of fewer heads than ranks each is
        on several."""
        own = max(1, heads // self._tp)
        first = self._rank * own if heads >= self._tp else self._rank // (self._tp // heads)
        block = BLOCKS.get(leaf, 1)
        if own * self._head % block:
            raise AutoshardError(
                f"rank {self._rank} has {own} heads of {self._head}, which cut a scale of {block}",
                remedy="Serve on fewer ranks, or send a QuantizedModel of fp8_channel.",
            )
        rows = self._head
        return heads * rows // block, first * rows // block, own * rows // block


class EngineTensors:
    """What the engine of a rank takes, for `autoshard.weights.receive`. It must have been exported
    with refittable=True, and run nothing while it is refitted."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._new: list[NewWeights] = []

    def slots(self, offered: Mapping[str, Offered]) -> dict[str, list[WantedBox]]:
        """See Receiver. The engine is asked for every weight before anything travels."""
        found: dict[str, list[WantedBox]] = {}
        self._new = self._engine.new_weights()
        for new in self._new:
            for name in new.table:
                if name not in offered:
                    raise AutoshardError(
                        f"{name} of the engine is not sent",
                        remedy="Send the model that the engine was exported from.",
                    )
                box = _box(name, new, offered[name].shape)
                found.setdefault(offered[name].of, []).append(WantedBox(box, new.values[name]))
        return found

    def tensors(self) -> Iterable[torch.Tensor]:
        """See Receiver: TensorRT takes them from the host."""
        return ()

    def swap(self) -> None:
        """See Receiver."""
        for new in self._new:
            new.take()
        self.drop()

    def drop(self) -> None:
        """See Receiver."""
        self._new = []


def _box(name: str, new: NewWeights, shape: tuple[int, ...]) -> Box:
    """Where a rank's part of a weight lies in the whole, of `shape`."""
    whole = list(new.table[name]["shape"])
    box = [(0, size) for size in whole]
    dim = shard_dim(new.table[name]["state"])
    if dim is not None:
        box[dim] = (whole[dim] * new.rank, whole[dim] * (new.rank + 1))
        whole[dim] *= new.ranks
    if tuple(whole) != shape:
        raise AutoshardError(
            f"{name} has the shape {whole} in the engine, and is sent as {list(shape)}",
            remedy="Send the model that the engine was exported from.",
        )
    return tuple(box)
