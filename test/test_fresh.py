"""Programs of `test.fresh` run as an interpreter of their own would run them."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from test import fresh

SHOWN = """
import atexit, os, sys
atexit.register(print, "at exit")
print(sys.argv, __name__, os.getcwd(), os.environ["GIVEN"], sys.path[:2], "altbackend.backend" in sys.modules)
sys.exit(3)
"""


@pytest.mark.parametrize("torch_only", [False, True])
def test_what_a_program_finds(tmp_path: Path, torch_only: bool) -> None:
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": "/nowhere", "GIVEN": "this"}
    done = fresh.run(["-c", SHOWN, "a", "b c"], env=env, cwd=tmp_path, torch_only=torch_only)
    here = str(tmp_path)
    found = f"['-c', 'a', 'b c'] __main__ {here} this ['{here}', '/nowhere'] {not torch_only}\nat exit\n"
    assert (done.returncode, done.stdout, done.stderr) == (3, found, "")


def test_programs_leave_nothing_to_each_other() -> None:
    write = "import builtins, torch; builtins.left = 1; torch.manual_seed(1); print(torch.initial_seed())"
    read = "import builtins, torch; print(hasattr(builtins, 'left'), torch.initial_seed() == 1)"
    assert [fresh.run(["-c", text]).stdout for text in (write, read)] == ["1\n", "False False\n"]


def test_an_exception_and_a_signal() -> None:
    raised = fresh.run(["-c", "raise ValueError('what')"])
    assert raised.returncode == 1
    assert raised.stderr.endswith("ValueError: what\n")
    assert fresh.run(["-c", "import os; os.kill(os.getpid(), 9)"]).returncode == -9


def test_a_program_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    text = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(f'{{os.getpid()}} '); time.sleep(100)"
    with pytest.raises(subprocess.TimeoutExpired):
        fresh.run(["-c", text], timeout=5)
    pid = int((tmp_path / "pid").read_text())
    for _ in range(100):
        if not Path(f"/proc/{pid}").exists():
            return
        time.sleep(0.1)
    raise AssertionError("it still runs")
