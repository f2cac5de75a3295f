"""The options of the backend, checked."""

from __future__ import annotations

from autoshard.config.acting import ACTING, refuse_removed
from autoshard.config.options import Config, Precision, axis_sizes
