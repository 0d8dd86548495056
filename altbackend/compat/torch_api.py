"""The only place that knows differences between torch versions, and torch's private names."""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import importlib.util
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.compiler._cache import CacheArtifact as CacheArtifact
from torch.compiler._cache import CacheArtifactFactory as CacheArtifactFactory
from torch.compiler._cache import CacheArtifactManager as CacheArtifactManager
from torch.fx.experimental import symbolic_shapes
from torch.utils._python_dispatch import _disable_current_modes


def version() -> tuple[int, int]:
    """(major, minor) of the running torch."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def triton_version() -> str:
    """The version of Triton, "" without one; neither imports it nor lists what is installed, which takes long."""
    found = importlib.util.find_spec("triton")
    if found is None or found.origin is None:
        return ""
    text = Path(found.origin).read_text(encoding="utf-8")
    named = re.search(r"""^__version__ = ['"]([^'"]+)['"]""", text, re.MULTILINE)
    return named.group(1) if named else hashlib.sha256(text.encode()).hexdigest()[:12]


def libgomp() -> Path | None:
    """torch's own OpenMP library; generated code links to it so that one pool serves both."""
    package = Path(torch.__file__).parent
    for folder in (package / "lib", package.parent / "torch.libs"):
        for found in sorted(folder.glob("libgomp*.so*")):
            return found
    return None


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


def storage_of(x: object) -> int | None:
    """What tensors have in common, fake ones too, that are views of one storage; None for what has no strides."""
    return x.untyped_storage()._cdata if isinstance(x, torch.Tensor) and x.layout == torch.strided else None


@functools.cache
def float8_saturates() -> bool:
    """Whether too large a number becomes the largest of float8_e4m3fn (torch 2.13), and not NaN (torch 2.11)."""
    return float8_code(1e9, torch.float8_e4m3fn) != 0x7F


def float8_code(number: float, dtype: torch.dtype) -> int:
    """The bits of a number as one of the floats of 8 bits, as torch rounds it; also while a graph is traced."""
    with _disable_current_modes():
        return int(torch.tensor(number).to(dtype).view(torch.uint8).item())


def keeps_unread_random() -> bool:
    """Whether a random call stays though nobody reads its numbers: while torch traces, such calls go."""
    return torch._guards.TracingContext.try_get() is None


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


def gpu_in_use() -> bool:
    """Whether this process has begun to use a GPU."""
    began: Any = torch.cuda.is_initialized
    return bool(began())


def cuda_capability(device: torch.device) -> int:
    """Compute capability as one number, 90 for 9.0."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def allows_tf32() -> bool:
    """Whether float32 matmuls on a GPU may round their operands to TF32."""
    return torch.get_float32_matmul_precision() != "highest"


def cuda_properties(device: torch.device) -> dict[str, int]:
    """Return the numbers of a GPU on which schedules depend, by the names of `schedule.device.Gpu`.

    `registers` and `threads_per_sm` count for one multiprocessor; `shared_memory` and `l2` are bytes.
    """
    properties = torch.cuda.get_device_properties(device)
    return {
        "sms": properties.multi_processor_count,
        "registers": getattr(properties, "regs_per_multiprocessor", 65536),
        "threads_per_sm": properties.max_threads_per_multi_processor,
        # the least since compute capability 8.0
        "shared_memory": int(getattr(properties, "shared_memory_per_block_optin", 99 << 10)),
        "l2": getattr(properties, "L2_cache_size", 40 << 20),
        "capability": cuda_capability(device),
    }


def cpu_properties() -> dict[str, int]:
    """Return the numbers of the CPU on which schedules depend, by the names of `schedule.device.Cpu`.

    `vector_lanes`: float32 numbers in one vector. `l1`, `l2`: bytes of one core's data caches; torch before 2.13 may
    not report them, and typical sizes stand in.
    """
    lanes = {"AVX512": 16, "AVX2": 8}.get(torch.backends.cpu.get_cpu_capability(), 4)
    capabilities: Any = getattr(torch.cpu, "get_capabilities", dict)()
    return {
        "vector_lanes": lanes,
        "l1": int(capabilities.get("l1d_cache_size", 0)) or 32 << 10,
        "l2": int(capabilities.get("l2_cache_size", 0)) or 1 << 20,
    }


def cuda_name(device: torch.device) -> str:
    """The product name of a GPU."""
    return torch.cuda.get_device_name(device)


def cuda_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Makes `device` the current one."""
    guard: contextlib.AbstractContextManager[object] = torch.cuda.device(device)
    return guard


def is_fake(t: torch.Tensor) -> bool:
    """Whether a tensor is a tracer's stand-in."""
    return isinstance(t, FakeTensor)


def traced_metadata() -> Any:
    """What AOTAutograd has found out about the graph that is being compiled; None outside of it."""
    return getattr(torch._guards.TracingContext.try_get(), "fw_metadata", None)


def guards_layouts() -> bool:
    """Whether Dynamo compiles again when a parameter gets other strides."""
    return version() >= (2, 13)


def donate_nothing() -> None:
    """Let a second backward run (`retain_graph=True`): no kernel of ours writes what was saved for the first.

    AOTAutograd lists saved tensors that a backward may overwrite, and refuses a second one where it has listed any.
    Called while a forward is compiled.
    """
    if (meta := traced_metadata()) is not None:
        meta.bw_donated_idxs = []


def lifted(gm: Any) -> dict[str, Any]:
    """Parameters and buffers that a captured graph holds, by name: AOTAutograd hands them to it before its inputs."""
    return dict(gm.named_parameters(remove_duplicate=False)) | dict(gm.named_buffers(remove_duplicate=False))


def static_inputs(gm: Any) -> frozenset[int]:
    """Which inputs of a captured graph keep their address: those that it holds, which come first, other parameters and
    buffers, and what the user marks so.
    """
    first = len(lifted(gm))
    held = enumerate(gm.graph.find_nodes(op="placeholder"), first)
    marked = {k for k, n in held if (n.meta.get("tensor_dict") or {}).get("_dynamo_static_input_type")}
    return frozenset(range(first)) | marked


def view_steps(info: Any) -> list[tuple[str, tuple[Any, ...], int]] | None:
    """How AOTAutograd's functionalization made a result of what it is a view of: (operator, arguments, part) a step.

    `part`: which of the operator's results, -1 for the only one. None where that is not known, or has symbolic sizes.
    """
    held = getattr(getattr(info, "view_meta_sequence", None), "sequence", None)
    if held is None or any(step.has_symbolic_inputs for step in held):
        return None
    found = []
    for step in held:
        fields = step.as_tuple()  # symbolic; of several results the number; views stay views; how it is inverted; ...
        several = type(fields[1]) is int
        name = type(step).__name__.removesuffix("_ViewMeta")
        found.append((name, tuple(fields[4 if several else 3 :]), fields[1] if several else -1))
    return found


def compiled_autograd() -> bool:
    """Whether backwards of this process are traced, or will be by the setting of Dynamo."""
    held: Any = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(held, "compiled_autograd_enabled", False)) or bool(torch._dynamo.config.compiled_autograd)


def hooks_on_saved_tensors() -> str:
    """The hooks that autograd would run on tensors that a forward saves, as a reason; "" without any."""
    found = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return "hooks on saved tensors are set" if found else ""


def conditions(numbers: Sequence[Any]) -> str:
    """Python text of all that `numbers`, the sizes given to a graph, must satisfy; "" for nothing."""
    if not numbers:
        return ""
    env = numbers[0].node.shape_env
    return env.produce_guards_expression(placeholders=numbers, guards=env.get_pruned_guards(numbers)) or ""


def conditions_hold(text: str, numbers: Sequence[Any]) -> bool:
    """Whether what `conditions` wrote holds for other sizes; if so it is from now on assumed of them."""
    if not text:
        return True
    env = numbers[0].node.shape_env
    values = [n.node.hint for n in numbers]
    return bool(env.evaluate_guards_expression(text, values)) and bool(env.evaluate_guards_expression(text, numbers))


def mark_dynamic(t: Any, dims: set[int]) -> None:
    """Tell Dynamo which dimensions of a result vary, if the result goes into another compiled graph."""
    name = "_dynamo_propagated_dynamic_indices" if version() >= (2, 13) else "_dynamo_weak_dynamic_indices"
    setattr(t, name, getattr(t, name, set()) | dims)


def defined_symbols(node: torch.fx.Node) -> dict[sympy.Symbol, tuple[Any, ...]]:
    """Symbols that only data decides and that a traced call gives: each with the path to it in the call's result."""
    found = node.meta.get("unbacked_bindings")
    if not found:
        return {}
    env = shape_env_of(node)
    return dict(symbolic_shapes.resolve_unbacked_bindings(env, found) or {})


def shape_env_of(node: torch.fx.Node) -> Any:
    """What tracing has concluded of the sizes in a node's value, or in its arguments'; None where all are plain."""
    for n in (node, *node.all_input_nodes):
        for x in torch.utils._pytree.tree_leaves(n.meta.get("val")):
            if isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool)):
                return x.node.shape_env
            if isinstance(x, FakeTensor) and x.fake_mode.shape_env is not None:
                return x.fake_mode.shape_env
    return None


def path_steps(path: Sequence[Any]) -> list[tuple[str, Any]]:
    """A path to a symbol as steps: ("item", k), ("size", ""), ("stride", ""), ("storage_offset", ""), ("//", d), ..."""
    steps: list[tuple[str, Any]] = []
    for key in path:
        match type(key).__name__:
            case "SequenceKey":
                steps.append(("item", key.idx))
            case "CallMethodKey":
                steps.append((str(key.name), ""))
            case "DivideByKey":
                steps.append(("//", key.divisor))
            case "ConvertIntKey":
                steps.append(("int", ""))
            case other:
                steps.append((other, ""))
    return steps


@dataclass(frozen=True)
class LateFacts:
    """What a graph assumes of one symbol that data decides: its range, what it equals, conditions on it."""

    least: int | None
    greatest: int | None
    equals: sympy.Expr
    conditions: tuple[sympy.Expr, ...]


def late_facts(shape_env: Any, symbol: sympy.Symbol) -> LateFacts:
    """What tracing has assumed of a symbol that data decides; `equals` is the symbol where it is nothing else."""
    held = shape_env.var_to_range.get(symbol)
    least = int(held.lower) if held is not None and held.lower.is_Integer else None
    greatest = int(held.upper) if held is not None and held.upper.is_Integer else None
    natural = sys.maxsize - 1
    checks = [c.expr for cs in shape_env.deferred_runtime_asserts.values() for c in cs]
    renamed = shape_env.unbacked_renamings
    return LateFacts(
        least if least is not None and least > -natural else None,
        greatest if greatest is not None and greatest < natural else None,
        shape_env.replace(symbol),
        tuple(c.xreplace(renamed) for c in checks if symbol in c.xreplace(renamed).free_symbols),
    )
