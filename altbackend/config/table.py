"""The options as rows of text, for the command line and the documentation."""

from __future__ import annotations

from altbackend.config.inductor_names import NAMES, effect
from altbackend.config.options import DEFAULTS, SPECS, expected
from altbackend.config.resolve import ENV_SHORT, variable_of
from altbackend.lazy_dataclass import dataclass


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
    """Return one row per option, in the order of declaration."""
    return [
        Row(
            name=name,
            type="callable or list of them" if spec.is_pass else expected(name),
            default="none" if spec.is_pass else repr(DEFAULTS[name]),
            affects=spec.affects,
            env="" if spec.is_pass else ENV_SHORT.get(name, variable_of(name)),
            doc=spec.doc,
        )
        for name, spec in SPECS.items()
    ]


def accepted_names() -> list[tuple[str, str]]:
    """Return `(TorchInductor name, its effect)` for documentation."""
    return [(name, effect(row)) for name, row in sorted(NAMES.items())]
