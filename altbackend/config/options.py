"""The options of the backend, each declared once: type, default, range, effect and documentation."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Mapping
from dataclasses import field, fields
from types import MappingProxyType
from typing import Any, Literal

from altbackend.lazy_dataclass import dataclass

Affects = Literal["code", "runtime", "debug"]
Passes = tuple[Callable[..., object], ...]


@dataclass(frozen=True)
class OptionSpec:
    """The documentation, the effect and the valid values of one option."""

    doc: str
    affects: Affects
    choices: tuple[str | bool, ...] = ()
    low: float | None = None
    high: float | None = None
    is_pass: bool = False
    shown: bool = True  # False if the value may contain a password


def _option(
    default: object,
    doc: str,
    affects: Affects,
    *,
    choices: tuple[str | bool, ...] = (),
    limits: tuple[float | None, float | None] = (None, None),
    shown: bool = True,
) -> Any:
    spec = OptionSpec(doc, affects, choices, *limits, shown=shown)
    return field(default=default, repr=shown, metadata={"spec": spec})


def _pass(doc: str) -> Any:
    return field(default=(), metadata={"spec": OptionSpec(doc, "code", is_pass=True)})


@dataclass(frozen=True)
class Config:
    """One resolved set of options. `resolve` makes it and checks names, types and ranges."""

    # what is computed
    strict: bool = _option(
        False, "raise an error where a graph would run with library calls only, instead of warning once", "runtime"
    )
    numerics: str = _option(
        "fast",
        "`fast` keeps low-precision pointwise chains in float32 inside a kernel; `eager` gives pointwise results "
        "bit for bit as eager does on a CPU: it rounds after every operation, and "
        "operations that IEEE arithmetic does not determine become library calls (docs/numerics.md)",
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
    max_fused_nodes: int = _option(64, "most operations in one fused kernel", "code", limits=(1, None))
    inline_limit: int = _option(
        400,
        "most scalar operations in an expression that is recomputed by its readers; a longer one is stored",
        "code",
        limits=(0, None),
    )
    attention: str = _option(
        "auto",
        "attention that a program writes out as products and a softmax, as one call of torch's fused kernel: `auto` "
        "where it is faster, `on` wherever it gives the same results, `off` nowhere; never with numerics=`eager`",
        "code",
        choices=("auto", "on", "off"),
    )
    # memory and layout
    reuse_memory: bool = _option(True, "let intermediates whose lifetimes do not overlap share memory", "code")
    persistent_workspace: bool = _option(True, "keep the memory of intermediates between calls", "code")
    overlap_bytes: int = _option(
        1 << 28,
        "most bytes of operands and results of collectives that may be under way beside other work; 0: wait at once",
        "code",
        limits=(0, 1 << 50),
    )
    freezing: str | bool = _option(
        "auto",
        "in inference, cache results of parameters alone (folded and packed weights) between calls: `auto` where the "
        "operating system detects writes to their memory (CPU tensors, Linux 6.7), elsewhere as `False`; `guarded` is "
        "the resolved value of `auto` there; `True` everywhere, with version counters where the operating system does "
        "not help (see `altbackend.refresh`); `False` nowhere",
        "code",
        choices=("auto", "guarded", True, False),
    )
    freezing_discard_parameters: bool = _option(
        False,
        "free the memory of parameters and buffers that a graph of inference has packed or folded; every other use of "
        "the module's parameters is then an error that says so. Needs `freezing` other than `False`, and then caches "
        "as `freezing=True` does; such graphs are traced in every process",
        "code",
    )
    size_asserts: bool = _option(
        False,
        "check the dtype, sizes, strides and storage of every input of every graph at each call, backwards included; "
        "Dynamo's guards check those of the function's own inputs anyway",
        "code",
    )
    disabled_passes: str = _option(
        "", "names of graph passes to leave out, separated by commas; `python -m altbackend passes` lists them", "code"
    )
    # training: what the forward saves and what the backward recomputes (docs/memory.md)
    activation_memory_budget: float = _option(
        1.0,
        "memory for values that the backward reads, from 0 (the least that recomputation reaches) to 1 (that of the "
        "fastest step); below 1 the backward also recomputes library calls, the cheapest first; 1 takes the setting of "
        "the same name in `torch._functorch.config`",
        "code",
        limits=(0.0, 1.0),
    )
    ban_recompute_used_far_apart: bool = _option(
        True, "save sums of a value and a much older one, as in a residual stream, instead of recomputing them", "code"
    )
    ban_recompute_long_fusible_chains: bool = _option(
        True, "save a value of every hundred in a chain of pointwise operators instead of recomputing them all", "code"
    )
    ban_recompute_materialized_backward: bool = _option(
        True, "save values that a library call of the backward reads instead of recomputing them", "code"
    )
    ban_recompute_not_in_allowlist: bool = _option(
        True,
        "never recompute library calls; False recomputes those that take less time than saving their result",
        "code",
    )
    ban_recompute_reductions: bool = _option(
        True, "save results of reductions that are much smaller than their operands", "code"
    )
    aggressive_recomputation: bool = _option(False, "lift all bans on recomputation except that on reductions", "code")
    loss_chunks: int = _option(
        0,
        "chunks of rows in which a linear layer over a vocabulary and its cross-entropy are computed, so that the "
        "logits are never all in memory; their matrix product runs again in the backward; 0 and 1 mean one",
        "code",
        limits=(0, 1024),
    )
    channels_last: bool = _option(True, "let convolutions run channels-last where that is faster", "code")
    # CPU kernels
    parallel_threshold: int = _option(
        16384, "fewest elements for which a kernel uses several threads", "code", limits=(0, None)
    )
    threads: int = _option(0, "threads of a CPU kernel; 0 means torch.get_num_threads()", "runtime", limits=(0, None))
    host: str = _option(
        "auto",
        "the language of the program that allocates, launches and calls libraries: `python`; `cpp`, built before the "
        "first call; `auto`, Python first, and C++ once a graph of several steps was called a few times and the "
        "C++ program was built in the background; what has no form in C++ stays in Python (docs/aot.md)",
        "code",
        choices=("auto", "python", "cpp"),
    )
    isa: str = _option(
        "auto",
        "vector instructions of CPU kernels; `auto` takes the widest this machine has",
        "code",
        choices=("auto", "avx512", "avx2", "generic"),
    )
    cxx: str = _option("", "path or name of the C++ compiler; empty looks for one", "code")
    compile_threads: int = _option(
        0,
        "builds, of C++ or Triton, that run in parallel; 0 means one per core that affinity and control groups grant, "
        "shared by the ranks of a host, at most 8",
        "runtime",
        limits=(0, None),
    )
    worker_start: str = _option(
        "subprocess",
        "the process that compiles Triton kernels: `subprocess`, worker processes that are reused; `spawn`, a new "
        "process for each kernel; `inline`, the calling thread, which then also runs C++ compilers one by one",
        "runtime",
        choices=("subprocess", "spawn", "inline"),
    )
    # tuning
    cudagraphs: bool = _option(False, "replay CUDA kernels from a CUDA graph; no effect on a CPU", "runtime")
    cudagraph_limit: int = _option(
        16,
        "most CUDA graphs of one compiled graph; calls with further sizes run without one",
        "runtime",
        limits=(0, None),
    )
    max_autotune: bool = _option(False, "measure candidate kernels and keep the fastest; no effect on a CPU", "code")
    matmul_templates: str = _option(
        "auto",
        "matrix products and the pointwise work on their results as one generated kernel: `auto` where a model of the "
        "GPU, or measurement (max_autotune), says that it is faster, `on` wherever it is possible; `off` leaves "
        "products to the library; no effect on a CPU",
        "code",
        choices=("auto", "off", "on"),
    )
    # ahead-of-time libraries
    aot_isa: str = _option(
        "auto",
        "vector instructions of an ahead-of-time library: `auto` takes the widest this machine has, `generic` runs on "
        "every CPU of the architecture; the library refuses a CPU without them",
        "runtime",
        choices=("auto", "avx512", "avx2", "generic"),
    )
    aot_architectures: str = _option(
        "",
        "the GPUs of an ahead-of-time library, for example `8.0+PTX;9.0`: machine code for each, and with `+PTX` text "
        "that the driver compiles on newer GPUs; empty takes the GPU of the program; from 9.0 on, code runs on its own "
        "architecture alone",
        "runtime",
    )
    aot_constants: str = _option(
        "embedded",
        "the place of a library's weights: `embedded` in it, `file` in a mapped file beside it, `external` nowhere: "
        "the program that loads it binds them",
        "runtime",
        choices=("embedded", "file", "external"),
    )
    aot_format: str = _option(
        "shared",
        "the file of an ahead-of-time library: `shared` for loaders, or `object`, one object file (.o) to be linked "
        "into a program together with libtorch_cpu.so",
        "runtime",
        choices=("shared", "object"),
    )
    aot_prefix: str = _option(
        "",
        "text before every name that an ahead-of-time library exports, so that several can be linked into one program; "
        "loaders look for the names without it",
        "runtime",
    )
    aot_output_path: str = _option(
        "", "path of the library; empty takes a name from its content, in the cache folder", "runtime"
    )
    # folders and debugging
    cache_graphs: bool = _option(
        True, "store the code of compiled graphs, so that another process loads it without compiling", "runtime"
    )
    warm_start: bool = _option(
        True,
        "also store how the compiled parts of a captured graph are called, so that another process needs no "
        "AOTAutograd to load it; needs `cache_graphs`",
        "runtime",
    )
    cache_dir: str = _option("", "folder of compiled code; empty means the user's cache folder", "runtime")
    cache_size: int = _option(
        5120,
        "most MiB in the folder of compiled code; the least recently used files are evicted; 0 means no limit",
        "runtime",
        limits=(0, None),
    )
    cache_key_file: str = _option(
        "",
        "file with a secret of at least 16 bytes: compiled code is sealed with it (HMAC-SHA-256), and loaded or "
        "imported only if it was sealed with the same",
        "runtime",
    )
    cache_url: str = _option(
        "",
        "Redis server that hosts share, `redis://HOST:PORT/DB`, `rediss://` or `unix://`: asked for compiled code that "
        "the folder lacks, and sent newly compiled code; needs `cache_key_file` and the package redis "
        "(`altbackend[redis]`)",
        "runtime",
        shown=False,
    )
    log: int = _option(
        0,
        "log to stderr: 1 a line per graph, 2 also kernels and decisions, 3 also graphs, 4 also source, 5 also IR",
        "debug",
        limits=(0, 5),
    )
    debug_dir: str = _option("", "folder for the text form of every stage; short name ALTBACKEND_DEBUG", "debug")
    repro: str = _option(
        "failures",
        "the graphs for which a Python file is written that compiles them again, in `debug_dir` or a bounded temporary "
        "folder; `always` helps with wrong results and crashes, which `python -m altbackend minify FILE` then shrinks",
        "debug",
        choices=("never", "failures", "always"),
    )
    check_passes: bool = _option(
        False,
        "run each graph before and after every graph pass on example inputs, and raise an error that names the first "
        "pass whose results differ beyond rounding",
        "debug",
    )
    verify_ir: bool = _option(False, "check the loop IR after every step", "debug")
    # the user's graph passes
    pre_grad_custom_pass: Passes = _pass("pass or passes over the graph as Dynamo traced it")
    joint_custom_pre_pass: Passes = _pass("pass or passes over the joint graph, before the backend's own")
    joint_custom_post_pass: Passes = _pass("pass or passes over the joint graph, after the backend's own")
    post_grad_custom_pre_pass: Passes = _pass(
        "pass or passes over the forward or backward graph, before the backend's own"
    )
    post_grad_custom_post_pass: Passes = _pass(
        "pass or passes over the forward or backward graph, after the backend's own"
    )

    @property
    def keeps_constants(self) -> bool:
        """Return whether results computed from parameters alone are cached between calls; `auto` must be decided."""
        return self.freezing in (True, "guarded")


DEFAULTS: Mapping[str, object] = MappingProxyType({item.name: item.default for item in fields(Config)})
SPECS: Mapping[str, OptionSpec] = MappingProxyType({item.name: item.metadata["spec"] for item in fields(Config)})


def expected(name: str) -> str:
    """Return the values that option `name` takes, in words."""
    spec, kind = SPECS[name], type(DEFAULTS[name])
    if spec.is_pass:
        return "it must be a callable or a list of callables"
    if spec.choices:
        return "one of " + ", ".join(map(repr, spec.choices))
    named = {bool: "bool", int: "int", str: "str", float: "number"}[kind]
    match spec.low, spec.high:
        case (None, None):
            return named
        case (low, None):
            return f"{named}, at least {low:g}"
        case (low, high):
            return f"{named} from {low:g} to {high:g}"


def fingerprint(cfg: Config) -> str:
    """Return a hex digest of the options that change generated code.

    A custom pass is represented by its `uuid()`. A pass without one makes the digest unique, so that a cache never
    finds its code. The builder adds the resolved values of `isa` and `cxx`.
    """
    digest = hashlib.sha256()
    for name, spec in SPECS.items():
        if spec.affects == "code":
            value = getattr(cfg, name)
            text = [_pass_id(item) or uuid.uuid4().hex for item in value] if spec.is_pass else value
            digest.update(f"{name}={text!r};".encode())
    return digest.hexdigest()


def uncacheable(cfg: Config) -> str:
    """Return why code compiled with `cfg` must not be cached (a pass has no `uuid()`), or ""."""
    for name, spec in SPECS.items():
        for item in getattr(cfg, name) if spec.is_pass else ():
            if _pass_id(item) is None:
                return f"{name} {item!r} has no uuid() that names its version"
    return ""


def _pass_id(item: Callable[..., object]) -> str | None:
    """Return the version that a pass states with `uuid()`, as text, or None."""
    uuid_of = getattr(item, "uuid", None)
    version = uuid_of() if callable(uuid_of) else None
    return None if version is None else repr(version)
