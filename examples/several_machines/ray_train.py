# /// script
# requires-python = ">=3.11"
# dependencies = ["lit_grpo", "ray[train]>=2.60"]
# [tool.uv.sources]
# lit_grpo = { path = "../..", editable = true }
# ///
"""On a Ray cluster of eight GPUs:  WORKERS=8 python examples/several_machines/ray_train.py --config gsm8k_qwen3_1.7b
Each worker is a rank with a GPU, or with a CPU if there is no GPU. Arguments are those of python -m lit_grpo fit.
"""

import gc
import os
import sys
from pathlib import Path
from typing import Any

import ray
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer


def fit(told: dict[str, Any]) -> None:
    """Train as one worker, in a folder with the same path on each machine."""
    Path(told["folder"]).mkdir(parents=True, exist_ok=True)
    os.chdir(told["folder"])
    sys.argv = ["lit_grpo", "fit", *told["arguments"]]
    from lit_grpo.cli.command_line import run  # imported here, because Lightning reads the rank at its import

    try:
        run()
    finally:
        gc.collect()  # ends the vLLM servers of this rank, because Ray kills workers without notice


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if "--trainer.strategy" not in arguments:
        arguments += ["--trainer.strategy", "ray_fsdp2"]
    ray.init()  # the cluster of RAY_ADDRESS, or the one that runs here; if there is none, a new one on this machine
    number, has_gpus = int(os.environ.get("WORKERS", "8")), "GPU" in ray.cluster_resources()
    workers: Any = ScalingConfig(num_workers=number, use_gpu=has_gpus)
    told = {"folder": os.getcwd(), "arguments": arguments}
    from lit_grpo.strategies.ray import fit_on_workers  # which says how to resume when a worker is gone

    fit_on_workers(TorchTrainer(fit, train_loop_config=told, scaling_config=workers))
