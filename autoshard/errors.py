"""Errors a user may want to catch; the classes are defined in `autoshard.runtime.errors`."""

from autoshard.runtime.errors import AutoshardError as AutoshardError
from autoshard.runtime.errors import CaptureError as CaptureError
from autoshard.runtime.errors import CollectiveError as CollectiveError
from autoshard.runtime.errors import ConfigError as ConfigError
from autoshard.runtime.errors import OutputError as OutputError
from autoshard.runtime.errors import PlanError as PlanError
from autoshard.runtime.errors import PlanMismatchError as PlanMismatchError
from autoshard.runtime.errors import did_you_mean as did_you_mean
from autoshard.runtime.errors import message as message
from autoshard.runtime.errors import shown as shown
from autoshard.runtime.errors import source_line as source_line
