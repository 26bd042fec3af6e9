import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pure.bench.samples import B1, make_b1, make_b1_results, make_missing
from shoal.bench.cases import CASES, Case, Mode
from shoal.bench.engines import ENGINES
from shoal.bench.floor import BANDWIDTH_TB_PER_S, Floor
from shoal.bench.model import BenchTransformer
from shoal.bench.results import Status, read_results, write_results
from shoal.comm.network import INFINIBAND, NVLINK

ROOT = Path(__file__).parents[3]
BY_NAME = {case.name: case for case in CASES}


def floor_on(case: Case, ms: float = 40.0) -> Floor:
    floor = make_b1_results(make_b1("plain", ms), case=case).floor(B1.name, Mode.EAGER)
    assert isinstance(floor, Floor)
    return floor


@pytest.mark.parametrize("case", ["B1-8", "B4", "B5", "B6b"])
def test_units_hold_all_parameters(case: str) -> None:
    shape = BY_NAME[case].shape
    with torch.device("meta"):
        model = BenchTransformer(shape)
    block = sum(parameter.numel() for parameter in model.blocks[0].parameters())
    root = sum(parameter.numel() for name, parameter in model.named_parameters() if "b" not in name)
    root += model.embedding.weight.numel()
    assert (shape.block_numel, shape.root_numel) == (block, root)


def test_on_a_free_network_only_memory_is_added() -> None:
    floor, size = floor_on(B1), 928_057_344
    per_ms = BANDWIDTH_TB_PER_S["NVIDIA H200"] * 1e9
    assert floor.casts_ms == pytest.approx(size / 8 * 6 / per_ms)
    assert floor.gradients_ms == pytest.approx((size * 6 + size / 8 * 4) / per_ms)
    assert floor.first_gather_ms == floor.last_reduction_ms == floor.backward_link_ms == 0
    assert floor.ms == pytest.approx(40.0 + floor.casts_ms + floor.gradients_ms)
    assert (floor.forward_ms, floor.forward_is_measured) == (pytest.approx(40 / 3), False)


def test_in_one_precision_gradients_need_no_pass() -> None:
    floor = floor_on(replace(B1, mixed_precision=False))
    assert floor.casts_ms == 0
    assert floor.gradients_ms == pytest.approx(928_057_344 / 8 * 4 / 4.8e9)
    assert floor.num_launches == floor.num_collectives == 49


def test_a_network_shows_where_nothing_hides_it() -> None:
    """B2: the link is idle most of the time, but for the first gather and the last reduction."""
    floor = floor_on(replace(B1, network=NVLINK))
    root = 2048 * (2 * 32_000 + 1)
    assert floor.first_gather_ms == pytest.approx(0.02 + root * 2 * 7 / 8 / 370e6)
    assert floor.last_reduction_ms == pytest.approx(0.02 + root * 4 * 7 / 8 / 370e6)
    hidden = floor_on(B1).ms
    assert floor.ms == pytest.approx(hidden + floor.first_gather_ms + floor.last_reduction_ms)


def test_a_slow_link_is_the_limit() -> None:
    """Of a short step on InfiniBand all that is left is what goes over the link."""
    floor = floor_on(replace(B1, network=INFINIBAND, world_size=64), ms=3.0)
    sent = floor.num_bytes * 63 / 64 / 45e6
    assert floor.ms == pytest.approx(sent + floor.num_collectives * 0.06)


def test_forward_is_what_was_measured() -> None:
    plain = make_b1("plain", 40.0)
    one = replace(plain.compute_rounds[0], forward_ms=(10.0, 10.0))
    floor = make_b1_results(replace(plain, compute_rounds=(one,))).floor("B1-8", Mode.EAGER)
    assert isinstance(floor, Floor)
    assert (floor.forward_ms, floor.backward_ms) == (10.0, 30.0)
    assert floor.forward_is_measured


def test_there_is_none_without_what_it_stands_on() -> None:
    assert "plain was not measured" in str(
        make_b1_results(make_b1("shoal", 4.0)).floor("B1-8", Mode.EAGER)
    )
    failed = replace(make_missing("plain", Status.FAILED, "no"), case="B1-8")
    assert "plain was not measured" in str(make_b1_results(failed).floor("B1-8", Mode.EAGER))
    other = replace(make_b1("plain", 4.0), device="a GPU")
    assert "bandwidth of a GPU" in str(make_b1_results(other).floor("B1-8", Mode.EAGER))
    small = make_b1_results(make_b1("plain", 4.0), case=B1.quickly())
    assert "plain has 928,057,344 parameters" in str(small.floor("B1-8", Mode.EAGER))
    real = make_b1_results(make_b1("plain", 4.0), case=replace(B1, network=None))
    assert "real ranks" in str(real.floor("B1-8", Mode.EAGER))


def test_the_file_has_floors_that_reading_does_not_need(tmp_path: Path) -> None:
    results = make_b1_results(make_b1("plain", 40.0))
    path = tmp_path / "results.json"
    write_results(results, path)
    (told,) = json.loads(path.read_text())["floors"]
    floor = results.floor("B1-8", Mode.EAGER)
    assert isinstance(floor, Floor)
    assert (told["case"], told["mode"], told["ms"]) == ("B1-8", "eager", floor.ms)
    assert told["last_reduction_ms"] == floor.last_reduction_ms
    assert read_results(path) == results


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks" / "results").glob("*-h200-*.json")))
def test_no_stored_result_is_better_than_its_floor(path: Path) -> None:
    document = json.loads(path.read_text())
    if "records" not in document:
        pytest.skip("not of shoal bench")
    results = read_results(path)
    reached = [r for r in results.records if r.figures and ENGINES[r.engine].shards]
    for record in reached:
        floor = results.floor(record.case, record.mode)
        assert isinstance(floor, Floor), floor
        assert record.figures is not None
        assert record.figures.forward_backward_ms > floor.ms, record.key


def test_b3_is_bound_by_what_cannot_hide() -> None:
    """What is known of B3: with fp32 reductions about 183 ms at a plain step of 166."""
    path = ROOT / "benchmarks" / "results" / "20261116-h200-eager-large.json"
    floor = read_results(path).floor("B3", Mode.EAGER)
    assert isinstance(floor, Floor)
    assert 182 < floor.ms < 187
