"""Every public name of torch's sharded tensors is importable from shoal, or known to be absent."""

import importlib
import types

import pytest

SHARD = "torch.distributed._shard"

IMPORT_PATHS = {
    "": "shoal.sharded_tensor",
    ".api": "shoal.sharded_tensor.api",
    ".metadata": "shoal.sharded_tensor.metadata",
    ".sharder": "shoal.sharded_tensor",
    ".sharding_plan": "shoal.sharded_tensor",
    ".sharding_plan.api": "shoal.sharded_tensor",
    ".sharded_tensor": "shoal.sharded_tensor",
    ".sharded_tensor.api": "shoal.sharded_tensor.api",
    ".sharded_tensor.metadata": "shoal.sharded_tensor.metadata",
    ".sharded_tensor.shard": "shoal.sharded_tensor.shard",
    ".sharded_tensor.utils": "shoal.sharded_tensor.utils",
    ".sharding_spec": "shoal.sharding_spec",
    ".sharding_spec.api": "shoal.sharding_spec.api",
    ".sharding_spec.chunk_sharding_spec": "shoal.sharding_spec.chunk_sharding_spec",
    ".sharding_spec._internals": "shoal.sharding_spec._internals",
    ".sharded_optim": "shoal.sharded_optim",
    ".sharded_optim.api": "shoal.sharded_optim.api",
}

ABSENT = {"recalc_global_sharded_tensor_metadata"}
"""What torch's own functions are made of; `docs/sharded_tensor.md` says so."""


def own_names(module: types.ModuleType) -> set[str]:
    """What a module defines, or as a package shows of its own modules."""
    is_package = hasattr(module, "__path__")
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (origin := getattr(value, "__module__", None)) is not None
        and (origin == module.__name__ or (is_package and origin.startswith(module.__name__)))
    }


@pytest.mark.parametrize("module", IMPORT_PATHS)
def test_torchs_names_are_here(module: str) -> None:
    theirs = own_names(importlib.import_module(SHARD + module))
    # Functions of torch's dispatch table, which `sharded_tensor` imports for their registration.
    theirs -= own_names(importlib.import_module(f"{SHARD}.sharded_tensor._ops.init"))
    theirs -= own_names(importlib.import_module(f"{SHARD}.sharded_tensor._ops.binary_cmp"))
    theirs -= {"sharded_embedding", "sharded_embedding_bag"}
    ours = importlib.import_module(IMPORT_PATHS[module])
    missing = {name for name in theirs if not hasattr(ours, name)}
    assert missing <= ABSENT
    assert theirs & {*ours.__all__}, "something is looked for at all"


@pytest.mark.parametrize("path", sorted({*IMPORT_PATHS.values()}))
def test_import_paths_list_what_they_show(path: str) -> None:
    module = importlib.import_module(path)
    assert len({*module.__all__}) == len(module.__all__)
    assert all(hasattr(module, name) for name in module.__all__)
