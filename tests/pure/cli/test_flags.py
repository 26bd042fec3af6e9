"""Flags made from options."""

import pytest

from shoal.cli.flags import Parser, add_config_flags, given_options
from shoal.cli.suggest import did_you_mean
from shoal.cli.train import MoreSteps, make_parser
from shoal.errors import UsageError
from shoal.train.config import TrainConfig
from shoal.train.options import options_of


def given(*argv: str) -> dict[str, object]:
    arguments = make_parser().parse(argv)
    return {".".join(path): value for path, value in given_options(arguments, TrainConfig).items()}


def test_the_flags_are_these():
    """A flag is a promise: changing this list needs a line in the changelog."""
    assert sorted(option.flag for option in options_of(TrainConfig)) == [
        "--accumulate",
        "--activation-checkpointing",
        "--batch-size",
        "--beta1",
        "--beta2",
        "--check-replicas-every",
        "--clip",
        "--compile",
        "--context",
        "--data",
        "--device",
        "--dim",
        "--engine",
        "--export",
        "--final-lr",
        "--heads",
        "--held-out",
        "--hidden",
        "--keep-every",
        "--keep-last",
        "--layers",
        "--lora",
        "--lora-alpha",
        "--lora-targets",
        "--lr",
        "--max-bytes",
        "--max-restarts",
        "--model",
        "--momentum",
        "--name",
        "--nproc",
        "--on-nonfinite",
        "--optimizer",
        "--out",
        "--precision",
        "--profile",
        "--replicas",
        "--sample-tokens",
        "--save-every",
        "--seed",
        "--stall-limit",
        "--steps",
        "--tensorboard",
        "--text-key",
        "--threads",
        "--tokenizer",
        "--validate-every",
        "--validation-batches",
        "--wandb",
        "--warmup",
        "--weight-decay",
    ]


def test_only_what_was_given_counts():
    assert given() == {}
    assert given("--dim", "64", "--lr=1e-4", "--no-tensorboard", "--device", "cpu") == {
        "model.dim": 64,
        "optim.lr": 1e-4,
        "run.tensorboard": False,
        "parallel.device": "cpu",
    }


def test_steps_may_be_relative():
    assert given("--steps", "30") == {"run.steps": 30}
    assert given("--steps", "+30") == {"run.steps": MoreSteps(30)}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--stpes", "3"], r"unknown flag --stpes. Did you mean --steps\?"),
        (["--batchsize=3"], r"unknown flag --batchsize. Did you mean --batch-size\?"),
        (["--step", "3"], r"unknown flag --step. Did you mean --steps\?"),
        (["--zzzzqqq"], r"unknown flag --zzzzqqq. `shoal train --help` lists all"),
        (["extra"], r"unknown argument extra"),
        (["--dim", "wide"], r"argument --dim: expected a whole number, got 'wide'"),
        (["--lr", "fast"], r"argument --lr: expected a number, got 'fast'"),
        (["--steps", "+x"], r"expected a whole number, or \+K with --resume; got '\+x'"),
        (["--steps", "+0"], r"expected at least \+1"),
        (["--device", "tpu"], r"argument --device: invalid choice: 'tpu' \(choose from"),
        (["--dim"], r"argument --dim: expected one argument"),
    ],
)
def test_mistakes_are_answered(argv, message):
    with pytest.raises(UsageError, match=message):
        make_parser().parse(argv)


def test_help_is_grouped_and_shows_defaults():
    text = make_parser().format_help()
    for group in ("model:", "data:", "optimizer:", "ranks, devices and precision:", "run:"):
        assert f"\n{group}\n" in text
    joined = " ".join(text.split())
    assert "--seed N seed of the weights and of the order of the data (default: 0)" in joined
    assert "(default: off)" in joined
    assert max(len(line) for line in text.splitlines()) <= 100


def test_no_two_options_share_a_flag():
    parser = Parser(prog="x")
    add_config_flags(parser, TrainConfig)  # argparse refuses a flag that is there already


def test_nothing_near_means_no_question():
    assert did_you_mean("banana", ["train", "bench"]) == ""
    assert did_you_mean("trian", ["train", "bench"]) == " Did you mean train?"
