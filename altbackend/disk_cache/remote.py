"""A store that hosts share: a Redis server, asked for what the folder has not, and given what was compiled.

The server only keeps sealed files; `Store` uses none whose seal does not hold. Whatever the server does, a call ends in
bounded time and raises nothing.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import os
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ..errors import BadOptionValue, SharedStoreUnusable, SharedStoreWarning

SCHEMES = ("redis", "rediss", "unix")
CONNECT_S = 0.5
CALL_S = 2.0  # that a call may take, looking the host up and connecting included
REST_S = 60.0  # for which a server that has failed is left alone
KEPT_S = 30 * 86400  # after which an entry leaves the server: versions that nobody uses any more have no other end
MOST_BYTES = 64 << 20  # of one file; longer ones stay in the folder

Result = TypeVar("Result")


@dataclass(frozen=True)
class Remote:
    """A server and the part of it, `space`, that belongs to those who have one secret."""

    url: str = field(repr=False)
    space: str

    def get(self, name: str) -> bytes | None:
        """The sealed file that the server has; None without one, or without an answer."""
        found = _line(self.url).ask("read", lambda client: client.get(self._key(name)))
        return found if isinstance(found, bytes) else None

    def put(self, name: str, sealed: bytes) -> None:
        """Give the server a file, if it takes it."""
        if len(sealed) <= MOST_BYTES:
            _line(self.url).ask("write", lambda client: client.set(self._key(name), sealed, ex=KEPT_S))

    def _key(self, name: str) -> str:
        return f"altbackend:{self.space}:{name}"

    def __str__(self) -> str:
        return shown(self.url)


@functools.cache
def remote(url: str, secret: bytes) -> Remote | None:
    """The server that an URL names; None for "". Raises BadOptionValue.

    A secret is asked for since what the server gives is machine code, and many servers take files from whoever reaches
    them. Files of another secret's owners are kept apart: neither takes the other's for damaged, and replaces them.
    """
    if not url:
        return None
    if url.partition("://")[0] not in SCHEMES:
        raise BadOptionValue("cache_url", shown(url), f"it starts with {', '.join(f'{s}://' for s in SCHEMES)}")
    if not secret:
        reason = "whoever can write to a shared store could run code here, so it needs a secret: set cache_key_file"
        raise BadOptionValue("cache_url", shown(url), reason)
    _line(url)
    return Remote(url, hmac.new(secret, b"altbackend shared store", hashlib.sha256).hexdigest()[:16])


def shown(url: str) -> str:
    """An URL without what may be secret: user, password, and options."""
    scheme, mark, rest = url.rpartition("://")
    return scheme + mark + rest.rpartition("@")[2].partition("?")[0]


class Line:
    """This process's calls to one server. One that has failed is left alone for a while, after one warning."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.client, self.refused = _client(url)
        self.again = {"read": 0.0, "write": 0.0}  # by time.monotonic()
        self.warned = False
        self.lock = threading.Lock()

    def ask(self, kind: str, call: Callable[[Any], Result]) -> Result | None:
        """What `call` returns of the client, or None."""
        if time.monotonic() < self.again[kind]:
            return None
        try:
            return _within(CALL_S, lambda: call(self.client))
        except Exception as cause:  # a client meets answers of any form
            self._fail(kind, cause)
            return None

    def _fail(self, kind: str, cause: Exception) -> None:
        """A server that refuses a command, as a full one does, still answers others; one that fails answers none."""
        with self.lock:
            for each in [kind] if isinstance(cause, self.refused) else self.again:
                self.again[each] = time.monotonic() + REST_S
            first, self.warned = not self.warned, True
        self.client.connection_pool.disconnect()  # an answer to come must not be taken for the next one's
        if first:
            reason = str(cause) or f"no answer within {CALL_S:g} s"
            warnings.warn(str(SharedStoreUnusable(shown(self.url), reason)), SharedStoreWarning, stacklevel=2)


def _client(url: str) -> tuple[Any, type[Exception]]:
    """A client, which connects at its first call, and the error by which a server refuses a command."""
    try:
        import redis  # noqa: PLC0415 - an extra, needed only here
        from redis.backoff import NoBackoff  # noqa: PLC0415
        from redis.retry import Retry  # noqa: PLC0415
    except ImportError:
        raise BadOptionValue(
            "cache_url", shown(url), "it needs the package redis: pip install 'altbackend[redis]'"
        ) from None
    try:
        client = redis.Redis.from_url(
            url,
            socket_connect_timeout=CONNECT_S,
            socket_timeout=CALL_S,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
        )
    except (ValueError, TypeError) as cause:
        raise BadOptionValue("cache_url", shown(url), f"it cannot be read ({cause})") from None
    return client, redis.ResponseError


def _within(seconds: float, call: Callable[[], Result]) -> Result:
    """What `call` returns or raises, if it does in time: looking up a host, or an answer that comes byte by byte, may
    take any. Raises TimeoutError; the thread then ends with its connection, or waits for the resolver and holds up
    nothing."""
    done: Future[Result] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as cause:
            done.set_exception(cause)

    threading.Thread(target=run, name="altbackend-store", daemon=True).start()
    return done.result(seconds)


def _line(url: str) -> Line:
    with _lock:  # threads that ask at once would get a line each, and warn each
        return _lines(url)


_lock = threading.Lock()
_lines = functools.cache(Line)


def _after_fork() -> None:
    """A fork has its parent's sockets, and perhaps locks that another thread held."""
    global _lock
    _lock = threading.Lock()
    _lines.cache_clear()


os.register_at_fork(after_in_child=_after_fork)
