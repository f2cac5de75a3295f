"""Which mesh: every factorisation priced, and the choice at a first call."""

from __future__ import annotations

from autoshard.mesh_search.first_call import choose
from autoshard.mesh_search.prices import MeshPrice, MeshSearch
from autoshard.mesh_search.search import search_meshes
from autoshard.mesh_search.stages import PipelinePrice
