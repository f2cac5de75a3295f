"""Optimizer states in the memory of the host."""

from __future__ import annotations

from autoshard.runtime.offloading.optimizer import offload_optimizer
