"""Errors that a user meets: the right result with one warning, or with `strict` a clear error."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed

from altbackend.compile_pool import cpp
from altbackend.disk_cache import folders
from altbackend.errors import CacheFolderWarning, CompilerFailed, CompilerMissing, FallbackWarning
from altbackend.lowering.registry import LOWERINGS


def f(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x) * 2 + torch.softmax(x, -1)


@pytest.fixture(autouse=True)
def forget_lookups() -> Iterator[None]:
    cpp.find_compiler.cache_clear()
    folders.usable_folder.cache_clear()
    yield
    cpp.find_compiler.cache_clear()
    folders.usable_folder.cache_clear()


def run_with_one_warning(kind: type[Warning], **options: Any) -> str:
    """Compile and run; the result is right, nothing of the user's changes, one warning of `kind`; its text."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
    before = {k: v.clone() for k, v in model.state_dict().items()}
    x, rng = torch.randn(4, 8), torch.get_rng_state()
    compiled = torch.compile(lambda x: f(model(x)), backend="alt", options=options)
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        torch.testing.assert_close(compiled(x), f(model(x)))
        compiled(x)
    assert torch.equal(rng, torch.get_rng_state())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    texts = [str(w.message) for w in caught if issubclass(w.category, kind)]
    assert len(texts) == 1, texts
    return texts[0]


def error_of(kind: type[Exception] = BackendCompilerFailed, **options: Any) -> str:
    """Return the error that `strict` raises, from the backend or, if a deferred build fails, from the call."""
    with pytest.raises(kind) as caught:
        torch.compile(f, backend="alt", options={"strict": True, **options})(torch.randn(4, 8))
    return str(caught.value)


def test_missing_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    text = run_with_one_warning(FallbackWarning)
    assert "no C++ compiler found" in text
    assert "install" in text
    assert "no C++ compiler found" in error_of(CompilerMissing)


def test_compiler_that_fails(tmp_path: Path) -> None:
    options = {"cxx": "/bin/false", "cache_dir": str(tmp_path)}
    for text in (run_with_one_warning(FallbackWarning, **options), error_of(CompilerFailed, **options)):
        for part in ("/bin/false", "command", ".cpp"):
            assert part in text


def test_compiler_that_is_killed(tmp_path: Path) -> None:
    compiler = tmp_path / "killed-g++"
    compiler.write_text('#!/bin/sh\ncase "$*" in *.cpp*) kill -9 $$;; esac\necho 13.0\n')
    compiler.chmod(0o755)
    options = {"cxx": str(compiler), "cache_dir": str(tmp_path / "cache")}
    for text in (run_with_one_warning(FallbackWarning, **options), error_of(CompilerFailed, **options)):
        assert str(compiler) in text
        assert "Reproduce: python" in text


def test_lowering_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("injected")

    importlib.import_module("altbackend.backend")  # registers all: what does later overwrites `broken`
    monkeypatch.setitem(LOWERINGS, torch.ops.aten._softmax.default, broken)
    assert "injected" in run_with_one_warning(FallbackWarning)
    assert "injected" in error_of()


def test_unusable_cache_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    folder = str(tmp_path / "file" / "cache")
    assert folder in run_with_one_warning(CacheFolderWarning, cache_dir=folder)


def test_other_devices_run_operator_by_operator() -> None:
    compiled = torch.compile(f, backend="alt")
    with pytest.warns(FallbackWarning, match="a tensor on meta"):
        assert compiled(torch.randn(4, 8, device="meta")).shape == (4, 8)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"options": {"nonsense": 1}}, ["unknown option 'nonsense'", "did you mean"]),
        ({"options": {"max_fused_node": 1}}, ["max_fused_nodes"]),
        ({"options": {"numerics": "sloppy"}}, ["numerics", "fast", "eager"]),
        ({"mode": "nonsense"}, ["unknown mode 'nonsense'", "max-autotune"]),
    ],
)
def test_bad_options_are_named(given: dict[str, object], named: list[str]) -> None:
    with pytest.raises(BackendCompilerFailed) as caught:
        torch.compile(f, backend="alt", **given)(torch.randn(4, 8))  # type: ignore[call-overload]
    assert all(word in str(caught.value) for word in named)


def test_index_out_of_range_names_the_line() -> None:
    compiled = torch.compile(lambda x, i: x[i] * 2, backend="alt", options={"strict": True})
    with pytest.raises(IndexError, match=r"test_failure\.py"):
        compiled(torch.randn(4), torch.tensor([7]))
