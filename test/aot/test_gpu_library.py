"""Libraries for GPUs, without one: real machine code, a driver of the tests, and kernels that Triton interprets."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import altbackend
from altbackend.aot import machine_code, manifest
from altbackend.aot.load import AotModel
from altbackend.aot.machine_code import Architecture
from altbackend.codegen.host import cpp_library
from altbackend.codegen.host.cuda_program import CudaPlan
from altbackend.compile_pool import cpp, libraries
from altbackend.config.resolve import resolve
from altbackend.errors import BadCall, BadOptionValue, BadPackage
from test import cpp_cuda_host, triton_run
from tools import translated

from .models import Dim, Mlp

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the driver of the tests would hide the real one")
ARCHITECTURES = "8.0+PTX;9.0"


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Load a driver of CUDA that has no GPU; the libraries find it by its name."""
    path = tmp_path_factory.mktemp("driver") / "libcuda.so.1"
    command = [cpp.find_compiler(), "-shared", "-fPIC", "-w", str(Path(__file__).with_name("fake_driver.cpp"))]
    subprocess.run([*command, "-Wl,-soname,libcuda.so.1", "-o", str(path)], check=True)
    return ctypes.CDLL(str(path))


@pytest.fixture(scope="module")
def built(driver: ctypes.CDLL) -> tuple[Path, list[CudaPlan], Any]:
    """Compile a model with a dynamic size for GPUs; its tensors stay on the CPU."""
    model, x = Mlp().eval(), torch.randn(4, 16)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: Dim("rows", min=2, max=64)},))
    plans: list[CudaPlan] = []
    whole = cpp_library.build_cuda

    def noted(planned: CudaPlan, *rest: Any) -> Any:
        plans.append(planned)
        return whole(planned, *rest)

    flags = (*libraries._HOST, "-DALT_GPU=cpu", "-DALT_WITHOUT_STREAMS")
    with (
        translated._for_gpu(),
        patch.object(libraries, "_HOST", flags),
        patch.object(cpp_library, "build_cuda", noted),
    ):
        path = Path(altbackend.aot_compile(program, options={"aot_architectures": ARCHITECTURES}))
    return path, plans, model


def load(driver: ctypes.CDLL, path: Path, plans: list[CudaPlan], capability: int, rows: int) -> tuple[AotModel, Any]:
    """Return the model on a GPU of a capability; launches run one after the other in Triton's interpreter."""
    (planned,) = plans

    @cpp_cuda_host.LAUNCH  # type: ignore[untyped-decorator]
    def launched(function: int, programs: int, *rest: Any) -> int:
        launch = planned.launches[function - 1]
        sizes = {s: rows for b in planned.program.buffers.values() for n in b.sizes for s in map(str, _symbols(n))}
        cpp_cuda_host.interpret(planned.program, launch, programs, rest[-2], triton_run.launch, sizes)
        return 0

    driver.fake_set(capability, launched)
    with patch.object(AotModel, "_default_device", lambda *_: "cpu"):
        return AotModel(path, str(path)), launched


def _symbols(n: Any) -> list[str]:
    return [] if isinstance(n, int) else [a.key for a in n.syms]


@pytest.mark.parametrize(("capability", "from_ptx"), [(80, False), (86, False), (90, False), (100, True), (120, True)])
def test_a_library_runs_with_the_code_that_fits(
    driver: ctypes.CDLL, built: tuple[Path, list[CudaPlan], Any], capability: int, from_ptx: bool
) -> None:
    path, plans, model = built
    loaded, kept = load(driver, path, plans, capability, 5)
    x = torch.randn(5, 16)
    torch.testing.assert_close(loaded(x), model(x), atol=1e-4, rtol=1e-4)
    assert (driver.fake_ptx_loads() > 0, driver.fake_cubin_loads() > 0) == (from_ptx, not from_ptx)
    with pytest.raises(BadCall, match=r"dimension 0 of input 0 \(x\) is 65; .* from 2 to 64"):
        loaded(torch.randn(65, 16))
    del kept


def test_a_gpu_without_code_is_refused_with_both_architectures(
    driver: ctypes.CDLL, built: tuple[Path, list[CudaPlan], Any]
) -> None:
    path, plans, _ = built
    with pytest.raises(BadPackage, match=r"architecture 8.0, 8.0\+PTX, 9.0, and GPU 0 \(Test GPU\) is 7.5: .*'7.5'"):
        load(driver, path, plans, 75, 4)


def test_the_manifest_decides_by_the_rule_of_the_library() -> None:
    code = [(80, False), (80, True), (90, False)]
    fits = {gpu: [runs for runs in code if manifest.runs_on(*runs, gpu)] for gpu in (75, 80, 89, 90, 100)}
    assert fits == {75: [], 80: code[:2], 89: code[:2], 90: [(80, True), (90, False)], 100: [(80, True)]}


def test_architectures_of_the_option() -> None:
    device = torch.device("cuda")

    def of(text: str) -> tuple[Architecture, ...]:
        return machine_code.architectures(resolve(options={"aot_architectures": text}), device)

    assert of("8.0+PTX;9.0") == (Architecture(80), Architecture(80, ptx=True), Architecture(90))
    assert of("8.6, 12.0") == (Architecture(86), Architecture(120))
    for wrong, reason in (("sm_90", "no architecture"), ("9.0+PTX", "one|alone"), ("5.0", "no architecture")):
        with pytest.raises(BadOptionValue, match=reason):
            of(wrong)
