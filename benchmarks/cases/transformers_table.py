"""The architectures of `transformers` that the sweep compiles."""

from benchmarks.cases.transformers_senses import SENSES
from benchmarks.cases.transformers_text import TEXT

ARCHITECTURES = (*TEXT, *SENSES)
CASES = tuple(a.case() for a in ARCHITECTURES)
