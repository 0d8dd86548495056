"""benchmarks/results/coverage.md says of every core operator what the compiler makes of it today."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

from benchmarks import core_page
from benchmarks.core_aten import DECOMPOSED, FAILED, GENERATED, LIBRARY, VIEW, Made, core, look
from benchmarks.core_page import NONE, SOME

PAGE = Path("benchmarks/results/coverage.md")
# of every class, and of every family that is a library call somewhere
SAMPLE = [
    "add.Tensor",
    "amax.default",
    "as_strided.default",
    "avg_pool2d.default",
    "bitwise_and.Scalar",
    "bmm.default",
    "cat.default",
    "convolution.default",
    "cumsum.default",
    "_fft_r2c.default",
    "full.default",
    "gather.default",
    "grid_sampler_2d.default",
    "index.Tensor",
    "_log_softmax.default",
    "masked_scatter.default",
    "mm.default",
    "native_group_norm_backward.default",
    "native_layer_norm.default",
    "permute.default",
    "randperm.default",
    "reflection_pad2d.default",
    "scatter_reduce.two",
    "sort.default",
    "sum.dim_IntList",
    "upsample_bilinear2d.vec",
    "var.correction",
    "view.default",
    "where.self",
]
OPERATORS = {str(op).removeprefix("aten."): op for op in core()}


@cache
def written() -> dict[str, str]:
    return core_page.read(PAGE.read_text())


def of_this_torch() -> bool:
    return f"(torch {torch.__version__.split('+')[0]})" in PAGE.read_text()


@pytest.mark.skipif(not of_this_torch(), reason="the page is of another torch, which has other core operators")
def test_every_core_operator_has_a_row() -> None:
    assert list(written()) == list(OPERATORS)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", SAMPLE)
def test_the_row_is_what_the_compiler_does(name: str) -> None:
    found, held = core_page.row(OPERATORS[name]), written()[name]
    if of_this_torch():
        assert held == str(found), "write it again: python -m benchmarks.coverage --page benchmarks/results/coverage.md"
    else:
        assert held.split(" | ")[1:3] == [found.cpu, found.gpu]


def test_every_operator_is_compiled_and_most_without_a_library_call() -> None:
    """On a GPU and on a CPU; those with one are products, convolutions, transforms, and what data decides."""
    classes = [line.split(" | ")[1:3] for line in written().values()]
    assert not any({FAILED, NONE} & set(c) for c in classes)
    for device in (0, 1):
        assert sum(c[device] in (GENERATED, VIEW, DECOMPOSED) for c in classes) >= 0.89 * len(classes)


def test_classes() -> None:
    product, (cpu, gpu) = torch.ops.aten.mm.default, look(torch.ops.aten.mm.default, _two((4, 3), (3, 5)))
    assert (cpu, gpu) == (Made(LIBRARY, (), ("mm",)),) * 2
    assert look(torch.ops.aten.add.Tensor, _two((4, 3), (3,)))[0] == Made(GENERATED)
    assert look(torch.ops.aten.view.default, (_two((4, 3))[0] + ([12],), {}))[0] == Made(VIEW)
    assert look(torch.ops.aten.var.dim, (_two((4, 3))[0] + ([1],), {}))[0] == Made(DECOMPOSED, ("var.correction",))
    assert look(product, _two((4, 3), (4, 3)))[0].kind == FAILED  # shapes that do not fit
    assert core_page._class([Made(GENERATED), Made(LIBRARY, (), ("x",))]) == SOME


def _two(*shapes: tuple[int, ...]) -> tuple[tuple[torch.Tensor, ...], dict[str, object]]:
    return tuple(torch.empty(s, device="meta") for s in shapes), {}
