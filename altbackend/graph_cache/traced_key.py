"""The cache key of a captured graph: all that its compiled parts depend on, as text."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType

import torch
import torch._functorch.config as functorch
from torch.fx import GraphModule, Node

from ..compat import torch_api
from ..compile_pool import cpp
from ..config.options import Config, uncacheable
from ..errors import CompilerMissing
from ..lowering.facts import user_line
from . import key
from .json_values import NotCacheable, encode

# Operators with torch's own meaning; other namespaces hold code of the user that no key can identify.
_NAMESPACES = ("aten", "prims", "quantized_decomposed", "onednn", "mkldnn")
_LOCAL_ARGUMENTS = "triton_kernel_wrapper"
_INPUTS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def parts_of(gm: GraphModule, inputs: Sequence[object], cfg: Config) -> key.Parts:
    """Return all that compiling a captured graph depends on. Raise NotCacheable."""
    if reason := uncacheable(cfg) or torch_api.hooks_on_saved_tensors():
        raise NotCacheable(reason)
    if torch_api.compiled_autograd():  # it traces the backward's own graph, which only AOTAutograd provides
        raise NotCacheable("compiled autograd is on")
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    values, lifted = [_value(n) for n in placeholders], torch_api.lifted(gm)
    _refuse_shared([*lifted.values(), *values])
    if not all(map(_plain, lifted.values())):
        raise NotCacheable("a parameter of a subclass")
    for value in inputs:
        if not isinstance(value, (*_INPUTS, int, torch.SymInt)) or not _plain(value):
            raise NotCacheable(f"an input of type {type(value).__name__}")
    return {
        "graph": dict(_calls(gm, {name: k for k, name in enumerate(lifted)})),
        "inputs": {f"lifted {k}": _input(None, x, x) for k, x in enumerate(lifted.values())}
        | {n.name: _input(n, v, x) for n, v, x in zip(placeholders, values, inputs, strict=True)},
        "sizes": key.sizes_of(n.meta.get("example_value") for n in gm.graph.nodes),
        "options": key.options_of(cfg),
        "versions": key.versions(),
        "settings": {**key.settings(), **_settings()},
        "machine": _machine(gm, cfg),
    }


def family_of(gm: GraphModule) -> str:
    """Return the digest of the functions that a graph calls."""
    calls = "\n".join(_target(n.target) if callable(n.target) else str(n.target) for n in _called(gm))
    return hashlib.sha256(calls.encode()).hexdigest()[:16]


def lines_of(gm: GraphModule) -> str:
    """Return the digest of the user's lines behind the calls, which errors of a compiled call name."""
    return hashlib.sha256("\n".join(map(user_line, _called(gm))).encode()).hexdigest()


def _called(gm: GraphModule) -> list[Node]:
    return [n for n in gm.graph.nodes if n.op in ("call_function", "call_method", "call_module")]


# --- calls -----------------------------------------------------------------------------------------------------------


def _calls(gm: GraphModule, lifted: Mapping[str, int], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the name and text of every node. Raise NotCacheable.

    `lifted` numbers the parameters and buffers, whose content does not matter.
    """
    for n in gm.graph.nodes:
        if n.op == "get_attr":
            path = f"{prefix}{n.target}"
            text = f"lifted {lifted[path]}" if path in lifted else None
            yield n.name, text or _attribute(key.resolve(gm, str(n.target)), lifted, path)
        elif n.op in ("call_function", "call_method", "output"):
            target = _target(n.target) if n.op == "call_function" else f"{n.op} {n.target}"
            yield n.name, f"{target}({json.dumps(encode(n.args))}, {json.dumps(encode(n.kwargs))})"
        elif n.op != "placeholder":
            raise NotCacheable(f"{n.name} calls a module")
        if n.meta.get("unbacked_bindings"):
            raise NotCacheable(f"{n.name} has a size that only data decides")


def _attribute(value: object, lifted: Mapping[str, int], path: str) -> str:
    if isinstance(value, GraphModule):
        return f"graph {hashlib.sha256(json.dumps(dict(_calls(value, lifted, f'{path}.'))).encode()).hexdigest()}"
    return key.content_of(value)


def _target(target: object) -> str:
    """Return the name of a called function if it belongs to torch or Python. Raise NotCacheable otherwise."""
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        name = str(target)
        if name.split(".")[0] in _NAMESPACES:
            return name
        raise NotCacheable(f"{name} is not an operator of torch's own")
    if isinstance(target, torch._ops.HigherOrderOperator):
        name = str(target._name)
        if not name.startswith(_LOCAL_ARGUMENTS) and getattr(torch.ops.higher_order, name, None) is target:
            return f"higher order {name}"
        raise NotCacheable(f"{name} has arguments that are valid in one process only")
    module, function = str(getattr(target, "__module__", "")), str(getattr(target, "__name__", ""))
    importable = module.split(".")[0] in ("torch", "builtins", "_operator", "math")
    if importable and getattr(sys.modules.get(module), function, None) is target:
        return f"{module}.{function}"
    raise NotCacheable(f"{target!r:.80} is a function of the user")


# --- inputs ----------------------------------------------------------------------------------------------------------


def _value(n: Node) -> object:
    value = n.meta.get("example_value")
    if not isinstance(value, (torch.Tensor, int, torch.SymInt)):
        raise NotCacheable(f"{n.name}, an input of type {type(value).__name__}")
    return value


def _plain(value: object) -> bool:
    """Return whether a value is not a tensor subclass. A parameter may be declared as another kind of tensor."""
    return not isinstance(value, torch.Tensor) or (type(value) in _INPUTS or torch_api.is_fake(value))


def _input(n: Node | None, value: object, real: object) -> str:
    if not isinstance(value, torch.Tensor):
        return f"{type(real).__name__} {key.describe(value)}"
    flags = [
        f"{type(real).__name__}",
        f"gradient {value.requires_grad} leaf {value.is_leaf} inference {value.is_inference()} view {value._is_view()}",
        f"static {(n.meta.get('tensor_dict') or {}).get('_dynamo_static_input_type') if n is not None else 'lifted'}",
    ]
    return f"{key.describe(value)} {' '.join(flags)}"


def _refuse_shared(values: Sequence[object]) -> None:
    storages = [x.untyped_storage()._cdata for x in values if isinstance(x, torch.Tensor)]
    if len(set(storages)) != len(storages):
        raise NotCacheable("inputs that share memory")


# --- surroundings ----------------------------------------------------------------------------------------------------


def _settings() -> dict[str, str]:
    """Return torch's process-wide settings that tracing depends on."""
    cuda: ModuleType = torch.backends.cuda
    return {
        "gradients": f"{torch.is_grad_enabled()} inference {torch.is_inference_mode_enabled()}",
        "autocast": str(
            [(d, torch.is_autocast_enabled(d), str(torch.get_autocast_dtype(d))) for d in ("cpu", "cuda")]
            + [torch.is_autocast_cache_enabled()]
        ),
        "attention": str([cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()]),
        "cudnn": str([torch.backends.cudnn.enabled, torch.backends.cudnn.deterministic]),
        "functorch": functorch.get_hash().hex(),
    }


def _machine(gm: GraphModule, cfg: Config) -> dict[str, str]:
    """Return the C++ compiler, and every GPU that holds a value of the graph."""
    machine: dict[str, str] = {}
    with contextlib.suppress(CompilerMissing):
        machine = cpp.identity(cfg)
    values = [n.meta.get("example_value") for n in gm.graph.nodes]
    devices = {str(x.device): x.device for x in values if isinstance(x, torch.Tensor)}
    for name, device in devices.items():
        if device.type == "cuda":
            machine |= {f"{name} {what}": text for what, text in key.gpu(device).items()}
        elif device.type != "cpu":
            raise NotCacheable(f"a tensor on {device}")
    return machine
