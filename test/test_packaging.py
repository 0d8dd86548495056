"""The installed files, and the set-up script behind every `make` target."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FAKE_PYTHON = """\
#!/bin/sh
# Plays the interpreter: `-m venv` copies it to where venv would, `-m pip install` is logged and may be told to fail.
case "$*" in
    *"-m venv"*) echo venv >> "$LOG"; mkdir -p .venv/bin; cp "$0" .venv/bin/python ;;
    *"-m pip install"*)
        echo "pip $(echo "$*" | sed 's/.* -e //')" >> "$LOG"
        if [ -e fail-once ]; then rm fail-once; exit 1; fi ;;
    *importlib.metadata*) [ ! -e packages-gone ] || { rm packages-gone; exit 1; } ;;
esac
"""


@pytest.fixture(scope="module")
def metadata(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The egg-info folder that setuptools makes of a copy of the project."""
    pytest.importorskip("setuptools", reason="setuptools is not installed in this environment")
    copy = tmp_path_factory.mktemp("project")
    shutil.copytree(ROOT / "altbackend", copy / "altbackend", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    command = [sys.executable, "setup.py", "-q", "egg_info"]
    subprocess.run(command, cwd=copy, check=True, capture_output=True, timeout=100)
    return copy / "altbackend.egg-info"


def test_torch_finds_the_backend_by_its_entry_point(metadata: Path) -> None:
    entries = configparser.ConfigParser()
    entries.read(metadata / "entry_points.txt")
    assert dict(entries["torch_dynamo_backends"]) == {"alt": "altbackend:alt"}


def test_data_files_are_packaged(metadata: Path) -> None:
    sources = set((metadata / "SOURCES.txt").read_text().splitlines())
    headers = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("altbackend/runtime/include/altbackend/*.h")}
    modules = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("altbackend/**/*.py")}
    assert {"altbackend/py.typed"} | headers | modules <= sources


def test_everything_tests_install_is_pinned(metadata: Path) -> None:
    pinned = set(re.findall(r"^([\w-]+)==", (ROOT / "constraints.txt").read_text(), re.M))
    sections = re.split(r"^\[(.*)\]$", (metadata / "requires.txt").read_text(), flags=re.M)
    named = {"": sections[0]} | dict(zip(sections[1::2], sections[2::2], strict=True))
    needed = {
        re.split(r"[<>=]", line)[0]
        for section, lines in named.items()
        if section.split(":")[0] in ("", "triton", "test", "lint")
        for line in lines.split()
    }
    assert {"torch", "triton", "pytest", "ruff"} <= needed <= pinned


class Project:
    """A copy of what tools/venv.sh reads, with a fake interpreter."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "log"
        (folder / "tools").mkdir(parents=True)
        shutil.copy(ROOT / "tools" / "venv.sh", folder / "tools")
        for name in ("constraints.txt", "setup.py", "pyproject.toml"):
            (folder / name).write_text(name)
        self.python = folder / "fake-python"
        self.python.write_text(FAKE_PYTHON)
        self.python.chmod(0o755)

    def set_up(self, *groups: str) -> list[str]:
        """Runs the script; returns what it did."""
        self.log.write_text("")
        environ = os.environ | {"PYTHON": str(self.python), "LOG": str(self.log)}
        command = ["sh", "tools/venv.sh", *groups]
        subprocess.run(command, cwd=self.folder, env=environ, check=True, capture_output=True, timeout=60)
        return self.log.read_text().splitlines()


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path / "project")


def test_set_up_is_made_once(project: Project) -> None:
    assert project.set_up("test") == ["venv", "pip .[test]"]
    assert project.set_up("test") == []
    assert project.set_up("test", "lint") == ["pip .[lint]"]


@pytest.mark.parametrize("name", ["constraints.txt", "setup.py", "pyproject.toml"])
def test_set_up_follows_its_inputs(project: Project, name: str) -> None:
    project.set_up("test")
    (project.folder / name).write_text("changed")
    assert project.set_up("test") == ["pip .[test]"]


def test_a_broken_environment_is_made_anew(project: Project) -> None:
    project.set_up("test")
    python = project.folder / ".venv" / "bin" / "python"
    python.unlink()
    python.symlink_to("/nonexistent/python")
    assert project.set_up("test") == ["venv", "pip .[test]"]


def test_an_environment_that_lost_its_packages_is_made_anew(project: Project) -> None:
    project.set_up("test", "lint")
    (project.folder / "packages-gone").touch()
    assert project.set_up("test", "lint") == ["venv", "pip .[test]", "pip .[lint]"]


def test_a_failed_install_is_tried_in_a_fresh_environment(project: Project) -> None:
    (project.folder / "fail-once").touch()
    assert project.set_up("test") == ["venv", "pip .[test]", "venv", "pip .[test]"]


def test_a_moved_checkout_is_installed_again(project: Project, tmp_path: Path) -> None:
    project.set_up("test")
    project.folder.rename(tmp_path / "elsewhere")
    project.folder = tmp_path / "elsewhere"
    project.log, project.python = project.folder / "log", project.folder / "fake-python"
    assert project.set_up("test") == ["pip .[test]"]


def test_a_missing_interpreter_is_named(project: Project) -> None:
    project.python = Path("/nonexistent/python3")
    with pytest.raises(subprocess.CalledProcessError) as caught:
        project.set_up("test")
    assert b"/nonexistent/python3 not found" in caught.value.stderr
