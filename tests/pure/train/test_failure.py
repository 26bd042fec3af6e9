"""Of several failed ranks, the one that failed first is told."""

import json
import signal
import time
from pathlib import Path

import pytest

from shoal.errors import CheckpointError, DivergedError, RankError, UsageError
from shoal.train.failure import RankEnd, as_error, read_reply, reporting_failure, write_failure
from shoal.train.run_folder import RunFolder
from shoal.watch.log import CollectiveLog, log_path

FOLDER = RunFolder(Path("runs/x"))


def raised(tmp_path: Path, rank: int, error: Exception) -> RankEnd:
    file = tmp_path / f"rank-{rank}.json"
    write_failure(file, error)
    return RankEnd(rank=rank, pid=100 + rank, status=1, reply=read_reply(file))


def ended(rank: int, status: int, **facts: bool) -> RankEnd:
    return RankEnd(rank=rank, pid=100 + rank, status=status, **facts)


def test_a_killed_rank_comes_before_those_that_miss_it(tmp_path):
    ends = [
        raised(tmp_path, 0, RankError("connection reset by peer")),
        ended(1, -signal.SIGKILL),
        ended(2, -signal.SIGTERM, is_lost=False),
        ended(3, -signal.SIGABRT),
    ]
    error = as_error(ends, FOLDER)
    assert isinstance(error, RankError)
    assert str(error).startswith("rank 1 (local rank 1, pid 101) died with SIGKILL.")
    assert "out of memory" in str(error)
    assert "runs/x/logs/rank-1.err. There is no checkpoint yet." in str(error)


def test_a_failure_tells_from_where_the_run_can_go_on(tmp_path):
    folder = RunFolder(tmp_path / "my runs" / "x")
    for step in (90, 100):
        (folder.checkpoints / f"step-{step:08d}").mkdir(parents=True)
        (folder.checkpoints / f"step-{step:08d}" / "manifest.json").touch()
    text = str(as_error([ended(1, -signal.SIGKILL)], folder))
    assert text.endswith(f"Resume from step 100 with: shoal train --resume '{folder.path}'")


def test_the_first_error_comes_before_its_consequences(tmp_path):
    second = raised(tmp_path, 2, ValueError("the cause"))
    time.sleep(0.001)
    first = raised(tmp_path, 0, RuntimeError("connection closed"))
    error = as_error([first, ended(1, -signal.SIGABRT), second], FOLDER)
    assert "rank 2 (local rank 2, pid 102) failed with ValueError: the cause" in str(error)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_rank_that_the_launcher_ended_is_never_the_cause(tmp_path, number):
    """A stopped rank outlives SIGTERM and dies of SIGKILL, after the others had named it."""
    verdict = raised(tmp_path, 0, RankError("rank 1 does not answer"))
    victim = ended(1, -number, is_lost=False, was_stopped=True)
    text = str(as_error([verdict, victim], FOLDER))
    assert text.startswith("rank 1 (local rank 1, pid 101) was stopped by a signal (SIGSTOP or")
    assert "rank 1 does not answer" in text
    assert "died with" not in text
    assert "out of memory" not in text


@pytest.mark.parametrize("kind", [UsageError, CheckpointError, DivergedError])
def test_an_error_that_all_share_is_told_as_it_is(tmp_path, kind):
    error = as_error([raised(tmp_path, rank, kind("a bad file")) for rank in range(2)], FOLDER)
    assert type(error) is kind
    assert str(error) == "a bad file"


def test_an_exit_without_a_word_is_told_with_its_status():
    assert "rank 3 (local rank 3, pid 103) exited with status 7" in str(
        as_error([ended(3, 7)], FOLDER)
    )


def test_of_ranks_that_gloo_aborted_the_logs_tell(tmp_path):
    folder = RunFolder(tmp_path)
    folder.logs.mkdir()
    for rank, numel in enumerate((4, 4, 9)):
        log = CollectiveLog(log_path(folder.logs, rank))
        log.add("0", "the gather of unit 'a'", f"{numel} of float32")
    text = str(as_error([ended(rank, -signal.SIGABRT) for rank in range(3)], folder))
    assert "rank 2 launched the gather of unit 'a' with another size" in text


def test_a_reply_that_was_cut_off_says_nothing(tmp_path):
    assert read_reply(tmp_path / "none") == {}
    (tmp_path / "cut").write_text('{"message": {"te')
    assert read_reply(tmp_path / "cut") == {}


def test_where_an_error_began_is_told(tmp_path):
    error = ValueError("boom")
    error.add_note("in step 7, in the forward of unit 'blocks.1'")
    text = str(as_error([raised(tmp_path, 1, error)], FOLDER))
    assert "failed with ValueError: boom\nin step 7, in the forward of unit 'blocks.1'\n" in text


def test_ranks_that_were_started_again_have_logs_of_their_own():
    assert "logs/rank-3.restart-2.err" in str(as_error([ended(3, 7)], FOLDER, restart=2))


def test_a_failure_is_left_where_the_agent_looks(tmp_path, monkeypatch):
    file = tmp_path / "reply.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    with pytest.raises(ValueError, match="broken"), reporting_failure():
        raise ValueError("broken")
    message = json.loads(file.read_text())["message"]
    assert message["message"] == "ValueError: broken"
    assert "test_failure.py" in message["extraInfo"]["py_callstack"]
