"""One rank's inference graph: few operators, its own weights, one process group, named ports.

`plan_inference` captures and plans a model once; `InferencePlan.rank_graph(r)` is what rank r
runs, for a lowering to any engine:

- operators are those of `core_operators.CORE` and of `operators` (attention, update_cache);
- placeholders are the inputs, then this rank's parts of the weights, then constants;
- a size is an int, or a `sym_size` of an input, or integer arithmetic on those;
- a collective names one process group, that of the axis tp.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from autoshard.build import build_program
from autoshard.capture import intercept
from autoshard.config import Config
from autoshard.export.errors import export_error
from autoshard.export.rank_graph.core_operators import reduce_to_core
from autoshard.export.rank_graph.meta_copy import shadow
from autoshard.export.rank_graph.plain_attention import plain_attention
from autoshard.export.rank_graph.tidy import on_cpu, propagate, tidy
from autoshard.export.rank_graph.with_cache import with_cache
from autoshard.export.serial_graph import unwrapped
from autoshard.passes import Localize
from autoshard.planning import producer
from autoshard.planning.cost import hardware as known_hardware
from autoshard.program import Program
from autoshard.runtime import compat
from autoshard.runtime.collectives import Axis, State, shard_dim
from autoshard.runtime.mesh import offline_mesh

AXES = ("batch", "sequence")
"""Names of the first dims of the inputs that may vary."""


@dataclass(frozen=True)
class Extent:
    """The sizes a dynamic dim may have."""

    minimum: int
    optimum: int
    maximum: int


@dataclass(frozen=True)
class Port:
    """An input or an output. shape: sizes, or names of dynamic dims or expressions of them.

    role: "input", "output", "lengths" (how many tokens of each row are cached, int32 [batch]),
    "key_cache", "value_cache" (inputs, and the outputs of the same name that are their memory).
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int | str, ...]
    role: str
    output: bool = False

    @property
    def tensor(self) -> str:
        """The name of the engine's tensor: that of an updated cache is not that of the cache."""
        return f"{self.name}_out" if self.output and self.role.endswith("cache") else self.name


@dataclass(frozen=True)
class Weight:
    """A parameter of the model. name: as in `named_parameters()`. shape: of the whole. state: how
    this rank's part is cut from it on the axis tp, R or S(dim). dtype: that of the engine."""

    name: str
    shape: tuple[int, ...]
    state: State
    dtype: torch.dtype


@dataclass(frozen=True)
class RankGraph:
    """See the module's text.

    weights, constants: by the target of their placeholder. symbols: the dynamic dims by name.
    sizes: the name of each symbol of the placeholders' fake values. axis: tp, as this rank sees
    it; its `group` is what collectives name. max_length: tokens a cache holds, None without one.
    """

    module: fx.GraphModule
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    weights: Mapping[str, Weight]
    constants: Mapping[str, torch.Tensor]
    symbols: Mapping[str, Extent]
    axis: Axis
    max_length: int | None = None
    sizes: Mapping[str, str] = field(default_factory=dict)

    @property
    def tp(self) -> int:
        """The number of ranks."""
        return self.axis.size

    @property
    def rank(self) -> int:
        """This rank's number."""
        return self.axis.rank


@dataclass(frozen=True)
class InferencePlan:
    """A model captured and planned for `tp` ranks; see `plan_inference`."""

    program: Program
    inputs: Mapping[str, str]  # name of each of the caller's inputs, by placeholder
    weights: Mapping[str, str]  # name of each parameter, by placeholder
    constants: Mapping[str, torch.Tensor]
    symbols: Mapping[str, Extent]
    sizes: Mapping[str, str]
    tp: int
    max_length: int | None

    def rank_graph(self, rank: int) -> RankGraph:
        """The graph of one rank. Raises ExportError for what no engine can hold."""
        axis = offline_mesh({"tp": self.tp}, rank).axis("tp")
        self._check()
        local = Localize(self.program.serial, self.program.decisions, axis).run()
        if self.program.serial.meta.get("mutated"):
            raise export_error("the model writes to one of its inputs or buffers in forward")
        given = [n for n in local.graph.nodes if n.op == "placeholder"]
        mode = next(v.fake_mode for n in given if hasattr(v := n.meta["val"], "fake_mode"))
        module = reduce_to_core(local, on_cpu(local, mode), mode)
        serial = [n for n in self.program.serial.graph.nodes if n.op == "placeholder"]
        weights, constants = self._name_placeholders(module, serial)
        tidy(module, set(self.inputs.values()))
        proven = {name: extent.maximum for name, extent in self.symbols.items()}
        if self.max_length is not None:
            proven["sequence"] = self.max_length
        plain_attention(module, constants, self.sizes, proven)
        ports = [self._port(n) for n in module.graph.find_nodes(op="placeholder")]
        inputs = [port for port in ports if port.name in self.inputs.values()]
        roles: dict[str, str] = {}
        if self.max_length is not None:
            roles = with_cache(module, inputs[0].name, self.max_length, mode)
        propagate(module, mode)
        module.graph.eliminate_dead_code()
        for node in module.graph.find_nodes(op="placeholder"):
            if not node.users and (node.target in weights or node.target in constants):
                weights.pop(str(node.target), None)
                constants.pop(str(node.target), None)
                module.graph.erase_node(node)
        module.recompile()
        by_name = {str(n.target): n for n in module.graph.find_nodes(op="placeholder")}
        return RankGraph(
            module,
            (*inputs, *(self._port(by_name[name], role) for name, role in roles.items())),
            self._outputs(module, roles),
            weights,
            constants,
            self.symbols,
            axis,
            self.max_length,
            self.sizes,
        )

    def _check(self) -> None:
        """Refuse random numbers, and ranks of different shapes: each would need padding."""
        decisions = self.program.decisions
        for node in self.program.serial.graph.nodes:
            if getattr(node.target, "namespace", "") == "autoshard":
                raise export_error("draws random numbers, which no engine does", node)
            val = node.meta.get("val")
            if producer(node)[0] not in decisions.strategies or not isinstance(val, torch.Tensor):
                continue
            dim = shard_dim(decisions.state(node))
            size = 0 if dim is None else val.shape[dim]
            if isinstance(size, int) and size % self.tp:
                name = self.weights.get(node.name)
                what = f"size {size} of dim {dim}" + (f" of {name}" if name else "")
                raise export_error(
                    f"{what} is split among {self.tp} ranks: {size} % {self.tp} != 0",
                    node,
                    "Pad it to a multiple, or export for another number of ranks.",
                )

    def _name_placeholders(
        self, module: fx.GraphModule, serial: Sequence[fx.Node]
    ) -> tuple[dict[str, Weight], dict[str, torch.Tensor]]:
        """Give placeholders the names of what they are; sizes, which inputs tell, go."""
        weights: dict[str, Weight] = {}
        constants: dict[str, torch.Tensor] = {}
        states = self.program.decisions.stored
        new = list(module.graph.find_nodes(op="placeholder"))
        for node, like in zip(new, serial, strict=True):
            if like.name in self.inputs:
                node.target = self.inputs[like.name]
            elif like.name in self.weights:
                node.target = f"weight_{len(weights)}"
                val = like.meta["val"]
                weights[node.target] = Weight(
                    self.weights[like.name], tuple(val.shape), states[like], val.dtype
                )
            elif like.name in self.constants:
                node.target = f"constant_{len(constants)}"
                constants[node.target] = self.constants[like.name]
            else:
                node.target = f"size_{like.name}"
        for node in module.graph.find_nodes(op="get_attr"):
            value = getattr(module, str(node.target))
            if not isinstance(value, torch.Tensor):
                raise export_error(f"is a {type(value).__name__}, not a tensor", node)
            name = f"constant_{len(constants)}"
            constants[name] = value.detach().cpu()
            with module.graph.inserting_before(new[0]):
                placeholder = module.graph.placeholder(name)
            placeholder.meta = dict(node.meta)
            new[-1].append(placeholder)
            new.append(placeholder)
            node.replace_all_uses_with(placeholder)
            module.graph.erase_node(node)
        return weights, constants

    def _port(self, node: fx.Node, role: str = "input", name: str | None = None) -> Port:
        val = node.meta["val"]
        if not isinstance(val, torch.Tensor):
            return Port(str(node.target), torch.int64, (), "size")
        shape = tuple(e if isinstance(e, int) else self._expression(e) for e in val.shape)
        return Port(name or str(node.target), val.dtype, shape, role)

    def _expression(self, extent: Any) -> str:
        return re.sub(r"\bs\d+\b", lambda m: self.sizes.get(m[0], m[0]), str(extent))

    def _outputs(self, module: fx.GraphModule, caches: Mapping[str, str]) -> tuple[Port, ...]:
        results: Any = module.graph.output_node().args[0]
        names = [name for name, role in caches.items() if role != "lengths"]
        own = results[: len(results) - len(names)]
        made = []
        for i, node in enumerate(own):
            if not isinstance(node, fx.Node) or not isinstance(node.meta["val"], torch.Tensor):
                raise export_error(f"output {i} of the model is no tensor")
            name = "logits" if len(own) == 1 else f"output_{i}"
            made.append(self._port(node, "output", name))
        for node, name in zip(results[len(own) :], names):
            made.append(self._port(node, caches[name], name))
        return tuple(replace(port, output=True) for port in made)


def plan_inference(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    tp: int,
    dtype: torch.dtype | None = None,
    dynamic: Mapping[str, tuple[int, int, int]] | None = None,
    max_length: int | None = None,
    hardware: str = "h100",
) -> InferencePlan:
    """Capture `model(*args, **kwargs)` in eval mode without gradients, and plan it for `tp` ranks.

    args, kwargs: an example batch, of which shapes and dtypes count; without one, token ids
    [2, 8]. dtype: of the
    weights, of inputs that are floating-point numbers and so of the computation; None: as they
    are. dynamic: (minimum, optimum,
    maximum) of the sizes "batch" (dim 0 of every input) and "sequence" (dim 1); a size that is
    not named is that of the example. max_length: tokens of a key-value cache, None for none.
    hardware: the machine to plan for, a key of `planning.cost.HARDWARE`.

    The model is neither run nor changed. Raises what torch.compile(fullgraph=True) raises where it
    breaks the graph, and ExportError.
    """
    symbols = {name: _extent(name, sizes) for name, sizes in (dynamic or {}).items()}
    model = unwrapped(model)
    if not args and not kwargs:
        args = (torch.zeros(2, 8, dtype=torch.int64),)
    bound = inspect.signature(model.forward).bind(*args, **(kwargs or {}))
    call = dict(bound.arguments)
    for parameter in bound.signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            call.update(call.pop(parameter.name, {}))
    examples = _examples(call, _priced(symbols, max_length), tp, dtype)
    config = Config(mesh={"tp": tp}, sequence_parallel=False, outputs="replicate")
    traced, held = shadow(model, dtype)
    names = {id(p): name for name, p in traced.named_parameters()}
    arguments = {id(leaf) for leaf in pytree.tree_leaves(examples)}
    machine = known_hardware(hardware)
    offline = offline_mesh({"tp": tp}, 0)
    found: list[InferencePlan] = []

    def plan(
        gm: fx.GraphModule, example: Sequence[Any], inputs: list[compat.GraphInput]
    ) -> Program:
        program = build_program(gm, example, inputs, offline, config, machine)
        ports: dict[str, str] = {}
        weights: dict[str, str] = {}
        constants: dict[str, torch.Tensor] = {}
        sizes: dict[str, str] = {}
        given = [n for n in program.serial.graph.nodes if n.op == "placeholder"]
        for node, item in zip(given, inputs, strict=True):
            if isinstance(item.real, nn.Parameter):
                weights[node.name] = names.get(id(item.real), item.name)
            elif item.real is not None and id(item.real) not in arguments:
                value = held.get(id(item.real), item.real)
                constants[node.name] = value.detach().to("cpu", item.real.dtype)
            elif item.real is not None:
                ports[node.name] = item.key
                for axis, extent in zip(AXES, item.fake.shape):
                    if not isinstance(extent, int):
                        sizes.setdefault(str(extent), axis)
        found.append(
            InferencePlan(program, ports, weights, constants, symbols, sizes, tp, max_length)
        )
        return program

    try:
        with torch.no_grad():
            intercept(traced, (), examples, plan, dynamic=False)
    except RuntimeError as error:
        if not re.search(r"device='meta'.* got |devices, meta and", str(error), re.DOTALL):
            raise
        raise export_error(
            "the model makes a tensor on a device of its own, and is traced on the meta device",
            remedy="Make it where an input is: torch.arange(n, device=x.device); hold what is "
            f"given by numbers in a buffer. It was traced to:\n{error}",
        ) from error
    return found[0]


def _extent(name: str, sizes: tuple[int, int, int]) -> Extent:
    if name not in AXES:
        raise export_error(f"dynamic size {name!r} is not known; there are {', '.join(AXES)}")
    low, best, high = sizes
    if not 1 <= low <= best <= high:
        bounds = "1 <= minimum <= optimum <= maximum"
        raise export_error(f"dynamic {name} {tuple(sizes)}: give {bounds}")
    return Extent(low, best, high)


def _priced(symbols: Mapping[str, Extent], max_length: int | None) -> dict[str, int]:
    """The sizes to plan for. With a cache nearly every call has the fewest tokens: a plan for
    prompts would send weights between ranks at each of them, where activations are smaller."""
    sizes = {name: extent.optimum for name, extent in symbols.items()}
    if max_length is not None and "sequence" in symbols:
        sizes["sequence"] = symbols["sequence"].minimum
    return sizes


def _examples(
    call: Mapping[str, Any], sizes: Mapping[str, int], tp: int, dtype: torch.dtype | None
) -> dict[str, Any]:
    """The example on the meta device, its dynamic dims marked.

    A dynamic size is given a prime no other size has: sharding asks whether a size is divisible,
    and torch takes equal sizes for the same one.
    """
    taken = {tp}
    chosen: dict[str, int] = {}
    for name, wanted in sizes.items():
        size = max(wanted, 2 * tp + 1, 3)
        while size in taken or any(size % i == 0 for i in range(2, math.isqrt(size) + 1)):
            size += 1
        taken.add(size)
        chosen[name] = size

    def example(tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor):
            return tensor
        shape = list(tensor.shape)
        for dim, name in enumerate(AXES[: tensor.dim()]):
            shape[dim] = chosen.get(name, shape[dim])
        kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        made = torch.empty(shape, dtype=kind, device="meta")
        for dim, name in enumerate(AXES[: tensor.dim()]):
            if name in chosen:
                compat.mark_dynamic(made, dim)
        return made

    return pytree.tree_map(example, dict(call))  # type: ignore[no-any-return]
