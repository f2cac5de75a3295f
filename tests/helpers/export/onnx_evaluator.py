"""ONNX models of all ranks run on the CPU by ONNX's reference evaluator, in lockstep."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from autoshard.export.errors import export_error
from autoshard.export.to_onnx import DOMAIN, OPERATOR
from autoshard.runtime import collectives
from autoshard.runtime.collectives import Axis

_REDUCE: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.sum,
    "prod": torch.prod,
    "max": torch.amax,
    "min": torch.amin,
}


def evaluate(
    models: Sequence[Any],
    feeds: Sequence[Mapping[str, torch.Tensor]],
    held: Sequence[Mapping[str, torch.Tensor]] | None = None,
) -> list[list[dict[str, torch.Tensor]]]:
    """For each rank, the outputs of each of `feeds`, which every rank gets, beside its own `held`.

    models: of the ranks, in order. The output `<cache>_out` becomes the input `<cache>` of the next
    feed; the first begins with zeros. Raises ExportError where a collective is not of all ranks.
    Models of float32 and float16: the evaluator has no products of bfloat16.
    """
    reference = importlib.import_module("onnx.reference")

    def work(axis: Axis) -> list[dict[str, torch.Tensor]]:
        model = models[axis.rank]
        runner = reference.ReferenceEvaluator(
            model, new_ops=[_collective(axis), _gather_elements()]
        )
        names = [output.name for output in model.graph.output]
        caches: dict[str, torch.Tensor] = {}
        results = []
        for feed in feeds:
            rows = next(iter(feed.values())).shape[0]
            feed = {**feed, **(held[axis.rank] if held else {})}
            for given in model.graph.input:
                if given.name not in feed and given.name not in caches:
                    caches[given.name] = _zeros(given, rows)
            arrays = {name: _array(tensor) for name, tensor in {**feed, **caches}.items()}
            out = dict(zip(names, map(_tensor, runner.run(None, arrays)), strict=True))
            caches = {name: out[f"{name}_out"] for name in caches}
            results.append(out)
        return results

    return collectives.run_ranks(len(models), work, timeout=300)


def collectives_of(model: Any) -> list[tuple[str, str, int, int]]:
    """(operation, reduction, root, number of ranks) of each collective of a model, in order."""
    found = []
    for node in model.graph.node:
        if node.op_type == OPERATOR:
            given = {a.name: a.s.decode() if a.s else a.i for a in node.attribute}
            names = ("collective_operation", "reduce_op", "root", "nb_rank")
            found.append(tuple(given[name] for name in names))
    return found


def _collective(axis: Axis) -> Any:
    """The evaluator's DistCollective for one rank: it does what the node's attributes say."""
    base: Any = importlib.import_module("onnx.reference.op_run").OpRun

    def run(
        self: Any, x: Any, collective_operation: str, reduce_op: str, root: int, nb_rank: int
    ) -> tuple[Any]:
        if (nb_rank, root) != (axis.size, -1):
            raise export_error(
                f"{collective_operation} of {nb_rank} ranks with root {root}, on {axis.size} ranks"
            )
        parts = collectives.exchange(axis, collective_operation, _tensor(x))
        if collective_operation == "all_gather":
            return (_array(torch.cat(parts)),)
        if collective_operation == "all_to_all":
            return (_array(torch.cat([p.chunk(axis.size)[axis.rank] for p in parts])),)
        result = _REDUCE[reduce_op](torch.stack(parts), 0)
        if collective_operation == "reduce_scatter":
            result = result.chunk(axis.size)[axis.rank]
        return (_array(result),)

    return type(OPERATOR, (base,), {"op_domain": DOMAIN, "_run": run})


def _gather_elements() -> Any:
    """GatherElements as the standard has it; the evaluator's own takes at most 64 rows of dim 0."""
    base: Any = importlib.import_module("onnx.reference.op_run").OpRun

    def run(self: Any, data: Any, indices: Any, axis: int = 0) -> tuple[Any]:
        found = torch.gather(_tensor(data), axis, _tensor(indices).long())
        return (_array(found),)

    return type("GatherElements", (base,), {"op_domain": "", "_run": run})


def _zeros(value: Any, rows: int) -> torch.Tensor:
    helper = importlib.import_module("onnx.helper")
    kind = value.type.tensor_type
    shape = [rows if dim.dim_param else dim.dim_value for dim in kind.shape.dim]
    name = helper.tensor_dtype_to_string(kind.elem_type).rpartition(".")[2].lower()
    return torch.zeros(shape, dtype={"float": torch.float32, "float16": torch.float16}[name])


def _array(tensor: torch.Tensor) -> Any:
    return tensor.contiguous().numpy()


def _tensor(array: Any) -> torch.Tensor:
    return torch.from_numpy(array.copy())
