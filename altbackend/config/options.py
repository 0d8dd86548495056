"""The options of the backend, each declared once: type, default, range, what it affects, and its documentation.

Values come, from weakest to strongest, from the default, an environment variable `ALTBACKEND_<NAME>`, the mode,
and `options={...}`.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, Literal

from altbackend.config.inductor_names import NAMES, Ignored, Refused, Renamed, effect
from altbackend.errors import BadOptionValue, UnknownMode, UnknownOption

Affects = Literal["code", "runtime", "debug"]
Passes = tuple[Callable[..., Any], ...]

MODES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "default": {},
        "reduce-overhead": {"cudagraphs": True},
        "max-autotune": {"cudagraphs": True, "max_autotune": True},
        "max-autotune-no-cudagraphs": {"max_autotune": True},
    }
)

# Short environment names; the full name ALTBACKEND_DEBUG_DIR wins over its short form.
ENV_SHORT: Mapping[str, str] = MappingProxyType({"debug_dir": "ALTBACKEND_DEBUG"})
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


@dataclass(frozen=True)
class OptionSpec:
    """What is known of one option besides its name and default."""

    doc: str
    affects: Affects
    choices: tuple[str | bool, ...] = ()
    low: int | None = None
    high: int | None = None
    is_pass: bool = False
    shown: bool = True  # False: its value may hold a password


def _option(
    default: Any,
    doc: str,
    affects: Affects,
    *,
    choices: tuple[str | bool, ...] = (),
    low: int | None = None,
    high: int | None = None,
    shown: bool = True,
) -> Any:
    spec = OptionSpec(doc, affects, choices, low, high, shown=shown)
    return field(default=default, repr=shown, metadata={"spec": spec})


def _pass(doc: str) -> Any:
    return field(default=(), metadata={"spec": OptionSpec(doc, "code", is_pass=True)})


@dataclass(frozen=True)
class Config:
    """One resolved set of options. Build it with `resolve`, which checks names, types and ranges."""

    # what is computed
    strict: bool = _option(
        False, "raise an error where a graph would run with library calls only, instead of warning once", "runtime"
    )
    numerics: str = _option(
        "fast",
        "`fast` keeps low-precision pointwise chains in float32 inside a kernel; `eager` gives pointwise results "
        "bit for bit as eager does on a CPU: it rounds after every operation, and what IEEE arithmetic does not decide "
        "becomes a library call (docs/numerics.md)",
        "code",
        choices=("fast", "eager"),
    )
    fallback_random: bool = _option(
        False,
        "draw random numbers with eager's own generator calls, so that they equal eager's; False computes them inside "
        "kernels from seeds that each call draws from torch's generator",
        "code",
    )
    deterministic: bool = _option(
        False, "never choose an algorithm by measuring it, and never use one that varies from run to run", "code"
    )
    # fusion
    fuse: bool = _option(True, "fuse operations into common kernels; False gives one kernel per operation", "code")
    max_fused_nodes: int = _option(64, "most operations in one fused kernel", "code", low=1)
    inline_limit: int = _option(
        400, "most scalar operations carried along unmaterialised; a longer expression is stored", "code", low=0
    )
    # memory and layout
    reuse_memory: bool = _option(True, "let intermediates whose lifetimes do not overlap share memory", "code")
    persistent_workspace: bool = _option(True, "keep the memory of intermediates between calls", "code")
    freezing: str | bool = _option(
        "auto",
        "in inference, keep what is computed from parameters alone (folded and packed weights) between calls: `auto` "
        "where the kernel guards their memory against unseen writes (CPU tensors, Linux 6.7), else it is computed in "
        "each call or left out (False); `guarded` is what `auto` comes to there; `True` everywhere, guarded by version "
        "counters where the kernel cannot (see `altbackend.refresh`); `False` nowhere",
        "code",
        choices=("auto", "guarded", True, False),
    )
    size_asserts: bool = _option(
        False,
        "check the dtype, sizes, strides and storage of every input of every graph at each call, backwards included; "
        "Dynamo's guards check those of the function's own inputs anyway",
        "code",
    )
    channels_last: bool = _option(True, "let convolutions run channels-last where that is faster", "code")
    # CPU kernels
    parallel_threshold: int = _option(16384, "fewest elements for which a kernel uses several threads", "code", low=0)
    threads: int = _option(0, "threads of a CPU kernel; 0 means torch.get_num_threads()", "runtime", low=0)
    isa: str = _option(
        "auto",
        "vector instructions of CPU kernels; `auto` takes the widest this machine has",
        "code",
        choices=("auto", "avx512", "avx2", "generic"),
    )
    cxx: str = _option("", "path or name of the C++ compiler; empty looks for one", "code")
    compile_threads: int = _option(
        0,
        "builds, of C++ or Triton, that run side by side; 0 means one per core that affinity and control groups grant, "
        "shared by the ranks of a host, at most 8",
        "runtime",
        low=0,
    )
    worker_start: str = _option(
        "subprocess",
        "what compiles Triton kernels: `subprocess`, processes that are kept for further ones; `spawn`, a process for "
        "each kernel, so that none stays; `inline`, the calling thread, which then also runs C++ compilers one by one",
        "runtime",
        choices=("subprocess", "spawn", "inline"),
    )
    # tuning
    cudagraphs: bool = _option(False, "replay CUDA kernels from a CUDA graph; no effect on a CPU", "runtime")
    cudagraph_limit: int = _option(
        16, "most CUDA graphs of one compiled graph; a call of further sizes runs without", "runtime", low=0
    )
    max_autotune: bool = _option(False, "measure candidate kernels and keep the fastest; no effect on a CPU", "code")
    matmul_templates: str = _option(
        "auto",
        "matrix products and the pointwise work on their results as one kernel of ours: `auto` where a model of the "
        "GPU, or measurement (max_autotune), says that it is faster, `on` wherever it is possible; `off` leaves "
        "products to the library; no effect on a CPU",
        "code",
        choices=("auto", "off", "on"),
    )
    # folders and debugging
    cache_graphs: bool = _option(
        True, "keep the code of compiled graphs, so that another process binds it without compiling", "runtime"
    )
    warm_start: bool = _option(
        True,
        "keep with it how its parts are called, so that another process binds a graph that Dynamo captured without "
        "AOTAutograd; needs `cache_graphs`",
        "runtime",
    )
    cache_dir: str = _option("", "folder of compiled code; empty means the user's cache folder", "runtime")
    cache_size: int = _option(
        5120,
        "most MiB that the folder of compiled code holds; what was not used for longest leaves it; 0 means no limit",
        "runtime",
        low=0,
    )
    cache_key_file: str = _option(
        "",
        "file with a secret of at least 16 bytes: compiled code is sealed with it (HMAC-SHA-256), and loaded or "
        "imported only if it was sealed with the same",
        "runtime",
    )
    cache_url: str = _option(
        "",
        "Redis server that hosts share, `redis://HOST:PORT/DB`, `rediss://` or `unix://`: asked for what the folder of "
        "compiled code has not, and given what is compiled; needs `cache_key_file` and the package redis "
        "(`altbackend[redis]`)",
        "runtime",
        shown=False,
    )
    log: int = _option(
        0,
        "log to stderr: 1 a line per graph, 2 and kernels and decisions, 3 and graphs, 4 and source, 5 and IR",
        "debug",
        low=0,
        high=5,
    )
    debug_dir: str = _option("", "folder that gets every stage's text form; short name ALTBACKEND_DEBUG", "debug")
    repro: str = _option(
        "failures",
        "which graphs get a Python file that compiles them again, in `debug_dir` or a bounded temporary folder; "
        "`always` helps with wrong results and crashes, which `python -m altbackend minify FILE` then shrinks",
        "debug",
        choices=("never", "failures", "always"),
    )
    verify_ir: bool = _option(False, "check the loop IR after every step", "debug")
    # the user's graph passes
    pre_grad_custom_pass: Passes = _pass("pass or passes over the graph as Dynamo traced it")
    joint_custom_pre_pass: Passes = _pass("pass or passes over the joint graph, before ours")
    joint_custom_post_pass: Passes = _pass("pass or passes over the joint graph, after ours")
    post_grad_custom_pre_pass: Passes = _pass("pass or passes over the forward or backward graph, before ours")
    post_grad_custom_post_pass: Passes = _pass("pass or passes over the forward or backward graph, after ours")

    @property
    def keeps_constants(self) -> bool:
        """Whether results computed from parameters alone are kept between calls; `auto` has been decided."""
        return self.freezing in (True, "guarded")


DEFAULTS: Mapping[str, Any] = MappingProxyType({item.name: item.default for item in fields(Config)})
SPECS: Mapping[str, OptionSpec] = MappingProxyType({item.name: item.metadata["spec"] for item in fields(Config)})


def resolve(
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> Config:
    """Return the options that hold for one `torch.compile` call.

    `environ` defaults to the process environment. `settings` are weakest, above the defaults alone.
    Raises UnknownMode, UnknownOption and BadOptionValue.
    """
    values = {**settings, **_from_env(os.environ if environ is None else environ)}
    values.update(_mode_values(mode))
    values.update(_from_options(options or {}))
    return Config(**values)


def notes(options: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """`(name, reason)` for each accepted TorchInductor name in `options` that has no effect here."""
    named = [(name, NAMES.get(_normal(name))) for name in options or {}]
    return [(name, row.reason) for name, row in named if isinstance(row, (Ignored, Refused))]


def fingerprint(cfg: Config) -> str:
    """Hex digest of the options that change generated code: the part of a cache key that options own.

    A custom pass enters by its `uuid()`. A pass without one makes the digest unique, so that nothing compiled
    with it is ever found again. What `auto` came to (`isa`, `cxx`) is for the builder to add.
    """
    digest = hashlib.sha256()
    for name, spec in SPECS.items():
        if spec.affects == "code":
            value = getattr(cfg, name)
            text = [_pass_id(item) or uuid.uuid4().hex for item in value] if spec.is_pass else value
            digest.update(f"{name}={text!r};".encode())
    return digest.hexdigest()


def uncacheable(cfg: Config) -> str:
    """Why code compiled with `cfg` must not be kept: names the first pass without a `uuid()`; "" if it may be."""
    for name, spec in SPECS.items():
        for item in getattr(cfg, name) if spec.is_pass else ():
            if _pass_id(item) is None:
                return f"{name} {item!r} has no uuid() that names its version"
    return ""


@dataclass(frozen=True)
class Row:
    """One row of the options table; every field is the text to print."""

    name: str
    type: str
    default: str
    affects: str
    env: str
    doc: str


def table() -> list[Row]:
    """One row per option, in the order of declaration."""
    return [
        Row(
            name=name,
            type="callable or list of them" if spec.is_pass else expected(name),
            default="none" if spec.is_pass else repr(DEFAULTS[name]),
            affects=spec.affects,
            env="" if spec.is_pass else ENV_SHORT.get(name, _env_name(name)),
            doc=spec.doc,
        )
        for name, spec in SPECS.items()
    ]


def accepted_names() -> list[tuple[str, str]]:
    """`(TorchInductor name, what becomes of it)` for documentation."""
    return [(name, effect(row)) for name, row in sorted(NAMES.items())]


def known_variables() -> frozenset[str]:
    """Every environment variable that sets an option."""
    full = (_env_name(name) for name, spec in SPECS.items() if not spec.is_pass)
    return frozenset(full) | frozenset(ENV_SHORT.values())


def expected(name: str) -> str:
    """What values option `name` takes, in words."""
    spec, kind = SPECS[name], type(DEFAULTS[name])
    if spec.is_pass:
        return "it must be a callable or a list of callables"
    if spec.choices:
        return "one of " + ", ".join(map(repr, spec.choices))
    match spec.low, spec.high:
        case (None, None):
            return {bool: "bool", int: "int", str: "str"}[kind]
        case (low, None):
            return f"int, at least {low}"
        case (low, high):
            return f"int from {low} to {high}"


def _normal(name: str) -> str:
    return str(name).replace("-", "_")


def _env_name(name: str) -> str:
    return f"ALTBACKEND_{name.upper()}"


def _mode_values(mode: str | None) -> Mapping[str, Any]:
    if mode is None:
        return {}
    if mode not in MODES:
        raise UnknownMode(str(mode), tuple(MODES))
    return MODES[mode]


def _from_env(environ: Mapping[str, str]) -> dict[str, Any]:
    """Values of the variables that are set and not empty; a custom pass has no text form."""
    values: dict[str, Any] = {}
    for name, spec in SPECS.items():
        for variable in (_env_name(name), ENV_SHORT.get(name, "")):
            text = environ.get(variable, "")
            if text and not spec.is_pass:
                values[name] = _check(name, _parse(name, text, variable), variable)
                break
    return values


def _parse(name: str, text: str, variable: str) -> Any:
    kind, choices = type(DEFAULTS[name]), SPECS[name].choices
    if True in choices and text.lower() in _TRUE + _FALSE:
        return text.lower() in _TRUE
    if kind is bool:
        if text.lower() not in _TRUE + _FALSE:
            raise BadOptionValue(name, text, f"it takes {' or '.join((*_TRUE, *_FALSE))}", variable)
        return text.lower() in _TRUE
    if kind is int:
        try:
            return int(text)
        except ValueError:
            raise BadOptionValue(name, text, f"it takes {expected(name)}", variable) from None
    return text


def _from_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Our own names win over TorchInductor's for the same option, whatever their order."""
    renamed: dict[str, Any] = {}
    own: dict[str, Any] = {}
    for given, value in options.items():
        name = _normal(given)
        if name in SPECS:
            own[name] = _check(name, value, "options")
        else:
            renamed.update(_foreign(given, name, value))
    return renamed | own


def _foreign(given: str, name: str, value: Any) -> dict[str, Any]:
    """What a TorchInductor option sets here: one of our options or nothing."""
    match NAMES.get(name):
        case None:
            raise UnknownOption(given, _nearest(name))
        case Ignored():
            return {}
        case Refused(harmless, reason):
            # `1 == True`, so compare the type as well.
            if any(type(value) is type(item) and value == item for item in harmless):
                return {}
            raise BadOptionValue(given, value, reason)
        case Renamed(target, _, convert):
            converted = convert(value)
            return {} if converted is None else {target: _check(target, converted, f"options[{given!r}]")}


def _nearest(name: str) -> tuple[str, ...]:
    return tuple(difflib.get_close_matches(name, [*SPECS, *NAMES], n=3, cutoff=0.0))


def _check(name: str, value: Any, source: str) -> Any:
    spec = SPECS[name]
    if spec.is_pass:
        return _passes(name, value, source)
    if spec.choices:
        wrong = not any(type(value) is type(c) and value == c for c in spec.choices)
    else:
        wrong = type(value) is not type(DEFAULTS[name])  # exact: True is not a number of threads
    if wrong or (spec.low is not None and value < spec.low) or (spec.high is not None and value > spec.high):
        raise BadOptionValue(name, value, f"it takes {expected(name)}", source)
    return value


def _passes(name: str, value: Any, source: str) -> Passes:
    if value is None:
        return ()
    found = tuple(value) if isinstance(value, Iterable) and not callable(value) else (value,)
    if not all(callable(item) for item in found):
        raise BadOptionValue(name, value, expected(name), source)
    return found


def _pass_id(item: Callable[..., Any]) -> str | None:
    """The version a pass states with `uuid()`, as text, or None."""
    stated = getattr(item, "uuid", None)
    version = stated() if callable(stated) else None
    return None if version is None else repr(version)
