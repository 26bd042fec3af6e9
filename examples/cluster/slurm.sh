#!/bin/bash
# Two nodes of eight GPUs: sbatch examples/cluster/slurm.sh
# One task for each rank, so torchrun is not needed. SLURM starts the job again after a lost node
# (--requeue), and the run goes on from its newest checkpoint.
#SBATCH --job-name=shoal
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=12:00:00
#SBATCH --requeue
#SBATCH --open-mode=append

set -euo pipefail
: "${RUN_FOLDER:=$PWD/runs/slurm}" # on a file system that all nodes see
export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}

# --kill-on-bad-exit ends all ranks when one ends with an error.
srun --kill-on-bad-exit=1 python examples/multi_node.py --folder "$RUN_FOLDER" "$@"
