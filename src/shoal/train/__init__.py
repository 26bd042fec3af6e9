"""One training run, from its config to its report.

In: a `TrainConfig`, from flags, a recipe or an earlier run. Out: a run folder with metrics,
checkpoints, a sample of generated text and a report. Read config, job, launch, rank, loop, build,
step, step_gate, checkpoints, results: in this order a run goes through them.
"""
