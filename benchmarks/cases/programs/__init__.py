"""Small programs as people write them by hand: single operators, a layer with what follows it, and networks."""

from benchmarks.cases.programs import chains, networks, operators

CASES = (*operators.CASES, *chains.CASES, *networks.CASES)
