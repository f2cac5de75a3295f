"""Placements and what is kept for backward, decided together."""

from __future__ import annotations

from autoshard.planning.kept_values.search import KeptBefore, KeptSearch
