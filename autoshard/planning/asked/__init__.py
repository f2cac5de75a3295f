"""What is asked of the planner: the request, its other axes, and a plan file that it follows."""

from __future__ import annotations

from autoshard.planning.asked.data_parallel import data_axes
from autoshard.planning.asked.ep_axis import chooses_on_ep, expert_axis, note_choices
from autoshard.planning.asked.followed_plan import constrain, fingerprint, keep_only, with_graph
from autoshard.planning.asked.request import Request
