"""Commands run side by side."""

import time
from pathlib import Path

import pytest

from altbackend.compile_pool import children


def test_answers_are_in_the_order_of_the_commands() -> None:
    commands = [["sh", "-c", f"sleep {0.2 - n / 25}; echo said {n}; exit {n}"] for n in range(5)]
    assert children.run_all(commands, 30, 3) == [(n, f"said {n}") for n in range(5)]


@pytest.mark.parametrize("most", [1, 2])
def test_no_more_run_at_a_time_than_may(most: int, tmp_path: Path) -> None:
    script = f"touch {tmp_path}/$$; ls {tmp_path} | wc -l; sleep 0.1; rm {tmp_path}/$$"
    seen = children.run_all([["sh", "-c", script]] * 5, 30, most)
    assert max(int(said) for _, said in seen) <= most


def test_one_that_is_late_ends_all() -> None:
    start = time.monotonic()
    with pytest.raises(children.ChildFailed, match=r"no result after 0\.5 s"):
        children.run_all([["sleep", "600"]] * 3, 0.5, 2)
    assert time.monotonic() - start < 60
    assert not [c for c in children._children if c.command == ["sleep", "600"]]
