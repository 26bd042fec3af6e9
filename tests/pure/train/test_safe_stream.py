"""A run outlives whoever reads its output."""

import os
from pathlib import Path

import pytest

from shoal.train.safe_stream import SafeStream, printable, say


def test_a_closed_pipe_is_written_to_in_vain():
    reading, writing = os.pipe()
    stream = os.fdopen(writing, "w")
    say("heard", stream=stream)
    assert os.read(reading, 100) == b"heard\n"
    os.close(reading)
    for _ in range(2):
        say("unheard", stream=stream)
    stream.close()  # nothing is left over that could fail now


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_no_reason_to_stop():
    with open("/dev/full", "w") as stream:
        safe = SafeStream(stream)
        safe.write("x" * 100_000)
        safe.flush()


def test_what_a_terminal_would_obey_is_shown():
    assert printable("a\x1b]0;x\a \ud800\n\tä", keep="\n\t") == "a\\x1b]0;x\\x07 \\ud800\n\tä"
