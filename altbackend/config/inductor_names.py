"""TorchInductor option names that altbackend accepts, so that existing `options={...}` keep working.

A row gives the effect of a name. There are three effects:

- the name sets one of the backend's options;
- the name is ignored, because it only affects speed or logging;
- the name is refused, because ignoring it would change results or drop a check that the user asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from altbackend.lazy_dataclass import dataclass

Convert = Callable[[object], object]


def same(value: object) -> object:
    """Return the value unchanged."""
    return value


@dataclass(frozen=True)
class Renamed:
    """The name sets the option `target`. `convert` returns the option's value, or None to leave its default."""

    target: str
    reason: str
    convert: Convert = same


@dataclass(frozen=True)
class Ignored:
    """The name is accepted without effect; `reason` says why that is harmless."""

    reason: str


@dataclass(frozen=True)
class Refused:
    """Only the values in `harmless` are accepted, without effect; any other value is an error with `reason`."""

    harmless: tuple[object, ...]
    reason: str


Row = Renamed | Ignored | Refused


def _eager_numerics(value: object) -> str | None:
    return "eager" if value else None


def _true_or_default(value: object) -> bool | None:
    return True if value else None


def _cpp_or_default(value: object) -> str | None:
    return "cpp" if value else None


def _threads(value: object) -> object:
    return 0 if value == -1 else value


def _isa_from_bits(bits: object) -> str | None:
    if bits is None:
        return None
    return "avx512" if bits == 512 else "avx2" if bits == 256 else "generic"


def _path_or_default(value: object) -> object:
    return value or None


def _constants(value: object) -> str:
    return "embedded" if value else "external"


def _linkage(value: object) -> str:
    return "shared" if value else "object"


def _start(value: object) -> object:
    return "subprocess" if value == "fork" else value


def _compiler(value: object) -> object:
    """Return the last name of a candidate tuple `(None, "g++")`, or the name itself."""
    if isinstance(value, (tuple, list)):
        named = [item for item in value if item]
        return named[-1] if named else None
    return value


SPEED = "changes speed only; "
_TUNED = Ignored(SPEED + "kernel shapes come from the cost model or, with max_autotune, from measurement")
_FUSION = Ignored(SPEED + "fusion is decided by `fuse` and `max_fused_nodes`")
_LOGS = Ignored("changes logging only; use `log` and `debug_dir`")
_BUILD = Ignored("changes how kernels are built, not what they compute")
_NO_HOOK = Refused((None,), "there is no such hook; use post_grad_custom_post_pass")
_NO_CACHE_SWITCH = "the cache cannot be switched off; give an empty folder with `cache_dir`"

NAMES: Mapping[str, Row] = MappingProxyType(
    {
        # numerics and randomness
        "emulate_precision_casts": Renamed("numerics", "True means numerics='eager'", _eager_numerics),
        "align_random_eager": Renamed("fallback_random", "True means fallback_random=True", _true_or_default),
        "batch_invariant": Refused((False,), "reductions are not guaranteed to be independent of the batch size"),
        "use_fast_math": Refused((False,), "fast-math would make results differ from eager's"),
        "cpp.enable_unsafe_math_opt_flag": Refused((False,), "fast-math would make results differ from eager's"),
        "cpp.enable_floating_point_contract_flag": Refused(("off", False), "contraction changes rounding"),
        "triton.codegen_upcast_to_fp32": Refused((True,), "low precision chains always compute in float32"),
        "keep_output_stride": Refused((True,), "outputs always have eager's strides"),
        "force_same_precision": Ignored("results always have eager's precision"),
        # checks
        "nan_asserts": Refused((False,), "there is no such check in generated code"),
        "scalar_asserts": Ignored("runtime assertions of the graph are always kept"),
        "alignment_asserts": Ignored("generated code makes no assumption on alignment"),
        "assume_aligned_inputs": Ignored("generated code makes no assumption on alignment"),
        "implicit_fallbacks": Refused((True,), "an operation without a lowering is always a library call"),
        # modes
        "triton.cudagraphs": Renamed("cudagraphs", "same meaning"),
        "max_autotune_gemm": Renamed("max_autotune", "one switch for all tuning", _true_or_default),
        "max_autotune_pointwise": Renamed("max_autotune", "one switch for all tuning", _true_or_default),
        # memory and layout
        "hoist_constants": Renamed("freezing", "the option's former name"),
        "allow_buffer_reuse": Renamed("reuse_memory", "same meaning"),
        "memory_planning": Renamed("reuse_memory", "True means reuse_memory=True", _true_or_default),
        "inplace_buffers": Ignored(SPEED + "see `reuse_memory`"),
        "layout_optimization": Renamed("channels_last", "same meaning"),
        # fusion
        "max_fusion_size": Renamed("max_fused_nodes", "same meaning"),
        "epilogue_fusion": _FUSION,
        "epilogue_fusion_first": _FUSION,
        "prologue_fusion": _FUSION,
        "aggressive_fusion": _FUSION,
        "combo_kernels": _FUSION,
        "loop_ordering_after_fusion": _FUSION,
        "realize_reads_threshold": _FUSION,
        "realize_opcount_threshold": _FUSION,
        # tuning
        "coordinate_descent_tuning": _TUNED,
        "max_autotune_gemm_backends": _TUNED,
        "max_autotune_gemm_search_space": _TUNED,
        "benchmark_fusion": _TUNED,
        "autotune_in_subproc": _TUNED,
        "split_reductions": _TUNED,
        "unroll_reductions_threshold": _TUNED,
        "triton.multi_kernel": _TUNED,
        "triton.persistent_reductions": _TUNED,
        "triton.max_tiles": _TUNED,
        "shape_padding": _TUNED,
        # graph passes that keep results
        "pattern_matcher": Ignored(SPEED + "rewrites never change results"),
        "joint_graph_constant_folding": Ignored(SPEED + "see `freezing`"),
        "reorder_for_locality": Ignored(SPEED + "the schedule orders kernels itself"),
        "dce": Ignored(SPEED + "unused work is always dropped"),
        # hooks that do not exist here
        "custom_partitioner_fn": _NO_HOOK,
        "_pre_fusion_custom_pass": _NO_HOOK,
        "_post_fusion_custom_pass": _NO_HOOK,
        "pre_grad_fusion_options": Refused(({}, None), "there are no fusion groups; use pre_grad_custom_pass"),
        "post_grad_fusion_options": Refused(({}, None), "there are no fusion groups; use post_grad_custom_post_pass"),
        # build, cache and logs
        "aot_inductor.output_path": Renamed("aot_output_path", "same meaning", _path_or_default),
        "aot_inductor.dynamic_linkage": Renamed("aot_format", "False means `object`", _linkage),
        "aot_inductor.package_constants_in_so": Renamed("aot_constants", "False leaves weights external", _constants),
        "aot_inductor.use_runtime_constant_folding": Ignored("folding always runs when a library is created"),
        "aot_inductor.package": Ignored("`altbackend.aot_package` makes packages"),
        "cpp.threads": Renamed("threads", "-1 means 0 (torch's number)", _threads),
        "cpp.simdlen": Renamed("isa", "512 avx512, 256 avx2, any other generic, None auto", _isa_from_bits),
        "cpp.cxx": Renamed("cxx", "the last name of a tuple", _compiler),
        "cpp.min_chunk_size": Renamed("parallel_threshold", "same meaning"),
        "cpp_wrapper": Renamed("host", "True means `cpp`", _cpp_or_default),
        "worker_start_method": Renamed("worker_start", "`fork` means `subprocess`: nothing is forked", _start),
        "triton.unique_kernel_names": _BUILD,
        "triton.cudagraph_trees": Ignored("`cudagraphs` alone decides"),
        "fx_graph_cache": Renamed("cache_graphs", "same meaning; machine code is always cached"),
        "force_disable_caches": Refused((False,), _NO_CACHE_SWITCH),
        "debug": _LOGS,
        "verbose_progress": _LOGS,
        "benchmark_kernel": _LOGS,
        "trace.enabled": _LOGS,
        "trace.debug_dir": Renamed("debug_dir", "same meaning"),
        "trace.log_url_for_graph_xform": _LOGS,
    }
)


def effect(row: Row) -> str:
    """Return the effect of a name, as one cell of the documentation."""
    match row:
        case Renamed(target, reason):
            return f"sets `{target}` ({reason})"
        case Ignored(reason):
            return f"accepted, no effect: {reason}"
        case Refused(harmless, reason):
            return f"only {' or '.join(map(repr, harmless))}: {reason}"
