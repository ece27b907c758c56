"""Methods that vLLM mixes into its workers, which a run calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open

from lit_grpo.policy.weights import checkpoint_name, digest
from lit_grpo.rollout.vllm.worker.transfer import Arrived
from lit_grpo.rollout.weights.files import private_weights_folder
from lit_grpo.rollout.weights.tensors import WeightSyncError

if TYPE_CHECKING:
    from lit_grpo.rollout.weights.tensors import Named

_KEPT_AS_IT_CAME = ("NoneType", "UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
_REORDERED = "query_key_value"  # the layer whose rows vLLM's loaders put into another order (BLOOM, Falcon, GPT-NeoX)


class WorkerExtension:
    """The methods that are called on workers; a guarded server lets its owner call these and no other."""

    get_model: Any
    model_runner: Any
    weight_transfer_engine: Any

    def settle(self, version: str) -> dict[str, str]:
        """After an update, note its version; return the digests of the policy's tensors as the model holds them.

        They go by the policy's names. Tensors that vLLM keeps in another form (packed for a CPU, quantized, in shards)
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
        """Return the version of the last update that was settled; empty where there was none."""
        return self.weight_transfer_engine.version

    def take_folder(self) -> str:
        """Write the files that come over the link to a private folder; return its path from the worker that writes."""
        link = self.weight_transfer_engine.link
        folder = private_weights_folder() if link.rank == 1 else None
        for name, content in link.receive():
            if folder is not None:
                (folder.path / Path(name).name).write_bytes(content.cpu().numpy().tobytes())
        self.adapter_folder = folder  # which removes the folder of the adapters before
        return "" if folder is None else str(folder.path)

    def draw_by_position(self) -> bool:
        """Let a token's random numbers depend only on its request's seed and its position; return whether they do.

        A request that goes on from some of its tokens then samples what it would have sampled without a break. vLLM's
        newer model runner, the default on GPUs, draws like this by itself. The older one has a generator for each
        request, which is seeded again here before every draw.
        """
        runner = self.model_runner
        sampler, batch = getattr(runner, "sampler", runner), getattr(runner, "input_batch", None)
        if sampler is None or hasattr(getattr(sampler, "sampling_states", None), "seeds"):
            return True  # one of several workers that does not sample, or the newer runner
        parts = {"generators", "num_tokens_no_spec", "req_ids"}
        if not (hasattr(runner, "_sample") and all(hasattr(batch, part) for part in parts)):
            return False
        if not hasattr(runner, "sample_as_it_was"):
            runner.sample_as_it_was = runner._sample
            runner._sample = lambda *args, **options: _seed_rows(runner) or runner.sample_as_it_was(*args, **options)
        return True

    def max_adapter_rank(self) -> int:
        """Return the largest rank of LoRA adapters that it takes."""
        return self.get_model().lora_manager.lora_config.max_lora_rank

    def compute_head_plainly(self) -> None:
        """Leave out adapters of the head, of which there are none.

        vLLM's support of them fails on a CPU for the log-probs of given tokens, and takes time on any device.
        """
        for module in self.get_model().modules():
            if type(module).__name__ == "LogitsProcessorWithLoRA":
                module._get_logits = _plain_logits(module.base_layer)

    def settle_adapter(self, folder: str, version: str) -> dict[str, str]:
        """Note the version; return the digests of the adapter's tensors that the layers decode with.

        They go by their names in the adapter's ``folder``.

        Raises:
            WeightSyncError: The worker holds another adapter too, or none.
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


# ---- random numbers -------------------------------------------------------------------------------------


class _SeededGenerator(torch.Generator):
    """A generator that is seeded before every draw.

    vLLM sets a generator back after it has prefilled a part of a prompt. Here that has no effect, and on a CPU it would
    fail.
    """

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> torch.Generator:
        return self


def _seed_rows(runner: Any) -> None:
    """Seed the generators of all rows for the positions that come next."""
    batch = runner.input_batch
    for row, generator in list(batch.generators.items()):
        if not isinstance(generator, _SeededGenerator):
            generator = batch.generators[row] = _SeededGenerator(generator.device)
        seed, position = runner.requests[batch.req_ids[row]].sampling_params.seed, batch.num_tokens_no_spec[row]
        key = blake2b(b"%d %d" % (seed, position), digest_size=8)
        generator.manual_seed(int.from_bytes(key.digest(), "little", signed=True))


# ---- what models hold, by the names that the tensors came with ------------------------------------------


def held_weights(model: Any) -> Iterator[Named]:
    """Yield the parameters that vLLM's model keeps as they came, by their names in checkpoints, fused ones split."""
    fused = getattr(model, "packed_modules_mapping", {})
    for path, module in model.named_modules():
        if type(getattr(module, "quant_method", None)).__name__ not in _KEPT_AS_IT_CAME:
            continue
        for kind, parameter in module.named_parameters(recurse=False):
            parent, _, layer = checkpoint_name(f"{path}.{kind}").removesuffix(f".{kind}").rpartition(".")
            if layer == _REORDERED:
                continue
            parts, sizes = fused.get(layer, [layer]), getattr(module, "output_partition_sizes", [])
            rows = parameter[: getattr(module, "org_vocab_size", None)]  # the rows after these are padding
            tensors = rows.split(sizes) if len(parts) == len(sizes) and sum(sizes) == len(rows) else [rows]
            for part, tensor in zip(parts, tensors, strict=False):
                yield ".".join(filter(None, [parent, part, kind])), tensor


def held_adapter(model: Any, manager: Any, adapter: Any, names: Iterable[str]) -> Iterator[Named]:
    """Yield what vLLM has made of peft's tensors; it holds those of some layers together, as lists."""
    from vllm.lora.utils import parse_fine_tuned_lora_name

    mapper = getattr(model, "hf_to_vllm_mapper", None)
    renaming = None if mapper is None else mapper.get_rename_mapper()
    packed = {part: (whole, at) for whole, parts in manager.packed_modules.items() for at, part in enumerate(parts)}
    for name in names:
        module, is_a = parse_fine_tuned_lora_name(name, renaming)
        whole, at = packed.get(module, (module, None))
        layer = adapter.get_lora(whole)
        if layer is None or whole not in manager.modules:  # of a layer of another worker
            continue
        tensor = layer.lora_a if is_a else layer.lora_b
        if at is not None:
            tensor = tensor[at]
        if tensor is not None:
            yield name, tensor
