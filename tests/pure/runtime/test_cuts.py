"""Rows cut into pieces and gaps: together they are the row, each piece at its place."""

from __future__ import annotations

from math import prod

from hypothesis import given
from hypothesis import strategies as st

from shoal.runtime.gradient_matrix import cut, examples_of


@st.composite
def rows(draw: st.DrawFn) -> tuple[dict[int, tuple[int, tuple[int, ...]]], int]:
    """Pieces of a row, in any order, some empty, with gaps; and the row's length."""
    numbers = draw(st.permutations(range(draw(st.integers(0, 5)))))
    pieces: dict[int, tuple[int, tuple[int, ...]]] = {}
    end = 0
    for number in numbers:
        shape = tuple(draw(st.lists(st.integers(0, 3), min_size=1, max_size=3)))
        start = end + draw(st.integers(0, 2))
        pieces[number] = (start, shape)
        end = start + prod(shape) if prod(shape) else end
    return pieces, end + draw(st.integers(0, 2))


@given(rows())
def test_every_piece_begins_where_it_should(row: tuple[dict, int]) -> None:
    pieces, length = row
    shapes, wanted = cut(pieces, length)
    assert sum(map(prod, shapes)) == length
    assert sorted(number for number, _ in wanted) == sorted(pieces)
    for number, at in wanted:
        start, shape = pieces[number]
        assert shapes[at] == shape
        if prod(shape):
            assert sum(map(prod, shapes[:at])) == start


def test_examples_have_no_memory_of_their_own() -> None:
    examples = examples_of([(1000, 1000), (3,)])
    assert [tuple(one.shape) for one in examples] == [(1000, 1000), (3,)]
    assert examples[0].untyped_storage().nbytes() == examples[1].element_size()
