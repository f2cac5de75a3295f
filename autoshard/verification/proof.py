"""`autoshard.verify`: the model serial and sharded on local processes, and whether they agree."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from autoshard.config import Config
from autoshard.errors import ConfigError, message
from autoshard.names import callable_named
from autoshard.runtime.mesh import offline_mesh
from autoshard.verification import local_world
from autoshard.verification.by_processes import SERIAL, Comparison
from autoshard.verification.by_threads import rows_in_process
from autoshard.verification.subject import Subject
from autoshard.verification.tolerance import Row

SHOWN = 10
"""Rows of the printed table."""
WIDTH, NAME = 80, 20
"""Columns of the table, and those that a name gets whatever it takes."""
ROUNDING = 100.0
"""Times the tolerance that rounding may reach in a deep model; more is a fault in any dtype."""


@dataclass(frozen=True)
class Proof:
    """The outcome of `verify`: `ok`, the `rows` with the worst first, and `str()` for a person.

    A row is the worst over ranks and steps of one quantity. notes: what the figures do not say.
    """

    mesh: Mapping[str, int]
    rows: tuple[Row, ...]
    steps: int
    notes: tuple[str, ...] = field(default_factory=tuple)

    @property
    def ok(self) -> bool:
        """Whether something was compared and all of it is within tolerance."""
        return bool(self.rows) and all(row.ok for row in self.rows)

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        kinds = dict.fromkeys(row.kind for row in self.rows)
        counts = ", ".join(f"{sum(r.kind == k for r in self.rows)} {k}" for k in kinds)
        mesh = ", ".join(f"{name}={size}" for name, size in self.mesh.items())
        wrong = [row for row in self.rows if not row.ok]
        shown = self.rows[: max(SHOWN, min(len(wrong), 3 * SHOWN))]
        header = ("what", "name", "stored", "step", "rank", "error", "tolerance", "")
        table: list[tuple[str, ...]] = [header]
        table += [
            (
                row.kind,
                row.name,
                row.placement,
                str(row.step),
                str(row.rank),
                f"{row.error:.1e}",
                f"{row.tolerance:.1e}",
                "" if row.ok else "WRONG",
            )
            for row in shown
        ]
        widths = [max(map(len, column)) for column in zip(*table)]
        widths[1] = max(NAME, min(widths[1], WIDTH - sum(widths) + widths[1] - 2 * len(widths) + 2))
        table = [(line[0], _ending(line[1], widths[1]), *line[2:]) for line in table]
        lines = ["  ".join(c.ljust(w) for c, w in zip(line, widths)).rstrip() for line in table]
        lines.insert(1, "  ".join("-" * w for w in widths[:-1]))
        hidden = len(self.rows) - len(shown)
        if hidden:
            lines.append(f"... and {hidden} more")
        verdict = (
            f"EQUAL: mesh {mesh}, {self.steps} step{'s' * (self.steps > 1)}; compared {counts}"
            if self.ok
            else f"DIFFERENT: mesh {mesh}; {len(wrong)} of {len(self.rows)} comparisons are wrong"
        )
        return "\n".join([*lines, *self.notes, verdict])


def verify(
    model: nn.Module | Callable[[], Any] | str,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    mesh: Mapping[str, int],
    options: Mapping[str, Any] | None = None,
    steps: int = 1,
    lr: float = 0.1,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    tolerance: float | None = None,
    limit: float = 600.0,
    processes: bool = True,
    progress: Callable[[str], None] | None = None,
) -> Proof:
    """Train `model` serially and sharded on local processes (gloo, CPU), and compare them.

    model: the unsharded model, a callable that makes it, or "module:function"; a callable may
        return (model, args) or (model, args, kwargs). It is not changed. args, kwargs: the batch of
        all data-parallel ranks together; each of them gets its rows.
    mesh: sizes by axis name, such as {"dp_shard": 2, "tp": 2}. options: other options of the
        backend; `inner` is "aot_eager" here where it is not given.
    steps, lr: steps of plain SGD, and its rate. seed: of the factory, and of the steps' random
        numbers. dtype: converts the model and the batch first. loss: a scalar of the output, by
        default what `Subject.loss_of` finds.
    tolerance: of every comparison; None: by dtype and by the serial model's distance from its
        own float64 run (docs/verification.md).
    limit: seconds for everything. processes: False runs the ranks as threads of this process,
        which takes a second or two and checks the rewritten graphs alone (`in_process`): outputs
        and gradients, without backend, storage and optimizer; not with graph breaks. progress:
        called with a line now and then.

    Compared: loss, outputs, the gradient of every parameter, every parameter after the step, and
    buffers; random numbers, too, for rng="invariant". Raises ConfigError for what cannot be
    asked, and WorldError where a process fails, with its traceback, or the limit passes.
    """
    sizes = {name: size for name, size in mesh.items()}
    settings = dict(options or {})
    if "mesh" in settings:
        raise ConfigError(message("mesh is an argument of verify", remedy="Take it from options."))
    if steps < 1:
        raise ConfigError(message(f"steps={steps}", remedy="Give at least 1."))
    Config.from_options({**settings, "mesh": sizes})
    sizes = {axis.name: axis.size for axis in offline_mesh(sizes, 0).axes}
    if isinstance(model, str):
        callable_named(model)  # a wrong name is the caller's error, not a process's
    if isinstance(model, nn.Module):
        model = getattr(model, "_orig_mod", model)
        if any(t.is_cuda for t in (*model.parameters(), *model.buffers())):
            model = copy.deepcopy(model).cpu()
    subject = Subject(model, args, kwargs, dtype, loss, seed)
    if not processes:
        rows, notes = _in_process(subject, sizes, settings, tolerance)
        return Proof(sizes, tuple(worst(rows)), 1, notes)
    job = Comparison(subject, sizes, settings, steps, lr, tolerance, limit)
    ranks = [f"rank {rank}" for rank in range(job.ranks)]
    if progress is not None:
        progress(f"starting {job.ranks + 1} processes")
    results = local_world.run(job, [SERIAL, *ranks], limit, progress)
    rows = [row for result in results.values() for row in result.rows]
    rows += [
        Row("program", "nothing was compiled: no call of the backend", "", math.inf, 0.0, 1, i)
        for i, rank in enumerate(ranks)
        if not results[rank].programs
    ]
    return Proof(sizes, tuple(worst(rows)), steps, tuple(results[SERIAL].notes))


def _in_process(
    subject: Subject, sizes: Mapping[str, int], settings: Mapping[str, Any], tolerance: float | None
) -> tuple[list[Row], tuple[str, ...]]:
    """The rows and notes of the quick form; in float64 where rounding may be all that differs."""
    notes = ["ranks were threads of one process"]
    rows = rows_in_process(subject, sizes, settings, tolerance)
    furthest = max((row.excess for row in rows), default=0.0)
    if tolerance is None and subject.dtype is None and 1.0 < furthest < ROUNDING:
        try:
            wide = replace(subject, dtype=torch.float64)
            rows = rows_in_process(wide, sizes, settings, tolerance)
            notes.append(f"float64: in the model's own dtype, {furthest:.1f} times the tolerance")
        except Exception as error:  # a dtype written into the model, an operator without float64
            notes.append(f"no float64 run to tell rounding from faults: {type(error).__name__}")
    return rows, tuple(notes)


def _ending(name: str, width: int) -> str:
    """The end of a name, which tells it from its neighbours, in at most `width` characters."""
    return name if len(name) <= width else "..." + name[3 - width :]


def worst(rows: Sequence[Row]) -> list[Row]:
    """The worst row of each quantity, those most above their tolerance first."""
    found: dict[tuple[str, str], Row] = {}
    for row in rows:
        key = (row.kind, row.name)
        if key not in found or row.excess > found[key].excess:
            found[key] = row
    return sorted(found.values(), key=lambda row: -row.excess)
