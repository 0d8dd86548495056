"""Bad calls: each gives an error with a message, through torch's runner and through the C interface; none crashes."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import altbackend
from altbackend.aot.load import AotModel, aot_load
from altbackend.compat.pt2 import Runner
from altbackend.errors import BadCall

from .models import Dim, batched, module

CALLS = 400


class CTensor(ctypes.Structure):
    """altbackend_tensor of altbackend.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("sizes", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("owner", ctypes.c_void_p),
    )


@pytest.fixture(scope="module")
def library() -> Path:
    return Path(altbackend.aot_compile(batched()))


@pytest.fixture(scope="module")
def two_inputs() -> Path:
    """A library with a dynamic and a static input, of other dtypes."""
    m = module(lambda x, i: (x * 2, i + 1))
    shapes = ({0: Dim("n", min=2, max=9)}, None)
    return Path(
        altbackend.aot_compile(
            torch.export.export(m, (torch.randn(4, 3), torch.arange(6).view(2, 3)), dynamic_shapes=shapes)
        )
    )


MISFITS = {
    "dtype": (lambda x, i: [x.double(), i], r"input 0 \(x\) is float64; the library was compiled for float32"),
    "rank": (lambda x, i: [x[0], i], r"input 0 \(x\) has 1 dimensions; the library was compiled for 2"),
    "static size": (lambda x, i: [x, i[:, :2]], r"dimension 1 of input 1 \(i\) is 2; the library was compiled for 3"),
    "above the range": (lambda x, i: [x.repeat(3, 1), i], r"dimension 0 of input 0 \(x\) is 12; .* from 2 to 9"),
    "below the range": (lambda x, i: [x[:1], i], r"dimension 0 of input 0 \(x\) is 1; .* from 2 to 9"),
    "strides": (lambda x, i: [x.t().contiguous().t(), i], r"input 0 \(x\) has strides \(1, 4\); .* \(3, 1\)"),
    "count": (lambda x, i: [x], r"has 1 inputs; the library was compiled for 2"),
    "device": (lambda x, i: [x.to("meta"), i], r"input 0 \(x\) is on another device"),
    "layout": (lambda x, i: [x.to_sparse(), i], r"input 0 \(x\)"),
    "negative bit": (lambda x, i: [torch._neg_view(x), i], r"negative bit"),
    "no memory": (lambda x, i: [torch._efficientzerotensor(4, 3), i], r"input 0 \(x\)"),
}


@pytest.mark.parametrize("kind", MISFITS)
def test_the_error_names_the_input_and_what_it_should_be(two_inputs: Path, kind: str) -> None:
    change, message = MISFITS[kind]
    runner = Runner(two_inputs)
    x, i = torch.randn(4, 3), torch.arange(6).view(2, 3)
    with pytest.raises(RuntimeError, match=message):
        runner.run(change(x, i))
    torch.testing.assert_close(runner.run([x, i]), [x * 2, i + 1])


def test_random_bad_calls(two_inputs: Path) -> None:
    """A call whose inputs differ in any way from the compiled ones is an error; an equal one is right."""
    rng, runner, refused = random.Random(0), Runner(two_inputs), 0
    dtypes = [torch.float32, torch.float32, torch.int64, torch.float16, torch.bool, torch.complex64]
    for _ in range(CALLS):
        x = _random_tensor(rng, dtypes, ([2, 4, 9, 1, 0, 12], [3, 3, 3, 2]))
        i = _random_tensor(rng, [torch.int64, torch.int64, torch.int32], ([2, 2, 3], [3, 3, 1]))
        inputs = [x, i] if rng.random() < 0.9 else rng.choice([[x], [i], [], [x, i, i]])
        fits = (
            len(inputs) == 2
            and (x.dtype, i.dtype) == (torch.float32, torch.int64)
            and (x.dim() == i.dim() == 2 and 2 <= x.shape[0] <= 9 and x.shape[1] == 3 and tuple(i.shape) == (2, 3))
            and x.is_contiguous()
            and i.is_contiguous()
        )
        if fits:
            torch.testing.assert_close(runner.run(inputs), [x * 2, i + 1])
        else:
            with pytest.raises(RuntimeError, match=r"compiled for|input"):
                runner.run(inputs)
            refused += 1
    assert 0 < refused < CALLS


def _random_tensor(rng: random.Random, dtypes: list[torch.dtype], sizes: tuple[list[int], ...]) -> torch.Tensor:
    shape = [rng.choice(choices) for choices in sizes]
    if rng.random() < 0.1:
        shape = shape[: rng.randrange(2)] if rng.random() < 0.5 else [*shape, 1]
    t = torch.zeros(shape).to(rng.choice(dtypes))
    return t.t() if t.dim() == 2 and rng.random() < 0.1 else t


# --- the C interface -------------------------------------------------------------------------------------------------


@pytest.fixture
def opened(library: Path) -> Iterator[tuple[Any, Any]]:
    """The opened library and a model of it."""
    dll = ctypes.CDLL(str(library))
    dll.altbackend_last_error.restype = ctypes.c_char_p
    made = ctypes.c_void_p()
    assert dll.altbackend_create(b"cpu", ctypes.byref(made)) == 0
    yield dll, made
    dll.altbackend_destroy(made)


def _described(t: torch.Tensor, dtype: int = 0) -> tuple[CTensor, Any]:
    sizes = (ctypes.c_int64 * t.dim())(*t.shape)
    return CTensor(t.data_ptr(), dtype, t.dim(), sizes, None, None), sizes


def test_the_c_interface_runs_and_reports(opened: tuple[Any, Any]) -> None:
    dll, made = opened
    x = torch.randn(3, 16)
    given, _sizes = _described(x)
    result = CTensor()
    assert dll.altbackend_run(made, ctypes.byref(given), 1, ctypes.byref(result), 1) == 0
    shape = result.sizes[: result.rank]
    values = ctypes.cast(result.data, ctypes.POINTER(ctypes.c_float))[: shape[0] * shape[1]]
    torch.testing.assert_close(torch.tensor(values).view(shape), batched().module()(x))
    dll.altbackend_release(ctypes.byref(result))
    assert not result.owner


BAD_C_CALLS: dict[str, tuple[Callable[[Any, Any, CTensor, CTensor], int], bytes]] = {
    "no model": (lambda d, m, x, y: d.altbackend_run(None, ctypes.byref(x), 1, ctypes.byref(y), 1), b"null"),
    "no inputs": (lambda d, m, x, y: d.altbackend_run(m, None, 1, ctypes.byref(y), 1), b"inputs are null"),
    "no outputs": (lambda d, m, x, y: d.altbackend_run(m, ctypes.byref(x), 1, None, 1), b"outputs are null"),
    "input count": (lambda d, m, x, y: d.altbackend_run(m, ctypes.byref(x), 0, ctypes.byref(y), 1), b"0 inputs"),
    "output count": (lambda d, m, x, y: d.altbackend_run(m, ctypes.byref(x), 1, ctypes.byref(y), 0), b"0 outputs"),
    "no device": (lambda d, m, x, y: d.altbackend_create(None, ctypes.byref(ctypes.c_void_p())), b"no device"),
    "cuda": (lambda d, m, x, y: d.altbackend_create(b"cuda:0", ctypes.byref(ctypes.c_void_p())), b"not for cuda:0"),
    "no result": (lambda d, m, x, y: d.altbackend_create(b"cpu", None), b"null"),
    "swap": (lambda d, m, x, y: d.altbackend_swap(m), b"no inactive set"),
    "weight": (
        lambda d, m, x, y: d.altbackend_update(m, (ctypes.c_char_p * 1)(b"other"), ctypes.byref(x), 1, 0, 0),
        b"no weight other",
    ),
    "weight size": (
        lambda d, m, x, y: d.altbackend_update(m, (ctypes.c_char_p * 1)(b"first.bias"), ctypes.byref(x), 1, 0, 0),
        b"first.bias has size (3, 16); the library was compiled for (32,)",
    ),
}


@pytest.mark.parametrize("kind", BAD_C_CALLS)
def test_bad_calls_of_the_c_interface(opened: tuple[Any, Any], kind: str) -> None:
    dll, made = opened
    given, _sizes = _described(torch.randn(3, 16))
    call, message = BAD_C_CALLS[kind]
    assert call(dll, made, given, CTensor()) == 1
    assert message in dll.altbackend_last_error()


@pytest.mark.parametrize(
    ("field", "value"),
    [("dtype", 99), ("dtype", -1), ("dtype", 3), ("rank", -1), ("rank", 65), ("rank", 1), ("data", None)],
)
def test_damaged_tensors_of_the_c_interface(opened: tuple[Any, Any], field: str, value: Any) -> None:
    dll, made = opened
    given, _sizes = _described(torch.randn(3, 16))
    setattr(given, field, value)
    assert dll.altbackend_run(made, ctypes.byref(given), 1, ctypes.byref(CTensor()), 1) == 1
    assert dll.altbackend_last_error()


# --- the loaded model ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def loaded() -> AotModel:
    """A model with arguments that are no tensors."""
    m = module(lambda x, scale, flags: {"y": x * scale if flags[0] else x, "rows": x.shape[0]})
    program = torch.export.export(
        m, (torch.randn(4, 3), 2, [True, "a", None]), dynamic_shapes=({0: Dim("n")}, None, [None] * 3)
    )
    return aot_load(altbackend.aot_compile(program))


def test_trees_and_numbers(loaded: AotModel) -> None:
    x = torch.randn(5, 3)
    result = loaded(x, 2, [True, "a", None])
    torch.testing.assert_close(result, {"y": x * 2, "rows": 5})


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((torch.ones(2, 3), 3, [True, "a", None]), "argument scale is 3; the library was compiled for 2"),
        ((torch.ones(2, 3), 2.0, [True, "a", None]), "argument scale is 2.0"),
        ((torch.ones(2, 3), 2, [1, "a", None]), "flags"),
        ((torch.ones(2, 3), 2, [True, "b", None]), "'b'; the library was compiled for 'a'"),
        ((torch.ones(2, 3), 2, [True, "a"]), "tree"),
        ((4, 2, [True, "a", None]), "argument x is int, and a tensor was compiled"),
        ((torch.ones(2, 4), 2, [True, "a", None]), "dimension 1 of input 0"),
    ],
)
def test_arguments_that_do_not_fit(loaded: AotModel, args: tuple[Any, ...], message: str) -> None:
    with pytest.raises(BadCall, match=message):
        loaded(*args)


@pytest.mark.parametrize("constants", ["embedded", "external"])
def test_a_container_tells_whether_it_brings_its_weights(constants: str) -> None:
    """Torch's loader asks for it from version 2.15 on."""
    dll = ctypes.CDLL(altbackend.aot_compile(batched(), options={"aot_constants": constants}))
    container, brings = ctypes.c_void_p(), ctypes.c_bool()
    assert dll.AOTInductorModelContainerCreateWithDevice(ctypes.byref(container), ctypes.c_size_t(1), b"cpu", None) == 0
    assert dll.AOTInductorModelContainerDidCallLoadConstants(container, ctypes.byref(brings)) == 0
    assert brings.value == (constants == "embedded")
    assert dll.AOTInductorModelContainerSetUseStreamAffinity(container, False) == 0
    assert dll.AOTInductorModelContainerSetUseStreamAffinity(container, True) == 1
    assert dll.AOTInductorModelContainerDelete(container) == 0
