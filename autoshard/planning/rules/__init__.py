"""Operator knowledge: which strategies each operator has, one line an operator."""

from autoshard.planning.rules.registry import rules_for, sharding_rule, strategies
from autoshard.planning.rules.views import size_entry
