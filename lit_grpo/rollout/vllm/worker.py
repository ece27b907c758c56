"""What runs in vLLM's workers: they take weights, prove what they hold, and draw random numbers by position.

Weights come on any device, as tensors of this process or as files in shared memory. vLLM loads :func:`register` in each
of its processes, by the entry point ``vllm.general_plugins``, and mixes :class:`WorkerExtension` into its workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from lit_grpo.policy.weights import checkpoint_name, digest
from lit_grpo.rollout.weights.files import rebuild
from lit_grpo.rollout.weights.tensors import Parcel, WeightSyncError

BACKEND = "lit_grpo"


def register() -> None:
    """Make the backend known to vLLM in this process."""
    with suppress(ValueError):  # it is known already
        WeightTransferEngineFactory.register_engine(BACKEND, DigestingTransfer)


@dataclass
class Hello(WeightTransferInitInfo):
    """What the sender's model is: fields of its text configuration."""

    fields: dict[str, Any]


@dataclass
class Update(WeightTransferUpdateInfo):
    """Where the tensors are: a ``parcel`` of the same process, or the ``path`` of a file.

    A file is of :mod:`lit_grpo.rollout.weights.files`; with ``patches_follow`` the worker keeps what it holds on the
    host, for later files that tell only what changed.
    """

    parcel: Parcel | None = None
    path: str = ""
    patches_follow: bool = False


class Arrived(NamedTuple):
    """A tensor as it was received."""

    digest: str
    shape: torch.Size
    dtype: torch.dtype


class DigestingTransfer(WeightTransferEngine[Hello, Update]):
    """Loads all tensors in one update, and fails where a parameter of the model got none.

    ``arrived`` are the tensors of the last update, by the sender's names.
    """

    init_info_cls = Hello
    update_info_cls = Update

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._held: dict[str, torch.Tensor] = {}
        self.arrived: dict[str, Arrived] = {}

    def init_transfer_engine(self, init_info: Hello) -> None:
        """Compare the models.

        Raises:
            ValueError: They differ.
        """
        config = self.model_config.hf_text_config
        for name, expected in init_info.fields.items():
            if (served := getattr(config, name, None)) != expected:
                raise ValueError(f"another model is served: its {name} is {served!r}, the policy's is {expected!r}")

    def start_weight_update(self) -> None:
        """Begin a layer by layer reload."""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Take the tensors; they are in place when this returns."""
        try:
            self.receive_weights(self.parse_update_info(update_info))
        except BaseException:
            self.finish_weight_update()  # so that a later update finds every layer in order
            raise
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: Update) -> None:
        """Load the tensors into the model, and note their digests.

        Raises:
            WeightSyncError: Parameters of the model were not among what arrived.
        """
        if update_info.parcel is not None:
            self._load(update_info.parcel)
            return
        with safe_open(update_info.path, framework="pt") as file:
            tensors = rebuild(file, self._held)
            self._load(Parcel(self._keep(tensors) if update_info.patches_follow else tensors))

    def _keep(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            self._held[name] = tensor if name in self._held else tensor.clone()
            yield name, self._held[name]

    def _load(self, parcel: Parcel) -> None:
        self.arrived.clear()

        def noted() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in parcel.tensors:
                self.arrived[name] = Arrived(digest(tensor), tensor.shape, tensor.dtype)
                parcel.num_bytes += tensor.nbytes
                yield name, tensor

        expected = {checkpoint_name(name) for name, _ in self.model.named_parameters()}  # of layers that take adapters
        loaded: Any = self.model.load_weights(noted())  # pyright: ignore[reportCallIssue]
        tied = {"lm_head.weight"} if self._ties_head else set()
        if missing := expected - set(loaded) - tied:
            raise WeightSyncError(
                f"{len(missing)} of {len(expected)} parameters of vLLM's model got no weight, {min(missing)!r} among "
                "them."
            )

    def finish_weight_update(self) -> None:
        """Finish the reload."""
        finalize_layerwise_reload(self.model, self.model_config)
        if self._ties_head and self.device.type == "cpu":
            # A head that is tied got no weight of its own, and on CPU it computes with a packed copy of the old one.
            head: Any = self.model.lm_head
            head.quant_method.process_weights_after_loading(head)

    @property
    def _ties_head(self) -> bool:
        return bool(self.model_config.hf_text_config.tie_word_embeddings) and hasattr(self.model, "lm_head")

    def shutdown(self) -> None:
        """Nothing is held open."""


class WorkerExtension:
    """What a worker does for us beside its own work."""

    get_model: Any
    model_runner: Any
    weight_transfer_engine: Any

    def held_digests(self) -> dict[str, str]:
        """Return the digests of the policy's tensors, by its names, as the model holds them after an update.

        Those that vLLM keeps in another form (packed for a CPU, quantized, in shards) are digested as they arrived.
        """
        arrived: dict[str, Arrived] = self.weight_transfer_engine.arrived
        held = {
            name: digest(tensor)
            for name, tensor in _held_weights(self.get_model())
            if name in arrived and (tensor.shape, tensor.dtype) == arrived[name][1:]
        }
        return {name: each.digest for name, each in arrived.items()} | held

    def draw_by_position(self) -> bool:
        """Let a token's random numbers depend on its request's seed and its position alone; say if this vLLM lets us.

        A request that goes on from some of its tokens then samples what it would have sampled without a break. vLLM's
        newer model runner, the default on GPUs, does so by itself. The older one draws from a generator for each
        request, which is seeded anew here before every draw.
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
        """The largest rank of LoRA adapters that it takes."""
        return self.get_model().lora_manager.lora_config.max_lora_rank

    def compute_head_plainly(self) -> None:
        """Leave out adapters of the head, of which there are none.

        vLLM has a place for them, which on a CPU fails for the log-probs of given tokens, and takes time on any device.
        """
        for module in self.get_model().modules():
            if type(module).__name__ == "LogitsProcessorWithLoRA":
                module._get_logits = _plain_logits(module.base_layer)

    def adapter_digests(self, folder: str) -> dict[str, str]:
        """Return the digests of the adapter's tensors that its layers decode with, by their names in ``folder``.

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
            tensors = _held_adapter(model, manager, adapter, list(file.keys()))
            return {name: digest(tensor) for name, tensor in tensors}


def _plain_logits(processor: Any) -> Callable[..., Any]:
    def logits(hidden_states: torch.Tensor, head: Any, *args: Any, **options: Any) -> Any:
        return processor._get_logits(hidden_states, getattr(head, "base_layer", head), *args, **options)

    return logits


class _SeededGenerator(torch.Generator):
    """Is seeded before every draw, and so has no state to go back in, as vLLM does after prefilling a part of a prompt.

    That of a CPU could not.
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


_KEPT_AS_IT_CAME = ("NoneType", "UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")


def _held_weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters of vLLM's model that are kept as they came, by their names in checkpoints; fused ones apart."""
    fused = getattr(model, "packed_modules_mapping", {})
    for path, module in model.named_modules():
        if type(getattr(module, "quant_method", None)).__name__ not in _KEPT_AS_IT_CAME:
            continue
        for kind, parameter in module.named_parameters(recurse=False):
            parent, _, layer = checkpoint_name(f"{path}.{kind}").removesuffix(f".{kind}").rpartition(".")
            parts, sizes = fused.get(layer, [layer]), getattr(module, "output_partition_sizes", [])
            rows = parameter[: getattr(module, "org_vocab_size", None)]  # what follows is padding
            tensors = rows.split(sizes) if len(parts) == len(sizes) and sum(sizes) == len(rows) else [rows]
            for part, tensor in zip(parts, tensors, strict=False):
                yield ".".join(filter(None, [parent, part, kind])), tensor


def _held_adapter(model: Any, manager: Any, adapter: Any, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Find what vLLM has made of peft's tensors: those of some layers it holds together, as lists."""
    from vllm.lora.utils import parse_fine_tuned_lora_name

    mapper = getattr(model, "hf_to_vllm_mapper", None)
    renaming = None if mapper is None else mapper.get_rename_mapper()
    together = {part: (whole, at) for whole, parts in manager.packed_modules.items() for at, part in enumerate(parts)}
    for name in names:
        module, is_a = parse_fine_tuned_lora_name(name, renaming)
        whole, at = together.get(module, (module, None))
        layer = adapter.get_lora(whole)
        if layer is None or whole not in manager.modules:  # of another worker's layers
            continue
        tensor = layer.lora_a if is_a else layer.lora_b
        if at is not None:
            tensor = tensor[at]
        if tensor is not None:
            yield name, tensor
