"""Give parameters the storage a plan chose; fill and save them."""

from autoshard.parameters.meta_buffers import initialise_buffers
from autoshard.parameters.safetensors import load_safetensors
from autoshard.parameters.storage import store, store_at_home, store_unplanned
from autoshard.parameters.without_graph import expect_reduced, store_what_is_left
