"""`autoshard.export.onnx`: a model becomes a directory of ONNX models, one a rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoshard.export.destination import Progress
from autoshard.export.rank_graph import RankGraph, file_digest, write_ranks
from autoshard.export.spec import EngineSpec, Example
from autoshard.export.to_onnx.model import DOMAIN, OPERATOR, OPSET, check_onnx, onnx_program


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
        """See Format."""
        check_onnx(graph)

    def make(self, graph: RankGraph, weights: Mapping[str, torch.Tensor]) -> Any:
        """See Format."""
        return onnx_program(graph, weights)

    def runner(self, made: Any, graph: RankGraph) -> None:
        """See Format: torch translates each operator of the graph by itself."""

    def write(self, made: Any, file: Path) -> Mapping[str, Any]:
        """See Format."""
        held = sum(value.const_value.nbytes for value in made.model.graph.initializers.values())
        made.save(file, external_data=held > self.external_bytes)
        data = file.with_name(f"{file.name}.data")
        if not data.exists():
            return {}
        return {"data": {"file": data.name, "sha256": file_digest(data)}}

    def describe(self, graph: RankGraph) -> Mapping[str, Any]:
        """See Format."""
        exporter = {"module": "torch.onnx", "version": torch.__version__, "opset": OPSET}
        return {"exporter": exporter, "collectives": {"domain": DOMAIN, "operator": OPERATOR}}
