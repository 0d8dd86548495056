"""Byte code of printed host programs, kept in the cache folder.

Making it takes 20 to 50 ms for a graph of some hundred launches, reading it a millisecond. It is not sent to a server:
it serves one version of Python, and its text comes with the graph.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import marshal
import sys
from types import CodeType

from ..disk_cache.storage import Store

# What decides byte code beside the text.
_PYTHON = f"{sys.implementation.cache_tag} {importlib.util.MAGIC_NUMBER.hex()} {sys.flags.optimize}"


def name_of(python: str) -> str:
    """Name of a program's byte code in the store."""
    made = hashlib.sha256(f"{_PYTHON}\n{python}".encode()).hexdigest()[:40]
    return f"host/{made[:2]}/{made}.code"


def compiled(python: str, shown_as: str, store: Store) -> CodeType:
    """The byte code of a program whose file, in tracebacks, is called `shown_as`; kept, or made and kept now."""
    name, here = name_of(python), store.here
    kept = _read(here.read(name))
    if kept is not None:
        return _called(kept, shown_as)
    made = compile(python, shown_as, "exec", dont_inherit=True)
    with contextlib.suppress(OSError):  # a full disk costs the next process a compilation
        here.write(name, marshal.dumps(made))
    return made


def _read(content: bytes | None) -> CodeType | None:
    """The store gives what was written under that name only; anything but byte code is a miss all the same."""
    with contextlib.suppress(ValueError, EOFError, TypeError):
        found = None if content is None else marshal.loads(content)
        return found if isinstance(found, CodeType) else None
    return None


def _called(code: CodeType, file: str) -> CodeType:
    """`code` and all functions in it, as of a file of that name."""
    inner = tuple(_called(c, file) if isinstance(c, CodeType) else c for c in code.co_consts)
    return code.replace(co_filename=file, co_consts=inner)
