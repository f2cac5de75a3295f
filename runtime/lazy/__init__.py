"""Outputs of a graph that stay this rank's part until eager code reads them."""

from __future__ import annotations

from autoshard.runtime.lazy.gather import Arrivals, LazyGather, give_back, wrap_outputs
