"""Reductions, and normalisations over rows."""

from __future__ import annotations

from .name import operator_name, words

REDUCTIONS = words(
    "sum mean amax amin max min argmax argmin prod any all var var_mean std std_mean linalg_vector_norm count_nonzero"
)
# Operators that reduce rows and return a tensor of the argument's size, or its gradient.
NORMALISATIONS = words("_softmax _log_softmax native_layer_norm native_group_norm logsumexp native_batch_norm_backward")
SCANS = words("cumsum cumprod logcumsumexp")


def is_reduction(target: object) -> bool:
    """Return whether an operator reduces a tensor; `max.other` and `min.other` are pointwise."""
    name = operator_name(target)
    return name in REDUCTIONS and not (name in ("max", "min") and getattr(target, "_overloadname", "") == "other")


def is_scan(target: object) -> bool:
    """Return whether an operator runs along a dimension and gives each result so far."""
    return operator_name(target) in SCANS


def is_normalisation(target: object) -> bool:
    """Return whether an operator normalises rows."""
    return operator_name(target) in NORMALISATIONS
