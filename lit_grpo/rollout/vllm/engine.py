"""vLLM in this process, stepped by the rollout loop."""

from __future__ import annotations

import functools
import gc
import os
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from lit_grpo.compatibility import Clash, check_clashes
from lit_grpo.limits import checks_arguments
from lit_grpo.memory import free_bytes
from lit_grpo.policy.architecture.vision import sees
from lit_grpo.policy.spec import TOKENIZER, PolicySpec
from lit_grpo.process.files import PrivateFolder
from lit_grpo.process.terminal import first_line
from lit_grpo.ranks import Ranks
from lit_grpo.rollout.generator import GenerationError, StepEvents
from lit_grpo.rollout.vllm.arguments import (
    all_draw_by_position,
    check_drafts,
    check_engine_args,
    check_on_cpu,
    check_packages,
    draft_arguments,
    drafting,
    engine_arguments,
    import_vllm,
    kv_bytes_of_slots,
    quiet_start,
    require_vllm,
    start_failure,
)
from lit_grpo.rollout.vllm.generator import EngineGenerator, Room, Slots, Travel
from lit_grpo.rollout.vllm.images import Shown, image_arguments, other_tokens, shown
from lit_grpo.rollout.vllm.streams import EngineRequest, NotAsAsked, SampledChunk
from lit_grpo.rollout.weights.shipments import Shipment
from lit_grpo.rollout.weights.tensors import SyncReport, WeightSyncError, joined
from lit_grpo.scheduling.memory_amount import MemoryAmount

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_OVER_DEVICES = ("tensor", "pipeline", "data", "prefill_context")  # ways to spread an engine
_FREE_SHARE = 0.01
"""Of a GPU's memory, that vLLM demands to be free at its start. Keys and values have their bytes, so vLLM uses
``gpu_memory_utilization`` for nothing else; its own 0.92 fails beside the policy, which is on the same GPU."""
_with_engine: weakref.WeakSet[VLLMGenerator] = weakref.WeakSet()  # those of this process
_BY_ENGINE = "do_not_compile"  # an attribute that vLLM gives to the models that it makes
_engines_starting = 0
_of_ranks: list[Any] = []  # the engine of this rank, if it is one of several: it ends with the ranks' process group


class VLLMGenerator(EngineGenerator):
    """Decode with a vLLM engine in this process, on the policy's device.

    Each completion is a request of its own. The engine gets no more requests than it decodes at a time, so the plan
    decides what comes next, and not the engine's queue. Prompts are prefilled once a group (prefix caching). The engine
    begins without weights; every sync reloads all of them in place, or brings new LoRA adapters. Of several ranks each
    has an engine of its own for its prompts.

    Args:
        num_slots: Number of completions decoded at a time (vLLM's ``max_num_seqs``).
        kv_memory: Max memory of the KV cache: an amount such as ``2.5GiB``, a fraction of the free memory such as
            ``60%``, or ``auto``, which in ``fit`` leaves the memory that gradients, optimizer and update need.
        sleep_level: GPU memory that the engine frees during the update: 0 nothing, 1 the KV cache, with the weights
            moved to the host, 2 both dropped.
        adapters: Way of sending LoRA adapters: ``merged`` into the weights, all of which are sent at every sync; or
            ``alone``: the base weights are sent once, then only adapters, which vLLM applies itself. ``auto`` is
            ``alone``, except on a CPU (where vLLM decodes three times as fast with ``merged``), with sleep level 2, if
            the KV cache is kept over a sync, or if vLLM does not support the adapters.
        engine_args: Any other argument of vLLM's ``EngineArgs``, such as ``dtype`` or ``enforce_eager``.
    """

    @checks_arguments()
    def __init__(
        self,
        num_slots: Slots = 64,
        kv_memory: str = "auto",
        sleep_level: Literal[0, 1, 2] = 1,
        adapters: Travel = "auto",
        engine_args: dict[str, Any] | None = None,
    ) -> None:
        remedies = "raise engine_args.max_model_len", "raise kv_memory"
        super().__init__(num_slots, adapters, engine_args, sleep_level < 2, remedies)
        _check_one_device(self.arguments)
        drafts = (drafting(self.arguments) or {}).get("model") is not None
        clashes = [
            Clash(
                f"{kept} needs weights that an engine keeps between rollouts",
                "sleep_level 2 drops them",
                found=found and sleep_level == 2,
                remedy="take sleep_level 1",
            )
            for kept, found in (("adapters alone", adapters == "alone"), ("a model that drafts", drafts))
        ]
        check_clashes(clashes)
        self.kv_memory = MemoryAmount(kv_memory)
        self.sleep_level = sleep_level
        self._engine: Any = None
        self._keyed = False  # it draws random numbers by position
        self._is_half_stepped = False  # a step broke off, so the engine may have done half of it
        self._asleep: set[str] = set()  # the memory that has been given back
        self._holds_base = False  # the base weights, for adapters that travel alone
        self._num_adapters = 0
        self._adapter: Any = None  # vLLM's request for the adapter to decode with

    # ---- life -------------------------------------------------------------------------------------

    def _make(self, policy: PolicySpec, lora: Mapping[str, Any]) -> None:
        """Start an engine, after ending that of another generator in this process, which then needs another start."""
        require_vllm()
        if Ranks().size == 1 and policy.device.index:  # an engine of a single rank takes the first visible GPU
            raise ValueError(
                f"The policy is on {policy.device}, but vLLM in this process decodes on cuda:0; leave trainer.devices "
                f"at 1 and set the environment variable CUDA_VISIBLE_DEVICES={policy.device.index}, or take "
                "lit_grpo.rollout.vllm.VLLMServerGenerator."
            )
        check_drafts(self.arguments, policy)
        if policy.device.type == "cpu":
            check_on_cpu(policy.config.get_text_config(), self.arguments)
        check_packages(policy.config.model_type, sees(policy.module))
        _end_engines()
        self._folder = PrivateFolder("lit_grpo_vllm_")
        policy.save_skeleton(self._folder.path)
        model, tokenizer = str(self._folder.path), str(self._folder.path / TOKENIZER)
        own = self._own_arguments(policy)
        own |= {**lora, **draft_arguments(self.arguments), **image_arguments(policy)}
        arguments: dict[str, Any] = {"model": model, "tokenizer": tokenizer, **own, **self.arguments}
        with (
            quiet_start(),
            _rank_told(policy.device),
            _shared_classes(policy.module),
            torch.inference_mode(False),  # a sync writes to the engine's tensors
        ):
            import_vllm()
            from vllm.engine.arg_utils import EngineArgs
            from vllm.v1.engine.llm_engine import LLMEngine

            check_engine_args(arguments, EngineArgs)
            try:
                self._engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
            except Exception as error:
                raise ValueError(start_failure(policy, error)) from error
        if Ranks().size == 1:
            _with_engine.add(self)
        else:
            _of_ranks.append(self._engine)
        config: Any = self._engine.vllm_config
        block = int(config.cache_config.block_size)
        kv_tokens = (int(config.cache_config.num_gpu_blocks) - 1) * block  # one block stands for none
        self._engine_room = Room(int(config.model_config.max_model_len), [kv_tokens], block)
        self._asleep.clear()
        self._is_half_stepped = False
        try:
            answers = self._engine.collective_rpc("draw_by_position")
        except NotImplementedError:  # the user's own worker_extension_cls
            answers = [False]
        self._keyed = all_draw_by_position(answers)

    def _own_arguments(self, policy: PolicySpec) -> dict[str, Any]:
        on_gpu = policy.device.type == "cuda"
        return engine_arguments(str(policy.dtype).removeprefix("torch."), self.num_slots, on_gpu) | {
            "kv_cache_memory_bytes": self._kv_bytes(policy),
            "gpu_memory_utilization": _FREE_SHARE,
            "scheduling_policy": "priority",
            "enable_sleep_mode": on_gpu and self.sleep_level > 0,
            "distributed_executor_backend": "uni" if Ranks().size == 1 else "external_launcher",
        }

    def _kv_bytes(self, policy: PolicySpec) -> int:
        """Return the budget; where it is ``auto``, no more than all slots can use, as far as that is known."""
        free = free_bytes(policy.device)
        dtype = self.weights_dtype or policy.dtype
        weights = sum(weight.nbytes for weight in policy.weights(dtype=dtype).outline.values())
        allowed = self.kv_memory.bytes(free, policy.update_bytes + weights)
        if self.kv_memory.kind == "auto":
            allowed = min(allowed, kv_bytes_of_slots(policy, dtype, self.num_slots, self.arguments) or allowed)
        if allowed < 1:  # which vLLM would take for all that is free
            raise ValueError(
                f"kv_memory is {self.kv_memory.text}, which leaves nothing for the KV cache: {free / 2**30:.1f} GiB "
                f"are free, the engine's weights take {weights / 2**30:.1f} GiB of it, and the update "
                f"{policy.update_bytes / 2**30:.1f} GiB; give an amount such as '2GiB' if the engine sleeps while the "
                "policy is updated, train LoRA adapters (model.lora), or take a device with more memory."
            )
        return allowed

    def _end_engine(self) -> None:
        self._withdraw([stream for stream in self._streams if stream.ticket is not None])
        self._engine.engine_core.shutdown()
        self._engine, self._adapter, self._made_for, self.version = None, None, "", -1

    def _check_whole(self) -> None:
        if self._is_half_stepped:
            raise WeightSyncError(
                "vLLM's engine broke off in the middle of a step and may hold half of it, so it decodes no more; call "
                "start again, as the next trainer.fit does, and the generator begins with a new engine."
            )

    def _check_ready(self, num_requests: int = 0, free_slots: int = 0) -> None:
        self._check_whole()
        super()._check_ready(num_requests, free_slots)

    # ---- weights ----------------------------------------------------------------------------------

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> SyncReport:
        self._check_whole()
        return super().load_weights(weights, version)

    def _load(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> SyncReport:
        """Reload all weights in place, one after another."""
        self._holds_base = False  # until all of them are here
        shipment = Shipment(weights)
        with self._awake():
            digests = joined(self._engine.collective_rpc("reload", args=(shipment,)))
        self._holds_base = True
        return SyncReport(digests, shipment.num_bytes)

    def _exchange(self, folder: Path, version: int) -> dict[str, str]:
        """Take new adapters by a name of their own."""
        if not self._holds_base:
            raise WeightSyncError("Adapters arrived, but the base weights have not.")
        self._num_adapters += 1
        with self._awake():
            from vllm.lora.request import LoRARequest

            self._adapter = LoRARequest(f"version-{version}-{self._num_adapters}", self._num_adapters, str(folder))
            self._engine.add_lora(self._adapter)
            return joined(self._engine.collective_rpc("adapter_digests", args=(str(folder),)))

    def _score(self, sequences: Sequence[Sequence[int]]) -> dict[str, list[list[float]]]:
        outputs: list[Any] = []
        try:
            for number, token_ids in enumerate(sequences):
                fields = {"max_tokens": 1, "prompt_logprobs": 0, "detokenize": False}
                self._add(number, token_ids, self._salt, fields, "FINAL_ONLY")
            while len(outputs) < len(sequences):
                outputs += [output for output in self._step_engine() if output.finished]
        except Exception as error:
            raise WeightSyncError(f"vLLM could not score given tokens: {str(error) or type(error).__name__}") from error
        finally:
            self._stop(str(number) for number in range(len(sequences)))
        outputs.sort(key=lambda output: int(output.request_id))
        return {"vLLM's engine": [_prompt_logprobs(output) for output in outputs]}

    @contextmanager
    def _awake(self) -> Iterator[None]:
        """Load weights: wake their memory before, and the memory of the KV cache after."""
        self._wake("weights")
        try:
            with torch.inference_mode(False), torch.no_grad():
                yield
        except WeightSyncError:
            raise
        except Exception as error:
            raise WeightSyncError(f"vLLM could not load the policy's weights: {error}") from error
        self._wake("kv_cache")

    def _lacks_base(self) -> bool:
        return not self._holds_base

    def invalidate_weights(self) -> None:
        super().invalidate_weights()
        self._holds_base = False

    def sleep(self) -> dict[str, float]:
        """On a GPU, give back what ``sleep_level`` says, and measure what the process still uses."""
        is_busy = len(self._streams) > 0 or self._is_half_stepped
        if not self._engine.vllm_config.model_config.enable_sleep_mode or self._asleep or is_busy:
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
        super().close()
        if self._engine is not None:
            self.sleep()

    # ---- requests ---------------------------------------------------------------------------------

    def _room(self) -> Room:
        return self._engine_room

    def _ask(self, stream: EngineRequest) -> None:
        assert stream.ticket is not None
        fields = self._fields(stream, self._keyed)
        self._add(stream.ticket, stream.prompt, stream.salt, fields, "DELTA", shown(stream))

    def _add(
        self,
        number: int,
        prompt: Sequence[int],
        salt: str,
        fields: Mapping[str, Any],
        output_kind: str,
        shown: Shown | None = None,
    ) -> None:
        """Ask the engine, which if short of memory sets aside the requests with the highest numbers: the youngest."""
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(**fields, output_kind=getattr(RequestOutputKind, output_kind))
        read: Any = {"prompt_token_ids": list(prompt)} if shown is None else shown.in_process()
        tokens = TokensPrompt(**read, cache_salt=salt)
        try:
            self._engine.add_request(str(number), tokens, params, priority=number, lora_request=self._adapter)
        except Exception as error:
            if shown is None:
                raise
            raise ValueError(
                f"vLLM reads no prompt with images: {first_line(error)}; take lit_grpo.rollout.slots.SlotGenerator."
            ) from error

    def _withdraw(self, streams: Sequence[EngineRequest]) -> None:
        self._stop([str(self._streams.take_ticket(stream)) for stream in streams])

    def _stop(self, request_ids: Iterable[str]) -> None:
        """Let the engine forget requests, unless it broke off in a step: then it is left alone."""
        if (ids := list(request_ids)) and not self._is_half_stepped:
            self._engine.abort_request(ids)

    def _step_engine(self) -> list[Any]:
        """Let the engine take a step; after one that breaks off, by an interrupt too, it is not used again.

        vLLM's scheduler counts what it schedules as computed before the step. So the next request with the same prompt
        would find keys and values that no step has computed.
        """
        try:
            return self._engine.step()
        except BaseException:
            self._is_half_stepped = True
            self._made_for = ""  # so that the next start makes another engine
            self.invalidate_weights()
            raise

    def _receive(self, events: StepEvents) -> None:
        for output in self._step_engine():
            if (stream := self._streams.of_ticket(int(output.request_id))) is None:
                continue
            is_first = stream.request.prompt.pictures is not None and len(stream.token_ids) == stream.num_begun
            if is_first and (other := other_tokens(stream.prompt, output.prompt_token_ids)):
                raise GenerationError(f"{stream.engine} {other}")
            sampled, token_ids = output.outputs[0], list(output.outputs[0].token_ids)
            said = zip(token_ids, sampled.logprobs or (), strict=False)
            logprobs: list[Any] = [at[token].logprob if token in at else None for token, at in said]
            chunk = SampledChunk(token_ids, logprobs, sampled.finish_reason if output.finished else None)
            try:
                self._take(stream, chunk, events)
            except NotAsAsked as error:
                raise GenerationError(f"{stream.engine} {error}.") from error
            if output.finished and (counts := getattr(sampled, "spec_decode_metrics", None)) is not None:
                events.num_drafted += counts.num_draft_tokens
                events.accepted["vllm"] += sum(accepted * steps for accepted, steps in enumerate(counts.histogram))


def _check_one_device(arguments: Mapping[str, Any]) -> None:
    """Raise a ValueError unless the engine is to decode on the policy's device alone."""
    for name in (f"{way}_parallel_size" for way in _OVER_DEVICES):
        if int(arguments.get(name) or 1) > 1:
            raise ValueError(
                f"engine_args.{name} is {arguments[name]}, but an engine in this process decodes on its policy's "
                "device alone; leave it out, or take lit_grpo.rollout.vllm.VLLMServerGenerator with server_args."
            )
    if "distributed_executor_backend" in arguments:
        raise ValueError(
            f"engine_args.distributed_executor_backend is {arguments['distributed_executor_backend']!r}, but in this "
            "process it follows from the ranks; leave it out."
        )


def _prompt_logprobs(output: Any) -> list[float]:
    token_ids, logprobs = output.prompt_token_ids[1:], output.prompt_logprobs[1:]
    return [at[token].logprob for token, at in zip(token_ids, logprobs, strict=True)]


@contextmanager
def _rank_told(device: torch.device) -> Iterator[None]:
    """Tell vLLM which rank this is, as torchrun does. All ranks start their engines at the same time.

    vLLM then makes its groups within the ranks' process group, and each group has one engine.
    """
    told = {"RANK": str(Ranks().rank), "LOCAL_RANK": str(device.index or 0)}
    before = {name: os.environ[name] for name in told if name in os.environ}
    os.environ.update(told)
    try:
        yield
    finally:
        for name in told:
            del os.environ[name]
        os.environ.update(before)


def _end_engines() -> None:
    """End all engines of this process: two engines share state, and the end of one would take it from the other."""
    if _of_ranks:  # an engine would end with the process group of the ranks
        raise ValueError(
            "This process has a vLLM engine of another policy, or one that broke off in a step, and as one of several "
            "ranks it cannot end it; begin another run for this policy, or take "
            "lit_grpo.rollout.vllm.VLLMServerGenerator."
        )
    for generator in list(_with_engine):
        generator._end_engine()
    _with_engine.clear()
    gc.collect()  # ends the engines of generators that are gone


@contextmanager
def _shared_classes(policy: PreTrainedModel) -> Iterator[None]:
    """Start an engine, and let the policy's own classes go on as they were.

    vLLM computes some families, such as GLM, with the model class of transformers, whose ``__init__`` and ``__call__``
    it replaces to compile the model. From then on these are for the engine's models only.
    """
    global _engines_starting
    own: dict[Any, Any] = {kind: kind.__init__ for kind in {type(module) for module in policy.modules()}}
    _engines_starting += 1
    try:
        yield
    finally:
        _engines_starting -= 1
        for kind, own_init in own.items():
            if kind.__init__ is not own_init:
                _divide(kind, own_init)


def _divide(kind: Any, own_init: Any) -> None:
    engine_init, engine_call = kind.__init__, kind.__call__

    @functools.wraps(own_init)
    def init(module: Any, *args: Any, **options: Any) -> None:
        (engine_init if _engines_starting else own_init)(module, *args, **options)

    def call(module: Any, *args: Any, **options: Any) -> Any:
        return (engine_call if _BY_ENGINE in vars(module) else torch.nn.Module.__call__)(module, *args, **options)

    kind.__init__, kind.__call__ = init, call
