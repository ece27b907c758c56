"""What a worker does for us beside its own work; vLLM mixes it into its workers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from lit_grpo.policy.weights import digest
from lit_grpo.rollout.vllm.worker.drawing import draw_by_position
from lit_grpo.rollout.vllm.worker.holdings import held_adapter, held_weights
from lit_grpo.rollout.vllm.worker.transfer import Arrived
from lit_grpo.rollout.weights.files import WEIGHTS_PREFIX, PrivateFolder, shared_memory
from lit_grpo.rollout.weights.tensors import WeightSyncError


class WorkerExtension:
    """What a worker does for us beside its own work."""

    get_model: Any
    model_runner: Any
    weight_transfer_engine: Any

    def settle(self, version: str) -> dict[str, str]:
        """After an update, note its version; return the digests of the policy's tensors as the model holds them.

        They go by the policy's names. Those that vLLM keeps in another form (packed for a CPU, quantized, in shards)
        are digested as they arrived.
        """
        transfer = self.weight_transfer_engine
        transfer.settle(version)
        arrived: dict[str, Arrived] = transfer.arrived
        held = {
            name: digest(tensor)
            for name, tensor in held_weights(self.get_model())
            if name in arrived and (tensor.shape, tensor.dtype) == arrived[name][1:]
        }
        return {name: each.digest for name, each in arrived.items()} | held

    def held_version(self) -> str:
        """Return the version of the last update that was settled; nothing where there was none."""
        return self.weight_transfer_engine.version

    def take_folder(self) -> str:
        """Write the files that come over the link to a private folder; return where, on the worker that writes it."""
        link = self.weight_transfer_engine.link
        folder = PrivateFolder(WEIGHTS_PREFIX, shared_memory()) if link.rank == 1 else None
        for name, content in link.receive():
            if folder is not None:
                (folder.path / Path(name).name).write_bytes(content.cpu().numpy().tobytes())
        self.adapter_folder = folder  # the last one's goes
        return "" if folder is None else str(folder.path)

    def draw_by_position(self) -> bool:
        """Let a token's random numbers depend on its request's seed and its position alone; say if this vLLM lets us.

        A request that goes on from some of its tokens then samples what it would have sampled without a break.
        """
        return draw_by_position(self.model_runner)

    def max_adapter_rank(self) -> int:
        """The largest rank of LoRA adapters that it takes."""
        return self.get_model().lora_manager.lora_config.max_lora_rank

    def compute_head_plainly(self) -> None:
        """Leave out adapters of the head, of which there are none.

        vLLM has a place for them, which on a CPU fails for the log-probs of given tokens, and takes time on any device.
        """
        for module in self.get_model().modules():
            if type(module).__name__ == "LogitsProcessorWithLoRA":
                module._get_logits = _plain_logits(module.base_layer)

    def settle_adapter(self, folder: str, version: str) -> dict[str, str]:
        """Return the digests of the adapter's tensors that its layers decode with, by their names in ``folder``.

        The version noted is then theirs.

        Raises:
            WeightSyncError: It holds another adapter too, or none.
        """
        model = self.get_model()
        manager = model.lora_manager
        held = manager.list_adapters()
        in_use = [number for number in manager.lora_index_to_id if number is not None]
        if len(held) != 1 or in_use != list(held):
            raise WeightSyncError(f"vLLM holds the adapters {list(held)} and uses {in_use}, where it was sent one.")
        (adapter,) = held.values()
        with safe_open(Path(folder) / "adapter_model.safetensors", framework="pt") as file:
            tensors = held_adapter(model, manager, adapter, list(file.keys()))
            digests = {name: digest(tensor) for name, tensor in tensors}
        self.weight_transfer_engine.version = version
        return digests


def _plain_logits(processor: Any) -> Callable[..., Any]:
    def logits(hidden_states: torch.Tensor, head: Any, *args: Any, **options: Any) -> Any:
        return processor._get_logits(hidden_states, getattr(head, "base_layer", head), *args, **options)

    return logits
