"""Bytes a rank holds in a step, from the graphs that run."""

from autoshard.memory.phases import KINDS
from autoshard.memory.stage import StageMemory, memory_of_split_stage, memory_of_stage
from autoshard.memory.step import OPTIMIZERS, Memory, Moment, Step, step_of, summary
