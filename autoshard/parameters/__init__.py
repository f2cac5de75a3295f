"""Parameters: how a graph uses them, the storage a plan chose for them; fill and save them."""

from autoshard.parameters.parameter_use import (
    lowered_dtypes,
    say_stored,
    traced_microbatch,
    use_by,
)
from autoshard.parameters.safetensors import initialise_buffers, load_safetensors
from autoshard.parameters.storage import (
    expect_reduced,
    store,
    store_at_home,
    store_unplanned,
    store_what_is_left,
)
