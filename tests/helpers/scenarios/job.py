"""A scenario's surroundings: one body runs on the serial model and on the compiled one."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from autoshard.errors import AutoshardError
from autoshard.runtime.lazy_gather import LazyGather
from autoshard.verification.comparison import difference, finite, largest

Sizes = dict[str, int]

ROWS, WIDTH = 4, 16
TOLERANCE = 2e-5
DATA_AXES = ("dp_replicate", "dp_shard", "ep")  # the axes along which a rank has its own rows


class Net(nn.Module):
    """Two linears, a norm and a scale, with a part that does not divide by two ranks."""

    def __init__(self, inner: int = 33) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, inner)
        self.norm = nn.LayerNorm(inner)
        self.down = nn.Linear(inner, WIDTH, bias=False)
        self.logit_scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(self.norm(F.gelu(self.up(x)))) * self.logit_scale.exp()
        return y


class Job:
    """A serial run (`sizes` is None), or one rank's part of a run on a mesh.

    On the data-parallel axes a rank has its own rows of the batch; serial has them all, and its
    losses are their mean. `record` keeps what is compared.
    """

    def __init__(self, sizes: Sizes | None, folder: str, inner: str = "aot_eager") -> None:
        self.sizes, self.folder, self.inner = sizes, folder, inner
        self.ranks = math.prod((sizes or {}).get(axis, 1) for axis in DATA_AXES)
        # the axes from the outermost: pp, those of the data, and cp and tp, which share a batch
        shared = math.prod((sizes or {}).get(axis, 1) for axis in ("cp", "tp"))
        self.rank = process() // shared % self.ranks if sizes else 0
        self.found: dict[str, Any] = {}
        self.refusable = False  # an AutoshardError in place of the result is right as well
        self.tolerance = TOLERANCE
        torch.manual_seed(0)

    @property
    def sharded(self) -> bool:
        """Whether this is the compiled run, for what only it can do or say."""
        return self.sizes is not None

    def net(self, inner: int = 33) -> Net:
        """A small model, the same on every rank."""
        torch.manual_seed(1)
        return Net(inner)

    def pair(self) -> tuple[Net, Any]:
        """A small model, and as the job runs it."""
        net = self.net()
        return net, self.compile(net)

    def around_the_first_call(self) -> Iterator[tuple[str, Net, Any]]:
        """A model and its compiled form, twice: before its first call, and after it."""
        for when in ("before", "after"):
            net, compiled = self.pair()
            if when == "after":
                self.loss(compiled)
            yield when, net, compiled

    def compile(self, model: Any, **options: Any) -> Any:
        """The model as the job runs it."""
        if self.sizes is None:
            return model
        return torch.compile(model, backend="autoshard", options=self.options(**options))

    def options(self, **options: Any) -> dict[str, Any]:
        """Those of the compiled run."""
        return {"mesh": self.sizes, "inner": self.inner, "timeout": 40.0, **options}

    def rows(self, step: int, width: int = WIDTH) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's inputs and targets."""
        generator = torch.Generator().manual_seed(100 + step)
        both = torch.randn(2, ROWS * 2, width, generator=generator)
        x, y = (part.chunk(self.ranks)[self.rank] for part in both)
        return x, y

    def ids(self, step: int, vocabulary: int, length: int = 6) -> torch.Tensor:
        """This rank's token ids."""
        generator = torch.Generator().manual_seed(200 + step)
        ids = torch.randint(vocabulary, (ROWS, length), generator=generator)
        return ids.chunk(self.ranks)[self.rank]

    def loss(self, model: Callable[[Any], Any], step: int = 0) -> torch.Tensor:
        """The squared error on this rank's rows."""
        x, y = self.rows(step)
        return F.mse_loss(model(x), y)

    def backward(self, model: Callable[[Any], Any], step: int = 0) -> None:
        """Forward and backward; the loss is recorded."""
        loss = self.loss(model, step)
        self.record_loss(loss, step)
        loss.backward()

    def train(
        self, model: Callable[[Any], Any], optimizer: torch.optim.Optimizer, steps: Any = 2
    ) -> None:
        """Whole steps; an int: that many from 0."""
        for step in range(steps) if isinstance(steps, int) else steps:
            optimizer.zero_grad()
            self.backward(model, step)
            optimizer.step()

    def record_loss(self, loss: torch.Tensor, step: int = 0) -> None:
        """The mean of the data-parallel ranks' losses."""
        self.record(f"loss {step} #{len(self.found)}", self.everyone(loss))

    def everyone(self, value: torch.Tensor) -> torch.Tensor:
        """The mean over the data-parallel ranks of what each has of its own rows."""
        value = _plain(value).to(torch.float64)
        if self.ranks > 1:
            if not dist.is_initialized():  # which the first compiled call does
                dist.init_process_group("gloo")
            dist.all_reduce(value)  # tp ranks hold the same
            value /= dist.get_world_size()
        return value

    def everyone_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The same loss with the value that all data-parallel ranks share, for an optimizer that
        decides by it; its gradient stays that of this rank's rows."""
        return loss + (self.everyone(loss.detach()).to(loss.dtype) - loss.detach())

    @staticmethod
    def whole(value: torch.Tensor) -> torch.Tensor:
        """The plain tensor of a stored value."""
        return value.full_tensor() if isinstance(value, DTensor) else value

    def record(self, name: str, value: Any) -> None:
        """Something that serial has as well: tensors, numbers, or containers of them."""
        assert name not in self.found, f"{name} twice"
        self.found[name] = _plain(value)

    def record_model(self, model: nn.Module, when: str = "", gradients: bool = False) -> None:
        """Every parameter (or its gradient) and buffer, whole."""
        for name, parameter in model.named_parameters():
            name = name.replace("_orig_mod.", "")
            value = parameter.grad if gradients else parameter
            self.record(f"{when} {'gradient of ' if gradients else ''}{name}", value)
        for name, buffer in model.named_buffers():
            self.record(f"{when} {name.replace('_orig_mod.', '')}", buffer)

    def is_stored(self, model: nn.Module, name: str) -> None:
        """The parameter is split over the mesh in the sharded run: else nothing was tested."""
        if self.sharded:
            parameter = dict(model.named_parameters())[name]
            assert isinstance(parameter, DTensor), f"{name} is not stored"
            if self.sizes in ({"dp_replicate": 2}, {"pp": 2}):
                return  # whole on every rank, or on one
            assert parameter.to_local().shape != parameter.shape, f"{name} is whole"


def _plain(value: Any) -> Any:
    """Plain tensors and numbers on this rank."""
    if isinstance(value, DTensor | LazyGather):
        value = value.full_tensor()
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value


def differences(got: Any, want: Any, tolerance: float, where: str = "") -> list[str]:
    """What differs, each with its place and by how much."""
    if isinstance(want, torch.Tensor) and isinstance(got, torch.Tensor):
        if got.shape != want.shape or got.dtype != want.dtype:
            return [f"{where}: {got.dtype} {[*got.shape]}, serial {want.dtype} {[*want.shape]}"]
        if want.layout is not torch.strided or got.layout is not torch.strided:
            got, want = got.to_dense(), want.to_dense()
        off = largest(difference(got, want))
        # a gradient that should be zero is what the rounding of its sums leaves
        limit = tolerance * max(largest(finite(want)), 5e-3)
        return [] if off <= limit else [f"{where}: off by {off:.3g}, allowed {limit:.3g}"]
    if isinstance(want, dict) and isinstance(got, dict):
        if [*got] != [*want]:
            return [f"{where}: {[*got]}, serial {[*want]}"]
        pairs = [(f"{where}/{key}", got[key], want[key]) for key in want]
    elif isinstance(want, list) and isinstance(got, list):
        if len(got) != len(want):
            return [f"{where}: {len(got)} of them, serial {len(want)}"]
        pairs = [(f"{where}[{i}]", *both) for i, both in enumerate(zip(got, want))]
    elif isinstance(want, float) and isinstance(got, float):
        one, other = (torch.tensor(x, dtype=torch.float64) for x in (got, want))
        return differences(one, other, tolerance, where)
    else:
        return [] if type(got) is type(want) and got == want else [f"{where}: {got}, serial {want}"]
    return [line for name, a, b in pairs for line in differences(a, b, tolerance, name)]


def run_scenario(
    name: str, sizes: Sizes, folder: str, inner: str = "aot_eager"
) -> tuple[list[str], bool]:
    """A scenario beside serial, in each rank: what differs, and whether it was refused instead."""
    from scenarios.table import LIBRARIES, SCENARIOS

    scenario = {**SCENARIOS, **LIBRARIES}[name]
    runs = []
    for mesh, place in ((None, f"{folder}/serial{process()}"), (sizes, folder)):
        job = Job(mesh, place, inner)
        try:
            scenario(job)
        except (AutoshardError, BackendCompilerFailed) as error:
            of_ours = isinstance(getattr(error, "inner_exception", error), AutoshardError)
            if not (job.refusable and job.sharded and of_ours):
                raise
            return [], True
        runs.append(job.found)
    serial, sharded = runs
    assert serial, "the scenario records nothing"
    return differences(sharded, serial, job.tolerance), False


def process() -> int:
    """This process's number, also before there is a process group."""
    return int(os.environ["RANK"])
