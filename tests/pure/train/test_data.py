"""Text, the order of its samples, and the ranks' shares."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import UsageError
from shoal.train.build import notes_on_data
from shoal.train.config import DataConfig, TrainConfig
from shoal.train.data import (
    load_corpus,
    num_samples,
    sample_offsets,
    share_of,
    spread_offsets,
    windows,
)


def write(folder, **files):
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def test_files_are_joined_in_the_order_of_their_paths_and_split(tmp_path):
    write(tmp_path, b=b"bb" * 50, a=b"a" * 60)
    write(tmp_path / "c", d=b"d" * 40)
    corpus = load_corpus(DataConfig(folder=tmp_path, held_out=0.2), context=8)
    assert bytes(corpus.training) == b"a" * 60 + b"b" * 100
    assert bytes(corpus.validation) == b"d" * 40
    assert corpus.content == "200 B of text from 3 files"


def test_what_is_hidden_or_no_text_is_left_out(tmp_path):
    write(tmp_path, good="héllo".encode() * 20, binary=b"\xff\xfe" * 20, nul=b"a\0" * 20)
    write(tmp_path / ".git", config=b"secret" * 20)
    (tmp_path / ".hidden").write_bytes(b"hidden" * 20)
    corpus = load_corpus(DataConfig(folder=tmp_path, held_out=0), context=4)
    assert bytes(corpus.training) == "héllo".encode() * 20
    assert corpus.skipped == ("binary", "nul")
    (note,) = notes_on_data(TrainConfig(data=DataConfig(folder=tmp_path)), corpus)
    assert note == "left out 2 files, unreadable or no UTF-8 text: binary, nul"


def test_a_limit_that_leaves_too_little_is_named(tmp_path):
    write(tmp_path, a=b"a" * 100)
    with pytest.raises(UsageError, match="--max-bytes 10 leaves 10 tokens, but --context 8 needs"):
        load_corpus(DataConfig(folder=tmp_path, max_bytes=10), context=8)


def test_the_limit_may_cut_a_character(tmp_path):
    write(tmp_path, a="é".encode() * 100, b=b"b" * 100)
    corpus = load_corpus(DataConfig(folder=tmp_path, max_bytes=101, held_out=0), context=4)
    assert bytes(corpus.training) == ("é".encode() * 51)[:101]


def test_the_held_out_part_holds_a_sequence_at_least(tmp_path):
    write(tmp_path, a=b"a" * 100)
    corpus = load_corpus(DataConfig(folder=tmp_path, held_out=0.01), context=20)
    assert len(corpus.validation) == 21


def test_the_standard_library_is_the_default():
    corpus = load_corpus(DataConfig(max_bytes=200_000), context=128)
    assert b"import" in corpus.training.tobytes()
    assert len(corpus.training) + len(corpus.validation) == 200_000
    assert corpus.digest == load_corpus(DataConfig(max_bytes=200_000), context=64).digest


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (None, "there is no folder"),
        ({}, "no files in"),
        ({"a": b"\xff"}, "none of the 1 files in .* is readable, non-empty UTF-8 text"),
        ({"a": b""}, "none of the 1 files"),
        ({"a": b"x" * 17}, "has 17 tokens, but --context 8 needs at least 18"),
    ],
)
def test_text_that_cannot_be_used_is_refused(tmp_path, files, message):
    folder = tmp_path / "data"
    if files is not None:
        write(folder, **files)
    with pytest.raises(UsageError, match=message):
        load_corpus(DataConfig(folder=folder), context=8)


def test_a_file_is_no_folder(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("text")
    with pytest.raises(UsageError, match=r"expected a folder of text files, but .*a.txt is a file"):
        load_corpus(DataConfig(folder=file), context=8)


def test_spread_offsets_reach_both_ends():
    offsets = spread_offsets(num=5, num_bytes=109, context=8)
    assert offsets.tolist() == [0, 25, 50, 75, 100]


def test_windows_hold_one_byte_more_than_the_context():
    text = np.arange(20, dtype=np.uint8)
    found = windows(text, np.array([0, 16]), context=3)
    assert found.dtype == torch.int64
    assert found.tolist() == [[0, 1, 2, 3], [16, 17, 18, 19]]


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
