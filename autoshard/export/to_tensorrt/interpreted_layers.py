"""Each kind of TensorRT layer as torch computes it, from the attributes the layer has."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from autoshard.export import rank_graph
from autoshard.export.to_tensorrt.converters import DTYPES

Values = Sequence[Any]

_ELEMENTWISE: dict[str, Callable[..., torch.Tensor]] = {
    "SUM": torch.add,
    "PROD": torch.mul,
    "MAX": torch.maximum,
    "MIN": torch.minimum,
    "SUB": torch.sub,
    "POW": torch.pow,
    "AND": torch.logical_and,
    "OR": torch.logical_or,
    "XOR": torch.logical_xor,  # of torch-tensorrt's networks, as SIGN below
    "EQUAL": torch.eq,
    "GREATER": torch.gt,
    "LESS": torch.lt,
    "FLOOR_DIV": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "DIV": lambda x, y: x / y if x.is_floating_point() else torch.div(x, y, rounding_mode="trunc"),
}
_UNARY: dict[str, Callable[..., torch.Tensor]] = {
    "EXP": torch.exp,
    "LOG": torch.log,
    "SQRT": torch.sqrt,
    "RECIP": torch.reciprocal,
    "ABS": torch.abs,
    "NEG": torch.neg,
    "SIN": torch.sin,
    "COS": torch.cos,
    "ERF": torch.erf,
    "FLOOR": torch.floor,
    "CEIL": torch.ceil,
    "NOT": torch.logical_not,
    "SIGN": torch.sign,
}
_ACTIVATION: dict[str, Callable[..., torch.Tensor]] = {
    "RELU": torch.relu,
    "SIGMOID": torch.sigmoid,
    "TANH": torch.tanh,
    "GELU_ERF": F.gelu,
    "GELU_TANH": lambda x: F.gelu(x, approximate="tanh"),
}
_REDUCE: dict[str, Callable[..., torch.Tensor]] = {
    "SUM": lambda x, dims, keep: x.sum(dims, keepdim=keep, dtype=x.dtype),
    "AVG": lambda x, dims, keep: x.mean(dims, keepdim=keep),
    "MAX": lambda x, dims, keep: x.amax(dims, keepdim=keep),
    "MIN": lambda x, dims, keep: x.amin(dims, keepdim=keep),
}


def _dims(mask: int) -> list[int]:
    return [d for d in range(8) if mask >> d & 1]


def _shuffle(layer: Any, given: Values) -> list[torch.Tensor]:
    x = given[0]
    x = x.permute([layer.first_transpose[d] for d in range(x.dim())])
    if len(given) > 1 and given[1] is not None:
        sizes = given[1].tolist()
    else:
        sizes = list(x.shape if layer.reshape_dims is None else layer.reshape_dims)
    if layer.zero_is_placeholder and 0 in sizes:
        sizes = [x.shape[d] if s == 0 else s for d, s in enumerate(sizes)]
    x = x.reshape(sizes)
    return [x.permute([layer.second_transpose[d] for d in range(x.dim())])]


def _slice(layer: Any, given: Values) -> list[torch.Tensor]:
    x, *rest = given
    said = [None if value is None else value.tolist() for value in (*rest, None, None, None)]
    start = list(layer.start) if said[0] is None else said[0]
    size = list(layer.shape) if said[1] is None else said[1]
    step = list(layer.stride) if said[2] is None else said[2]
    fills = layer.mode.name == "FILL"
    for dim in range(x.dim()):
        index = torch.arange(size[dim]) * step[dim] + start[dim]
        if fills and size[dim] > x.shape[dim]:
            x = torch.cat([x, x.new_zeros(*x.shape[:dim], size[dim] - x.shape[dim],
                                          *x.shape[dim + 1 :])], dim)  # fmt: skip
        if size[dim] and (int(index.min()) < 0 or int(index.max()) >= x.shape[dim]):
            raise IndexError(f"{layer.name}: takes {index.tolist()} of {x.shape[dim]} in dim {dim}")
        x = x.index_select(dim, index)
    return [x]


def _convolution(layer: Any, given: Values) -> list[torch.Tensor]:
    x, kernel, *rest = given
    bias = rest[0] if rest else None
    pairs = zip(layer.pre_padding, layer.post_padding)
    around = [n for pair in reversed(list(pairs)) for n in pair]
    run = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[x.dim() - 2]
    return [
        run(
            F.pad(x, around),
            kernel,
            bias,
            tuple(layer.stride_nd),
            0,
            tuple(layer.dilation_nd),
            layer.num_groups,
        )
    ]


def _pooling(layer: Any, given: Values) -> list[torch.Tensor]:
    if layer.type.name != "MAX":
        raise NotImplementedError(f"{layer.name}: pools by {layer.type.name}")
    window, stride, padding = (
        tuple(sizes) for sizes in (layer.window_size_nd, layer.stride_nd, layer.padding_nd)
    )
    return [F.max_pool2d(given[0], window, stride, padding)]


def _gather(layer: Any, given: Values) -> list[torch.Tensor]:
    x, index = given
    if layer.mode.name == "ELEMENT":
        return [x.gather(layer.axis, index.long())]
    if layer.mode.name != "DEFAULT":
        raise NotImplementedError(f"{layer.name}: gathers by {layer.mode.name}")
    flat = x.index_select(layer.axis, index.reshape(-1).long())
    shape = (*x.shape[: layer.axis], *index.shape, *x.shape[layer.axis + 1 :])
    return [flat.reshape(shape)]


def _matmul(layer: Any, given: Values) -> list[torch.Tensor]:
    sides = [
        x.transpose(-1, -2) if operation.name == "TRANSPOSE" else x
        for x, operation in zip(given, (layer.op0, layer.op1))
    ]
    return [torch.matmul(*sides)]


def _topk(layer: Any, given: Values) -> list[torch.Tensor]:
    (dim,) = _dims(layer.axes)
    values, indices = given[0].topk(layer.k, dim, largest=layer.op.name == "MAX")
    return [values, indices.int()]


def _softmax(layer: Any, given: Values) -> list[torch.Tensor]:
    (dim,) = _dims(layer.axes)
    return [given[0].softmax(dim)]


def _norm(layer: Any, given: Values) -> list[torch.Tensor]:
    x, scale, bias = given
    wide, dims = x.float(), _dims(layer.axes)
    wide = wide - wide.mean(dims, keepdim=True)
    wide = wide * torch.rsqrt(wide.square().mean(dims, keepdim=True) + layer.epsilon)
    return [(wide * scale.float() + bias.float()).to(x.dtype)]


def _fill(layer: Any, given: Values) -> list[torch.Tensor]:
    count, start, step = given
    total = int(count)
    steps = torch.arange(total) * step.reshape(()) + start.reshape(())
    return [steps.to(DTYPES[layer.get_output_type(0).name])]


def _scatter(layer: Any, given: Values) -> list[torch.Tensor]:
    if layer.mode.name != "ELEMENT":
        raise NotImplementedError(f"{layer.name}: scatters by {layer.mode.name}")
    x, where, values = given
    return [x.scatter(layer.axis, where.long(), values)]


def _cumulative(layer: Any, given: Values) -> list[torch.Tensor]:
    if layer.exclusive or layer.reverse:
        raise NotImplementedError(f"{layer.name}: an exclusive or reverse sum")
    return [given[0].cumsum(int(given[1]), dtype=given[0].dtype)]


def _unsqueeze(layer: Any, given: Values) -> list[torch.Tensor]:
    x = given[0]
    for axis in sorted(given[1].tolist()):
        x = x.unsqueeze(axis)
    return [x]


def _squeeze(layer: Any, given: Values) -> list[torch.Tensor]:
    x = given[0]
    for axis in sorted(given[1].tolist(), reverse=True):
        if x.shape[axis] != 1:
            raise ValueError(f"{layer.name}: squeezes dim {axis} of {tuple(x.shape)}")
        x = x.squeeze(axis)
    return [x]


def _cache(layer: Any, given: Values) -> list[torch.Tensor]:
    cache, update, starts = given
    written = cache.clone()
    for row, start in enumerate(starts.tolist()):
        end = start + update.shape[2]
        if not 0 <= start <= end <= cache.shape[2]:
            raise IndexError(f"{layer.name}: writes {start}..{end} of {cache.shape[2]}")
        written[row, :, start:end] = update[row]
    return [written]


def _dequantize(layer: Any, given: Values) -> list[torch.Tensor]:
    """Each value times the scale of its row, or of its block."""
    values, scale = given
    if scale.dim() == 1:
        scale, blocks = scale.unsqueeze(1 - layer.axis), list(values.shape)
        blocks[layer.axis] = 1
    else:
        blocks = [size // count for size, count in zip(values.shape, scale.shape)]
        if layer.get_input(0).dtype.name != "INT4":  # whose blocks are inferred
            blocks = list(layer.block_shape)
    dtype = DTYPES[layer.get_output_type(0).name]
    return [rank_graph.dequantize(values, scale, blocks, dtype=dtype)]


def unpacked(values: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Numbers of 4 bits, of two in a byte the first in its lower half."""
    halves = torch.stack([values & 15, values >> 4], -1).to(torch.int8)
    return torch.where(halves > 7, halves - 16, halves).reshape(tuple(shape))


def attend(layer: Any, given: Values) -> torch.Tensor:
    """IAttention in float32: no scale, grouped heads, causal alignment to the keys that count."""
    if layer.norm_op.name != "SOFTMAX":
        raise NotImplementedError(f"{layer.name}: attention normalised by {layer.norm_op.name}")
    query, key, value, mask, lengths = given
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.float()
    kind = layer.causal_kind.name.lower()
    found = rank_graph.attention(
        query.float(), key.float(), value.float(), mask, lengths, causal=kind, scale=1.0
    )
    return found.to(query.dtype)


LAYERS: dict[str, Callable[[Any, Values], Sequence[torch.Tensor]]] = {
    "CONSTANT": lambda layer, given: [],
    "CAST": lambda layer, given: [given[0].to(DTYPES[layer.get_output_type(0).name])],
    "IDENTITY": lambda layer, given: [given[0]],
    "ELEMENTWISE": lambda layer, given: [_ELEMENTWISE[layer.op.name](*given)],
    "UNARY": lambda layer, given: [_UNARY[layer.op.name](given[0])],
    "ACTIVATION": lambda layer, given: [_ACTIVATION[layer.type.name](given[0])],
    "SHUFFLE": _shuffle,
    "SLICE": _slice,
    "SHAPE": lambda layer, given: [torch.tensor(list(given[0].shape))],
    "CONCATENATION": lambda layer, given: [torch.cat(list(given), layer.axis)],
    "CONVOLUTION": _convolution,
    "POOLING": _pooling,
    "GATHER": _gather,
    "SCATTER": _scatter,
    "MATRIX_MULTIPLY": _matmul,
    "REDUCE": lambda layer, given: [
        _REDUCE[layer.op.name](given[0], _dims(layer.axes), layer.keep_dims)
    ],
    "SOFTMAX": _softmax,
    "TOPK": _topk,
    "SELECT": lambda layer, given: [torch.where(given[0], given[1], given[2])],
    "FILL": _fill,
    "CUMULATIVE": _cumulative,
    "NORMALIZATION": _norm,
    "UNSQUEEZE": _unsqueeze,
    "SQUEEZE": _squeeze,
    "DEQUANTIZE": _dequantize,
    "KV_CACHE_UPDATE": _cache,
}
"""The layers the interpreter knows, (layer, inputs) -> outputs, by the name of their LayerType."""
