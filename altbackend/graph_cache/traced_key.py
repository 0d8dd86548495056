"""What the compiled parts of a captured graph depend on, in words."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

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

# Operators whose meaning is torch's; others bring code of the user's that no key knows.
_NAMESPACES = ("aten", "prims")
_LOCAL_ARGUMENTS = "triton_kernel_wrapper"
_INPUTS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def parts_of(gm: GraphModule, inputs: Sequence[Any], cfg: Config) -> key.Parts:
    """All that compiling a captured graph depends on. Raises NotCacheable."""
    if reason := uncacheable(cfg) or torch_api.hooks_on_saved_tensors():
        raise NotCacheable(reason)
    if torch_api.compiled_autograd():  # it traces the backward's own graph, which only AOTAutograd gives
        raise NotCacheable("compiled autograd is on")
    places = [n for n in gm.graph.nodes if n.op == "placeholder"]
    values, held = [_value(n) for n in places], torch_api.lifted(gm)
    _refuse_shared([*held.values(), *values])
    if not all(map(_plain, held.values())):
        raise NotCacheable("a parameter of a subclass")
    for given in inputs:
        if not isinstance(given, (*_INPUTS, int, torch.SymInt)) or not _plain(given):
            raise NotCacheable(f"an input of type {type(given).__name__}")
    return {
        "graph": dict(_calls(gm, {name: k for k, name in enumerate(held)})),
        "inputs": {f"held {k}": _input(None, x, x) for k, x in enumerate(held.values())}
        | {n.name: _input(n, v, x) for n, v, x in zip(places, values, inputs, strict=True)},
        "sizes": key.sizes_of(n.meta.get("example_value") for n in gm.graph.nodes),
        "options": key.options_of(cfg),
        "versions": key.versions(),
        "settings": {**key.settings(), **_settings()},
        "machine": _machine(gm, cfg),
    }


def family_of(gm: GraphModule) -> str:
    """Graphs of one family call the same functions."""
    calls = "\n".join(_target(n.target) if callable(n.target) else str(n.target) for n in _called(gm))
    return hashlib.sha256(calls.encode()).hexdigest()[:16]


def lines_of(gm: GraphModule) -> str:
    """Digest of the user's lines behind the calls, which errors raised by a compiled call name."""
    return hashlib.sha256("\n".join(map(user_line, _called(gm))).encode()).hexdigest()


def _called(gm: GraphModule) -> list[Node]:
    return [n for n in gm.graph.nodes if n.op in ("call_function", "call_method", "call_module")]


# --- calls -----------------------------------------------------------------------------------------------------------


def _calls(gm: GraphModule, held: Mapping[str, int], prefix: str = "") -> Iterator[tuple[str, str]]:
    """(name, text) of every node. `held`: numbers of the parameters and buffers, whose content does not matter.

    Raises NotCacheable.
    """
    for n in gm.graph.nodes:
        if n.op == "get_attr":
            path = f"{prefix}{n.target}"
            known = f"held {held[path]}" if path in held else None
            yield n.name, known or _attribute(key.resolve(gm, str(n.target)), held, path)
        elif n.op in ("call_function", "call_method", "output"):
            target = _target(n.target) if n.op == "call_function" else f"{n.op} {n.target}"
            yield n.name, f"{target}({json.dumps(encode(n.args))}, {json.dumps(encode(n.kwargs))})"
        elif n.op != "placeholder":
            raise NotCacheable(f"{n.name} calls a module")
        if n.meta.get("unbacked_bindings"):
            raise NotCacheable(f"{n.name} has a size that only data decides")


def _attribute(found: Any, held: Mapping[str, int], path: str) -> str:
    if isinstance(found, GraphModule):
        return f"graph {hashlib.sha256(json.dumps(dict(_calls(found, held, f'{path}.'))).encode()).hexdigest()}"
    return key.content_of(found)


def _target(target: Any) -> str:
    """The name of a called function, if it is torch's or Python's own. Raises NotCacheable."""
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        name = str(target)
        if name.split(".")[0] in _NAMESPACES:
            return name
        raise NotCacheable(f"{name} is not an operator of torch's own")
    if isinstance(target, torch._ops.HigherOrderOperator):
        name = str(target._name)
        if not name.startswith(_LOCAL_ARGUMENTS) and getattr(torch.ops.higher_order, name, None) is target:
            return f"higher order {name}"
        raise NotCacheable(f"{name} has arguments that mean something in one process only")
    module, function = str(getattr(target, "__module__", "")), str(getattr(target, "__name__", ""))
    known = module.split(".")[0] in ("torch", "builtins", "_operator", "math")
    if known and getattr(sys.modules.get(module), function, None) is target:
        return f"{module}.{function}"
    raise NotCacheable(f"{target!r:.80} is a function of the user")


# --- inputs ----------------------------------------------------------------------------------------------------------


def _value(n: Node) -> Any:
    held = n.meta.get("example_value")
    if not isinstance(held, (torch.Tensor, int, torch.SymInt)):
        raise NotCacheable(f"{n.name}, an input of type {type(held).__name__}")
    return held


def _plain(given: Any) -> bool:
    """Whether a tensor is no subclass; a parameter may say that it is one of another kind."""
    return not isinstance(given, torch.Tensor) or (type(given) in _INPUTS or torch_api.is_fake(given))


def _input(n: Node | None, value: Any, given: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return f"{type(given).__name__} {key.describe(value)}"
    flags = [
        f"{type(given).__name__}",
        f"gradient {value.requires_grad} leaf {value.is_leaf} inference {value.is_inference()} view {value._is_view()}",
        f"static {(n.meta.get('tensor_dict') or {}).get('_dynamo_static_input_type') if n is not None else 'held'}",
    ]
    return f"{key.describe(value)} {' '.join(flags)}"


def _refuse_shared(values: Sequence[Any]) -> None:
    storages = [x.untyped_storage()._cdata for x in values if isinstance(x, torch.Tensor)]
    if len(set(storages)) != len(storages):
        raise NotCacheable("inputs that share memory")


# --- surroundings ----------------------------------------------------------------------------------------------------


def _settings() -> dict[str, str]:
    """torch's settings of the process that tracing asks for."""
    cuda: Any = torch.backends.cuda
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
    """The compiler, and every GPU that a value of the graph is on."""
    found: dict[str, str] = {}
    with contextlib.suppress(CompilerMissing):
        found = cpp.identity(cfg)
    held = [n.meta.get("example_value") for n in gm.graph.nodes]
    devices = {str(x.device): x.device for x in held if isinstance(x, torch.Tensor)}
    for name, device in devices.items():
        if device.type == "cuda":
            found |= {f"{name} {what}": text for what, text in key.gpu(device).items()}
        elif device.type != "cpu":
            raise NotCacheable(f"a tensor on {device}")
    return found
