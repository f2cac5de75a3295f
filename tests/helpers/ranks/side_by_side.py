"""A model trained sharded and serially side by side, in every process of a gloo pool."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autoshard.verification import comparison
from autoshard.verification.comparison import finite, furthest, largest, norm

TOLERANCE = 1e-5

Loss = Callable[[Any], torch.Tensor]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor of a stored parameter or gradient; others as they are."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def difference(got: torch.Tensor, want: torch.Tensor, floor: float = 0.0) -> float:
    """The largest difference relative to the largest entry wanted, or to a floor that is more;
    infinite where shapes or dtypes differ, or which elements are no numbers."""
    scale = max(largest(finite(want)), floor) or 1.0
    return largest(comparison.difference(whole(got), want)) / scale


def difference_by_norm(got: torch.Tensor, want: torch.Tensor, floor: float = 0.0) -> float:
    """The norm of the difference relative to that of what is wanted, or to a floor that is more."""
    scale = max(norm(finite(want)), floor) or 1.0
    return norm(comparison.difference(whole(got), want)) / scale


class Pair:
    """`model`, compiled to `compiled`, and `serial`, its copy before anything was sharded."""

    def __init__(self, model: nn.Module, tp: int = 2, inner: str = "aot_eager", **options: Any):
        self.model, self.serial = model, copy.deepcopy(model)
        self.options = {"mesh": {"tp": tp}, "inner": inner, **options}
        self.compiled: Any = torch.compile(model, backend="autoshard", options=self.options)
        self.loss = self.gradient = 0.0
        self.where = ""

    def backward(self, loss: Loss) -> None:
        """Forward and backward of both; compares the losses."""
        got, want = loss(self.compiled), loss(self.serial)
        self.loss = furthest([self.loss, difference(got, want)])
        got.backward()
        want.backward()

    def forward(self, output: Loss) -> None:
        """Both without backward; compares the outputs as losses."""
        got, want = output(self.compiled), output(self.serial)
        self.loss = furthest([self.loss, difference(got, want)])

    def compare_gradients(self) -> None:
        """Every gradient relative to its own norm, or to a hundredth of the largest where that is
        more: the bias of an attention's keys has a gradient that is nothing but rounding."""
        wanted = dict(self.serial.named_parameters())
        assert dict(self.model.named_parameters()).keys() == wanted.keys()
        grads = [p.grad for p in wanted.values() if p.grad is not None]
        floor = 1e-2 * max(norm(finite(g)) for g in grads)
        for name, parameter in self.model.named_parameters():
            got, want = parameter.grad, wanted[name].grad
            if want is None:
                assert got is None or not whole(got).any(), f"{name}: serial has no gradient"
                continue
            assert got is not None, f"{name}: no gradient"
            error = difference_by_norm(got, want, floor)
            self.gradient = furthest([self.gradient, error])
            if self.gradient == error:
                self.where = name

    def train(self, losses: list[Loss], lr: float = 0.05) -> None:
        """One step of SGD for each loss."""
        ours = torch.optim.SGD(self.model.parameters(), lr=lr)
        theirs = torch.optim.SGD(self.serial.parameters(), lr=lr)
        for loss in losses:
            self.backward(loss)
            self.compare_gradients()
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()

    def share(self) -> float:
        """The fraction of the model's elements that are stored split."""
        parameters = list(self.model.parameters())
        split = [p for p in parameters if isinstance(p, DTensor) and p.to_local().shape != p.shape]
        return sum(p.numel() for p in split) / sum(p.numel() for p in parameters)

    def programs(self) -> int:
        """How many graphs were compiled."""
        import autoshard

        return len(autoshard.programs(self.model))

    def result(self) -> dict[str, Any]:
        """What a test looks at, picklable."""
        return {
            "loss": self.loss,
            "gradient": self.gradient,
            "where": self.where,
            "share": self.share(),
            "programs": self.programs(),
        }


def check(results: list[dict[str, Any]], share: float = 0.0, tolerance: float = TOLERANCE) -> None:
    """Each rank's result is serial's, from at least one program of ours."""
    for result in results:
        assert result["loss"] < tolerance and result["gradient"] < tolerance, result
        assert result["share"] >= share, result
        assert result["programs"] >= 1, "the backend compiled nothing"
