"""Program: one model, planned and rewritten for one rank, with everything one may ask of it.

The programs that are alive in this process, for `autoshard.programs`.
"""

import itertools
import os
import weakref
from collections.abc import Iterable, Set
from dataclasses import dataclass

import torch
from torch import fx, nn

from autoshard.compiling import Built, Collective, collectives_of
from autoshard.explain import explain, write_page
from autoshard.memory import Memory, Moment, step_of, summary
from autoshard.runtime.graph_meta import ENABLE_GRAD


@dataclass(kw_only=True)
class Program(Built):
    """The program of one graph on one rank: `autoshard.trace` returns it, the backend builds it.

    Its fields are those of `autoshard.compiling.Built`; its methods answer questions about them.
    """

    def collectives(self) -> list[Collective]:
        """One entry a collective, forward then backward, in the order of issue."""
        return collectives_of(self)

    def memory(self, optimizer: str | None = None, inner: str | None = None) -> Memory:
        """Bytes a rank holds in a training step; see `autoshard.memory.Memory`.

        optimizer: a key of `autoshard.memory.OPTIMIZERS`: "adamw" (one parameter at a time),
        "adamw_foreach", "adamw_fused", "momentum" (SGD with it), "sgd", or "host": any whose states
        are there; None: "adamw", or what the option `optimizer_states` says. inner: what runs the
        graphs, None: the program's own; "inductor" allocates what Inductor's code allocates, others
        run operator by operator. Exact for what is stored between steps.
        """
        return summary(step_of(self, optimizer, inner))

    def memory_timeline(
        self, optimizer: str | None = None, inner: str | None = None
    ) -> list[Moment]:
        """What is alive while each operator of a step runs: forward, backward, then the update.
        Arguments as for `memory`; with Inductor an entry is a kernel of its code."""
        return list(step_of(self, optimizer, inner).moments())

    def explain(
        self, width: int | None = None, optimizer: torch.optim.Optimizer | None = None
    ) -> str:
        """The plan as text: by module, parameters with reasons, collectives by cost, alternatives.

        width: columns to use; None: the terminal's, or 100 where the output is no terminal.
        optimizer: one of `autoshard.optimizer`, whose step is told too; before its first step,
        call it on all ranks.
        """
        return explain(self, width, optimizer=optimizer)

    def explain_html(self, path: str | os.PathLike[str]) -> None:
        """Write the same, with the graph and the memory over a step, as one HTML page."""
        write_page(self, path)


class ProgramHandle:
    """A compiled function's hold on its program, which ends when the program's parameters die.

    Dynamo keeps a compiled function until `torch.compiler.reset()`, also where the model that it
    was compiled for is gone. The function therefore holds this handle in place of the program.
    Until AOTAutograd has compiled the backward, which it does at the first one, the program stays:
    Dynamo may serve another model of the same class with the same function.
    parameters: those that the program reads; without any, the program lives as long as the handle.
    """

    def __init__(self, program: Program, parameters: Iterable[nn.Parameter]) -> None:
        self._program: Program | None = program
        enables = bool(program.serial.meta.get(ENABLE_GRAD))  # a graph that turns gradients on
        self._backward_to_come = enables or torch.is_grad_enabled()
        self.microbatch = program.microbatch
        me = weakref.ref(self)

        def died(parameter: weakref.ref[nn.Parameter]) -> None:
            handle = me()
            if handle is not None:
                handle._parameters.discard(parameter)
                handle._release()

        self._parameters = {weakref.ref(parameter, died) for parameter in parameters}
        self._has_parameters = bool(self._parameters)

    def finish(self, graph: fx.GraphModule, backward: bool) -> None:
        """`Program.finish`, called with each graph that AOTAutograd makes."""
        assert self._program is not None, "AOTAutograd compiles one backward a graph"
        self._program.finish(graph, backward)
        if backward:
            self._backward_to_come = False
            self._release()

    def program_of(self, ids: Set[int] | None) -> Program | None:
        """The program, where one of its parameters is alive and, unless None, among `ids`."""
        alive = [p for ref in list(self._parameters) if (p := ref()) is not None]
        if ids is None:
            return self._program if alive or not self._has_parameters else None
        return self._program if any(id(p) in ids for p in alive) else None

    def _release(self) -> None:
        if self._has_parameters and not self._parameters and not self._backward_to_come:
            self._program = None


_handles: weakref.WeakValueDictionary[int, ProgramHandle] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def register(handle: ProgramHandle) -> None:
    """Have `programs` list a program for as long as its handle and a parameter of it are alive."""
    _handles[next(_numbers)] = handle


def programs(model: nn.Module | None = None) -> list[Program]:
    """The programs of this process whose models are alive, oldest first; of one model, where it is
    given. None after `torch.compiler.reset()`."""
    ids = None if model is None else set(map(id, model.parameters()))
    found = [handle.program_of(ids) for handle in list(_handles.values())]
    return [program for program in found if program is not None]
