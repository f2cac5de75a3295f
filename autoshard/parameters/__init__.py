"""Give parameters the storage a plan chose; fill and save them."""

from autoshard.parameters.safetensors import initialise_buffers, load_safetensors
from autoshard.parameters.storage import (
    expect_reduced,
    store,
    store_at_home,
    store_unplanned,
    store_what_is_left,
)
