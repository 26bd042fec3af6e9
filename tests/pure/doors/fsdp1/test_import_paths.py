"""Whoever changes the import only finds all names that torch's modules show."""

from __future__ import annotations

import importlib
import inspect

import pytest
import torch.distributed.fsdp as by_torch

OURS = {"FullyShardedDataParallel"}
"""The names that are something else here."""


@pytest.mark.parametrize("name", ["api", "fully_sharded_data_parallel", "wrap"])
def test_an_import_path_shows_what_torchs_module_shows(name: str) -> None:
    theirs = importlib.import_module(f"{by_torch.__name__}.{name}")
    ours = importlib.import_module(f"shoal.fsdp.{name}")
    shown = {
        key: value
        for key, value in vars(theirs).items()
        if (inspect.isclass(value) or inspect.isfunction(value))
        and not key.startswith("_")
        and value.__module__.removeprefix(by_torch.__name__)[:2] not in ("", "._")
        and value.__module__.startswith(by_torch.__name__)
    }
    assert shown, "torch has moved its names: look for them"
    for key, value in shown.items():
        assert hasattr(ours, key), f"shoal.fsdp.{name} has no {key}"
        assert key in OURS or getattr(ours, key) is value


def test_names_that_torch_does_not_list_but_others_import() -> None:
    wrap = importlib.import_module("shoal.fsdp.wrap")
    ours = importlib.import_module("shoal.fsdp.fully_sharded_data_parallel")
    theirs = importlib.import_module(f"{by_torch.__name__}.fully_sharded_data_parallel")
    assert ours.FLAT_PARAM == theirs.FLAT_PARAM
    assert ours.FlatParameter is by_torch.FlatParameter
    policies = [wrap.always_wrap_policy, wrap.always_wrap_policy]
    assert wrap._or_policy(None, recurse=False, nonwrapped_numel=0, policies=policies)
    assert issubclass(wrap.ModuleWrapPolicy, wrap._Policy)
