"""The key-value cache of a rank graph: its rewriting, and the proof that nothing else is cached."""

from autoshard.export.rank_graph.cache.comparison import (
    Runner,
    check_cached,
    stand_in,
    whole_graph,
)
from autoshard.export.rank_graph.cache.last_tokens import KeepLastTokens
from autoshard.export.rank_graph.cache.rewriting import WithCache
