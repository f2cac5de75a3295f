"""Two axes planned together: pairs of states, exact, with the least that any two plans cost."""

from __future__ import annotations

from autoshard.planning.two_axes.plan import TwoAxes, both_at_dearer_bytes, plan_both
