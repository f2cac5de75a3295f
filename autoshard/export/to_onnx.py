"""`autoshard.export.onnx`: a model becomes a directory of ONNX models, one a rank.

In a rank's model collectives are `DistCollective` nodes, all else is standard ONNX.
torch's own exporter translates, operator by operator, so that nothing of it is shared with the
converters in `autoshard.export.to_tensorrt`: where the two answer alike, neither has misread the
graph. The nodes are as TensorRT's ONNX parser reads them: lower-case names of the operation and
the reduction, `root` -1, the number of ranks in `nb_rank`, one group, which is not written.
"""

import importlib
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from autoshard.export.destination import Progress
from autoshard.export.errors import export_error
from autoshard.export.rank_graph import Port, RankGraph, file_digest, write_ranks
from autoshard.export.spec import EngineSpec, Example


def onnx(
    model: nn.Module,
    directory: str | Path,
    *,
    mesh: Mapping[str, int],
    example: Example | None = None,
    dtype: str | torch.dtype | None = "float16",
    dynamic: Mapping[str, tuple[int, int, int]] | None = None,
    max_length: int | None = None,
    all_logits: bool = False,
    hardware: str = "h100",
    external_bytes: int = 2**30,
    progress: Progress | None = None,
) -> Path:
    """Write `config.json` and `rank{r}.onnx` for each rank of `mesh`; return the directory.

    Collectives are `DistCollective` nodes of the domain "autoshard", which TensorRT's parser reads;
    all else is standard ONNX. external_bytes: where a rank's weights are more bytes than this, they
    are in `rank{r}.onnx.data` beside the model; a file of ONNX may have no more than 2 GiB.

    For the other arguments, and what is written when, see `autoshard.export.tensorrt`. Raises
    ExportError, before any file is written, for a mesh with another axis, where the extra `onnx` is
    missing, for an operator torch cannot translate, and for what no cache can continue.
    """
    spec = EngineSpec(
        mesh=mesh,
        example=example,
        dtype=dtype,
        dynamic=dynamic,
        max_length=max_length,
        all_logits=all_logits,
        hardware=hardware,
    )
    return write_ranks(Models(external_bytes), model, directory, spec, progress)


@dataclass
class Models:
    """The format `autoshard-onnx`."""

    external_bytes: int
    name: str = "autoshard-onnx"
    version: int = 1
    suffix: str = ".onnx"

    def check(self, graph: RankGraph) -> None:
        check_onnx(graph)

    def make(self, graph: RankGraph, weights: Mapping[str, torch.Tensor]) -> Any:
        return onnx_program(graph, weights)

    def runner(self, made: Any, graph: RankGraph) -> None:
        """See Format: torch translates each operator of the graph by itself."""

    def write(self, made: Any, file: Path) -> Mapping[str, Any]:
        held = sum(value.const_value.nbytes for value in made.model.graph.initializers.values())
        made.save(file, external_data=held > self.external_bytes)
        data = file.with_name(f"{file.name}.data")
        if not data.exists():
            return {}
        return {"data": {"file": data.name, "sha256": file_digest(data)}}

    def describe(self, graph: RankGraph) -> Mapping[str, Any]:
        exporter = {"module": "torch.onnx", "version": torch.__version__, "opset": OPSET}
        return {"exporter": exporter, "collectives": {"domain": DOMAIN, "operator": OPERATOR}}


DOMAIN, OPERATOR, OPSET = "autoshard", "DistCollective", 23

aten = torch.ops.aten
_c10d = torch.ops._c10d_functional
_EXAMPLE = {"batch": 3, "sequence": 7}


def onnx_program(graph: RankGraph, weights: Mapping[str, torch.Tensor]) -> Any:
    """The `torch.onnx.ONNXProgram` of one rank, its weights inside.

    weights: this rank's parts, by placeholder. Inputs and outputs are named as the engine's, and
    dynamic dims "batch" and "sequence". Raises ExportError where the extra `onnx` is missing, for a
    collective that is not of the engine's one group, and for what torch cannot translate.
    """
    check_onnx(graph)
    module = _bound(graph, weights)
    examples = tuple(example_input(port) for port in graph.inputs)
    sizes = tuple(
        {dim: torch.export.Dim.AUTO for dim, size in enumerate(port.shape) if isinstance(size, str)}
        for port in graph.inputs
    )
    with _quiet(), torch.no_grad():
        try:
            program = torch.onnx.export(
                torch.export.export(module, examples, dynamic_shapes=sizes),
                dynamo=True,
                input_names=[port.tensor for port in graph.inputs],
                output_names=[port.tensor for port in graph.outputs],
                opset_version=OPSET,
                optimize=True,
                verbose=False,
            )
        except RuntimeError as error:  # of the trace, or an OnnxExporterError of the translation
            cause = str(error.__cause__ or error).strip().splitlines()[0]
            raise export_error(f"torch cannot translate the graph to ONNX: {cause}") from error
    assert program is not None
    made = program.model.graph
    for values, ports in ((made.inputs, graph.inputs), (made.outputs, graph.outputs)):
        for value, port in zip(values, ports, strict=True):
            assert value.shape is not None
            for dim, size in enumerate(port.shape):
                if isinstance(size, str):
                    value.shape[dim] = size
    return program


def check_onnx(graph: RankGraph) -> None:
    """Raise ExportError where `onnx_program` would, before it translates anything."""
    for name in ("onnx", "onnxscript"):
        try:
            importlib.import_module(name)
        except ImportError:
            raise export_error(
                f"{name} is not installed", remedy="pip install 'autoshard[onnx]'."
            ) from None
    for node in graph.module.graph.nodes:
        collective = getattr(node.target, "namespace", "") == "_c10d_functional"
        if collective and node.args[-1] != graph.axis.group:
            raise export_error(
                f"communicates in the group {node.args[-1]}; an engine has one group, "
                f"{graph.axis.group}",
                node,
            )


def _bound(graph: RankGraph, weights: Mapping[str, torch.Tensor]) -> fx.GraphModule:
    """The graph with weights and constants as buffers, so that only ports are inputs."""
    held = {**graph.constants, **weights}
    root, copy = nn.Module(), fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    for node in graph.module.graph.nodes:
        if node.op == "placeholder" and node.target in held:
            root.register_buffer(str(node.target), held[str(node.target)])
            known[node] = copy.get_attr(str(node.target))
        elif node.target in _COLLECTIVES:
            given = (known[node.args[0]], *_COLLECTIVES[node.target], graph.tp)
            known[node] = copy.call_function(_collective, given)
        else:
            new = known[node] = copy.node_copy(node, known.__getitem__)
            if node.target is aten.topk.default:  # evaluators have it sorted only
                new.args = (*new.args[:4], *(-1, True)[len(new.args) - 2 :], True)
    return fx.GraphModule(root, copy)


def example_input(port: Port) -> torch.Tensor:
    shape = [size if isinstance(size, int) else _EXAMPLE[size] for size in port.shape]
    return torch.zeros(shape, dtype=port.dtype)


_COLLECTIVES: dict[Any, tuple[str, str]] = {
    _c10d.all_reduce.default: ("all_reduce", "sum"),
    _c10d.all_gather_into_tensor.default: ("all_gather", "none"),
    _c10d.reduce_scatter_tensor.default: ("reduce_scatter", "sum"),
    _c10d.all_to_all_single.default: ("all_to_all", "none"),
}


def _collective(x: torch.Tensor, operation: str, reduction: str, ranks: int) -> torch.Tensor:
    """One of torch's collectives as a DistCollective node of `ranks` ranks."""
    shape = list(x.shape)
    if operation == "all_gather":
        shape[0] *= ranks
    elif operation == "reduce_scatter":
        shape[0] //= ranks
    return torch.onnx.ops.symbolic(
        f"{DOMAIN}::{OPERATOR}",
        (x,),
        dict(collective_operation=operation, reduce_op=reduction, root=-1, nb_rank=ranks),
        dtype=x.dtype,
        shape=shape,
        version=1,
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch's exporter says of itself: deprecations, absent torchvision."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)
