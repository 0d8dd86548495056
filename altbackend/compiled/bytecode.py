"""Python byte code of printed host programs, stored in the cache folder.

Compiling a program of some hundred launches takes 20 to 50 ms, reading its byte code 1 ms. Byte code is not sent to the
shared server: it fits one version of Python, and its text comes with the graph.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import marshal
import sys
from types import CodeType

from ..disk_cache.storage import Store

# The properties of the interpreter that determine byte code, besides the text.
_PYTHON = f"{sys.implementation.cache_tag} {importlib.util.MAGIC_NUMBER.hex()} {sys.flags.optimize}"


def name_of(python: str) -> str:
    """Return the name of a program's byte code in the store."""
    digest = hashlib.sha256(f"{_PYTHON}\n{python}".encode()).hexdigest()[:40]
    return f"host/{digest[:2]}/{digest}.code"


def compiled(python: str, shown_as: str, store: Store) -> CodeType:
    """Return the byte code of a program, from the store or compiled now. Tracebacks call its file `shown_as`."""
    name, local = name_of(python), store.local
    cached = _read(local.read(name))
    if cached is not None:
        return _with_file_name(cached, shown_as)
    code = compile(python, shown_as, "exec", dont_inherit=True)
    with contextlib.suppress(OSError):  # a full disk costs the next process a compilation
        local.write(name, marshal.dumps(code))
    return code


def _read(content: bytes | None) -> CodeType | None:
    """Return the code object in a file's content; None for a missing file or for other content."""
    with contextlib.suppress(ValueError, EOFError, TypeError):
        code = None if content is None else marshal.loads(content)
        return code if isinstance(code, CodeType) else None
    return None


def _with_file_name(code: CodeType, file: str) -> CodeType:
    """Return `code` and all functions in it with another file name."""
    inner = tuple(_with_file_name(c, file) if isinstance(c, CodeType) else c for c in code.co_consts)
    return code.replace(co_filename=file, co_consts=inner)
