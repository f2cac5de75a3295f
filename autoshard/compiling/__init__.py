"""Compiling a rank's program: its data and collectives, inner compilers, graph text, dumps."""

from __future__ import annotations

from autoshard.capture import label, symbols, tandem_repeats
from autoshard.compiling.any_rank import is_for_any_rank
from autoshard.compiling.backward_cut import (
    BackwardCut,
    SplitBackward,
    add_at_once,
    cut_backward,
    results_of,
)
from autoshard.compiling.built import Built, off_meta
from autoshard.compiling.collectives import Collective, collectives_of, loss_arguments
from autoshard.compiling.cuda_graphs import (
    check_inductor,
    not_captured,
    options_of,
    rank_settings,
    unsharded_settings,
)
from autoshard.compiling.debugging import (
    EQUAL_LAYERS,
    DebugWatch,
    doing,
    refuse_unsharded,
    settings,
)
from autoshard.compiling.inner import check_serving, compile_local, made_ahead
from autoshard.compiling.regions import layer_of, parts_of
from autoshard.compiling.rendering import render
from autoshard.compiling.watching import watched
