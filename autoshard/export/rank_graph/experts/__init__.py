"""Mixtures of experts in a rank graph: every expert on all tokens, or on those that chose it."""

from __future__ import annotations

from autoshard.export.rank_graph.experts.every_token import all_experts
from autoshard.export.rank_graph.experts.prices import run_cheaper_rows
