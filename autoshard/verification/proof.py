"""`autoshard.verify`: the model serial and sharded on local processes, and whether they agree.

The quick form of `verify`: all ranks of the mesh as threads of this process, in lockstep.

One forward and backward of the captured graph, with noise as the gradient of its outputs. The
backend, its compilers, its storage and the optimizer do not take part: what is checked are the
plan, the rules, the rewritten graphs and their collectives.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from autoshard.building import batch_facts, build_program
from autoshard.capture import intercept
from autoshard.config import Config, Precision
from autoshard.errors import ConfigError
from autoshard.explain import table
from autoshard.model_source import callable_named, copied
from autoshard.planning.cost import cluster_of
from autoshard.program import Program
from autoshard.runtime import compat
from autoshard.runtime.collectives import I, placement_words
from autoshard.runtime.mesh import Mesh, offline_mesh
from autoshard.verification.by_processes import ProcessJob, compare_by_processes
from autoshard.verification.comparison import Comparison, floor_of
from autoshard.verification.program_check import Differences, verify_program
from autoshard.verification.subject import Subject, chunks

ROUNDING = 100.0
"""Times the tolerance that rounding may reach in a deep model; more is a fault in any dtype."""


def compare_by_threads(
    subject: Subject, sizes: Mapping[str, int], options: Mapping[str, Any], tolerance: float | None
) -> tuple[list[Comparison], list[str]]:
    """The comparisons, and notes on them; in float64 where rounding may be all that differs."""
    notes = ["ranks were threads of one process"]
    found = _comparisons(subject, sizes, options, tolerance)
    furthest = max((one.excess for one in found), default=0.0)
    if tolerance is None and subject.dtype is None and 1.0 < furthest < ROUNDING:
        try:
            wide = replace(subject, dtype=torch.float64)
            found = _comparisons(wide, sizes, options, tolerance)
            notes.append(f"float64: in the model's own dtype, {furthest:.1f} times the tolerance")
        except Exception as error:  # a dtype written into the model, an operator without float64
            notes.append(f"no float64 run to tell rounding from faults: {type(error).__name__}")
    return found, notes


def _comparisons(
    subject: Subject, sizes: Mapping[str, int], options: Mapping[str, Any], tolerance: float | None
) -> list[Comparison]:
    """The comparisons, as `verify` makes them; a difference among ranks that should hold one value
    is one too. Raises what torch.compile(fullgraph=True) raises where the graph breaks, and
    ValueError where data-parallel ranks draw random numbers."""
    if sizes.get("pp", 1) > 1:
        raise ConfigError(
            f"processes=False runs the ranks of one graph in lockstep, and those of "
            f"pp={sizes['pp']} run graphs of their own",
            remedy="Leave processes=False out, or pp.",
        )
    model, args, kwargs = subject.load()
    mesh = offline_mesh(sizes, 0)
    parts = chunks((args, kwargs), mesh.batches)
    config = Config.from_options({**options, "mesh": dict(sizes)})
    program, values = _traced(model, parts[0], mesh, config)
    others = [
        intercept(model, part[0], part[1], lambda gm, *call: _values(*call), dynamic=False)
        for part in parts[1:]
    ]
    allowed = floor_of(model) if tolerance is None else tolerance
    try:
        differences = verify_program(program, values, seed=subject.seed, others=others)
    except AssertionError as error:
        told = str(error).strip().splitlines()[0]
        return [Comparison(kind="ranks", name=told, error=float("inf"))]
    return _judged(differences, program, allowed)


def _judged(differences: Differences, program: Program, allowed: float) -> list[Comparison]:
    stored = {}
    for node, name in program.parameters.items():
        states = {program.axis.name: program.decisions.stored[node], **program.data[node]}
        axes = [axis.name for axis in program.mesh.axes]
        stored[name] = ", ".join(f"{axis} {placement_words(states.get(axis, I))}" for axis in axes)
    found = [("output", name, error) for name, error in differences.outputs.items()]
    found += [("gradient", name, error) for name, error in differences.norms.items()]
    return [
        Comparison(
            kind=kind, name=name, placement=stored.get(name, ""), error=error, tolerance=allowed
        )
        for kind, name, error in found
    ]


def _traced(
    model: torch.nn.Module, part: Any, mesh: Mesh, config: Config
) -> tuple[Program, list[Any]]:
    """The program of a call, and the whole value of each placeholder of its serial graph."""

    def plan(
        gm: fx.GraphModule, example: Sequence[Any], inputs: list[compat.GraphInput]
    ) -> tuple[Program, list[Any]]:
        program = build_program(
            gm, example, inputs, mesh, config, cluster_of("cpu"), facts=batch_facts(inputs)
        )
        return program, _values(example, inputs)

    return intercept(model, part[0], part[1], plan, dynamic=False)


def _values(example: Sequence[Any], inputs: list[compat.GraphInput]) -> list[Any]:
    """The whole value of each placeholder of a graph that Dynamo traced."""
    return [int(e) if i.real is None else i.real for i, e in zip(inputs, example)]


SHOWN = 10
"""Comparisons in the printed table."""
WIDTH = 80
"""Columns of the table, unless names need more."""
_FLOAT8 = (
    "the serial model is not in float8: the errors are what it costs, and tolerance= accepts them; "
    "processes=False compares with the serial program in float8"
)


@dataclass(frozen=True)
class Proof:
    """The outcome of `verify`: `ok`, the `comparisons`, and `str()` for a person.

    comparisons: the worst over ranks and steps of each quantity, the worst first. notes: what the
    figures do not say.
    """

    mesh: Mapping[str, int]
    comparisons: tuple[Comparison, ...]
    steps: int
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether something was compared and all of it is within tolerance."""
        return bool(self.comparisons) and all(one.ok for one in self.comparisons)

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        every = self.comparisons
        wrong = [one for one in every if not one.ok]
        shown = every[: max(SHOWN, min(len(wrong), 3 * SHOWN))]
        header = ["what", "name", "stored", "step", "rank", "error", "tolerance", ""]
        lines = [table(header, [_cells(one) for one in shown], WIDTH, right=(3, 4), shorten=1)]
        if len(every) > len(shown):
            lines.append(f"... and {len(every) - len(shown)} more")
        mesh = ", ".join(f"{name}={size}" for name, size in self.mesh.items())
        counts = ", ".join(
            f"{sum(one.kind == kind for one in every)} {kind}"
            for kind in dict.fromkeys(one.kind for one in every)
        )
        verdict = (
            f"EQUAL: mesh {mesh}, {self.steps} step{'s' * (self.steps > 1)}; compared {counts}"
            if self.ok
            else f"DIFFERENT: mesh {mesh}; {len(wrong)} of {len(every)} comparisons are wrong"
        )
        return "\n".join([*lines, *self.notes, verdict])


def _cells(one: Comparison) -> list[str]:
    figures = (str(one.step), str(one.rank), f"{one.error:.1e}", f"{one.tolerance:.1e}")
    return [one.kind, one.name, one.placement, *figures, "" if one.ok else "WRONG"]


def verify(
    model: nn.Module | Callable[[], Any] | str,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    mesh: Mapping[str, int],
    steps: int = 1,
    lr: float = 0.1,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    tolerance: float | None = None,
    timeout: float = 600.0,
    processes: bool = True,
    progress: Callable[[str, int, int], None] | None = None,
    **options: Any,
) -> Proof:
    """Train `model` serially and sharded on local processes (gloo, CPU), and compare them.

    model: the unsharded model, a callable that makes it, or "module:function"; a callable may
        return (model, args) or (model, args, kwargs). It is not changed. args, kwargs: the batch of
        all data-parallel ranks together; each of them gets its rows.
    mesh: sizes by axis name, such as {"dp_shard": 2, "tp": 2}. options: any other field of
        `autoshard.Config`; `inner` is "aot_eager" here where it is not given.
    steps, lr: steps of plain SGD, and its rate. seed: of the factory, and of the steps' random
        numbers. dtype: converts the model and the batch first. loss: a scalar of the output, by
        default what `Subject.loss_of` finds.
    tolerance: of every comparison; None: by dtype and by the serial model's distance from its
        own float64 run (docs/verification.md).
    timeout: seconds for everything. processes: False runs the ranks as threads of this process,
        which takes a second or two and checks the rewritten graphs alone (`by_threads`): outputs
        and gradients, without backend, storage and optimizer; not with graph breaks. progress:
        called with (what begins, its number, how many there are).

    Compared: loss, outputs, the gradient of every parameter, every parameter after the step, and
    buffers; random numbers, too, for rng="invariant". Raises ConfigError for what cannot be
    asked, and WorldError where a process fails, with its traceback, or the time is over.
    """
    if steps < 1:
        raise ConfigError(f"steps={steps}", remedy="Give at least 1.")
    Config.from_options({**options, "mesh": dict(mesh), "timeout": timeout})
    sizes = offline_mesh(dict(mesh), 0).sizes
    subject = Subject(
        source=_on_cpu(model), args=args, kwargs=kwargs, dtype=dtype, loss=loss, seed=seed
    )
    if processes:
        job = ProcessJob(
            subject=subject,
            sizes=sizes,
            options=options,
            steps=steps,
            lr=lr,
            tolerance=tolerance,
            timeout=timeout,
        )
        found, notes = compare_by_processes(job, progress)
        if Precision.of(options.get("precision")).matmul is not None:
            notes = [*notes, _FLOAT8]
    else:
        steps = 1
        found, notes = compare_by_threads(subject, sizes, options, tolerance)
    return Proof(sizes, tuple(worst(found)), steps, tuple(notes))


def _on_cpu(model: Any) -> Any:
    """What a process can be sent: a wrong name is the caller's error, and no process has a GPU."""
    if isinstance(model, str):
        callable_named(model)
    if isinstance(model, nn.Module):
        model = getattr(model, "_orig_mod", model)
        if any(t.is_cuda for t in (*model.parameters(), *model.buffers())):
            return copied(model).cpu()
    return model


def worst(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """The worst comparison of each quantity, those most above their tolerance first."""
    found: dict[tuple[str, str], Comparison] = {}
    for one in comparisons:
        key = (one.kind, one.name)
        if key not in found or one.excess > found[key].excess:
            found[key] = one
    return sorted(found.values(), key=lambda one: -one.excess)
