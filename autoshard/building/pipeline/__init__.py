"""Pipeline parallelism: a serial graph cut into micro-batches and stages, and run by a schedule."""

from __future__ import annotations

from autoshard.building.pipeline.entry import pipelined
