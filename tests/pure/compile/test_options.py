"""Options of the backend as values: equal, hashed, pickled, and refused by name."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import fx

from shoal.compile.observe import forget, records
from shoal.compile.observe.record import CacheUse
from shoal.compile.options import BackendOptions
from shoal.errors import UsageError
from shoal.passes import Pass, Pipeline


def as_they_are(passes: Pipeline) -> Pipeline:
    return passes


def test_options_are_values():
    one = BackendOptions(bucket_mb=3, passes=as_they_are)
    assert (
        one
        == BackendOptions.of({"bucket_mb": 3, "passes": as_they_are})
        != BackendOptions(bucket_mb=3)
    )
    assert pickle.loads(pickle.dumps(one)) == one
    assert len({one, BackendOptions(bucket_mb=3, passes=as_they_are)}) == 1


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"passes": "overlap"}, "must be a function that takes a Pipeline"),
        ({"bucket": 3}, "no option 'bucket'"),
        ({"bucket_mb": 0}, "must be above 0"),
        ({"inner": "triton"}, "one of direct, inductor"),
    ],
)
def test_wrong_options_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        BackendOptions.of(given)


def test_passes_run_on_graphs_of_the_cache_too():
    """And without a collective anywhere: forward, then backward."""
    seen: list[int] = []

    def count(graph: fx.Graph) -> None:
        seen.append(len(graph.find_nodes(op="placeholder")))

    def edited(passes: Pipeline) -> Pipeline:
        return passes.before("overlap", Pass(name="count", run=count))

    for use in (CacheUse.STORED, CacheUse.HIT):
        torch._dynamo.reset()
        forget()
        x = torch.ones(3, requires_grad=True)
        torch.compile(torch.sin, backend="shoal", options={"passes": edited})(x).sum().backward()
        assert [one.cache for one in records()] == [use]
        assert torch.equal(x.grad, torch.ones(3).cos())
    assert len(seen) == 4
    assert seen[:2] == seen[2:]
