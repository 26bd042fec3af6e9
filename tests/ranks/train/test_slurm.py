"""Two tasks as `srun` starts them, without torchrun, are the ranks of one run."""

import os
import subprocess
import sys
from pathlib import Path

from train_command import SOURCE, TINY, steps_in

EXAMPLE = Path(__file__).parents[3] / "examples" / "multi_node.py"


def srun(folder: Path, *program: str) -> list[str]:
    """Run two tasks on one node; return what each printed."""
    # The job's number decides the port, so that runs at once do not meet.
    of_step = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NODEID": "0",
        "PYTHONPATH": str(SOURCE),
        "OMP_NUM_THREADS": "1",
    }
    tasks = [
        subprocess.Popen(
            [sys.executable, *program],
            cwd=folder,
            env={**os.environ, **of_step, "SLURM_PROCID": rank, "SLURM_LOCALID": rank},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in ("0", "1")
    ]
    printed = [task.communicate(timeout=60)[0] for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], printed
    return printed


def test_shoal_train(tmp_path: Path) -> None:
    srun(tmp_path, "-m", "shoal", "train", "--name", "a", "--steps", "3", *TINY)
    assert steps_in(tmp_path / "runs" / "a") == [1, 2, 3]


def test_a_loop_of_ones_own(tmp_path: Path) -> None:
    printed = srun(tmp_path, str(EXAMPLE), "--folder", "run", "--steps", "3", "--save-every", "3")
    assert "step 3 of 2 ranks: loss" in printed[0]
    assert (tmp_path / "run" / "step-00000003" / "rank-00001.safetensors").exists()
