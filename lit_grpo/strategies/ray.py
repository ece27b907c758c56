"""Lightning's strategies in workers of Ray Train, which starts the ranks; Ray is imported only with those."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies import Strategy, StrategyRegistry

from lit_grpo.process.packages import require
from lit_grpo.strategies.fsdp2 import FSDP2Strategy

if TYPE_CHECKING:
    import torch
    from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
    from ray.train.torch import TorchTrainer


class RayFSDP2Strategy(FSDP2Strategy):
    """FSDP2 over the workers of Ray Train (``trainer.strategy ray_fsdp2``).

    Ray makes the process group; set its backend and time-out in ``ray.train.torch.TorchConfig``.

    Raises:
        ValueError: Ray is not installed, or this process is no worker of Ray Train.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cluster_environment = _environment("ray_fsdp2")

    @property
    def root_device(self) -> torch.device:
        from ray.train.torch import get_device

        return get_device()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}


def ray_ddp() -> Strategy:
    """Make Ray's own ``RayDDPStrategy`` (``trainer.strategy ray_ddp``).

    Raises:
        ValueError: Ray is not installed, or this process is no worker of Ray Train.
    """
    environment = _environment("ray_ddp")
    from ray.train.lightning import RayDDPStrategy

    return RayDDPStrategy(cluster_environment=environment)


def fit_on_workers(trainer: TorchTrainer) -> None:
    """Train on Ray's workers; a worker that is gone ends this program with one sentence and exit code 1.

    Raises:
        TrainingFailedError: Training has failed in another way.
    """
    import ray
    from ray.exceptions import RayActorError
    from ray.train import TrainingFailedError

    try:
        trainer.fit()
    except TrainingFailedError as error:
        failures: dict[int, Any] = getattr(error, "worker_failures", {})
        causes = {rank: getattr(each, "health_check_failure", each) for rank, each in sorted(failures.items())}
        gone = [rank for rank, cause in causes.items() if isinstance(cause, RayActorError)]
        if not gone:
            raise
        ray.shutdown()  # prints what it has kept of the workers' logs, so that the sentence comes last
        sys.exit(
            f"error: Rank {gone[0]} of Ray's workers is gone, killed or on a machine that was lost, and the others "
            "cannot go on. Give the same command with --ckpt_path last to resume the run from its last checkpoint."
        )


def ray_strategies() -> tuple[type[Strategy], ...]:
    """Return the strategies of Ray's workers that are supported; Ray's own only if Ray has been imported."""
    lightning = sys.modules.get("ray.train.lightning")
    return (RayFSDP2Strategy,) if lightning is None else (RayFSDP2Strategy, lightning.RayDDPStrategy)


def check_environment(strategy: Strategy) -> None:
    """Refuse a strategy of Ray that does not know the other workers, because it would train alone.

    Raises:
        ValueError: The strategy's environment is not Ray's.
    """
    from ray.train.lightning import RayLightningEnvironment

    if not isinstance(getattr(strategy, "cluster_environment", None), RayLightningEnvironment):
        raise ValueError(
            f"trainer.strategy {type(strategy).__name__} does not know of Ray's other workers; add "
            "ray.train.lightning.RayLightningEnvironment() to trainer.plugins, or take the strategy ray_ddp."
        )


def _environment(name: str) -> ClusterEnvironment:
    """Return Ray's environment, in which ranks are Ray's workers."""
    require("ray", f"trainer.strategy is {name}, but Ray is not installed; install lit_grpo[ray], or take ddp.")
    import ray.train
    from ray.train.lightning import RayLightningEnvironment

    try:
        ray.train.get_context()
    except RuntimeError as error:
        raise ValueError(
            f"trainer.strategy is {name}, but this process is no worker of Ray Train; start the run as "
            "examples/several_machines/ray_train.py does, or take ddp or fsdp2."
        ) from error
    return RayLightningEnvironment()


def register() -> None:
    for name, make in (("ray_ddp", ray_ddp), ("ray_fsdp2", RayFSDP2Strategy)):
        if name not in StrategyRegistry:
            StrategyRegistry.register(name, make, "in the workers of Ray Train")


register()
