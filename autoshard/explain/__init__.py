"""Text and HTML about a program: what is sharded, why not, and what it costs."""

from __future__ import annotations

from autoshard.explain.html import write_page
from autoshard.explain.reasons import check_strict
from autoshard.explain.stage_page import pipeline_page
from autoshard.explain.tables import human, table
from autoshard.explain.text import explain, explain_plan
