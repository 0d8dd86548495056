"""The option `check_passes` names the first pass that changes results, and lets correct passes through."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx import Graph

from altbackend.fx_passes.check import differences
from test.compare import compiled

aten = torch.ops.aten


def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.softmax(torch.sin(x) @ w, -1) * 1.0


def wrong(graph: Graph) -> None:
    for n in graph.find_nodes(op="call_function", target=aten.sin.default):
        n.target = aten.cos.default


def wrong_in_the_captured_graph(graph: Graph) -> None:
    for n in graph.find_nodes(op="call_function", target=torch.sin):
        n.target = torch.cos


def rounded(graph: Graph) -> None:
    for n in graph.find_nodes(op="call_function", target=aten.sin.default):
        with graph.inserting_after(n):
            scaled = graph.call_function(aten.mul.Tensor, (n, 1 + 1e-7))
        n.replace_all_uses_with(scaled, delete_user_cb=lambda user, new=scaled: user is not new)


HOOKS = {
    "pre_grad_custom_pass": ("user: pre_grad", wrong_in_the_captured_graph),
    "joint_custom_pre_pass": ("user: joint, pre", wrong),
    "joint_custom_post_pass": ("user: joint, post", wrong),
    "post_grad_custom_pre_pass": ("user: post_grad, pre", wrong),
    "post_grad_custom_post_pass": ("user: post_grad, post", wrong),
}


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("hook", list(HOOKS))
def test_a_wrong_pass_is_named(hook: str, grad: bool) -> None:
    x, w = torch.randn(4, 6, requires_grad=grad), torch.randn(6, 5)
    name, user_pass = HOOKS[hook]
    options: dict[str, Any] = {hook: user_pass, "check_passes": True}
    with pytest.raises(Exception, match=f"the pass `{name}` changes the results of .*: result 0: relative difference"):
        compiled(f, dynamic=False, **options)(x, w)


def test_rounding_is_no_difference() -> None:
    x, w = torch.randn(4, 6), torch.randn(6, 5)
    compiled(f, check_passes=True, post_grad_custom_pre_pass=rounded)(x, w)


def attention(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    q, k, v = (x @ w).view(2, 8, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
    return torch.softmax(q @ k.transpose(-1, -2) * 0.5, -1) @ v


def convolution(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = torch.nn.functional.conv2d(x.view(2, 1, 8, 8), w.view(-1)[:27].view(3, 1, 3, 3))
    return torch.nn.functional.batch_norm(y, torch.zeros(3), torch.ones(3))


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("fn", [attention, convolution], ids=lambda fn: fn.__name__)
def test_the_backends_own_passes_are_correct(fn: Callable[..., Any], grad: bool, tmp_path: Path) -> None:
    x, w = torch.randn(2, 8, 8, requires_grad=grad), torch.randn(8, 24)
    y = compiled(fn, check_passes=True, attention="on", debug_dir=str(tmp_path))(x, w)
    if grad:
        y.sum().backward()
    text = "".join(path.read_text() for path in tmp_path.rglob("decisions.txt"))
    assert ("checked (equal)" in text) == (fn is attention)
    assert "differs" not in text


def test_random_passes_are_not_compared(tmp_path: Path) -> None:
    x = torch.randn(4, 6)
    compiled(lambda x: torch.nn.functional.dropout(x) + 1, check_passes=True, debug_dir=str(tmp_path))(x)
    assert "may draw other random numbers" in "".join(path.read_text() for path in tmp_path.rglob("decisions.txt"))


@pytest.mark.parametrize(
    ("got", "want", "reason"),
    [
        ([torch.ones(3)], [torch.ones(3)], ""),
        ([torch.ones(3)], [torch.ones(3), torch.ones(3)], "1 results instead of 2"),
        ([torch.ones(3)], [torch.ones(3).double()], "result 0: torch.float32[3] instead of torch.float64[3]"),
        ([torch.tensor([1.0, float("nan")])], [torch.ones(2)], "result 0: other elements are not finite"),
        ([torch.tensor([1.0, float("nan")])], [torch.tensor([1.0, float("nan")])], ""),
        ([torch.tensor([1, 2])], [torch.tensor([1, 3])], "result 0: 1 of 2 elements differ"),
        ([3], [3.0], "result 0: 3 instead of 3.0"),
    ],
)
def test_differences(got: list[Any], want: list[Any], reason: str) -> None:
    assert differences(got, want) == reason
