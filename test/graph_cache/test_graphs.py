"""Cached compiled graphs: a hit gives the results of compiling, and a different graph is a miss."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from altbackend import pipeline
from altbackend.debug.trace import DecisionKind, Trace
from altbackend.disk_cache import folders
from altbackend.graph_cache import key
from altbackend.graph_cache.json_values import NotCacheable
from test import fresh

pytestmark = pytest.mark.sample(2)

T = torch.Tensor


@dataclass
class Watch:
    """Decisions of the cache, and a folder of its own."""

    folder: Path
    seen: list[tuple[str, str]] = field(default_factory=list)

    def verdicts(self) -> list[str]:
        """Since the last call."""
        verdicts_ = [verdict for verdict, _ in self.seen]
        self.last = [reason for _, reason in self.seen]
        self.seen.clear()
        return verdicts_

    def compile(self, fn: Callable[..., Any], **more: Any) -> Callable[..., Any]:
        """As a process that starts does: Dynamo knows nothing."""
        torch._dynamo.reset()
        defaults = {"strict": True, "cache_graphs": True, "warm_start": False, "cache_dir": str(self.folder)}
        options = {**defaults, **more.pop("options", {})}
        return torch.compile(fn, backend="alt", options=options, **more)


@pytest.fixture
def watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watch:
    watch_, record = Watch(tmp_path / "kept"), Trace.decision

    def decision(self: Trace, kind: DecisionKind, subject: str, verdict: str, reason: str) -> None:
        record(self, kind, subject, verdict, reason)
        if kind == "cache":
            watch_.seen.append((verdict, reason))

    monkeypatch.setattr(Trace, "decision", decision)
    return watch_


class Net(nn.Module):
    """Convolution, batch normalisation with its counters, a table of constants, a projection."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8 * 16, 5)

    def forward(self, x: T) -> T:
        y = torch.relu(self.norm(self.conv(x))).flatten(1)
        return torch.softmax(self.out(y) * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]), -1)


def training_step(watch: Watch) -> list[T]:
    torch.manual_seed(0)
    net = Net()
    x = torch.randn(2, 3, 6, 6, requires_grad=True)
    y = watch.compile(net)(x)
    (y * torch.arange(5.0)).sum().backward()
    return [y, x.grad, *(p.grad for p in net.parameters()), *net.buffers()]


def same(a: list[T], b: list[T]) -> bool:
    return len(a) == len(b) and all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_training_from_the_cache_is_bit_for_bit(watch: Watch) -> None:
    first = training_step(watch)
    assert watch.verdicts() == ["miss", "miss"]
    second = training_step(watch)
    assert watch.verdicts() == ["hit", "hit"]
    assert same(first, second)


def test_a_hit_compiles_nothing(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    first = training_step(watch)

    def translate(*_: Any) -> None:
        raise AssertionError("a graph that is kept was compiled")

    monkeypatch.setattr(pipeline, "translate", translate)
    assert same(first, training_step(watch))


def test_inference_with_work_on_parameters(watch: Watch) -> None:
    """The prologue comes from the cache and still follows its parameters."""
    torch.manual_seed(0)
    net, x = Net().eval(), torch.randn(2, 3, 6, 6)
    results = []
    for verdict in ("miss", "hit"):
        with torch.no_grad():
            net.conv.weight.fill_(0.01)
            call = watch.compile(net)
            before = call(x)
            net.conv.weight.mul_(2)
            results.append([before, call(x)])
            torch.testing.assert_close(results[-1][1], net(x))
        assert watch.verdicts() == [verdict]
    assert same(*results)
    assert not torch.equal(*results[0])


def test_dynamic_sizes_are_found_with_other_hints(watch: Watch) -> None:
    def fn(x: T) -> tuple[T, int]:
        return torch.softmax(x.reshape(-1) * x.shape[0], 0), x.shape[1] * 2

    sizes = [(5, 7), (12, 3), (40, 90)]
    inputs = [torch.randn(s) for s in sizes]
    call = watch.compile(fn, dynamic=True)
    first = [call(x) for x in inputs]
    assert watch.verdicts() == ["miss"]
    call = watch.compile(fn, dynamic=True)
    second = [call(x) for x in reversed(inputs)][::-1]
    assert watch.verdicts() == ["hit"]
    assert same([a for a, _ in first], [a for a, _ in second])
    assert [n for _, n in second] == [s[1] * 2 for s in sizes]


def test_conditions_on_sizes_are_part_of_the_key(watch: Watch) -> None:
    """Tracing that has met `x.shape[0] % 8 == 0` may have drawn conclusions that hold only there."""

    def fn(x: T, fold: bool) -> T:
        if fold and x.shape[0] % 8 == 0:
            return x.relu() + 1
        return x.relu() + 1

    watch.compile(fn, dynamic=True)(torch.randn(16, 3), False)
    watch.compile(fn, dynamic=True)(torch.randn(16, 3), True)
    assert watch.verdicts() == ["miss", "miss"]
    assert "sizes conditions" in watch.last[1]


def test_mutated_inputs_and_views(watch: Watch) -> None:
    def fn(x: T, y: T) -> T:
        x.mul_(2)
        y[1:].add_(x[0])
        return x.t() + 1

    results = []
    for verdict in ("miss", "hit"):
        x, y = torch.ones(3, 4), torch.arange(12.0).reshape(3, 4)
        results.append([watch.compile(fn)(x, y), x, y])
        assert watch.verdicts() == [verdict]
    assert same(*results)
    assert torch.equal(results[0][1], torch.full((3, 4), 2.0))


def test_constants_are_those_of_the_graph_at_hand(watch: Watch) -> None:
    def scaled(values: list[float]) -> Callable[[T], T]:
        return lambda x: x * torch.tensor(values)

    x = torch.ones(3)
    assert watch.compile(scaled([1.0, 2.0, 3.0]))(x).tolist() == [1, 2, 3]
    assert watch.compile(scaled([1.0, 2.0, 4.0]))(x).tolist() == [1, 2, 4]
    assert watch.verdicts() == ["miss", "miss"]
    assert watch.last[1].startswith("constants ")
    assert watch.compile(scaled([1.0, 2.0, 3.0]))(x).tolist() == [1, 2, 3]
    assert watch.verdicts() == ["hit"]


def test_branches_are_kept_by_their_content(watch: Watch) -> None:
    def scaled_by(factor: float) -> Callable[[T], T]:
        return lambda x: torch.cond(x.sum() > 0, lambda y: y * factor, lambda y: y - 1, (x,))

    x = torch.ones(3)
    for factor, verdict in ((2.0, "miss"), (3.0, "miss"), (2.0, "hit")):
        with torch.no_grad():
            assert watch.compile(scaled_by(factor))(x).tolist() == [factor] * 3
        assert watch.verdicts() == [verdict]


def test_bodies_are_kept_with_their_constants(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward with graphs inside graphs; a hit compiles no body either."""

    def fn(x: T) -> T:
        def inner(y: T) -> T:
            table = torch.tensor([1.0, 2.0, 3.0])
            return torch.cond(y.mean() > 1, lambda z: z * table, lambda z: z.exp(), (y,))

        return torch.cond(x.sum() > 0, inner, lambda y: y.cos() + 1, (x,))

    def results() -> list[T]:
        call = watch.compile(fn)
        given = [(torch.arange(3.0) + k).requires_grad_() for k in (-3, 0, 3)]
        outs = [call(x) for x in given]
        return [*outs, *torch.autograd.grad([y.sum() for y in outs], given)]

    first = results()
    assert watch.verdicts() == ["miss", "miss"]
    monkeypatch.setattr(pipeline, "translate", None)
    assert same(first, results())
    assert watch.verdicts() == ["hit", "hit"]
    given = [(torch.arange(3.0) + k).requires_grad_() for k in (-3, 0, 3)]
    eager = [fn(x) for x in given]
    torch.testing.assert_close(first, [*eager, *torch.autograd.grad([y.sum() for y in eager], given)])


def test_an_error_in_a_body_names_the_lines_of_this_source(watch: Watch) -> None:
    def first(x: T, i: T) -> T:
        return torch.cond(x.sum() > 0, lambda y: y[i], lambda y: y[i] * 2, (x,))

    def second(x: T, i: T) -> T:
        return torch.cond(x.sum() > 0, lambda y: y[i], lambda y: y[i] * 2, (x,))

    lines = []
    for fn in (first, second, second):
        with pytest.raises(IndexError) as error:
            watch.compile(fn)(torch.ones(4), torch.tensor([0, 9]))
        lines.append(str(error.value))
    assert lines[0] != lines[1] == lines[2]
    assert watch.verdicts() == ["miss", "miss", "hit"]


def test_errors_name_the_lines_of_this_source(watch: Watch) -> None:
    """A graph whose lines have moved is compiled anew where an error would name them."""

    def first(x: T, i: T) -> T:
        return x[i] * 2

    def second(x: T, i: T) -> T:
        return x[i] * 2

    def plain(x: T) -> T:
        return x.relu() * 2

    def plain_too(x: T) -> T:
        return x.relu() * 2

    x, i = torch.randn(4), torch.tensor([0, 9])
    lines = []
    for fn in (first, second, second):
        with pytest.raises(IndexError) as error:
            watch.compile(fn)(x, i)
        lines.append(str(error.value))
    assert lines[0] != lines[1] == lines[2]
    assert watch.verdicts() == ["miss", "miss", "hit"]
    watch.compile(plain)(x)
    watch.compile(plain_too)(x)
    assert watch.verdicts() == ["miss", "hit"]


# --- what differs is not found ---------------------------------------------------------------------------------------


def f(x: T, y: T) -> T:
    return (x * y).relu() + torch.tensor([1.0, 2.0])


def given(**more: Any) -> list[T]:
    return [torch.ones(4, 2, **more), torch.ones(4, 2, **more)]


@pytest.mark.parametrize(
    ("inputs", "options", "named"),
    [
        pytest.param([torch.ones(6, 2), torch.ones(6, 2)], {}, "inputs arg0_1", id="shape"),
        pytest.param(given(dtype=torch.float64), {}, "inputs arg0_1: torch.float32", id="dtype"),
        pytest.param([torch.ones(2, 4).t(), torch.ones(4, 2)], {}, "strides [1, 4] offset 0 now", id="stride"),
        pytest.param([torch.ones(8, 2)[4:], torch.ones(4, 2)], {}, "offset 8 now", id="offset"),
        pytest.param(given(), {"numerics": "eager"}, "options numerics: 'fast' cached, 'eager' now", id="numerics"),
        pytest.param(given(), {"fuse": False}, "options fuse", id="fuse"),
        pytest.param(given(), {"threads": 3}, "options threads: 0 cached, 3 now", id="threads"),
        pytest.param(given(), {"isa": "generic"}, "options isa", id="isa"),
    ],
)
def test_one_difference_is_a_miss_that_names_it(
    watch: Watch, inputs: list[T], options: dict[str, Any], named: str
) -> None:
    watch.compile(f)(*given())
    torch.testing.assert_close(watch.compile(f, options=options)(*inputs), f(*inputs))
    assert watch.verdicts() == ["miss", "miss"]
    assert named in watch.last[1]
    watch.compile(f, options=options)(*inputs)
    watch.compile(f)(*given())
    assert watch.verdicts() == ["hit", "hit"]


@pytest.mark.parametrize("name", ["torch", "triton", "altbackend", "python"])
def test_another_version_is_a_miss(watch: Watch, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    watch.compile(f)(*given())
    now = key.versions()
    monkeypatch.setattr(key, "versions", lambda: {**now, name: "another"})
    watch.compile(f)(*given())
    assert watch.verdicts() == ["miss", "miss"]
    assert f"versions {name}" in watch.last[1]


def test_training_and_inference_are_different_jobs(watch: Watch) -> None:
    x = torch.ones(3, requires_grad=True)
    watch.compile(torch.exp)(x)
    with torch.no_grad():
        watch.compile(torch.exp)(x)
    assert watch.verdicts() == ["miss", "miss"]


class Renamer:
    """A pass of the user, with or without a version."""

    def __init__(self, version: object) -> None:
        self.version = version

    def uuid(self) -> object:
        return self.version

    def __call__(self, graph: torch.fx.Graph) -> None:
        for n in graph.nodes:
            if n.target is torch.ops.aten.relu.default:
                n.target = torch.ops.aten.abs.default


def test_passes_of_the_user_count_by_their_uuid(watch: Watch) -> None:
    x = -torch.ones(4, 2)
    for version, verdict in ((1, "miss"), (2, "miss"), (1, "hit"), (None, "not cached")):
        call = watch.compile(torch.relu, options={"post_grad_custom_pre_pass": Renamer(version)})
        assert torch.equal(call(x), x.abs())
        assert watch.verdicts() == [verdict]
    assert "uuid" in watch.last[0]


def test_what_has_no_text_form_is_compiled_every_time(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    def describe(x: Any) -> str:
        raise NotCacheable("a value of its own kind")

    monkeypatch.setattr(key, "describe", describe)
    for _ in range(2):
        assert torch.equal(watch.compile(f)(*given()), f(*given()))
    assert watch.verdicts() == ["not cached", "not cached"]
    assert watch.last == ["a value of its own kind"] * 2
    assert entries(watch) == []


def test_the_option_and_debugging_switch_it_off(watch: Watch, tmp_path: Path) -> None:
    watch.compile(f)(*given())
    for options in ({"cache_graphs": False}, {"verify_ir": True}, {"debug_dir": str(tmp_path / "debug")}):
        watch.compile(f, options=options)(*given())
    assert watch.verdicts() == ["miss", *["not cached"] * 3]


# --- the folder ------------------------------------------------------------------------------------------------------


def entries(watch: Watch) -> list[Path]:
    return sorted(watch.folder.glob("graphs/*/*.graph"))


def test_a_damaged_entry_is_replaced(watch: Watch) -> None:
    watch.compile(f)(*given())
    (path,) = entries(watch)
    content = path.read_bytes()
    for damaged in (b"", content[: len(content) // 2], content.replace(b"relu", b"rela"), b"\0" * len(content)):
        path.write_bytes(damaged)
        assert torch.equal(watch.compile(f)(*given()), f(*given()))
        assert path.read_bytes() == content
    assert watch.verdicts() == ["miss"] * 5


def test_an_entry_of_another_graph_is_none(watch: Watch) -> None:
    watch.compile(f)(*given())
    (own,) = entries(watch)
    watch.compile(f)(torch.ones(2, 2), torch.ones(2, 2))
    (other,) = set(entries(watch)) - {own}
    shutil.copy(other, own)
    assert torch.equal(watch.compile(f)(*given()), f(*given()))
    assert watch.verdicts() == ["miss"] * 3


def test_machine_code_that_is_gone_or_broken_is_built_again(watch: Watch) -> None:
    watch.compile(f)(*given())
    for path in watch.folder.glob("cpp/*/*"):
        path.unlink()
    assert torch.equal(watch.compile(f)(*given()), f(*given()))
    assert watch.verdicts() == ["miss", "hit"]


@pytest.mark.parametrize("code", [errno.EROFS, errno.ENOSPC, errno.EACCES])
def test_a_disk_that_takes_nothing_costs_the_caching_only(
    watch: Watch, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(folders, "write_atomically", refuse)
    monkeypatch.setattr(folders, "FileLock", refuse)
    assert torch.equal(watch.compile(f)(*given()), f(*given()))
    assert watch.verdicts() == ["miss", "not stored"]
    assert os.strerror(code) in watch.last[1]


def test_a_file_in_the_place_of_the_folder(watch: Watch) -> None:
    watch.folder.mkdir()
    (watch.folder / "graphs").write_text("not a folder")
    for _ in range(2):
        assert torch.equal(watch.compile(f)(*given()), f(*given()))
    assert watch.verdicts() == ["miss", "not stored"] * 2


def test_a_folder_removed_while_compiling(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    translate = pipeline.translate

    def remove_first(*args: Any) -> Any:
        shutil.rmtree(watch.folder)
        return translate(*args)

    monkeypatch.setattr(pipeline, "translate", remove_first)
    assert torch.equal(watch.compile(f)(*given()), f(*given()))
    assert watch.verdicts() == ["miss"]
    assert torch.equal(watch.compile(f)(*given()), f(*given()))
    assert watch.verdicts() == ["hit"]


PROCESSES = 16

# One process that has imported what compiles starts the others, none of which has compiled what it is asked for.
PROCESS = """
import os, sys, torch
from altbackend.debug.trace import Trace
count, folder = int(sys.argv[1]), sys.argv[2]
seen, record = [], Trace.decision
def decision(self, kind, subject, verdict, reason):
    record(self, kind, subject, verdict, reason)
    if kind == "cache":
        seen.append(verdict)
Trace.decision = decision
def a(x): return torch.softmax(x * 2, -1) + x.sum(0)
def b(x): return torch.nn.functional.layer_norm(x, (16,)).relu()
def c(x): return torch.nn.functional.gelu(x @ x.t()).mean()
def d(x): return x.cumsum(0) * torch.sigmoid(x)
def e(x): return torch.where(x > 0.5, x.exp(), -x).amax(1)
torch.compile(lambda x: x + 1, backend="alt", options={"cache_graphs": False})(torch.ones(3))  # imports all there is
go = os.pipe()
for n in range(count):
    if os.fork() == 0:
        os.close(go[1])
        os.read(go[0], 1)  # until all are there
        x = torch.linspace(0, 1, 128).reshape(8, 16)
        words = []
        for k in range(5):
            torch._dynamo.reset()
            seen.clear()
            fn = (a, b, c, d, e)[(k + n) % 5]
            options = {"strict": True, "cache_graphs": True, "cache_dir": folder}
            y = torch.compile(fn, backend="alt", options=options)(x)
            torch.testing.assert_close(y, fn(x))
            # a captured graph that is found asks for no compiled one
            words.append(f"{fn.__name__} {seen[-1] if seen else 'hit'} {y.double().sum().item().hex()}")
        os.write(1, "".join(f"{w}\\n" for w in words).encode())
        os._exit(0)
os.close(go[0])
os.close(go[1])
sys.exit(max(os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(count)))
"""


@pytest.mark.timeout(400)
def test_of_processes_that_start_together_one_compiles_each_graph(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = fresh.run(["-c", PROCESS, str(PROCESSES), str(tmp_path)], 380, env=environment)
    assert done.returncode == 0, done.stderr
    said = [line.split() for line in done.stdout.splitlines()]
    for graph in "abcde":
        verdicts = [verdict for name, verdict, _ in said if name == graph]
        assert sorted(verdicts) == ["hit"] * (PROCESSES - 1) + ["miss"]
        assert len({result for name, _, result in said if name == graph}) == 1
    assert len(list((tmp_path / "graphs" / "locks").iterdir())) <= 5
    assert list(tmp_path.rglob("*.tmp")) == []
