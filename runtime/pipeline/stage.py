"""A stage at work: forwards and backwards of micro-batches, with their transfers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from autoshard.runtime.pipeline.channel import Channel, ValueMeta
from autoshard.runtime.pipeline.schedules import Action


@dataclass(kw_only=True)
class StageProgram:
    """The compiled graph of a stage, and what its arguments and outputs are.

    run: of the parameters, the rows of the shared values and the values of `received` that `reads`
    numbers; differentiable. made: for each of `sent` the output that it is, or None; passed: or the
    place in `received` of what is passed on. results: the position of each result of a micro-batch,
    and its output. loss: the output that is differentiated, where it is made here.
    """

    run: Callable[..., Sequence[torch.Tensor]]
    number: int
    stages: int
    reads: Sequence[int]
    received: Sequence[ValueMeta]
    sent: Sequence[ValueMeta]
    made: Sequence[int | None]
    passed: Sequence[int | None]
    results: Sequence[tuple[int, int]]
    loss: int | None


class StageRun:
    """One call of a stage: all its micro-batches.

    rows: the shared values of a micro-batch, by its number. train: whether gradients are wanted.
    After the actions, `gradients` has one entry a parameter, and `results` one a micro-batch: the
    results by their position.
    """

    def __init__(
        self,
        program: StageProgram,
        channel: Channel,
        parameters: Sequence[torch.Tensor],
        rows: Callable[[int], Sequence[torch.Tensor]],
        train: bool,
    ) -> None:
        self.program, self.channel, self.rows, self.train = program, channel, rows, train
        self.parameters = [p.detach().requires_grad_(train and p.requires_grad) for p in parameters]
        self.gradients: list[torch.Tensor | None] = [None] * len(parameters)
        self.results: dict[int, dict[int, torch.Tensor]] = {}
        self.done: list[Action] = []
        self._owned: set[int] = set()
        self._live: dict[int, tuple[list[torch.Tensor], Sequence[torch.Tensor]]] = {}

    def run(self, action: Action) -> None:
        """Do one action, with the transfers it needs."""
        if action.work == "F":
            self._forward(action.microbatch)
        else:
            self._backward(action.microbatch)
        self.done.append(action)

    def _forward(self, k: int) -> None:
        program = self.program
        received: list[torch.Tensor] = []
        if program.received:
            received = self.channel.receive(program.number - 1, program.received, back=False)
        for value, meta in zip(received, program.received):
            value.requires_grad_(self.train and meta.graded)
        read = [received[i] for i in program.reads]
        with torch.set_grad_enabled(self.train):
            outputs = program.run(*self.parameters, *self.rows(k), *read)
        sent = [
            (received[of] if at is None else outputs[at]).detach()  # type: ignore[index]
            for at, of in zip(program.made, program.passed)
        ]
        self.results[k] = {position: outputs[at].detach() for position, at in program.results}
        if self.train:
            self._live[k] = received, outputs
        if sent:
            self.channel.send(program.number + 1, sent, back=False)

    def _backward(self, k: int) -> None:
        program = self.program
        received, outputs = self._live.pop(k)
        graded = [i for i, meta in enumerate(program.sent) if meta.graded]
        arrived: dict[int, torch.Tensor] = {}
        if graded:
            metas = [program.sent[i] for i in graded]
            values = self.channel.receive(program.number + 1, metas, back=True)
            arrived = dict(zip(graded, values))
        roots, seeds = [], []
        for i, gradient in arrived.items():
            at = program.made[i]
            if at is not None and outputs[at].requires_grad:
                roots.append(outputs[at])
                seeds.append(gradient)
        if program.loss is not None:
            roots.append(outputs[program.loss])
            seeds.append(torch.ones_like(outputs[program.loss]))
        read = [i for i in program.reads if program.received[i].graded]
        trained = [i for i, p in enumerate(self.parameters) if p.requires_grad]
        leaves = [*(received[i] for i in read), *(self.parameters[i] for i in trained)]
        found: Sequence[torch.Tensor | None] = [None] * len(leaves)
        if roots and leaves:
            found = torch.autograd.grad(roots, leaves, seeds, allow_unused=True)
        back = dict(zip(read, found))
        for i, of in enumerate(program.passed):
            if of is not None and i in arrived:
                before = back.get(of)
                back[of] = arrived[i] if before is None else before + arrived[i]
        for i, own in zip(trained, found[len(read) :]):
            self._add(i, own)
        if program.received:
            sent = [
                torch.zeros_like(received[i]) if back.get(i) is None else back[i]
                for i, meta in enumerate(program.received)
                if meta.graded
            ]
            if sent:
                self.channel.send(program.number - 1, sent, back=True)  # type: ignore[arg-type]

    def _add(self, i: int, gradient: torch.Tensor | None) -> None:
        """Add to the sum of a parameter's gradients; in place, once that is memory of its own."""
        if gradient is None:
            return
        total = self.gradients[i]
        if total is None:
            self.gradients[i] = gradient
        elif i in self._owned:
            total.add_(gradient)
        else:  # what autograd returns may be one tensor for two parameters
            self.gradients[i] = total + gradient
            self._owned.add(i)
