"""The scripts of `examples/` do what their pages claim, on the pool of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import example_scripts
from harness import on_ranks, ranks
from shoal import fully_shard
from shoal.checkpoint import load_model, save
from shoal.comm.observer import comparing
from shoal.errors import RankError
from shoal.layout import Whole

TORCH = "torch.distributed.fsdp"


@ranks(2)
def test_start_learns_and_each_rank_holds_its_share() -> None:
    start = example_scripts.load("start")
    losses = start.main()
    assert losses[0] > 2.0
    assert losses[-1] < 1.0


@ranks(2)
def test_fsdp2_has_the_same_losses_and_weights() -> None:
    losses, weights = example_scripts.load("from_fsdp2").main()
    losses_before, weights_before = example_scripts.load("from_fsdp2", shoal_fsdp=TORCH).main()
    assert losses == losses_before
    assert weights.keys() == weights_before.keys()
    assert all(torch.equal(weights[name], weights_before[name]) for name in weights)


@ranks(2)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_fsdp1_has_the_same_losses_and_moves_to_fully_shard() -> None:
    before, stayed, went = example_scripts.load("from_fsdp1").main()
    of_torch = example_scripts.load("from_fsdp1", shoal_fsdp=TORCH)
    model = of_torch.wrapped()  # its full state dict, cut off on rank 0, crashes on CPU
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    assert before + stayed == of_torch.steps(model, optimizer, range(8))
    assert went == stayed


@ranks(2)
def test_ddp_moves_to_fully_shard() -> None:
    stayed, went = example_scripts.load("from_ddp").main()
    assert went == pytest.approx(stayed, rel=1e-6)
    assert len(set(went)) == 4


@ranks(2)
def test_deepspeeds_config_line_by_line_has_torchs_losses(tmp_path: Path) -> None:
    losses, model = example_scripts.load("from_deepspeed").main()
    losses_before, model_before = example_scripts.load("from_deepspeed", shoal_fsdp=TORCH).main()
    assert losses == losses_before
    for ours, theirs in zip(model.parameters(), model_before.parameters(), strict=True):
        assert torch.equal(whole(ours), whole(theirs))


@pytest.mark.compose("quantised reductions", "fp8")
@ranks(2, timeout_s=240)
def test_fewer_bytes_have_the_losses_of_bf16_over_200_steps() -> None:
    """The mean of the last losses: within the noise of bf16, which is their spread."""
    runs = example_scripts.load("fp8").main()
    moved, losses = {k: r[0] for k, r in runs.items()}, {k: r[1][-50:] for k, r in runs.items()}
    means = {name: sum(last) / len(last) for name, last in losses.items()}
    spread = torch.tensor(losses["bf16"]).std().item()
    first = runs["bf16"][1][0]
    assert means["bf16"] < 0.5 * first
    for name, mean in means.items():
        assert abs(mean - means["bf16"]) < (1.0 if "nvfp4" in name else 0.5) * spread, name
    assert moved["nvfp4"] < 0.4 * moved["bf16"]  # biases and norms travel as they are
    assert moved["mxfp8"] == moved["mxfp8, int8"] < 0.6 * moved["bf16"]
    assert moved["float8"] < 0.62 * moved["bf16"]


def whole(parameter: Tensor) -> Tensor:
    return parameter.full_tensor()  # pyright: ignore[reportAttributeAccessIssue]


def resumed(folder: str, num_steps: int) -> dict[int, float]:
    return example_scripts.load("resume").main(Path(folder), num_steps)


def test_resume_on_another_number_of_ranks_goes_on_as_if_unbroken(tmp_path: Path) -> None:
    unbroken = on_ranks(2, resumed, str(tmp_path / "unbroken"), 20)[0]
    first = on_ranks(2, resumed, str(tmp_path / "run"), 10)[0]
    then = on_ranks(1, resumed, str(tmp_path / "run"), 20)[0]
    assert list(then) == list(range(10, 20))
    assert {**first, **then} == pytest.approx(unbroken, rel=1e-5)
    assert len({path.name for path in (tmp_path / "run").glob("step-*")}) == 2


@ranks(2)
def test_ranks_of_one_order_end_well_and_of_two_are_named(tmp_path: Path) -> None:
    script = example_scripts.load("debug_a_hang")
    assert script.train("none") < 2.3
    words = "the gather of unit 'blocks.1'.*in step 4, rank 1 the gather of unit 'blocks.2'"
    with comparing(limit_s=20), pytest.raises(RankError, match=words):
        script.train("order")


@ranks(2, 3)
def test_own_layout_trains_as_others_and_keeps_submodules_together(tmp_path: Path) -> None:
    script = example_scripts.load("own_layout")
    losses, held = script.main()
    assert losses == pytest.approx(script.main(Whole())[0], rel=1e-6)
    everywhere: list[dict[str, int]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, held)
    for submodule in {name.rpartition(".")[0] for name in held}:
        owners = [
            any(n for name, n in of_rank.items() if name.startswith(f"{submodule}."))
            for of_rank in everywhere
        ]
        assert sum(owners) == 1, submodule


@ranks(2)
def test_checkpoints_of_an_own_layout_load_into_another(tmp_path: Path) -> None:
    script, start = example_scripts.load("own_layout"), example_scripts.load("start")
    torch.manual_seed(1)
    ours = fully_shard(start.Model(), layout=script.BySubmodule())
    tensors = {f"model/{name}": p for name, p in ours.named_parameters()}
    save(tmp_path / "saved", tensors, {})
    theirs = fully_shard(start.Model())
    load_model(tmp_path / "saved", theirs)
    for name, parameter in theirs.named_parameters():
        assert torch.equal(whole(parameter), whole(tensors[f"model/{name}"]))


@ranks(2)
def test_the_record_of_a_step_is_its_plan(tmp_path: Path) -> None:
    plan, recorder = example_scripts.load("profile_step").main(tmp_path)
    recorded = [f"{action.kind} {action.unit}" for action in recorder.actions()]
    assert "gather blocks.1" in recorded
    position = 0
    for action in recorded:  # in this order, on lines of the plan
        kind, unit = action.split()
        found = [i for i in range(position, len(plan)) if plan.startswith(kind, i)]
        assert any(unit in plan[i : i + 60] for i in found), action
    assert list(tmp_path.glob("rank-*.json"))


@ranks(2)
def test_graphs_have_the_losses_of_eager() -> None:
    script = example_scripts.load("compile_model")
    script.NUM_STEPS = 2
    assert script.graphs() == script.eager()


@pytest.mark.soak
@ranks(2)
def test_graphs_and_whole_steps_have_the_losses_of_eager() -> None:
    losses = example_scripts.load("compile_model").main()
    assert losses["graphs"] == losses["eager"]
    assert losses["whole steps"] == pytest.approx(losses["eager"], rel=1e-6)


def fine_tuned(folder: str) -> tuple[list[float], dict[str, Tensor]]:
    scratch = Path(folder)
    model, losses = example_scripts.load("hugging_face").main(None, scratch / "out", scratch)
    model.eval()
    with torch.no_grad():
        logits = model(torch.arange(12).reshape(2, 6)).logits
    return losses, logits


def test_weights_from_and_to_hugging_face_have_equal_logits(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="hugging_face.py needs transformers")
    for losses, logits in on_ranks(2, fine_tuned, str(tmp_path), fresh=True):
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
        with torch.no_grad():
            assert torch.equal(model(torch.arange(12).reshape(2, 6)).logits, logits)
        pretrained = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "pretrained")
        tokens = torch.arange(64).reshape(2, 32)
        expected = pretrained(tokens, labels=tokens).loss.item()
        assert losses[0] == pytest.approx(expected, rel=1e-5)
