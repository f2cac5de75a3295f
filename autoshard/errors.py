"""Errors a user may want to catch; the classes are defined in `autoshard.runtime.errors`."""

from __future__ import annotations

from autoshard.runtime.errors import (
    AutoshardError,
    CaptureError,
    ConfigError,
    PlanError,
    PlanMismatchError,
    ShardingRuleError,
    message,
    source_line,
)

__all__ = [
    "AutoshardError",
    "CaptureError",
    "ConfigError",
    "PlanError",
    "PlanMismatchError",
    "ShardingRuleError",
    "message",
    "source_line",
]
