"""Models of transformers: built without memory, given values unit by unit."""

import json
from pathlib import Path

import pytest
import torch

from shoal.cli.main import main
from shoal.errors import UsageError
from shoal.train.config import ModelConfig
from shoal.train.hugging_face.materialise import materialise
from shoal.train.hugging_face.models import (
    build_skeleton,
    config_file,
    decoder_blocks,
    read_model_config,
    weights_folder,
)
from shoal.train.hugging_face.stored_weights import opened_weights
from shoal.train.job import check_parts
from shoal.train.model import scores
from shoal.train.model_facts import facts_of_config
from tiny_models import SMALL, needs_transformers, small_config, small_model


def whole(path: Path, weights: Path | None = None, seed: int = 0) -> torch.nn.Module:
    """Give all units of a model their values, one after the other, and shard none."""
    model = build_skeleton(read_model_config(path))
    blocks = decoder_blocks(model)
    with opened_weights(weights, model) as opened:
        for unit in (*blocks, model):
            materialise(model, blocks, unit, weights=opened, seed=seed)
    return model


@needs_transformers
@pytest.mark.parametrize("kind", SMALL)
def test_loaded_models_score_as_in_transformers(tmp_path, kind):
    from transformers import AutoModelForCausalLM

    folder = small_model(tmp_path / "model", kind)
    expected = AutoModelForCausalLM.from_pretrained(folder)
    model = whole(folder / "config.json", weights_folder(f"hf:{folder}"))
    tokens = torch.arange(24).view(2, 12)
    torch.testing.assert_close(
        scores(model.eval(), tokens), expected(tokens).logits, rtol=0, atol=0
    )
    assert len(decoder_blocks(model)) == 3


@needs_transformers
@pytest.mark.parametrize("kind", SMALL)
def test_drawn_models_have_no_value_left_out(tmp_path, kind):
    """Spread and constants are those that transformers draws; the same seed draws the same."""
    from transformers import AutoModelForCausalLM

    config = small_config(kind)
    config.save_pretrained(tmp_path)
    torch.manual_seed(0)
    expected = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model, again, other = (whole(tmp_path / "config.json", seed=seed) for seed in (3, 3, 4))
    theirs = {**dict(expected.named_parameters()), **dict(expected.named_buffers())}
    mine = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        if theirs[name].unique().numel() <= 2 or name in dict(expected.named_buffers()):
            assert torch.equal(tensor, theirs[name]), name
        else:
            assert tensor.std().item() == pytest.approx(theirs[name].std().item(), rel=0.3), name
    for one, two in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, two)
    assert not all(
        torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True)
    )


@needs_transformers
def test_facts_are_known_without_memory(tmp_path):
    small_config("llama").save_pretrained(tmp_path)
    facts = facts_of_config(tmp_path / "config.json")
    model = whole(tmp_path / "config.json")
    assert facts.num_parameters == sum(p.numel() for p in model.parameters())
    assert (facts.vocabulary, facts.width, facts.most_positions) == (300, 32, 64)
    assert facts.largest_unit == 300 * 32  # the embedding, or the head


@needs_transformers
def test_weights_of_another_model_are_refused(tmp_path):
    folder = small_model(tmp_path / "model")
    content = json.loads((folder / "config.json").read_text())
    wider = tmp_path / "wider.json"
    wider.write_text(json.dumps({**content, "intermediate_size": 96}))
    with pytest.raises(UsageError, match=r"down_proj\.weight has the shape \(32, 96\) by"):
        whole(wider, folder)
    deeper = tmp_path / "deeper.json"
    deeper.write_text(json.dumps({**content, "num_hidden_layers": 4, "layer_types": None}))
    with pytest.raises(UsageError, match=r"holds no model\.layers\.3\.self_attn"):
        whole(deeper, folder)


@needs_transformers
def test_cut_off_weights_are_refused(tmp_path):
    folder = small_model(tmp_path / "model")
    file = sorted(folder.glob("*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(UsageError, match=f"{file.name} cannot be read as safetensors"):
        whole(folder / "config.json", folder)


@needs_transformers
def test_configs_that_are_no_model_are_refused(tmp_path):
    file = tmp_path / "config.json"
    for text, message in (
        ("{", "is not JSON"),
        ("[]", "names no model_type"),
        ('{"model_type": "lama"}', "Did you mean llama"),
        ('{"model_type": "x1", "auto_map": {}}', "code of its own, which is never run"),
        ('{"model_type": "llama", "num_hidden_layers": "two"}', "transformers refuses"),
        ('{"model_type": "llama", "num_attention_heads": 3}', "transformers refuses"),
        ('{"model_type": "llama", "hidden_act": "sine"}', "transformers cannot build a llama"),
        ('{"model_type": "llama", "num_hidden_layers": -1}', "num_hidden_layers -1; expected at"),
        ('{"model_type": "gpt2", "n_layer": 0}', "num_hidden_layers 0; expected at least 1"),
        ('{"model_type": "llama", "hidden_size": 0}', "hidden_size 0; expected at least 1"),
        ('{"model_type": "vit"}', r"no causal language model of transformers [\d.]+\.$"),
    ):
        file.write_text(text)
        with pytest.raises(UsageError, match=message) as caught:
            build_skeleton(read_model_config(file))
        assert "\n" not in str(caught.value)


def test_references_name_files_of_this_machine(tmp_path):
    with pytest.raises(UsageError, match="hf download org/model --local-dir"):
        config_file("hf:org/model")
    with pytest.raises(UsageError, match=r"no config\.json in"):
        config_file(f"hf:{tmp_path}")
    (tmp_path / "config.json").write_text("{}")
    assert config_file(f"hf:{tmp_path}") == tmp_path / "config.json"
    assert weights_folder(f"hf:{tmp_path}") is None
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(UsageError, match=r"pytorch_model\.bin is a pickle"):
        weights_folder(f"hf:{tmp_path}")
    assert weights_folder(f"hf:{tmp_path / 'config.json'}") is None


@needs_transformers
@pytest.mark.parametrize("kind", sorted(SMALL))
def test_the_weights_of_a_model_are_found_to_be_its_own(tmp_path, kind):
    """Also tied ones, of which one is stored, and experts that are stored in pieces."""
    folder = small_model(tmp_path / "model", kind)
    check_parts(ModelConfig(source=f"hf:{folder}"), folder / "config.json")


def damaged(folder: Path, how: str) -> Path:
    small_model(folder)
    config = folder / "config.json"
    content = json.loads(config.read_text())
    if how == "cut":
        file = min(folder.glob("*.safetensors"))
        file.write_bytes(file.read_bytes()[:-50])
    elif how == "wide":
        config.write_text(json.dumps({**content, "hidden_size": 64}))
    elif how == "deep":
        config.write_text(json.dumps({**content, "num_hidden_layers": 5}))
    return folder


@needs_transformers
@pytest.mark.parametrize(
    ("how", "lora", "message"),
    [
        ("cut", (), "cannot be read as safetensors"),
        ("wide", (), "has the shape"),
        ("deep", (), "holds no model.layers.3."),
        (
            "",
            ("--lora", "2", "--lora-targets", "q_prj"),
            "no layer of the decoder blocks is called",
        ),
    ],
)
def test_a_model_that_cannot_be_leaves_no_run_folder(tmp_path, capsys, how, lora, message):
    folder = damaged(tmp_path / "model", how)
    words = ["train", "--model", f"hf:{folder}", "--out", str(tmp_path / "runs"), "--name", "run"]
    words += ["--device", "cpu", "--context", "16", "--max-bytes", "50000", *lora]
    assert main(words) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
