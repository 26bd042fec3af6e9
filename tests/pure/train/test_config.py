"""Configs cannot be built wrong."""

import pytest

from shoal.errors import UsageError
from shoal.train.config import DataConfig, ModelConfig, RunConfig, TrainConfig


def test_heads_must_divide_the_width_and_the_message_says_what_would():
    with pytest.raises(UsageError, match="Try --dim 64"):
        ModelConfig(dim=60, heads=4)


def test_the_hidden_width_follows_the_width_unless_given():
    assert ModelConfig(dim=256).feed_forward_dim == 704
    assert ModelConfig(dim=256, hidden=100).feed_forward_dim == 100


def test_validation_needs_held_out_text():
    with pytest.raises(UsageError, match="--validate-every 0"):
        TrainConfig(data=DataConfig(held_out=0))
    TrainConfig(data=DataConfig(held_out=0), run=RunConfig(validate_every=0))


def test_parts_must_be_of_their_kind():
    with pytest.raises(UsageError, match=r"TrainConfig.model: expected ModelConfig, got RunConfig"):
        TrainConfig(model=RunConfig())  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", ["", ".", "..", "a/b"])
def test_a_name_is_one_folder(name):
    with pytest.raises(UsageError, match="--name"):
        RunConfig(name=name)


def test_a_batch_is_shared_out_evenly_or_refused():
    config = TrainConfig(run=RunConfig(batch_size=12, accumulate=2))
    config.check_ranks(3)
    with pytest.raises(UsageError, match=r"4 x 2 = 8; got 12. Try --batch-size 16"):
        config.check_ranks(4)
