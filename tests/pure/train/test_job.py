"""Jobs: new ones, resumed ones, and what cannot fit."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from shoal.checkpoint import point_latest, save_training, step_folder
from shoal.errors import CheckpointError, UsageError
from shoal.train import job
from shoal.train.build import notes_on_resume
from shoal.train.checkpoints import RunProgress
from shoal.train.config import DataConfig, ModelConfig, ParallelConfig, RunConfig, TrainConfig
from shoal.train.job import (
    TrainJob,
    check_devices,
    check_memory,
    check_text_fits,
    new_job,
    resumed_job,
)
from shoal.train.model import Transformer
from shoal.train.model_facts import ModelFacts, demo_facts
from shoal.train.options import to_json
from shoal.train.run_folder import RunFolder

PROGRESS = {"step": 7, "samples": 28, "tokens": 700, "data_digest": "x", "scale": {}}


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_text("some text " * 50)
    return TrainConfig(
        model=ModelConfig(dim=8, layers=1, heads=2, context=16),
        data=DataConfig(folder=tmp_path / "data"),
        parallel=ParallelConfig(device="cpu"),
        run=RunConfig(out=tmp_path / "runs", name="x", steps=10),
    )


@pytest.fixture
def finished(config: TrainConfig) -> RunFolder:
    """A run folder with a checkpoint at step 7 of 10."""
    job = new_job(config, overwrite=False)
    job.create(num_ranks=2)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    save_training(step_folder(job.folder.checkpoints, 7), model, optimizer, PROGRESS)
    return job.folder


def test_what_is_left_open_is_chosen(config):
    job = new_job(config, overwrite=False)
    parallel = job.config.parallel
    assert (parallel.device, parallel.precision, job.num_ranks) == ("cpu", "fp32", 2)
    assert job.checkpoint is None
    assert not job.folder.path.exists(), "checking writes nothing"


def test_a_run_without_a_name_is_called_after_its_time(tmp_path, config):
    run = RunConfig(out=tmp_path / "runs")
    job = new_job(TrainConfig(model=config.model, data=config.data, run=run), overwrite=False)
    assert len(job.folder.path.name) == len("2026-01-31-235959")


def test_the_data_folder_is_remembered_whole(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = DataConfig(folder=Path("data"))
    job = new_job(TrainConfig(model=config.model, data=data, run=config.run), overwrite=False)
    assert job.config.data.folder == tmp_path / "data"


def test_a_rank_reads_back_the_job_that_was_created(config):
    job = new_job(config, overwrite=False)
    job.create(num_ranks=2)
    assert TrainJob.reopen(job.folder, None) == job
    facts = json.loads(job.folder.config.read_text())["facts"]
    assert facts["num_parameters"] == demo_facts(config.model).num_parameters
    assert facts["num_ranks"] == 2


def test_an_existing_run_is_not_replaced_by_accident(finished, config):
    with pytest.raises(UsageError, match="exists already: continue it with --resume"):
        new_job(config, overwrite=False)
    job = new_job(config, overwrite=True)
    finished.sample.write_text("old")
    (finished.path / "notes.txt").write_text("mine")
    job.create(num_ranks=2)
    assert not finished.sample.exists()
    assert not any(finished.checkpoints.iterdir())
    assert (finished.path / "notes.txt").read_text() == "mine"


def test_overwrite_does_not_touch_what_is_no_run(tmp_path, config):
    folder = tmp_path / "runs" / "x"
    folder.mkdir(parents=True)
    (folder / "thesis.tex").write_text("years of work")
    with pytest.raises(UsageError, match=r"not a run folder and stays as it is"):
        new_job(config, overwrite=True)


def test_an_output_folder_that_cannot_be_written_is_named(tmp_path, config):
    (tmp_path / "file").write_text("")
    run = RunConfig(out=tmp_path / "file" / "runs", name="x")
    job = new_job(TrainConfig(model=config.model, data=config.data, run=run), overwrite=False)
    with pytest.raises(UsageError, match=r"cannot write into .*file/runs/x: Not a directory"):
        job.create(num_ranks=2)


def test_tensorboard_must_be_there(config, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    run = RunConfig(out=config.run.out, tensorboard=True)
    with pytest.raises(UsageError, match="pip install tensorboard"):
        new_job(TrainConfig(model=config.model, data=config.data, run=run), overwrite=False)


def test_a_run_that_lost_its_config_goes_on_with_the_one_of_its_checkpoint(config):
    job = new_job(config, overwrite=False)
    job.create(num_ranks=2)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoint = step_folder(job.folder.checkpoints, 7)
    save_training(checkpoint, model, optimizer, {**PROGRESS, "config": to_json(job.config)})
    job.folder.config.unlink()
    for path in (job.folder.path, checkpoint):
        assert resumed_job(path, {}, more_steps=None).config == job.config


def test_a_folder_is_lost_when_it_is_removed_or_replaced(config):
    job = new_job(config, overwrite=False)
    job.create(num_ranks=2)
    folder = job.folder
    home = folder.path.stat()
    assert not folder.is_lost(home)
    staging = folder.checkpoints / ".step-00000001.saving-x"
    staging.mkdir()
    folder.metrics.touch()
    folder.timeline.touch()
    folder.config.rename(folder.path.parent / "config")
    assert folder.is_lost(home), "somebody is removing it"
    folder.drop_remains(home)
    assert {path.name for path in folder.path.iterdir()} == {"metrics.jsonl", "timeline.json"}
    folder.metrics.unlink()
    folder.drop_remains(home)
    assert not folder.path.exists()
    shutil.copytree(folder.path.parent, folder.path / "copy")
    assert folder.is_lost(home)
    folder.drop_remains(home)
    assert (folder.path / "copy").exists(), "another folder is left alone"


def test_a_resume_goes_on_from_the_newest_checkpoint(finished):
    job = resumed_job(finished.path, {}, more_steps=None)
    assert job.checkpoint == step_folder(finished.checkpoints, 7)
    assert job.config.run.steps == 10
    assert resumed_job(finished.path, {}, more_steps=5).config.run.steps == 12
    changed = resumed_job(finished.path, {("optim", "lr"): 0.5}, more_steps=None)
    assert changed.config.optim.lr == 0.5


def test_a_moved_run_can_be_resumed(finished, tmp_path):
    moved = finished.path.rename(tmp_path / "elsewhere")
    job = resumed_job(moved, {}, more_steps=None)
    assert job.folder.path == moved
    assert (job.config.run.name, job.config.run.out) == ("elsewhere", tmp_path)


def test_a_finished_run_asks_for_more_steps(finished):
    with pytest.raises(UsageError, match=r"is at step 7 of 7 already; .*--steps \+100"):
        resumed_job(finished.path, {("run", "steps"): 7}, more_steps=None)


@pytest.mark.parametrize(
    ("path", "flag"),
    [(("model", "dim"), "--dim"), (("run", "name"), "--name"), (("run", "out"), "--out")],
)
def test_a_resume_cannot_make_another_run_of_it(finished, path, flag):
    with pytest.raises(UsageError, match=f"{flag} cannot change with --resume"):
        resumed_job(finished.path, {path: 1}, more_steps=None)


def test_what_cannot_be_resumed_is_named(finished, tmp_path):
    with pytest.raises(UsageError, match="there is no run folder"):
        resumed_job(tmp_path / "nothing", {}, more_steps=None)
    with pytest.raises(UsageError, match="is not a run folder: cannot read"):
        resumed_job(tmp_path, {}, more_steps=None)
    finished.config.write_text("{")
    with pytest.raises(UsageError, match=r"config.json is not JSON"):
        resumed_job(finished.path, {}, more_steps=None)


def test_the_config_changes_only_once_the_checkpoint_is_loaded(finished):
    job = resumed_job(finished.path, {("optim", "lr"): 0.5}, more_steps=None)
    job.create(num_ranks=2)
    assert finished.read_config().optim.lr != 0.5
    assert TrainJob.reopen(job.folder, job.checkpoint) == job
    job.commit_resume(num_ranks=2)
    assert finished.read_config().optim.lr == 0.5


def add_checkpoint(folder: RunFolder, step: int) -> Path:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    path = step_folder(folder.checkpoints, step)
    save_training(path, model, optimizer, {**PROGRESS, "step": step})
    return path


def test_a_run_goes_on_from_an_older_checkpoint_if_newer_ones_may_go(finished):
    older, newer = step_folder(finished.checkpoints, 7), add_checkpoint(finished, 8)
    with pytest.raises(UsageError, match=r"would give up the newer step-00000008; add --overwrite"):
        resumed_job(older, {}, more_steps=None)
    with pytest.raises(UsageError, match=r"--resume .*/checkpoints/step-N"):
        resumed_job(finished.path, {}, more_steps=None, overwrite=True)
    assert resumed_job(newer, {}, more_steps=None).checkpoint == newer
    job = resumed_job(older, {}, more_steps=1, overwrite=True)
    assert (job.checkpoint, job.folder, job.config.run.steps) == (older, finished, 8)
    job.create(num_ranks=2)
    assert newer.exists()
    job.commit_resume(num_ranks=2)
    assert not newer.exists()


def test_a_checkpoint_without_a_manifest_is_put_aside(finished):
    broken = add_checkpoint(finished, 8)
    (broken / "manifest.json").unlink()
    job = resumed_job(finished.path, {}, more_steps=None)
    assert job.checkpoint == step_folder(finished.checkpoints, 7)
    notes = notes_on_resume(job.checkpoint, RunProgress(step=7), SimpleNamespace(digest=""))
    assert notes[1].startswith("skipped, since it has no manifest: step-00000008")
    job.create(num_ranks=2)
    job.commit_resume(num_ranks=2)
    names = sorted(path.name for path in finished.checkpoints.iterdir())
    assert names == ["damaged-step-00000008", "step-00000007"]


def test_a_checkpoint_that_is_a_link_is_refused(finished, tmp_path):
    path = step_folder(finished.checkpoints, 7)
    path.rename(tmp_path / "outside")
    path.symlink_to(tmp_path / "outside")
    with pytest.raises(CheckpointError, match=r"step-00000007: it is a link, not a folder"):
        resumed_job(finished.path, {}, more_steps=None)


def test_of_newer_checkpoints_that_are_links_the_links_go(finished, tmp_path):
    outside = tmp_path / "outside"
    add_checkpoint(finished, 8).rename(outside)
    older, link = (step_folder(finished.checkpoints, step) for step in (7, 8))
    link.symlink_to(outside)
    step_folder(finished.checkpoints, 9).mkdir()
    (finished.checkpoints / "damaged-step-00000009").symlink_to(outside)
    job = resumed_job(older, {}, more_steps=None, overwrite=True)
    job.create(num_ranks=2)
    job.commit_resume(num_ranks=2)
    assert not os.path.lexists(link)
    assert not (finished.checkpoints / "damaged-step-00000009").is_symlink()
    assert (outside / "manifest.json").exists()


def test_the_link_to_the_newest_checkpoint_stands_for_it(finished):
    newest = add_checkpoint(finished, 8)
    point_latest(finished.checkpoints)
    job = resumed_job(finished.checkpoints / "latest", {}, more_steps=None, overwrite=True)
    assert (job.checkpoint, job.folder) == (newest, finished)
    job.create(num_ranks=2)
    job.commit_resume(num_ranks=2)
    assert newest.exists()


def test_a_damaged_checkpoint_is_answered_with_the_one_before(finished):
    manifest = add_checkpoint(finished, 8) / "manifest.json"
    manifest.write_text(manifest.read_text()[:-20])
    with pytest.raises(
        CheckpointError, match=r"step-00000008(.|\n)*--resume .*/step-00000007 --ov"
    ):
        resumed_job(finished.path, {}, more_steps=None)


def test_a_run_in_use_is_left_alone(finished, config):
    with finished.locked():
        with pytest.raises(UsageError, match=rf"runs/x is in use by process {os.getpid()} on"):
            resumed_job(finished.path, {}, more_steps=None)
        with pytest.raises(UsageError, match="is in use by process"), finished.locked():
            pass
    resumed_job(finished.path, {}, more_steps=None)


def test_a_folder_that_holds_only_a_lock_is_free(config):
    job = new_job(config, overwrite=False)
    with job.folder.locked():
        new_job(config, overwrite=False)


def test_the_way_out_names_the_folder(finished, config):
    shutil.rmtree(finished.checkpoints)
    with pytest.raises(CheckpointError, match=rf"--name x --out {config.run.out} --overwrite"):
        resumed_job(finished.path, {}, more_steps=None)
    assert RunFolder(Path("runs/x")).flags == "--name x"


def test_a_wrong_value_in_a_config_file_is_blamed_on_the_file(finished):
    tree = json.loads(finished.config.read_text())
    tree["optim"]["lr"] = -1
    finished.config.write_text(json.dumps(tree))
    with pytest.raises(UsageError, match=r"config.json: --lr: expected more than 0, got -1"):
        finished.read_config()


@pytest.mark.parametrize("layers", [1, 3])
def test_parameters_are_counted_without_being_made(layers):
    model = ModelConfig(dim=8, layers=layers, heads=2)
    made = sum(parameter.numel() for parameter in Transformer(model).parameters())
    assert demo_facts(model).num_parameters == made


def test_a_broken_checkpoint_is_named(finished):
    manifest = step_folder(finished.checkpoints, 7) / "manifest.json"
    manifest.write_text(manifest.read_text()[:-20])
    with pytest.raises(CheckpointError, match="manifest"):
        resumed_job(finished.path, {}, more_steps=None)
    manifest.unlink()
    with pytest.raises(CheckpointError, match="has no complete checkpoint"):
        resumed_job(finished.path, {}, more_steps=None)


def test_a_checkpoint_of_something_else_is_refused(finished):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    save_training(step_folder(finished.checkpoints, 8), model, optimizer, {"epoch": 1})
    with pytest.raises(CheckpointError, match="not a checkpoint of `shoal train`"):
        resumed_job(finished.path, {}, more_steps=None)


def test_more_ranks_than_devices_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    config = TrainConfig(parallel=ParallelConfig(device="cuda"))
    check_devices(config, 2)
    with pytest.raises(UsageError, match=r"4 ranks .* but it has 2. Start at most 2 with --nproc"):
        check_devices(config, 4)
    check_devices(TrainConfig(parallel=ParallelConfig(device="cpu")), 4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_is_refused_where_there_is_none(config):
    cuda = TrainConfig(model=config.model, data=config.data, parallel=ParallelConfig(device="cuda"))
    with pytest.raises(UsageError, match="this machine has no CUDA device; use --device cpu"):
        new_job(cuda, overwrite=False)


@pytest.mark.parametrize(
    ("devices", "batch_size", "expected"), [(8, 16, 8), (6, 16, 4), (1, 16, 1)]
)
def test_on_cuda_as_many_ranks_as_devices_that_share_the_batch(
    config, monkeypatch, devices, batch_size, expected
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    run = RunConfig(out=config.run.out, batch_size=batch_size)
    job = new_job(TrainConfig(model=config.model, data=config.data, run=run), overwrite=False)
    assert (job.num_ranks, job.config.parallel.precision) == (expected, "bf16")


CONFIG = TrainConfig(parallel=ParallelConfig(device="cpu"))


def of_size(num_parameters: int) -> ModelFacts:
    return ModelFacts(
        num_parameters=num_parameters,
        largest_unit=num_parameters,
        vocabulary=256,
        width=256,
        layers=4,
    )


def test_what_cannot_fit_is_refused_with_its_numbers(monkeypatch):
    monkeypatch.setattr(job, "_machine_bytes", lambda: 2**30)
    check_memory(CONFIG, of_size(2**26), num_ranks=2, num_local_ranks=2)
    with pytest.raises(UsageError, match=r"at least 4 GiB, but this machine has 1 GiB; lower"):
        check_memory(CONFIG, of_size(2**28), num_ranks=4, num_local_ranks=4)
    with pytest.raises(UsageError, match="shards and activations would take at least"):
        check_memory(CONFIG, of_size(2**28), num_ranks=1, num_local_ranks=1)


def test_text_that_the_model_has_no_place_for_is_refused():
    facts = of_size(1000)
    check_text_fits(CONFIG, facts, 256)
    with pytest.raises(UsageError, match=r"255 rows, but bytes, .* are 256 tokens"):
        check_text_fits(CONFIG, replace(facts, vocabulary=255), 256)
    check_text_fits(CONFIG, replace(facts, most_positions=128), 256)
    with pytest.raises(UsageError, match="try --context 127"):
        check_text_fits(CONFIG, replace(facts, most_positions=127), 256)


def test_a_device_is_asked_for_its_share_alone(monkeypatch):
    monkeypatch.setattr(job, "_machine_bytes", lambda: 2**40)
    monkeypatch.setattr(job, "_device_bytes", lambda: 2**30)
    config = TrainConfig(parallel=ParallelConfig(device="cuda"))
    check_memory(config, of_size(2**28), num_ranks=4, num_local_ranks=4)
    with pytest.raises(UsageError, match="a CUDA device has 1 GiB"):
        check_memory(config, of_size(2**28), num_ranks=1, num_local_ranks=1)
