"""The end of a run: a sample of what it learned, the report, and where everything is."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from rich.console import Console
from torch import nn

from shoal.checkpoint.disk import disk_errors
from shoal.files import remove_folder, replace
from shoal.report import write_report
from shoal.train.data import Corpus
from shoal.train.job import TrainJob
from shoal.train.model import scores
from shoal.train.run_folder import RunFolder
from shoal.train.safe_stream import safe_stdout, say
from shoal.train.world import World

_PROMPT_TOKENS = 32
_TEMPERATURE = 0.7
_LARGEST_LOGIT = 1e30


def write_sample(job: TrainJob, world: World, model: nn.Module, corpus: Corpus) -> None:
    """Generate text as a continuation of held-out text; every rank takes part, one writes."""
    run, context = job.config.run, job.config.model.context
    if not run.sample_tokens:
        return
    text = corpus.validation if len(corpus.validation) else corpus.training
    prompt = text[: min(_PROMPT_TOKENS, context)].tolist()
    tokenizer = job.tokenizer()
    # Texts that grow byte by byte are not worth graphs of their own.
    is_compiled = job.config.parallel.compile != "off"
    with torch.compiler.set_stance("force_eager") if is_compiled else nullcontext():
        continuation = generate(
            model,
            prompt,
            num_tokens=run.sample_tokens,
            vocabulary=tokenizer.size,
            context=context,
            seed=run.seed,
            device=world.device,
        )
    if world.leads:
        sample = tokenizer.decode(prompt + continuation)
        with disk_errors("write", job.folder.sample):
            replace(job.folder.sample, sample.encode()).close()


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt: Sequence[int],
    *,
    num_tokens: int,
    vocabulary: int,
    context: int,
    seed: int,
    device: torch.device,
) -> list[int]:
    """Continue `prompt`; a sharded model needs all its ranks to call this alike.

    Always the same tokens for the same model: the draws come from `seed` alone.
    """
    draws = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    for _ in range(num_tokens):
        window = torch.tensor([tokens[-context:]], device=device)
        logits = scores(model, window)[0, -1, :vocabulary].float().cpu()
        # A model that has diverged scores with NaN or infinity; it may still babble.
        logits = logits.nan_to_num().clamp(-_LARGEST_LOGIT, _LARGEST_LOGIT)
        probabilities = torch.softmax(logits / _TEMPERATURE, dim=-1)
        tokens.append(int(torch.multinomial(probabilities, 1, generator=draws)))
    return tokens[len(prompt) :]


def draw_report(folder: RunFolder) -> str:
    """Write the report and tell where it is, or why there is none."""
    try:
        with disk_errors("write", folder.report):
            return str(write_report(folder.path))
    except ModuleNotFoundError as error:
        return f"not written, since {error.name} is not installed"


def export_trained(job: TrainJob, checkpoint: Path) -> None:
    """Write the model of a checkpoint for `transformers`; of a run that went on, anew."""
    from shoal.train.hugging_face.export import export_adapters, export_model

    folder, adapters = job.folder.export, job.folder.adapters
    with disk_errors("write", folder):
        for path in (folder, adapters):
            if path.exists():
                remove_folder(path)
    export_model(checkpoint, job.folder.model, folder)
    say(f"export      {folder}", stream=sys.stdout)
    if job.config.model.lora is not None:
        export_adapters(checkpoint, adapters)
        say(f"adapters    {adapters}", stream=sys.stdout)


def print_summary(job: TrainJob, checkpoint: Path, *, step: int, finished: bool) -> None:
    """Write the report and tell a person where things are; rank 0 does this."""
    console = Console(file=safe_stdout(), highlight=False, soft_wrap=True)
    report = draw_report(job.folder)
    steps = job.config.run.steps
    state = "finished" if finished else "stopped as asked"
    more = " --steps +100" if finished else ""
    lines = {
        state: f"step {step} of {steps}",
        "checkpoint": checkpoint,
        "report": report,
        "resume": job.folder.resume_command + more,
    }
    width = max(len(name) for name in lines)
    for name, value in lines.items():
        console.print(f"{name:{width}}  {value}", markup=False)
