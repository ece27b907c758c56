#!/usr/bin/env bash
# On each of two machines of four GPUs:  HEAD=first-machine examples/several_machines/torchrun.sh --config gsm8k_qwen3_1.7b
# HEAD is the machine where ranks find each other; NODES and GPUS say how many there are.
set -euo pipefail

nodes=${NODES:-2} gpus=${GPUS:-4}
exec python -m torch.distributed.run --nnodes "$nodes" --nproc-per-node "$gpus" \
  --rdzv-backend c10d --rdzv-endpoint "${HEAD:?the name of the first machine}:${PORT:-29500}" --rdzv-id lit_grpo \
  -m lit_grpo fit "$@" --trainer.num_nodes "$nodes" --trainer.devices "$gpus" --trainer.strategy fsdp2
