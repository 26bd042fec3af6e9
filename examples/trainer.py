"""Fine-tune a causal language model of Transformers with Trainer, PEFT or TRL, sharded by shoal.

    torchrun --nproc-per-node 2 examples/trainer.py --output out
    accelerate launch --use_fsdp --fsdp_version 2 --num_processes 2 examples/trainer.py
    torchrun --nproc-per-node 2 examples/trainer.py --method lora
    torchrun --nproc-per-node 2 examples/trainer.py --method sft --resume

Without `--model` (a folder or a name of a model) a tiny Llama with random weights is trained on
random tokens, which needs no network.
"""

from __future__ import annotations

import argparse

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments

from shoal.integrations.accelerate import use_shoal

TINY = LlamaConfig(
    vocab_size=128,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)


def main() -> None:
    """Train, save and say where the weights are."""
    options = parse()
    torch.manual_seed(0)
    trainer = BUILDERS[options.method](model_of(options), dataset(), options)
    use_shoal(trainer)
    trainer.train(resume_from_checkpoint=options.resume or None)
    trainer.save_model(f"{options.output}/final")
    if trainer.is_world_process_zero():
        print(f"weights for from_pretrained in {options.output}/final")


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--method", choices=sorted(BUILDERS), default="trainer")
    parser.add_argument("--model", help="folder or name of a causal language model")
    parser.add_argument("--output", default="out")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--resume", action="store_true", help="from the newest checkpoint")
    return parser.parse_args()


def model_of(options: argparse.Namespace) -> torch.nn.Module:
    """The model that was asked for, or the tiny one."""
    if options.model:
        return AutoModelForCausalLM.from_pretrained(options.model)
    return AutoModelForCausalLM.from_config(TINY)


def dataset() -> Dataset:
    """Sixty-four rows of sixteen random tokens."""
    tokens = torch.randint(0, 128, (64, 16), generator=torch.Generator().manual_seed(1))
    return Dataset.from_dict({"input_ids": tokens.tolist(), "labels": tokens.tolist()})


def settings(options: argparse.Namespace) -> dict:
    """What all methods have in common; `fsdp_config` says what is sharded and how."""
    return {
        "output_dir": options.output,
        "max_steps": options.steps,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_steps": 2,
        "report_to": "none",
        "bf16": options.bf16,
        "use_cpu": not torch.cuda.is_available(),
        "fsdp": True,
        "fsdp_config": {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
    }


def plain(model: torch.nn.Module, data: Dataset, options: argparse.Namespace) -> Trainer:
    """Transformers' Trainer; every parameter is trained."""
    return Trainer(model, TrainingArguments(**settings(options)), train_dataset=data)


def lora(model: torch.nn.Module, data: Dataset, options: argparse.Namespace) -> Trainer:
    """The same with PEFT: low-rank matrices are trained beside frozen weights."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return plain(get_peft_model(model, config), data, options)


def sft(model: torch.nn.Module, data: Dataset, options: argparse.Namespace) -> Trainer:
    """TRL's supervised fine-tuning, on rows that are tokenised already."""
    from trl import SFTConfig, SFTTrainer

    arguments = SFTConfig(
        **settings(options), dataset_kwargs={"skip_prepare_dataset": True}, max_length=None
    )
    return SFTTrainer(
        model, args=arguments, train_dataset=data, processing_class=tokenizer_of(options)
    )


def tokenizer_of(options: argparse.Namespace) -> object:
    """The model's tokenizer, or one whose words are numbers."""
    from tokenizers import Tokenizer, models
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if options.model:
        return AutoTokenizer.from_pretrained(options.model)
    words = Tokenizer(models.WordLevel({str(word): word for word in range(128)}, unk_token="0"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1")


BUILDERS = {"trainer": plain, "lora": lora, "sft": sft}

if __name__ == "__main__":
    main()
