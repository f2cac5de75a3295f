"""What is asked of the planner: the request, its other axes, and a plan file that it follows."""

from __future__ import annotations

from autoshard.planning.asked.data_parallel import data_axes
from autoshard.planning.asked.ep_axis import charged_on_ep, chooses_on_ep, expert_axis, parts_on_ep
from autoshard.planning.asked.followed_plan import constrain, fingerprint, keep_only, with_graph
from autoshard.planning.asked.request import Request
