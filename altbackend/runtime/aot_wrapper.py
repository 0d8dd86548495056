"""Wrappers that make a traced call of its compiled graphs, without AOTAutograd.

A compiled graph knows nothing of autograd. `inference` and `training` return the callable that Dynamo puts in the
user's program. It returns inputs that are results, advances versions of inputs that the graph writes, and puts a
`torch.autograd.Function` around the forward and the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.autograd import forward_ad

from altbackend.lazy_dataclass import dataclass

from ..compat import torch_api
from ..compat.torch_api import skip_frames, unannotated, unseen
from .boxed import Args, BoxedCall, Function, Values
from .gradients import are_batched, is_batched, one_by_one, plain
from .successor import follow
from .views import Step, replay

Mark = Callable[[object, set[int]], None]
# returns the callable that runs these inputs in place of a compiled graph, or None if the graph may run them
Alternative = Callable[[Values], Callable[..., Values] | None]
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
    finish, behind, lifted = _finish(plan, calling.mark), _behind(plan), calling.lifted
    if finish is None and not plan.written and not calling.autocast:
        return _direct(call, lifted)
    if _needs_no_graph(call, plan):
        return _of_inputs(plan, lifted)
    compute = _without_grad(call, calling)

    def run(*args: object) -> Values:
        inputs: Args = [*lifted, *args]
        _advance(inputs, plan)
        bases = {k: inputs[n] for k, n in behind}
        results = compute(inputs)
        return results if finish is None else finish(list(results), bases)

    return run


def _direct(call: BoxedCall, lifted: Sequence[object]) -> Function:
    """Return the callable of a graph whose results go to the user as they are.

    Its attribute `with_check` returns it with a check for transforms of torch.func (`variants.transformed`). One
    function does all, since each function on the way costs microseconds where its memory is in no cache.
    """
    recording, record = torch.is_grad_enabled, torch_api.record_gradients

    def with_check(transforms: Callable[[], object], otherwise: Alternative) -> Function:
        compute = call

        def run(*args: object) -> Values:
            if forward_ad._current_level >= 0 or transforms() is not None:
                other = otherwise(args)
                if other is not None:
                    return other(*args)
            if not recording():
                return compute([*lifted, *args])
            record(False)
            try:
                return compute([*lifted, *args])
            finally:
                record(True)

        def use(successor: BoxedCall) -> None:
            nonlocal compute
            compute = successor

        follow(call, use)
        return run

    run = with_check(lambda: None, lambda args: None)
    vars(run)["with_check"] = with_check
    return run


def _needs_no_graph(call: BoxedCall, plan: Plan) -> bool:
    """Return whether all results are inputs or views of them, and the graph does nothing else."""
    of_inputs = {k for k, _ in _behind(plan)} == {*range(len(plan.same))}
    replayed = all(v.steps is not None for v in plan.views)
    return (
        of_inputs and replayed and not plan.written and not any(plan.dynamic) and getattr(call, "does_nothing", False)
    )


def _of_inputs(plan: Plan, lifted: Sequence[object]) -> Function:
    """Return the callable of a graph whose results are inputs and views of them, which calls no graph."""
    viewers = {view.result: _viewer(view) for view in plan.views}
    makers = [(viewers.get(k), n) for k, n in sorted(_behind(plan))]

    def with_check(transforms: Callable[[], object], otherwise: Alternative) -> Function:
        def run(*args: object) -> Values:
            if forward_ad._current_level >= 0 or transforms() is not None:
                other = otherwise(args)
                if other is not None:
                    return other(*args)
            inputs: Args = [*lifted, *args]
            return [inputs[n] if make is None else make(inputs[n], None) for make, n in makers]

        return run

    run = with_check(lambda: None, lambda args: None)
    vars(run)["with_check"] = with_check
    return run


def training(forward: BoxedCall, backward: Backward, plan: Plan, calling: Calling) -> Function:
    """Return the callable of a forward and its backward."""
    apply = torch_api.plain_apply(_function(forward, backward, plan, calling))
    finish, behind, lifted = _finish(plan, calling.mark), _behind(plan), calling.lifted
    recording, written, detached = torch.is_grad_enabled, plan.written, plan.detached

    def run(*args: object) -> Values:
        inputs: Args = [*lifted, *args]
        if written:
            _advance(inputs, plan)
        bases = {} if finish is None else {k: inputs[n] for k, n in behind}
        for k in detached:
            inputs[k] = inputs[k].detach()
        if recording():
            results = apply(*inputs)
        else:
            with torch.enable_grad():
                results = apply(*inputs)
        return results if finish is None else finish(list(results), bases)

    return run


class _Context(Protocol):
    """The object that autograd passes from the forward to the backward of a function, with our attributes."""

    sizes: Sequence[object]
    unchecked: Sequence[torch.Tensor]
    to_save: Sequence[torch.Tensor]
    saved_tensors: tuple[torch.Tensor, ...]
    _materialize_non_diff_grads: bool
    _autograd_function_id: int

    def mark_non_differentiable(self, *tensors: torch.Tensor) -> None: ...
    def maybe_clear_saved_tensors(self) -> None: ...


def _function(forward: BoxedCall, backward: Backward, plan: Plan, calling: Calling) -> type[torch.autograd.Function]:
    compute, count = _without_autocast(forward, calling), len(plan.same)
    same = [k for k, number in enumerate(plan.same) if number >= 0]
    run_backward, load_operators = unseen(_compiled_backward(backward, plan, calling)), backward.operators
    sizes, unchecked, unviewed, views, fixed = plan.sizes, plan.unchecked, plan.unviewed, plan.views, plan.fixed

    class Compiled(torch.autograd.Function):
        """One compiled forward and its backward."""

        operators: Callable[..., Sequence[object]] | None = None

        @staticmethod
        def forward(ctx: _Context, *args: object) -> object:
            values = list(compute(list(args)))
            if sizes:
                ctx.sizes = values[-sizes:]
                del values[-sizes:]
            else:
                ctx.sizes = ()
            results, saved = values[:count], values[count:]
            for k, t in enumerate(saved):
                if t._is_view():
                    saved[k] = t.detach()
            if unchecked:
                ctx.unchecked = saved[-unchecked:]
                del saved[-unchecked:]
            else:
                ctx.unchecked = ()
            ctx.to_save = tuple(saved)  # what `save_for_backward` does
            for k in unviewed:
                if results[k]._is_view():
                    results[k] = torch.ops.aten._unsafe_view.default(results[k], results[k].shape)
            for k in same:
                results[k] = None  # autograd must not see an input come back
            for view in views:
                results[view.result] = _Hidden(results[view.result])
            if fixed:
                ctx.mark_non_differentiable(*(results[k] for k in fixed if isinstance(results[k], torch.Tensor)))
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

    def use(successor: BoxedCall) -> None:
        nonlocal compute
        compute = successor

    if not calling.autocast:
        follow(forward, use)
    skip_frames(Compiled.backward)  # autograd calls it, perhaps while Dynamo traces what the user's function calls
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
    graph, tangents, deterministic = backward.call, plan.tangents, backward.deterministic
    transforms, is_deterministic = torch._C._functorch.peek_interpreter_stack, torch._C._get_deterministic_algorithms
    recording = torch.is_grad_enabled

    def run(ctx: _Context, gradients: Values) -> object:
        if transforms() is not None:
            raise RuntimeError("a compiled backward was called under vmap, grad or vjp; compile all of it instead")
        if not deterministic and is_deterministic():
            raise RuntimeError(
                "torch.use_deterministic_algorithms(True) was set between a compiled forward and its backward; "
                "set it before the forward"
            )
        args = [*ctx.sizes, *ctx.saved_tensors, *ctx.unchecked]
        args += [gradients[t.result] for t in tangents]
        del gradients
        if recording() or calling.autocast or not _lay_out(args, tangents):
            return seldom(ctx, args)
        ctx.maybe_clear_saved_tensors()
        return tuple(graph(args))

    def run_laid_out(inputs: Args) -> Values:
        _lay_out(inputs, tangents)
        return graph(inputs)

    compute = _without_grad(run_laid_out, calling)

    def seldom(ctx: _Context, args: Args) -> object:
        """Compute gradients that are batched, that need gradients, or under autocast."""
        first = len(args) - len(tangents)

        def computed() -> object:
            ctx.maybe_clear_saved_tensors()
            if are_batched(args[first:]):
                return one_by_one(compute, args, range(first, len(args)))
            return tuple(compute(args))

        if recording():
            return unannotated(_Once.apply)(computed, torch.empty(0, requires_grad=True))
        return computed()

    def use(successor: BoxedCall) -> None:
        nonlocal graph
        graph = successor

    follow(graph, use)
    return run


def _lay_out(args: Args, tangents: Sequence[Tangent]) -> bool:
    """Put the gradients, the last of `args`, into the layouts that the backward was compiled for.

    Return False if one is batched, which then stays as it is. Raise RuntimeError for a tensor subclass.
    """
    for k, t in enumerate(tangents, len(args) - len(tangents)):
        g = args[k]
        if type(g) not in (torch.Tensor, torch.nn.Parameter):
            if isinstance(g, torch.Tensor):
                raise RuntimeError(
                    f"the gradient of result {t.result} of a compiled graph is a {type(g).__name__}, but a plain "
                    "tensor was expected; compile the loss together with its inputs"
                )
        elif is_batched(g):
            return False
        elif g.is_neg() or g.is_conj() or g._is_zerotensor():  # the condition of `plain`
            args[k] = _relaid(plain(g), t)
        elif t.format or g.stride() != t.stride or g.shape != t.size:
            args[k] = _relaid(g, t)
    return True


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
    views = [(view.result, _viewer(view)) for view in plan.views]
    dynamic = [(k, set(dims)) for k, dims in enumerate(plan.dynamic) if dims]
    if not dynamic and not _behind(plan):
        return None

    def finished(results: list[object], inputs: dict[int, torch.Tensor]) -> list[object]:
        for k, view in views:
            inputs[k] = view(inputs[k], results[k])
        for k, base in inputs.items():
            results[k] = base
        for k, dims in dynamic:
            mark(results[k], dims)
        return results

    return finished


def _viewer(view: Alias) -> Callable[[torch.Tensor, object], torch.Tensor]:
    """Return the function that makes a result of its base input and of the value that the graph returned for it."""
    rebuild = None if view.steps is None else replay(view.steps)
    requires_grad = view.requires_grad

    def make(base: torch.Tensor, result: object) -> torch.Tensor:
        rebuilt = _restrided(base, result) if rebuild is None else rebuild(base)
        if base.requires_grad == requires_grad:
            return rebuilt
        return rebuilt.requires_grad_() if requires_grad else rebuilt.detach()

    return make


def _restrided(base: torch.Tensor, result: Any) -> torch.Tensor:
    like = result.tensor if isinstance(result, _Hidden) else result
    return base.as_strided(like.shape, like.stride(), like.storage_offset())
