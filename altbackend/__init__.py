"""altbackend: a torch.compile backend that one person can read.

    model = torch.compile(model, backend="alt")

Importing this module registers nothing: torch finds the name "alt" through the package's entry point, and a second
registration from here would make torch refuse both.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from altbackend.aot.compile import aot_compile
    from altbackend.aot.load import aot_load, check_package
    from altbackend.aot.package import aot_package
    from altbackend.backend import compile_again as compile_again
    from altbackend.backend import trace_and_compile as trace_and_compile
    from altbackend.entry_point import alt
    from altbackend.runtime.frozen import refresh_all as refresh

__version__ = "0.1.0"
__all__ = ["__version__", "alt", "aot_compile", "aot_load", "aot_package", "check_package", "refresh"]

# Public names and their modules, imported at first use so that `import altbackend` is fast.
_LAZY = {
    "aot_load": ("altbackend.aot.load", "aot_load"),
    "aot_package": ("altbackend.aot.package", "aot_package"),
    "check_package": ("altbackend.aot.load", "check_package"),
    "aot_compile": ("altbackend.aot.compile", "aot_compile"),
    "alt": ("altbackend.entry_point", "alt"),
    "refresh": ("altbackend.runtime.frozen", "refresh_all"),
    "compile_again": ("altbackend.backend", "compile_again"),
    "trace_and_compile": ("altbackend.backend", "trace_and_compile"),
}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _LAZY[name]
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted(__all__)
