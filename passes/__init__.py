"""Graph passes: one a file. What they share is in base.py and lib/, their order in pipeline.py."""

if __name__ != "autoshard.passes":
    raise ImportError(f"import this package as 'autoshard.passes', not {__name__!r}")

from autoshard.passes.base import (
    SILENT,
    Context,
    Pass,
    Report,
    Watch,
    emit,
    local_value,
    module_path,
    replace,
    set_fate,
    user_line,
)
from autoshard.passes.bucket_gradients import BucketGradients
from autoshard.passes.bucket_parameters import BucketParameters
from autoshard.passes.canonicalize import Canonicalize
from autoshard.passes.chunk_loss import ChunkLoss, LossFound
from autoshard.passes.data_parallel import DataParallel, PendingInput
from autoshard.passes.exchange_experts import ExchangeExperts
from autoshard.passes.expand_grouped_heads import ExpandGroupedHeads
from autoshard.passes.float8_products import Float8Products, ProductFound
from autoshard.passes.fuse_collectives import FuseCollectives
from autoshard.passes.fuse_inference_layers import FuseInferenceLayers
from autoshard.passes.global_token_mean import GlobalTokenMean
from autoshard.passes.invariant_random import InvariantRandom
from autoshard.passes.lib.bucketing import (
    ALL_REDUCE,
    COLLECTIVES,
    GATHERS,
    WAIT,
    aten,
    c10d,
    start_of,
    waits_of,
)
from autoshard.passes.lib.layouts import permutation
from autoshard.passes.localize import Localize, Rewriting
from autoshard.passes.match_experts import MatchExperts, MixtureFound
from autoshard.passes.number_draws import NumberDraws
from autoshard.passes.pipeline import (
    OPTIONAL,
    ORDER,
    Stage,
    after_cut,
    exchange,
    finish,
    prepare,
    rank_program,
    run_stage,
    specialize,
)
from autoshard.passes.recover_masks import ONES, POSITIONS, MaskFound, RecoverMasks, unrepeated
from autoshard.passes.shift_labels import ShiftLabels
from autoshard.passes.split_recurrent import SplitRecurrent
from autoshard.passes.unflatten_losses import UnflattenLosses
from autoshard.passes.unflatten_products import UnflattenProducts
