"""Temporaries lie in the order of their operands; results keep the strides of eager."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from altbackend.ir.loops import Extern, Program
from altbackend.lowering import materialize
from test import graphs, triton_run
from test.compare import as_list, check_gradients, compiled, difference

T = torch.Tensor
LAST = torch.channels_last


def masked_mean(x: T, t: T) -> T:
    mask = F.one_hot(t, x.shape[1]).permute(0, 3, 1, 2).to(x.dtype)
    p = x.softmax(1)
    return 2 * (p * mask).sum((2, 3)) / p.sum((2, 3))


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_gradient_of_a_turned_mask(layout: torch.memory_format, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 12, 16).to(dtype).contiguous(memory_format=layout)
    check_gradients(masked_mean, x, torch.randint(5, (2, 12, 16)))


@pytest.mark.parametrize("plain", [True, False])
def test_its_temporaries_are_plain(plain: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not plain:
        monkeypatch.setattr(materialize, "operand_strides", lambda *_: None)
    x, t = torch.randn(2, 5, 12, 16, requires_grad=True), torch.randint(5, (2, 12, 16))
    compiled(masked_mean, debug_dir=str(tmp_path), cache_graphs=False)(x, t).sum().backward()
    text = "".join(path.read_text() for path in tmp_path.glob("*/*kernels.txt"))
    turned = re.findall(r"buf\d+\[960\*o \+ 5\*i0 \+ i1\] =", text)
    assert bool(turned) is not plain


def image(*sizes: int) -> T:
    torch.manual_seed(0)
    return torch.randn(sizes).bfloat16().contiguous(memory_format=LAST)


def converted(x: T) -> tuple[T, ...]:
    """Results of a plain value in float32, which eager computes from a channels-last one."""
    y = x.log_softmax(1).mul(2).sigmoid().float()
    return y.amax(1), (y * y.detach().mean(1, keepdim=True)).sum(1)


def concatenated(x: T) -> tuple[T, ...]:
    y = x.log_softmax(1)
    both = torch.cat([y.exp() * 2, y.sin() + 1], 1)
    return both.amax(1), both.sum((0, 2, 3))


def convolved(x: T) -> tuple[T, ...]:
    y = x.log_softmax(1).exp()
    return F.conv2d(y.contiguous(memory_format=LAST), torch.ones(32, 5, 1, 1).bfloat16()), y.sum((0, 2, 3))


def program_of(fn: object, *inputs: T) -> Program:
    torch._dynamo.reset()
    (graph,) = graphs.trace(fn, *inputs)  # type: ignore[arg-type]
    return graphs.schedule(graph, ctx=triton_run.TARGET).program


@pytest.mark.parametrize("fn", [converted, concatenated, convolved], ids=lambda f: f.__name__)
def test_temporaries_on_a_gpu_lie_as_the_channels_last_image_does(fn: object) -> None:
    program = program_of(fn, image(2, 5, 12, 16))
    images = [b for b in program.buffers.values() if b.kind == "temp" and len(b.sizes) == 4 and b.sizes[2:] == (12, 16)]
    read = {n.args[0].buffer for n in program.nodes if isinstance(n, Extern)}
    large = [b for b in images if b.sizes[1] != 1 and b.name not in read]
    assert large
    assert all(b.strides[1] == 1 for b in large)


def test_a_copy_in_the_layout_of_its_operand_is_no_copy() -> None:
    program = program_of(convolved, image(2, 5, 12, 16))
    (call,) = (n for n in program.nodes if isinstance(n, Extern))
    stored = [b for b in program.buffers.values() if b.sizes == (2, 5, 12, 16) and b.kind == "temp"]
    assert [b.name for b in stored] == [call.args[0].buffer]


def copied_and_changed(x: T) -> tuple[T, ...]:
    y = x.clone(memory_format=LAST)
    x.add_(1)
    return (y,)


def copied_and_returned(x: T) -> tuple[T, ...]:
    y = x.mul(2).sin()
    return y.clone(memory_format=LAST), y


def copy_changed(x: T) -> tuple[T, ...]:
    y = x.mul(2).sin()
    return y.clone(memory_format=LAST).add_(1), y


@pytest.mark.parametrize("compile_", [compiled, triton_run.compiled], ids=["cpu", "gpu"])
@pytest.mark.parametrize("fn", [copied_and_changed, copied_and_returned, copy_changed], ids=lambda f: f.__name__)
def test_a_copy_that_is_returned_is_one(fn: object, compile_: object) -> None:
    torch._dynamo.reset()
    x, other = image(2, 5, 12, 16), image(2, 5, 12, 16)
    got, want = compile_(fn)(x), fn(other)  # type: ignore[operator]
    assert len({t.data_ptr() for t in (x, *got)}) == 1 + len(got)
    assert not difference(x, other, tolerance=1e-2)
    assert not any(difference(a, b, tolerance=1e-2) for a, b in zip(got, want, strict=True))


def test_a_widened_temporary_is_stored_as_it_was_before() -> None:
    program = program_of(converted, image(2, 5, 12, 16))
    assert {b.dtype for b in program.buffers.values() if b.sizes == (2, 5, 12, 16)} == {torch.bfloat16}


@pytest.mark.sample(2)
@pytest.mark.parametrize("compile_", [compiled, triton_run.compiled], ids=["cpu", "gpu"])
@pytest.mark.parametrize("fn", [converted, concatenated, convolved], ids=lambda f: f.__name__)
def test_results_do_not_depend_on_the_layout_of_temporaries(fn: object, compile_: object) -> None:
    torch._dynamo.reset()
    x = image(2, 5, 12, 16)
    got, want = as_list(compile_(fn)(x)), as_list(fn(x))  # type: ignore[operator]
    assert not any(difference(a, b, tolerance=2e-2) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("order", [(0, 2, 3, 1), (3, 2, 1, 0)], ids=str)
def test_results_keep_their_strides(order: tuple[int, ...]) -> None:
    def f(x: T, m: T) -> tuple[T, T, T]:
        y = (x.sum(0, keepdim=True).expand_as(x) * m.permute(order)).exp()
        return y, y.softmax(1), y.sum((2, 3))

    x = torch.randn(3, 4, 5, 6)
    m = torch.randn([x.shape[order.index(k)] for k in range(4)])
    for got, want in zip(compiled(f)(x, m), f(x, m), strict=True):
        assert got.stride() == want.stride()
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("rows", [512, 1024])
def test_strides_that_a_range_of_sizes_keeps_from_a_division_by_zero(rows: int) -> None:
    """Orders of strides are estimated with a size that the program allows: 97 // (97 // 128) has no value."""

    def fn(x: T) -> T:
        torch._check(x.shape[0] >= 256)
        y = x.sin().view(x.shape[0] // 128, -1, 4)
        return torch.bmm(y.transpose(1, 2) * 2 + y.amax(1)[..., None], y)

    x = torch.randn(rows, 4)
    torch._dynamo.reset()
    assert not difference(compiled(fn, dynamic=True)(x), fn(x), tolerance=1e-4)


@pytest.mark.parametrize("last", [0, 1], ids=["a channels-last target", "a channels-last image"])
def test_values_of_two_orders_lie_along_rows_whose_statistics_are_known(last: int) -> None:
    """The kernel of a softmax over channels computes the loss, and reads a plain target across its rows."""

    def fn(x: T, target: T) -> T:
        y = (F.group_norm(x, 2).softmax(1) - target).abs()  # torch's group norm is plain
        return torch.where(y < 0.5, y * y, y - 0.25).sum((1, 2, 3))

    args = [torch.randn(3, 8, 5, 4), torch.randn(3, 8, 5, 4)]
    args[1 - last] = args[1 - last].contiguous(memory_format=torch.channels_last)
    assert not difference(triton_run.compiled(fn)(*args), fn(*args), strides=False, tolerance=2e-5)
    large = [torch.empty(16, 64, 32, 32), torch.empty(16, 64, 32, 32)]
    large[1 - last] = large[1 - last].contiguous(memory_format=torch.channels_last)
    s = graphs.schedule(graphs.trace(fn, *large)[0], ctx=triton_run.TARGET)
    values = [b for b in s.program.buffers.values() if b.kind == "temp" and b.numel == large[0].numel()]
    assert values
    assert all((b.sizes[b.strides.index(1)] == 64) == bool(last) for b in values)


@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
def test_an_enlarged_image_is_one_kernel_in_the_layout_of_its_source(mode: str) -> None:
    def fn(x: T) -> T:
        y = F.interpolate(x, scale_factor=2.0, mode=mode)
        return y * y.sigmoid()

    x = torch.randn(2, 8, 6, 5).contiguous(memory_format=LAST)
    s = graphs.schedule(graphs.trace(fn, x)[0], ctx=triton_run.TARGET)
    assert (s.kernels, s.calls) == (1, 0)
    assert not difference(triton_run.compiled(fn)(x), fn(x), tolerance=2e-6)


def test_totals_of_a_looked_up_image_run_as_memory_lies() -> None:
    def fn(x: T) -> T:
        return F.interpolate(x, scale_factor=2.0).mul(3).argmin(2)

    x = torch.randn(3, 4, 5, 6)
    s = graphs.schedule(graphs.trace(fn, x)[0], ctx=triton_run.TARGET)
    (stored,) = (b for b in s.program.buffers.values() if len(b.sizes) == 4 and set(b.sizes) == {3, 4, 10, 12})
    assert stored.strides == (480, 120, 12, 1)
    assert torch.equal(triton_run.compiled(fn)(x), fn(x))


@pytest.mark.parametrize("dim", [0, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_totals_of_a_channels_last_image_lie_as_it_does(dim: int, dtype: torch.dtype) -> None:
    """A kernel that divides the image by them reads both along the channels."""

    def fn(x: T) -> T:
        return (F.normalize(x, p=1, dim=dim) + 1).mean((1, 2) if dim == 0 else 1)

    large = torch.empty(937, 22, 22, 256, dtype=dtype).permute(0, 3, 1, 2)
    s = graphs.schedule(graphs.trace(fn, large, computes=False)[0], ctx=triton_run.TARGET)
    sizes = [1 if k == dim else n for k, n in enumerate((937, 256, 22, 22))]
    (total,) = (b for b in s.program.buffers.values() if list(b.sizes) == sizes)
    assert total.strides[1] == 1
    x = image(3, 8, 5, 6).to(dtype)
    exact = fn(x.double()) if dtype == torch.bfloat16 else None
    assert not difference(triton_run.compiled(fn)(x), fn(x), exact, tolerance=2e-6)


def test_totals_that_are_returned_have_the_strides_of_eager() -> None:
    x = image(3, 8, 5, 6).float()
    for fn in (lambda x: x.sum(0), lambda x: x.amax(2), lambda x: x.mean(3, keepdim=True)):
        assert not difference(triton_run.compiled(fn)(x), fn(x), tolerance=2e-6)
