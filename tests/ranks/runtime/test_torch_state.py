"""What code that reaches for torch's own state of a sharded module finds."""

from typing import Any

from torch import nn

from differential import DIM, SHOAL, Engine, check_engines_agree, error_of, loss_of, stack
from harness import ranks


def _model(engine: Engine) -> Any:
    model = stack(num=2)
    engine.api.fully_shard(model.blocks[0])
    engine.api.fully_shard(model.blocks[1])
    return engine.api.fully_shard(model)


@ranks(2)
def test_the_state_of_a_module() -> None:
    def observe(engine: Engine) -> list[Any]:
        model = _model(engine)
        model._get_fsdp_state()._lazy_init()
        states = [engine.api.fully_shard.state(m) for m in (model, *model.blocks)]
        assert states == model._get_fsdp_state()._state_ctx.all_states
        groups = [state._fsdp_param_group for state in states]
        return [
            [state._is_root for state in states],
            [group._module_fqn for group in groups],
            [
                sorted((p._param_fqn, list(p.sharded_param.shape)) for p in group.fsdp_params)
                for group in groups
            ],
            [group.mesh_info.shard_mesh_size for group in groups],
        ]

    check_engines_agree(observe, plain=False)


@ranks(2)
def test_getting_ready_early_changes_no_step() -> None:
    early, late = _model(SHOAL), _model(SHOAL)
    early._get_fsdp_state()._lazy_init()
    (batch,) = SHOAL.batches(1)
    losses = [loss_of(model(batch)) for model in (early, late)]
    assert losses[0].item() == losses[1].item()


@ranks(2)
def test_a_list_of_modules_is_no_root() -> None:
    def observe(engine: Engine) -> Any:
        layers = [nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)]
        engine.api.fully_shard(layers)
        return error_of(engine.api.fully_shard.state(layers[0])._lazy_init)

    assert isinstance(check_engines_agree(observe, plain=False), RuntimeError)


@ranks(2)
def test_a_module_without_parameters_or_without_state() -> None:
    empty = SHOAL.api.fully_shard(nn.Sequential(nn.ReLU()))
    assert SHOAL.api.fully_shard.state(empty)._fsdp_param_group is None
    assert SHOAL.api.fully_shard.state(nn.ReLU()) is None
