"""Ways in which a rank can leave the others: each is reported in time, with its name."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("misbehaving.py")
SOURCE = Path(__file__).parents[3] / "src"
LIMIT_S = 2.0

EXPECTED = {
    "stuck-before-first": ("rank 1 did not come to the gather of unit 'first'", "sleep_at"),
    "stuck-before-second": ("rank 0 did not come to the gather of unit 'third'", "sleep_at"),
    "stuck-before-third": ("rank 2 did not come to the gather of unit 'third'", "sleep_at"),
    "stuck-in-backward": ("rank 1 did not come to the reduction of unit 'second'", "sleep_at"),
    "stuck-replica": ("rank 2 did not come to all-reduce of bucket 0", "sleep_at"),
    "stuck-by-hand": ("rank 1 did not come to all-reduce of b (8 of float32), collective 3",),
    "stuck-outside": ("rank 2 has launched ", "by torch's count, ranks 0, 1 ", "sleep_at"),
    "killed": ("rank 1 does not answer", "last that it launched was the gather of unit 'second'"),
    "stopped": ("rank 2 does not answer", "last that it launched was the gather of unit 'third'"),
    "skipped-unit": ("rank 1 skipped the gather of unit 'second'",),
    "skipped-replica": ("rank 0 did not come to 2 of 6 parameters: 'second.weight'",),
    "skipped-first-by-hand": ("rank 2 ", "gather a: its collective 1 of group 0 was reduction"),
    "skipped-reduction-by-hand": (
        "rank 1 ",
        "reduction: its collective 2 of group 0 was all-reduce",
    ),
    "reordered-units": ("rank 1 launched the gather of unit 'first' out of order",),
    "reordered-units-0": ("rank 0 launched the gather of unit 'first' out of order",),
    "reordered-by-hand": ("rank 2 launched gather a out of order",),
    "larger-gather": ("rank 1 launched gather a with another size", "(180 of float32)"),
    "smaller-all-reduce": ("rank 0 launched all-reduce of b with another size", "(2 of float32)"),
    "larger-reduction": ("rank 2 launched reduction with another size", "(12 of float32)"),
    "raised": ("rank 1 failed, in step 2, in the forward of unit 'third' with ValueError: bad",),
    "out-of-memory": ("rank 2 failed, in step 2, in the backward of unit 'second' with Memory",),
}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """What the ranks of all cases told."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path_factory.mktemp("watch"))],
        # Without what would name those ranks first.
        env={**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "SHOAL_DEBUG": ""},
        capture_output=True,
        text=True,
        timeout=200,
    )
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(found) == len(EXPECTED), done.stdout + done.stderr[-3000:]
    return {case["name"]: case for case in found}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", EXPECTED)
def test_who_left_is_named_in_time(cases, name):
    victim, told = cases[name]["victim"], cases[name]["told"]
    # A machine that has much else to do runs the ranks themselves too late.
    slack_s = 0 if os.getloadavg()[0] < 2 * (os.cpu_count() or 1) else 10
    assert told, "nobody said anything"
    others = [found for rank, found in told.items() if rank != str(victim)]
    # gloo ends the processes that receive more than they expect: then the victim tells of itself.
    for found in others or told.values():
        for text in EXPECTED[name]:
            assert text in found["text"], found["text"]
        assert found["after_s"] < LIMIT_S + 2 + slack_s
