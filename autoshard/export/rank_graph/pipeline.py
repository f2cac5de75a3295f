"""The passes over a rank's graph for export: their order in one literal tuple, and their runner.

They follow `localize` of the passes that training has, whose contract is theirs: each is a frozen
dataclass, keeps the graph in place, computes the values of the nodes it makes, and reports.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from autoshard.compiling import DebugWatch
from autoshard.export.rank_graph.attention_forms import (
    ExpandAttention,
    FuseWritten,
    PlainAttention,
    WriteMasks,
)
from autoshard.export.rank_graph.cache import KeepLastTokens, WithCache
from autoshard.export.rank_graph.chosen_rows import RunCheaperRows
from autoshard.export.rank_graph.core_operators import ReduceToCore
from autoshard.export.rank_graph.encoder import SplitEncoder
from autoshard.export.rank_graph.placeholders import NamePlaceholders
from autoshard.export.rank_graph.tidy import DropUnread, Tidy
from autoshard.export.rank_graph.weights import QuantizeWeights
from autoshard.passes import SILENT, Context, Pass, Report, Stage, Watch, run_stage
from autoshard.runtime.collectives import Axis

PIPELINE = (
    # one rank's local graph, as `localize` left it
    Stage("core", (ReduceToCore, NamePlaceholders, Tidy)),
    # that of an encoder-decoder, where its decoder gets a cache
    Stage("encoder", (SplitEncoder,)),
    # every graph, an encoder's of its own too
    Stage("attention", (FuseWritten, PlainAttention)),
    # a graph of whole sequences
    Stage("whole", (WriteMasks,)),
    # one with a key-value cache instead
    Stage("cache", (WithCache, KeepLastTokens)),
    # every graph
    Stage("layers", (RunCheaperRows, ExpandAttention, DropUnread)),
    # every graph, where weights are quantized; also what a cache is compared with
    Stage("weights", (QuantizeWeights,)),
)


class ExportWatch(DebugWatch):
    """Dumps and logs the passes of an export as those of a program; none is left out."""

    def runs(self, name: str) -> bool:
        """Always: what AUTOSHARD_DISABLE and AUTOSHARD_STOP_AFTER name are passes of a program."""
        return True


def rewrite(
    gm: fx.GraphModule,
    passes: Sequence[Pass],
    axis: Axis,
    watch: Watch = SILENT,
    phase: str = "",
) -> list[Report]:
    """Run passes over a rank's graph, in place and in the order of PIPELINE."""
    reports = []
    for stage in PIPELINE:
        mine = [one for one in passes if type(one) in stage.passes]
        if mine:
            reports += run_stage(stage.name, mine, gm, Context(axis), watch, phase, PIPELINE)
    return reports
