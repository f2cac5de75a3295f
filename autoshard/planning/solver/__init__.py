"""Exact minimisation: of pairwise costs over a factor graph, and of a cut."""

from __future__ import annotations

from autoshard.planning.solver.cuts import UNCUT, minimum_cut
from autoshard.planning.solver.factor_graph import FactorGraph, Solution, TooWide
