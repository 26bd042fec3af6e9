"""The README's fine-tune of a Hugging Face model, typed as it stands there."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from integrations.launching import ROOT, environment, needs
from tiny_models import small_model, small_tokenizer

pytestmark = [needs("transformers", "safetensors", "tokenizers"), pytest.mark.timeout(300)]


def test_the_fine_tune(tmp_path: Path) -> None:
    """A small folder stands in for the download; the command is the README's, in fewer steps."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (command,) = re.findall(r"^shoal (train --model .*)$", (ROOT / "README.md").read_text(), re.M)
    words = command.replace("--steps 50", "--steps 3").split()
    assert "3" in words
    small_model(tmp_path / "model", max_position_embeddings=128)
    small_tokenizer(tmp_path / "model")
    lines = [json.dumps({"text": f"the fish number {n} swims in the sea"}) for n in range(400)]
    (tmp_path / "my.jsonl").write_text("\n".join(lines))
    done = subprocess.run(
        [sys.executable, "-m", "shoal", *words],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    export = tmp_path / "runs" / "mine" / "export"
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    after = AutoModelForCausalLM.from_pretrained(export)
    assert len(AutoTokenizer.from_pretrained(export)) > 0
    changed = [
        name
        for name, weight in after.state_dict().items()
        if not weight.equal(before.state_dict()[name])
    ]
    assert changed
    assert all("layers" in name for name in changed), "LoRA trains layers of the blocks alone"
