"""`python -m altbackend config`: the options, as text or as docs/options.md."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from altbackend.config.modes import MODES
from altbackend.config.options import SPECS
from altbackend.config.resolve import resolve
from altbackend.config.table import Row, accepted_names, table

INTRO = """\
# Options

This page is generated: `python -m altbackend config --markdown > docs/options.md`.

Pass options as `torch.compile(model, backend="alt", options={"numerics": "eager"})`, or set the environment variable.
Weakest to strongest: default, environment, mode, `options`. A dash in a name means an underscore. A wrong name or
value is an error. "Affects" says whether an option changes generated code (and so enters the cache key), how that
code is run, or only what is reported.
"""

PASSES = """\
A custom pass is a callable that takes a `torch.fx.Graph` and changes it in place. Give it a method `uuid()` that
returns a text or bytes naming its version, and code compiled with it can be cached; without one it never is.
"""


def run(markdown: bool) -> int:
    """Print the table."""
    print(markdown_page() if markdown else text_page(), end="")
    return 0


def text_page() -> str:
    """Return one block per option, with its value in this environment."""
    cfg = resolve()
    return "\n".join(_block(row, getattr(cfg, row.name)) for row in table())


def _block(row: Row, value: object) -> str:
    doc = textwrap.fill(row.doc, 100, initial_indent="    ", subsequent_indent="    ")
    env = f", {row.env}" if row.env else ""
    shown = repr(value) if SPECS[row.name].shown else "set"
    now = "" if repr(value) == row.default or value == () else f"; now {shown}"
    return f"{row.name} = {row.default}{now}\n{doc}\n    {row.type}; affects {row.affects}{env}\n"


def markdown_page() -> str:
    """Return the text of docs/options.md."""
    options = _grid(
        ("option", "values", "default", "affects", "environment", "meaning"),
        [(f"`{r.name}`", r.type, f"`{r.default}`", r.affects, r.env and f"`{r.env}`", r.doc) for r in table()],
    )
    modes = _grid(
        ("mode", "sets"),
        [
            (f"`{mode}`", ", ".join(f"`{k}={v!r}`" for k, v in sets.items()) or "nothing")
            for mode, sets in MODES.items()
        ],
    )
    names = _grid(("name", "effect"), [(f"`{name}`", effect) for name, effect in accepted_names()])
    return "\n".join(
        [
            INTRO,
            options,
            PASSES,
            "## Modes\n\nOn a CPU all modes give the same code for now.\n",
            modes,
            "## TorchInductor's names\n\nAccepted so that existing code keeps working.\n",
            names,
        ]
    )


def _grid(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)
