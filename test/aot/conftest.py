"""Fixtures of the tests of ahead-of-time libraries."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import altbackend
from altbackend.aot import compile as compile_library
from altbackend.compile_pool import libraries
from altbackend.config.resolve import resolve
from altbackend.disk_cache.storage import open_store
from altbackend.runtime import isa


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A cache folder with nothing but the object that all libraries share, which takes seconds to compile."""
    cfg = resolve()
    unit = compile_library._CONTAINER
    name = libraries._stored_name(unit, isa.detect(), cfg)
    if open_store(cfg).find(name) is None:
        altbackend.aot_compile(torch.export.export(torch.nn.Linear(1, 1), (torch.ones(1, 1),)))
    file = open_store(cfg).find(name)
    assert file is not None
    (tmp_path / name).parent.mkdir(parents=True)
    shutil.copy(file.path, tmp_path / name)
    return tmp_path
