"""Attention in any form that models write it in, as `operators.attention`, and what it may see."""

from autoshard.export.rank_graph.attention_forms.engine_forms import (
    CachedMasks,
    ExpandAttention,
    PlainAttention,
    WriteMasks,
)
from autoshard.export.rank_graph.attention_forms.masks import Sight
from autoshard.export.rank_graph.attention_forms.written import FuseWritten
from autoshard.export.rank_graph.operators import is_expanded
