"""Object files with a prefix: two libraries in one program, and errors of the options."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import altbackend
from altbackend.compat import stable_abi
from altbackend.errors import BadOptionValue
from altbackend.runtime import isa

from .models import Mlp, batched, module

PROGRAM = """
#define ALTBACKEND_PREFIX first_
#include <altbackend.h>
#undef ALTBACKEND_PREFIX
#include <altbackend.h>
#include <cstdio>

template <class Create, class Run, class Error>
void show(Create create, Run run, Error error, const altbackend_tensor& input) {
  altbackend_model* model = nullptr;
  altbackend_tensor output{};
  if (create("cpu", &model) || run(model, &input, 1, &output, 1)) {
    std::printf("error: %s\\n", error());
    return;
  }
  int64_t count = 1;
  for (int k = 0; k < output.rank; ++k) count *= output.sizes[k];
  for (int64_t k = 0; k < count; ++k) std::printf("%.7g ", static_cast<float*>(output.data)[k]);
  std::printf("\\n");
}

int main() {
  float x[3 * 16];
  for (int k = 0; k < 3 * 16; ++k) x[k] = float(k % 7) - 3;
  const int64_t sizes[] = {3, 16}, wrong[] = {16, 3};
  const altbackend_tensor good{x, ALTBACKEND_FLOAT32, 2, sizes, nullptr, nullptr};
  const altbackend_tensor bad{x, ALTBACKEND_FLOAT32, 2, wrong, nullptr, nullptr};
  show(first_altbackend_create, first_altbackend_run, first_altbackend_last_error, good);
  show(altbackend_create, altbackend_run, altbackend_last_error, good);
  show(first_altbackend_create, first_altbackend_run, first_altbackend_last_error, bad);
}
"""


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An object file whose names have a prefix; its weights are more than would lie behind the code of a library."""
    path = tmp_path_factory.mktemp("objects") / "first.o"
    options = {"aot_format": "object", "aot_prefix": "first_", "aot_output_path": str(path)}
    assert altbackend.aot_compile(batched(), options=options) == str(path)
    return path


def test_two_objects_in_one_program(first: Path, tmp_path: Path) -> None:
    second = module(lambda x: torch.softmax(x * 2, -1))
    x = (torch.arange(48) % 7 - 3).float().view(3, 16)
    options = {"aot_inductor.dynamic_linkage": False, "aot_output_path": str(tmp_path / "second.o")}
    altbackend.aot_compile(torch.export.export(second, (x,)), options=options)
    (tmp_path / "main.cpp").write_text(PROGRAM)
    command = ["g++", "-std=c++17", "main.cpp", str(first), "second.o", f"-I{isa.INTERFACE_DIR}", "-o", "main"]
    library = [f"-L{stable_abi.LIBRARIES}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{stable_abi.LIBRARIES}"]
    subprocess.run([*command, *library], cwd=tmp_path, check=True)
    environment = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(["./main"], cwd=tmp_path, check=True, capture_output=True, text=True, env=environment)
    one, two, error = ran.stdout.splitlines()
    with torch.no_grad():
        for line, want in ((one, Mlp()(x)), (two, second(x))):
            got = torch.tensor([float(t) for t in line.split()]).view_as(want)
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert "dimension 1 of input 0 (x) is 3; the library was compiled for 16" in error


@pytest.mark.skipif(shutil.which("nm") is None, reason="nm lists the names of an object file")
def test_every_name_of_an_object_has_the_prefix(first: Path) -> None:
    lines = subprocess.run(["nm", "--defined-only", "--extern-only", str(first)], capture_output=True, text=True).stdout
    rows = [line.split()[-2:] for line in lines.splitlines()]
    # weak names are templates of the C++ library, which are equal in all objects
    own = {name for kind, name in rows if kind not in "wWvVu"}
    assert len(own) > 30
    assert all("first_" in name for name in own), sorted(n for n in own if "first_" not in n)
    weak = {name for kind, name in rows if kind in "wWvVu"}
    assert not [n for n in weak if "3alt3aot" in n or "N3alt" in n]


def test_options_that_do_not_fit() -> None:
    program = torch.export.export(module(lambda x: (x + 1).sin()), (torch.randn(3),))
    with pytest.raises(BadOptionValue, match="C identifier"):
        altbackend.aot_compile(program, options={"aot_prefix": "2nd-"})
    for option in ({"aot_prefix": "a_"}, {"aot_format": "object"}):
        with pytest.raises(BadOptionValue, match="packages"):
            altbackend.aot_package("never.pt2", program, options=option)
