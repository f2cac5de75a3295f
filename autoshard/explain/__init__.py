"""Text and HTML about a program: what is sharded, why not, and what it costs."""

from autoshard.explain.pages import pipeline_page, write_page
from autoshard.explain.reasons import check_strict
from autoshard.explain.text import explain
from autoshard.explain.text_costs import human, table
