"""A store that hosts share: a Redis server, asked for files that the folder lacks, and sent newly compiled files.

The server stores sealed files; `Store` accepts only those with a valid seal. Whatever the server does, a call ends in
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
from dataclasses import field
from typing import Protocol, TypeVar

from altbackend.lazy_dataclass import dataclass

from ..errors import BadOptionValue, SharedStoreUnusable, SharedStoreWarning

SCHEMES = ("redis", "rediss", "unix")
CONNECT_S = 0.5
CALL_S = 2.0  # limit of a call, looking the host up and connecting included
PAUSE_S = 60.0  # time for which a server that failed is left alone
LIFETIME_S = 30 * 86400  # lifetime of an entry on the server: nothing else removes versions that are no longer used
MOST_BYTES = 64 << 20  # largest file; larger ones stay in the folder

Result = TypeVar("Result")


@dataclass(frozen=True)
class Remote:
    """A server, and the part of it, `space`, that belongs to the owners of one secret."""

    url: str = field(repr=False)
    space: str

    def get(self, name: str) -> bytes | None:
        """Return the sealed file that the server has; None if there is none, or no answer."""
        content = _connection(self.url).ask("read", lambda client: client.get(self._key(name)))
        return content if isinstance(content, bytes) else None

    def put(self, name: str, sealed: bytes) -> None:
        """Send the server a file. Do nothing if the file is too large or the server does not answer."""
        if len(sealed) <= MOST_BYTES:
            _connection(self.url).ask("write", lambda client: client.set(self._key(name), sealed, ex=LIFETIME_S))

    def _key(self, name: str) -> str:
        return f"altbackend:{self.space}:{name}"

    def __str__(self) -> str:
        return shown(self.url)


@functools.cache
def remote(url: str, secret: bytes) -> Remote | None:
    """Return the server that a URL names; None for "". Raise BadOptionValue.

    A secret is required because the server returns machine code, and many servers accept files from anybody who
    reaches them. Each secret has its own key space, so that users with different secrets do not replace each
    other's files.
    """
    if not url:
        return None
    if url.partition("://")[0] not in SCHEMES:
        raise BadOptionValue("cache_url", shown(url), f"it starts with {', '.join(f'{s}://' for s in SCHEMES)}")
    if not secret:
        reason = "users who can write to a shared store could run code here, so it needs a secret: set cache_key_file"
        raise BadOptionValue("cache_url", shown(url), reason)
    _connection(url)
    return Remote(url, hmac.new(secret, b"altbackend shared store", hashlib.sha256).hexdigest()[:16])


def shown(url: str) -> str:
    """Return a URL without its user, password and options, which may be secret."""
    scheme, mark, rest = url.rpartition("://")
    return scheme + mark + rest.rpartition("@")[2].partition("?")[0]


class _Pool(Protocol):
    def disconnect(self) -> None: ...


class _Client(Protocol):
    """A client of redis-py, as far as it is used here."""

    connection_pool: _Pool

    def get(self, name: str) -> object: ...
    def set(self, name: str, value: bytes, *, ex: int) -> object: ...


class Connection:
    """This process's calls to one server. A server that fails is left alone for a while, after one warning."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.client, self.refusal = _client(url)
        self.resume = {"read": 0.0, "write": 0.0}  # the next time to ask, by time.monotonic()
        self.warned = False
        self.lock = threading.Lock()

    def ask(self, kind: str, call: Callable[[_Client], Result]) -> Result | None:
        """Return the result of `call` on the client, or None."""
        if time.monotonic() < self.resume[kind]:
            return None
        try:
            return _within(CALL_S, lambda: call(self.client))
        except Exception as cause:  # a client can raise any error on malformed answers
            self._fail(kind, cause)
            return None

    def _fail(self, kind: str, cause: Exception) -> None:
        """Pause commands: a server that refuses one, as a full one does, still answers others; else pause all."""
        with self.lock:
            for paused in [kind] if isinstance(cause, self.refusal) else self.resume:
                self.resume[paused] = time.monotonic() + PAUSE_S
            first, self.warned = not self.warned, True
        self.client.connection_pool.disconnect()  # a late answer must not be taken for that of the next call
        if first:
            reason = str(cause) or f"no answer within {CALL_S:g} s"
            warnings.warn(str(SharedStoreUnusable(shown(self.url), reason)), SharedStoreWarning, stacklevel=2)


def _client(url: str) -> tuple[_Client, type[Exception]]:
    """Return a client, which connects at its first call, and the error type of refused commands."""
    try:
        import redis  # noqa: PLC0415 - an optional dependency, needed only here
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
    """Return or raise the outcome of `call` if it ends in time. Raise TimeoutError otherwise.

    Looking up a host, or an answer that comes byte by byte, may take any time. After a timeout the thread ends with
    its connection, or waits for the resolver without blocking anything.
    """
    done: Future[Result] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as cause:
            done.set_exception(cause)

    threading.Thread(target=run, name="altbackend-store", daemon=True).start()
    return done.result(seconds)


def _connection(url: str) -> Connection:
    with _lock:  # threads that ask at once would make a connection each, and warn each
        return _connections(url)


_lock = threading.Lock()
_connections = functools.cache(Connection)


def _after_fork() -> None:
    """Drop the connections after a fork: it has its parent's sockets, and perhaps locks that another thread held."""
    global _lock
    _lock = threading.Lock()
    _connections.cache_clear()


os.register_at_fork(after_in_child=_after_fork)
