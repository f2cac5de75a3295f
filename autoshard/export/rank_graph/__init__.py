"""The inference graph of one rank, its weights and the directory they are written to."""

from autoshard.export.rank_graph.cache import Runner, stand_in
from autoshard.export.rank_graph.files import configuration, file_digest, write_ranks
from autoshard.export.rank_graph.graph import Port, RankGraph
from autoshard.export.rank_graph.operators import NONE, attention, dequantize, update_cache
from autoshard.export.rank_graph.plan import plan_inference
from autoshard.export.rank_graph.weights import read_weights
