"""Exact minimisation: of pairwise costs over a factor graph, and of a cut."""

from __future__ import annotations

from autoshard.planning.solver.factor_graph import FactorGraph, Solution, TooWide
from autoshard.planning.solver.minimum_cut import UNCUT, minimum_cut
