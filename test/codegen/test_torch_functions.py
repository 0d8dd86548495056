"""torch's functions for library calls: each gives its operator's results, for arguments as host programs print them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from altbackend.codegen.host.torch_functions import OVERLOADS, function_text

T = torch.Tensor
ROWS, BATCH = (3, 4, 5), (2, 3, 4, 5)


def product(*sizes: int) -> tuple[T, ...]:
    *batch, m, k, n = sizes
    return torch.randn(*batch, m, k), torch.randn(*batch, k, n)


def heads() -> tuple[T, ...]:
    return tuple(torch.randn(2, 3, 6, 8) for _ in range(3))


INPUTS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "mm": (product(*ROWS), {}),
    "addmm": ((torch.randn(5), *product(*ROWS)), {"beta": 2, "alpha": 0.5}),
    "bmm": (product(*BATCH), {}),
    "baddbmm": ((torch.randn(2, 3, 5), *product(*BATCH)), {"beta": 0.5, "alpha": 2}),
    "mv": ((torch.randn(3, 4), torch.randn(4)), {}),
    "addmv": ((torch.randn(3), torch.randn(3, 4), torch.randn(4)), {"beta": 2, "alpha": 3}),
    "_int_mm": ((torch.ones(32, 16, dtype=torch.int8), torch.ones(16, 8, dtype=torch.int8)), {}),
    "convolution": (
        (torch.randn(2, 4, 6, 6), torch.randn(6, 2, 3, 3), None, [2, 1], [1, 1], [1, 2], False, [0, 0], 2),
        {},
    ),
    "_scaled_dot_product_flash_attention_for_cpu": ((*heads(), 0.0, True), {"scale": 0.3}),
}
GPU_ALONE = {
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
}


def test_each_operator_has_inputs_here_or_needs_a_gpu() -> None:
    assert {*INPUTS} | GPU_ALONE == {*OVERLOADS}


@pytest.mark.parametrize("name", INPUTS)
def test_a_function_is_its_operator(name: str) -> None:
    args, kwargs = INPUTS[name]
    packet = getattr(torch.ops.aten, name)
    for overload in OVERLOADS[name]:
        op = getattr(packet, overload)
        assert function_text(op) == f"torch.{name}"
        wanted = packet.default(*args, **kwargs)
        out = {"out": torch.full_like(wanted, 7)} if overload == "out" else {}
        got = getattr(torch, name)(*args, **kwargs, **out)
        torch.testing.assert_close(tuple(got) if isinstance(got, tuple) else got, wanted, rtol=0, atol=0)
        if out:
            assert got is out["out"]


@pytest.mark.parametrize("name", sorted(GPU_ALONE))
def test_a_function_asks_for_the_arguments_of_its_operator(name: str) -> None:
    schema = getattr(torch.ops.aten, name).default._schema
    required = [a.name for a in schema.arguments if not a.has_default_value()]
    with pytest.raises(TypeError, match=", ".join(rf'(Tensor |bool |"){name}"?' for name in required)):
        getattr(torch, name)()


def test_other_operators_are_called_by_their_overload() -> None:
    assert function_text(torch.ops.aten.sort.stable) == "torch.ops.aten.sort.stable"
    assert function_text(torch.ops.aten.mm.dtype) == "torch.ops.aten.mm.dtype"
