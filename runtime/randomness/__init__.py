"""Random numbers that do not depend on the mesh, and the states they start from."""

from autoshard.runtime.randomness.distributions import (
    cauchy,
    geometric,
    integers,
    log_normal,
    multinomial,
    normal_around,
    normal_each,
    normal_scaled,
    rrelu,
)
from autoshard.runtime.randomness.draws import (
    ATTENTION,
    attention,
    bernoulli,
    bernoulli_p,
    draw_apart,
    draw_for,
    dropout,
    exponential,
    feature_dropout,
    native_dropout,
    normal,
    on_microbatch,
    on_shard,
    shared_seed,
    tracked_seeds,
    uniform,
)
from autoshard.runtime.randomness.generators import (
    DATA,
    DEFAULT,
    TENSOR,
    TRACKER,
    GeneratorState,
    fork,
    region,
)
from autoshard.runtime.randomness.philox import DRAWING, VERSION, Drawing
