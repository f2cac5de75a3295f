"""A file with the loss and the norm of gradients of each backward, by which runs are compared."""

import json
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autoshard.runtime import compat


class TrainingLog:
    """The log of one run: a line of JSON for each backward, which the first rank writes.

    The loss is the mean over all ranks of the graphs' scalar that is differentiated, null where
    they give none; the norm is that of all gradients of their parameters, as `clip_grad_norm_`
    takes it: in a run that accumulates, of those so far. Both are collective in each backward.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._step = path, 0
        self._parameters: weakref.WeakKeyDictionary[nn.Parameter, None] = (
            weakref.WeakKeyDictionary()
        )
        self._loss: torch.Tensor | None = None
        self._end: weakref.ref[Callable[[], None]] | None = None
        if _rank() == 0:
            path.write_text("")

    def of(self, run: Callable[..., Any], parameters: Iterable[nn.Parameter]) -> Callable[..., Any]:
        """A graph's function, whose backwards are written."""
        self._parameters.update((p, None) for p in parameters if p.requires_grad)

        @compat.not_traced
        def run_and_watch(*args: Any) -> Any:
            outputs = run(*args)
            trained = [x for x in outputs if isinstance(x, torch.Tensor) and x.requires_grad]
            losses = [x for x in trained if x.dim() == 0]
            if losses:
                self._loss = losses[0].detach()
            if trained:
                (losses or trained)[0].register_hook(self._begin)
            return outputs

        return run_and_watch

    def _begin(self, _: Any) -> None:
        if self._end is not None and self._end() is not None:
            return  # another graph of this backward; the engine drops it where a backward fails

        def end() -> None:
            # once more at the end: gradients of replicas may be reduced there
            compat.after_backward(self._write)

        self._end = weakref.ref(end)
        compat.after_backward(end)

    def _write(self) -> None:
        self._end = None
        loss, self._loss = self._loss, None
        with torch.no_grad():
            given = [p.grad for p in self._parameters if p.grad is not None]
            norm = float(nn.utils.get_total_norm(given)) if given else 0.0
        line = {"step": self._step, "loss": _mean(loss), "grad_norm": norm}
        self._step += 1
        if _rank() == 0:
            with self._path.open("a") as file:
                file.write(f"{json.dumps(line)}\n")


def _mean(loss: torch.Tensor | None) -> float | None:
    """The mean of the ranks' losses; those of one batch have the same."""
    if loss is None:
        return None
    mean = loss.to("cpu", torch.float64).clone()
    world = dist.group.WORLD if dist.is_initialized() else None
    if world is not None and dist.get_world_size() > 1 and dist.get_backend() != "fake":
        dist.all_reduce(mean, group=compat.host_group(world.group_name))
        mean /= dist.get_world_size()
    return float(mean)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


_logs: dict[Path, TrainingLog] = {}


def training_log(path: str) -> TrainingLog:
    """The log of that path, which this process begins anew and then goes on with."""
    found = Path(path).resolve()
    if found not in _logs:
        _logs[found] = TrainingLog(found)
    return _logs[found]
