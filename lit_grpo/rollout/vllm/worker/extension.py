"""Methods that vLLM mixes into its workers, which a run calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from hashlib import blake2b
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import safe_open

from lit_grpo.policy.weights import checkpoint_name, digest
from lit_grpo.rollout.vllm.worker.cpu_build import mend_verification, pack_tied_head, prepare_reload
from lit_grpo.rollout.weights.files import read
from lit_grpo.rollout.weights.shipments import rebuild
from lit_grpo.rollout.weights.tensors import WeightSyncError

if TYPE_CHECKING:
    from lit_grpo.rollout.weights.tensors import Named

_KEPT_AS_IT_CAME = ("NoneType", "UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
_REORDERED = "query_key_value"  # the layer whose rows vLLM's loaders put into another order (BLOOM, Falcon, GPT-NeoX)


class Arrived(NamedTuple):
    """A tensor as it was received."""

    digest: str
    shape: torch.Size
    dtype: torch.dtype


class Receipt:
    """Notes what a model of vLLM is given while its weights are replaced, and checks that nothing was left out.

    Args:
        model: The model of vLLM, whose ``load_weights`` is recorded until :meth:`close`.
        ties_head: Whether its head is tied to the embeddings.
        held: Copies of the tensors on the host, where patches come: tensors with NaN in the place of what stays.
    """

    def __init__(self, model: Any, ties_head: bool, held: dict[str, torch.Tensor] | None) -> None:
        self._model, self._ties_head, self._held = model, ties_head, held
        self._arrived: dict[str, Arrived] = {}
        self._loaded = {"lm_head.weight"} if ties_head else set[str]()
        prepare_reload(model)
        model.load_weights = self._load

    def _load(self, weights: Iterable[Named]) -> set[str]:
        loaded = type(self._model).load_weights(self._model, self._noted(weights))
        self._loaded |= loaded
        return loaded

    def _noted(self, weights: Iterable[Named]) -> Iterator[Named]:
        for name, tensor in weights:
            whole = tensor
            if self._held is not None:
                before = self._held.get(name, tensor.cpu())
                whole = self._held[name] = torch.where(tensor.cpu().isnan(), before, tensor.cpu())
            self._arrived[name] = Arrived(digest(whole), tensor.shape, tensor.dtype)
            yield name, tensor

    def close(self) -> None:
        vars(self._model).pop("load_weights", None)

    def digests(self) -> dict[str, str]:
        """Return the digests of the policy's tensors as the model holds them, by the policy's names.

        Tensors that vLLM keeps in another form (packed for a CPU, quantized, in shards) are digested as they arrived.
        """
        if self._held is not None:  # what was sent before, and has not changed since
            self._arrived = {name: Arrived(digest(each), each.shape, each.dtype) for name, each in self._held.items()}
        else:
            self._check_whole()
        if self._ties_head:
            pack_tied_head(self._model)
        held = {
            name: digest(tensor)
            for name, tensor in held_weights(self._model)
            if name in self._arrived and (tensor.shape, tensor.dtype) == self._arrived[name][1:]
        }
        return {name: each.digest for name, each in self._arrived.items()} | held

    def _check_whole(self) -> None:
        expected: dict[int, set[str]] = {}  # a parameter that two modules share has two names, and is loaded by one
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            expected.setdefault(id(parameter), set()).add(checkpoint_name(name))  # of layers that take adapters
        if missing := [min(names) for names in expected.values() if not names & self._loaded]:
            raise WeightSyncError(
                f"{len(missing)} of {len(expected)} parameters of vLLM's model got no weight, {min(missing)!r} among "
                f"them: its {type(self._model).__name__} is not built as transformers builds the policy; take another "
                "generator or policy."
            )


class WorkerExtension:
    """The methods that are called on workers; a guarded server lets its owner call these and no other."""

    get_draft_model: Any
    get_model: Any
    model_runner: Any
    reload_weights: Any
    vllm_config: Any

    # ---- weights ----------------------------------------------------------------------------------

    def check_model(self, fields: Mapping[str, Any], sees: bool = False) -> None:
        """Raise a ValueError if the model that is served has other values in its text configuration, or cannot see."""
        config = self.vllm_config.model_config.hf_text_config
        if sees and not self.vllm_config.model_config.is_multimodal_model:
            raise ValueError("a model of texts is served, and prompts have images: start the server with --vision")
        for name, expected in fields.items():
            if (served := getattr(config, name, None)) != expected:
                raise ValueError(f"another model is served: its {name} is {served!r}, the policy's is {expected!r}")

    def reload(self, source: str | Iterable[Named], changes: bool = False, keeps: bool = False) -> dict[str, str]:
        """Replace all weights, with vLLM's own ``reload_weights``; return the digests of what the model holds then.

        Args:
            source: The tensors of a :class:`~lit_grpo.rollout.weights.shipments.Shipment`, or the path of their file.
            changes: Whether they are changes of weights that were kept.
            keeps: Keep a copy of the weights on the host, which later changes are applied to.
        """
        held = self.__dict__.setdefault("held_copies", {})
        tensors = rebuild(read(source) if isinstance(source, str) else source, held, changes)
        self.begin_update()
        try:
            self.reload_weights(weights_iterator=_kept(tensors, held) if keeps else tensors)
        except BaseException:
            self.abandon_update()
            raise
        return self.end_update()

    def begin_update(self, patches: bool = False) -> None:
        """Note what arrives from now on, over vLLM's weight transfer too: all weights, or ``patches`` of them."""
        if "receipt" in self.__dict__:
            self.abandon_update()
        model = self.get_model()
        if "has_drafter" not in self.__dict__:
            self.__dict__["has_drafter"] = self._load_drafter()
        _leave_out_adapters_of_heads(model)
        ties_head = self.vllm_config.model_config.hf_text_config.tie_word_embeddings and hasattr(model, "lm_head")
        held = self.__dict__.setdefault("held_copies", {}) if patches else None
        self.__dict__["receipt"] = Receipt(model, bool(ties_head), held)

    def _load_drafter(self) -> bool:
        """Load the weights of a ``draft_model``; return whether there is one.

        vLLM 0.32 gives it those of the engine's load format, whatever its ``draft_load_config`` says: random ones.
        """
        config = self.vllm_config.speculative_config
        if config is None or config.method != "draft_model":
            return False
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload.inplace import reload_weights

        model = self.get_draft_model()
        prepare_reload(model)
        config.draft_load_config.use_tqdm_on_load = False
        of_drafter: Any = SimpleNamespace(
            model_config=config.draft_model_config, load_config=config.draft_load_config, lora_config=None
        )
        with set_current_vllm_config(self.vllm_config):
            reload_weights(of_drafter, model, None, None, True)
        if config.draft_model_config.hf_text_config.tie_word_embeddings and hasattr(model, "lm_head"):
            pack_tied_head(model)
        return True

    def abandon_update(self) -> None:
        """Put every layer in order after an update that broke off, so that a later one is whole."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        self.__dict__.pop("receipt").close()
        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(self.get_model(), self.vllm_config.model_config)

    def end_update(self) -> dict[str, str]:
        receipt: Receipt = self.__dict__.pop("receipt")
        receipt.close()
        return receipt.digests()

    def draw_by_position(self) -> bool:
        """Let a token's random numbers depend only on its request's seed and its position; return whether they do.

        A request that goes on from some of its tokens then samples what it would have sampled without a break. vLLM's
        newer model runner, the default on GPUs, draws like this by itself. The older one has a generator for each
        request, which is seeded again here before every draw.
        """
        runner = self.model_runner
        if getattr(runner, "speculative_config", None) is not None and runner.device.type == "cpu":
            mend_verification()
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
        return self.get_model().lora_manager.lora_config.max_lora_rank

    def adapter_digests(self, folder: str) -> dict[str, str]:
        """Return the digests of the adapter's tensors that the layers decode with, by their names in its ``folder``."""
        model = self.get_model()
        manager = model.lora_manager
        held = manager.list_adapters()
        in_use = [number for number in manager.lora_index_to_id if number is not None]
        if len(held) != 1 or in_use != list(held):
            raise WeightSyncError(f"vLLM holds the adapters {list(held)} and uses {in_use}, where it was sent one.")
        (adapter,) = held.values()
        with safe_open(Path(folder) / "adapter_model.safetensors", framework="pt") as file:
            tensors = held_adapter(model, manager, adapter, list(file.keys()))
            return {name: digest(tensor) for name, tensor in tensors}


def _kept(tensors: Iterable[Named], held: dict[str, torch.Tensor]) -> Iterator[Named]:
    for name, tensor in tensors:
        held[name] = tensor if name in held else tensor.clone()
        yield name, held[name]


def _leave_out_adapters_of_heads(model: Any) -> None:
    """Compute logits plainly where a model takes adapters: none of them is of the head.

    vLLM's support of those fails on a CPU for the log-probs of given tokens, and takes time on any device.
    """
    for module in model.modules():
        if type(module).__name__ == "LogitsProcessorWithLoRA":
            module._get_logits = partial(_plain_logits, module.base_layer)


def _plain_logits(processor: Any, hidden_states: torch.Tensor, head: Any, *args: Any, **options: Any) -> Any:
    return processor._get_logits(hidden_states, getattr(head, "base_layer", head), *args, **options)


# ---- random numbers -------------------------------------------------------------------------------------


class _SeededGenerator(torch.Generator):
    """A generator that is seeded before every draw.

    vLLM sets a generator back after it has prefilled a part of a prompt, which is of no use here and fails on a CPU.
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
