"""The stages of a pipeline in a plan file."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from autoshard.runtime.input_file import MOST_RANKS, FileEntry

_ENTRIES = ("ranks", "schedule", "microbatches", "virtual_stages", "homes", "graphs")


@dataclass
class PipelinePlan:
    """ranks: of pp. virtual_stages: stages of each rank. homes: the rank that stores each
    parameter, by its name. graphs: for each graph of a micro-batch, by its fingerprint, the first
    operator of each stage but the first."""

    ranks: int
    schedule: str
    microbatches: int
    virtual_stages: int = 1
    homes: dict[str, int] = field(default_factory=dict)
    graphs: dict[str, list[str]] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """The entry of the file."""
        return {name: getattr(self, name) for name in _ENTRIES}


def read_pipeline(entry: FileEntry) -> PipelinePlan:
    """The stages of a plan file, or PlanError with what is wrong."""
    entry.only(_ENTRIES)
    ranks = entry.entry("ranks").integer(2, MOST_RANKS)
    homes, graphs = (entry.optional(name, {}).entries() for name in ("homes", "graphs"))
    return PipelinePlan(
        ranks=ranks,
        schedule=entry.entry("schedule").text("1f1b", "gpipe", "interleaved", "zb1"),
        microbatches=entry.entry("microbatches").integer(1, MOST_RANKS),
        virtual_stages=entry.optional("virtual_stages", 1).integer(1, MOST_RANKS),
        homes={name: home.integer(0, ranks - 1) for name, home in homes.items()},
        graphs={key: [one.text() for one in cuts.items()] for key, cuts in graphs.items()},
    )
