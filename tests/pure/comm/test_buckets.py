"""Which tensors share a bucket."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.comm.buckets import Item, Limits, assign
from shoal.ddp.reducer import ReducerOptions
from shoal.errors import UsageError


def filled(num_bytes: int, first_bytes: int | None = None) -> Limits:
    """A bucket is closed by what fills it, as DDP's are."""
    return Limits(num_bytes=num_bytes, first_bytes=first_bytes, overshoot=True)


def items(*sizes: int, key: str = "f32") -> list[Item]:
    return [Item(num_bytes=size, key=key) for size in sizes]


def test_the_picture_in_the_docstring():
    assert assign(items(2, 3, 1, 4, 9, 1), range(6), filled(6, 4)) == [(0, 1), (2, 3, 4), (5,)]


def test_buckets_follow_the_order_given():
    assert assign(items(1, 1, 1, 1), [3, 1, 0, 2], filled(2)) == [(3, 1), (0, 2)]


def test_kinds_are_apart_and_come_when_they_are_complete():
    mixed = [*items(1), *items(1, key="bf16"), *items(1), *items(1, key="bf16")]
    assert assign(mixed, range(4), filled(2)) == [(0, 2), (1, 3)]
    assert assign(mixed, [1, 0, 2, 3], filled(100)) == [(0, 2), (1, 3)]


def test_a_bucket_may_have_to_stay_within_its_size():
    within = Limits(num_bytes=5)
    assert assign(items(2, 3, 1, 9, 1), range(5), within) == [(0, 1), (2,), (3,), (4,)]


@given(st.data())
def test_every_gradient_is_in_one_bucket(data):
    sizes = data.draw(st.lists(st.tuples(st.integers(0, 40), st.sampled_from("ab")), max_size=20))
    order = data.draw(st.permutations(range(len(sizes))))
    first, other = data.draw(st.tuples(st.integers(1, 50), st.integers(1, 50)))
    given_items = [Item(num_bytes=size, key=key) for size, key in sizes]
    buckets = assign(given_items, order, filled(other, first))
    assert sorted(i for bucket in buckets for i in bucket) == list(range(len(sizes)))
    position = {index: place for place, index in enumerate(order)}
    ends = [position[bucket[-1]] for bucket in buckets]
    assert ends == sorted(ends)
    for key in "ab":
        own = [bucket for bucket in buckets if sizes[bucket[0]][1] == key]
        for number, bucket in enumerate(own):
            assert {sizes[index][1] for index in bucket} == {key}
            places = [position[index] for index in bucket]
            assert places == sorted(places)
            limit = other if number else first
            before_last = sum(sizes[index][0] for index in bucket[:-1])
            assert before_last < limit
            if number < len(own) - 1:
                assert before_last + sizes[bucket[-1]][0] >= limit


@pytest.mark.parametrize("order", [[0], [0, 0], [0, 2]])
def test_an_order_that_is_none_is_refused(order):
    with pytest.raises(UsageError, match="every one of 2 gradients once"):
        assign(items(1, 1), order, filled(1))


def test_limits_are_needed():
    with pytest.raises(UsageError, match="num_bytes=0"):
        Limits(num_bytes=0)
    with pytest.raises(UsageError, match="bucket_cap_mb must be"):
        ReducerOptions(bucket_cap_mb=0)
    with pytest.raises(UsageError, match="cannot have -1 bytes"):
        Item(num_bytes=-1, key=None)
