"""What converters build with: a network that refuses loudly, constants that live, sizes.

Collectives as native layers of the engine, over the one process group it has.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from autoshard.export.errors import ExportError, export_error
from autoshard.export.rank_graph import RankGraph
from autoshard.runtime import compat

DTYPES = {
    "FLOAT": torch.float32,
    "HALF": torch.float16,
    "BF16": torch.bfloat16,
    "INT64": torch.int64,
    "INT32": torch.int32,
    "BOOL": torch.bool,
}
"""torch's types by TensorRT's names of them."""

QUANTIZED_DTYPES = {"INT8": torch.int8, "FP8": torch.float8_e4m3fn, "INT4": torch.int8}
"""Those of quantized weights, before they are dequantized: torch has no numbers of 4 bits."""

Tensor = Any
"""A tensor of the network (ITensor)."""

DynamicSize = Any
"""An int, or a network tensor of shape [1] and type int64 where the size is dynamic."""

Converter = Callable[["Lowering", fx.Node], Any]

CONVERTERS: dict[Any, Converter] = {}
"""The converter of each operator; a module of converters adds its own when it is imported."""


def converts(*targets: Any) -> Callable[[Converter], Converter]:
    """Register a converter: it gets the lowering and a node, and returns the node's value."""

    def register(function: Converter) -> Converter:
        for target in targets:
            if target in CONVERTERS:
                raise AssertionError(f"two converters of {target}")
            CONVERTERS[target] = function
        return function

    return register


class Lowering:
    """One rank graph on its way into one network.

    trt: the module. network: its INetworkDefinition, or what stands in for it. graph: the source.
    values: what each node has become: a network tensor, a size, or a number.
    constants: the memory of every constant by the name of its layer; TensorRT does not copy it, so
    this object must live until the engine is built. weights: the layer of each parameter.
    """

    def __init__(self, trt: Any, network: Any, graph: RankGraph) -> None:
        self.trt, self.network, self.graph = trt, network, graph
        self.values: dict[fx.Node, Any] = {}
        self.constants: dict[str, torch.Tensor] = {}
        self.weights: dict[str, str] = {}
        self.node: fx.Node | None = None
        self._dtypes = {dtype: getattr(trt.DataType, name) for name, dtype in DTYPES.items()}
        self._count = 0
        self._shapes: dict[str, Tensor] = {}

    # Layers

    def add(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """`network.<method>(...)`. TensorRT returns None where it refuses, and only logs why."""
        layer = getattr(self.network, method)(*args, **kwargs)
        if layer is None:
            shown = ", ".join(str(getattr(arg, "shape", arg)) for arg in args)
            raise self.error(f"TensorRT refused {method}({shown})")
        name = "constants" if self.node is None else self.node.name
        layer.name = f"{name}/{self._count}"
        self._count += 1
        return layer

    def out(self, method: str, *args: Any, **kwargs: Any) -> Tensor:
        """The first output of a new layer."""
        return self.add(method, *args, **kwargs).get_output(0)

    def error(self, what: str, remedy: str | None = None) -> ExportError:
        """An error at the node that is being converted."""
        return export_error(what, self.node, remedy)

    @contextmanager
    def at(self, node: fx.Node) -> Iterator[None]:
        """Layers and errors belong to `node`."""
        self.node = node
        yield
        self.node = None

    # Values

    def __getitem__(self, arg: Any) -> Any:
        """The value of an argument: of a node what it became, of anything else itself."""
        return self.values[arg] if isinstance(arg, fx.Node) else arg

    def dtype(self, dtype: torch.dtype) -> Any:
        """TensorRT's type."""
        if dtype not in self._dtypes:
            raise self.error(f"has type {dtype}, which no engine has")
        return self._dtypes[dtype]

    def constant(self, value: torch.Tensor, name: str | None = None) -> Tensor:
        """A constant; its memory is kept. name: of a parameter, by which an engine is refitted."""
        if value.dtype == torch.bool:
            return self.cast(self.constant(value.to(torch.int32)), torch.bool)
        kept = value.detach().contiguous()
        weights = self.trt.Weights(self.dtype(kept.dtype), kept.data_ptr(), kept.numel())
        layer = self.add("add_constant", tuple(kept.shape), weights)
        self.constants[layer.name] = kept
        if name is not None:
            if name in self.weights or not self.network.set_weights_name(weights, name):
                raise self.error(f"TensorRT has no one constant of the name {name}")
            self.weights[name] = layer.name
        return layer.get_output(0)

    def quantized_constant(self, values: torch.Tensor, kind: str) -> Tensor:
        """A constant of a type of QUANTIZED_DTYPES; of 4 bits the first of two is the lower half
        of a byte, as in ONNX."""
        kept = values.detach().contiguous()
        if kind == "INT4":
            low, high = (kept.reshape(-1, 2) & 15).to(torch.uint8).unbind(1)
            kept = low | high << 4
        trt_type = getattr(self.trt.DataType, kind)
        weights = self.trt.Weights(trt_type, kept.data_ptr(), values.numel())
        layer = self.add("add_constant", tuple(values.shape), weights)
        self.constants[layer.name] = kept
        return layer.get_output(0)

    def scalar(self, value: Any, dtype: torch.dtype, rank: int = 0) -> Tensor:
        """A number as a tensor of `rank` dims of size 1."""
        return self.constant(torch.full((1,) * rank, value, dtype=dtype))

    def cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """`tensor` in a type; itself where it has it."""
        if tensor.dtype == self.dtype(dtype):
            return tensor
        return self.out("add_cast", tensor, self.dtype(dtype))

    def with_rank(self, tensor: Tensor, rank: int) -> Tensor:
        """`tensor` with dims of size 1 in front, as broadcasting has them."""
        missing = rank - len(tensor.shape)
        if missing <= 0:
            return tensor
        axes = self.constant(torch.arange(missing))
        return self.out("add_unsqueeze", tensor, axes)

    def operand(self, arg: Any, dtype: torch.dtype, rank: int) -> Tensor:
        """An argument, number or node, as a tensor of this type and rank."""
        value = self[arg]
        if isinstance(value, (bool, int, float)):
            return self.scalar(value, dtype, rank)
        if isinstance(arg, fx.Node) and not isinstance(arg.meta["val"], torch.Tensor):
            value = self.cast(value, dtype)  # a dynamic size: [1]
            if rank == 0:
                value = self.out("add_squeeze", value, self.constant(torch.zeros(1).long()))
            return self.with_rank(value, rank)
        return self.with_rank(self.cast(value, dtype), rank)

    # Sizes

    def size(self, tensor: Tensor, dim: int) -> DynamicSize:
        extent = tensor.shape[dim]
        if extent >= 0:
            return int(extent)
        if tensor.name not in self._shapes:
            self._shapes[tensor.name] = self.out("add_shape", tensor)
        start = (dim % len(tensor.shape),)
        return self.out("add_slice", self._shapes[tensor.name], start, (1,), (1,))

    def sizes(self, sizes: Sequence[DynamicSize]) -> Tensor:
        """Sizes as one shape tensor; neighbours that are known become one constant."""
        parts: list[Tensor] = []
        known: list[int] = []
        for size in [*sizes, None]:
            if isinstance(size, int):
                known.append(size)
                continue
            if known:
                parts.append(self.constant(torch.tensor(known, dtype=torch.int64)))
                known = []
            if size is not None:
                parts.append(size)
        if len(parts) == 1:
            return parts[0]
        layer = self.add("add_concatenation", parts)
        layer.axis = 0
        return layer.get_output(0)

    def slice(
        self,
        tensor: Tensor,
        starts: Sequence[DynamicSize],
        sizes: Sequence[DynamicSize],
        steps: Sequence[int],
        fill: bool = False,
    ) -> Tensor:
        """add_slice; a dynamic start or size becomes an input of the layer. fill: zeros where the
        tensor has nothing."""
        fixed = [isinstance(s, int) for s in (*starts, *sizes)]
        rank = len(steps)
        zeros = (0,) * rank
        start = tuple(starts) if all(fixed[:rank]) else zeros
        size = tuple(sizes) if all(fixed[rank:]) else zeros
        more = []
        if not all(fixed[:rank]):
            more.append((1, self.sizes(starts)))
        if not all(fixed[rank:]):
            more.append((2, self.sizes(sizes)))
        layer = self.add("add_slice", tensor, start, size, tuple(steps))
        for index, value in more:
            layer.set_input(index, value)
        if fill:
            layer.mode = self.trt.SampleMode.FILL
        return layer.get_output(0)


_c10d = torch.ops._c10d_functional

COLLECTIVES: dict[Any, tuple[str, str]] = {
    _c10d.all_reduce.default: ("ALL_REDUCE", "SUM"),
    _c10d.all_gather_into_tensor.default: ("ALL_GATHER", "NONE"),
    _c10d.reduce_scatter_tensor.default: ("REDUCE_SCATTER", "SUM"),
    _c10d.all_to_all_single.default: ("ALL_TO_ALL", "NONE"),
}
"""Operation and reduction of each, by TensorRT's names."""


@converts(*COLLECTIVES)
def collective(low: Lowering, node: fx.Node) -> Tensor:
    """An engine has one communicator whatever `groups` says, so there must be one group, and the
    number of ranks must be said: an all-reduce of 1 rank builds and does nothing."""
    axis, given = low.graph.axis, node.args
    operation, reduction = COLLECTIVES[node.target]
    if given[-1] != axis.group:
        raise low.error(
            f"communicates in the group {given[-1]}; an engine has one group, {axis.group}"
        )
    if reduction == "SUM" and given[1] != "sum":
        raise low.error(f"reduces by {given[1]!r}; a rank graph reduces by sum")
    if operation == "ALL_GATHER" and given[1] != axis.size:
        raise low.error(f"gathers from {given[1]} ranks of {axis.size}")
    if operation in ("REDUCE_SCATTER", "ALL_TO_ALL"):
        _divisible(low, node)
    if operation == "ALL_TO_ALL":
        sizes = {str(size) for sizes in given[1:3] for size in sizes}  # type: ignore[union-attr]
        if len(sizes) != 1:
            raise low.error(f"sends blocks of different sizes: {sorted(sizes)}")
    layer = low.add(
        "add_dist_collective",
        low[given[0]],
        getattr(low.trt.CollectiveOperation, operation),
        getattr(low.trt.ReduceOperation, reduction),
        -1,
        None,
    )
    layer.num_ranks = axis.size
    return layer.get_output(0)


def _divisible(low: Lowering, node: fx.Node) -> None:
    source: Any = node.args[0]
    rows, n = source.meta["val"].shape[0], low.graph.axis.size
    if not isinstance(rows, int) and compat.size_expression(rows) % n == 0:
        return  # the ranks' parts in front of a dynamic size: n * batch
    if not isinstance(rows, int):
        raise low.error(
            f"splits a dim of dynamic size among {n} ranks",
            "Shard it otherwise, or give a static batch and sequence.",
        )
    if rows % n:
        raise low.error(f"splits {rows} rows among {n} ranks: {rows} % {n} != 0")
