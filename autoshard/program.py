"""Program: one model, planned and rewritten for one rank, with everything one may ask of it."""

from __future__ import annotations

import os
from dataclasses import dataclass

from autoshard.compiling import Built, Collective, collectives_of
from autoshard.explain import explain, write_page
from autoshard.memory import Memory, Moment, step_of, summary


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

    def explain(self, width: int | None = None) -> str:
        """The plan as text: by module, parameters with reasons, collectives by cost, alternatives.

        width: columns to use; None: the terminal's, or 100 where the output is no terminal.
        """
        return explain(self, width)

    def explain_html(self, path: str | os.PathLike[str]) -> None:
        """Write the same, with the graph and the memory over a step, as one HTML page."""
        write_page(self, path)
