"""Operators computed on shards: the algorithms that sharding rules name."""

from autoshard.runtime.operators.attention import (
    attend_by_heads,
    attend_to_both_ends,
    attend_to_prefix,
    attend_to_shared_head,
)
from autoshard.runtime.operators.bound import (
    Bound,
    share_of_equal_mean,
    share_of_mean,
    unbound,
    with_local_groups,
)
from autoshard.runtime.operators.chunked_loss import (
    CHUNKED_LOSS,
    RowFunction,
    as_text,
    chunked_cross_entropy,
    copies_of,
    kept_by,
    reductions_of,
    rows_a_chunk,
    scratch_bytes,
    scratch_of,
)
from autoshard.runtime.operators.expert_body import (
    ELEMENT,
    OFFS,
    OWNER,
    PRODUCTS,
    ROWS,
    STACK,
    WEIGHT,
    Body,
    Instruction,
    parse,
)
from autoshard.runtime.operators.experts import (
    EXPERTS,
    exchanged_experts,
    owned_experts,
    rank_rows,
    rows_travel,
    split_experts,
)
from autoshard.runtime.operators.float8 import (
    FLOAT8_LINEAR,
    FLOAT8_MULTIPLE,
    FLOAT8_RECIPES,
    ROWWISE,
    split_float8_linear,
)
from autoshard.runtime.operators.fused_dims import pieces, split_parts, unfold_parts, with_parts
from autoshard.runtime.operators.vocabulary import (
    MEAN,
    NONE,
    log_softmax,
    logsumexp,
    loss_over_tokens,
    loss_over_tokens_and_classes,
    own_tokens,
    share_of_tokens,
    softmax,
    stand_in_targets,
    stand_in_weight,
    vocab_parallel_cross_entropy,
    vocab_parallel_embedding,
    vocab_parallel_nll,
)
