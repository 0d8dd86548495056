"""Files that the documents name exist, and every room has a page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "altbackend"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(ROOT / "docs").glob("*.md"),
    *(ROOT / "docs/design").glob("*.md"),
]
ROOMS = sorted(p for p in PACKAGE.rglob("README.md"))
NAMED = re.compile(r"`([\w./]+\.(?:py|md|h))`|\]\(([\w./-]+\.md)\)")


def missing(page: Path) -> list[str]:
    """Return the files that a page names and that do not exist.

    A name is relative to the checkout or to the page, or it is the end of a path in the package: `gpu/choose.py`.
    """
    names = {a or b for a, b in NAMED.findall(page.read_text(encoding="utf-8"))}
    return sorted(n for n in names if not ((ROOT / n).exists() or (page.parent / n).exists() or any(PACKAGE.rglob(n))))


@pytest.mark.parametrize("page", [*PAGES, *ROOMS], ids=lambda p: p.relative_to(ROOT).as_posix())
def test_files_that_a_page_names_exist(page: Path) -> None:
    assert missing(page) == []


def test_every_room_has_a_page() -> None:
    rooms = [p.parent for p in PACKAGE.glob("*/__init__.py")]
    assert [r.name for r in rooms if not (r / "README.md").exists()] == []


def test_a_name_that_is_wrong_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("`ir/expr.py` and `ir/expression.py`")
    assert missing(page) == ["ir/expression.py"]


def test_the_map_is_short() -> None:
    assert len((ROOT / "docs/architecture.md").read_text(encoding="utf-8").split()) <= 1500
