"""What a person sees."""

import io

import pytest
from rich.console import Console

from shoal.report.metrics import StepRecord, ValidationRecord
from shoal.train.observe.display import PlainLines, ProgressBar


def record(step: int, num_ranks: int = 2) -> StepRecord:
    memory = tuple(2.0**20 * (100 + rank) for rank in range(num_ranks))
    return StepRecord(step=step, loss=2.5, tokens_per_s=7000.0, memory_bytes=memory)


def shown(kind, steps, *, num_ranks=2, width=80, **options) -> str:
    console = Console(file=io.StringIO(), width=width, **options)
    display = kind(console, start_step=0, num_steps=100)
    for step in steps:
        display.on_step(record(step, num_ranks), ())
    display.on_validation(ValidationRecord(step=steps[-1], loss=2.25))
    display.on_note("[not markup]")
    display.close()
    return console.file.getvalue()


def test_lines_show_the_first_and_the_last_step_and_what_happens_between():
    lines = shown(PlainLines, range(1, 101)).splitlines()
    assert lines[0].startswith(
        "step 1/100  loss 2.5000  7,000 tokens/s  memory 100 MiB 101 MiB  left "
    )
    assert lines[1] == "step 100/100  loss 2.5000  7,000 tokens/s  memory 100 MiB 101 MiB"
    assert lines[2:] == ["step 100  validation loss 2.2500", "[not markup]"]


def test_many_ranks_are_summed_up():
    assert "100 MiB to 107 MiB x 8 ranks" in shown(PlainLines, [1], num_ranks=8)


@pytest.mark.parametrize(
    ("width", "numbers"),
    [
        (100, "loss 2.5000  7,000 tokens/s  memory 100 MiB 101 MiB"),
        (70, "loss 2.5000  7,000 tokens/s"),
        (50, "loss 2.5000"),
        (36, ""),
    ],
)
def test_the_bar_drops_the_least_important_numbers_first(width, numbers):
    text = shown(ProgressBar, [1, 50], width=width, force_terminal=True, color_system=None)
    last = [line for line in text.replace("\r", "\n").splitlines() if "step 50/100" in line][-1]
    assert numbers in last
    assert ("memory" in last, "tokens" in last) == ("memory" in numbers, "tokens" in numbers)
    assert "left " in last
    assert "…" not in last
    assert "validation loss 2.2500" in text
    assert "[not markup]" in text
