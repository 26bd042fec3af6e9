"""What cannot be survived is said before training starts, or when it happens, by name."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import shoal.optim
from harness import ranks
from shoal import fully_shard
from shoal._torch import groups, meshes
from shoal.errors import UsageError
from shoal.survive import resize, survive
from shoal.survive.environment import of_member
from shoal.survive.generation import StoreAddress, leave_groups
from shoal.survive.launcher import LostStateError
from survival.jobs import launch
from survival.program import build, shard


class Wide(torch.optim.Optimizer):
    """Keeps a row for each parameter, which nobody else could rebuild."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["history"] = torch.zeros(4)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def batches(num_steps: int = 2) -> list[torch.Tensor]:
    return [torch.ones(4, 13)] * num_steps


@pytest.fixture
def launched(monkeypatch):
    """As in a job of two ranks, whose store nobody comes to ask."""
    address = StoreAddress(host="127.0.0.1", port=1, prefix="survive")
    for name, value in of_member(0, 2, address).items():
        monkeypatch.setenv(name, value)


@ranks(2)
def test_models_that_nobody_could_rebuild_are_refused(world_size, launched):
    with pytest.raises(UsageError, match="without any fully_shard"):
        survive(model := build(), adamw(model), batches())
    model = build()
    fully_shard(model[0])
    with pytest.raises(UsageError, match=r"parameter '2.weight' belongs to no unit"):
        survive(model, adamw(model), batches())
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(build(), mesh=mesh)
    with pytest.raises(NotImplementedError, match="it is replicated by its mesh"):
        survive(model, adamw(model), batches())
    own = init_device_mesh("cpu", (2, 1), mesh_dim_names=("other", "shard"))["shard"]
    alone = fully_shard(build(), mesh=own)
    with pytest.raises(UsageError, match="sharded over all 2 ranks, got one over 1"):
        survive(alone, adamw(alone), batches()).__enter__()


@ranks(2)
def test_optimizers_whose_state_does_not_follow_parameters_are_refused(world_size, launched):
    model = shard(build(), "even")
    with pytest.raises(UsageError, match="1 parameters that are not sharded by the model"):
        survive(model, torch.optim.SGD([nn.Parameter(torch.ones(3))]), batches())
    with pytest.raises(UsageError, match="expected an optimizer"):
        survive(model, [], batches())
    optimizer = Wide(model.parameters())
    before = [unit.detach().to_local().clone() for unit in model.parameters()]
    with pytest.raises(NotImplementedError, match=r"Wide keeps 'history' of parameter '0.weight'"):
        survive(model, optimizer, batches()).__enter__()
    assert not optimizer.state
    after = [unit.detach().to_local() for unit in model.parameters()]
    assert all(map(torch.equal, before, after))


class Listing(torch.optim.SGD):
    """Keeps the last gradients in a list."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("last", []).append(parameter.grad)


class ForAll(torch.optim.SGD):
    """Keeps a vector that belongs to no parameter."""

    def step(self, closure=None):
        self.state["all"]["sketch"] = torch.zeros(5)


@ranks(2)
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (torch.optim.LBFGS, "LBFGS takes its steps by a closure"),
        (shoal.optim.LBFGS, "LBFGS takes its steps by a closure"),
        (shoal.optim.Adafactor, r"Adafactor keeps 'row_var' of parameter '0.weight'"),
        (Listing, r"Listing keeps 'last' of parameter '0.weight' as a list"),
        (ForAll, "keeps a dict.* under 'all', which belongs to no parameter"),
    ],
)
def test_optimizers_whose_state_lies_otherwise_are_refused(world_size, launched, kind, message):
    model = shard(build(), "even")
    with pytest.raises(NotImplementedError, match=message):
        survive(model, kind(model.parameters(), lr=0.1), batches()).__enter__()


class Average:
    """Keeps a copy of each weight's shard."""

    def __init__(self, model):
        self.values = [parameter.detach().clone() for parameter in model.parameters()]

    def state_dict(self):
        return {"values": self.values}

    def load_state_dict(self, state):
        self.values = state["values"]


@ranks(2)
@pytest.mark.parametrize("layout", ["even", "flat"])
def test_what_is_stateful_must_not_be_of_shards(world_size, launched, layout):
    model = shard(build(), layout)
    with pytest.raises(UsageError, match=r"state of this Average holds a \w+ of shards"):
        survive(model, adamw(model), batches(), stateful=[Average(model)])


@ranks(2)
def test_a_scheduler_that_survive_does_not_know_of_is_refused(world_size, launched):
    optimizer = adamw(model := shard(build(), "even"))
    torch.optim.lr_scheduler.StepLR(optimizer, 2)
    with pytest.raises(UsageError, match=r"stateful=\[scheduler\]"):
        survive(model, optimizer, batches())


@ranks(2)
def test_groups_that_cannot_be_formed_are_refused(world_size, launched):
    model = shard(build(), "even")
    for parities, message in ((2, "2 parities need 3 ranks or more, got 2"), (0, "1 or 2")):
        with pytest.raises(UsageError, match=message):
            survive(model, adamw(model), batches(), parities=parities).__enter__()


@ranks(2)
def test_resize_needs_a_run(world_size, launched):
    model = shard(build(), "even")
    with pytest.raises(UsageError, match="not trained under survive"):
        resize(model, adamw(model), 3)


def test_sizes_and_optimizers_that_cannot_be_are_refused(tmp_path):
    """In a real job: what a resize cannot do is said where it is asked for."""
    outcome = launch(tmp_path, 2, {"steps": 1, "wrong_sizes": True})
    expected = ["expected 1 rank or more", "12 samples cannot be shared by 13", "not among"]
    for story in outcome.stories.values():
        assert len(story["refused"]) == len(expected)
        for text, part in zip(story["refused"], expected, strict=True):
            assert part in text


@ranks(2)
def test_without_a_launcher_that_lets_others_go_on_it_says_so(world_size):
    model = shard(build(), "even")
    with pytest.raises(UsageError, match=r"python -m shoal\.survive"):
        survive(model, adamw(model), batches())


@ranks(2, fresh=True)
def test_meshes_of_groups_that_are_gone_do_not_resolve_to_new_ones(world_size, tmp_path):
    """Equal meshes, other groups: torch alone would take the new group for the old one."""
    old = init_device_mesh("cpu", (2,))
    assert old.get_group().size() == 2
    rank = dist.get_rank()
    leave_groups()
    groups.count_groups_from(1000)
    store = dist.FileStore(str(tmp_path / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    new = init_device_mesh("cpu", (2,))
    assert new == old
    assert new.get_group().size() == 2
    with pytest.raises((RuntimeError, ValueError), match="Could not resolve the process group"):
        old.get_group()
    # Nothing communicates when tensors are added, so meshes of generations are not equal.
    here = [DTensor.from_local(torch.ones(3), mesh, [Shard(0)]) for mesh in (old, new)]
    assert (here[0] + here[1]).shape == (6,)
    apart = init_device_mesh("cpu", (2,))
    meshes.set_apart(apart, 2)  # before anything is on it: DTensor remembers what it has seen
    there = DTensor.from_local(torch.ones(3), apart, [Shard(0)])
    with pytest.raises((RuntimeError, ValueError), match="different meshes"):
        here[0] + there
    assert (there + there).full_tensor().tolist() == [2.0] * 6


def test_more_deaths_than_parities_are_an_error_that_says_so(tmp_path):
    plan = {"steps": 4, "1": [[2, "reduction"]], "2": [[2, "deciding"]]}
    with pytest.raises(LostStateError, match=r"\[1, 2\], too many at the same time .* checkpoint"):
        launch(tmp_path, 4, plan)
