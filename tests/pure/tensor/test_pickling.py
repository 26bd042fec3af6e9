"""`torch.load(weights_only=True)` loads sharded tensors, and refuses what does not fit together."""

from __future__ import annotations

import io
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from cuts import LAYOUTS, parameters, random_tensors
from shoal.comm.local import run_local
from shoal.layout import Flat, Layout
from shoal.sharded_tensor import ShardedTensor, zeros
from shoal.sharding_spec import ChunkShardingSpec, EnumerableShardingSpec, ShardMetadata
from shoal.tensor.pickling import rebuilt, reduced


def through_a_file(value: Any) -> Any:
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=True)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_parameters_of_every_layout_load(layout: Layout, world_size: int) -> None:
    def rank() -> None:
        saved = parameters(random_tensors(), layout)
        saved[0].tag = ["kept"]
        loaded = through_a_file({"model": saved})["model"]
        for before, after, whole in zip(saved, loaded, random_tensors(), strict=True):
            assert isinstance(after, nn.Parameter)
            assert after.placement == before.placement
            assert torch.equal(after.full_tensor(), whole)
        assert loaded[0].tag == ["kept"]
        packings = {id(parameter.placement.packing) for parameter in loaded}
        assert len(packings) == 1

    run_local(world_size, rank)


def _specs() -> list[Any]:
    placements = [f"rank:{rank}/cpu" for rank in range(dist.get_world_size())]
    rows = [ShardMetadata([2 * i, 0], [2, 3], where) for i, where in enumerate(placements)]
    return [ChunkShardingSpec(0, [*placements]), EnumerableShardingSpec(rows)]


def test_tensors_of_torchs_specs_load() -> None:
    def rank() -> None:
        for spec in _specs():
            saved = zeros(spec, 4, 3)
            loaded = through_a_file(saved)
            assert loaded.metadata() == saved.metadata()
            assert loaded.sharding_spec() == saved.sharding_spec()
            assert torch.equal(loaded.full_tensor(), torch.zeros(4, 3))

    run_local(2, rank)


class OwnSpec(ChunkShardingSpec):
    """A user's class, which no list of safe names has."""


def test_a_users_own_spec_needs_to_be_trusted() -> None:
    def rank() -> None:
        saved = zeros(OwnSpec(0, ["rank:0/cpu", "rank:1/cpu"]), 4, 3)
        with pytest.raises(Exception, match="OwnSpec"):
            through_a_file(saved)

    run_local(2, rank)


def _forged(tensor: ShardedTensor, **changes: Any) -> dict[str, Any]:
    _, (saved,) = reduced(tensor)
    kind, values = saved["placement"]
    inside = {name: value for name, value in changes.items() if name in dict(values)}
    saved["placement"] = (kind, tuple({**dict(values), **inside}.items()))
    return {**saved, **{name: value for name, value in changes.items() if name not in inside}}


def test_forged_pickles_are_refused() -> None:
    def rank() -> None:
        packed = parameters(random_tensors([(4, 4), (5, 3)]), Flat())[0]
        listed = zeros(_specs()[0], 4, 3)
        _, (saved,) = reduced(packed)
        tag, values = dict(saved["placement"][1])["packing"]
        chunked = dict(reduced(listed)[1][0]["placement"][1])["given_spec"][0]
        forgeries = [
            (packed, {"locals": (torch.zeros(3),)}),
            (packed, {"index": 7}),
            (packed, {"replica": -1}),
            (packed, {"packing": (tag, tuple({**dict(values), "world_size": 3}.items()))}),
            (packed, {"packing": (tag, tuple({**dict(values), "shard_bytes": 16}.items()))}),
            (packed, {"packing": ("<Popen>", values)}),
            (packed, {"packing": None}),
            (packed, {"placement": ("Popen", ())}),
            (packed, {"attributes": {"full_tensor": dict}}),
            (listed, {"shape": (10**9, 3)}),
            (listed, {"listed": ()}),
            (listed, {"locals": (torch.zeros(2, 2),)}),
            (listed, {"given_spec": (chunked, (("dim", 5), ("placements", ())))}),
        ]
        assert rebuilt(_forged(packed)).shape == (4, 4)
        assert rebuilt(_forged(listed)).shape == (4, 3)
        for tensor, changes in forgeries:
            # Of any kind: what is not a value of ours has no attributes of ours either.
            with pytest.raises((ValueError, AttributeError, KeyError, TypeError)):
                rebuilt(_forged(tensor, **changes))

    run_local(2, rank)


def test_importing_shoal_alone_tells_torch_nothing() -> None:
    code = "import sys, shoal; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
