"""The memory plan: blocks that live at the same time never overlap, every block is aligned."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from altbackend.runtime.memory import ALIGN, plan

BLOCK = st.tuples(st.integers(0, 5000), st.integers(0, 12), st.integers(0, 8)).map(lambda b: (b[0], b[1], b[1] + b[2]))
BLOCKS = st.lists(BLOCK, max_size=25)
FUZZ = settings(max_examples=300, derandomize=True, deadline=None)


@FUZZ
@given(BLOCKS, st.booleans())
def test_live_blocks_do_not_overlap(blocks: list[tuple[int, int, int]], reuse: bool) -> None:
    offsets, total = plan(blocks, reuse)
    for k, (size, first, last) in enumerate(blocks):
        assert offsets[k] % ALIGN == 0
        assert offsets[k] >= 0
        assert offsets[k] + size <= total
        for j in range(k):
            other, begin, end = blocks[j]
            together = not reuse or (first <= end and begin <= last)
            if together and size and other:
                assert offsets[k] + size <= offsets[j] or offsets[j] + other <= offsets[k]


@FUZZ
@given(BLOCKS)
def test_the_arena_is_between_the_busiest_step_and_the_sum(blocks: list[tuple[int, int, int]]) -> None:
    def rounded(size: int) -> int:
        return -(-size // ALIGN) * ALIGN

    _, total = plan(blocks)
    busiest = max((sum(rounded(s) for s, a, b in blocks if a <= t <= b) for t in range(25)), default=0)
    assert busiest <= total <= sum(rounded(s) for s, _, _ in blocks)


@FUZZ
@given(BLOCKS)
def test_offsets_are_those_of_a_search_through_all_blocks(blocks: list[tuple[int, int, int]]) -> None:
    mapped: list[tuple[int, int, int]] = []
    for k in sorted(range(len(blocks)), key=lambda i: (-blocks[i][0], i)):
        nbytes, first, last = blocks[k]
        at, size = 0, -(-nbytes // ALIGN) * ALIGN
        for start, end, other in sorted(mapped):
            if blocks[other][2] < first or last < blocks[other][1]:
                continue
            if start - at >= size:
                break
            at = max(at, end)
        mapped.append((at, at + size, k))
    assert plan(blocks)[0] == [at for at, _, _ in sorted(mapped, key=lambda b: b[2])]


def test_a_chain_needs_two_buffers() -> None:
    offsets, total = plan([(1024, k, k + 1) for k in range(10)])
    assert total == 2048
    assert offsets == [1024 * (k % 2) for k in range(10)]


def test_without_reuse_everything_has_its_own_place() -> None:
    assert plan([(100, 0, 0), (100, 1, 1), (64, 2, 2)], reuse=False) == ([0, 128, 256], 320)
