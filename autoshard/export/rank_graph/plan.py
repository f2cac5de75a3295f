"""A model captured and planned once for all ranks, from which each rank's graph is made."""

from __future__ import annotations

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
from autoshard.config import Config
from autoshard.export.errors import ExportError, export_error
from autoshard.export.published_form import published_parts, state_tensors
from autoshard.export.quantization import quantized_parameters
from autoshard.export.rank_graph.attention_forms import (
    expand_attention,
    plain_attention,
    write_masks,
)
from autoshard.export.rank_graph.cache import (
    LENGTHS,
    keep_last_tokens,
    whole_graph,
    with_cache,
)
from autoshard.export.rank_graph.core_operators import reduce_to_core
from autoshard.export.rank_graph.encoder import ENCODED, TOKENS, split_encoder
from autoshard.export.rank_graph.example import traced_call
from autoshard.export.rank_graph.experts import run_cheaper_rows
from autoshard.export.rank_graph.graph import RankGraph, RankWeight
from autoshard.export.rank_graph.meta_copy import shadow
from autoshard.export.rank_graph.placeholders import Placeholders, read_placeholders
from autoshard.export.rank_graph.quantized import with_quantized_weights
from autoshard.export.rank_graph.tidy import on_cpu, propagate, tidy
from autoshard.export.serial_graph import parameter_names, scan_of, unwrapped
from autoshard.export.spec import EngineSpec
from autoshard.passes import Localize, rank_program
from autoshard.planning import value
from autoshard.planning.cost import cluster
from autoshard.program import Program
from autoshard.runtime import compat
from autoshard.runtime.agreement import agree
from autoshard.runtime.collectives import Axis
from autoshard.runtime.graph_meta import MUTATED
from autoshard.runtime.mesh import offline_mesh


@dataclass(frozen=True)
class InferencePlan:
    """A model captured and planned for the ranks of `spec`; see `plan_inference`.

    quantized: the parameters whose weights are quantized, see `quantized_parameters`.
    """

    program: Program
    spec: EngineSpec
    placeholders: Placeholders
    quantized: Mapping[str, int] = field(default_factory=dict)

    @property
    def tp(self) -> int:
        """The number of ranks."""
        return self.spec.tp

    def rank_graph(self, rank: int) -> RankGraph:
        """The graph of one rank. Raises ExportError for what no engine can hold."""
        graph = self._whole_weights(rank)
        if self.spec.quantize is None:
            return graph
        return with_quantized_weights(graph, self.spec.quantize, self.quantized)

    def _whole_weights(self, rank: int) -> RankGraph:
        """The graph of one rank, its weights in the dtype that is computed in."""
        self._check()
        program, names, spec = self.program, self.placeholders, self.spec
        axis = offline_mesh({"tp": self.tp}, rank).axis("tp")
        local = rank_program(program.serial, (Localize(program.decisions),), axis)[0]
        given = [node.meta["val"] for node in _placeholders(local)]
        mode = next(val.fake_mode for val in given if hasattr(val, "fake_mode"))
        module = reduce_to_core(local, on_cpu(local, mode), mode)
        weights, constants = names.rename(
            module, _placeholders(program.serial), program.decisions.stored
        )
        inputs = [str(n.target) for n in _placeholders(module) if n.target in names.inputs.values()]
        tidy(module, set(inputs))
        longest = {name: extent.maximum for name, extent in spec.extents.items()}
        ports = dict.fromkeys(inputs, "input")
        if spec.max_length is None:
            sights = plain_attention(module, constants, names.sizes, longest)
            write_masks(module.graph, sights)
            propagate(module, mode)
            return self._finished(module, mode, ports, weights, constants, axis)
        longest["sequence"] = most = spec.max_length
        symbol = next((s for s, name in names.sizes.items() if name == "sequence"), None)
        encoder, handed = None, list[str]()
        if TOKENS in ports and len(ports) > 1 and symbol is not None:
            encoding, handed = split_encoder(module, inputs, symbol)
            del ports[TOKENS]
            encoder = self._encoder(encoding, mode, ports, weights, constants, axis)
            ports = {TOKENS: "input"}
        whole, whole_constants = whole_graph(module), dict(constants)
        sights = plain_attention(module, constants, names.sizes, longest)
        roles = with_cache(module, [*ports, *handed], constants, names.sizes, sights, most, mode)
        propagate(module, mode)
        if not spec.all_logits and symbol is not None:
            outputs = len(module.graph.output_node().args[0]) - (len(roles) - 1)  # type: ignore[arg-type]
            last = keep_last_tokens(module, LENGTHS, symbol, outputs, mode)
            roles = {LENGTHS: roles[LENGTHS], **last, **roles}
            propagate(module, mode)
        ports = {**ports, **roles, **dict.fromkeys(handed, ENCODED)}
        graph = self._finished(module, mode, ports, weights, constants, axis)
        return replace(graph, whole=whole, whole_constants=whole_constants, encoder=encoder)

    def _encoder(
        self,
        module: fx.GraphModule,
        mode: Any,
        ports: Mapping[str, str],
        weights: Mapping[str, RankWeight],
        constants: Mapping[str, torch.Tensor],
        axis: Axis,
    ) -> RankGraph:
        """The graph that `split_encoder` made, as any other without a cache."""
        longest = {name: extent.maximum for name, extent in self.spec.extents.items()}
        write_masks(
            module.graph, plain_attention(module, constants, self.placeholders.sizes, longest)
        )
        propagate(module, mode)
        graph = self._finished(module, mode, ports, dict(weights), dict(constants), axis)
        named = [
            replace(p, name=f"{ENCODED}_{i}", role=ENCODED) for i, p in enumerate(graph.outputs)
        ]
        symbols = {name: extent for name, extent in graph.symbols.items() if name != "sequence"}
        return replace(graph, outputs=tuple(named), symbols=symbols, max_length=None)

    def _finished(
        self,
        module: fx.GraphModule,
        mode: Any,
        ports: Mapping[str, str],
        weights: dict[str, RankWeight],
        constants: dict[str, torch.Tensor],
        axis: Axis,
    ) -> RankGraph:
        """ports: the role of each input, in order. What the module does not read goes."""
        run_cheaper_rows(module, self.placeholders.sizes, self.spec)
        expand_attention(module, constants)
        propagate(module, mode)
        module.graph.eliminate_dead_code()
        for node in _placeholders(module):
            if not node.users and (node.target in weights or node.target in constants):
                module.graph.erase_node(node)
        module.recompile()
        by_name = {str(node.target): node for node in _placeholders(module)}
        caches = {name: role for name, role in ports.items() if role.endswith("cache")}
        names = self.placeholders
        return RankGraph(
            module=module,
            inputs=tuple(names.port(by_name[name], role) for name, role in ports.items()),
            outputs=names.output_ports(module, caches),
            weights={name: one for name, one in weights.items() if name in by_name},
            constants={name: one for name, one in constants.items() if name in by_name},
            symbols=self.spec.extents,
            sizes=names.sizes,
            axis=axis,
            max_length=self.spec.max_length,
        )

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
        if scan is not None and "sequence" in self.placeholders.sizes.values():
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
        nodes = _placeholders(program.serial)
        found = read_placeholders(nodes, inputs, names, arguments, values)
        plans.append(InferencePlan(program, spec, found, quantized))
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


def _placeholders(module: fx.GraphModule) -> list[fx.Node]:
    return list(module.graph.find_nodes(op="placeholder"))
