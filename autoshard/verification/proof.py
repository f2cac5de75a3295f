"""`autoshard.verify`: the model serial and sharded on local processes, and whether they agree."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autoshard.config import Config, Precision
from autoshard.errors import ConfigError, message
from autoshard.explain import table
from autoshard.model_source import callable_named
from autoshard.runtime.mesh import offline_mesh
from autoshard.verification.by_processes import ProcessJob, compare_by_processes
from autoshard.verification.by_threads import compare_by_threads
from autoshard.verification.comparison import Comparison
from autoshard.verification.subject import Subject

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
        raise ConfigError(message(f"steps={steps}", remedy="Give at least 1."))
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
            return copy.deepcopy(model).cpu()
    return model


def worst(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """The worst comparison of each quantity, those most above their tolerance first."""
    found: dict[tuple[str, str], Comparison] = {}
    for one in comparisons:
        key = (one.kind, one.name)
        if key not in found or one.excess > found[key].excess:
            found[key] = one
    return sorted(found.values(), key=lambda one: -one.excess)
