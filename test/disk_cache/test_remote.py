"""The store that hosts share: a real Redis server, and servers that do everything wrong. Results never suffer."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from altbackend import pipeline
from altbackend.cli import cache as cli
from altbackend.cli import options_table
from altbackend.compile_pool import cpp
from altbackend.config.resolve import resolve
from altbackend.disk_cache import remote, seal
from altbackend.disk_cache.storage import Store, open_store
from altbackend.errors import BadOptionValue, SharedStoreWarning

redis = pytest.importorskip("redis", reason="the package redis is not installed")
needs_server = pytest.mark.skipif(shutil.which("redis-server") is None, reason="redis-server is not installed")
pytestmark = pytest.mark.timeout(300)
SECRET = b"a secret of more than 16 bytes"
T = torch.Tensor


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    yield
    remote._connections.cache_clear()
    remote.remote.cache_clear()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Server:
    """A real server on a port of its own; nothing of it outlives the test."""

    def __init__(self, folder: Path) -> None:
        self.port, self.folder = free_port(), folder
        self.url = f"redis://127.0.0.1:{self.port}/3"
        self.client = redis.Redis(port=self.port, db=3)
        self.start()

    def start(self) -> None:
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", str(self.folder)]
        self.process = subprocess.Popen(["redis-server", *options], stdout=subprocess.DEVNULL)
        for _ in range(200):
            with contextlib.suppress(redis.ConnectionError):
                self.client.ping()
                return
            time.sleep(0.05)
        raise AssertionError("redis-server does not answer")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def held_by(server: Server) -> list[bytes]:
    """Keys of a server."""
    return list(server.client.scan_iter())


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path)
    yield made
    made.client.close()
    made.kill()


@pytest.fixture
def options(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Options of a host with a folder of its own and a server."""

    def make(url: str, host: str = "a", secret: bytes = SECRET, **more: Any) -> dict[str, Any]:
        file = tmp_path / f"secret-{secret[:4].hex()}"
        file.write_bytes(secret)
        folder = {"cache_dir": str(tmp_path / host), "cache_url": url, "cache_key_file": str(file)}
        return {"strict": True, "cache_graphs": True, **folder, **more}

    return make


def f(x: T) -> T:
    return torch.softmax(x * 2, -1).sum(0) + torch.relu(x).amax(0)


def compiled(options: dict[str, Any]) -> T:
    """A result as a process gets it that starts: Dynamo knows nothing."""
    torch._dynamo.reset()
    x = torch.linspace(-1, 1, 128).reshape(8, 16)
    y: T = torch.compile(f, backend="alt", options=options)(x)
    torch.testing.assert_close(y, f(x))
    return y


def refuse(*_: Any, **__: Any) -> Any:
    raise AssertionError("compiled")


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From the call on nothing may be translated or built."""

    def forbid() -> None:
        monkeypatch.setattr(pipeline, "translate", refuse)
        monkeypatch.setattr(cpp, "failure", refuse)

    return forbid


# --- a server that serves --------------------------------------------------------------------------------------------


@needs_server
@pytest.mark.parametrize("warm_start", [False, True])
def test_what_one_host_compiles_another_finds(
    server: Server, options: Callable[..., dict[str, Any]], no_compiler: Callable[[], None], warm_start: bool
) -> None:
    first = compiled(options(server.url, "a", warm_start=warm_start))
    store = open_store(resolve(None, options(server.url, "a")))
    names = {
        p.relative_to(store.folder).as_posix()
        for p in store.folder.rglob("*.*")
        if p.suffix in cli.SEALED and p.suffix != ".code"
    }
    assert {bytes(k).decode().split(":", 2)[2] for k in held_by(server)} == names
    assert len(names) == (5 if warm_start else 3)
    assert all(0 < server.client.ttl(k) <= remote.LIFETIME_S for k in held_by(server))
    no_compiler()
    assert torch.equal(compiled(options(server.url, "b", warm_start=warm_start)), first)
    server.kill()  # what was found is in the folder now
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(compiled(options(server.url, "b", warm_start=warm_start)), first)


@needs_server
def test_another_secret_is_another_store(server: Server, options: Callable[..., dict[str, Any]]) -> None:
    compiled(options(server.url, "a"))
    names = {k: server.client.get(k) for k in held_by(server)}
    compiled(options(server.url, "b", b"another secret of 16 bytes"))
    assert len(held_by(server)) == 2 * len(names)
    assert {k: server.client.get(k) for k in names} == names


@needs_server
def test_what_others_have_put_there_is_not_used_and_replaced(
    server: Server, options: Callable[..., dict[str, Any]]
) -> None:
    """Content without the secret's seal, damaged content, another name's content, and values of another type."""
    compiled(options(server.url, "a"))
    right = {k: server.client.get(k) for k in held_by(server)}
    library = next(k for k in right if k.endswith(b".so"))
    name = library.decode().split(":", 2)[2]
    changes = {
        "unsealed": lambda k: seal.seal(name, right[k][: -seal.BYTES], b""),
        "other secret": lambda k: seal.seal(name, right[k][: -seal.BYTES], b"somebody else's secret"),
        "cut": lambda k: right[k][: len(right[k]) // 2],
        "empty": lambda k: b"",
        "other name": lambda k: right[next(o for o in right if o != k)],
    }
    for n, change in enumerate(changes.values()):
        for k in right:
            server.client.set(k, change(k))
        compiled(options(server.url, f"b{n}"))
        assert {k: server.client.get(k)[-seal.BYTES :] for k in right if k != library} == {
            k: v[-seal.BYTES :] for k, v in right.items() if k != library
        }
        store = open_store(resolve(None, options(server.url, "nobody")))
        assert seal.is_valid(name, server.client.get(library), store.secret)
    for k in right:
        server.client.delete(k)
        server.client.lpush(k, "a list")
    with pytest.warns(SharedStoreWarning, match="WRONGTYPE"):
        compiled(options(server.url, "c"))


@needs_server
def test_a_server_that_is_killed_and_comes_back(
    server: Server, options: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    host = (f"h{n}" for n in itertools.count())
    compiled(options(server.url, next(host)))
    server.kill()
    with pytest.warns(SharedStoreWarning, match=r"127.0.0.1.*left alone.*(refused|closed)"):
        compiled(options(server.url, next(host)))
    compiled(options(server.url, next(host)))  # warnings are errors: there is no second one
    server.start()  # empty
    compiled(options(server.url, next(host)))
    assert held_by(server) == []  # it is left alone
    line = remote._connection(server.url)
    line.resume = dict.fromkeys(line.resume, 0.0)  # time has passed
    compiled(options(server.url, next(host)))
    assert len(held_by(server)) == 5


@needs_server
def test_a_full_server_is_still_read(server: Server, tmp_path: Path) -> None:
    store = Store(tmp_path / "a", SECRET, shared=remote.remote(server.url, SECRET))
    store.write("cpp/a/before.so", b"before")
    server.client.config_set("maxmemory", "1")
    with pytest.warns(SharedStoreWarning, match="maxmemory"):
        store.write("cpp/a/after.so", b"after")
    elsewhere = Store(tmp_path / "b", SECRET, shared=store.shared)
    assert elsewhere.read("cpp/a/before.so") == b"before"
    assert elsewhere.read("cpp/a/after.so") is None
    assert store.read("cpp/a/after.so") == b"after"


@needs_server
def test_a_wrong_password_is_told_and_not_shown(server: Server, tmp_path: Path) -> None:
    server.client.config_set("requirepass", "right")
    url = server.url.replace("//", "//:hunter2@")
    store = Store(tmp_path, SECRET, shared=remote.remote(url, SECRET))
    with pytest.warns(SharedStoreWarning, match="password") as caught:
        store.write("cpp/a/a.so", b"content")
    assert "hunter2" not in str(caught[0].message)
    assert store.read("cpp/a/a.so") == b"content"
    remote._connections.cache_clear()
    right = Store(tmp_path, SECRET, shared=remote.remote(server.url.replace("//", "//:right@"), SECRET))
    right.write("cpp/a/a.so", b"content")
    right.path("cpp/a/a.so").unlink()
    assert right.read("cpp/a/a.so") == b"content"


@needs_server
def test_many_threads_ask_at_once(server: Server, tmp_path: Path) -> None:
    shared = remote.remote(server.url, SECRET)
    writer = Store(tmp_path / "a", SECRET, shared=shared)
    names = [f"cpp/a/{n}.so" for n in range(50)]
    for name in names:
        writer.write(name, name.encode())
    contents: dict[str, bytes | None] = {}
    reader = Store(tmp_path / "b", SECRET, shared=shared)
    threads = [threading.Thread(target=lambda n=n: contents.update({n: reader.read(n)})) for n in names]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert contents == {name: name.encode() for name in names}


# --- servers that do not ---------------------------------------------------------------------------------------------


def silent(c: socket.socket) -> None:
    c.recv(1)
    time.sleep(30)


def closes(c: socket.socket) -> None:
    c.recv(1)


def garbage(c: socket.socket) -> None:
    c.recv(1)
    c.sendall(bytes(range(256)) * 64)
    time.sleep(1)


def nonsense(c: socket.socket) -> None:
    """Right in form: a number, where a text belongs."""
    while c.recv(4096):
        c.sendall(b":1\r\n")


def drips(c: socket.socket) -> None:
    """A very long answer, so slowly that no single read is ever late."""
    c.recv(1)
    c.sendall(b"$1000000000\r\n")
    with contextlib.suppress(OSError):
        while True:
            c.sendall(b"x")
            time.sleep(0.02)


def hangs_up_within(c: socket.socket) -> None:
    c.recv(1)
    c.sendall(b"$1000\r\nsome")


class Impostor:
    """A server that does one thing with every connection, and counts them."""

    def __init__(self, act: Callable[[socket.socket], None]) -> None:
        self.act, self.connections = act, 0
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self.socket.getsockname()[1]}/0"
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.socket.accept()
                self.connections += 1
                threading.Thread(target=self.one, args=(connection,), daemon=True).start()

    def one(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            self.act(connection)


def store_threads() -> int:
    return sum(t.name == "altbackend-store" for t in threading.enumerate())


@pytest.mark.sample(2)
@pytest.mark.parametrize("act", [silent, closes, garbage, drips, hangs_up_within])
def test_a_server_that_fails_costs_one_warning_and_bounded_time(
    options: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch, act: Callable[[socket.socket], None]
) -> None:
    monkeypatch.setattr(remote, "CALL_S", 1.0)
    impostor = Impostor(act)
    store = open_store(resolve(None, options(impostor.url)))
    assert store.shared is not None
    start = time.monotonic()
    with pytest.warns(SharedStoreWarning):
        store.shared.put("cpp/a/a.so", b"content")
    assert time.monotonic() - start < 3
    assert store.shared.get("cpp/a/a.so") is None
    compiled(options(impostor.url))  # warnings are errors: there is no second one
    compiled(options(impostor.url, "b"))
    impostor.socket.close()
    assert impostor.connections == 1
    for _ in range(100):
        if store_threads() == 0:
            break
        time.sleep(0.05)
    assert store_threads() == 0


def test_an_answer_that_is_no_text_is_a_miss(options: Callable[..., dict[str, Any]]) -> None:
    impostor = Impostor(nonsense)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SharedStoreWarning)
        compiled(options(impostor.url))
    assert impostor.connections >= 1
    impostor.socket.close()


def test_nobody_there(options: Callable[..., dict[str, Any]]) -> None:
    with pytest.warns(SharedStoreWarning, match="refused"):
        compiled(options(f"redis://127.0.0.1:{free_port()}/0"))


def test_a_name_that_takes_long_to_look_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = threading.Event()

    def slow(*_: Any) -> Any:
        done.wait(30)
        raise OSError("no such host")

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    monkeypatch.setattr(remote, "CALL_S", 0.3)
    store = Store(tmp_path, SECRET, shared=remote.remote("redis://cache.example:6379/0", SECRET))
    start = time.monotonic()
    with pytest.warns(SharedStoreWarning, match=r"cache\.example.*no answer within 0\.3 s"):
        store.write("cpp/a/a.so", b"content")
    assert time.monotonic() - start < 2
    assert store.read("cpp/a/a.so") == b"content"
    done.set()


def test_a_file_too_long_for_the_server_stays_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "MOST_BYTES", 100)
    store = Store(tmp_path, SECRET, shared=remote.remote(f"redis://127.0.0.1:{free_port()}", SECRET))
    store.write("cpp/a/a.so", bytes(1000))  # no warning: nobody was asked
    assert store.read("cpp/a/a.so") == bytes(1000)


# --- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "secret", "named"),
    [
        ("redis://:hunter2@host:1/0?password=hunter2", b"", "cache_key_file"),
        ("http://:hunter2@host", SECRET, "redis://"),
        ("hunter2@host", SECRET, "redis://"),
        ("redis://:hunter2@host:port/0", SECRET, "cannot be read"),
    ],
)
def test_an_url_that_cannot_be_used_is_an_error_without_its_password(url: str, secret: bytes, named: str) -> None:
    with pytest.raises(BadOptionValue, match=named) as caught:
        remote.remote(url, secret)
    assert "hunter2" not in str(caught.value)
    assert "host" in str(caught.value)


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(BadOptionValue, match=r"pip install 'altbackend\[redis\]'"):
        remote.remote("redis://host", SECRET)


def test_an_url_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALTBACKEND_CACHE_URL", "redis://:hunter2@host")
    shared = remote.remote("redis://:hunter2@host", SECRET)
    texts = [repr(resolve()), repr(Store(Path(), SECRET, shared=shared)), str(shared), options_table.text_page()]
    assert [t for t in texts if "hunter2" in t] == []
    assert str(shared) == "redis://host"
