"""The parameters of a planned graph as the tp axis leaves them, what training keeps for each, by
dtypes and optimizer, as bytes an element, and the buckets they travel in."""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx, nn, optim

from autoshard.planning import cost
from autoshard.planning.cost import default_bucket_bytes, fill_buckets
from autoshard.planning.decisions import Decisions
from autoshard.planning.mixtures import ROWS, exchangeable, is_mixture
from autoshard.planning.sizes import why_not
from autoshard.planning.strategy import Strategy, value
from autoshard.runtime.collectives import TWICE, WHOLE, I, State, chunk_size, shard_dim
from autoshard.runtime.errors import ConfigError
from autoshard.runtime.graph_meta import REDUCED_DTYPE, STORED_DTYPE
from autoshard.runtime.optimizer import Work, unhooked_step, work_of

#: Tensors of a parameter's size that the optimizer keeps.
MOMENTS = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}


def optimizer_class(name: str) -> Any:
    """A class of torch.optim by its name in any case, or `module:Class`.

    Raises ConfigError where there is none.
    """
    module, _, wanted = name.rpartition(":")
    try:
        found = importlib.import_module(module) if module else optim
    except ImportError as error:
        raise ConfigError(
            f"optimizer {name!r}: {error}", remedy=f"Install what has {module}."
        ) from None
    for own, one in vars(found).items():
        named = own == wanted if module else own.lower() == wanted.lower()
        if named and isinstance(one, type) and issubclass(one, optim.Optimizer):
            return one
    raise ConfigError(
        f"optimizer {name!r} is not known: none of {', '.join(MOMENTS)}, and no class of "
        f"{module or 'torch.optim'}",
        remedy="Name one of torch.optim, as muon, or module:Class, as pytorch_optimizer:SOAP.",
    )


@functools.cache
def step_work(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Work:
    """What an optimizer's step of a parameter is, written down on the meta device; of a stack that
    the class refuses, the steps of its matrices."""
    cls = optimizer_class(name)
    p = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))
    try:
        made = cls([p])
    except ValueError as error:
        if len(shape) != 3:
            raise ConfigError(f"optimizer {name!r}: {error}", remedy="Name another one.") from error
        one = step_work(name, shape[1:], dtype)
        counts = ("flops", "nbytes", "sent", "returned", "states")
        more = {field: getattr(one, field) * shape[0] for field in counts}
        return one._replace(**more, by_rows=True)
    made.base = cls
    try:
        return work_of(made, unhooked_step(cls), 0, p, {})
    except Exception as error:  # whatever an optimizer's code does not do without memory
        raise ConfigError(
            f"optimizer {name!r}: a step of {shape} cannot be written down: {error}",
            remedy="Price another one, adamw for one that keeps as much.",
        ) from error


RECIPES = ("pure", "mixed", "master")

STATES = ("device", "host")


@dataclass(frozen=True)
class Training:
    """How a model is trained.

    optimizer: a key of MOMENTS; or what `optimizer_class` knows. One that multiplies matrices has
        those of hidden layers, and AdamW the other parameters.
    microbatches: batches whose gradients are summed before the optimizer's step.
    compiled: whether neighbouring operators are joined into kernels; else each reads and writes
        memory, and keeps what its own derivative reads.
    float8: products of activations with parameters in float8, but the last, which makes logits.
    recipe: "pure": everything in the model's dtype, which is what a bfloat16 model under
        torch's AdamW does (8 bytes a parameter). "mixed": parameters, gradients and moments in
        float32, computed with, and gathered, in the model's dtype (FSDP2's mixed precision: 16
        bytes). "master": parameters in the model's dtype beside gradients, moments and a copy of
        the parameters in float32 (Megatron-Core's distributed optimizer: 18 bytes).
    imbalance: rows of the rank of ep that has most, by those of the mean.
    states: where the optimizer's states and those copies are, and where it steps. On the host,
        "master" has its gradients in the model's dtype, as `autoshard.offload_optimizer` has.
    """

    optimizer: str = "adamw"
    recipe: str = "pure"
    microbatches: int = 1
    compiled: bool = True
    float8: bool = False
    states: str = "device"
    imbalance: float = 1.0

    def __post_init__(self) -> None:
        if self.optimizer not in MOMENTS:
            optimizer_class(self.optimizer)
        for name, values in {"recipe": RECIPES, "states": STATES}.items():
            if getattr(self, name) not in values:
                raise ConfigError(
                    f"{name} {getattr(self, name)!r} is not known",
                    remedy=f"It is one of {', '.join(values)}.",
                )

    def stored(self, itemsize: int) -> int:
        """Bytes of one stored element of a parameter that is computed with in `itemsize`."""
        return 4 if self.recipe == "mixed" else itemsize

    def gradient(self, itemsize: int) -> int:
        """Bytes of one element of its gradient, stored and reduced."""
        narrow = self.recipe == "pure" or (self.recipe == "master" and self.states == "host")
        return itemsize if narrow else 4


@dataclass(frozen=True)
class Layout:
    """The data-parallel half of a mesh and its options; `zero` and `bucket_bytes` as in Config.

    shard: ranks of dp_shard and of ep, and of a cp beside tp or pp. experts: those of ep,
    over which no expert is gathered. outer: those of that cp, which have one batch. deferred:
    whether the gradients of microbatches are kept whole, and reduced with those of the last.
    chooses: whether each weight has a choice of its own on dp_shard, in place of `zero`. staged:
    whether weights are gathered before the first micro-batch of a step and kept to the last, and
    gradients are reduced after that, as beside pp.
    """

    shard: int = 1
    replicate: int = 1
    zero: int = 3
    bucket_bytes: int | None = None
    experts: int = 1
    outer: int = 1
    deferred: bool = False
    chooses: bool = False
    staged: bool = False

    @property
    def inner(self) -> int:
        """Ranks of the axes of shards other than dp_shard."""
        return self.experts * self.outer

    @property
    def ranks(self) -> dict[str, int]:
        """Those of each data-parallel axis, and of ep."""
        shard = self.shard // self.inner
        return {"dp_shard": shard, "dp_replicate": self.replicate, "ep": self.experts}

    @property
    def batches(self) -> int:
        """The number of different batches."""
        return self.shard // self.outer * self.replicate

    @staticmethod
    def of(
        sizes: Mapping[str, int],
        zero: int | str,
        bucket_bytes: int | None,
        deferred: bool = False,
    ) -> Layout:
        """The layout of a mesh by the sizes of its axes. deferred: `defer_reduction` of Config.
        With zero="auto", a weight without a choice is treated as with 3."""
        stages = sizes.get("pp", 1) > 1
        replicate, experts = sizes.get("dp_replicate", 1), sizes.get("ep", 1)
        outer = sizes.get("cp", 1) if sizes.get("tp", 1) > 1 or stages else 1
        shard = sizes.get("dp_shard", 1) * experts * outer
        later = deferred or zero == 1
        chooses = zero == "auto" and shard > 1
        stage = zero if isinstance(zero, int) else 3
        return Layout(shard, replicate, stage, bucket_bytes, experts, outer, later, chooses, stages)


class WeightBytes(NamedTuple):
    """Bytes of a part of a parameter on a rank: as it is stored, of its gradient, and of what the
    optimizer keeps on the device."""

    stored: int
    gradient: int
    states: int

    @property
    def updated(self) -> int:
        """Bytes that the optimizer moves: it reads gradients, reads and writes the rest."""
        return self.gradient and self.gradient + 2 * (self.stored + self.states)


@dataclass(frozen=True, kw_only=True)
class Weight:
    """A parameter as the tp axis leaves it: local shape, and where it is first used (None: never).

    itemsize: bytes an element while it is computed with. again: whether backward reads it. stored:
    bytes an element as it is kept, where that is in another dtype (the option `precision`).
    reduced: those of its gradient while it travels, where that is told. experts: of how many it is
    a stack that stays where it is on ep; 0: it is none. choice: what dp_shard does with it, one
    of `CHOICES`; "": what the layout's `zero` says. whole_shape, state: before the tp axis, and
    there. hidden: whether it is a matrix, or a stack, of no embedding and not the last.
    """

    name: str
    shape: tuple[int, ...]
    itemsize: int
    trained: bool
    use: int | None
    again: bool
    stored: int | None = None
    reduced: int | None = None
    experts: int = 0
    choice: str = ""
    whole_shape: tuple[int, ...] = ()
    state: State = I
    hidden: bool = False

    def work(self, training: Training) -> Work:
        """What the optimizer's step of it is; of one of MOMENTS, and of AdamW beside an optimizer
        of matrices, how many tensors it keeps."""
        name = training.optimizer
        if name in MOMENTS or not self.trained:
            return Work(moments=MOMENTS.get(name, 0))
        if not self.hidden and step_work(name, (8, 4), torch.float32).flops:
            return Work(moments=MOMENTS["adamw"])
        width = training.stored(self.kept)
        dtype = {2: torch.bfloat16, 8: torch.float64}.get(width, torch.float32)
        return step_work(name, self.whole_shape, dtype)

    def states(self, training: Training) -> int:
        """Bytes of optimizer state of one element, wherever it is."""
        each = self.kept if training.recipe == "pure" else 4
        return self.work(training).moments * each + 4 * (training.recipe == "master")

    @property
    def kept(self) -> int:
        """Bytes an element as it is kept, by the optimizer too."""
        return self.itemsize if self.stored is None else self.stored

    @property
    def numel(self) -> int:
        """Elements on a rank of the tp axis."""
        return math.prod(self.shape)

    def stays(self, ranks: int) -> bool:
        """Whether it is a stack of experts that an axis ep of `ranks` leaves where it is."""
        return ranks > 1 and why_not(self.experts, ranks) is None

    def part(self, ranks: int) -> int:
        """Elements that the first of `ranks` data-parallel ranks stores: rows, by torch.chunk."""
        if not self.shape or ranks == 1:
            return self.numel
        return chunk_size(self.shape[0], ranks) * math.prod(self.shape[1:])

    def whole(self, layout: Layout) -> int:
        """Elements that a rank uses: of a stack of experts that stays on ep, its own."""
        return self.numel // (layout.experts if self.stays(layout.experts) else 1)

    def holds(self, part: int, training: Training) -> WeightBytes:
        """Bytes of so many elements, between steps."""
        stored, kept = part * training.stored(self.kept), self.kept
        if not self.trained:
            return WeightBytes(stored, 0, 0)
        states = self.states(training) if training.states == "device" else 0
        return WeightBytes(stored, part * training.gradient(kept), part * states)

    def stored_part(self, layout: Layout) -> int:
        """Elements that the first rank stores under a layout."""
        return self.part(layout.inner if self.choice == WHOLE else layout.shard)

    def gathered(self, layout: Layout) -> int:
        """Elements that a gather leaves a rank; 0 where nothing of it is gathered."""
        stays = self.stays(layout.experts)
        over_shard = layout.shard > layout.inner and self.choice != WHOLE
        over_cp = layout.outer > 1 and len(self.shape) > 1  # where vectors are whole
        over_ep = layout.experts > 1 and not stays
        return self.whole(layout) if over_shard or over_cp or over_ep else 0

    def gathered_twice(self, layout: Layout) -> bool:
        """Whether backward gathers it again, if it reads it."""
        if layout.staged:
            return False
        return self.choice == TWICE if self.choice else layout.zero == 3


def weights_of(
    gm: fx.GraphModule,
    decisions: Decisions,
    parameters: Mapping[fx.Node, str],
    n: int,
    again: frozenset[fx.Node],
) -> tuple[Weight, ...]:
    """The parameters of `gm` on a rank of an axis of `n`. again: those that backward reads."""
    place = {node: i for i, node in enumerate(gm.graph.nodes)}
    experts, found = experts_of(gm.graph, decisions.strategies), []
    seen = _embeddings_and_last(gm.graph, parameters)
    for node, name in parameters.items():
        val, state = value(node), decisions.stored[node]
        found.append(
            weight_of(
                node,
                state,
                n,
                name=name,
                trained=bool(val.requires_grad),
                use=min((place[user] for user in node.users), default=None),
                again=node in again,
                experts=experts.get(node, 0),
                choice=decisions.weights.get(node, ""),
                whole_shape=tuple(cost.hint(extent) for extent in val.shape),
                state=state,
                hidden=val.dim() > 1 and node not in seen,
            )
        )
    return tuple(found)


def _embeddings_and_last(graph: fx.Graph, parameters: Mapping[fx.Node, str]) -> set[fx.Node]:
    """The parameters of embeddings, and that of the last product with one."""
    found, last = set(), set()
    for node in graph.nodes:
        own = {
            each for each in node.all_input_nodes if each in parameters and value(each).dim() > 1
        }
        if "embedding" in str(node.target):
            found |= own
        elif own:
            last = own
    return found | last


def experts_of(
    graph: fx.Graph, strategies: Mapping[fx.Node, Strategy] | None = None
) -> dict[fx.Node, int]:
    """Of each stack of experts that stays where it is on ep by these strategies, or by any, how
    many experts it has."""
    mixtures = filter(is_mixture, graph.nodes)
    if strategies is not None:
        mixtures = (node for node in mixtures if strategies[node].on_ep == ROWS)  # type: ignore[assignment]
    return {stack: exchangeable(node) for node in mixtures for stack in node.args[3]}  # type: ignore[misc, union-attr]


def weight_of(node: fx.Node, at: State, n: int, **more: Any) -> Weight:
    """A parameter in the state `at` on a planned axis of `n`. more: what its placeholder does not
    tell."""
    shape, dim = [cost.hint(extent) for extent in value(node).shape], shard_dim(at)
    if dim is not None:
        shape[dim] = chunk_size(shape[dim], n)
    dtypes: list[torch.dtype | None] = [node.meta.get(key) for key in (STORED_DTYPE, REDUCED_DTYPE)]
    stored, reduced = (None if dtype is None else dtype.itemsize for dtype in dtypes)
    itemsize = value(node).element_size()
    return Weight(shape=tuple(shape), itemsize=itemsize, stored=stored, reduced=reduced, **more)


def sent_bytes(weights: Iterable[Weight], part: Callable[[Weight], int], training: Training) -> int:
    """Bytes of the gradients of parts of weights while they are reduced. part: elements of each."""
    return sum(
        part(one) * (training.gradient(one.itemsize) if one.reduced is None else one.reduced)
        for one in weights
        if one.trained
    )


def buckets(weights: Sequence[Weight], layout: Layout) -> list[list[Weight]]:
    """The parameters in use, in the order of their first use, as the passes merge them."""
    used = sorted((w for w in weights if w.use is not None), key=lambda w: w.use or 0)
    sizes = [weight.numel * weight.itemsize for weight in used]
    limit = layout.bucket_bytes or default_bucket_bytes(
        sum(sizes), ((weight.itemsize, layout.shard) for weight in used)
    )
    keys = [(weight.itemsize, weight.choice == WHOLE) for weight in used]
    filled = fill_buckets(sizes, keys, limit, layout.bucket_bytes is None)
    return [[used[i] for i in bucket] for bucket in filled]
