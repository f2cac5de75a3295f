"""Placements and what is kept for backward, decided together."""

from __future__ import annotations

from autoshard.planning.kept_values.joined_choices import JoinedChoices
from autoshard.planning.kept_values.search import KeptBefore, KeptSearch
from autoshard.planning.kept_values.trades import PartTrade, part_trade
