"""The plan of a graph on one axis: the problem, its solution, and those that fit a budget."""

from __future__ import annotations

from autoshard.planning.one_axis.builder import builder_of, may_be_sharded
from autoshard.planning.one_axis.candidates import at_dearer_bytes, dearer, of_a_byte
from autoshard.planning.one_axis.estimated import PlanEstimate, priced
from autoshard.planning.one_axis.plan import plan_graph
from autoshard.planning.one_axis.solution import decided
