"""Reader of repro files: it returns the graph with traced values, and real inputs of the same geometry."""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node, Tracer
from torch.fx.experimental import symbolic_shapes
from torch.overrides import TorchFunctionMode

from altbackend.lazy_dataclass import dataclass

from ..compat import aot_autograd

SEED = 0
DEFAULT_BOUNDS = (0, 2)  # of random integers: the least, and one past the greatest
Sizes = Sequence[int | torch.SymInt]


class _JobKind(TypedDict):
    kind: str


class JobFields(_JobKind, total=False):
    """The fields of a `compiled.load.Job`, as far as a file gives them."""

    static_inputs: tuple[int, ...]
    user_outputs: int
    any_strides: bool
    donated: tuple[int, ...]


@dataclass(frozen=True)
class Rebuilt:
    """A graph from a file. `modules`: further modules that the file imports. `mode` traced the values."""

    gm: GraphModule
    options: Mapping[str, object]
    job: JobFields
    title: str
    modules: tuple[str, ...]
    mode: FakeTensorMode
    real_inputs: Callable[[], list[object]]

    @property
    def draws(self) -> bool:
        """Return whether the graph draws random numbers."""
        return any(torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ()) for n in self.gm.graph.nodes)


def rebuild(path: Path) -> Rebuilt:
    """Return the graph that a file describes. This executes the file, so the file must be trusted."""
    source = path.read_text(encoding="utf-8")
    namespace: dict[str, Any] = {"__name__": "altbackend_repro", "__file__": str(path), "constant": constant}
    exec(compile(source, str(path), "exec"), namespace)
    mode = FakeTensorMode(shape_env=symbolic_shapes.ShapeEnv(), allow_non_fake_inputs=True)
    gm = _traced(namespace)
    _annotate(gm, namespace["inputs"](Fake(mode)), mode)
    return Rebuilt(
        gm,
        namespace["OPTIONS"],
        namespace["JOB"],
        str(namespace["__doc__"]).partition("\n")[0],
        tuple(m for m in re.findall(r"^import ([\w.]+)$", source, re.MULTILINE) if m not in ("torch", "math")),
        mode,
        lambda: namespace["inputs"](Real()),
    )


# --- inputs ----------------------------------------------------------------------------------------------------------


class Fake:
    """Makes fake inputs with symbolic sizes."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode

    def size(self, seen: int) -> int | torch.SymInt:
        assert self.mode.shape_env is not None
        return aot_autograd.new_size(self.mode.shape_env, seen)

    def tensor(self, shape: Sizes, strides: Sizes, dtype: torch.dtype, device: str, *bounds: int) -> torch.Tensor:
        with self.mode:
            out = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        vars(out)["repro_content"] = "" if bounds in ((), DEFAULT_BOUNDS) else ", {}, {}".format(*bounds)
        return out


class Real:
    """Makes real inputs with random content. `bounds` of integers: the least, and one past the greatest."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(SEED)

    def size(self, seen: int) -> int:
        return seen

    def tensor(self, shape: Sizes, strides: Sizes, dtype: torch.dtype, device: str, *bounds: int) -> torch.Tensor:
        like = torch.empty_strided(tuple(shape), tuple(strides), dtype=dtype, device=device)
        return _random(like, self.generator, bounds or DEFAULT_BOUNDS)


def constant(
    shape: Sizes, strides: Sizes, dtype: torch.dtype, device: str, content: object = None, *bounds: int
) -> torch.Tensor:
    """Return a constant of a graph, with random content if `content` is None."""
    out = torch.empty_strided(shape, strides, dtype=dtype, device=device)
    if content is None:
        return _random(out, torch.Generator().manual_seed(SEED), bounds or DEFAULT_BOUNDS)
    return out.copy_(torch.tensor(content, dtype=dtype).reshape(tuple(shape)))


def _random(like: torch.Tensor, generator: torch.Generator, bounds: Sequence[int]) -> torch.Tensor:
    """Return random content in the geometry of `like`, which may be an expanded tensor."""
    shape, strides, dtype = tuple(like.shape), like.stride(), like.dtype
    if dtype == torch.bool:
        values = torch.randint(0, 2, shape, generator=generator).bool()
    elif dtype.is_floating_point or dtype.is_complex:
        values = torch.randn(shape, generator=generator, dtype=torch.complex64 if dtype.is_complex else None)
    else:
        values = torch.randint(bounds[0], bounds[1], shape, generator=generator)
    if any(n > 1 and s == 0 for n, s in zip(shape, strides, strict=True)):  # an expanded tensor cannot be written
        origin = torch.empty_strided([1 if s == 0 else n for n, s in zip(shape, strides, strict=True)], strides)
        origin = origin.to(dtype=dtype, device=like.device)
        first = values[tuple(slice(0, 1) if s == 0 else slice(None) for s in strides)]
        return origin.copy_(first).as_strided(shape, strides)
    return like.copy_(values)


# --- the graph -------------------------------------------------------------------------------------------------------


class _Recorded(Tracer):
    """Records operators as they are written, also those without traced operands."""

    def is_leaf_module(self, m: torch.nn.Module, name: str) -> bool:
        return True


class _EveryOperator(TorchFunctionMode):
    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        if isinstance(func, torch._ops.OpOverload):
            return self.tracer.create_proxy("call_function", func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def _traced(namespace: dict[str, Any]) -> GraphModule:
    tracer = _Recorded()
    for name, f in list(namespace.items()):
        if isinstance(f, types.FunctionType) and f.__module__.startswith("altbackend.runtime"):
            namespace[name] = _recorder(tracer, f)
    root = namespace["Graph"]()
    with _EveryOperator(tracer):
        graph = tracer.trace(root)
    return GraphModule(root, graph)


def _recorder(tracer: Tracer, f: Callable[..., object]) -> Callable[..., object]:
    return lambda *args, **kwargs: tracer.create_proxy("call_function", f, args, kwargs)


def _annotate(gm: GraphModule, inputs: Sequence[object], mode: FakeTensorMode) -> None:
    """Note on each node its value as a tracer sees it, as AOTAutograd does."""
    values = iter(inputs)
    with mode, torch.no_grad():
        for n in gm.graph.nodes:
            match n.op:
                case "placeholder":
                    n.meta["val"] = x = next(values)
                    n.meta["content"] = getattr(x, "repro_content", "")
                case "get_attr":
                    n.meta["val"] = mode.from_tensor(getattr(gm, str(n.target)))
                case "call_function":
                    _compute(n, mode)


def _compute(n: Node, mode: FakeTensorMode) -> None:
    args: Any = torch.fx.node.map_arg(n.args, lambda m: m.meta["val"])
    kwargs: Any = torch.fx.node.map_arg(n.kwargs, lambda m: m.meta["val"])
    assert callable(n.target)
    n.meta["val"] = value = n.target(*args, **kwargs)
    unbacked = symbolic_shapes.compute_unbacked_bindings(mode.shape_env, value)
    if unbacked:
        n.meta["unbacked_bindings"] = unbacked
