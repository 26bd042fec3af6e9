"""Only what is impossible is refused."""

import pytest

from shoal.errors import UsageError
from shoal.train import fit
from shoal.train.config import ParallelConfig, TrainConfig
from shoal.train.fit import check_memory

CONFIG = TrainConfig(parallel=ParallelConfig(device="cpu"))


def test_what_cannot_fit_is_refused_with_its_numbers(monkeypatch):
    monkeypatch.setattr(fit, "_machine_bytes", lambda: 2**30)
    check_memory(CONFIG, 2**26, num_ranks=2, num_local_ranks=2)
    with pytest.raises(UsageError, match=r"at least 4 GiB, but this machine has 1 GiB; lower"):
        check_memory(CONFIG, 2**28, num_ranks=4, num_local_ranks=4)
    with pytest.raises(UsageError, match="shards and activations would take at least"):
        check_memory(CONFIG, 2**28, num_ranks=1, num_local_ranks=1)


def test_a_device_is_asked_for_its_share_alone(monkeypatch):
    monkeypatch.setattr(fit, "_machine_bytes", lambda: 2**40)
    monkeypatch.setattr(fit, "_device_bytes", lambda: 2**30)
    config = TrainConfig(parallel=ParallelConfig(device="cuda"))
    check_memory(config, 2**28, num_ranks=4, num_local_ranks=4)
    with pytest.raises(UsageError, match="a CUDA device has 1 GiB"):
        check_memory(config, 2**28, num_ranks=1, num_local_ranks=1)
