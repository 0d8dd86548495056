"""Options: names, types, ranges, sources and their order, modes, TorchInductor's names, and the cache key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from altbackend.config.inductor_names import NAMES, Refused, Renamed
from altbackend.config.modes import MODES
from altbackend.config.options import DEFAULTS, SPECS, Config, fingerprint, uncacheable
from altbackend.config.resolve import notes, resolve
from altbackend.config.table import table
from altbackend.errors import BadOptionValue, UnknownMode, UnknownOption


def set_options(options: Mapping[str, Any] | None = None, mode: str | None = None) -> Config:
    return resolve(mode, options, environ={})


def test_defaults() -> None:
    assert set_options() == Config()


@pytest.mark.parametrize("name", SPECS)
def test_every_option_is_documented_and_its_default_is_valid(name: str) -> None:
    spec = SPECS[name]
    assert spec.doc
    assert set_options({name: None if spec.is_pass else DEFAULTS[name]}) == Config()


def test_dash_means_underscore() -> None:
    assert set_options({"max-fused-nodes": 3}).max_fused_nodes == 3


@pytest.mark.parametrize(("typo", "meant"), [("max_fused_node", "max_fused_nodes"), ("numeric", "numerics")])
def test_unknown_option_names_the_nearest(typo: str, meant: str) -> None:
    with pytest.raises(UnknownOption, match=meant):
        set_options({typo: 1})


def test_unknown_option_with_nothing_near() -> None:
    with pytest.raises(UnknownOption):
        set_options({"qqqqqqq": 1})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("strict", 1),
        ("strict", "true"),
        ("threads", True),
        ("threads", -1),
        ("threads", 2.0),
        ("log", 6),
        ("max_fused_nodes", 0),
        ("numerics", "exact"),
        ("isa", None),
        ("cache_dir", 3),
        ("pre_grad_custom_pass", "a pass"),
        ("post_grad_custom_pre_pass", [print, 3]),
    ],
)
def test_bad_values_are_refused(name: str, value: object) -> None:
    with pytest.raises(BadOptionValue, match=name):
        set_options({name: value})


@pytest.mark.parametrize("mode", MODES)
def test_modes(mode: str) -> None:
    cfg = set_options(mode=mode)
    assert cfg.cudagraphs == (mode in ("reduce-overhead", "max-autotune"))
    assert cfg.max_autotune == mode.startswith("max-autotune")
    assert set_options({"cudagraphs": False, "max_autotune": False}, mode) == Config()


def test_unknown_mode() -> None:
    with pytest.raises(UnknownMode, match="reduce-overhead"):
        set_options(mode="fastest")


@pytest.mark.parametrize(
    ("variable", "text", "name", "value"),
    [
        ("ALTBACKEND_STRICT", "1", "strict", True),
        ("ALTBACKEND_FUSE", "off", "fuse", False),
        ("ALTBACKEND_THREADS", "3", "threads", 3),
        ("ALTBACKEND_NUMERICS", "eager", "numerics", "eager"),
        ("ALTBACKEND_DEBUG", "/d", "debug_dir", "/d"),
        ("ALTBACKEND_DEBUG_DIR", "/d", "debug_dir", "/d"),
        ("ALTBACKEND_LOG", "4", "log", 4),
        ("ALTBACKEND_LOG", "", "log", 0),
        ("ALTBACKEND_PRE_GRAD_CUSTOM_PASS", "print", "pre_grad_custom_pass", ()),
    ],
)
def test_environment(variable: str, text: str, name: str, value: object) -> None:
    assert getattr(resolve(environ={variable: text}), name) == value


@pytest.mark.parametrize(("variable", "text"), [("STRICT", "maybe"), ("THREADS", "two"), ("LOG", "9")])
def test_bad_environment_names_the_variable(variable: str, text: str) -> None:
    with pytest.raises(BadOptionValue, match=f"ALTBACKEND_{variable}"):
        resolve(environ={f"ALTBACKEND_{variable}": text})


def test_order_of_sources() -> None:
    environ = {
        "ALTBACKEND_MAX_AUTOTUNE": "0",
        "ALTBACKEND_LOG": "2",
        "ALTBACKEND_DEBUG": "a",
        "ALTBACKEND_DEBUG_DIR": "b",
    }
    cfg = resolve("max-autotune", {"log": 3}, environ)
    assert (cfg.max_autotune, cfg.log, cfg.debug_dir) == (True, 3, "b")


def test_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALTBACKEND_THREADS", "7")
    assert resolve().threads == 7


class Versioned:
    """A custom pass that states its version."""

    def __init__(self, version: object) -> None:
        self.version = version

    def __call__(self, graph: object) -> None:
        return None

    def uuid(self) -> object:
        return self.version


def test_passes_become_tuples() -> None:
    first, second = Versioned(1), Versioned(2)
    cfg = set_options({"pre_grad_custom_pass": first, "joint_custom_pre_pass": [first, second]})
    assert cfg.pre_grad_custom_pass == (first,)
    assert cfg.joint_custom_pre_pass == (first, second)


# --- the cache key ---


def _other_value(name: str) -> Any:
    spec, default = SPECS[name], DEFAULTS[name]
    if spec.is_pass:
        return Versioned("v1")
    if isinstance(default, bool):
        return not default
    if isinstance(default, float):
        return default / 2
    return spec.choices[1] if spec.choices else default + 1 if isinstance(default, int) else "other"


@pytest.mark.parametrize("name", SPECS)
def test_fingerprint_covers_exactly_the_code_options(name: str) -> None:
    changed = fingerprint(set_options({name: _other_value(name)})) != fingerprint(Config())
    assert changed == (SPECS[name].affects == "code")


def test_fingerprint_follows_a_pass_version_and_place() -> None:
    def key(place: str, version: object) -> str:
        return fingerprint(set_options({place: Versioned(version)}))

    assert key("pre_grad_custom_pass", 1) == key("pre_grad_custom_pass", 1)
    assert key("pre_grad_custom_pass", 1) != key("pre_grad_custom_pass", 2)
    assert key("pre_grad_custom_pass", 1) != key("joint_custom_pre_pass", 1)


@pytest.mark.parametrize("nameless", [print, Versioned(None)])
def test_a_pass_without_a_version_is_never_found_again(nameless: object) -> None:
    cfg = set_options({"pre_grad_custom_pass": nameless})
    assert fingerprint(cfg) != fingerprint(cfg)
    assert "pre_grad_custom_pass" in uncacheable(cfg)
    assert uncacheable(set_options({"pre_grad_custom_pass": Versioned(1)})) == ""


@given(left=st.text(max_size=20), right=st.text(max_size=20))
def test_fingerprint_does_not_confuse_neighbouring_text(left: str, right: str) -> None:
    same = fingerprint(Config(cxx=left)) == fingerprint(Config(cxx=right))
    assert same == (left == right)


# --- TorchInductor's names ---


@pytest.mark.parametrize(
    ("name", "value", "option", "result"),
    [
        ("hoist_constants", True, "freezing", True),
        ("hoist_constants", False, "freezing", False),
        ("fallback_random", True, "fallback_random", True),
        ("triton.cudagraphs", True, "cudagraphs", True),
        ("emulate_precision_casts", True, "numerics", "eager"),
        ("emulate_precision_casts", False, "numerics", "fast"),
        ("max-fusion-size", 5, "max_fused_nodes", 5),
        ("layout_optimization", False, "channels_last", False),
        ("cpp.threads", -1, "threads", 0),
        ("cpp.simdlen", 256, "isa", "avx2"),
        ("cpp.simdlen", None, "isa", "auto"),
        ("cpp.cxx", (None, "clang++"), "cxx", "clang++"),
        ("max_autotune_gemm", True, "max_autotune", True),
        ("epilogue_fusion", True, "fuse", True),
    ],
)
def test_inductor_names(name: str, value: object, option: str, result: object) -> None:
    assert getattr(set_options({name: value}), option) == result


def test_our_name_wins_over_inductors() -> None:
    assert set_options({"max_fused_nodes": 3, "max_fusion_size": 9}).max_fused_nodes == 3


@pytest.mark.parametrize("name", ["use_fast_math", "batch_invariant", "nan_asserts", "force_disable_caches"])
def test_what_would_change_results_or_drop_a_check_is_refused(name: str) -> None:
    assert set_options({name: False}) == Config()
    with pytest.raises(BadOptionValue, match=name):
        set_options({name: True})


def test_refused_compares_types() -> None:
    with pytest.raises(BadOptionValue):
        set_options({"use_fast_math": 0})


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_inductor_names_are_sound(name: str) -> None:
    row = NAMES[name]
    assert row.reason
    assert name not in SPECS
    if isinstance(row, Renamed):
        assert row.target in SPECS
    if isinstance(row, Refused):
        assert all(set_options({name: value}) == Config() for value in row.harmless)


def test_notes_explain_what_was_ignored() -> None:
    assert [name for name, _ in notes({"epilogue_fusion": True, "freezing": True, "log": 1})] == ["epilogue_fusion"]
    assert notes(None) == []


def test_table_has_one_row_per_option() -> None:
    rows = table()
    assert [row.name for row in rows] == list(SPECS)
    log = rows[list(SPECS).index("log")]
    assert (log.type, log.default, log.affects, log.env) == ("int from 0 to 5", "0", "debug", "ALTBACKEND_LOG")
