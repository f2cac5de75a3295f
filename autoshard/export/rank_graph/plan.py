"""A model captured and planned once for all ranks, from which each rank's graph is made.

The passes over a rank's graph for export: their order in one literal tuple, and their runner.

They follow `localize` of the passes that training has, whose contract is theirs: each is a frozen
dataclass, keeps the graph in place, computes the values of the nodes it makes, and reports.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from autoshard.building import build_program, comparison, digest_of
from autoshard.capture import intercept
from autoshard.compiling import DebugWatch, settings
from autoshard.config import Config
from autoshard.export.errors import ExportError, export_error
from autoshard.export.published_form import published_parts, state_tensors
from autoshard.export.quantization import quantized_parameters
from autoshard.export.rank_graph.attention_forms import (
    ExpandAttention,
    FuseWritten,
    PlainAttention,
    WriteMasks,
)
from autoshard.export.rank_graph.cache import KeepLastTokens, WithCache, whole_graph
from autoshard.export.rank_graph.chosen_rows import RunCheaperRows
from autoshard.export.rank_graph.core_operators import ReduceToCore
from autoshard.export.rank_graph.encoder import ENCODED, TOKENS, SplitEncoder
from autoshard.export.rank_graph.evaluation import symbol_of
from autoshard.export.rank_graph.graph import RankGraph, inputs_of, read_rank_graph
from autoshard.export.rank_graph.tidy import (
    DropUnread,
    InputOrigin,
    NamePlaceholders,
    Tidy,
    read_origins,
)
from autoshard.export.rank_graph.traced_model import shadow, traced_call
from autoshard.export.rank_graph.weights import QuantizeWeights
from autoshard.export.serial_graph import parameter_names, scan_of, unwrapped
from autoshard.export.spec import EngineSpec
from autoshard.passes import (
    SILENT,
    Context,
    Localize,
    Pass,
    Report,
    Stage,
    Watch,
    rank_program,
    run_stage,
)
from autoshard.planning import value
from autoshard.planning.cost import cluster
from autoshard.program import Program
from autoshard.runtime import compat
from autoshard.runtime.agreement import agree
from autoshard.runtime.collectives import Axis
from autoshard.runtime.graph_meta import ENCODER, MUTATED
from autoshard.runtime.mesh import offline_mesh

PIPELINE = (
    # one rank's local graph, as `localize` left it
    Stage("core", (ReduceToCore, NamePlaceholders, Tidy)),
    # that of an encoder-decoder, where its decoder gets a cache
    Stage("encoder", (SplitEncoder,)),
    # every graph, an encoder's of its own too
    Stage("attention", (FuseWritten, PlainAttention)),
    # a graph of whole sequences
    Stage("whole", (WriteMasks,)),
    # one with a key-value cache instead
    Stage("cache", (WithCache, KeepLastTokens)),
    # every graph
    Stage("layers", (RunCheaperRows, ExpandAttention, DropUnread)),
    # every graph, where weights are quantized; also what a cache is compared with
    Stage("weights", (QuantizeWeights,)),
)


class ExportWatch(DebugWatch):
    """Dumps and logs the passes of an export as those of a program; none is left out."""

    def runs(self, name: str) -> bool:
        """Always: what AUTOSHARD_DISABLE and AUTOSHARD_STOP_AFTER name are passes of a program."""
        return True


def rewrite(
    gm: fx.GraphModule,
    passes: Sequence[Pass],
    axis: Axis,
    watch: Watch = SILENT,
    phase: str = "",
) -> list[Report]:
    """Run passes over a rank's graph, in place and in the order of PIPELINE."""
    reports = []
    for stage in PIPELINE:
        mine = [one for one in passes if type(one) in stage.passes]
        if mine:
            reports += run_stage(stage.name, mine, gm, Context(axis), watch, phase, PIPELINE)
    return reports


@dataclass(frozen=True)
class InferencePlan:
    """A model captured and planned for the ranks of `spec`; see `plan_inference`.

    origins: what each placeholder of the serial graph stands for. sizes: the name of each symbol.
    quantized: the parameters whose weights are quantized, see `quantized_parameters`.
    """

    program: Program
    spec: EngineSpec
    origins: Sequence[InputOrigin]
    sizes: Mapping[str, str]
    quantized: Mapping[str, int] = field(default_factory=dict)

    @property
    def tp(self) -> int:
        """The number of ranks."""
        return self.spec.tp

    def rank_graph(self, rank: int) -> RankGraph:
        """The graph of one rank. Raises ExportError for what no engine can hold."""
        self._check()
        axis = offline_mesh({"tp": self.tp}, rank).axis("tp")
        watch = ExportWatch(settings(), (axis,))
        program, length = self.program, self.spec.max_length
        module = rank_program(program.serial, (Localize(program.decisions),), axis, watch)[0]

        def run(gm: fx.GraphModule, passes: Sequence[Pass], phase: str = "") -> None:
            rewrite(gm, passes, axis, watch, phase)

        run(module, (ReduceToCore(), NamePlaceholders(self.origins), Tidy()))
        encoder = whole = None
        if length is None:
            run(module, self._passes(None))
        else:
            sequence = symbol_of(self.sizes, "sequence")
            given = [node.target for node in inputs_of(module.graph)]
            if TOKENS in given and len(given) > 1 and sequence is not None:
                run(module, (SplitEncoder(sequence),))
                run(encoding := module.meta.pop(ENCODER), self._passes(None), "encoder")
                encoder = self._encoder(encoding, axis)
            whole = whole_graph(module)
            run(whole, self._quantized(), "whole")
            run(module, self._passes(length))
        return read_rank_graph(module, self.spec, self.sizes, axis, whole, encoder)

    def _passes(self, length: int | None) -> list[Pass]:
        """What makes an engine's graph of one that is reduced to core operators. length: tokens
        that its cache holds, None for none."""
        longest = {name: extent.maximum for name, extent in self.spec.extents.items()}
        found: list[Pass] = [FuseWritten(), RunCheaperRows(self.sizes, self.spec)]
        found += [ExpandAttention(), DropUnread(), *self._quantized()]
        if length is None:
            return [*found, PlainAttention(self.sizes, longest), WriteMasks()]
        found += [PlainAttention(self.sizes, {**longest, "sequence": length})]
        found += [WithCache(self.sizes, length)]
        sequence = symbol_of(self.sizes, "sequence")
        if not self.spec.all_logits and sequence is not None:
            found += [KeepLastTokens(sequence)]
        return found

    def _quantized(self) -> list[Pass]:
        kind = self.spec.quantize
        return [] if kind is None else [QuantizeWeights(kind, self.quantized)]

    def _encoder(self, module: fx.GraphModule, axis: Axis) -> RankGraph:
        """The graph that `split_encoder` took out, as any other without a cache."""
        graph = read_rank_graph(module, self.spec, self.sizes, axis)
        named = [
            replace(p, name=f"{ENCODED}_{i}", role=ENCODED) for i, p in enumerate(graph.outputs)
        ]
        symbols = {name: extent for name, extent in graph.symbols.items() if name != "sequence"}
        return replace(graph, outputs=tuple(named), symbols=symbols, max_length=None)

    def check_same(self, job: Axis) -> None:
        """Raise ExportError on every rank of the job where their plans differ: engines of
        different plans would hang, or be wrong together."""
        tensors = {name: value(node) for node, name in self.program.parameters.items()}
        lines = comparison(self.program, str(self.spec.hardware), tensors).lines()
        agree("plan of the engines", digest_of(lines), lines, job, error=ExportError)

    def _check(self) -> None:
        """Refuse random numbers, mutation, and a scan of no known length."""
        if self.program.serial.meta.get(MUTATED):
            raise export_error("the model writes to one of its inputs or buffers in forward")
        for node in self.program.serial.graph.nodes:
            if getattr(node.target, "namespace", "") == "autoshard":
                raise export_error("draws random numbers, which no engine does", node)
        scan = scan_of(self.program.serial.graph.nodes)
        if scan is not None and "sequence" in self.sizes.values():
            raise export_error(
                "a state-space model scans its sequence in steps of one length's number, and its "
                "state is in no cache",
                scan,
                "Leave 'sequence' out of dynamic, and give no max_length; or export a Hugging Face "
                "directory.",
            )


def plan_inference(model: nn.Module, spec: EngineSpec) -> InferencePlan:
    """Capture `model` in eval mode without gradients, and plan it for the ranks of `spec`.

    Only dims that the ranks divide are split, since all engines of a mesh have one form: of a
    vocabulary of another size each rank holds the whole, or a part of another dim. The model is
    neither run nor changed. Raises what torch.compile(fullgraph=True) raises where it
    breaks the graph, and ExportError.
    """
    model = unwrapped(model)
    quantized: Mapping[str, int] = {}
    if spec.quantize is not None:
        parts = published_parts(model, state_tensors(model, spec.weight_dtype))
        quantized = quantized_parameters(model, parts, spec.quantize)
    call = traced_call(model, spec)
    traced, values = shadow(model, spec.weight_dtype)
    names = parameter_names(traced)
    arguments = {id(leaf) for leaf in pytree.tree_leaves(call)}
    config = Config(mesh={"tp": spec.tp}, sequence_parallel=False, outputs="replicate")
    machine, mesh = cluster(spec.hardware), offline_mesh({"tp": spec.tp}, 0)
    plans: list[InferencePlan] = []

    def plan(
        gm: fx.GraphModule, example: Sequence[Any], inputs: list[compat.GraphInput]
    ) -> Program:
        program = build_program(gm, example, inputs, mesh, config, machine, even=True)
        nodes, stored = program.serial.graph.find_nodes(op="placeholder"), program.decisions.stored
        found = read_origins(nodes, inputs, names, arguments, values, stored)
        plans.append(InferencePlan(program, spec, *found, quantized))
        return program

    with torch.no_grad(), _explaining_devices():
        intercept(traced, (), call, plan, dynamic=False)
    return plans[0]


_DEVICES = r"device='cpu'.* got |devices,? (cpu and|\w+(:\d+)? and cpu|cpu, )"


@contextmanager
def _explaining_devices() -> Iterator[None]:
    """Torch's error of a tensor of another device becomes one that says whose it is."""
    try:
        yield
    except RuntimeError as error:
        if not re.search(_DEVICES, str(error), re.DOTALL):
            raise
        raise export_error(
            "the model makes a tensor on a device of its own, and is traced on the CPU",
            remedy="Make it where an input is, torch.arange(n, device=x.device), or name no "
            f"device. It was traced to:\n{error}",
        ) from error
