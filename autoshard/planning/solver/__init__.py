"""Exact minimisation of pairwise costs over a factor graph."""

from __future__ import annotations

from autoshard.planning.solver.factor_graph import FactorGraph, Solution, TooWide
