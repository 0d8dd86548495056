"""The only place that knows differences between torch versions, and torch's private names."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import sympy
import torch
import torch._functorch.config as functorch
from torch._dynamo.backends.common import aot_autograd as build
from torch._functorch.compile_utils import fx_graph_cse
from torch._functorch.partitioners import _extract_fwd_bwd_modules, min_cut_rematerialization_partition
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.compiler._cache import CacheArtifact as CacheArtifact
from torch.compiler._cache import CacheArtifactFactory as CacheArtifactFactory
from torch.compiler._cache import CacheArtifactManager as CacheArtifactManager


def version() -> tuple[int, int]:
    """(major, minor) of the running torch."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def libgomp() -> Path | None:
    """torch's own OpenMP library; generated code links to it so that one pool serves both."""
    package = Path(torch.__file__).parent
    for folder in (package / "lib", package.parent / "torch.libs"):
        for found in sorted(folder.glob("libgomp*.so*")):
            return found
    return None


def joint_partition() -> Callable[..., Any]:
    """torch's min-cut split of the joint graph."""
    return min_cut_rematerialization_partition


def without_repeats(graph: torch.fx.Graph) -> torch.fx.Graph:
    """The graph with equal calls made once; random ones and those that write stay."""
    return fx_graph_cse(graph) if functorch.cse else graph


def extract_halves(
    joint: torch.fx.GraphModule, tensors: list[torch.fx.Node], numbers: list[torch.fx.Node], num_fwd_outputs: int
) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """(forward, backward) of a joint graph, with results and inputs in the order that AOTAutograd's runtime expects.

    `tensors`, `numbers` (of sizes): values of the forward that are saved; the lists are left as they are.
    """
    return _extract_fwd_bwd_modules(joint, list(tensors), list(numbers), num_fwd_outputs=num_fwd_outputs)


def partition_settings() -> str:
    """The setting of torch that asks for what only its own partitioner does, "" without one."""
    wanted = {
        "activation_memory_budget": 1.0,
        "enable_activation_offloading": False,
        "_sync_decision_cross_ranks": False,
    }
    found = [name for name, usual in wanted.items() if getattr(functorch, name, usual) != usual]
    return f"torch._functorch.config.{found[0]} is set" if found else ""


def aot_autograd(**kwargs: Any) -> Callable[..., Any]:
    return build(**kwargs)


@contextlib.contextmanager
def functorch_settings() -> Iterator[None]:
    """AOTAutograd settings that hold while it traces: effect tokens stay out of the graph's signature."""
    with functorch.patch(unlift_effect_tokens=True):
        yield


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Cyclic garbage waits. While a graph is compiled, looking for it takes a third of the time and finds nothing."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def real_tensors() -> contextlib.AbstractContextManager[object]:
    """Computes on real tensors while a tracer's fake mode is active, as it is inside a backend."""
    return unset_fake_temporarily()


def has_symbolic_geometry(t: torch.Tensor) -> bool:
    """Whether a traced tensor has a size or stride that is a symbol."""
    return bool(t._has_symbolic_sizes_strides)


def size_range(shape_env: Any, symbol: sympy.Symbol) -> Any:
    """The least and the greatest value of a size, as tracing knows them."""
    return shape_env.bound_sympy(symbol)


def size_conditions(shape_env: Any) -> list[Any]:
    """What tracing has found or assumed of sizes: boolean sympy expressions."""
    late = [check.expr for checks in shape_env.deferred_runtime_asserts.values() for check in checks]
    return [guard.expr for guard in shape_env.guards] + late


def size_assumptions(shape_env: Any) -> tuple[str, ...]:
    """A snapshot of all that `shape_env` has concluded; a graph is right only where it holds."""
    replaced = [f"{s} = {e}" for s, e in shape_env.replacements.items()]
    ranges = [f"{s} in {r}" for s, r in shape_env.var_to_range.items()]
    return (*map(str, size_conditions(shape_env)), *replaced, *ranges)


def cuda_capability(device: torch.device) -> int:
    """Compute capability as one number, 90 for 9.0."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def allows_tf32() -> bool:
    """Whether float32 matmuls on a GPU may round their operands to TF32."""
    return torch.get_float32_matmul_precision() != "highest"


def cuda_shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may have."""
    held = torch.cuda.get_device_properties(device)
    return int(getattr(held, "shared_memory_per_block_optin", 99 << 10))  # the least since compute capability 8.0


def cuda_name(device: torch.device) -> str:
    """The product name of a GPU."""
    return torch.cuda.get_device_name(device)


def cuda_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Makes `device` the current one."""
    guard: contextlib.AbstractContextManager[object] = torch.cuda.device(device)
    return guard
