"""On a Ray cluster of eight GPUs:  WORKERS=8 python examples/several_machines/ray_train.py --config gsm8k_qwen3_1.7b
Each worker is a rank with a GPU, or where there are none with a CPU. Arguments are those of python -m lit_grpo fit.
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
    """What each worker does, in a folder of the same path on each machine."""
    Path(told["folder"]).mkdir(parents=True, exist_ok=True)
    os.chdir(told["folder"])
    sys.argv = ["lit_grpo", "fit", *told["arguments"]]
    from lit_grpo.cli.command_line import run  # here, for Lightning asks for the rank as it is imported

    try:
        run()
    finally:
        gc.collect()  # vLLM servers of this rank end now: Ray ends workers without another word


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if "--trainer.strategy" not in arguments:
        arguments += ["--trainer.strategy", "ray_fsdp2"]
    ray.init()  # the cluster that RAY_ADDRESS names or that runs here; where there is none, one of this machine
    workers = ScalingConfig(num_workers=int(os.environ.get("WORKERS", "8")), use_gpu="GPU" in ray.cluster_resources())
    told = {"folder": os.getcwd(), "arguments": arguments}
    TorchTrainer(fit, train_loop_config=told, scaling_config=workers).fit()
