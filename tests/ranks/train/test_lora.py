"""LoRA: the truth is the same model in one plain process, and what PEFT makes of the files."""

import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from harness import on_ranks
from ranks.train.test_hugging_face import (
    STEPS,
    make_config,
    resumed_scores,
    start,
    steps_of,
    unsharded,
    with_documents,
)
from shoal.cli.main import main
from shoal.errors import UsageError
from shoal.train.config import ModelConfig, TrainConfig
from shoal.train.hugging_face.adapters import add_adapters
from shoal.train.hugging_face.materialise import materialise
from shoal.train.hugging_face.models import build_skeleton, decoder_blocks, read_model_config
from shoal.train.hugging_face.stored_weights import opened_weights
from shoal.train.job import resumed_job
from tiny_models import needs_transformers, small_model

pytestmark = needs_transformers

TOKENS = torch.arange(24).view(2, 12)


def lora_config(folder: Path, kind: str = "llama", **model) -> TrainConfig:
    config = make_config(folder, small_model(folder / "model", kind))
    lora = replace(config.model, **{"lora": 4, "lora_alpha": 8.0, **model})
    return replace(with_documents(replace(config, model=lora), folder))


def plain_model(config: TrainConfig) -> torch.nn.Module:
    """The adapted model as the run begins, whole and in this process."""
    folder = Path((config.model.source or "").removeprefix("hf:"))
    model = build_skeleton(read_model_config(folder / "config.json"))
    blocks = decoder_blocks(model)
    add_adapters(model, blocks, config.model)
    with opened_weights(folder, model) as weights:
        for unit in (*blocks, model):
            materialise(model, blocks, unit, weights=weights, seed=config.run.seed)
    return model


def test_adapters_alone_train_as_in_one_process_and_after_a_resume(tmp_path):
    config = lora_config(tmp_path)
    job = start(config, 2)
    losses = unsharded(config, plain_model(config))
    assert losses[-1] < losses[0]
    assert [step["loss"] for step in steps_of(job)] == pytest.approx(losses, rel=1e-5)
    first = job.folder.checkpoints / "step-00000004"
    again = resumed_job(first, {}, more_steps=STEPS - 4, overwrite=True)
    before = [step["loss"] for step in steps_of(job)]
    from ranks.train.test_hugging_face import run_job

    on_ranks(2, run_job, again)
    assert [step["loss"] for step in steps_of(again)] == before


@pytest.mark.parametrize(
    ("kind", "targets"),
    [("llama", "all"), pytest.param("qwen3", "q_proj,v_proj", marks=pytest.mark.soak)],
)
def test_exports_score_as_the_run_does(tmp_path, kind, targets):
    from transformers import AutoModelForCausalLM

    config = lora_config(tmp_path, kind, lora_targets=targets)
    job = start(replace(config, run=replace(config.run, export=True)), 2)
    expected, _ = on_ranks(2, resumed_scores, resumed_job(job.folder.path, {}, more_steps=2))
    source = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    merged = AutoModelForCausalLM.from_pretrained(job.folder.export)
    with torch.no_grad():
        torch.testing.assert_close(merged(TOKENS).logits, expected, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(source(TOKENS).logits, expected, rtol=1e-4, atol=1e-5)
    changed = {
        name.rpartition(".")[0].rpartition(".")[2]
        for name, value in merged.state_dict().items()
        if not torch.equal(value, source.state_dict()[name])
    }
    assert changed >= {"q_proj", "v_proj"}
    assert ("k_proj" in changed) == (targets == "all")
    assert not {"embed_tokens", "lm_head", "norm"} & changed

    again = tmp_path / "adapters"
    checkpoint = str(job.folder.checkpoints / "latest")
    assert main(["checkpoint", "export", checkpoint, str(again), "--adapters"]) == 0
    weights = "adapter_model.safetensors"
    assert (again / weights).read_bytes() == (job.folder.adapters / weights).read_bytes()
    peft = pytest.importorskip("peft", reason="PEFT reads the adapters")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = peft.PeftModel.from_pretrained(source, str(again))
    with torch.no_grad():
        torch.testing.assert_close(adapted(TOKENS).logits, expected, rtol=1e-4, atol=1e-5)


def test_mistakes_are_named(tmp_path):
    model = build_skeleton(read_model_config(small_model(tmp_path / "m") / "config.json"))
    with pytest.raises(UsageError, match=r"--lora-targets: no layer .* 'fish'; expected some of"):
        add_adapters(
            model, decoder_blocks(model), ModelConfig(source="hf:m", lora=2, lora_targets="fish")
        )
    gpt2 = build_skeleton(read_model_config(small_model(tmp_path / "g", "gpt2") / "config.json"))
    with pytest.raises(UsageError, match=r"--lora: the decoder blocks .* have no nn.Linear layers"):
        add_adapters(gpt2, decoder_blocks(gpt2), ModelConfig(source="hf:g", lora=2))
    with pytest.raises(UsageError, match="--lora needs --model"):
        ModelConfig(lora=2)
    job = start(replace(lora_config(tmp_path / "plain"), model=_without(tmp_path / "plain")), 1)
    assert (
        main(
            [
                "checkpoint",
                "export",
                str(job.folder.checkpoints / "latest"),
                str(tmp_path / "o"),
                "--adapters",
            ]
        )
        == 2
    )


def _without(folder: Path) -> ModelConfig:
    return ModelConfig(source=f"hf:{folder / 'model'}", context=16, tokenizer=folder / "tokenizer")
