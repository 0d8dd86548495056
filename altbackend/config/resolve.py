"""Resolution of options: values from the environment, the mode and `options={...}`, with checks of names and values.

From weakest to strongest, values come from the default, an environment variable `ALTBACKEND_<NAME>`, the mode, and
`options={...}`.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from altbackend.config.inductor_names import NAMES, Ignored, Refused, Renamed
from altbackend.config.modes import mode_values
from altbackend.config.options import DEFAULTS, SPECS, Config, Passes, expected
from altbackend.errors import BadOptionValue, UnknownOption

# Short environment names; the full name ALTBACKEND_DEBUG_DIR overrides its short form.
ENV_SHORT: Mapping[str, str] = MappingProxyType({"debug_dir": "ALTBACKEND_DEBUG"})
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def resolve(
    mode: str | None = None,
    options: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
    settings: Mapping[str, object] = MappingProxyType({}),
) -> Config:
    """Return the options of one `torch.compile` call.

    `environ` defaults to the process environment. `settings` override only the defaults. Raise UnknownMode,
    UnknownOption or BadOptionValue.
    """
    values: dict[str, Any] = {**settings, **_from_env(os.environ if environ is None else environ)}
    values.update(mode_values(mode))
    values.update(_from_options(options or {}))
    return Config(**values)


def notes(options: Mapping[str, object] | None) -> list[tuple[str, str]]:
    """Return `(name, reason)` for each accepted TorchInductor name in `options` that has no effect here."""
    named = [(name, NAMES.get(_normal(name))) for name in options or {}]
    return [(name, row.reason) for name, row in named if isinstance(row, (Ignored, Refused))]


def known_variables() -> frozenset[str]:
    """Return every environment variable that sets an option."""
    full = (variable_of(name) for name, spec in SPECS.items() if not spec.is_pass)
    return frozenset(full) | frozenset(ENV_SHORT.values())


def _normal(name: str) -> str:
    return str(name).replace("-", "_")


def variable_of(name: str) -> str:
    """Return the environment variable of an option."""
    return f"ALTBACKEND_{name.upper()}"


def _from_env(environ: Mapping[str, str]) -> dict[str, object]:
    """Return the values of the variables that are set and not empty; a custom pass has no text form."""
    values: dict[str, object] = {}
    for name, spec in SPECS.items():
        for variable in (variable_of(name), ENV_SHORT.get(name, "")):
            text = environ.get(variable, "")
            if text and not spec.is_pass:
                values[name] = _check(name, _parse(name, text, variable), variable)
                break
    return values


def _parse(name: str, text: str, variable: str) -> object:
    kind, choices = type(DEFAULTS[name]), SPECS[name].choices
    if True in choices and text.lower() in _TRUE + _FALSE:
        return text.lower() in _TRUE
    if kind is bool:
        if text.lower() not in _TRUE + _FALSE:
            raise BadOptionValue(name, text, f"it takes {' or '.join((*_TRUE, *_FALSE))}", variable)
        return text.lower() in _TRUE
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            raise BadOptionValue(name, text, f"it takes {expected(name)}", variable) from None
    return text


def _from_options(options: Mapping[str, object]) -> dict[str, object]:
    """Return checked values. The backend's own names override TorchInductor's, whatever their order."""
    renamed: dict[str, object] = {}
    native: dict[str, object] = {}
    for spelling, value in options.items():
        name = _normal(spelling)
        if name in SPECS:
            native[name] = _check(name, value, "options")
        else:
            renamed.update(_inductor_option(spelling, name, value))
    return renamed | native


def _inductor_option(spelling: str, name: str, value: object) -> dict[str, object]:
    """Return the option that a TorchInductor option sets here, or nothing."""
    match NAMES.get(name):
        case None:
            raise UnknownOption(spelling, _nearest(name))
        case Ignored():
            return {}
        case Refused(harmless, reason):
            # `1 == True`, so compare the type as well.
            if any(type(value) is type(item) and value == item for item in harmless):
                return {}
            raise BadOptionValue(spelling, value, reason)
        case Renamed(target, _, convert):
            converted = convert(value)
            return {} if converted is None else {target: _check(target, converted, f"options[{spelling!r}]")}


def _nearest(name: str) -> tuple[str, ...]:
    return tuple(difflib.get_close_matches(name, [*SPECS, *NAMES], n=3, cutoff=0.0))


def _check(name: str, value: object, source: str) -> object:
    spec = SPECS[name]
    if spec.is_pass:
        return _passes(name, value, source)
    if spec.choices:
        wrong = not any(type(value) is type(c) and value == c for c in spec.choices)
    else:
        value = float(value) if type(value) is int and type(DEFAULTS[name]) is float else value
        wrong = type(value) is not type(DEFAULTS[name])  # exact: True is not a number of threads
    if wrong or not _in_range(value, spec.low, spec.high):
        raise BadOptionValue(name, value, f"it takes {expected(name)}", source)
    return value


def _in_range(value: object, low: float | None, high: float | None) -> bool:
    """Return whether a number lies between two limits, of which either may be missing; NaN does not."""
    if low is None and high is None:
        return True
    return isinstance(value, (int, float)) and (low is None or value >= low) and (high is None or value <= high)


def _passes(name: str, value: object, source: str) -> Passes:
    if value is None:
        return ()
    passes = tuple(value) if isinstance(value, Iterable) and not callable(value) else (value,)
    if not all(callable(item) for item in passes):
        raise BadOptionValue(name, value, expected(name), source)
    return passes
