"""A part of a graph on two halves of its rows: where it can be, in which order, what it costs."""

from __future__ import annotations

from autoshard.planning.halves.prices import Found, Halving, halves_seconds, halving_for
from autoshard.planning.halves.region import HALVES, Halves, find_halves, leaving
from autoshard.planning.halves.timeline import Scheduled, interleave
