"""Traced patterns: their files are up to date and load without tracing; each fires on its example, once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from altbackend.cli import patterns
from altbackend.fx_passes.pattern import register
from altbackend.fx_passes.pattern.trace import fwd_only, joint_fwd_bwd
from altbackend.fx_passes.simplify import normalise
from altbackend.fx_passes.traced import attention, gelu
from altbackend.fx_passes.traced.family import Form
from altbackend.fx_passes.traced.rewrite import FAMILIES, rules
from test.compare import compiled, difference

T = torch.Tensor
aten = torch.ops.aten
FORMS = {form.name: form for form in (*attention.FORMS, *gelu.FORMS)}


def inputs_of(form: Form, scale: float = 0.25) -> list[Any]:
    """Random inputs with the strides of the examples; a number where the pattern has one."""
    torch.manual_seed(0)
    given = iter(form.examples())
    out: list[Any] = []
    for name in register.parameters(form.search):
        if name in form.scalars:
            out.append(scale)
            continue
        x = next(given)
        out.append(torch.empty_strided(x.shape, x.stride()).normal_().requires_grad_(x.requires_grad))
    return out


@pytest.mark.parametrize("name", list(FAMILIES))
def test_the_file_of_a_family_is_up_to_date(name: str) -> None:
    path = patterns.FOLDER / f"{name}.py"
    assert path.read_text(encoding="utf-8") == patterns.text_of(name), "run `python -m altbackend patterns --write`"


def test_loading_traces_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> None:
        raise AssertionError("a pattern was traced")

    rules.cache_clear()
    monkeypatch.setattr(register, "traced_pattern", fails)
    assert sum(map(len, rules("on"))) == len(FORMS)


@pytest.mark.parametrize("name", list(FORMS))
def test_a_pattern_fires_on_its_example_once(name: str) -> None:
    form = FORMS[name]
    inputs = inputs_of(form)
    gm = form.trace(form.search, inputs)
    nodes = len(gm.graph.nodes)
    fired = [rewrite for some in rules("on") for rewrite in some.apply(gm)]
    assert [rewrite.rule for rewrite in fired] == [form.search.__name__]
    assert [rewrite for some in rules("on") for rewrite in some.apply(gm)] == []
    gm.graph.lint()
    gm.recompile()
    assert len(gm.graph.nodes) < nodes
    tensors = [x.detach() if isinstance(x, T) else x for x in inputs]
    gradient = () if form.trace is not joint_fwd_bwd else (torch.randn(form.search(*inputs).shape),)
    want = form.trace(form.search, inputs)(*tensors, *gradient)
    got = gm(*tensors, *gradient)
    for a, b in zip(*((x if isinstance(x, tuple) else (x,)) for x in (got, want)), strict=True):
        assert (a is None and b is None) or difference(a, b, None, 2e-5) == ""


def test_a_program_that_differentiates_attention_itself() -> None:
    """`torch.func.grad` puts forward and backward into one inference graph, where the captured form must stay."""
    torch._dynamo.reset()
    q, k, v = (torch.randn(2, 4, 8, 16) for _ in range(3))

    def loss(q: T, k: T, v: T) -> T:
        return (torch.softmax(torch.matmul(q, k.transpose(-2, -1)) * 0.25, -1) @ v).square().sum()

    def gradients(q: T, k: T, v: T) -> Any:
        return torch.func.grad(loss, argnums=(0, 1, 2))(q, k, v)

    names: list[str] = []

    def look(graph: torch.fx.Graph) -> None:
        names.extend(str(n.target) for n in graph.nodes)

    with torch.no_grad():
        run = compiled(gradients, attention="on", post_grad_custom_post_pass=look)
        for got, want in zip(run(q, k, v), gradients(q, k, v), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert "aten._scaled_dot_product_flash_attention_for_cpu_backward.default" in names


def test_the_gradient_of_a_row_that_a_mask_hides_by_finite_numbers() -> None:
    """The fused kernel's gradient has probabilities of 1 in place of 1/n there."""
    torch._dynamo.reset()
    q, k, v = (torch.randn(2, 4, 8, 16) for _ in range(3))
    mask = torch.zeros(2, 1, 8, 8)
    mask[:, :, 3] = -1e9

    def loss(q: T, k: T, v: T) -> T:
        return attention.masked(q, k, v, mask, 0.25).square().sum()

    def gradients(q: T, k: T, v: T) -> Any:
        return torch.func.grad(loss, argnums=(0, 1, 2))(q, k, v)

    with torch.no_grad():
        run = compiled(gradients, attention="on")
        for got, want in zip(run(q, k, v), gradients(q, k, v), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", gelu.FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_gelu_in_compiled_programs(form: Form, grad: bool) -> None:
    torch._dynamo.reset()
    names: list[str] = []

    def look(graph: torch.fx.Graph) -> None:
        names.extend(str(n.target) for n in graph.nodes)

    x, w = torch.randn(5, 6, requires_grad=grad), torch.randn(6, 7)
    program: Callable[..., T] = lambda x, w: form.search(x @ w) * 2  # noqa: E731
    result = compiled(program, post_grad_custom_post_pass=look)(x, w)
    assert difference(result.detach(), program(x, w).detach(), None, 1e-5) == ""
    assert "aten.gelu.default" in names
    if grad:
        result.sum().backward()
        (want,) = torch.autograd.grad(program(x, w).sum(), x)
        torch.testing.assert_close(x.grad, want)


def fires(fn: Callable[..., Any], *inputs: Any) -> int:
    gm = attention_trace(fn, inputs)
    return sum(len(some.apply(gm)) for some in rules("on"))


def attention_trace(fn: Callable[..., Any], inputs: Sequence[Any]) -> torch.fx.GraphModule:
    gm = fwd_only(fn, inputs)
    normalise(gm)
    return gm


def test_attention_that_the_kernel_does_not_take_stays() -> None:
    q, k, v = (torch.randn(2, 4, 8, 16) for _ in range(3))
    assert fires(attention.plain, q, k, v) == 1
    assert fires(attention.plain, q, k, v[..., :8]) == 0
    assert fires(lambda q, k, v: torch.softmax(q @ k.transpose(-2, -1), -2) @ v, q, k, v) == 0
    assert fires(attention.plain, q[0], k[0], v[0]) == 0
