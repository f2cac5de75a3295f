from autoshard import export as export
from autoshard import rng as rng
from autoshard import weights as weights
from autoshard.compiling import render as render
from autoshard.config import Config as Config
from autoshard.config import Precision as Precision
from autoshard.errors import AutoshardError as AutoshardError
from autoshard.mesh_search import search_meshes as search_meshes
from autoshard.parameters import load_safetensors as load_safetensors
from autoshard.planning import Plan as Plan
from autoshard.planning.rules import sharding_rule as sharding_rule
from autoshard.program import Program as Program
from autoshard.program import programs as programs
from autoshard.runtime.optimizer import offload_optimizer as offload_optimizer
from autoshard.runtime.optimizer import optimizer as optimizer
from autoshard.runtime.parameters import discard_pending as discard_pending
from autoshard.runtime.parameters import full_state_dict as full_state_dict
from autoshard.runtime.parameters import no_sync as no_sync
from autoshard.sharding import reshard as reshard
from autoshard.sharding import shard as shard
from autoshard.tracing import trace as trace
from autoshard.verification import Proof as Proof
from autoshard.verification import verify as verify

__version__: str
