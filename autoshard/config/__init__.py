"""The options of the backend, checked."""

from autoshard.config.acting import ACTING
from autoshard.config.groups import GROUPS, entries_of, fields_of, nested, option, refuse_removed
from autoshard.config.options import Config, Precision, axis_sizes
