"""A digest at the end of a file says that it is whole, that it belongs where it is, and with a secret who wrote it.

At the end, since a shared library with more bytes after it is still one.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
from pathlib import Path

from ..errors import BadOptionValue

FORMAT = "altbackend-1"
LEAST_SECRET = 16  # bytes
_PLAIN, _KEYED = "plain", "keyed"  # of equal length, as the numbers are, so that the seal is the last BYTES of a file
BYTES = len(f"\n{FORMAT} {_PLAIN} {0:016x} {'':64}\n")


def seal(name: str, content: bytes, secret: bytes) -> bytes:
    """`content` with a seal: SHA-256 of name and content, with a `secret` HMAC-SHA-256 (RFC 2104)."""
    return content + _seal(name, content, secret)


def holds(name: str, sealed: bytes, secret: bytes) -> bool:
    """Whether a file is what was sealed under that name, with that secret or, for b"", without one."""
    content, found = memoryview(sealed)[:-BYTES], sealed[-BYTES:]
    return hmac.compare_digest(found, _seal(name, content, secret))


def is_keyed(sealed: bytes) -> bool:
    """Whether a file says that it was sealed with a secret."""
    return sealed[-BYTES:].startswith(f"\n{FORMAT} {_KEYED} ".encode())


def _seal(name: str, content: bytes | memoryview, secret: bytes) -> bytes:
    made = hmac.new(secret, digestmod=hashlib.sha256) if secret else hashlib.sha256()
    made.update(f"{FORMAT}\0{name}\0".encode())
    made.update(content)
    return f"\n{FORMAT} {_KEYED if secret else _PLAIN} {len(content):016x} {made.hexdigest()}\n".encode()


@functools.cache
def secret_in(file: str) -> bytes:
    """The secret in a file, white space around it aside; b"" for "". Raises BadOptionValue."""
    if not file:
        return b""
    try:
        secret = Path(file).expanduser().read_bytes().strip()
    except OSError as cause:
        raise BadOptionValue("cache_key_file", file, f"it cannot be read ({cause.strerror})") from None
    if len(secret) < LEAST_SECRET:
        raise BadOptionValue("cache_key_file", file, f"it must hold at least {LEAST_SECRET} bytes")
    return secret
