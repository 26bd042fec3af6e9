"""SLURM without torchrun: `announce()` in a task of `srun`, before `init_process_group`."""

from shoal.mesh.slurm import announce

__all__ = ["announce"]
