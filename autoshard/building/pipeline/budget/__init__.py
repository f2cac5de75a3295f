"""Stages under a memory budget: what each computes again in backward, so that its rank stays within
it."""

from __future__ import annotations

from autoshard.building.pipeline.budget.stage_fitting import fit_stages, lines_of_recomputation
