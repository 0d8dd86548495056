"""A graph on single numbers, such as a score function, as scalar trees for the body of another operator's loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node

from ..compat import torch_api
from ..ir import value as va
from . import gpu
from .context import Ctx
from .registry import SUPPORTED_DTYPES, FallBack, Lowering, lowering_of
from .tensor import Tensor

_aten = torch.ops.aten
# decompositions may leave these: the dtype and size are those of the result
_FILLED = {_aten.new_ones.default: 1, _aten.ones.default: 1, _aten.new_zeros.default: 0, _aten.zeros.default: 0}


def trees_of(ctx: Ctx, gm: GraphModule, inputs: Sequence[object], own: Mapping[object, Lowering]) -> list[object]:
    """Return the results of a graph for lowered `inputs`: tensors without storage, indices, None.

    `own`: functions that lower operators in place of the registered ones. The dtypes of `inputs` count, not those that
    were traced. Raises FallBack where the graph needs more than scalars and loads.
    """
    inner = Ctx(ctx.cfg, ctx.device, ctx.gpu, dict(ctx.buffers), defined=set(ctx.defined), shape_memo=ctx.shape_memo)
    mode = getattr(ctx.traced(0), "fake_mode", None)
    if not isinstance(mode, FakeTensorMode):
        raise FallBack("its arguments were traced without fake values")
    fakes: dict[Node, Any] = {}
    places = iter(inputs)
    result: list[object] = []
    for n in gm.graph.nodes:
        inner.graph_node = n
        match n.op:
            case "placeholder":
                x = next(places)
                fakes[n] = _fake(mode, n, x)
                inner.env[n] = x
            case "get_attr":
                fakes[n], inner.env[n] = _constant(mode, gm, n)
            case "call_function":
                _call(inner, mode, n, fakes, own)
            case "output":
                outs = n.args[0] if isinstance(n.args[0], (tuple, list)) else n.args
                result = [inner.env[a] if isinstance(a, Node) else a for a in outs]
    if inner.nodes or inner.computed or len(inner.buffers) != len(ctx.buffers):
        raise FallBack("its score function computes more than scalars")
    return result


def _fake(mode: FakeTensorMode, n: Node, x: object) -> object:
    """Return the fake value of an input: the traced one, with the dtype that the input really has."""
    traced = n.meta.get("val")
    if not isinstance(x, Tensor):
        return traced
    if not isinstance(traced, torch.Tensor):
        raise FallBack("its score function was traced without fake values")
    if traced.dtype == x.dtype:
        return traced
    with mode:
        return traced.to(x.dtype)


def _constant(mode: FakeTensorMode, gm: GraphModule, n: Node) -> tuple[torch.Tensor, Tensor]:
    constant = getattr(gm, str(n.target), None)
    if not isinstance(constant, torch.Tensor) or constant.dim() or constant.device.type != "cpu":
        raise FallBack("its score function has a constant that is no number")
    if constant.dtype not in SUPPORTED_DTYPES:
        raise FallBack(f"its score function has a constant of {constant.dtype}")
    with mode:
        fake = torch.empty((), dtype=constant.dtype)
    with torch_api.real_tensors():
        number = constant.item()
    return fake, Tensor((), constant.dtype, va.const(number, constant.dtype))


def _call(inner: Ctx, mode: FakeTensorMode, n: Node, fakes: dict[Node, Any], own: Mapping[object, Lowering]) -> None:
    """Lower one call; the fake value is computed anew, since an input may have another dtype than was traced."""
    args, kwargs = torch.fx.node.map_arg((n.args, n.kwargs), lambda m: inner.env[m])
    if n.target in own:
        inner.env[n] = own[n.target](inner, *args, **kwargs)
        return
    fake_args, fake_kwargs = torch.fx.node.map_arg((n.args, n.kwargs), lambda m: fakes[m])
    fakes[n] = fake = _fake_result(mode, n, fake_args, fake_kwargs)
    if isinstance(fake, (int, torch.SymInt)) and not isinstance(fake, bool):
        inner.env[n] = inner.index(fake)
        return
    if not isinstance(fake, torch.Tensor) or fake.dtype not in SUPPORTED_DTYPES:
        raise FallBack(f"its score function calls {n.target}")
    n.meta["val"], traced = fake, n.meta.get("val")
    try:
        inner.env[n] = _lowered(inner, n, fake, args, kwargs)
    except TypeError as cause:
        raise FallBack(f"its score function calls {n.target}: {cause}") from cause
    finally:
        n.meta["val"] = traced


def _fake_result(mode: FakeTensorMode, n: Node, args: Any, kwargs: Any) -> object:
    try:
        with mode:
            return n.target(*args, **kwargs)  # type: ignore[operator]
    except (RuntimeError, TypeError) as cause:
        raise FallBack(f"{n.target} takes no float32 scores: {cause}") from cause


def _lowered(inner: Ctx, n: Node, fake: torch.Tensor, args: Any, kwargs: Any) -> object:
    if n.target in _FILLED:
        return Tensor(inner.shape(fake.shape), fake.dtype, va.const(_FILLED[n.target], fake.dtype))
    lowering = lowering_of(n.target)
    if lowering is None:
        raise FallBack(f"its score function calls {n.target}")
    return gpu.expressible(inner, lowering(inner, *args, **kwargs))
