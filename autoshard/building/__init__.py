"""From a captured call to the program of each rank: built, and agreed on by all."""

from autoshard.building.all_ranks import (
    agree_on_unsharded,
    build_agreed,
    comparison,
    digest_of,
    unplanned_parameters,
)
from autoshard.building.batch_check import agreed_facts, batch_checker, batch_facts, holds
from autoshard.building.one_rank import ask, build_program
from autoshard.building.planned import Planned
