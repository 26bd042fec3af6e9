"""The order of samples: each once per epoch, whatever the number of ranks or the batch size."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shoal.train.data import share_of
from shoal.train.sampler import num_samples, sample_offsets


@given(
    seed=st.integers(0, 2**40),
    num_bytes=st.integers(9, 2000),
    stretches=st.lists(
        st.tuples(st.sampled_from([1, 2, 3, 4]), st.integers(1, 9), st.integers(1, 12)),
        min_size=1,
        max_size=5,
    ),
)
def test_each_sample_comes_once_per_epoch_also_when_ranks_change(seed, num_bytes, stretches):
    """A stretch is a part of the run: its ranks, its share per rank, its steps."""
    per_epoch = num_samples(num_bytes=num_bytes, context=8)
    seen: list[int] = []
    for ranks, share, steps in stretches:
        for _ in range(steps):
            batch = sample_offsets(
                seed=seed, seen=len(seen), num=ranks * share, num_bytes=num_bytes, context=8
            )
            for rank in range(ranks):
                seen += share_of(batch, rank=rank, world_size=ranks).tolist()
    everything = {8 * index for index in range(per_epoch)}
    for start in range(0, len(seen), per_epoch):
        epoch = seen[start : start + per_epoch]
        assert len(set(epoch)) == len(epoch)
        assert set(epoch) <= everything
        assert len(epoch) < per_epoch or set(epoch) == everything
    assert max(everything) + 8 + 1 <= num_bytes


def test_seeds_and_epochs_have_orders_of_their_own():
    orders = {
        tuple(sample_offsets(seed=seed, seen=epoch * 12, num=12, num_bytes=97, context=8))
        for seed in range(3)
        for epoch in range(3)
    }
    assert len(orders) == 9


def test_the_order_does_not_depend_on_how_it_is_asked_for():
    whole = sample_offsets(seed=1, seen=0, num=40, num_bytes=100, context=9)
    parts = [
        sample_offsets(seed=1, seen=seen, num=5, num_bytes=100, context=9)
        for seen in range(0, 40, 5)
    ]
    assert np.array_equal(whole, np.concatenate(parts))
