"""Losses by chunks of rows: which of a graph can go so, and what that spares and adds."""

from autoshard.planning.chunked_loss.choice import (
    LARGE,
    NEEDED,
    Chunking,
    Losses,
    LossPlan,
    chunking_of,
    chunks_of,
    plan_losses,
)
from autoshard.planning.chunked_loss.head import (
    NAMES,
    Head,
    LeftWhole,
    arguments_of,
    head_of,
    is_loss,
)
