"""Reads the files that `text` writes: the graph with traced values, and real inputs of the same geometry."""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node, Tracer
from torch.fx.experimental import symbolic_shapes
from torch.overrides import TorchFunctionMode

from ..compat import aot_autograd

SEED = 0


@dataclass(frozen=True)
class Rebuilt:
    """A graph from a file. `modules`: what the file imports besides what its graph needs; `mode` traced the values."""

    gm: GraphModule
    options: Mapping[str, Any]
    job: Mapping[str, Any]
    title: str
    modules: tuple[str, ...]
    mode: FakeTensorMode
    real_inputs: Callable[[], list[Any]]

    @property
    def draws(self) -> bool:
        """Whether the graph draws random numbers."""
        return any(torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ()) for n in self.gm.graph.nodes)


def rebuild(path: Path) -> Rebuilt:
    """The graph that a file describes. Runs the file's code, so the file must be trusted as any program is."""
    source = path.read_text(encoding="utf-8")
    held: dict[str, Any] = {"__name__": "altbackend_repro", "__file__": str(path), "constant": constant}
    exec(compile(source, str(path), "exec"), held)
    mode = FakeTensorMode(shape_env=symbolic_shapes.ShapeEnv(), allow_non_fake_inputs=True)
    gm = _traced(held)
    _give_values(gm, held["inputs"](Fake(mode)), mode)
    return Rebuilt(
        gm,
        held["OPTIONS"],
        held["JOB"],
        str(held["__doc__"]).partition("\n")[0],
        tuple(m for m in re.findall(r"^import ([\w.]+)$", source, re.MULTILINE) if m not in ("torch", "math")),
        mode,
        lambda: held["inputs"](Real()),
    )


# --- inputs ----------------------------------------------------------------------------------------------------------


class Fake:
    """Makes inputs as a tracer sees them; sizes are symbols."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode

    def size(self, seen: int) -> Any:
        return aot_autograd.new_size(self.mode.shape_env, seen)

    def tensor(self, shape: Any, strides: Any, dtype: torch.dtype, device: str, low: int = 0, high: int = 2) -> Any:
        with self.mode:
            made = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        made.repro_content = "" if (low, high) == (0, 2) else f", {low}, {high}"  # type: ignore[attr-defined]
        return made


class Real:
    """Makes inputs that can be computed with; integers are from `low` to `high - 1`."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(SEED)

    def size(self, seen: int) -> int:
        return seen

    def tensor(
        self, shape: Any, strides: Any, dtype: torch.dtype, device: str, low: int = 0, high: int = 2
    ) -> torch.Tensor:
        return _random(tuple(shape), tuple(strides), dtype, device, self.generator, low, high)


def constant(
    shape: Any, strides: Any, dtype: torch.dtype, device: str, content: Any = None, low: int = 0, high: int = 2
) -> torch.Tensor:
    """A constant of a graph; random without `content`."""
    made = _random(shape, strides, dtype, device, torch.Generator().manual_seed(SEED), low, high)
    return made if content is None else made.copy_(torch.tensor(content, dtype=dtype).reshape(shape))


def _random(
    shape: Any, strides: Any, dtype: torch.dtype, device: str, generator: torch.Generator, low: int, high: int
) -> torch.Tensor:
    made = torch.empty_strided(shape, strides, dtype=dtype, device=device)
    if dtype == torch.bool:
        values = torch.randint(0, 2, tuple(shape), generator=generator).bool()
    elif dtype.is_floating_point or dtype.is_complex:
        values = torch.randn(tuple(shape), generator=generator, dtype=torch.complex64 if dtype.is_complex else None)
    else:
        values = torch.randint(low, high, tuple(shape), generator=generator)
    if any(n > 1 and s == 0 for n, s in zip(shape, strides, strict=True)):  # an expanded tensor cannot be written
        origin = torch.empty_strided([1 if s == 0 else n for n, s in zip(shape, strides, strict=True)], strides)
        origin = origin.to(dtype=dtype, device=device)
        first = values[tuple(slice(0, 1) if s == 0 else slice(None) for s in strides)]
        return origin.copy_(first).as_strided(shape, strides)
    return made.copy_(values)


# --- the graph -------------------------------------------------------------------------------------------------------


class _Recorded(Tracer):
    """Records operators as they are written, also those that take no traced value."""

    def is_leaf_module(self, m: torch.nn.Module, name: str) -> bool:
        return True


class _EveryOperator(TorchFunctionMode):
    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, torch._ops.OpOverload):
            return self.tracer.create_proxy("call_function", func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def _traced(held: dict[str, Any]) -> GraphModule:
    tracer = _Recorded()
    for name, f in list(held.items()):
        if isinstance(f, types.FunctionType) and f.__module__.startswith("altbackend.runtime"):
            held[name] = _recorder(tracer, f)
    root = held["Graph"]()
    with _EveryOperator(tracer):
        graph = tracer.trace(root)
    return GraphModule(root, graph)


def _recorder(tracer: Tracer, f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: tracer.create_proxy("call_function", f, args, kwargs)


def _give_values(gm: GraphModule, inputs: Sequence[Any], mode: FakeTensorMode) -> None:
    """What AOTAutograd notes on the nodes: the value of each as a tracer sees it."""
    given = iter(inputs)
    with mode, torch.no_grad():
        for n in gm.graph.nodes:
            match n.op:
                case "placeholder":
                    n.meta["val"] = x = next(given)
                    n.meta["content"] = getattr(x, "repro_content", "")
                case "get_attr":
                    n.meta["val"] = mode.from_tensor(getattr(gm, str(n.target)))
                case "call_function":
                    _compute(n, mode)


def _compute(n: Node, mode: FakeTensorMode) -> None:
    args: Any = torch.fx.node.map_arg(n.args, lambda m: m.meta["val"])
    kwargs: Any = torch.fx.node.map_arg(n.kwargs, lambda m: m.meta["val"])
    n.meta["val"] = value = n.target(*args, **kwargs)  # type: ignore[operator]
    late = symbolic_shapes.compute_unbacked_bindings(mode.shape_env, value)
    if late:
        n.meta["unbacked_bindings"] = late
