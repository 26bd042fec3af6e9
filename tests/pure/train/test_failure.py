"""Of several failed ranks, the one that failed first is told."""

import json
import signal
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from shoal.errors import EXIT_INTERRUPTED, CheckpointError, DivergedError, RankError, UsageError
from shoal.train.failure import (
    as_error,
    reporting_failure,
    shared_error,
    was_interrupted,
    write_failure,
)
from shoal.train.folder import RunFolder
from shoal.watch.log import CollectiveLog, log_path

FOLDER = RunFolder(Path("runs/x"))


def raised(tmp_path: Path, rank: int, error: Exception) -> ProcessFailure:
    file = tmp_path / f"rank-{rank}.json"
    write_failure(file, error)
    return ProcessFailure(local_rank=rank, pid=100 + rank, exitcode=1, error_file=str(file))


def ended(rank: int, exitcode: int) -> ProcessFailure:
    return ProcessFailure(local_rank=rank, pid=100 + rank, exitcode=exitcode, error_file="none")


def test_a_killed_rank_comes_before_those_that_miss_it(tmp_path):
    failures = {
        0: raised(tmp_path, 0, RankError("connection reset by peer")),
        1: ended(1, -signal.SIGKILL),
        2: ended(2, -signal.SIGTERM),
        3: ended(3, -signal.SIGABRT),
    }
    error = as_error(failures, FOLDER)
    assert isinstance(error, RankError)
    assert str(error).startswith("rank 1 (local rank 1, pid 101) died with SIGKILL.")
    assert "out of memory" in str(error)
    assert "runs/x/logs/rank-1.err. There is no checkpoint yet." in str(error)


def test_a_failure_tells_from_where_the_run_can_go_on(tmp_path):
    folder = RunFolder(tmp_path / "my runs" / "x")
    for step in (90, 100):
        (folder.checkpoints / f"step-{step:08d}").mkdir(parents=True)
        (folder.checkpoints / f"step-{step:08d}" / "manifest.json").touch()
    text = str(as_error({1: ended(1, -signal.SIGKILL)}, folder))
    assert text.endswith(f"Resume from step 100 with: shoal train --resume '{folder.path}'")


def test_the_first_error_comes_before_its_consequences(tmp_path):
    second = raised(tmp_path, 2, ValueError("the cause"))
    time.sleep(0.001)
    first = raised(tmp_path, 0, RuntimeError("connection closed"))
    error = as_error({0: first, 1: ended(1, -signal.SIGABRT), 2: second}, FOLDER)
    assert "rank 2 (local rank 2, pid 102) failed with ValueError: the cause" in str(error)


def test_of_a_terminated_rank_and_an_error_the_earlier_is_told(tmp_path):
    """SIGTERM comes from someone, or from the agent after another rank's error."""
    folder = RunFolder(tmp_path)
    folder.logs.mkdir()
    log = folder.logs / "rank-1.err"
    log.write_text("stacks, dumped at the signal")
    time.sleep(0.02)
    error = raised(tmp_path, 0, RankError("connection reset"))
    assert "rank 1 (local rank 1, pid 101) died with SIGTERM" in str(
        as_error({0: error, 1: ended(1, -signal.SIGTERM)}, folder)
    )
    time.sleep(0.02)
    log.write_text("stacks, dumped at the signal")
    assert "rank 0 (local rank 0, pid 100) failed with RankError" in str(
        as_error({0: error, 1: ended(1, -signal.SIGTERM)}, folder)
    )


@pytest.mark.parametrize("kind", [UsageError, CheckpointError, DivergedError])
def test_an_error_that_all_share_is_told_as_it_is(tmp_path, kind):
    failures = {rank: raised(tmp_path, rank, kind("a bad file")) for rank in range(2)}
    error = as_error(failures, FOLDER)
    assert type(error) is kind
    assert str(error) == "a bad file"


def test_an_exit_without_a_word_is_told_with_its_status():
    assert "rank 3 (local rank 3, pid 103) exited with status 7" in str(
        as_error({3: ended(3, 7)}, FOLDER)
    )


def test_of_ranks_that_gloo_aborted_the_logs_tell(tmp_path):
    folder = RunFolder(tmp_path)
    folder.logs.mkdir()
    for rank, numel in enumerate((4, 4, 9)):
        log = CollectiveLog(log_path(folder.logs, rank))
        log.add("0", "the gather of unit 'a'", f"{numel} of float32")
    failures = {rank: ended(rank, -signal.SIGABRT) for rank in range(3)}
    text = str(as_error(failures, folder))
    assert "rank 2 launched the gather of unit 'a' with another size" in text


def test_an_error_that_ranks_left_behind_is_found(tmp_path):
    assert shared_error(tmp_path) is None
    raised(tmp_path, 0, RankError("gone"))
    assert shared_error(tmp_path) is None
    raised(tmp_path, 1, CheckpointError("a bad file"))
    error = shared_error(tmp_path)
    assert type(error) is CheckpointError
    assert str(error) == "a bad file"


def test_where_an_error_began_is_told(tmp_path):
    error = ValueError("boom")
    error.add_note("in step 7, in the forward of unit 'blocks.1'")
    text = str(as_error({1: raised(tmp_path, 1, error)}, FOLDER))
    assert "failed with ValueError: boom\nin step 7, in the forward of unit 'blocks.1'\n" in text


def test_ranks_that_were_started_again_have_logs_of_their_own():
    assert "logs/rank-3.restart-2.err" in str(as_error({3: ended(3, 7)}, FOLDER, restart=2))


def test_being_asked_to_stop_is_no_failure():
    asked = ended(0, EXIT_INTERRUPTED)
    assert was_interrupted({0: asked, 1: ended(1, EXIT_INTERRUPTED)})
    assert was_interrupted({0: asked, 1: ended(1, -signal.SIGTERM)})
    assert not was_interrupted({0: asked, 1: ended(1, 1)})
    assert not was_interrupted({1: ended(1, -signal.SIGTERM)})


def test_a_failure_is_left_where_the_agent_looks(tmp_path, monkeypatch):
    file = tmp_path / "reply.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    with pytest.raises(ValueError, match="broken"), reporting_failure():
        raise ValueError("broken")
    message = json.loads(file.read_text())["message"]
    assert message["message"] == "ValueError: broken"
    assert "test_failure.py" in message["extraInfo"]["py_callstack"]
