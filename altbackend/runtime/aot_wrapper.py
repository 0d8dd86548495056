"""Wrappers that make a traced call of its compiled graphs, without AOTAutograd.

A compiled graph knows nothing of autograd. `inference` and `training` return the callable that Dynamo puts in the
user's program. It returns inputs that are results, advances versions of inputs that the graph writes, and puts a
`torch.autograd.Function` around the forward and the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from altbackend.lazy_dataclass import dataclass

from ..compat import torch_api
from ..compat.torch_api import unannotated, untraced
from .boxed import Args, BoxedCall, Function, Values
from .gradients import are_batched, one_by_one, plain
from .views import Step, replay

Mark = Callable[[object, set[int]], None]
_FORMATS = {str(f).removeprefix("torch."): f for f in (torch.contiguous_format, torch.channels_last)}
_FORMATS["channels_last_3d"] = torch.channels_last_3d


@dataclass(frozen=True)
class Tangent:
    """A gradient that the backward takes: the index of its result, and a memory format or sizes and strides."""

    result: int
    format: str
    size: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()


@dataclass(frozen=True)
class Alias:
    """A result that is a view of an input, and is rebuilt from that input.

    `steps` lead from the input to the result. Without steps, which is the case for symbolic sizes, the view has the
    geometry that the graph returns and the input's dtype.
    """

    result: int
    base: int
    requires_grad: bool
    steps: tuple[Step, ...] | None = None


@dataclass(frozen=True)
class Plan:
    """The plan to make a traced call of compiled graphs. Its numbers are indices of the call's inputs and results.

    `same`: for each result, the input that it is, or -1. `dynamic`: for each result, the dimensions that torch
    marks as varying. `written`: inputs whose version a call advances. `changed`: all inputs whose memory a call
    writes. `views`: results that are views of inputs.

    The further fields are for training. `fixed`: results without a gradient. `unviewed`: results that autograd must
    not treat as views. `detached`: inputs that no gradient reaches. The forward returns the results, then the
    values that the backward takes: tensors whose version must not change meanwhile, `unchecked` tensors, and
    `sizes` numbers. The backward takes the sizes first and the `tangents` last.
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
class Backward:
    """A compiled backward. `deterministic`: torch's setting that it was compiled for.

    `operators` returns a function that runs the same operators uncompiled, for tracing by compiled autograd.
    """

    call: BoxedCall
    deterministic: bool
    operators: Callable[[], Function] | None = None


@dataclass(frozen=True)
class Calling:
    """The facts besides its graph that a traced call depends on.

    `lifted`: the tensors that the graph takes before the inputs. `autocast`: whether it was captured under autocast.
    It then contains its casts and runs without autocast. `mark`: notes on a tensor which of its dimensions vary.
    """

    lifted: tuple[object, ...]
    autocast: bool
    mark: Mark


@dataclass(frozen=True)
class _Hidden:
    """A tensor that is hidden from autograd among a function's results."""

    tensor: torch.Tensor


def inference(call: BoxedCall, plan: Plan, calling: Calling) -> Function:
    """Return the callable of a graph without a backward."""
    compute, finish, behind = _without_grad(call, calling), _finish(plan, calling.mark), _behind(plan)
    lifted = calling.lifted
    if finish is None and not plan.written:
        return lambda *args: compute([*lifted, *args])

    def run(*args: object) -> Values:
        inputs: Args = [*lifted, *args]
        _advance(inputs, plan)
        bases = {k: inputs[n] for k, n in behind}
        results = compute(inputs)
        return results if finish is None else finish(list(results), bases)

    return run


def training(forward: BoxedCall, backward: Backward, plan: Plan, calling: Calling) -> Function:
    """Return the callable of a forward and its backward."""
    apply = _with_grad(torch_api.plain_apply(_function(forward, backward, plan, calling)))
    finish, behind, lifted = _finish(plan, calling.mark), _behind(plan), calling.lifted

    def run(*args: object) -> Values:
        inputs: Args = [*lifted, *args]
        _advance(inputs, plan)
        bases = {k: inputs[n] for k, n in behind}
        for k in plan.detached:
            inputs[k] = inputs[k].detach()
        results: Values = apply(*inputs)
        return results if finish is None else finish(list(results), bases)

    return run


class _Context(Protocol):
    """The object that autograd passes from the forward to the backward of a function, with our attributes."""

    sizes: Sequence[object]
    unchecked: Sequence[torch.Tensor]
    saved_tensors: tuple[torch.Tensor, ...]
    _materialize_non_diff_grads: bool
    _autograd_function_id: int

    def save_for_backward(self, *tensors: torch.Tensor) -> None: ...
    def mark_non_differentiable(self, *tensors: torch.Tensor) -> None: ...
    def maybe_clear_saved_tensors(self) -> None: ...


def _function(forward: BoxedCall, backward: Backward, plan: Plan, calling: Calling) -> type[torch.autograd.Function]:
    compute, count = _without_autocast(forward, calling), len(plan.same)
    same = [k for k, number in enumerate(plan.same) if number >= 0]
    run_backward, load_operators = untraced(_compiled_backward(backward, plan, calling)), backward.operators

    class Compiled(torch.autograd.Function):
        """One compiled forward and its backward."""

        operators: Callable[..., Sequence[object]] | None = None

        @staticmethod
        def forward(ctx: _Context, *args: object) -> object:
            values = list(compute(list(args)))
            end = len(values) - plan.sizes
            results, ctx.sizes = values[:count], values[end:]
            saved = [t.detach() if t._is_view() else t for t in values[count:end]]
            checked = len(saved) - plan.unchecked
            ctx.save_for_backward(*saved[:checked])
            ctx.unchecked = saved[checked:]
            for k in plan.unviewed:
                results[k] = torch.ops.aten._unsafe_view(results[k], results[k].shape)
            for k in same:
                results[k] = None  # autograd must not see an input come back
            for view in plan.views:
                results[view.result] = _Hidden(results[view.result])
            if plan.fixed:
                ctx.mark_non_differentiable(*(results[k] for k in plan.fixed if isinstance(results[k], torch.Tensor)))
            ctx._materialize_non_diff_grads = False
            return tuple(results)

        @staticmethod
        def backward(ctx: _Context, *gradients: torch.Tensor | None) -> object:
            if Compiled.operators is None or not torch.compiler.is_compiling():
                return run_backward(ctx, gradients)
            tangents = [g if g is None else _relaid(g, t) for t in plan.tangents for g in (gradients[t.result],)]
            return tuple(Compiled.operators(*ctx.sizes, *ctx.saved_tensors, *ctx.unchecked, *tangents))

        @staticmethod
        def _compiled_autograd_key(ctx: _Context) -> tuple[object, ...]:
            """Return what a captured backward depends on; compiled autograd asks before it traces `backward`."""
            if Compiled.operators is None and load_operators is not None:
                Compiled.operators = staticmethod(load_operators())
            return (ctx._autograd_function_id, *ctx.sizes)

    return Compiled


class _Once(torch.autograd.Function):
    """The autograd function of gradients that are themselves asked for a gradient; its backward raises."""

    @staticmethod
    def forward(ctx: object, compute: Callable[[], object], anchor: torch.Tensor) -> object:
        return compute()

    @staticmethod
    def backward(ctx: object, *gradients: object) -> object:
        raise RuntimeError(
            "torch.compile with aot_autograd does not currently support double backward; "
            "compute second derivatives outside torch.compile"
        )


def _compiled_backward(backward: Backward, plan: Plan, calling: Calling) -> Callable[[_Context, Values], object]:
    def run_laid_out(inputs: Args) -> Values:
        for k, t in enumerate(plan.tangents, len(inputs) - len(plan.tangents)):
            inputs[k] = _with_layout(inputs[k], t)
        return backward.call(inputs)

    compute = _without_grad(run_laid_out, calling)

    def run(ctx: _Context, gradients: Values) -> object:
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise RuntimeError("a compiled backward was called under vmap, grad or vjp; compile all of it instead")
        if torch.are_deterministic_algorithms_enabled() and not backward.deterministic:
            raise RuntimeError(
                "torch.use_deterministic_algorithms(True) was set between a compiled forward and its backward; "
                "set it before the forward"
            )
        args = [*ctx.sizes, *ctx.saved_tensors, *ctx.unchecked]
        first = len(args)
        args += [gradients[t.result] for t in plan.tangents]
        del gradients

        def computed() -> object:
            ctx.maybe_clear_saved_tensors()
            if are_batched(args[first:]):
                return one_by_one(compute, args, range(first, len(args)))
            return tuple(compute(args))

        if torch.is_grad_enabled():
            return unannotated(_Once.apply)(computed, torch.empty(0, requires_grad=True))
        return computed()

    return run


def _with_layout(gradient: object, tangent: Tangent) -> object:
    """Return a gradient in the layout that the backward was compiled for. Raise RuntimeError for a tensor subclass."""
    if not isinstance(gradient, torch.Tensor):
        return gradient
    if type(gradient) not in (torch.Tensor, torch.nn.Parameter):
        raise RuntimeError(
            f"the gradient of result {tangent.result} of a compiled graph is a {type(gradient).__name__}, but a plain "
            "tensor was expected; compile the loss together with its inputs"
        )
    return _relaid(plain(gradient), tangent)


def _relaid(gradient: torch.Tensor, tangent: Tangent) -> torch.Tensor:
    """Return a gradient with the memory format or the strides of a tangent."""
    if tangent.format:
        return gradient.contiguous(memory_format=_FORMATS[tangent.format])
    if gradient.shape == tangent.size and gradient.stride() == tangent.stride:
        return gradient
    out = torch.empty_strided(tangent.size, tangent.stride, dtype=gradient.dtype, device=gradient.device)
    return out.copy_(gradient)


def _without_autocast(call: BoxedCall, calling: Calling) -> BoxedCall:
    if not calling.autocast:
        return call

    def run(inputs: Args) -> Values:
        with torch._C._DisableAutocast():
            return call(inputs)

    return run


def _without_grad(call: BoxedCall, calling: Calling) -> BoxedCall:
    """Return `call`, which records no gradients and runs without autocast. Contexts in Python take 3 us more."""
    compute, recording, record = _without_autocast(call, calling), torch.is_grad_enabled, torch_api.record_gradients

    def run(inputs: Args) -> Values:
        if not recording():
            return compute(inputs)
        record(False)
        try:
            return compute(inputs)
        finally:
            record(True)

    return run


def _with_grad(function: Function) -> Function:
    """Return `function`, which runs with gradients recorded."""
    recording = torch.is_grad_enabled

    def run(*args: object) -> object:
        if recording():
            return function(*args)
        with torch.enable_grad():
            return function(*args)

    return run


def _advance(args: Values, plan: Plan) -> None:
    if plan.written:
        torch.autograd.graph.increment_version(tuple(args[k] for k in plan.written))


def _behind(plan: Plan) -> list[tuple[int, int]]:
    """Return (index of the result, index of the input) of each result that is an input or a view of one."""
    returned = [(k, same) for k, same in enumerate(plan.same) if same >= 0]
    return [(view.result, view.base) for view in plan.views] + returned


def _finish(plan: Plan, mark: Mark) -> Callable[[list[object], dict[int, torch.Tensor]], list[object]] | None:
    """Return the function that puts inputs and their views among the results, and marks sizes that vary.

    Return None if results need neither.
    """
    views = [(view.result, _viewer(view), view.requires_grad) for view in plan.views]
    dynamic = [(k, set(dims)) for k, dims in enumerate(plan.dynamic) if dims]
    if not dynamic and not _behind(plan):
        return None

    def finished(results: list[object], inputs: dict[int, torch.Tensor]) -> list[object]:
        for k, view, requires_grad in views:
            inputs[k] = _with_gradient(inputs[k], view(inputs[k], results[k]), requires_grad)
        for k, base in inputs.items():
            results[k] = base
        for k, dims in dynamic:
            mark(results[k], dims)
        return results

    return finished


def _viewer(view: Alias) -> Callable[[torch.Tensor, object], torch.Tensor]:
    """Return the function that makes a result of its base input and of the value that the graph returned for it."""
    if view.steps is None:
        return _restrided
    rebuild = replay(view.steps)
    return lambda base, _: rebuild(base)


def _restrided(base: torch.Tensor, result: Any) -> torch.Tensor:
    like = result.tensor if isinstance(result, _Hidden) else result
    return base.as_strided(like.shape, like.stride(), like.storage_offset())


def _with_gradient(base: torch.Tensor, view: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    if base.requires_grad and not requires_grad:
        return view.detach()
    return view.requires_grad_() if requires_grad and not base.requires_grad else view
