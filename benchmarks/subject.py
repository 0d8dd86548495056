"""A case made ready to call: eager or compiled, for inference, training or a step."""

import contextlib
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from benchmarks.cases import Built, Case, Preset
from benchmarks.records import Request


class TrainingStep(nn.Module):
    """Forward and loss as one module, as a training loop compiles them; returns (loss, detached outputs)."""

    def __init__(self, module: nn.Module, loss: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.module = module
        self.loss = loss

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        output = self.module(*args, **kwargs)
        outputs = (output,) if isinstance(output, Tensor) else output
        return self.loss(output), *(tensor.detach() for tensor in outputs)


@dataclass(frozen=True)
class Subject:
    """A callable and the state that it may change: the module's state and the gradients of `leaves`."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: tuple[Tensor, ...]
    call: Callable[..., Any]
    training: bool

    def clear(self) -> None:
        """Forget the gradients of the call before."""
        if self.training:
            for leaf in self.leaves:
                leaf.grad = None

    def run(self) -> Any:
        """One call; in training, with the backward."""
        output = self.call(*self.args, **self.kwargs)
        if self.training:
            output[0].backward()
        return output


def build(case: Case, preset: Preset, request: Request, seed: int = 0) -> Built:
    """The case on the request's device and in its dtype, in eval mode for inference, in train mode otherwise."""
    dtype = getattr(torch, request.dtype)
    torch.manual_seed(seed)
    with torch.device(request.device):
        module, args, kwargs = case.build(preset)
    if request.mode != "step" and not (case.autocast and request.mode == "training"):
        module = module.to(dtype)
        args, kwargs = pytree.tree_map_only(Tensor, lambda x: _cast(x, dtype), (args, kwargs))
    return module.train(request.mode == "training"), args, kwargs


def eager(case: Case, built: Built, request: Request) -> Subject:
    """The case as it is."""
    return _subject(case, built, request, lambda module: module)


def compiled(case: Case, built: Built, request: Request, dynamic: bool | None = None) -> Subject:
    """The case through torch.compile(backend=request.backend).

    Strict for alt: a graph that runs operator by operator must not be measured as if it were compiled.
    """
    options = ({"strict": True} if request.backend == "alt" else {}) | dict(request.options)
    mode = options.pop("mode", None)

    def through_compiler(module: nn.Module) -> Callable[..., Any]:
        backend = found(request.backend)
        compiled_module: Callable[..., Any] = torch.compile(
            module, backend=backend, mode=mode, options=options or None, dynamic=dynamic
        )
        return compiled_module

    return _subject(case, built, request, through_compiler)


def _subject(case: Case, built: Built, request: Request, wrap: Callable[[nn.Module], Callable[..., Any]]) -> Subject:
    """Inputs are marked for gradients where the case asks for them."""
    module, args, kwargs = built
    training = request.mode == "training"
    leaves: list[Tensor] = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if training and case.input_gradients:
        given = pytree.tree_leaves((args, kwargs))
        leaves += [x.requires_grad_() for x in given if isinstance(x, Tensor) and x.is_floating_point()]
    call = wrap(TrainingStep(module, case.loss) if training else module)
    return Subject(module, args, kwargs, tuple(leaves), _autocast(case, call, request), training)


@contextlib.contextmanager
def surroundings(request: Request) -> Iterator[None]:
    """no_grad for inference, nothing special otherwise (an optimizer's step brings its own no_grad)."""
    with torch.no_grad() if request.mode == "inference" else contextlib.nullcontext():
        yield


def _autocast(case: Case, call: Callable[..., Any], request: Request) -> Callable[..., Any]:
    if not (case.autocast and request.mode == "training" and request.dtype != "float32"):
        return call
    device, dtype = torch.device(request.device).type, getattr(torch, request.dtype)

    def under_autocast(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device, dtype=dtype):
            return call(*args, **kwargs)

    return under_autocast


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def found(name: str) -> Any:
    """The name, for torch to look up; or the checkout's own `alt` where the package is not installed."""
    return getattr(importlib.import_module("altbackend"), "alt", name) if name == "alt" else name
