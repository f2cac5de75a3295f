"""The meshes of a world: which are tried, and what is asked of all, and of one that is named."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from autoshard.config import Config
from autoshard.errors import ConfigError
from autoshard.mesh_search.stages import StageOrder
from autoshard.planning.chunked_loss import Chunking
from autoshard.planning.cost import Cluster
from autoshard.planning.estimate import Cuts, Layout, Training
from autoshard.runtime.mesh import offline_mesh

AxisSizes = dict[str, int]

PlanAxes = tuple[tuple[str, int], ...]
"""The axes of a plan, and their ranks."""


def candidates(
    world: int, machine: Cluster, planned: Sequence[str] = ("tp",), stages: bool = False
) -> list[AxisSizes]:
    """Every dp_replicate x dp_shard x one of `planned` that multiplies to `world`, with the last
    inside a node. stages: and beside tp and ep every pp whose stages are whole nodes.

    Across nodes a tp axis would send whole activations, several times a layer, over the slower
    network, and ep rows; inside a node tp and the data-parallel axes have links that pp needs not.
    Name such a mesh to see it.
    """
    found = []
    for n in _divisors(world):
        if n > 1 and machine.per_node % n:
            continue
        for name in planned if n > 1 else ("tp",):
            found += _among(world, {name: n})
    if stages and world % machine.per_node == 0:
        for pp in _divisors(world // machine.per_node)[1:]:
            # cp has another plan beside pp, where it stores weights as dp_shard does
            beside = [name for name in planned if name != "cp"]
            found += [{"pp": pp, **one} for one in candidates(world // pp, machine, beside)]
    return found


def combined(
    world: int, machine: Cluster, experts: int = 0, stages: bool = True
) -> list[AxisSizes]:
    """Every dp_replicate x dp_shard beside cp and tp, with cp across at most as many nodes as those
    have ranks, where tp has a node whole; or beside ep and tp, with tp inside a node, and ep one
    that divides `experts`. And, with them or with cp alone, every pp whose stages are whole nodes.
    """
    found, per_node = [], machine.per_node
    widths = _divisors(per_node)
    for tp in widths[1:]:
        for cp in widths[1:]:
            if world % (cp * tp) == 0 and (tp == per_node or per_node % (cp * tp) == 0):
                found += _among(world, {"cp": cp, "tp": tp})
    for ep in _divisors(experts)[1:] if experts else ():
        for tp in widths:
            known = tp == 1 and per_node % ep == 0  # among `candidates`
            if world % (ep * tp) == 0 and not known:
                found += _among(world, {"ep": ep, "tp": tp} if tp > 1 else {"ep": ep})
    if stages and world % per_node == 0:
        for pp in _divisors(world // per_node)[1:]:
            rest = world // pp
            inner = combined(rest, machine, experts, False)
            for cp in widths[1:]:
                inner += _among(rest, {"cp": cp})
            found += [{"pp": pp, **one} for one in inner]
    return found


def checked(mesh: Mapping[str, int], world: int) -> AxisSizes:
    """The axes of a mesh that is asked for. Raises ConfigError where it does not fit the world."""
    inner = {name: size for name, size in mesh.items() if name != "pp"} or {"tp": 1}
    sizes = offline_mesh(inner, 0).sizes
    if mesh.get("pp", 1) > 1:
        offline_mesh({"pp": mesh["pp"]}, 0)
        sizes = {"pp": mesh["pp"], **sizes}
    if math.prod(sizes.values()) != world:
        spelled = " x ".join(f"{name} {size}" for name, size in sizes.items())
        raise ConfigError(
            f"the mesh {spelled} has {math.prod(sizes.values())} ranks, the world {world}",
            remedy="Give sizes whose product is the world.",
        )
    return sizes


def refusal(mesh: Mapping[str, int], mixture: bool = False) -> str:
    """Why no model can run on a mesh; empty where one can. mixture: whether the model has one."""
    try:
        offline_mesh(mesh, 0)
    except ConfigError as error:
        return str(error)
    if mixture and all(mesh.get(name, 1) > 1 for name in ("pp", "ep", "cp")):
        return "Beside pp and cp rows do not travel to experts on ep."
    return ""


def planned_axes(mesh: AxisSizes, config: Config) -> PlanAxes:
    """The axes that the planner decides on, names and sizes."""
    sharing = offline_mesh(mesh, 0).sharing
    axes = [(axis.name, axis.size) for axis in sharing]
    if config.zero == "auto":  # the plan depends on those of the weights, too
        named = ("pp", "dp_replicate", "dp_shard")
        axes = [(name, mesh[name]) for name in named if name in mesh] + axes
    elif "pp" in mesh and "ep" in mesh:  # where rows travel to experts, as on every pp
        axes = [("pp", 2), *axes]
    if mesh.get("ep", 1) > 1:
        axes = [("ep", mesh["ep"]), *axes]
    return tuple(axes)


@dataclass(frozen=True)
class Asked:
    """What is the same for all rows. limit: bytes of a rank. meshes: how many are tried. losses:
    what is asked of them where all fits, and where it does not. samples: of a global batch, which
    goes in micro-batches of `batch`; None: ranks do `training.microbatches` of those given.
    cuts_made: so far, which equal layers share, of whatever plan."""

    config: Config
    training: Training
    limit: int
    batches: int | None
    meshes: int
    losses: tuple[Chunking | None, Chunking | None] = (None, None)
    samples: int | None = None
    batch: int = 1
    cuts_made: Cuts = field(default_factory=dict, compare=False)

    @property
    def sizes(self) -> list[int]:
        """The micro-batches that are tried: powers of two that divide the global batch."""
        each = (1 << i for i in range((self.samples or 1).bit_length()))
        return [size for size in each if (self.samples or 1) % size == 0]

    def count(self, mesh: AxisSizes) -> int:
        """The micro-batches of a rank in a step; 0: ranks would have different numbers."""
        if self.samples is None:  # with pp as many samples a rank as without
            return mesh.get("pp", 1) * self.training.microbatches
        times, rest = divmod(self.samples, self.batch * self.layout(mesh).batches)
        return 0 if rest else times

    def training_on(self, mesh: AxisSizes) -> Training:
        """With the micro-batches of a step; one where a part of the mesh's axes is given."""
        return replace(self.training, microbatches=self.count(mesh) or 1)

    @property
    def orders(self) -> tuple[StageOrder, ...]:
        """The orders of a pipeline that are tried: what is asked for, of a mesh that is asked for
        alone the default."""
        own = self.config.order
        return (own,) if self.config.schedule or self.meshes == 1 else (own, *_INTERLEAVED)

    def layout(self, mesh: AxisSizes) -> Layout:
        return Layout.of(
            mesh, self.config.zero, self.config.bucket_bytes, self.config.defer_reduction
        )


_INTERLEAVED: tuple[StageOrder, ...] = (("interleaved", 2), ("interleaved", 4))


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _among(world: int, axes: AxisSizes) -> list[AxisSizes]:
    """The meshes with these axes, one for each way to divide the other ranks."""
    rest = world // math.prod(axes.values())
    found = []
    for shard in _divisors(rest):
        sizes = {"dp_replicate": rest // shard, "dp_shard": shard, **axes}
        found.append({name: size for name, size in sizes.items() if size > 1} or {"tp": 1})
    return found


def apart(key: PlanAxes) -> dict[str, PlanAxes]:
    """The plans of each axis alone of a plan of several; none of any other."""
    several = [name for name, size in key if size > 1 and name != "pp"]
    if len(several) < 2 or not {"cp", "ep", "tp"}.issuperset(several):
        return {}
    found = {name: tuple((n, s if n in (name, "pp") else 1) for n, s in key) for name in several}
    if "tp" in found:
        found["tp"] = (("tp", dict(key)["tp"]),)
    return found


def most_done(mesh: AxisSizes, asked: Asked, seconds: float, data: float = 0.0) -> float:
    """The most samples a second and rank where a micro-batch takes so long in all layers: stages
    wait at least as long as those of equal length. data: seconds of a step for what data-parallel
    axes send, beside which nothing runs with pp, and without all that may."""
    pp, ranks, data = mesh.get("pp", 1), math.prod(mesh.values()), data / asked.count(mesh)
    if pp > 1:
        chunks = max(chunks for _, chunks in asked.orders)
        seconds *= 1 + (pp - 1) / (chunks * asked.count(mesh))
    seconds = seconds + data if pp > 1 else max(seconds, data)
    samples = pp * asked.batch * asked.layout(mesh).batches
    return samples / (seconds * ranks) if seconds else math.inf
