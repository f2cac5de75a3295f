"""A stage at work: forwards and backwards of micro-batches, with their transfers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from autoshard.runtime.pipeline.channel import GroupChannel, ValueMeta
from autoshard.runtime.pipeline.schedules import Action


class TwoBackwards(Protocol):
    """A differentiated stage whose backward is computed in two parts, without autograd."""

    def forward(self, arguments: Sequence[torch.Tensor]) -> tuple[Sequence[torch.Tensor], Any]:
        """The outputs, and what is kept for the backward."""
        ...

    def by_inputs(
        self, kept: Any, gradients: Mapping[int, torch.Tensor]
    ) -> tuple[Sequence[torch.Tensor | None], Any]:
        """The gradients of the received values that are read, and what is kept for the other part.
        gradients: of outputs, by their position."""
        ...

    def by_weights(self, kept: Any, sums: Sequence[torch.Tensor]) -> None:
        """Add the gradients of the parameters that have one to their sums."""
        ...


@dataclass(kw_only=True)
class StageProgram:
    """The compiled graph of a stage, and what its arguments and outputs are.

    run: of the parameters, the rows of the shared values, the values of `received` that `reads`
    numbers, and in training the sums of the gradients of `graded` parameters, to which its backward
    adds. parts: the same in parts, where the schedule cuts backwards. ranks: that stages take turns
    on. made: for each of `sent` the output that it is, or None; passed: or the place in `received`
    of what is passed on. results: the position of each result of a micro-batch, and its output.
    loss: the output that is differentiated, where it is made here. parameters: those of the graph
    that it reads; shared: those of the rank's shared values.
    """

    run: Callable[..., Sequence[torch.Tensor]]
    number: int
    ranks: int
    reads: Sequence[int]
    received: Sequence[ValueMeta]
    sent: Sequence[ValueMeta]
    made: Sequence[int | None]
    passed: Sequence[int | None]
    results: Sequence[tuple[int, int]]
    loss: int | None
    graded: Sequence[int] = ()
    parts: TwoBackwards | None = None
    parameters: Sequence[int] = ()
    shared: Sequence[int] = ()

    @property
    def before(self) -> int:
        """The rank of the stage before."""
        return (self.number - 1) % self.ranks

    @property
    def after(self) -> int:
        """The rank of the next stage."""
        return (self.number + 1) % self.ranks


class StageRun:
    """One call of a stage: all its micro-batches.

    rows: the shared values of a micro-batch, by its number. train: whether gradients are wanted.
    sums: the dtype in which those of each parameter add up; None: as they are computed. After the
    actions, `gradients` has one entry a parameter, None where there is none, and `results` one a
    micro-batch: the results by their position. arrived: the gradients of results, by their
    position, one a micro-batch, which backwards need where no loss is made in the stages.
    """

    def __init__(
        self,
        program: StageProgram,
        channel: GroupChannel,
        parameters: Sequence[torch.Tensor],
        rows: Callable[[int], Sequence[torch.Tensor]],
        train: bool,
        sums: Sequence[torch.dtype] | None = None,
    ) -> None:
        self.program, self.channel, self.rows, self.train = program, channel, rows, train
        self.parameters = [p.detach().requires_grad_(train and p.requires_grad) for p in parameters]
        self.gradients: list[torch.Tensor | None] = [None] * len(parameters)
        for i in program.graded if train else ():
            dtype = parameters[i].dtype if sums is None else sums[i]
            self.gradients[i] = torch.zeros_like(parameters[i], dtype=dtype, requires_grad=False)
        self.results: dict[int, dict[int, torch.Tensor]] = {}
        self.arrived: dict[int, Sequence[torch.Tensor | None]] = {}
        self.done: list[Action] = []
        self._live: dict[int, tuple[list[torch.Tensor], Any]] = {}
        self._late: dict[int, Any] = {}

    def run(self, action: Action) -> None:
        """Do one action, with the transfers it needs."""
        if action.work == "F":
            self._forward(action.microbatch)
        elif action.work == "W":
            assert self.program.parts is not None
            self.program.parts.by_weights(self._late.pop(action.microbatch), self._sums())
        else:
            self._backward(action.microbatch)
        self.done.append(action)

    def _forward(self, k: int) -> None:
        program = self.program
        received: list[torch.Tensor] = []
        if program.received:
            received = self.channel.receive(program.before, program.received, back=False)
        read = [received[i] for i in program.reads]
        rows = [each.contiguous() for each in self.rows(k)]  # as the stage was compiled for
        kept: Any
        if self.train and program.parts is not None:
            arguments = [*self.parameters, *rows, *read]
            outputs, kept = program.parts.forward(arguments)
        else:
            for value, meta in zip(received, program.received):
                value.requires_grad_(self.train and meta.graded)
            with torch.set_grad_enabled(self.train):
                outputs = program.run(*self.parameters, *rows, *read, *self._sums())
            # not the outputs: what no backward reads is free once it is sent
            kept = [get_gradient_edge(x) if x.requires_grad else None for x in outputs]
        sent = [
            (received[of] if at is None else outputs[at]).detach()  # type: ignore[index]
            for at, of in zip(program.made, program.passed)
        ]
        self.results[k] = {position: outputs[at].detach() for position, at in program.results}
        if self.train:
            self._live[k] = received, kept
        if sent:
            self.channel.send(program.after, sent, back=False)

    def _backward(self, k: int) -> None:
        program = self.program
        received, kept = self._live.pop(k)
        graded = [i for i, meta in enumerate(program.sent) if meta.graded]
        arrived: dict[int, torch.Tensor] = {}
        if graded:
            metas = [program.sent[i] for i in graded]
            values = self.channel.receive(program.after, metas, back=True)
            arrived = dict(zip(graded, values))
        gradients = {
            at: arrived[i] for i, at in enumerate(program.made) if at is not None and i in arrived
        }
        gradients |= self._of_results(k)
        if program.parts is not None:
            found, self._late[k] = program.parts.by_inputs(kept, gradients)
            back = dict(zip(program.reads, found))
        else:
            back = self._by_autograd(received, kept, gradients)
        for i, of in enumerate(program.passed):
            if of is not None and i in arrived:
                before = back.get(of)
                back[of] = arrived[i] if before is None else before + arrived[i]
        if program.received:
            sent = [
                torch.zeros_like(received[i]) if back.get(i) is None else back[i]
                for i, meta in enumerate(program.received)
                if meta.graded
            ]
            if sent:
                self.channel.send(program.before, sent, back=True)  # type: ignore[arg-type]

    def _of_results(self, k: int) -> dict[int, torch.Tensor]:
        """The gradients of a micro-batch's results, by the output that they are."""
        found: dict[int, torch.Tensor] = {}
        for position, at in self.program.results:
            if at == self.program.loss:  # in bfloat16, too
                found[at] = torch.ones_like(self.results[k][position])
            elif position in self.arrived and (part := self.arrived[position][k]) is not None:
                found[at] = part.contiguous()
        return found

    def _by_autograd(
        self,
        received: Sequence[torch.Tensor],
        outputs: Sequence[GradientEdge | None],
        gradients: dict[int, torch.Tensor],
    ) -> dict[int, torch.Tensor | None]:
        """The gradients of received values, by their number; those of parameters add up."""
        program = self.program
        roots = [edge for at in gradients if (edge := outputs[at]) is not None]
        seeds = [gradients[at] for at in gradients if outputs[at] is not None]
        read = [i for i in program.reads if program.received[i].graded]
        # parameters get none, but only what leads to a leaf is run
        leaves = [*(received[i] for i in read), *(self.parameters[i] for i in program.graded)]
        found: Sequence[torch.Tensor | None] = [None] * len(leaves)
        if roots and leaves:
            found = torch.autograd.grad(roots, leaves, seeds, allow_unused=True)
        return dict(zip(read, found))

    def _sums(self) -> list[torch.Tensor]:
        """Aliases of the sums: two forwards may precede one backward, see `summed`."""
        return [total.data for total in self.gradients if total is not None]
