"""Attention in any form that models write it in, as `operators.attention`, and what it may see."""

from __future__ import annotations

from autoshard.export.rank_graph.attention_forms.expanded import expand_attention
from autoshard.export.rank_graph.attention_forms.mask_nodes import CachedMasks, write_masks
from autoshard.export.rank_graph.attention_forms.masks import Sight
from autoshard.export.rank_graph.attention_forms.plain import plain_attention
from autoshard.export.rank_graph.operators import is_expanded
