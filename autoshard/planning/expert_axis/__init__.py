"""What travels over ep for each mixture of experts, chosen in the plan of the axis beside it."""

from __future__ import annotations

from autoshard.planning.expert_axis.axis import STACKS, ExpertAxis
from autoshard.planning.expert_axis.tables import StackTables
