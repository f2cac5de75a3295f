"""The strategies that a node of the serial graph may use, and reasons against others."""

import torch
from torch import fx

from autoshard.planning.rules.call import OpCall, Rule, differentiable
from autoshard.planning.rules.custom_functions import CUSTOM_FUNCTION, custom_function
from autoshard.planning.rules.language import TextRule, elementwise
from autoshard.planning.rules.layers import SEEDS
from autoshard.planning.rules.outer_axis import beside
from autoshard.planning.rules.table import RULES
from autoshard.planning.strategy import Strategy, in_state, operands, value
from autoshard.runtime.collectives import I, R
from autoshard.runtime.operators import FLOAT8_LINEAR

Operator = str | torch._ops.OpOverload | torch._ops.OpOverloadPacket

_rules: dict[str, tuple[Rule, ...]] = {}


def sharding_rule(op: Operator, *rules: str | Rule) -> None:
    """Tell the planner how an operator may be sharded.

    op: an operator of torch.ops, or its name ("mylib::op", "mylib.op", "mylib.op.overload"). A rule
        for a packet holds for every overload that has none of its own.
    rules: each a line of the rule language (see autoshard.planning.rules.language), or a callable
        that takes an OpCall and yields Strategy objects. All that match a call are offered. They
        replace the rules the operator had.

    Raises ValueError where a text is wrong, naming the column and the remedy.

        autoshard.sharding_rule("mylib::scale_rows", "* r c, * r -> r c")
    """
    name = str(op).replace("::", ".")
    if not rules:
        raise ValueError(f'sharding_rule("{name}"): give at least one rule, such as "... -> ..."')
    parsed: list[Rule] = []
    for rule in rules:
        if isinstance(rule, str):
            text = TextRule(rule)
            for schema in _schemas(name):
                text.check_operator(schema)
            parsed.append(text)
        else:
            parsed.append(rule)
    _rules[name] = tuple(parsed)


def _schemas(name: str) -> list[torch.FunctionSchema]:
    """The schemas a name stands for; none where the operator is not defined (yet)."""
    namespace, _, rest = name.partition(".")
    packet_name, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), packet_name, None)
    if packet is None:
        return []
    names = [overload] if overload else packet.overloads()[:1]
    return [getattr(packet, one)._schema for one in names]


def rules_for(target: torch._ops.OpOverload) -> tuple[Rule, ...] | None:
    """The rules of an operator: its own, its packet's, or the pointwise one; None if unknown."""
    found = _rules.get(str(target)) or _rules.get(str(target.overloadpacket))
    if found is None and torch.Tag.pointwise in target.tags:
        found = (elementwise,)
    return found


def strategies(node: fx.Node, n: int) -> tuple[list[Strategy], list[str]]:
    """The ways `node` may run on an axis of `n` ranks, and the reasons for what is not offered.

    Never empty: [0] consumes and produces everything replicated (I), which is right for any
    operator whose random draws are alike on all ranks.
    """
    count = len(operands(node))
    replicated = Strategy((I,) * count, in_state(node, I))
    target = node.target
    if n == 1:
        sent = [one.traffic for one in beside(node, n)[:1]]  # over another axis
        return [replicated._replace(traffic=each) for each in sent] or [replicated], []
    if target in SEEDS:
        return [SEEDS[target]], []
    if over_another := beside(node, n):
        return over_another, []
    if count and target is CUSTOM_FUNCTION:
        sharded, declined = custom_function(node, n, strategies)
        return [replicated, *sharded], declined
    if not count or not isinstance(target, torch._ops.OpOverload):
        return [replicated], []
    call = OpCall(node, n)
    if draws_random_numbers(call):
        return [replicated], ["it draws random numbers, which must be alike on all ranks"]
    offered = [replicated]
    # the gradient of R is in parts, which rounding does not add up
    both = (call.results, map(value, call.operands))
    if all(any(map(differentiable, each)) for each in both) and target is not FLOAT8_LINEAR:
        offered.append(call.uniform(R))
    rules = rules_for(target)
    if call.schema.is_mutable:
        rules = ()
        call.decline(f"{target} writes to its operands")
    if rules is None:
        call.decline(f"{target} has no sharding rule (see autoshard.sharding_rule)")
    for rule in rules or ():
        offered += rule(call)
    return list(dict.fromkeys(offered)), call.reasons


def draws_random_numbers(call: OpCall) -> bool:
    """Whether the call, as its arguments stand, draws random numbers."""
    tagged = torch.Tag.nondeterministic_seeded in call.target.tags
    if not tagged and "dropout" not in call:  # the recurrent layers lack the tag
        return False
    if call.get("train", call.get("training")) is False:
        return False
    return 0 not in [call.get(name) for name in ("p", "dropout_p", "dropout")]


for _name, _given in RULES.items():
    sharding_rule(_name, *(_given if isinstance(_given, tuple) else (_given,)))
