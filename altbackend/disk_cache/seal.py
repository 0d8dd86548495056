"""Seals of cache files: the digest at a file's end proves it complete, unmoved and, with a secret, authentic.

The seal is at the end because a shared library followed by more bytes is still loadable.
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
    """Return `content` with a seal: SHA-256 of name and content, or HMAC-SHA-256 (RFC 2104) with a `secret`."""
    return content + _seal(name, content, secret)


def is_valid(name: str, sealed: bytes, secret: bytes) -> bool:
    """Return whether a file is unchanged since it was sealed under that name with that secret (b"": without one)."""
    content, found_seal = memoryview(sealed)[:-BYTES], sealed[-BYTES:]
    return hmac.compare_digest(found_seal, _seal(name, content, secret))


def is_keyed(sealed: bytes) -> bool:
    """Return whether a file claims to be sealed with a secret."""
    return sealed[-BYTES:].startswith(f"\n{FORMAT} {_KEYED} ".encode())


def _seal(name: str, content: bytes | memoryview, secret: bytes) -> bytes:
    digest = hmac.new(secret, digestmod=hashlib.sha256) if secret else hashlib.sha256()
    digest.update(f"{FORMAT}\0{name}\0".encode())
    digest.update(content)
    return f"\n{FORMAT} {_KEYED if secret else _PLAIN} {len(content):016x} {digest.hexdigest()}\n".encode()


@functools.cache
def secret_in(file: str) -> bytes:
    """Return the secret in a file, without white space around it; b"" for "". Raise BadOptionValue."""
    if not file:
        return b""
    try:
        secret = Path(file).expanduser().read_bytes().strip()
    except OSError as cause:
        raise BadOptionValue("cache_key_file", file, f"it cannot be read ({cause.strerror})") from None
    if len(secret) < LEAST_SECRET:
        raise BadOptionValue("cache_key_file", file, f"it must hold at least {LEAST_SECRET} bytes")
    return secret
