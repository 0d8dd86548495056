"""docs/walkthrough.md shows what the compiler prints today."""

from __future__ import annotations

import pytest
import torch

from tools import walkthrough


@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="graphs are printed otherwise by other versions")
def test_the_page_is_what_the_command_writes() -> None:
    pytest.importorskip("triton")
    assert walkthrough.PAGE.read_text() == walkthrough.page(), "write it again: python -m tools.walkthrough"
