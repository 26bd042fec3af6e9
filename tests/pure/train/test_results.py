"""The sample of a run, and its last words."""

from pathlib import Path

import pytest
import torch
from torch import nn

from shoal.train import results
from shoal.train.config import RunConfig, TrainConfig
from shoal.train.job import TrainJob
from shoal.train.results import generate
from shoal.train.run_folder import RunFolder

JOB = TrainJob(
    config=TrainConfig(run=RunConfig(steps=9)), folder=RunFolder(Path("runs/x")), checkpoint=None
)


@pytest.mark.parametrize("finished", [True, False])
def test_a_person_learns_where_things_are_and_how_to_go_on(capsys, monkeypatch, finished):
    monkeypatch.setattr(results, "write_report", lambda folder: folder / "report.html")
    results.print_summary(JOB, Path("runs/x/checkpoints/step-9"), step=9, finished=finished)
    out = capsys.readouterr().out
    assert ("finished" in out) is finished
    assert "runs/x/checkpoints/step-9" in out
    assert "runs/x/report.html" in out
    more = " --steps +100" if finished else ""
    assert f"shoal train --resume runs/x{more}\n" in out


def test_a_run_does_not_fail_for_want_of_a_report(capsys, monkeypatch):
    def write_report(folder):
        raise ModuleNotFoundError("No module named 'jinja2'", name="jinja2")

    monkeypatch.setattr(results, "write_report", write_report)
    results.print_summary(JOB, Path("checkpoint"), step=9, finished=True)
    assert "not written, since jinja2 is not installed" in capsys.readouterr().out


class Successor(nn.Module):
    """Knows for sure that the next byte is the last one plus one."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        assert tokens.shape[1] <= 4, "the window is longer than the context"
        return nn.functional.one_hot((tokens + 1) % 256, 256).float() * 1000


class Unsure(nn.Module):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.zeros(*tokens.shape, 256)


def run(model: nn.Module, seed: int = 0) -> bytes:
    tokens = generate(
        model,
        b"abc",
        num_tokens=6,
        vocabulary=256,
        context=4,
        seed=seed,
        device=torch.device("cpu"),
    )
    return bytes(tokens)


class Lost(nn.Module):
    """Has diverged."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        scores = torch.full((*tokens.shape, 256), torch.nan)
        scores[..., ::2] = torch.inf
        scores[..., 1::4] = -torch.inf
        return scores


def test_a_model_that_has_diverged_still_says_something():
    assert len(run(Lost())) == 6


def test_text_continues_its_prompt():
    assert run(Successor()) == b"defghi"


def test_draws_come_from_the_seed_alone():
    torch.manual_seed(1)
    first = run(Unsure())
    torch.manual_seed(2)
    assert run(Unsure()) == first
    assert run(Unsure(), seed=1) != first
