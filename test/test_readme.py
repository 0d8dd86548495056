"""Every python block of the README runs as it stands."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
from pathlib import Path

import pytest

from test import fresh

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, re.M | re.S)
SECONDS = 110


@pytest.fixture(scope="module")
def search_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """PYTHONPATH on which torch finds the entry point, also where the package is not installed."""
    try:
        importlib.metadata.version("altbackend")
    except importlib.metadata.PackageNotFoundError:
        folder = tmp_path_factory.mktemp("entry")
        info = folder / "altbackend-0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: altbackend\nVersion: 0\n")
        (info / "entry_points.txt").write_text("[torch_dynamo_backends]\nalt = altbackend:alt\n")
        return os.pathsep.join([str(ROOT), str(folder)])
    return str(ROOT)


def test_there_are_blocks() -> None:
    assert len(BLOCKS) >= 3


@pytest.mark.skipif(
    importlib.util.find_spec("altbackend.backend") is None, reason="altbackend.backend is not part of this checkout"
)
@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_block_runs(block: str, tmp_path: Path, search_path: str) -> None:
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("ALTBACKEND_", "TORCH_LOGS"))}
    done = fresh.run(["-c", block], SECONDS, env=environ | {"PYTHONPATH": search_path}, cwd=tmp_path, torch_only=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("link", re.findall(r"\]\((?!https?:)([^)#]+)\)", README))
def test_links_lead_somewhere(link: str) -> None:
    assert (ROOT / link).exists()


def test_commands_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"^make ([a-z]+)", README, re.M)) <= targets
