"""Fixtures of all tests: one folder of compiled code per run, and a fresh Dynamo for every test."""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from collections.abc import Iterator

import pytest
import torch

from test.fresh import time_no_guards
from test.sampling import ALL_CASES, leave_out

_CACHE = "ALTBACKEND_CACHE_DIR"
_GRAPHS = "ALTBACKEND_CACHE_GRAPHS"
_HOST = "ALTBACKEND_HOST"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that runs all cases of sampled tests."""
    parser.addoption(ALL_CASES, action="store_true", help="run all cases of tests of which one in a few runs")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the cases that are not in the sample (`test/sampling.py`)."""
    leave_out(config, items)


def pytest_configure(config: pytest.Config) -> None:
    """Workers of pytest-xdist inherit the folder of the process that starts them."""
    os.environ.setdefault(_GRAPHS, "0")  # tests are about compiling; those of the cache switch it on
    os.environ.setdefault(_HOST, "python")  # no compiler in the background; tests of hosts in C++ ask for them
    if _CACHE not in os.environ:
        os.environ[_CACHE] = config.stash[_made] = tempfile.mkdtemp(prefix="altbackend-test-")
    time_no_guards()
    gc.set_threshold(20_000, 20, 20)  # most objects of tracing live longer than 700 others take to be made


def pytest_collection_finish() -> None:
    """Freeze what was imported, so that no collection of garbage looks through it again."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure(config: pytest.Config) -> None:
    if (folder := config.stash.get(_made, None)) is not None:
        shutil.rmtree(folder, ignore_errors=True)


_made = pytest.StashKey[str]()


def _end_override() -> None:
    """Let Dynamo compile frames that other frames call.

    A call with `fullgraph=True` in torch 2.11 turns that off while it runs, for all threads. Calls that overlap restore
    it in the wrong order, and later tests would run their inner functions in eager.
    """
    set_override = getattr(torch._C._dynamo.eval_frame, "set_eval_frame_override", None)
    if set_override is not None:
        set_override(torch._C._dynamo.eval_frame._EvalFrameOverride.NONE)  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """No test sees the compiled code or the random numbers of another."""
    torch._dynamo.reset()
    _end_override()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()
