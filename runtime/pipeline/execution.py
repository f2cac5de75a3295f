"""One rank's part in a call of a pipeline: its stage, what it lends, and what all ranks get."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from autoshard.runtime import compat
from autoshard.runtime.agreement import CollectiveRegion
from autoshard.runtime.collectives import (
    Axis,
    I,
    P,
    State,
    convert,
    gradient_state,
    redistribute,
    shard_dim,
)
from autoshard.runtime.lazy_gather import LazyGather
from autoshard.runtime.lazy_parts import FetchedWhole
from autoshard.runtime.pipeline.channel import GroupChannel, ValueMeta
from autoshard.runtime.pipeline.schedules import Action, forwards
from autoshard.runtime.pipeline.stage import StageProgram, StageRun
from autoshard.runtime.pipeline.step import Gradients, Withheld

Outputs = dict[int, Any]
"""By their position among those of the model."""


@dataclass(frozen=True)
class PipelineResult:
    """An output of the model that depends on parameters. like: a fake of it, of the whole batch.
    state: how micro-batches make it up. rank, chunk: of the stage where it is made. shards: its
    states there on the axes of a stage, the inner one first. graded: whether it has a gradient."""

    position: int
    like: torch.Tensor
    state: State
    rank: int
    chunk: int = 0
    shards: Sequence[tuple[Axis, State]] = ()
    graded: bool = False


@dataclass(frozen=True)
class Loan:
    """A parameter that another rank reads too, by its place among the parameters of the graph."""

    parameter: int
    meta: ValueMeta
    home: int
    borrower: int


@dataclass(kw_only=True)
class RankPipeline:
    """The data of one rank for every call of one graph.

    homes: the rank that stores each of the graph's parameters; None: all do. sums: the dtype in
    which the gradients of micro-batches of each add up, and are sent home. shared: makes the
    shared values of the graph's inputs; dims: the dim of which a micro-batch takes rows, of each
    that a stage reads. loss: the position of the output whose gradient is computed in the call;
    None: those of all outputs are awaited. kept: of the outputs beside a loss, those that may be
    read in training, or are written to inputs. given: of the parameters, inputs that every rank
    has; parts: the axes whose ranks have parts of their gradients.
    """

    axis: Axis
    stages: list[StageProgram]
    actions: list[Action]
    microbatches: int
    homes: list[int | None]
    sums: list[torch.dtype]
    loans: list[Loan]
    shared: Callable[..., Sequence[torch.Tensor]]
    dims: list[int | None]
    results: list[PipelineResult]
    loss: int | None
    kept: frozenset[int] = frozenset()
    given: frozenset[int] = frozenset()
    parts: Sequence[Axis] = ()
    graded: torch.Tensor | None = None

    def trains(self) -> bool:
        """Whether any output has a gradient."""
        return any(each.graded for each in self.results)

    def train(
        self, channel: GroupChannel, parameters: Sequence[torch.Tensor], inputs: Sequence[Any]
    ) -> tuple[torch.Tensor, Gradients, Outputs]:
        """The whole schedule: the loss, its gradients by what this rank stores of each of the
        graph's parameters, and the other outputs."""
        runs = self._runs(channel, parameters, inputs, True)
        self._act(self.actions, runs, channel)
        gradients = self._gradients(channel, parameters, runs)
        result = next(each for each in self.results if each.position == self.loss)
        loss = self._on_all(result, self._made(result, runs), channel)
        others = {
            each.position: self._awaited(each, runs, channel)
            if each.position in self.kept
            else Withheld(each.like, each.position)
            for each in self.results
            if each is not result
        }
        return loss, gradients, others

    def forwards(
        self, channel: GroupChannel, parameters: Sequence[torch.Tensor], inputs: Sequence[Any]
    ) -> tuple[Outputs, Callable[[Mapping[int, torch.Tensor]], Gradients]]:
        """The forwards of a schedule whose backwards await the gradients of outputs, and the rest
        of it: of the gradients of whole outputs, the same on every rank, by their position, those
        by what this rank stores of each parameter."""
        runs = self._runs(channel, parameters, inputs, True)
        self._act([each for each in self.actions if each.work == "F"], runs, channel)
        outputs = {each.position: self._awaited(each, runs, channel) for each in self.results}

        def backward(arrived: Mapping[int, torch.Tensor]) -> Gradients:
            for each in self.results:
                if each.position in arrived and each.rank == self.axis.rank:
                    parts = self._parts_of_gradient(each, arrived[each.position])
                    runs[each.chunk].arrived[each.position] = parts
            self._act([each for each in self.actions if each.work != "F"], runs, channel)
            return self._gradients(channel, parameters, runs)

        return outputs, backward

    def outputs(
        self, channel: GroupChannel, parameters: Sequence[torch.Tensor], inputs: Sequence[Any]
    ) -> Outputs:
        """The outputs of the whole batch, on every rank."""
        runs = self._runs(channel, parameters, inputs, False)
        self._act(forwards(self.microbatches, len(self.stages)), runs, channel)
        return {
            each.position: self._on_all(each, self._made(each, runs), channel)
            for each in self.results
        }

    def _runs(
        self,
        channel: GroupChannel,
        parameters: Sequence[torch.Tensor],
        inputs: Sequence[Any],
        train: bool,
    ) -> list[StageRun]:
        with torch.no_grad():
            whole = self.shared(*inputs)
            borrowed = self._borrow(channel, parameters)
        n = self.microbatches
        parts = [[x] * n if d is None else x.chunk(n, d) for x, d in zip(whole, self.dims)]
        runs = []
        for stage in self.stages:
            own = [borrowed.get(i, parameters[i]) for i in stage.parameters]
            given = [parts[i] for i in stage.shared]
            rows = [[part[k] for part in given] for k in range(n)]
            sums = [self.sums[i] for i in stage.parameters]
            runs.append(StageRun(stage, channel, own, rows.__getitem__, train, sums))
        return runs

    def _act(
        self, actions: Sequence[Action], runs: Sequence[StageRun], channel: GroupChannel
    ) -> None:
        for action in actions:
            runs[action.chunk].run(action)
        channel.finish()

    def _borrow(
        self, channel: GroupChannel, parameters: Sequence[torch.Tensor]
    ) -> dict[int, torch.Tensor]:
        found = {}
        for loan in self.loans:
            if loan.home == self.axis.rank:
                channel.send(loan.borrower, [parameters[loan.parameter].detach()], back=False)
            elif loan.borrower == self.axis.rank:
                (x,) = channel.receive(loan.home, [loan.meta], back=False)
                found[loan.parameter] = x.requires_grad_(loan.meta.graded)
        return found

    def _gradients(
        self, channel: GroupChannel, parameters: Sequence[torch.Tensor], runs: Sequence[StageRun]
    ) -> Gradients:
        """Of each parameter, at its home; elsewhere of no rows. None where the graph has none."""
        own: dict[int, torch.Tensor | None] = {}
        for stage, run in zip(self.stages, runs):
            for i, x in zip(stage.parameters, run.gradients):
                before = own.get(i)
                own[i] = x if before is None else before if x is None else before + x
        for loan in self.loans:
            if not loan.meta.graded:
                continue
            meta = loan.meta._replace(dtype=self.sums[loan.parameter])
            if loan.borrower == self.axis.rank:
                gradient = own.pop(loan.parameter)
                if gradient is None:
                    gradient = meta.empty(parameters[loan.parameter].device).zero_()
                channel.send(loan.home, [gradient], back=True)
            elif loan.home == self.axis.rank:
                (x,) = channel.receive(loan.borrower, [meta], back=True)
                before = own.get(loan.parameter)
                own[loan.parameter] = x if before is None else before + x
        channel.finish()
        group = compat.process_group(self.axis.group)
        if self.graded is None:  # the same in every call
            has = [int(own.get(i) is not None) for i in range(len(parameters))]
            device = channel.device
            self.graded = torch.tensor(has, dtype=torch.int32, device=device)
            dist.all_reduce(self.graded, op=dist.ReduceOp.MAX, group=group)
            self.graded = self.graded.cpu()
        found: list[torch.Tensor | None] = []
        for i, (parameter, home) in enumerate(zip(parameters, self.homes)):
            gradient = own.get(i)
            if not parameter.requires_grad or not self.graded[i]:
                found.append(None)
                continue
            if gradient is None:
                gradient = torch.zeros_like(parameter, dtype=self.sums[i])
            if home is None:
                gradient = gradient.clone()
                dist.all_reduce(gradient, group=group)
            if i in self.given:
                for axis in self.parts:
                    dist.all_reduce(gradient, group=compat.process_group(axis.group))
                gradient = gradient.to(parameter.dtype)
            found.append(gradient)
        return found

    def _made(self, result: PipelineResult, runs: Sequence[StageRun]) -> list[torch.Tensor]:
        """The parts of a result that this rank has made, a micro-batch each; handed out once."""
        if result.rank != self.axis.rank:
            return []
        made = runs[result.chunk].results
        return [made[k].pop(result.position) for k in range(self.microbatches)]

    def _awaited(
        self, result: PipelineResult, runs: Sequence[StageRun], channel: GroupChannel
    ) -> torch.Tensor:
        """A result that stays where it is made until somebody reads it: a collective over the axis,
        and those of a stage."""
        parts, device = self._made(result, runs), channel.device
        axes = [self.axis, *(axis for axis, _ in result.shards)]

        def fetch() -> torch.Tensor:
            what = f"the read of output {result.position} of a pipeline"
            with CollectiveRegion(what, axes, [self.axis]), torch.no_grad():
                return self._on_all(result, parts, channel)

        shown = torch.empty((), dtype=result.like.dtype, device=device)
        return LazyGather(FetchedWhole(shown, self.axis, fetch), result.like.shape, False)

    def _parts_of_gradient(
        self, result: PipelineResult, gradient: torch.Tensor
    ) -> list[torch.Tensor | None]:
        """What of the gradient of a whole result is that of each micro-batch's part here."""
        for axis, shard in reversed(result.shards):
            gradient = redistribute(gradient, I, gradient_state(shard), axis)
        dim = shard_dim(result.state)
        if dim is not None:
            return list(gradient.chunk(self.microbatches, dim))
        alone = result.state != P  # made alike in all of them, and taken from the first
        return [gradient, *[None if alone else gradient] * (self.microbatches - 1)]

    def _on_all(
        self, result: PipelineResult, parts: Sequence[torch.Tensor], channel: GroupChannel
    ) -> torch.Tensor:
        """A result of the whole batch, sent by the stage that has made its parts."""
        if result.rank == self.axis.rank:
            for axis, shard in result.shards:
                if shard_dim(shard) is not None:
                    parts = [convert(part, shard, I, axis) for part in parts]
            dim = shard_dim(result.state)
            if dim is not None:
                whole = torch.cat(list(parts), dim)
            else:
                whole = torch.stack(list(parts)).sum(0) if result.state == P else parts[0].clone()
            whole = whole.contiguous()
        else:
            like = result.like
            whole = torch.empty(tuple(like.shape), dtype=like.dtype, device=channel.device)
        data = whole.view(-1).view(torch.uint8) if whole.dtype == torch.bool else whole
        group = compat.process_group(self.axis.group)
        dist.broadcast(data, group=group, group_src=result.rank)
        return whole
