"""Names of torch's operators, by what a stored tensor does with them (`stored_operators`).

A method, a function of `torch` and an operator sign of one name do the same: `mul`, `__mul__` and
`__rmul__` are "mul"; with a trailing underscore or as `__imul__` they write to their first operand.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

FREE = frozenset(
    """
    dim size stride numel nelement ndimension element_size storage_offset is_neg is_conj
    is_coalesced is_set_to is_floating_point is_complex is_contiguous is_signed is_inference
    is_pinned is_same_size get_device has_names requires_grad_ retain_grad register_hook
    register_post_accumulate_grad_hook backward grad detach_ record_stream is_shared
    __hash__ __len__ __delete__ result_type _foreach_max _foreach_min
    sym_size sym_stride sym_numel sym_storage_offset
    """.split()
)
"""What asks for no value, or belongs to autograd: DTensor's own, as it is."""

ELEMENTWISE = frozenset(
    """
    abs absolute acos add addcdiv addcmul asin atan atan2 bfloat16 bitwise_and bitwise_not
    bitwise_or bitwise_xor and or xor invert ceil clamp clamp_max clamp_min clip clone conj
    contiguous copy copysign cos cosh deg2rad detach digamma div divide double truediv rtruediv
    floordiv empty_like eq erf erfc erfinv exp exp2 expm1 fill fix float floor floor_divide fmax
    fmin fmod frac full_like ge greater greater_equal gt half heaviside hypot isclose isfinite isinf
    isnan isneginf isposinf ldexp le less less_equal lerp lgamma log log10 log1p log2 logaddexp
    logical_and logical_not logical_or logical_xor logit lt maximum minimum mod mul multiply
    nan_to_num ne neg negative not_equal ones_like positive pos pow reciprocal relu remainder
    round rsqrt rsub sgn sigmoid sign signbit sin sinc sinh sqrt square sub subtract tan tanh to
    true_divide trunc type where xlogy zero zeros_like int long bool
    """.split()
)
"""One element of the result follows from one of each operand."""

VIEW_ATTRIBUTES = frozenset(("T", "mT", "H", "mH", "real", "imag"))

REDUCTIONS = frozenset("sum mean norm linalg_vector_norm amax amin max min all any".split())
"""Reductions over all elements, of which each rank can do a part."""

DRAWS = frozenset("uniform normal random bernoulli exponential log_normal cauchy geometric".split())
"""Random numbers in place of all elements, with a trailing underscore."""

DRAWS_LIKE = frozenset(("rand_like", "randn_like", "randint_like"))

MEMORY = frozenset(("data_ptr", "untyped_storage", "storage"))

NEW = frozenset(("new", "new_empty", "new_full", "new_ones", "new_tensor", "new_zeros"))

SHAPE_ONLY = frozenset(("view_as", "reshape_as", "expand_as"))
"""The second operand gives a shape."""

_WRITES = frozenset(
    f"__i{name}__"
    for name in "add and floordiv lshift mod mul or pow rshift sub truediv xor div".split()
)


@functools.cache
def name_of(func: Any) -> str:
    """The name of a function of torch; of one of torch.ops.aten without its overload."""
    if getattr(func, "namespace", "") == "aten":
        return func.__name__.partition(".")[0]  # type: ignore[no-any-return]
    return func.__name__  # type: ignore[no-any-return]


class OperatorName(NamedTuple):
    """name: without underscores. writes: whether the first operand is written to."""

    name: str
    writes: bool


@functools.cache
def operator(name: str) -> OperatorName:
    """The operator that a function of torch of this `__name__` is."""
    if name == "__setitem__":
        return OperatorName("setitem", True)
    if name in _WRITES:
        return OperatorName(name[3:-2], True)
    if name.startswith("__"):
        base = name.strip("_")
        right = base[0] == "r" and base[1:] in ELEMENTWISE
        return OperatorName(base[1:] if right else base, False)
    if name.endswith("_"):
        return OperatorName(name[:-1], True)
    return OperatorName(name, False)
