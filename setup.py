"""Packaging of altbackend; everything else about the project is configured in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'^__version__ = "(.+)"$', (HERE / "altbackend/__init__.py").read_text(encoding="utf-8"), re.M)
assert VERSION is not None

setup(
    name="altbackend",
    version=VERSION.group(1),
    description="A small, readable torch.compile backend that fuses graphs into OpenMP C++ and Triton kernels",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="BSD-3-Clause",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    packages=find_packages(include=["altbackend", "altbackend.*"]),
    package_data={
        "altbackend": [
            "py.typed",
            "include/*.h",
            "runtime/include/altbackend/*.h",
            "runtime/include/altbackend/aot/*.h",
        ]
    },
    install_requires=["torch>=2.11,<2.14", "sympy", "filelock"],
    extras_require={
        "triton": ['triton>=3.6,<3.8; sys_platform == "linux"'],
        "redis": ["redis>=5"],
        "test": ["pytest", "pytest-xdist", "pytest-timeout", "expecttest", "hypothesis", "numpy", "redis>=5"],
        "lint": ["ruff", "mypy"],
        "bench": ["transformers", "timm", "matplotlib"],
    },
    entry_points={"torch_dynamo_backends": ["alt = altbackend:alt"]},
    zip_safe=False,
)
