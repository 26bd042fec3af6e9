"""Models of transformers, trained on ranks: the truth is the same model in one plain process."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from harness import on_ranks
from shoal.cli.main import main
from shoal.errors import UsageError
from shoal.train.build import build_run
from shoal.train.config import (
    DataConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
)
from shoal.train.data import sample_offsets, windows
from shoal.train.environment import Place
from shoal.train.job import TrainJob, new_job, resumed_job
from shoal.train.loop import train
from shoal.train.model import scores
from shoal.train.optimizer import learning_rate
from shoal.train.world import World
from tiny_models import needs_transformers, small_config, small_model, small_tokenizer

pytestmark = needs_transformers

STEPS = 6


def make_config(folder: Path, source: Path, **parallel) -> TrainConfig:
    return TrainConfig(
        model=ModelConfig(source=f"hf:{source}", context=16),
        data=DataConfig(max_bytes=50_000),
        optim=OptimConfig(lr=1e-2, warmup=2, clip=0.5),
        parallel=ParallelConfig(device="cpu", **parallel),
        run=RunConfig(
            steps=STEPS,
            batch_size=8,
            save_every=4,
            validate_every=0,
            sample_tokens=4,
            out=folder,
            name="run",
        ),
    )


def with_documents(config: TrainConfig, folder: Path) -> TrainConfig:
    """The same run on JSONL, by a tokenizer of its own."""
    lines = [{"text": f"the fish {n} in the sea, the ship on the sea " * 20} for n in range(40)]
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    tokenizer = small_tokenizer(folder / "tokenizer")
    return replace(
        config,
        model=replace(config.model, tokenizer=tokenizer),
        data=DataConfig(folder=data),
    )


def make_world() -> World:
    rank, size = dist.get_rank(), dist.get_world_size()
    place = Place(rank=rank, world_size=size, local_rank=rank, local_world_size=size)
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("shard",))
    return World(place=place, device=torch.device("cpu"), mesh=mesh)


def run_job(job: TrainJob) -> None:
    """Train as one rank of a pool."""
    assert train(job, make_world(), lambda: False)


def steps_of(job: TrainJob) -> list[dict]:
    lines = [json.loads(line) for line in job.folder.metrics.read_text().splitlines()]
    return [line for line in lines if line["kind"] == "step"]


def start(config: TrainConfig, world_size: int) -> TrainJob:
    job = new_job(config, overwrite=True)
    list(job.make_tokens())
    job.create(num_ranks=world_size)
    on_ranks(world_size, run_job, job)
    return job


def unsharded(config: TrainConfig, model: torch.nn.Module) -> list[float]:
    """Train a plain model in this process, with plain AdamW and transformers' own loss."""
    corpus = new_job(config, overwrite=True).load_corpus()
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        betas=(config.optim.beta1, config.optim.beta2),
    )
    losses = []
    model.train()
    for step in range(1, STEPS + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, STEPS, config.optim)
        offsets = sample_offsets(
            seed=0, seen=(step - 1) * 8, num=8, num_bytes=len(corpus.training), context=16
        )
        tokens = windows(corpus.training, offsets, 16)
        optimizer.zero_grad()
        # Of the 17 tokens the loss predicts 16.
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optim.clip)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("kind", "world_size", "options"),
    [
        ("llama", 2, {}),
        ("llama_tied", 4, {"activation_checkpointing": True}),
        pytest.param("gpt2", 2, {"activation_checkpointing": True}, marks=pytest.mark.soak),
        pytest.param("mixtral", 2, {}, marks=pytest.mark.soak),
        pytest.param("qwen3", 4, {}, marks=pytest.mark.soak),
        pytest.param("opt", 2, {}, marks=pytest.mark.soak),
    ],
)
def test_local_weights_train_as_in_one_process(tmp_path, kind, world_size, options):
    from transformers import AutoModelForCausalLM

    source = small_model(tmp_path / "model", kind)
    config = make_config(tmp_path, source, **options)
    if kind == "llama":
        config = with_documents(config, tmp_path)
    steps = steps_of(start(config, world_size))
    losses = unsharded(config, AutoModelForCausalLM.from_pretrained(source))
    assert losses[-1] < losses[0] - 0.3, "a run that learns nothing proves nothing"
    assert [step["loss"] for step in steps] == pytest.approx(losses, rel=1e-5)


def test_drawn_weights_are_the_same_on_any_ranks_and_after_a_resume(tmp_path):
    small_config("llama").save_pretrained(tmp_path / "model")
    config = make_config(tmp_path, tmp_path / "model" / "config.json")
    config = with_documents(config, tmp_path)
    two = start(config, 2)
    unbroken = [step["loss"] for step in steps_of(two)]
    four = start(replace(config, run=replace(config.run, name="four")), 4)
    assert [step["loss"] for step in steps_of(four)] == pytest.approx(unbroken, rel=1e-5)

    # What the run was made of may be gone: the run folder has all that a resume needs.
    (tmp_path / "model" / "config.json").unlink()
    shutil.rmtree(tmp_path / "tokenizer")
    last = two.folder.checkpoints / "step-00000006"
    for file in last.iterdir():
        file.unlink()
    last.rmdir()
    again = resumed_job(two.folder.path, {}, more_steps=None)
    on_ranks(2, run_job, again)
    assert [step["loss"] for step in steps_of(again)] == unbroken


def resumed_scores(job: TrainJob) -> torch.Tensor:
    """Score some tokens by the sharded model that a run goes on with."""
    model = build_run(job, make_world()).model
    with torch.no_grad():
        return scores(model.eval(), torch.arange(24).view(2, 12))


@pytest.mark.parametrize(
    "kind", ["llama_tied", *(pytest.param(k, marks=pytest.mark.soak) for k in ("mixtral", "gpt2"))]
)
def test_an_exported_model_scores_the_same_in_transformers(tmp_path, kind):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = small_model(tmp_path / "model", kind)
    content = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**content, "dtype": "bfloat16"}))
    config = with_documents(make_config(tmp_path, source), tmp_path)
    job = start(replace(config, run=replace(config.run, export=True)), 2)
    again = resumed_job(job.folder.path, {}, more_steps=2)
    expected, _ = on_ranks(2, resumed_scores, again)

    exported = AutoModelForCausalLM.from_pretrained(job.folder.export)
    assert exported.dtype == torch.float32
    with torch.no_grad():
        torch.testing.assert_close(
            exported(torch.arange(24).view(2, 12)).logits, expected, rtol=0, atol=0
        )
    text = "the ship"
    tokens = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")(text)["input_ids"]
    assert AutoTokenizer.from_pretrained(job.folder.export)(text)["input_ids"] == tokens

    half = tmp_path / "half"
    checkpoint = str(job.folder.checkpoints / "latest")
    assert main(["checkpoint", "export", checkpoint, str(half), "--dtype", "bfloat16"]) == 0
    lower = AutoModelForCausalLM.from_pretrained(half)
    assert lower.dtype == torch.bfloat16
    for name, value in exported.state_dict().items():
        assert torch.equal(lower.state_dict()[name], value.bfloat16()), name
    # What was exported may be trained further.
    further = replace(config, model=replace(config.model, source=f"hf:{job.folder.export}"))
    with pytest.raises(UsageError, match="in which the model of --model lies"):
        new_job(further, overwrite=True)
    further = replace(further, run=replace(config.run, name="further"))
    assert steps_of(start(further, 2))[0]["loss"] < steps_of(job)[0]["loss"]
