"""Where ranks survive one another, the watchdog ends nobody because of a failure."""

import time

import pytest
import torch.distributed as dist

from harness import ranks
from shoal.watch import Watchdog


@pytest.mark.soak
@ranks(2, fresh=True)
def test_an_error_of_one_rank_does_not_end_the_others(world_size, tmp_path):
    verdicts = []
    with Watchdog(limit_s=60, folder=tmp_path, end=verdicts.append, survive=True) as watchdog:
        if dist.get_rank() == 1:
            with pytest.raises(ValueError, match="mine alone"):
                with Watchdog(limit_s=60, end=verdicts.append, survive=True):
                    raise ValueError("mine alone")
        began = time.monotonic()
        assert watchdog.explained("a peer is gone") == "a peer is gone"
        assert time.monotonic() - began < 0.5
        time.sleep(1.0)  # twice as long as a watchdog takes to hear of trouble
        dist.barrier()
    assert not verdicts


@pytest.mark.soak
@ranks(2, fresh=True)
def test_but_a_wait_that_is_too_long_does(world_size):
    verdicts = []
    with Watchdog(limit_s=0.5, end=verdicts.append, survive=True) as watchdog:
        if dist.get_rank() == 0:
            watchdog.waiting("somebody who does not come")
        end = time.monotonic() + 20
        while not verdicts and time.monotonic() < end:
            time.sleep(0.05)
    assert "somebody who does not come" in verdicts[0]
