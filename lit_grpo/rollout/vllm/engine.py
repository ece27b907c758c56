"""vLLM in this process, stepped by the rollout controller."""

from __future__ import annotations

import gc
import shutil
import tempfile
import time
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from lit_grpo.memory import free_bytes, update_bytes
from lit_grpo.policy.loading import context_length, eos_token_ids
from lit_grpo.policy.weights import PolicyWeights
from lit_grpo.rollout.generator import Capacity, StepEvents
from lit_grpo.rollout.vllm.adapters import adapter_arguments, check_adapters, joined
from lit_grpo.rollout.vllm.arguments import (
    check_engine_args,
    check_fits,
    dtype_of,
    finish_reason,
    import_vllm,
    kv_bytes_per_token,
    quiet_start,
    sampling_fields,
    save_skeleton,
    signature,
    warn_of_dtype,
)
from lit_grpo.rollout.vllm.streams import Streams, TextFeatures
from lit_grpo.rollout.weights.adapters import AdapterWeights, adapter_folder, apart, share_of_elements
from lit_grpo.rollout.weights.tensors import Parcel, SyncReport, WeightSyncError, complete
from lit_grpo.scheduling.budget import MemoryBudget
from lit_grpo.types import Completion, Key, Prompt, Request

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


_with_engine: weakref.WeakSet[VLLMGenerator] = weakref.WeakSet()  # those of this process


class VLLMGenerator:
    """Decode with a vLLM engine in this process, on the policy's device.

    Each completion is a request of its own, and no more are in the engine than it decodes at a time: the plan decides
    what comes next, not the engine's queue. Prompts are prefilled once a group (prefix caching). The engine begins
    with no weights; every sync reloads all of them in place, or brings new LoRA adapters.

    Args:
        num_slots: How many completions are decoded at a time (vLLM's ``max_num_seqs``).
        kv_memory: How much memory keys and values may take: an amount such as ``2.5GiB``, a share of what is free
            such as ``60%``, or ``auto``, which leaves what gradients, optimizer and update need.
        sleep_level: What the engine gives back while the policy is updated, on a GPU: 0 nothing, 1 keys and values,
            with the weights moved to the host, 2 both dropped.
        adapters: How LoRA adapters travel: ``merged`` into the weights, all of which travel with every sync; or
            ``alone``, after weights that travel once, and vLLM decodes with its own support of LoRA.
        engine_args: Any other argument of vLLM's ``EngineArgs``, such as ``dtype`` or ``enforce_eager``.
    """

    decodes_on_policy = False

    def __init__(
        self,
        num_slots: int = 64,
        kv_memory: str = "auto",
        sleep_level: Literal[0, 1, 2] = 1,
        adapters: Literal["merged", "alone"] = "merged",
        engine_args: dict[str, Any] | None = None,
    ) -> None:
        if num_slots < 1:
            raise ValueError(f"num_slots must be at least 1, not {num_slots}: a completion needs a slot to decode in.")
        if sleep_level not in (0, 1, 2):
            raise ValueError(f"sleep_level must be 0, 1 or 2, not {sleep_level}.")
        check_adapters(adapters)
        if adapters == "alone" and sleep_level == 2:
            raise ValueError("sleep_level 2 drops the weights, which adapters: alone sends once; take sleep_level 1.")
        self.num_slots = num_slots
        self.kv_memory = MemoryBudget(kv_memory)
        self.sleep_level = sleep_level
        self.adapters = adapters
        self.engine_args = dict(engine_args or {})
        self.weights_dtype = dtype_of(self.engine_args)
        self.feature_points: tuple[int, ...] = ()
        self._version = -1
        self._engine: Any = None
        self._policy: PreTrainedModel | None = None
        self._made_for = ""
        self._num_submitted = 0
        self._keys: dict[str, Key] = {}  # of requests in flight, by the engine's name for them
        self._names: dict[Key, str] = {}
        self._asleep: set[str] = set()  # what has been given back
        self._holds_base = False  # the weights that adapters alone stand beside
        self._num_adapters = 0
        self._adapter: Any = None  # vLLM's name of the one to decode with

    # ---- life -------------------------------------------------------------------------------------

    def start(self, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Start an engine for the policy's architecture, without its weights; one that runs for the same is kept.

        An engine of another generator in this process ends: it decodes again after a ``start`` of its own.

        Raises:
            ValueError: vLLM is not installed, or does not take an engine argument, the model or its adapters.
        """
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            raise ValueError(
                "VLLMGenerator decodes for a run of one process; on several devices take "
                "lit_grpo.rollout.vllm.server.VLLMServerGenerator, which starts servers for each rank."
            )
        warn_of_dtype(policy, self.weights_dtype)
        arguments = self._arguments(policy)
        made_for = f"{signature(policy)} {arguments.get('max_lora_rank')}"
        if self._made_for != made_for:
            _end_engines()
            self._engine = self._make_engine(policy, tokenizer, arguments)
            self._made_for = made_for
            _with_engine.add(self)
        self._policy, self._holds_base = policy, False
        config = self._engine.vllm_config
        self._context = int(config.model_config.max_model_len)
        self._kv_tokens = int(config.cache_config.num_gpu_blocks * config.cache_config.block_size)
        self._eos_ids = eos_token_ids(policy, tokenizer)
        self._features = TextFeatures(policy, self.feature_points)
        self._streams = Streams(tokenizer, self._features)
        self._unseen: list[Prompt] = []

    def _end_engine(self) -> None:
        self._engine.engine_core.shutdown()
        self._engine, self._adapter, self._made_for, self._version = None, None, "", -1

    def _make_engine(
        self, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, arguments: dict[str, Any]
    ) -> Any:
        folder = Path(tempfile.mkdtemp(prefix="lit_grpo_vllm_"))
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        save_skeleton(policy, tokenizer, folder)
        arguments = {"model": str(folder), **arguments, **self.engine_args}
        with quiet_start(), torch.inference_mode(False):  # its tensors are written to again, whatever mode that is in
            import_vllm()
            from vllm.engine.arg_utils import EngineArgs
            from vllm.v1.engine.llm_engine import LLMEngine

            check_engine_args(arguments, EngineArgs)
            return LLMEngine.from_engine_args(EngineArgs(**arguments))

    def _arguments(self, policy: PreTrainedModel) -> dict[str, Any]:
        on_gpu = policy.device.type == "cuda"
        return {
            "load_format": "dummy",
            "dtype": str(policy.dtype).removeprefix("torch."),
            "max_num_seqs": self.num_slots,
            "kv_cache_memory_bytes": self._kv_bytes(policy),
            "enable_prefix_caching": True,
            "scheduling_policy": "priority",
            "logprobs_mode": "processed_logprobs",
            "disable_log_stats": True,
            "enable_sleep_mode": on_gpu and self.sleep_level > 0,
            "enforce_eager": not on_gpu,
            "weight_transfer_config": {"backend": "lit_grpo"},
            **(adapter_arguments(policy, self.engine_args) if self.adapters == "alone" else {}),
        }

    def _kv_bytes(self, policy: PreTrainedModel) -> int:
        """The budget, and where it is ``auto`` no more than all slots can use."""
        allowed = self.kv_memory.bytes(free_bytes(policy.device), update_bytes(policy))
        if self.kv_memory.kind != "auto":
            return allowed
        context = self.engine_args.get("max_model_len") or context_length(policy)
        config, dtype = policy.config.get_text_config(), self.weights_dtype or policy.dtype
        return min(allowed, (self.num_slots + 1) * context * kv_bytes_per_token(config, dtype))

    def weights_of(self, policy: PreTrainedModel) -> PolicyWeights:
        """All weights with adapters merged; or the adapters, and the base weights where the engine has none."""
        if self.adapters == "alone":
            return AdapterWeights(policy, with_base=not self._holds_base, dtype=self.weights_dtype)
        return PolicyWeights(policy, dtype=self.weights_dtype)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> SyncReport:
        """Reload all weights in place, one after another, or take new adapters; forget the prompts of the old ones."""
        assert self._policy is not None, "start comes first"
        self._version = -1  # until all of them are here
        self._wake("weights")
        try:
            with torch.inference_mode(False), torch.no_grad():
                if self.adapters == "alone":
                    report = self._load_apart(weights, self._policy, version)
                else:
                    report = self._load_all(complete(weights, PolicyWeights(self._policy).names))
        except WeightSyncError:
            raise
        except Exception as error:
            raise WeightSyncError(f"vLLM could not load the policy's weights: {error}") from error
        if not self._engine.reset_prefix_cache():
            raise WeightSyncError("vLLM kept the keys and values of old weights; requests are still in flight.")
        self._wake("kv_cache")
        self._engine.set_weight_version(str(version))
        self._version = version
        return report

    def _load_all(self, weights: Iterable[tuple[str, torch.Tensor]]) -> SyncReport:
        parcel = Parcel(weights)
        self._engine.collective_rpc("start_weight_update")
        self._engine.collective_rpc("update_weights", args=({"parcel": parcel},))
        self._engine.collective_rpc("finish_weight_update")
        return SyncReport(parcel.digests, parcel.num_bytes)

    def _load_apart(
        self, weights: Iterable[tuple[str, torch.Tensor]], policy: PreTrainedModel, version: int
    ) -> SyncReport:
        """Load the base weights where they come too, and then the adapters."""
        adapters, base = apart(weights, policy)
        if base is None and not self._holds_base:
            raise WeightSyncError("Adapters arrived, but the weights that they stand beside have not.")
        if base is None:
            report = SyncReport(changed_share=share_of_elements(adapters, policy))
        else:
            self._holds_base = False  # until all of them are here
            report = self._load_all(base)
            self._holds_base = True
        report.digests |= self._load_adapters(adapters, policy, version)
        report.num_bytes += sum(tensor.nbytes for tensor in adapters.values())
        return report

    def _load_adapters(
        self, adapters: dict[str, torch.Tensor], policy: PreTrainedModel, version: int
    ) -> dict[str, str]:
        """Exchange the adapter for a new one of another name; return the digests of what the engine holds of it."""
        from vllm.lora.request import LoRARequest

        self._num_adapters += 1
        with adapter_folder(adapters, policy) as folder:
            name = f"version-{version}-{self._num_adapters}"
            self._adapter = LoRARequest(name, self._num_adapters, str(folder))
            self._engine.add_lora(self._adapter)
            return joined(self._engine.collective_rpc("adapter_digests", args=(str(folder),)))

    @property
    def version(self) -> int:
        """The policy version that samples now; -1 where no complete set of weights has arrived."""
        return self._version

    def distrust(self) -> None:
        """Refuse to sample until ``load_weights`` succeeds again, with all weights."""
        self._version, self._holds_base = -1, False

    def sleep(self) -> dict[str, float]:
        """On a GPU, give back what ``sleep_level`` says; what stays with the process is measured."""
        if not self._engine.vllm_config.model_config.enable_sleep_mode or self._asleep or self._streams.requests:
            return {}
        start = time.perf_counter()
        before = torch.cuda.mem_get_info()[0]
        self._engine.sleep(level=self.sleep_level)
        self._asleep = {"weights", "kv_cache"}
        free, total = torch.cuda.mem_get_info()
        return {
            "vllm/sleep_s": time.perf_counter() - start,
            "vllm/freed_gib": (free - before) / 2**30,
            "vllm/device_in_use_asleep_gib": (total - free) / 2**30,
        }

    def _wake(self, part: str) -> None:
        if part in self._asleep:
            self._engine.wake_up([part])
            self._asleep.remove(part)

    def close(self) -> None:
        """End what is in flight, and sleep; the engine goes with this object, or serves another ``start``."""
        if self._engine is not None:
            self.abort([request.key for request in self._streams.requests])
            self.sleep()

    # ---- requests ---------------------------------------------------------------------------------

    def capacity(self) -> Capacity:
        """Slots and KV memory, and how much of them is free."""
        return Capacity(
            self.num_slots, self.num_slots - len(self._streams), self._kv_tokens, self._streams.num_kv_tokens
        )

    def submit(self, requests: Sequence[Request], expected: Sequence[float] | None = None) -> None:
        """Hand requests to the engine, all or none."""
        if self._version < 0:
            raise WeightSyncError("The generator has no complete set of weights; call load_weights first.")
        if len(requests) > self.capacity().free_slots:
            raise ValueError(
                f"{len(requests)} requests for {self.capacity().free_slots} free slots; submit at most that many."
            )
        for request in requests:
            check_fits(request, self._context, self._kv_tokens)
        for request in requests:
            self._add(request)

    def _fields(self, request: Request) -> dict[str, Any]:
        return sampling_fields(request, self._eos_ids) | {"detokenize": bool(request.sampling.stop)}

    def _add(self, request: Request) -> None:
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(**self._fields(request), output_kind=RequestOutputKind.DELTA)
        prompt = TokensPrompt(prompt_token_ids=list(request.prompt.token_ids))
        # An engine short of memory sets aside those of the highest priority number: the youngest.
        name = str(self._num_submitted)
        self._engine.add_request(name, prompt, params, priority=self._num_submitted, lora_request=self._adapter)
        self._num_submitted += 1
        self._keys[name], self._names[request.key] = request.key, name
        self._streams.open(request)

    def expect(self, prompts: Iterable[Prompt]) -> None:
        """Show the prompts for the prediction of lengths with the next step."""
        self._unseen += prompts

    def release(self, prompts: Iterable[Prompt]) -> None:
        """The engine drops the prompts that have not been used for longest, where it needs their memory."""

    def step(self) -> StepEvents:
        """Let the engine take one step."""
        events = StepEvents(num_active=len(self._streams))
        if not events.num_active:
            return events
        events.observations += self._features.of_prompts(self._unseen)
        self._unseen.clear()
        for output in self._engine.step():
            key, sampled = self._keys.get(output.request_id), output.outputs[0]
            if key is None:  # aborted
                continue
            logprobs = [at[token].logprob for token, at in zip(sampled.token_ids, sampled.logprobs or (), strict=True)]
            self._streams.extend(key, sampled.token_ids, logprobs, self._version, events)
            if output.finished:
                self._streams.finish(key, finish_reason(sampled.finish_reason), events)
                del self._keys[self._names.pop(key)]
        self._streams.observe(events)
        return events

    def abort(self, keys: Iterable[Key]) -> list[Completion]:
        """Stop requests and return their partial completions."""
        if self._engine is None:
            return []
        partial = self._streams.abort(keys)
        if partial:
            names = [self._names.pop(completion.request.key) for completion in partial]
            for name in names:
                del self._keys[name]
            self._engine.abort_request(names)
            self._settle()
        return partial

    def _settle(self) -> None:
        """Let the engine forget aborted requests, so that their memory is free."""
        if not self._streams.requests and self._engine.has_unfinished_requests():
            self._engine.step()


def _end_engines() -> None:
    """End all engines of this process: two of them share state, and one that ends takes it from the other."""
    for generator in list(_with_engine):
        generator._end_engine()
    _with_engine.clear()
    gc.collect()  # those whose generators are gone
