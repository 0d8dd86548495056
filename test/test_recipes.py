"""Each recipe of docs/recipes.md, applied to a copy of the sources, does what its check says."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from test import fresh

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "recipes.md"
BLOCK = re.compile(
    r"^```(?:python|cpp|text) (check|append|insert|create)(?: (\S+))?(?: after `([^\n]*)`)?\n(.*?)^```$", re.M | re.S
)


@dataclass(frozen=True)
class Block:
    """One fenced block: a check, or text that is appended to a file, inserted after a line, or a file by itself."""

    action: str
    file: str
    anchor: str
    text: str


def recipes() -> dict[str, list[Block]]:
    """Return the blocks of each section that has any, by its title."""
    sections = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.M)[1:]
    blocks = {s.partition("\n")[0]: [Block(*m.groups("")) for m in BLOCK.finditer(s)] for s in sections}
    return {title: found for title, found in blocks.items() if found}


def apply(block: Block, root: Path) -> None:
    """Change a file as the block says. Raises AssertionError unless the file has the block's anchor just once."""
    path = root / block.file
    if block.action == "create":
        assert not path.exists()
        path.write_text(block.text, encoding="utf-8")
        return
    text = path.read_text(encoding="utf-8")
    if block.action == "append":
        path.write_text(text + block.text, encoding="utf-8")
        return
    line = f"{block.anchor}\n"
    assert text.count(line) == 1, f"{block.file} has the line {block.anchor!r} {text.count(line)} times"
    path.write_text(text.replace(line, line + block.text), encoding="utf-8")


@pytest.mark.parametrize("title", list(recipes()))
def test_the_recipe_works(title: str, tmp_path: Path) -> None:
    for folder in ("altbackend", "benchmarks"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    blocks = recipes()[title]
    for block in blocks:
        if block.action != "check":
            apply(block, tmp_path)
    checks = [b.text for b in blocks if b.action == "check"]
    assert checks, f"the recipe {title!r} has no check"
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    for text in checks:
        done = fresh.run(["-c", text], env=env, cwd=tmp_path, torch_only=True)
        assert done.returncode == 0, done.stderr[-3000:]
