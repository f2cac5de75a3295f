"""Exact minimisation: of pairwise costs over a factor graph, of a cut, of a chain's stages."""

from autoshard.planning.solver.cuts import UNCUT, minimum_cut
from autoshard.planning.solver.elimination import fill_order
from autoshard.planning.solver.factor_graph import FactorGraph, Solution, TooWide
from autoshard.planning.solver.stage_cut import Chain, StageCut, cut_stages
