"""Pipeline parallelism: a serial graph cut into micro-batches and stages, and run by a schedule."""

from autoshard.building.pipeline.entry import pipelined
from autoshard.building.pipeline.program import build_pipeline
from autoshard.building.pipeline.stage_memory import fit_stages
from autoshard.building.pipeline.traced import TracedPipeline
