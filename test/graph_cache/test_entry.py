"""Entries: nothing but what was written is ever read, and code of a GPU survives the way through the file."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from altbackend import decomp, pipeline
from altbackend.compat import torch_api
from altbackend.compiled.artifact import Body, Code
from altbackend.config.options import resolve
from altbackend.debug.trace import Trace
from altbackend.disk_cache.storage import Store
from altbackend.graph_cache import entry, entry_files, key, lookup, small_constants
from altbackend.graph_cache.json_values import NotCacheable, decode, encode
from altbackend.pipeline import Job
from altbackend.schedule.device import H200

T = torch.Tensor
FILE_MUTATIONS, TREE_MUTATIONS = 3000, 1000


def traced(fn: Callable[..., Any], *shapes: tuple[int, ...], device: str = "cpu") -> GraphModule:
    with FakeTensorMode():
        fakes = [torch.empty(s, device=device) for s in shapes]
        return make_fx(fn, decomposition_table=decomp.table())(*fakes)


def network(x: T, w: T, b: T) -> tuple[T, T]:
    y = torch.nn.functional.gelu(torch.addmm(b, x, w.t()))
    return torch.softmax(y, -1), y.sum(0)


SHAPES = ((6, 8), (10, 8), (10,))
STATIC = Job("inference", (1, 2))


def made(gm: GraphModule, job: Job = STATIC, **options: Any) -> Code:
    cfg = resolve(options={"strict": True, "freezing": True, **options})
    return pipeline.translate(gm, cfg, Trace("graph", cfg), job)


def alike(a: Code, b: Code) -> bool:
    prologues = [None if c.prologue is None else (c.prologue.code, _calls(c.prologue)) for c in (a, b)]
    return replace(a, prologue=None) == replace(b, prologue=None) and prologues[0] == prologues[1]


def _calls(gm: GraphModule) -> list[Any]:
    return [(n.name, n.op, n.target if n.op == "call_function" else "") for n in gm.graph.nodes]


def test_a_file_that_was_changed_anywhere_is_no_entry(tmp_path: Path) -> None:
    code = made(traced(network, *SHAPES))
    assert code.prologue is not None
    place = entry_files.Place(Store(tmp_path), "family", "k" * 64)
    held = {"code": entry.write(code, {}), "lines": ""}
    assert entry_files.write(place, held, {}) == ""
    whole = place.entry.read_bytes()
    kept = entry_files.read(place)
    assert kept is not None
    dice = random.Random(0)
    for _ in range(FILE_MUTATIONS):
        changed = _mutated(whole, dice)
        place.entry.write_bytes(changed)
        assert (entry_files.read(place) is None) == (changed != whole)
    other = replace(place, key="j" * 64)
    other.entry.write_bytes(whole)
    assert entry_files.read(other) is None
    place.entry.write_bytes(whole)
    assert entry_files.read(place) == kept


def _mutated(whole: bytes, dice: random.Random) -> bytes:
    at, length = dice.randrange(len(whole)), dice.choice((1, 1, 2, 16, 4096))
    match dice.randrange(5):
        case 0:
            return whole[:at]
        case 1:
            return whole[:at] + dice.randbytes(length) + whole[at + length :]
        case 2:
            return whole[:at] + whole[at + length :]
        case 3:
            return whole[:at] + bytes([whole[at] ^ (1 << dice.randrange(8))]) + whole[at + 1 :]
        case _:
            return whole[:at] + dice.randbytes(length) + whole[at:]


def test_an_entry_of_another_structure_raises_what_a_hit_expects(tmp_path: Path) -> None:
    """Entries of a writer that had other ideas: their checksum holds, their fields do not."""
    gm = traced(network, *SHAPES)
    held = json.loads(json.dumps(entry.write(made(traced(network, *SHAPES)), {})))
    dice = random.Random(1)
    refused = 0
    for _ in range(TREE_MUTATIONS):
        changed = copy.deepcopy(held)
        _change_somewhere(changed, dice)
        try:
            assert isinstance(entry.read(changed, gm), Code)
        except ValueError:
            refused += 1
    assert refused > TREE_MUTATIONS // 2


def _change_somewhere(tree: Any, dice: random.Random) -> None:
    """Replace, drop or add one item of a tree of dicts and lists."""
    inner = [v for v in (tree.values() if isinstance(tree, dict) else tree) if isinstance(v, (dict, list)) and v]
    if inner and dice.random() < 0.7:
        _change_somewhere(dice.choice(inner), dice)
        return
    where = dice.choice(list(tree)) if isinstance(tree, dict) else dice.randrange(len(tree))
    match dice.randrange(3):
        case 0:
            del tree[where]
        case 1:
            tree[where] = dice.choice((None, -1, 3.5, "", "x", [], {}, [[1]], {"node": "nowhere"}, {"op": ["a"]}))
        case _ if isinstance(tree, dict):
            tree["more"] = 1
        case _:
            tree.append(tree[where])


def test_an_entry_that_cannot_be_bound_is_compiled_anew(tmp_path: Path) -> None:
    gm, cfg = traced(network, *SHAPES), resolve(options={"cache_graphs": True, "cache_dir": str(tmp_path)})
    asked: list[Code] = []

    def bind(code: Code) -> int:
        asked.append(code)
        if len(asked) == 2:
            raise OSError("a library that cannot be opened")
        return len(asked)

    def build(code: Code, around: Any) -> int:
        with around:
            return bind(code)

    def through(trace: Trace) -> int:
        fresh = traced(network, *SHAPES)
        return lookup.through_cache(fresh, cfg, trace, {}, lambda: made(gm), bind, build)

    assert through(Trace("first", cfg)) == 1
    trace = Trace("second", cfg)
    assert through(trace) == 3  # once more by a hit of the second look, after the lock is had
    assert [d.verdict for d in trace.decisions if d.kind == "cache"] == ["unusable", "hit"]


# --- text forms ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "x",
    [
        None,
        True,
        3,
        -0.0,
        float("inf"),
        1e-300,
        complex(1, -2),
        "text",
        (1, [2.5, None], {"a": (True,)}),
        slice(None, 3, 2),
        (..., slice(0, None, 2)),
        torch.bfloat16,
        torch.strided,
        torch.channels_last,
        torch.device("cuda", 1),
        torch.ops.aten.add.Tensor,
        torch.ops.aten.relu.default,
        torch.ops.higher_order.cond,
        torch.sym_float,
    ],
    ids=lambda x: getattr(x, "__name__", str(x)) if callable(x) else str(x),
)
def test_values_come_back_as_they_were(x: Any) -> None:
    again = decode(json.loads(json.dumps(encode(x))))
    assert (type(again), repr(again)) == (type(x), repr(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64], ids=str)
@pytest.mark.parametrize("sizes", [(), (3, 2), (0, 4)], ids=str)
def test_small_tensors_come_back_as_they_were(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.tensor(torch.arange(math.prod(sizes)).reshape(sizes).tolist(), dtype=dtype).reshape(sizes)
    again = small_constants.read(json.loads(json.dumps(small_constants.write(x))))
    assert (again.dtype, again.shape, again.stride()) == (x.dtype, x.shape, x.stride())
    assert torch.equal(again, x)


def test_tensors_that_are_not_written_down() -> None:
    for x in (torch.zeros(1 << 15), torch.zeros(4, 4).t(), torch.zeros(2, requires_grad=True)):
        assert small_constants.write(x) is None
    with pytest.raises(ValueError, match="bytes for"):
        small_constants.read({"dtype": "float32", "sizes": [2], "content": "AAAA"})


def test_equal_numbers_of_other_types_have_other_texts() -> None:
    texts = [json.dumps(encode(x)) for x in (1, 1.0, True, "1", (1,), [1], 0, 0.0, -0.0, False, None)]
    assert len(set(texts)) == len(texts)


@pytest.mark.parametrize("x", [object(), lambda y: y, torch.ones(2), torch.Generator()], ids=lambda x: type(x).__name__)
def test_what_has_no_text_form_says_so(x: Any) -> None:
    with pytest.raises(NotCacheable, match="text form"):
        encode(x)


# --- a GPU -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("cuda_name", "a GPU"), ("cuda_properties", asdict(H200))):
        monkeypatch.setattr(torch_api, name, lambda device, value=value: value)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("kind", ["inference", "forward", "backward"])
def test_code_of_a_gpu_comes_back_as_it_was(tmp_path: Path, kind: str) -> None:
    cfg = resolve(options={"strict": True, "cache_graphs": True, "cache_dir": str(tmp_path), "cudagraphs": True})
    job = Job(kind, (1, 2))
    found: list[Code] = []
    verdicts = []
    for _ in range(2):
        gm, trace = traced(scaled, (64, 72), (9, 72), (9,), device="cuda"), Trace("graph", cfg)

        def make(gm: GraphModule = gm) -> Code:
            return made(gm, job, cudagraphs=True)

        def build(code: Code, around: Any) -> Code:
            with around:
                return code

        found.append(lookup.through_cache(gm, cfg, trace, {"kind": kind}, make, lambda code: code, build))
        verdicts += [d.verdict for d in trace.decisions if d.kind == "cache"]
    assert verdicts == ["miss", "hit"]
    assert alike(*found)
    code = found[1]
    assert code.device == torch.device("cuda", 0)
    assert code.jobs
    assert all(j.key == k.key and j.source in code.kernel_text() for j, k in zip(code.jobs, found[0].jobs, strict=True))
    assert code.recording is not None
    assert code.recording.refusal == ""
    assert (code.prologue is None) == (kind != "inference")


def scaled(x: T, w: T, b: T) -> tuple[T, T]:
    """Part of the work is on parameters, and is a prologue in inference."""
    y = torch.nn.functional.gelu(torch.addmm(b, x, (w * 2).t()))
    return torch.softmax(y, -1), x.sum(0)


def test_code_with_bodies_comes_back_as_it_was() -> None:
    inner = Code(torch.device("cpu"), "text", 1, 0, "kernels", names_lines=True, kept=(0,))
    middle = Code(torch.device("cpu"), "more", 0, 1, bodies=(Body(("const_b",), inner),))
    code = Code(torch.device("cpu"), "outer", 2, 1, "kernels too", bodies=(Body(("const_a", "const_c"), middle),))
    held = json.loads(json.dumps(entry.write(code, {})))
    again = entry.read(held, GraphModule(torch.nn.Module(), torch.fx.Graph()))
    assert again == code
    assert [c.python for c in again.whole()] == ["outer", "more", "text"]
    assert not entry.takes_constants(held)
    held["bodies"][0]["code"]["bodies"][0]["code"]["bound"]["const_d"] = {"attribute": "table"}
    assert entry.takes_constants(held)


@pytest.mark.usefixtures("gpu")
def test_another_gpu_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    gm = traced(scaled, (64, 72), (9, 72), (9,), device="cuda")
    before = key.parts_of(gm, resolve(), {})
    monkeypatch.setattr(torch_api, "cuda_name", lambda device: "another GPU")
    after = key.parts_of(gm, resolve(), {})
    assert key.key_of(before) != key.key_of(after)
    assert key.explain_miss(after, before) == "machine name: a GPU kept, another GPU wanted"
