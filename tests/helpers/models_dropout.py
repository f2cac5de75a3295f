"""Models of the tests with dropout everywhere."""

from __future__ import annotations

import dataclasses
import functools

from model_case import Case
from models import CASES

RATES = {
    "gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    "bert": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
    "t5": ("dropout_rate",),
    "vit": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
}
"""The options of each model's configuration that are rates of dropout."""


def dropped(name: str) -> Case:
    """The case of that name with dropout 0.1 everywhere."""
    case = CASES[name]
    return dataclasses.replace(
        case, build=functools.partial(case.build, **dict.fromkeys(RATES[name], 0.1))
    )
