"""Lightning's strategy for a policy that is sharded over all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy, StrategyRegistry
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.constants import default_pg_timeout

from lit_grpo.checkpoints import FolderIO, check_folder, fault_of, read_state, refuse, settled
from lit_grpo.checkpoints.folder import fill, replaced
from lit_grpo.policy.frozen import without_frozen
from lit_grpo.policy.sharding import is_sharded, shard, tied_again

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from transformers import PreTrainedModel

NAME = "fsdp2"


class FSDP2Strategy(ModelParallelStrategy):
    """FSDP2: each rank keeps a shard of weights, gradients and optimizer state (``trainer.strategy fsdp2``).

    A checkpoint is a folder, to which each rank writes its shards. Any number of ranks and any strategy can resume from
    it; this strategy can resume from whole files too.

    Args:
        process_group_backend: The backend; by default nccl on GPUs and gloo on CPUs.
        timeout: Max time that a rank waits for the others.
    """

    def __init__(self, process_group_backend: str | None = None, timeout: timedelta = default_pg_timeout) -> None:
        super().__init__("auto", 1, True, process_group_backend, timeout)
        self.checkpoint_io = FolderIO()
        self._folder: Path | None = None  # the checkpoint that is being loaded, if it is a folder

    def setup_environment(self) -> None:
        """Start the ranks; every rank has a shard."""
        self._data_parallel_size = self.world_size
        super().setup_environment()

    def shard(self, policy: PreTrainedModel, whole_at_rest: bool = True) -> None:
        """Keep only this rank's shard of a policy, after the ranks have been started."""
        if self._device_mesh is not None and not is_sharded(policy):
            shard(policy, self._device_mesh["data_parallel"], whole_at_rest)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return this rank's shards of the weights, on the host; with adapters, only of the trained weights."""
        module = self.lightning_module
        assert module is not None
        alone = not module.strict_loading
        options = StateDictOptions(cpu_offload=True, ignore_frozen_params=alone)
        state = get_model_state_dict(module, options=options)
        return tied_again(module, without_frozen(module, state) if alone else state)

    @property
    def lightning_restore_optimizer(self) -> bool:
        """True: Lightning restores optimizers with this strategy's methods."""
        return True

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write a folder together with the other ranks."""
        self.checkpoint_io.save_checkpoint(checkpoint, self.broadcast(filepath), storage_options)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a file, or everything in a folder except the shards; nothing is restored yet."""
        path = settled(Path(checkpoint_path))
        self._folder = path if path.is_dir() else None
        if self._folder is None:
            return Strategy.load_checkpoint(self, path, weights_only)
        check_folder(path)
        refuse(path, self.broadcast(fault_of(path) if self.is_global_zero else None))
        return read_state(path)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Restore this rank's shard of the weights."""
        module, saved = self.lightning_module, checkpoint["state_dict"]
        assert module is not None
        if self._folder is None:
            options = StateDictOptions(full_state_dict=True, strict=strict)
            set_model_state_dict(module, dict(saved), options=options)
            return
        own, tensors = cast("dict[str, torch.Tensor]", get_model_state_dict(module)), dict[str, torch.Tensor]()
        replaced(saved, "state_dict", lambda name, _: tensors.setdefault(name, own[name.removeprefix("state_dict.")]))
        fill(tensors, self._folder)
        set_model_state_dict(module, dict(own))

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore this rank's shard of the optimizer state."""
        module = self.lightning_module
        assert module is not None
        options = StateDictOptions(full_state_dict=self._folder is None)
        for index, (optimizer, saved) in enumerate(zip(self.optimizers, checkpoint["optimizer_states"], strict=True)):
            if not saved["state"]:
                continue  # the optimizer has not taken a step
            named = self._named(optimizer, saved) if self._folder is None else self._shards(index, saved)
            set_optimizer_state_dict(module, optimizer, named, options=options)

    def _named(self, optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        """Return an optimizer's state from a file with the weights' names in place of their numbers."""
        assert self.lightning_module is not None
        names = {id(weight): name for name, weight in self.lightning_module.named_parameters()}
        own = [names[id(weight)] for group in optimizer.param_groups for weight in group["params"]]
        numbers = [number for group in saved["param_groups"] for number in group["params"]]
        by_number = dict(zip(numbers, own, strict=True))
        groups = [{**group, "params": [by_number[one] for one in group["params"]]} for group in saved["param_groups"]]
        return {"state": {by_number[one]: state for one, state in saved["state"].items()}, "param_groups": groups}

    def _shards(self, index: int, saved: dict[str, Any]) -> dict[str, Any]:
        """Return an optimizer's state from a folder: shards of tensors in the shape of their weight, others whole."""
        assert self.lightning_module is not None and self._folder is not None
        weights, tensors = dict(self.lightning_module.named_parameters()), dict[str, torch.Tensor]()
        place = f"optimizer_states.{index}"

        def own(name: str, tensor: torch.Tensor) -> torch.Tensor:
            weight = weights[name.removeprefix(f"{place}.state.").rpartition(".")[0]]
            like = tensor if weight.shape != tensor.shape else weight.detach()
            device = "cpu" if like is tensor else like.device
            return tensors.setdefault(name, torch.empty_like(like, dtype=tensor.dtype, device=device))

        state = replaced(saved, place, own)
        fill(tensors, self._folder)
        return state


def register() -> None:
    if NAME not in StrategyRegistry:
        StrategyRegistry.register(NAME, FSDP2Strategy, "a shard of the policy on every rank")


register()
