"""Values that the user names on the command line as FILE.py:name."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from pathlib import Path
from typing import Any

from altbackend.errors import BadOptionValue

_modules = itertools.count()


def named_value(source: str) -> Any:
    """Run a Python file and return the value that `FILE.py:name` names. Raise BadOptionValue if there is none."""
    file, _, name = source.rpartition(":")
    path = Path(file)
    spec = importlib.util.spec_from_file_location(f"altbackend_named_{next(_modules)}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise BadOptionValue("FILE.py:name", source, f"{file or source} is no Python file", "the command line")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    if not hasattr(module, name):
        raise BadOptionValue("FILE.py:name", source, f"{file} has no {name}", "the command line")
    return getattr(module, name)
