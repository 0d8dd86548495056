"""Functions of torch that call an operator in half the time that `torch.ops` takes: its parser knows their arguments.

Measured on one core: 6 us for 12 us of `addmm` with its result given, 4 us for 8 us of `mm`.
"""

from __future__ import annotations

import torch

# By operator, the overloads whose arguments, by position and by keyword, the function of that name takes alike.
_DEFAULT, _WITH_OUT = ("default",), ("default", "out")
OVERLOADS: dict[str, tuple[str, ...]] = {
    "mm": _WITH_OUT,
    "addmm": _WITH_OUT,
    "bmm": _WITH_OUT,
    "baddbmm": _WITH_OUT,
    "mv": _WITH_OUT,
    "addmv": _WITH_OUT,
    "_int_mm": _WITH_OUT,
    "convolution": _DEFAULT,
    "_scaled_dot_product_flash_attention": _DEFAULT,
    "_scaled_dot_product_flash_attention_for_cpu": _DEFAULT,
    "_scaled_dot_product_efficient_attention": _DEFAULT,
    "_scaled_dot_product_cudnn_attention": _DEFAULT,
}


def function_text(op: torch._ops.OpOverload) -> str:
    """Return the text of the fastest callable of an operator: a function of torch, or else the overload itself."""
    namespace, name = op._schema.name.split("::")
    if namespace == "aten" and op._overloadname in OVERLOADS.get(name, ()) and hasattr(torch, name):
        return f"torch.{name}"
    return overload_text(op)


def overload_text(op: torch._ops.OpOverload) -> str:
    """Return the text of an overload, such as `torch.ops.aten.mm.out`."""
    namespace, name = op._schema.name.split("::")
    return f"torch.ops.{namespace}.{name}.{op._overloadname}"
