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
from altbackend.compiled.artifact import Code, Subgraph
from altbackend.compiled.load import Job
from altbackend.config.resolve import resolve
from altbackend.debug.trace import Trace
from altbackend.disk_cache.storage import Store
from altbackend.graph_cache import entry, entry_files, key, small_constants
from altbackend.graph_cache.json_values import NotCacheable, decode, encode
from altbackend.schedule.device import H200
from test.small_layers import call_onednn

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


@pytest.fixture(autouse=True)
def _small_linears_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The network's linear is small, and its packed weight is the weight prologue."""
    call_onednn(monkeypatch.setattr)


def code_of(gm: GraphModule, job: Job = STATIC, **options: Any) -> Code:
    cfg = resolve(options={"strict": True, "freezing": True, **options})
    return pipeline.translate(gm, cfg, Trace("graph", cfg), job)


def alike(a: Code, b: Code) -> bool:
    prologues = [
        None if c.weight_prologue is None else (c.weight_prologue.code, _calls(c.weight_prologue)) for c in (a, b)
    ]
    return replace(a, weight_prologue=None) == replace(b, weight_prologue=None) and prologues[0] == prologues[1]


def _calls(gm: GraphModule) -> list[Any]:
    return [(n.name, n.op, n.target if n.op == "call_function" else "") for n in gm.graph.nodes]


def test_a_file_that_was_changed_anywhere_is_no_entry(tmp_path: Path) -> None:
    code = code_of(traced(network, *SHAPES))
    assert code.weight_prologue is not None
    path = entry_files.EntryPath(Store(tmp_path), "family", "k" * 64)
    stored = {"code": entry.write(code, {}), "lines": ""}
    assert entry_files.write(path, stored, {}) == ""
    content = path.file.read_bytes()
    entry_read = entry_files.read(path)
    assert entry_read is not None
    dice = random.Random(0)
    for _ in range(FILE_MUTATIONS):
        changed = _mutated(content, dice)
        path.file.write_bytes(changed)
        assert (entry_files.read(path) is None) == (changed != content)
    other = replace(path, key="j" * 64)
    other.file.write_bytes(content)
    assert entry_files.read(other) is None
    path.file.write_bytes(content)
    assert entry_files.read(path) == entry_read


def _mutated(content: bytes, dice: random.Random) -> bytes:
    at, length = dice.randrange(len(content)), dice.choice((1, 1, 2, 16, 4096))
    match dice.randrange(5):
        case 0:
            return content[:at]
        case 1:
            return content[:at] + dice.randbytes(length) + content[at + length :]
        case 2:
            return content[:at] + content[at + length :]
        case 3:
            return content[:at] + bytes([content[at] ^ (1 << dice.randrange(8))]) + content[at + 1 :]
        case _:
            return content[:at] + dice.randbytes(length) + content[at:]


def test_an_entry_of_another_structure_raises_what_a_hit_expects(tmp_path: Path) -> None:
    """Entries of a writer that had other ideas: their checksum holds, their fields do not."""
    gm = traced(network, *SHAPES)
    stored = json.loads(json.dumps(entry.write(code_of(traced(network, *SHAPES)), {})))
    dice = random.Random(1)
    refused = 0
    for _ in range(TREE_MUTATIONS):
        changed = copy.deepcopy(stored)
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


def test_an_entry_that_cannot_be_loaded_is_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = resolve(options={"cache_graphs": True, "cache_dir": str(tmp_path)})
    loads: list[Code] = []

    def bind(code: Code, *_: Any) -> int:
        loads.append(code)
        if len(loads) == 2:
            raise OSError("a library that cannot be opened")
        return len(loads)

    monkeypatch.setattr(pipeline, "bind", bind)

    def compile_(trace: Trace) -> Any:
        return pipeline.compile_graph(traced(network, *SHAPES), cfg, trace, STATIC)

    assert compile_(Trace("first", cfg)) == 1
    trace = Trace("second", cfg)
    assert compile_(trace) == 3  # the second look-up, under the lock, is a hit
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
    decoded = decode(json.loads(json.dumps(encode(x))))
    assert (type(decoded), repr(decoded)) == (type(x), repr(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64], ids=str)
@pytest.mark.parametrize("sizes", [(), (3, 2), (0, 4)], ids=str)
def test_small_tensors_come_back_as_they_were(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.tensor(torch.arange(math.prod(sizes)).reshape(sizes).tolist(), dtype=dtype).reshape(sizes)
    decoded = small_constants.read(json.loads(json.dumps(small_constants.write(x))))
    assert (decoded.dtype, decoded.shape, decoded.stride()) == (x.dtype, x.shape, x.stride())
    assert torch.equal(decoded, x)


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
def test_code_of_a_gpu_comes_back_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    cfg = resolve(options={"strict": True, "cache_graphs": True, "cache_dir": str(tmp_path), "cudagraphs": True})
    job = Job(kind, (1, 2))
    monkeypatch.setattr(pipeline, "bind", lambda code, *_: code)
    monkeypatch.setattr(pipeline, "_translate_and_submit", lambda gm, _: code_of(gm, job, cudagraphs=True))
    codes: list[Any] = []
    verdicts = []
    for _ in range(2):
        gm, trace = traced(scaled, (64, 72), (9, 72), (9,), device="cuda"), Trace("graph", cfg)
        codes.append(pipeline.compile_graph(gm, cfg, trace, job))
        verdicts += [d.verdict for d in trace.decisions if d.kind == "cache"]
    assert verdicts == ["miss", "hit"]
    assert alike(*codes)
    code = codes[1]
    assert code.device == torch.device("cuda", 0)
    assert code.jobs
    assert all(j.key == k.key and j.source in code.kernel_text() for j, k in zip(code.jobs, codes[0].jobs, strict=True))
    assert code.recording is not None
    assert code.recording.refusal == ""
    assert (code.weight_prologue is None) == (kind != "inference")


def scaled(x: T, w: T, b: T) -> tuple[T, T]:
    """Part of the work is on parameters, and is a prologue in inference."""
    y = torch.nn.functional.gelu(torch.addmm(b, x, (w * 2).t()))
    return torch.softmax(y, -1), x.sum(0)


def test_code_with_bodies_comes_back_as_it_was() -> None:
    inner = Code(torch.device("cpu"), "text", 1, 0, "kernels", names_lines=True, main_inputs=(0,))
    middle = Code(torch.device("cpu"), "more", 0, 1, subgraphs=(Subgraph(("const_b",), inner),))
    code = Code(
        torch.device("cpu"), "outer", 2, 1, "kernels too", subgraphs=(Subgraph(("const_a", "const_c"), middle),)
    )
    stored = json.loads(json.dumps(entry.write(code, {})))
    decoded = entry.read(stored, GraphModule(torch.nn.Module(), torch.fx.Graph()))
    assert decoded == code
    assert [c.python for c in decoded.with_subgraphs()] == ["outer", "more", "text"]
    assert not entry.takes_constants(stored)
    stored["subgraphs"][0]["code"]["subgraphs"][0]["code"]["constants"]["const_d"] = {"attribute": "table"}
    assert entry.takes_constants(stored)


@pytest.mark.usefixtures("gpu")
def test_another_gpu_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    gm = traced(scaled, (64, 72), (9, 72), (9,), device="cuda")
    before = key.parts_of(gm, resolve(), {})
    monkeypatch.setattr(torch_api, "cuda_name", lambda device: "another GPU")
    after = key.parts_of(gm, resolve(), {})
    assert key.key_of(before) != key.key_of(after)
    assert key.differences(after, before) == "machine name: a GPU cached, another GPU now"
