"""A process that SIGTERM ends says what it knows, and dies of SIGTERM all the same."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "src" / "shoal" / "watch"
# By itself: its package would import torch, which takes seconds.
PROLOGUE = """
import ctypes, multiprocessing, os, signal, time
from sigterm import printing_on_sigterm
def word(): return "last word"
def ready(): print("ready", flush=True)
"""

BODIES = {
    # The main thread is inside a call that no signal ends.
    "in C": "with printing_on_sigterm(word):\n    ready()\n"
    "    while True: ctypes.CDLL(None).sleep(60)",
    "in Python": "with printing_on_sigterm(word):\n    ready()\n    while True: pass",
    "twice": "with printing_on_sigterm(word): pass\n"
    "with printing_on_sigterm(word):\n    ready()\n    time.sleep(60)",
}


def terminated(body: str) -> tuple[int, str]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROLOGUE + body],
        env={**os.environ, "PYTHONPATH": str(FOLDER)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.1)
    process.terminate()
    _, err = process.communicate(timeout=60)
    return process.returncode, err


@pytest.mark.parametrize("name", BODIES)
def test_the_last_word_is_said_wherever_the_main_thread_is(name):
    assert terminated(BODIES[name]) == (-signal.SIGTERM, "last word\n")


@pytest.mark.parametrize(
    "body",
    [
        "with printing_on_sigterm(lambda: ''):\n    ready()\n    time.sleep(60)",
        "with printing_on_sigterm(lambda: 1 / 0):\n    ready()\n    time.sleep(60)",
        "with printing_on_sigterm(word): pass\nready()\ntime.sleep(60)",
    ],
    ids=["nothing to say", "an error", "afterwards"],
)
def test_without_a_word_it_dies_as_ever(body):
    assert terminated(body) == (-signal.SIGTERM, "")


def test_a_fork_dies_of_its_own_sigterm_and_its_parent_does_not():
    body = """
with printing_on_sigterm(word):
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    child.start()
    child.terminate()
    child.join(10)
    time.sleep(0.2)
    assert child.exitcode == -signal.SIGTERM, child.exitcode
    ready()
    time.sleep(60)
"""
    assert terminated(body) == (-signal.SIGTERM, "last word\n")


def test_a_program_that_handles_sigterm_keeps_its_way():
    body = """
signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
with printing_on_sigterm(word):
    ready()
    time.sleep(60)
"""
    assert terminated(body) == (7, "")
