"""The search of a plan: what is asked, the cheapest of one axis or of two, those that fit; and
where a graph may be cut into stages."""

from autoshard.planning.search.asked import Request, fingerprint, with_graph
from autoshard.planning.search.one_axis import PlanEstimate, at_dearer_bytes, estimates, plan_graph
from autoshard.planning.search.stages import (
    JoinedChoices,
    cheap_places,
    crossing,
    part_trade,
    places,
)
from autoshard.planning.search.two_axes import TwoAxes, both_at_dearer_bytes, plan_both
