"""Indented text, which all printers write."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Lines:
    """Lines of text, each at the indentation of its block. `step`: the text of one level."""

    def __init__(self, step: str = "    ", depth: int = 0) -> None:
        self.body: list[str] = []
        self.step = step
        self.depth = depth

    def add(self, text: str) -> None:
        """Append one line."""
        self.body.append(self.step * self.depth + text)

    @contextmanager
    def indented(self) -> Iterator[None]:
        """Indent the lines that are added meanwhile by one level."""
        self.depth += 1
        yield
        self.depth -= 1
