#!/usr/bin/env bash
# Two machines of four GPUs through SLURM:  sbatch examples/several_machines/slurm.sh --config gsm8k_qwen3_1.7b --run.name mine
# Lightning takes everything else from SLURM's variables. Submitted again, with the same name, the run goes on.
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
set -euo pipefail

arguments=(--trainer.num_nodes "$SLURM_NNODES" --trainer.devices "$SLURM_NTASKS_PER_NODE" --trainer.strategy fsdp2)
for argument in "$@"; do
  [ "${previous:-}" = --run.name ] && last="runs/$argument/checkpoints/last.ckpt"
  previous=$argument
done
[ -e "${last:-}" ] && arguments+=(--ckpt_path last)
srun python -m lit_grpo fit "$@" "${arguments[@]}"
