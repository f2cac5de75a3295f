"""The tensors of one rank of a TensorRT-LLM checkpoint, as pieces of a model's parameters, cut,
turned and joined.

Linear weights are (out, in). Layers count from 0 within a pipeline stage. Names differ from the
usual ones in one place: `mlp.fc` is the activated projection and `mlp.gate` the other.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from autoshard.export.decoder import Attention, Decoder, Layer, Linear, Mlp, Norm
from autoshard.export.errors import export_error
from autoshard.export.to_trtllm.families import GPTJ, Family


@dataclass(frozen=True)
class Piece:
    """A part of one parameter. rows: which of its outputs, None for all. columns: (start, length)
    of its inputs, None for all. The outputs are the last dim but one, or, where `transposed`, the
    last; the only dim of a vector. plus_one: add 1."""

    parameter: str
    rows: torch.Tensor | None = None
    columns: tuple[int, int] | None = None
    transposed: bool = False
    plus_one: bool = False

    def needs(self, shape: tuple[int, ...]) -> list[tuple[int, int]]:
        """For each dim of the parameter, the first index it needs and one past the last."""
        needed = [(0, size) for size in shape]
        outputs, inputs = self._dims(len(shape))
        if self.rows is not None:
            empty = self.rows.numel() == 0
            needed[outputs] = (0, 0) if empty else (int(self.rows.min()), int(self.rows.max()) + 1)
        if self.columns is not None:
            needed[inputs] = (self.columns[0], self.columns[0] + self.columns[1])
        return needed

    def take(
        self, tensor: torch.Tensor, starts: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        """The piece, from a part of the parameter that begins at index `starts`."""
        outputs, inputs = self._dims(tensor.dim())
        if self.rows is not None:
            rows = (self.rows - starts[outputs]).to(tensor.device)
            tensor = _select(tensor, outputs, rows)
        if self.columns is not None:
            tensor = tensor.narrow(inputs, self.columns[0] - starts[inputs], self.columns[1])
        if self.transposed and tensor.dim() > 1:
            tensor = tensor.transpose(-1, -2)
        if self.plus_one:
            tensor = tensor.float() + 1.0
        return tensor.to(dtype)

    def _dims(self, ndim: int) -> tuple[int, int]:
        if ndim == 1:
            return 0, 0
        return (ndim - 1, ndim - 2) if self.transposed else (ndim - 2, ndim - 1)


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: its pieces one after the other along the first dim, then zeros."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]


def _select(tensor: torch.Tensor, dim: int, rows: torch.Tensor) -> torch.Tensor:
    """Rows by number; a view where they are consecutive."""
    if rows.numel() == 0:
        return tensor.narrow(dim, 0, 0)
    first, last = int(rows[0]), int(rows[-1])
    if last - first + 1 == rows.numel() and bool((rows.diff() == 1).all()):
        return tensor.narrow(dim, first, rows.numel())
    return tensor.index_select(dim, rows)


_LAYERS = "transformer.layers"


@dataclass(frozen=True)
class Split:
    """How a checkpoint is divided. dtype: of all tensors but a router's, which is float32.

    parallel_embedding: each tensor rank holds a part of the token embedding. share_embedding: no
    head of its own is written.
    """

    tp: int
    pp: int
    dtype: torch.dtype
    parallel_embedding: bool
    share_embedding: bool


def check_split(decoder: Decoder, family: Family, split: Split) -> None:
    """Raise ExportError for a size the split does not divide, naming both numbers."""
    attention, mlp = decoder.layers[0].attention, decoder.layers[0].mlp
    sizes = [("pp", split.pp, "layers", len(decoder.layers))]
    sizes += [("tp", split.tp, "heads", attention.heads), ("tp", split.tp, "MLP width", mlp.width)]
    if mlp.shared is not None:
        sizes.append(("tp", split.tp, "width of the MLP of all tokens", mlp.shared.width))
    if attention.kv_heads >= split.tp:
        sizes.append(("tp", split.tp, "key-value heads", attention.kv_heads))
    for name, parts, what, size in sizes:
        if size % parts:
            raise export_error(f"{what} {size} % {name} {parts} = {size % parts}, not 0")
    if attention.kv_heads < split.tp and split.tp % attention.kv_heads:
        raise export_error(
            f"tp {split.tp} % key-value heads {attention.kv_heads} = "
            f"{split.tp % attention.kv_heads}, not 0: a head cannot be repeated evenly"
        )
    if split.pp > 1 and not family.stages:
        raise export_error(
            f"pp {split.pp}: TensorRT-LLM has no pipeline stages for {family.name}",
            remedy="Export with pp=1.",
        )
    if split.share_embedding and split.pp > 1:
        raise export_error(
            f"pp {split.pp}: TensorRT-LLM shares this family's embedding with its head, and "
            "cannot share it between pipeline stages",
            remedy="Export with pp=1.",
        )


def rank_tensors(decoder: Decoder, family: Family, split: Split, rank: int) -> list[Entry]:
    """The tensors of `rank{rank}.safetensors`, where rank = pp_rank * tp + tp_rank."""
    stage, part = divmod(rank, split.tp)
    return list(_Rank(decoder, family, split, part).tensors(stage))


class _Rank:
    def __init__(self, decoder: Decoder, family: Family, split: Split, rank: int) -> None:
        self.decoder, self.family, self.split, self.rank = decoder, family, split, rank

    def tensors(self, stage: int) -> Iterator[Entry]:
        decoder, split = self.decoder, self.split
        count = len(decoder.layers) // split.pp
        if stage == 0:
            shards = split.tp if split.parallel_embedding else 1
            yield self._vocab("transformer.vocab_embedding.weight", decoder.embedding, shards)
            if decoder.positions is not None:
                assert decoder.max_positions is not None
                shape = (decoder.max_positions, decoder.hidden)
                first = decoder.first_position
                rows = torch.arange(first, first + decoder.max_positions)
                piece = Piece(decoder.positions, rows)
                yield self._entry("transformer.position_embedding.weight", shape, (piece,))
            if decoder.embedding_norm is not None:
                yield from self._norm("transformer.ln_embed", decoder.embedding_norm)
        for i, layer in enumerate(decoder.layers[stage * count : (stage + 1) * count]):
            yield from self._layer(f"{_LAYERS}.{i}", layer)
        if stage == split.pp - 1:
            yield from self._norm("transformer.ln_f", decoder.norm)
            if not split.share_embedding:
                yield self._vocab("lm_head.weight", decoder.head.weight, split.tp)
            if decoder.head.bias is not None:
                yield self._vocab("lm_head.bias", decoder.head.bias, split.tp, ())

    def _layer(self, prefix: str, layer: Layer) -> Iterator[Entry]:
        yield from self._norm(f"{prefix}.input_layernorm", layer.attention_norm)
        if layer.mlp_norm is not layer.attention_norm:
            # Falcon alone has both forms: its MLP beside attention or after it
            name = self.family.mlp_norm if layer.parallel else "post_layernorm"
            name = self.family.mlp_norm if layer.post_mlp_norm is not None else name
            yield from self._norm(f"{prefix}.{name}", layer.mlp_norm)
        if layer.post_attention_norm is not None:
            yield from self._norm(f"{prefix}.post_layernorm", layer.post_attention_norm)
        if layer.post_mlp_norm is not None:
            yield from self._norm(f"{prefix}.post_feedforward_layernorm", layer.post_mlp_norm)
        yield from self._attention(f"{prefix}.attention", layer.attention)
        if layer.mlp.router is not None:
            yield from self._experts(f"{prefix}.mlp", layer.mlp, layer.mlp.router)
        else:
            yield from self._mlp(f"{prefix}.mlp", layer.mlp, self.family.fused_gate)

    def _mlp(self, prefix: str, mlp: Mlp, fused: bool) -> Iterator[Entry]:
        """fused: up and gate are one projection, in this order."""
        if mlp.gate is None:
            yield from self._columns(f"{prefix}.fc", mlp.up)
        elif fused:
            yield from self._columns(f"{prefix}.fc", mlp.up, mlp.gate)
        else:
            yield from self._columns(f"{prefix}.fc", mlp.gate)
            yield from self._columns(f"{prefix}.gate", mlp.up)
        yield from self._rows(f"{prefix}.proj", mlp.down, once=self.family is GPTJ)

    def _attention(self, prefix: str, attention: Attention) -> Iterator[Entry]:
        linears = (attention.query, attention.key, attention.value)
        rows = [self._heads(one, attention) for one in linears]
        yield from self._joined(f"{prefix}.qkv", linears, rows)
        yield from self._rows(f"{prefix}.dense", attention.dense)
        for name, norm in (("q", attention.query_norm), ("k", attention.key_norm)):
            if norm is not None:
                yield from self._norm(f"{prefix}.{name}_layernorm", norm, attention.head_dim)

    def _heads(self, linear: Linear, attention: Attention) -> torch.Tensor:
        """This rank's rows; fewer heads than ranks are each repeated for consecutive ranks."""
        assert linear.rows is not None
        by_head = linear.rows.view(-1, attention.head_dim)
        repeats = max(1, self.split.tp // len(by_head))
        heads = by_head.repeat_interleave(repeats, 0)
        return self._part(heads).flatten()

    def _columns(self, prefix: str, *linears: Linear) -> Iterator[Entry]:
        """Projections as one, each split by its outputs."""
        yield from self._joined(prefix, linears, [self._part(_rows_of(one)) for one in linears])

    def _joined(
        self, prefix: str, linears: Sequence[Linear], rows: Sequence[torch.Tensor]
    ) -> Iterator[Entry]:
        """Some rows of each of several projections; all of them have a bias, or none, in every
        family."""
        parts, total = list(zip(linears, rows, strict=True)), sum(map(len, rows))
        weights = tuple(Piece(one.weight, r, transposed=one.transposed) for one, r in parts)
        yield self._entry(f"{prefix}.weight", (total, linears[0].inputs), weights)
        biases = tuple(Piece(one.bias, r) for one, r in parts if one.bias is not None)
        if biases:
            yield self._entry(f"{prefix}.bias", (total,), biases)

    def _rows(self, prefix: str, linear: Linear, once: bool = False) -> Iterator[Entry]:
        """A projection split by its inputs; every rank holds the whole bias. once: the first one
        alone, where the ranks' results are summed with their biases."""
        length = linear.inputs // self.split.tp
        columns = (self.rank * length, length)
        weight = Piece(linear.weight, linear.rows, columns, linear.transposed)
        yield self._entry(f"{prefix}.weight", (linear.outputs, length), (weight,))
        if linear.bias is not None and once and self.rank > 0:
            yield self._entry(f"{prefix}.bias", (linear.outputs,), ())
        elif linear.bias is not None:
            yield self._whole(f"{prefix}.bias", linear.bias, (linear.outputs,))

    def _experts(self, prefix: str, mlp: Mlp, router: Linear) -> Iterator[Entry]:
        assert mlp.gate is not None and mlp.gate.weight == mlp.up.weight
        rows = torch.cat([self._part(_rows_of(mlp.up)), self._part(_rows_of(mlp.gate))])
        both = Piece(mlp.up.weight, rows, transposed=mlp.up.transposed)
        shape = (mlp.experts, len(rows), mlp.up.inputs)
        yield self._entry(f"{prefix}.fc.weight", shape, (both,))
        length = mlp.width // self.split.tp
        down = Piece(mlp.down.weight, None, (self.rank * length, length), mlp.down.transposed)
        shape = (mlp.experts, mlp.down.outputs, length)
        yield self._entry(f"{prefix}.proj.weight", shape, (down,))
        choose = Piece(router.weight, transposed=router.transposed)
        size = (router.outputs, router.inputs)
        yield Entry(f"{prefix}.router.weight", size, torch.float32, (choose,))
        if mlp.shared is not None and mlp.shared_gate is not None:
            yield from self._mlp(f"{prefix}.shared_expert", mlp.shared, True)
            gate = Piece(mlp.shared_gate.weight, transposed=mlp.shared_gate.transposed)
            row = (1, mlp.shared_gate.inputs)
            yield self._entry(f"{prefix}.shared_expert_gate.weight", row, (gate,))

    def _norm(self, prefix: str, norm: Norm, width: int | None = None) -> Iterator[Entry]:
        size = (width or self.decoder.hidden,)
        weight = Piece(norm.weight, plus_one=norm.zero_centred)
        yield self._entry(f"{prefix}.weight", size, (weight,))
        if norm.bias is not None:
            yield self._whole(f"{prefix}.bias", norm.bias, size)

    def _vocab(
        self, name: str, parameter: str, shards: int, row: tuple[int, ...] | None = None
    ) -> Entry:
        """One of `shards` equal parts of a [vocab, *row] table, padded with rows of zeros. row: by
        default hidden."""
        vocab = self.decoder.vocab
        size = (vocab + shards - 1) // shards
        start = min(vocab, (self.rank if shards > 1 else 0) * size)
        rows = torch.arange(start, min(vocab, start + size))
        shape = (size, *((self.decoder.hidden,) if row is None else row))
        return self._entry(name, shape, (Piece(parameter, rows),))

    def _whole(self, name: str, parameter: str, shape: tuple[int, ...]) -> Entry:
        return self._entry(name, shape, (Piece(parameter),))

    def _entry(self, name: str, shape: tuple[int, ...], pieces: tuple[Piece, ...]) -> Entry:
        return Entry(name, shape, self.split.dtype, pieces)

    def _part(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.chunk(self.split.tp)[self.rank]


def _rows_of(linear: Linear) -> torch.Tensor:
    return torch.arange(linear.outputs) if linear.rows is None else linear.rows
