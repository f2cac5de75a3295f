"""The serial run and the sharded one, each in processes of its own, and what lies between them.

The serial process runs the model as it is, without torch.compile, and once more in float64: how far
the model is from its own exact result says how far a sharded one may be. A model that draws random
numbers runs as the program of one process that draws what a mesh draws (`rng="invariant"`); that
program is then compared with the model itself in eval mode.
"""

import datetime
import itertools
import math
import pickle
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from autoshard.errors import ConfigError
from autoshard.model_source import copied
from autoshard.program import programs
from autoshard.runtime.collectives import placement_words
from autoshard.runtime.mesh import data_coordinate, init_mesh, offline_mesh
from autoshard.runtime.parameters import stored_states
from autoshard.verification import local_world
from autoshard.verification.comparison import (
    FLOORS,
    Comparison,
    Expected,
    compare,
    expectations,
    floor_of,
)
from autoshard.verification.subject import Key, Run, Subject, chunks, in_dtype

SERIAL = "serial"


class RankResult(NamedTuple):
    """The comparisons of one process, how many programs it ran, and remarks."""

    comparisons: list[Comparison]
    programs: int
    notes: list[str]


@dataclass(frozen=True, kw_only=True)
class ProcessJob:
    """The job of a local world, for the role "serial", or "rank 0", "rank 1", ...

    timeout: seconds, for all of it and for each wait in it.
    """

    subject: Subject
    sizes: Mapping[str, int]
    options: Mapping[str, Any]
    steps: int
    lr: float
    tolerance: float | None
    timeout: float

    def __call__(self, role: str, folder: Path) -> RankResult:
        if role == SERIAL:
            return self._serial(folder)
        return self._sharded(int(role.split()[1]), folder)

    # The serial process

    def _serial(self, folder: Path) -> RankResult:
        model, args, kwargs = self.subject.load()
        parts = dict(enumerate(chunks((args, kwargs), self.data_ranks)))
        drawn = draws(model, *parts[0])
        notes: list[str] = []
        found: list[Comparison] = []
        if drawn:
            if self.options.get("rng", "invariant") != "invariant":
                raise ConfigError(
                    "the model draws random numbers, and only rng='invariant' draws the same "
                    "ones on one process",
                    remedy="Verify with that option, or in eval mode.",
                )
            notes.append("random numbers: the serial model drew those of the mesh")
            found = self._capture(model, parts[0])
        exact = self._exact(model, parts, drawn, notes)
        before: dict[Key, torch.Tensor] = {
            ("parameter", name, None): p.detach().clone() for name, p in model.named_parameters()
        }
        run = Run(self.subject, model, self._call(model, drawn), parts, self.lr)
        told = False
        for step in range(self.steps):
            local_world.report(folder, f"serial model: step {step + 1} of {self.steps}")
            values = run.step(step)
            told = told or _remark_on_non_finite(values, notes)
            truth = exact(step)
            write(folder / f"step {step}", expectations(values, before, truth, self.tolerance))
            before = {key: value for key, value in values.items() if key[0] == "parameter"}
        return RankResult(found, 0, notes)

    def _call(self, model: nn.Module, drawn: bool) -> Any:
        if not drawn:
            return model
        inner = self.options.get("inner", "aot_eager")
        options: dict[str, Any] = {"rng": "invariant", "inner": inner}
        options["planner"] = {"recover_masks": False}
        return torch.compile(model, backend="autoshard", options=options)

    def _exact(
        self, model: nn.Module, parts: Mapping[int, Any], drawn: bool, notes: list[str]
    ) -> Any:
        """The same steps in float64, or nothing where the model does not run in it."""
        if self.tolerance is not None or floor_of(model) == FLOORS[torch.float64]:
            return lambda step: {}
        try:
            double = copied(model).double()
            wide = {i: in_dtype(batch, torch.float64) for i, batch in parts.items()}
            run = Run(self.subject, double, self._call(double, drawn), wide, self.lr)
            steps = [run.step(step) for step in range(self.steps)]
        except Exception as error:  # a dtype written into the model, an operator without float64
            notes.append(f"no float64 run to scale tolerances by: {type(error).__name__}")
            return lambda step: {}
        return lambda step: steps[step]

    def _capture(self, model: nn.Module, batch: Any) -> list[Comparison]:
        """The one-process program against the model itself, where neither draws."""
        plain, other = copied(model).eval(), copied(model).eval()
        if draws(plain, *batch):
            return []
        want = Run(self.subject, plain, plain, {0: batch}, self.lr).step(0)
        got = Run(self.subject, other, self._call(other, True), {0: batch}, self.lr).step(0)
        expected = expectations(want, {}, {}, self.tolerance)
        torch.compiler.reset()
        return [
            replace(one, kind="capture", name=f"{one.kind} {one.name}")
            for one in compare(got, expected, {}, 1, 0)
        ]

    # A rank of the mesh

    def _sharded(self, rank: int, folder: Path) -> RankResult:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder / 'store'}",
            rank=rank,
            world_size=self.ranks,
            timeout=datetime.timedelta(seconds=self.timeout),
        )
        model, args, kwargs = self.subject.load()
        index = data_coordinate(init_mesh(self.sizes, "cpu"))
        parts = chunks((args, kwargs), self.data_ranks)
        own = {"mesh": dict(self.sizes), "timeout": self.timeout}
        options = {"inner": "aot_eager", **self.options, **own}
        if self.ranks == 1:
            options.setdefault("rng", "invariant")
        call = torch.compile(model, backend="autoshard", options=options)
        run = Run(self.subject, model, call, {index: parts[index]}, self.lr)
        found: list[Comparison] = []
        for step in range(self.steps):
            if rank == 0:
                local_world.report(folder, f"{self.ranks} ranks: step {step + 1} of {self.steps}")
            got = run.step(step)
            expected = self._read(folder / f"step {step}")
            mine = {k: e for k, e in expected.items() if k[2] in (None, index)}
            found += compare(got, mine, placements(model), step + 1, rank)
        dist.barrier()
        # a pipeline is no Program; it is what stores parameters at their homes
        ran = len(programs(model)) or int(self.sizes.get("pp", 1) > 1 and bool(placements(model)))
        dist.destroy_process_group()
        return RankResult(found, ran, [])

    def _read(self, path: Path) -> dict[Key, Expected]:
        deadline = time.monotonic() + self.timeout
        while not path.exists():
            if time.monotonic() > deadline:
                raise TimeoutError("the serial process wrote no result")
            time.sleep(0.05)
        return pickle.loads(path.read_bytes())  # type: ignore[no-any-return]

    @property
    def ranks(self) -> int:
        """Processes of the mesh."""
        return math.prod(self.sizes.values())

    @property
    def data_ranks(self) -> int:
        """Ranks that hold different batches."""
        return offline_mesh(self.sizes, 0).batches


def compare_by_processes(
    job: ProcessJob, progress: Callable[[str, int, int], None] | None = None
) -> tuple[list[Comparison], list[str]]:
    """The comparisons of all ranks, and the serial process's notes on them."""
    ranks = [f"rank {rank}" for rank in range(job.ranks)]
    numbers = itertools.count(1)

    def say(what: str) -> None:
        if progress is not None:
            progress(what, next(numbers), 1 + 2 * job.steps)

    say(f"starting {job.ranks + 1} processes")
    results = local_world.run(job, [SERIAL, *ranks], job.timeout, say)
    found = [one for result in results.values() for one in result.comparisons]
    nothing = "nothing was compiled: no call of the backend"
    found += [
        Comparison(kind="program", name=nothing, error=math.inf, rank=i)
        for i, rank in enumerate(ranks)
        if not results[rank].programs
    ]
    return found, results[SERIAL].notes


def draws(model: nn.Module, args: Any, kwargs: Any) -> bool:
    """Whether a call of the model uses torch's generator."""
    before = torch.get_rng_state()
    with torch.no_grad():
        copied(model)(*args, **kwargs)
    drew = not torch.equal(before, torch.get_rng_state())
    torch.set_rng_state(before)
    return drew


def _remark_on_non_finite(values: Mapping[Key, torch.Tensor], notes: list[str]) -> bool:
    """Whether the serial model's own loss, gradients or parameters are not finite, with a note:
    that the ranks' are not either proves little. (An output may be: masked scores.)"""
    names = [
        f"{key[0]} {key[1]}"
        for key, value in values.items()
        if key[0] in ("loss", "gradient", "parameter") and not value.isfinite().all()
    ]
    if names:
        more = f" and {len(names) - 3} more" * (len(names) > 3)
        notes.append(f"NaN or infinity in the serial model itself: {', '.join(names[:3])}{more}")
    return bool(names)


def placements(model: nn.Module) -> dict[str, str]:
    """Where each parameter is stored, by name: "dp_shard S(0), tp S(1)"."""
    return {
        name: ", ".join(
            f"{axis} {placement_words(state)}" for axis, state in stored_states(p).items()
        )
        for name, p in model.named_parameters()
        if isinstance(p, DTensor)
    }


def write(path: Path, value: Any) -> None:
    """Write a file that appears whole or not at all."""
    part = path.with_suffix(".part")
    part.write_bytes(pickle.dumps(value))
    part.rename(path)
