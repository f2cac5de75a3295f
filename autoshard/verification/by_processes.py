"""The serial run and the sharded one, each in processes of its own, and what lies between them.

The serial process runs the model as it is, without torch.compile, and once more in float64: how far
the model is from its own exact result says how far a sharded one may be. A model that draws random
numbers runs as the program of one process that draws what a mesh draws (`rng="invariant"`); that
program is then compared with the model itself in eval mode.
"""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from autoshard.errors import ConfigError, message
from autoshard.verification.local_world import report
from autoshard.verification.subject import Key, Run, Subject, chunks, converted
from autoshard.verification.tolerance import FLOORS, Expected, Row, compare, expectations, floor_of

SERIAL = "serial"
class RankResult(NamedTuple):
    """The rows of one rank, how many programs it ran, and remarks."""

    rows: list[Row]
    programs: int
    notes: list[str]


@dataclass(frozen=True)
class Comparison:
    """The job of a local world: the role "serial", or "rank 0", "rank 1", ..."""

    subject: Subject
    sizes: Mapping[str, int]
    options: Mapping[str, Any] = field(default_factory=dict)
    steps: int = 1
    lr: float = 0.1
    tolerance: float | None = None
    limit: float = 600.0

    def __call__(self, role: str, folder: Path) -> RankResult:
        """Run one role."""
        if role == SERIAL:
            return self._serial(folder)
        return self._sharded(int(role.split()[1]), folder)

    # The serial process

    def _serial(self, folder: Path) -> RankResult:
        model, args, kwargs = self.subject.load()
        parts = dict(enumerate(chunks((args, kwargs), self.data_ranks)))
        drawn = draws(model, *parts[0])
        notes: list[str] = []
        rows: list[Row] = []
        if drawn:
            if self.options.get("rng", "invariant") != "invariant":
                raise ConfigError(
                    message(
                        "the model draws random numbers, and only rng='invariant' draws the same "
                        "ones on one process",
                        remedy="Verify with that option, or in eval mode.",
                    )
                )
            notes.append("random numbers: the serial model drew those of the mesh")
            rows = self._capture(model, parts[0])
        exact = self._exact(model, parts, drawn, notes)
        before: dict[Key, torch.Tensor] = {
            ("parameter", name, None): p.detach().clone() for name, p in model.named_parameters()
        }
        run = Run(self.subject, model, self._call(model, drawn), parts, self.lr)
        for step in range(self.steps):
            report(folder, f"serial model: step {step + 1} of {self.steps}")
            found = run.step(step)
            truth = exact(step)
            write(folder / f"step {step}", expectations(found, before, truth, self.tolerance))
            before = {key: value for key, value in found.items() if key[0] == "parameter"}
        return RankResult(rows, 0, notes)

    def _call(self, model: nn.Module, drawn: bool) -> Any:
        if not drawn:
            return model
        inner = self.options.get("inner", "aot_eager")
        return torch.compile(
            model, backend="autoshard", options={"rng": "invariant", "inner": inner}
        )

    def _exact(
        self, model: nn.Module, parts: Mapping[int, Any], drawn: bool, notes: list[str]
    ) -> Any:
        """The same steps in float64, or nothing where the model does not run in it."""
        if self.tolerance is not None or floor_of(model) == FLOORS[torch.float64]:
            return lambda step: {}
        try:
            double = copy.deepcopy(model).double()
            wide = {i: converted(batch, torch.float64) for i, batch in parts.items()}
            run = Run(self.subject, double, self._call(double, drawn), wide, self.lr)
            steps = [run.step(step) for step in range(self.steps)]
        except Exception as error:  # a dtype written into the model, an operator without float64
            notes.append(f"no float64 run to scale tolerances by: {type(error).__name__}")
            return lambda step: {}
        return lambda step: steps[step]

    def _capture(self, model: nn.Module, batch: Any) -> list[Row]:
        """The one-process program against the model itself, where neither draws."""
        plain, other = copy.deepcopy(model).eval(), copy.deepcopy(model).eval()
        if draws(plain, *batch):
            return []
        want = Run(self.subject, plain, plain, {0: batch}, self.lr).step(0)
        got = Run(self.subject, other, self._call(other, True), {0: batch}, self.lr).step(0)
        expected = expectations(want, {}, {}, self.tolerance)
        torch.compiler.reset()
        rows = compare(got, expected, {}, 1, 0)
        return [Row("capture", f"{r.kind} {r.name}", "", r.error, r.tolerance, 1, 0) for r in rows]

    # A rank of the mesh

    def _sharded(self, rank: int, folder: Path) -> RankResult:
        import datetime

        import torch.distributed as dist

        import autoshard
        from autoshard.runtime.mesh import data_coordinate, init_mesh

        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder / 'store'}",
            rank=rank,
            world_size=self.ranks,
            timeout=datetime.timedelta(seconds=self.limit),
        )
        model, args, kwargs = self.subject.load()
        index = data_coordinate(init_mesh(self.sizes, "cpu"))
        parts = chunks((args, kwargs), self.data_ranks)
        options = {"inner": "aot_eager", **self.options, "mesh": dict(self.sizes)}
        if self.ranks == 1:
            options.setdefault("rng", "invariant")
        call = torch.compile(model, backend="autoshard", options=options)
        run = Run(self.subject, model, call, {index: parts[index]}, self.lr)
        rows: list[Row] = []
        for step in range(self.steps):
            if rank == 0:
                report(folder, f"{self.ranks} ranks: step {step + 1} of {self.steps}")
            got = run.step(step)
            expected = self._read(folder / f"step {step}")
            mine = {k: e for k, e in expected.items() if k[2] in (None, index)}
            rows += compare(got, mine, placements(model), step + 1, rank)
        dist.barrier()
        programs = len(autoshard.programs(model))
        dist.destroy_process_group()
        return RankResult(rows, programs, [])

    def _read(self, path: Path) -> dict[Key, Expected]:
        deadline = time.monotonic() + self.limit
        while not path.exists():
            if time.monotonic() > deadline:
                raise TimeoutError("the serial process wrote no result")
            time.sleep(0.05)
        return pickle.loads(path.read_bytes())  # type: ignore[no-any-return]

    @property
    def ranks(self) -> int:
        """Processes of the mesh."""
        total = 1
        for size in self.sizes.values():
            total *= size
        return total

    @property
    def data_ranks(self) -> int:
        """Ranks that hold different batches."""
        return self.ranks // self.sizes.get("tp", 1)


def draws(model: nn.Module, args: Any, kwargs: Any) -> bool:
    """Whether a call of the model uses torch's generator."""
    before = torch.get_rng_state()
    with torch.no_grad():
        copy.deepcopy(model)(*args, **kwargs)
    drew = not torch.equal(before, torch.get_rng_state())
    torch.set_rng_state(before)
    return drew


def placements(model: nn.Module) -> dict[str, str]:
    """Where each parameter is stored, by name: "dp_shard S(0), tp S(1)"."""
    from torch.distributed.tensor import DTensor

    from autoshard.runtime.parameters import stored_states

    return {
        name: ", ".join(f"{axis} {state}" for axis, state in stored_states(p).items())
        for name, p in model.named_parameters()
        if isinstance(p, DTensor)
    }


def write(path: Path, value: Any) -> None:
    """Write a file that appears whole or not at all."""
    part = path.with_suffix(".part")
    part.write_bytes(pickle.dumps(value))
    part.rename(path)
