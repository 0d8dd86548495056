"""A traced call made of its compiled graphs: what AOTAutograd wraps around them, for graphs that need little of it.

A compiled graph knows nothing of autograd. `inference` and `training` give the callable that Dynamo puts in the user's
program: results that are inputs, versions of inputs that the graph writes, and a `torch.autograd.Function` around the
forward and the backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .gradients import are_batched, one_by_one, plain
from .views import Step, replay

Call = Callable[[list[Any]], Sequence[Any]]
_FORMATS = {str(f).removeprefix("torch."): f for f in (torch.contiguous_format, torch.channels_last)}
_FORMATS["channels_last_3d"] = torch.channels_last_3d


@dataclass(frozen=True)
class Tangent:
    """A gradient that the backward takes: of which result, and in a memory format, or with sizes and strides."""

    result: int
    format: str
    size: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()


@dataclass(frozen=True)
class Alias:
    """A result that is a view of an input, and is made again of that input.

    By `steps` from the input to the result; without them by the geometry that the graph gives, which has symbolic
    sizes then, and the input's dtype.
    """

    result: int
    base: int
    requires_grad: bool
    steps: tuple[Step, ...] | None = None


@dataclass(frozen=True)
class Plan:
    """How a traced call is made of compiled graphs. Numbers count the call's inputs and results.

    `same`: per result, the input that it is, or -1. `dynamic`: per result, dimensions that torch marks as varying.
    `written`: inputs whose version a call advances. `changed`: inputs whose memory a call writes, those included.
    `views`: results that are views of inputs.

    The rest is of training. `fixed`: results without a gradient.
    `unviewed`: results that autograd must not take for views. `detached`: inputs that no gradient reaches.
    The forward returns the results, then what the backward takes: tensors whose version must not change meanwhile,
    `unchecked` tensors, `sizes`; the backward takes the sizes first and the `tangents` last.
    """

    same: tuple[int, ...]
    dynamic: tuple[tuple[int, ...], ...]
    written: tuple[int, ...]
    fixed: tuple[int, ...] = ()
    unviewed: tuple[int, ...] = ()
    detached: tuple[int, ...] = ()
    unchecked: int = 0
    sizes: int = 0
    tangents: tuple[Tangent, ...] = ()
    views: tuple[Alias, ...] = ()
    changed: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Hidden:
    """A tensor that autograd must not see among a function's results."""

    tensor: torch.Tensor


def inference(
    call: Call, plan: Plan, mark: Callable[[Any, set[int]], None], before: tuple[Any, ...] = ()
) -> Callable[..., Any]:
    """The callable of a graph without a backward. `mark` notes on a tensor which of its dimensions vary.

    `before`: what the graph takes before the inputs.
    """
    surroundings, finish = _surroundings(), _finish(plan, mark)

    def run(*args: Any) -> list[Any]:
        given = [*before, *args]
        _advance(given, plan)
        inputs = _returned(given, plan)
        with torch.no_grad(), surroundings():
            results = list(call(given))
        return finish(results, inputs)

    return _untraced(run)


def training(
    forward: Call,
    backward: Call,
    plan: Plan,
    mark: Callable[[Any, set[int]], None],
    deterministic: bool,
    before: tuple[Any, ...] = (),
) -> Callable[..., Any]:
    """The callable of a forward and its backward. `deterministic`: the setting that they were compiled for.

    `before`: what the graph takes before the inputs.
    """
    function = _function(forward, _untraced(_backward_of(backward, plan, deterministic)), plan)
    finish = _finish(plan, mark)

    def run(*args: Any) -> list[Any]:
        given = [*before, *args]
        _advance(given, plan)
        inputs = _returned(given, plan)
        for k in plan.detached:
            given[k] = given[k].detach()
        with torch.enable_grad():
            results = function.apply(*given)  # type: ignore[no-untyped-call]
        return finish(list(results), inputs)

    return _untraced(run)


def _function(forward: Call, backward: Callable[..., Any], plan: Plan) -> type[torch.autograd.Function]:
    surroundings, count = _surroundings(), len(plan.same)

    class Compiled(torch.autograd.Function):
        """One compiled forward and its backward."""

        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            with surroundings():
                values = list(forward(list(args)))
            end = len(values) - plan.sizes
            results, ctx.sizes = values[:count], values[end:]
            saved = [t.detach() if t._is_view() else t for t in values[count:end]]
            checked = len(saved) - plan.unchecked
            ctx.save_for_backward(*saved[:checked])
            ctx.unchecked = saved[checked:]
            for k in plan.unviewed:
                results[k] = torch.ops.aten._unsafe_view(results[k], results[k].shape)
            for k, same in enumerate(plan.same):
                if same >= 0:
                    results[k] = None  # autograd must not see an input come back
            for view in plan.views:
                results[view.result] = _Hidden(results[view.result])
            ctx.mark_non_differentiable(*(results[k] for k in plan.fixed if isinstance(results[k], torch.Tensor)))
            ctx._materialize_non_diff_grads = False
            return tuple(results)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return backward(ctx, gradients)

    return Compiled


class _Once(torch.autograd.Function):
    """What stands behind gradients that are themselves asked for a gradient."""

    @staticmethod
    def forward(ctx: Any, compute: Callable[[], Any], anchor: torch.Tensor) -> Any:
        return compute()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError(
            "torch.compile with aot_autograd does not currently support double backward; "
            "compute second derivatives outside torch.compile"
        )


def _backward_of(backward: Call, plan: Plan, deterministic: bool) -> Callable[[Any, Sequence[Any]], Any]:
    surroundings = _surroundings()

    def run(ctx: Any, gradients: Sequence[Any]) -> Any:
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise RuntimeError("a compiled backward was called under vmap, grad or vjp; compile all of it instead")
        if torch.are_deterministic_algorithms_enabled() and not deterministic:
            raise RuntimeError(
                "torch.use_deterministic_algorithms(True) was set between a compiled forward and its backward; "
                "set it before the forward"
            )
        args = [*ctx.sizes, *ctx.saved_tensors, *ctx.unchecked]
        first = len(args)
        args += [gradients[t.result] for t in plan.tangents]
        del gradients

        def laid_out(given: list[Any]) -> Sequence[Any]:
            for k, t in enumerate(plan.tangents, first):
                given[k] = _laid_out(given[k], t)
            return backward(given)

        def compute() -> Any:
            ctx.maybe_clear_saved_tensors()
            with torch.no_grad(), surroundings():
                if are_batched(args[first:]):
                    return one_by_one(laid_out, args, range(first, len(args)))
                return tuple(laid_out(args))

        if torch.is_grad_enabled():
            return _Once.apply(compute, torch.empty(0, requires_grad=True))  # type: ignore[no-untyped-call]
        return compute()

    return run


def _laid_out(gradient: Any, wanted: Tangent) -> Any:
    """A gradient as the backward was compiled for. Raises RuntimeError for one that is no plain tensor."""
    if not isinstance(gradient, torch.Tensor):
        return gradient
    if type(gradient) not in (torch.Tensor, torch.nn.Parameter):
        raise RuntimeError(
            f"the gradient of result {wanted.result} of a compiled graph is a {type(gradient).__name__}, where a plain "
            "tensor was expected; compile the loss together with what it is computed from"
        )
    gradient = plain(gradient)
    if wanted.format:
        return gradient.contiguous(memory_format=_FORMATS[wanted.format])
    if gradient.shape == wanted.size and gradient.stride() == wanted.stride:
        return gradient
    out = torch.empty_strided(wanted.size, wanted.stride, dtype=gradient.dtype, device=gradient.device)
    return out.copy_(gradient)


def _surroundings() -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """A graph captured under autocast has its casts in it, and runs without."""
    return torch._C._DisableAutocast if torch._C._is_any_autocast_enabled() else contextlib.nullcontext


def _untraced(run: Callable[..., Any]) -> Callable[..., Any]:
    wrapped: Callable[..., Any] = torch._dynamo.disable(  # type: ignore[no-untyped-call]
        run, reason="altbackend: a compiled graph"
    )
    return wrapped


def _advance(args: Sequence[Any], plan: Plan) -> None:
    if plan.written:
        torch.autograd.graph.increment_version(tuple(args[k] for k in plan.written))


def _returned(args: Sequence[Any], plan: Plan) -> dict[int, Any]:
    """Per result that is an input or a view of one, that input."""
    bases = {view.result: args[view.base] for view in plan.views}
    return bases | {k: args[same] for k, same in enumerate(plan.same) if same >= 0}


def _finish(plan: Plan, mark: Callable[[Any, set[int]], None]) -> Callable[[list[Any], dict[int, Any]], list[Any]]:
    """What puts inputs and their views among the results, and marks sizes that vary."""
    views = [(view.result, _viewer(view), view.requires_grad) for view in plan.views]
    dynamic = [(k, set(dims)) for k, dims in enumerate(plan.dynamic) if dims]

    def finished(results: list[Any], inputs: dict[int, Any]) -> list[Any]:
        for k, view, requires_grad in views:
            inputs[k] = _with_gradient(inputs[k], view(inputs[k], results[k]), requires_grad)
        for k, held in inputs.items():
            results[k] = held
        for k, dims in dynamic:
            mark(results[k], dims)
        return results

    return finished


def _viewer(view: Alias) -> Callable[[torch.Tensor, Any], torch.Tensor]:
    """What makes a result of the input that it is a view of, and of what the graph gives for it."""
    if view.steps is None:
        return _placed
    made = replay(view.steps)
    return lambda base, _: made(base)


def _placed(base: torch.Tensor, found: Any) -> torch.Tensor:
    like = found.tensor if isinstance(found, _Hidden) else found
    return base.as_strided(like.shape, like.stride(), like.storage_offset())


def _with_gradient(base: torch.Tensor, view: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    if base.requires_grad and not requires_grad:
        return view.detach()
    return view.requires_grad_() if requires_grad and not base.requires_grad else view
