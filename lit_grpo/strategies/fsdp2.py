"""Lightning's strategy for a policy that is sharded over all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies import ModelParallelStrategy, Strategy, StrategyRegistry
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict, set_optimizer_state_dict
from torch.distributed.constants import default_pg_timeout
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp import OptimStateKeyType as Keys

from lit_grpo.policy.sharding import is_sharded, shard, tied_again

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "fsdp2"


class FSDP2Strategy(ModelParallelStrategy):
    """FSDP2 over all ranks: each keeps a shard of the weights, gradients and moments (``trainer.strategy fsdp2``).

    Checkpoints are whole files, as with any other strategy, so that any number of ranks, and any strategy, goes on from
    them. They are put together on the first rank.

    Args:
        process_group_backend: By default nccl on GPUs, gloo on CPUs.
        timeout: How long a rank waits for the others.
    """

    def __init__(self, process_group_backend: str | None = None, timeout: timedelta = default_pg_timeout) -> None:
        super().__init__("auto", 1, False, process_group_backend, timeout)

    def setup_environment(self) -> None:
        """Start the ranks, all of which have a shard."""
        self._data_parallel_size = self.world_size
        super().setup_environment()

    def shard(self, policy: PreTrainedModel, whole_at_rest: bool = True) -> None:
        """Keep this rank's shard of a policy alone, once the ranks have been started."""
        if self._device_mesh is not None and not is_sharded(policy):
            shard(policy, self._device_mesh["data_parallel"], whole_at_rest)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Put the weights together on the first rank's host."""
        assert self.lightning_module is not None
        return tied_again(self.lightning_module, super().lightning_module_state_dict())

    @property
    def lightning_restore_optimizer(self) -> bool:
        """As of any file."""
        return True

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Read the file, and change nothing yet."""
        return Strategy.load_checkpoint(self, checkpoint_path, weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Take this rank's shard of the weights."""
        assert self.lightning_module is not None
        options = StateDictOptions(full_state_dict=True, strict=strict)
        set_model_state_dict(self.lightning_module, dict(checkpoint["state_dict"]), options=options)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Take this rank's shard of the moments."""
        module, options = self.lightning_module, StateDictOptions(full_state_dict=True)
        assert module is not None
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            if not saved["state"]:
                continue  # it has not taken a step
            state = FullyShardedDataParallel.rekey_optim_state_dict(saved, Keys.PARAM_NAME, module)
            set_optimizer_state_dict(module, optimizer, state, options=options)


def register() -> None:
    """Let ``trainer.strategy fsdp2`` be this one."""
    if NAME not in StrategyRegistry:
        StrategyRegistry.register(NAME, FSDP2Strategy, "a shard of the policy on every rank")


register()
