"""Accelerate, Trainer, PEFT and TRL on shoal: the numbers of torch's FSDP2 in the same framework.

The first two are what `make test` runs where the frameworks are installed; `make
test-integrations` installs them and runs all.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from integrations.launching import EXAMPLES, SCRIPTS, needs, python, succeed, torchrun

pytestmark = [needs("accelerate", "transformers", "datasets"), pytest.mark.timeout(400)]


def run(case: str, folder: Path) -> dict[str, Any]:
    succeed(torchrun(SCRIPTS / "accelerate_runs.py", case, folder))
    return json.loads((folder / f"{case}.json").read_text())


def check_trained(found: dict[str, Any]) -> None:
    assert found["is_shoal"]
    assert found["sharded"]
    assert found["units"] == 4  # two blocks, the embedding, the rest
    assert found["shoal"] == found["torch"]
    assert len(set(found["shoal"])) > 1
    assert found["same_weights"]
    assert found["resumed"] == found["shoal"][2:]
    assert found["same_resumed"]
    assert found["same_tokens"]


def test_trainer(tmp_path: Path) -> None:
    found = run("trainer", tmp_path)
    check_trained(found)
    assert found["same_logits"]
    assert found["class"] == ["LlamaForCausalLM"]


@pytest.mark.soak
def test_a_loop_with_clipping_accumulation_checkpointing_and_saved_state(tmp_path: Path) -> None:
    found = run("loop", tmp_path)
    assert found["shoal"] == found["torch"]
    assert found["shoal after"] == found["shoal reloaded"] == found["torch after"]
    assert found["shoal class"].startswith("shoal.")
    assert found["torch class"].startswith("torch.")


@pytest.mark.soak
@pytest.mark.parametrize("case", ["sharded", "version 1"])
def test_other_configs(case: str, tmp_path: Path) -> None:
    found = run(case, tmp_path)
    check_trained(found)
    assert found["same_logits"]


@pytest.mark.soak
def test_bf16(tmp_path: Path) -> None:
    """Logits of bf16 compute are not those that `from_pretrained` computes in fp32."""
    check_trained(run("bf16", tmp_path))


@pytest.mark.soak
@needs("peft")
def test_lora(tmp_path: Path) -> None:
    found = run("lora", tmp_path)
    check_trained(found)
    assert found["same_logits"]


@pytest.mark.soak
@needs("trl")
def test_supervised_fine_tuning(tmp_path: Path) -> None:
    found = run("sft", tmp_path)
    check_trained(found)
    assert found["same_logits"]


@pytest.mark.soak
def test_accelerate_launch(tmp_path: Path) -> None:
    """The launcher's own flags, and the example as it is written."""
    flags = ("--use_fsdp", "--fsdp_version=2", "--fsdp_auto_wrap_policy=TRANSFORMER_BASED_WRAP")
    launcher = ("-m", "accelerate.commands.launch", *flags)
    done = torchrun(EXAMPLES / "trainer.py", "--output", tmp_path, launcher=launcher)
    assert "weights for from_pretrained" in succeed(done)
    assert (tmp_path / "final" / "model.safetensors").exists()


@pytest.mark.parametrize("case", ["not distributed", "not sharded", "hybrid", "late", "layer"])
def test_mistakes_say_what_to_do(case: str, tmp_path: Path) -> None:
    expected = {
        "not distributed": "UsageError: Accelerate runs in one process, so there is nothing to",
        "not sharded": "UsageError: Accelerate did not select sharding: it runs MULTI_CPU, and",
        "hybrid": "NotImplementedError: shoal: the sharding strategy HYBRID_SHARD of fsdp_ver",
        "late": "UsageError: use_shoal came after accelerator.prepare(model, ...): call it",
        "layer": "UsageError: the FSDP config wraps layers of class ['Blok'], which LlamaForC",
    }
    script = SCRIPTS / "accelerate_mistakes.py"
    done = python(script, case) if case == "not distributed" else torchrun(script, case)
    assert done.returncode != 0
    assert expected[case] in done.stderr, done.stderr[-3000:]
