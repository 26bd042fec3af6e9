from dataclasses import replace

import pytest

from shoal.bench.cases import CASES, DeviceType, Mode, Run, device_type_of
from shoal.bench.engines import ENGINES, refusal

BY_NAME = {case.name: case for case in CASES}


def make_run(
    case: str, engine: str, mode: Mode = Mode.EAGER, device_type: DeviceType = "cuda"
) -> Run:
    return Run(case=BY_NAME[case], engine=engine, mode=mode, device_type=device_type)


def test_networks_and_world_sizes() -> None:
    found = {
        case.name: (case.world_size, case.network.name if case.network else "gloo")
        for case in CASES
    }
    assert found == {
        "B1-8": (8, "free"),
        "B1-64": (64, "free"),
        "B1-1024": (1024, "free"),
        "B2": (8, "nvlink"),
        "B3": (64, "infiniband"),
        "B4": (8, "free"),
        "B5": (8, "nvlink"),
        "B6a": (2, "gloo"),
        "B6b": (2, "gloo"),
    }


def test_enough_steps_for_prefetch_and_allocator_to_settle() -> None:
    assert all(case.pace.warmup >= 5 for case in CASES)
    assert all(case.pace.steps * case.pace.rounds >= 10 for case in CASES)


def test_quick_cases_are_small_and_say_so() -> None:
    for case in CASES:
        quick = case.quickly()
        assert quick.quick
        assert (quick.name, quick.world_size, quick.network) == (
            case.name,
            case.world_size,
            case.network,
        )
        assert quick.title.startswith("scaled down")
        assert quick.shape.dim <= 64


def test_a_case_that_does_not_add_up_is_refused() -> None:
    with pytest.raises(ValueError, match="world_size must be at least 1"):
        replace(CASES[0], world_size=0)
    with pytest.raises(ValueError, match="rounds must be at least 1"):
        replace(CASES[0].pace, rounds=0)


def test_gloo_cases_stay_on_cpu() -> None:
    assert device_type_of(BY_NAME["B6a"], cuda=True) == "cpu"
    assert device_type_of(BY_NAME["B1-8"], cuda=True) == "cuda"
    assert device_type_of(BY_NAME["B1-8"], cuda=False) == "cpu"


COMPILED_ONLY = ("plain-shoal", "shoal-graph", "simple-fsdp")


@pytest.mark.parametrize("engine", COMPILED_ONLY)
def test_what_is_only_a_compiler_has_no_eager_mode(engine: str) -> None:
    assert "compiler" in (refusal(make_run("B1-8", engine)) or "")
    assert refusal(make_run("B1-8", engine, Mode.COMPILED)) is None


@pytest.mark.parametrize("engine", [name for name in ENGINES if name not in COMPILED_ONLY])
def test_what_cannot_run_has_a_reason(engine: str) -> None:
    assert refusal(make_run("B1-8", engine)) is None
    assert refusal(make_run("B1-8", engine, Mode.COMPILED)) is None
    assert refusal(make_run("B6a", engine, device_type="cpu")) is None
    assert "needs CUDA" in (refusal(make_run("B1-8", engine, device_type="cpu")) or "")
    quick = replace(make_run("B1-8", engine, device_type="cpu"), case=CASES[0].quickly())
    assert refusal(quick) is None


def test_cuda_graphs_are_for_whole_graphs_on_b4() -> None:
    for engine in ("plain", "plain-shoal", "shoal-graph"):
        assert refusal(make_run("B4", engine, Mode.CUDAGRAPHS)) is None
    assert "B4 only" in (refusal(make_run("B2", "plain", Mode.CUDAGRAPHS)) or "")
    assert "whole graphs only" in (refusal(make_run("B4", "fsdp2", Mode.CUDAGRAPHS)) or "")
    quick = replace(make_run("B4", "plain", Mode.CUDAGRAPHS, "cpu"), case=BY_NAME["B4"].quickly())
    assert "need CUDA" in (refusal(quick) or "")
