"""Weights of a library: embedded, in a file, bound from memory; replaced while other threads run."""

from __future__ import annotations

import json
import struct
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import altbackend
from altbackend.aot import safetensors
from altbackend.aot.load import AotModel, aot_load
from altbackend.errors import BadCall, BadPackage

from .models import Mlp, batched

THREADS, RUNS = 8, 60


@pytest.fixture(scope="module", params=["embedded", "file", "external"])
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A library with its weights in each place."""
    path = tmp_path_factory.mktemp(request.param) / "model.so"
    options = {"aot_constants": request.param, "aot_output_path": str(path)}
    assert altbackend.aot_compile(batched(), options=options) == str(path)
    return request.param, path


def _loaded(stored: tuple[str, Path]) -> AotModel:
    return aot_load(stored[1], weights=dict(Mlp().state_dict()) if stored[0] == "external" else None)


def test_weights_are_found_or_asked_for(stored: tuple[str, Path]) -> None:
    kind, path = stored
    x = torch.randn(5, 16)
    if kind == "external":
        with pytest.raises(BadCall, match="has no value: bind the weights first"):
            aot_load(path)(x)
    torch.testing.assert_close(_loaded(stored)(x), Mlp()(x))
    assert aot_load(path).weights["first.weight"] == ("torch.float32", (32, 16))


def test_a_file_of_weights_that_is_missing_or_another(tmp_path: Path) -> None:
    path = Path(altbackend.aot_compile(batched(), options={"aot_constants": "file"}))
    moved = tmp_path / path.name
    moved.write_bytes(path.read_bytes())
    with pytest.raises(BadPackage, match="weights of the library are missing"):
        aot_load(moved)
    (weights,) = path.parent.glob("*.weights")
    content = weights.read_bytes()
    for damaged, message in ((content[:-1], "does not hold"), (content[:20] + b"x" + content[21:], "another library")):
        (tmp_path / weights.name).write_bytes(damaged)
        with pytest.raises(BadPackage, match=message):
            aot_load(moved)


def test_updates_and_what_depends_on_them(stored: tuple[str, Path]) -> None:
    """A new weight also changes the packed weights that were computed from it."""
    model, x, other = _loaded(stored), torch.randn(5, 16), Mlp(1)
    model.update_weights(other.state_dict(), inactive=True, complete=True)
    torch.testing.assert_close(model(x), Mlp()(x))
    model.swap_weights()
    torch.testing.assert_close(model(x), other(x))
    model.swap_weights()
    torch.testing.assert_close(model(x), Mlp()(x))
    model.update_weights({"second.bias": other.second.bias})
    mixed = Mlp()
    mixed.second.bias = other.second.bias
    torch.testing.assert_close(model(x), mixed(x))
    torch.testing.assert_close(_loaded(stored)(x), Mlp()(x))  # other models of the library keep theirs


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"third.bias": torch.ones(8)}, "no weight third.bias"),
        ({"second.bias": torch.ones(9)}, r"second.bias has size \(9,\); the library was compiled for \(8,\)"),
        ({"second.bias": torch.ones(8).double()}, "second.bias is float64"),
        ({"second.bias": torch.ones(8, device="meta")}, "another device"),
    ],
)
def test_weights_that_do_not_fit(stored: tuple[str, Path], weights: dict[str, torch.Tensor], message: str) -> None:
    model, x = _loaded(stored), torch.randn(2, 16)
    with pytest.raises(BadCall, match=message):
        model.update_weights(weights)
    with pytest.raises(BadCall, match="lack"):
        model.bind_weights(weights)
    torch.testing.assert_close(model(x), Mlp()(x))


def test_every_concurrent_result_is_of_the_old_or_the_new_weights(stored: tuple[str, Path]) -> None:
    model, x = _loaded(stored), torch.randn(7, 16)
    with torch.no_grad():
        old, new = Mlp()(x), Mlp(1)(x)
    model.update_weights(Mlp(1).state_dict(), inactive=True, complete=True)
    begin, wrong, seen = threading.Barrier(THREADS + 1), list[str](), set[str]()

    def work() -> None:
        begin.wait()
        for _ in range(RUNS):
            y = model(x)
            kind = "old" if torch.allclose(y, old, atol=1e-5) else "new" if torch.allclose(y, new, atol=1e-5) else ""
            (seen.add if kind else wrong.append)(kind)

    threads = [threading.Thread(target=work) for _ in range(THREADS)]
    for t in threads:
        t.start()
    begin.wait()
    while "old" not in seen and any(t.is_alive() for t in threads):
        pass
    for _ in range(21):  # an odd number: the new weights stay
        model.swap_weights()
    for t in threads:
        t.join()
    torch.testing.assert_close(model(x), new)
    assert not wrong
    assert "old" in seen


class Counter(nn.Module):
    """Counts its calls in a buffer."""

    n: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("n", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.n.add_(1)
        return x + self.n


def test_state_belongs_to_a_loaded_model() -> None:
    path = altbackend.aot_compile(torch.export.export(Counter(), (torch.zeros(2),)))
    a, b = aot_load(path), aot_load(path)
    assert [a(torch.zeros(2))[0].item() for _ in range(3)] == [1, 2, 3]
    assert b(torch.zeros(2))[0].item() == 1


# --- safetensors -----------------------------------------------------------------------------------------------------


def write_safetensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write a file of the format, independent of the reader."""
    names = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64"}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, t in tensors.items():
        raw = t.detach().contiguous().view(torch.uint8).numpy().tobytes() if t.numel() else b""
        header[name] = {
            "dtype": names[t.dtype],
            "shape": list(t.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_a_safetensors_file_is_bound_without_a_copy(tmp_path: Path) -> None:
    library = altbackend.aot_compile(batched(), options={"aot_constants": "external"})
    file, other, x = tmp_path / "w.safetensors", Mlp(3), torch.randn(3, 16)
    write_safetensors(file, {f"net.{k}": v for k, v in other.state_dict().items()})
    model = aot_load(library, weights=file, rename=lambda name: f"net.{name}")
    torch.testing.assert_close(model(x), other(x))
    bound = safetensors.load(file)
    model = aot_load(library, weights={k.removeprefix("net."): t for k, t in bound.items()})
    expected = other(x) + 1
    bound["net.second.bias"].add_(1)  # the memory is shared, and is not packed
    torch.testing.assert_close(model(x), expected)


def test_values_of_a_safetensors_file(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 5), "b": torch.arange(4), "c": torch.randn(2, 2).bfloat16(), "d": torch.empty(0, 3)}
    write_safetensors(tmp_path / "t", tensors)
    torch.testing.assert_close(safetensors.load(tmp_path / "t"), tensors)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "too few|cannot be read"),
        (b"\xff" * 16, "too few"),
        (struct.pack("<Q", 3) + b"{a}", "no JSON"),
        (struct.pack("<Q", 2) + b"[]", "no JSON object"),
        (struct.pack("<Q", 10) + b'{"a": {}} ', "damaged"),
        (
            struct.pack("<Q", 66) + b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}     '[:66],
            "does not lie",
        ),
    ],
)
def test_damaged_safetensors_files(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "t").write_bytes(content)
    with pytest.raises(BadPackage, match=message):
        safetensors.load(tmp_path / "t")
