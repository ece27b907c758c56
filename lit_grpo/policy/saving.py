"""Exports of a policy: its folder is written, opened again, compared with the policy, and then put in its place."""

from __future__ import annotations

import copy
import json
import os
import shutil
import stat
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import save_torch_state_dict, split_torch_state_dict_into_shards
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from lit_grpo.memory import free_bytes
from lit_grpo.policy.adapters import has_adapters, own_adapter
from lit_grpo.policy.architecture.decoder import hidden_states, in_evaluation, logit_map, never_sample, token_logits
from lit_grpo.policy.architecture.unread import Unread, count_no_drafts, find_unread, known_unread
from lit_grpo.policy.architecture.vision import sees, vision_of
from lit_grpo.policy.sharding import class_of, compute, full_tensor
from lit_grpo.policy.tokenizers import save_tokenizer
from lit_grpo.policy.weights import PolicyWeights, digest
from lit_grpo.process.inputs import check_replaceable, kind_of
from lit_grpo.process.terminal import first_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_INDEX = "model.safetensors.index.json"
_SHARD_BYTES = 5 * 10**9
_NUM_TOKENS = 16
_SHAKE = 0.01
_ROUNDING = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
"""By dtype, the relative error of the embeddings that moves log-probs as far as rounding may move them.

Missing or foreign weights move them a hundred times as far, and more."""
_LEAST_GAP = 1e-3
"""Nats; a smaller difference always counts as rounding."""


class ExportError(ValueError):
    """The files that were written do not hold the policy that was trained."""


class BrokenPolicyError(ExportError):
    """The trained policy has NaN or infinity in its weights or log-probs."""


@dataclass(frozen=True)
class Comparison:
    """The result of comparing a written folder with the policy.

    Args:
        num_tensors: The number of tensors on the disk whose digests equal those of the policy.
        gap: The largest difference, in nats, between log-probs of the policy and of the model loaded from the folder;
            None if there was no memory for a second model.
        num_carried: The number of tensors of multi-token prediction, which are on the disk as they are in the base.
    """

    num_tensors: int
    gap: float | None
    num_carried: int = 0

    def __str__(self) -> str:
        files = f"{self.num_tensors} tensors on the disk have the digests of the policy's"
        if self.num_carried:
            files += f", {self.num_carried} more are the base's, for multi-token prediction"
        if self.gap is None:
            return f"{files}, and transformers finds each of them a place (no memory to load a second model)"
        return f"{files}, and opened again it computes the policy's log-probs to {self.gap:.1g} nats"


@contextmanager
def written_as_a_whole(folder: Path) -> Iterator[Path]:
    """Give a temporary folder to write to; after the last file its files are moved to ``folder``.

    Raises:
        ValueError: The disk is full or not writable, or what is to be replaced is no file; ``folder`` is unchanged.
    """
    if os.path.lexists(folder) and not folder.is_dir():
        raise ValueError(f"{folder} is {kind_of(folder.lstat().st_mode)}, and not a folder; give another folder.")
    aside = folder.with_name(f".{folder.name}.writing")
    try:
        aside.unlink() if aside.is_symlink() else shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        yield aside
        rights = stat.S_IMODE(aside.stat().st_mode) & 0o666  # safetensors gives its files to this user alone
        others = _other_weights(folder, aside)
        places = {path: folder / path.relative_to(aside) for path in sorted(aside.rglob("*")) if path.is_file()}
        for place in (*others, *places.values()):
            check_replaceable(place)
        for path in others:
            path.unlink()
        for path, place in places.items():
            place.parent.mkdir(parents=True, exist_ok=True)
            path.chmod(rights)
            path.replace(place)
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ValueError(
            f"The policy could not be written to {folder} ({reason}), and the folder is unchanged; make room, and take "
            "the policy out of the run's last checkpoint with python -m lit_grpo export."
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _other_weights(folder: Path, aside: Path) -> list[Path]:
    """Return weight files of an earlier export that would be read with the new ones, or instead of them."""
    found = [path for pattern in ("model*.safetensors", _INDEX) for path in folder.glob(pattern)]
    return [path for path in found if not (aside / path.name).exists()]


def export(
    policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, keep: bool = True
) -> Comparison | None:
    """Save policy and tokenizer. Adapters are merged into the weights, and also saved alone in ``adapter/``.

    Tensors of multi-token prediction, which are no part of the model, are copied from the files that it was loaded
    from; without them the configuration counts no such layers. All ranks call it, and the one with ``keep`` writes.
    The files are opened again and compared with the policy: each tensor by its digest, and the log-probs of some
    tokens if the host has memory for a second model. The rank that writes returns the result.

    Raises:
        BrokenPolicyError: The policy has NaN or infinity in its weights or log-probs; all ranks raise it.
        ExportError: The files do not hold the policy.
        ValueError: The disk is full, or not writable; then ``folder`` is unchanged.
    """
    logprobs = _Expected.of(policy)
    _check_numbers(policy, logprobs, folder)
    adapter = _adapter_state(policy, keep)
    weights = PolicyWeights(policy)
    if not keep:
        for _ in weights:
            pass
        return None
    carried = find_unread(policy)
    if lost := known_unread(policy).drafts.keys() - carried.drafts.keys():
        warnings.warn(
            f"{policy.name_or_path} does not hold {min(lost)} any more, as it did when the policy was loaded, so the "
            f"export to {folder} is without multi-token prediction; put the files back and export a checkpoint to have "
            "it there.",
            stacklevel=2,
        )
        carried = Unread()
    with written_as_a_whole(folder) as aside:
        copies = _write_weights(weights, carried, aside)
        save_settings(policy, aside, counts_drafts=bool(carried.drafts))
        save_tokenizer(tokenizer, aside)
        if sees(policy):
            vision_of(policy).save(aside)
        if adapter:
            own_adapter(policy).save_pretrained(str(aside / "adapter"))
            save_torch_state_dict(adapter, aside / "adapter", filename_pattern="adapter_model{suffix}.safetensors")
        return _compared(weights, copies, carried.trained.keys(), policy, logprobs, aside, folder)


def _check_numbers(policy: PreTrainedModel, expected: _Expected, folder: Path) -> None:
    """Refuse a policy with NaN or infinity in its weights or log-probs; all ranks call it."""
    broken = None
    if expected.logprobs_TV.isnan().any():
        broken = "its log-probs are NaN"
    elif expected.moved == 0 and expected.logprobs_TV.eq(expected.logprobs_TV[0]).all():
        broken = "its log-probs are the same whatever it reads"  # for example, activations overflow in a norm
    for name, weight in policy.named_parameters():
        if broken is None and weight.is_floating_point() and not torch.isfinite(full_tensor(weight.detach())).all():
            broken = f"its weight {name} holds NaN or infinity"
    if broken is not None:
        raise BrokenPolicyError(
            f"The policy collapsed: {broken}, so it has not been exported to {folder}; lower the learning rate, and "
            "take an earlier checkpoint."
        )


def save_settings(policy: Any, folder: Path, counts_drafts: bool = True) -> None:
    """Save a model's configuration, without quantization, and its generation config.

    The generation config is saved unchecked: transformers refuses to save a temperature without ``do_sample``, which
    many models have. Without ``counts_drafts`` the configuration counts no layers of multi-token prediction. Where the
    text has a configuration of its own, that says too whether the head is tied, for vLLM reads it there.
    """
    config = copy.deepcopy(policy.config)
    if (of_text := config.get_text_config()) is not config:
        of_text.tie_word_embeddings = getattr(config, "tie_word_embeddings", False)
    if not counts_drafts:
        count_no_drafts(config)
    config.architectures = [class_of(policy).__name__]
    config.dtype = str(policy.dtype).removeprefix("torch.")
    vars(config).pop("quantization_config", None)
    config.save_pretrained(folder)
    if policy.generation_config is not None:
        policy.generation_config.to_json_file(folder / "generation_config.json", use_diff=True)


def _adapter_state(policy: PreTrainedModel, keep: bool) -> dict[str, torch.Tensor]:
    """Return the adapter on the host, by the names in peft's files; empty where there is none or ``keep`` is false."""
    if not has_adapters(policy):
        return {}
    from peft.utils import get_peft_model_state_dict

    (name,) = policy.active_adapters()
    wanted = {key for key in dict(policy.named_parameters()) if f".{name}" in key}
    state = {key: full_tensor(one).detach().cpu() for key, one in policy.named_parameters() if key in wanted}
    if not keep:
        return {}
    alone = get_peft_model_state_dict(policy, state, adapter_name=name, save_embedding_layers=False)
    return {f"base_model.model.{key}": tensor.contiguous() for key, tensor in alone.items()}


def _write_weights(weights: PolicyWeights, carried: Unread, folder: Path) -> dict[str, str]:
    """Write the weights, and what is carried beside them, in files of at most 5 GB; about one file is in memory.

    The digests of the tensors that are carried are returned by name.
    """
    outline = weights.outline | {name: stored.outline for name, stored in carried.drafts.items()}
    copies: dict[str, str] = {}
    plan = split_torch_state_dict_into_shards(outline, max_shard_size=_SHARD_BYTES)
    place_of = {name: file for file, names in plan.filename_to_tensors.items() for name in names}
    waiting: dict[str, dict[str, torch.Tensor]] = {file: {} for file in plan.filename_to_tensors}
    for name, tensor in chain(weights, carried.read()):
        if name in carried.drafts:
            copies[name] = digest(tensor)
        there = waiting[place_of[name]]
        there[name] = _in_own_storage(tensor)
        if len(there) == len(plan.filename_to_tensors[place_of[name]]):
            save_file(there, folder / place_of[name], {"format": "pt"})
            del waiting[place_of[name]]
    assert not waiting, f"{sorted(waiting)} lack tensors"
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": place_of}
        (folder / _INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return copies


def _in_own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the host that shares its memory with no other tensor."""
    tensor = tensor.detach().cpu().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


@dataclass(frozen=True)
class _Expected:
    """Log-probs of the trained policy at some tokens, and how far a small error moves them.

    Args:
        ids_T: Ids of the tokens.
        logprobs_TV: The policy's log-probs there.
        moved: The mean change of the log-probs, in nats, when each embedding is off by about 1%.
    """

    ids_T: torch.Tensor
    logprobs_TV: torch.Tensor
    moved: float

    @classmethod
    def of(cls, policy: PreTrainedModel) -> _Expected:
        vocabulary = len(policy.get_input_embeddings().weight)  # pyrefly: ignore[bad-argument-type]
        drawn = torch.Generator().manual_seed(0)
        ids_T = torch.randint(0, vocabulary, (_NUM_TOKENS,), generator=drawn)
        logprobs_TV = _logprobs(policy, ids_T)

        def shake(module: torch.nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
            noise = torch.randn(output.shape, generator=torch.Generator().manual_seed(0)).to(output)
            return output * (1 + _SHAKE * noise)

        hook = policy.get_input_embeddings().register_forward_hook(shake)
        try:
            moved = float((_logprobs(policy, ids_T) - logprobs_TV).abs().mean())
        finally:
            hook.remove()
        return cls(ids_T, logprobs_TV, moved)

    def gap(self, model: PreTrainedModel, dtype: torch.dtype) -> float:
        """Return the largest difference, in nats, between another model's log-probs and these.

        Raises:
            ExportError: The difference is larger than rounding explains.
        """
        apart_TV = (_logprobs(model, self.ids_T) - self.logprobs_TV).abs()
        allowed = max(_LEAST_GAP, _ROUNDING.get(dtype, 0.1) * self.moved / _SHAKE)
        if not float(apart_TV.mean()) <= allowed:
            raise ExportError(
                f"its log-probs differ from the trained policy's by {float(apart_TV.max()):.2g} nats at most and "
                f"{float(apart_TV.mean()):.2g} on average, where rounding explains {allowed:.1g}"
            )
        return float(apart_TV.max())


@torch.no_grad()
def _logprobs(model: PreTrainedModel, ids_T: torch.Tensor) -> torch.Tensor:
    ids_BT = ids_T.to(model.device)[None]
    with in_evaluation(model):
        logits_TV = compute(model, lambda: token_logits(model, hidden_states(model, ids_BT))[0])
    return logits_TV.float().log_softmax(-1).cpu()


def _compared(
    weights: PolicyWeights,
    copies: Mapping[str, str],
    trained: Collection[str],
    policy: PreTrainedModel,
    expected: _Expected,
    aside: Path,
    folder: Path,
) -> Comparison:
    """Open a written folder, ``aside``, again, and compare its tensors and its log-probs with the policy's.

    ``copies`` are the digests of what was carried beside the weights, of which some was ``trained``; ``folder`` is what
    ``aside`` becomes.
    """
    try:
        _check_files({**weights.digests, **copies}, aside)
        gap = _check_reopened(weights.digests, copies.keys(), policy, expected, aside)
        return Comparison(len(weights.digests) + len(trained), gap, len(copies) - len(trained))
    except ExportError as error:
        raise ExportError(
            f"The policy's export to {folder} was opened again and is not what was trained: {error}; the folder is "
            "unchanged, and the policy is in the run's checkpoints; report this with the policy's config.json."
        ) from error


def _check_files(digests: Mapping[str, str], folder: Path) -> None:
    """Read each tensor from the disk, one at a time, and compare its digest."""
    found: dict[str, str] = {}
    for path in sorted(folder.glob("model*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= {name: digest(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118 (no mapping)
    for name in [*digests, *found]:
        if digests.get(name) != found.get(name):
            raise ExportError(f"{name} on the disk differs from the policy's")


def _check_reopened(
    digests: Mapping[str, str], carried: Collection[str], policy: PreTrainedModel, expected: _Expected, folder: Path
) -> float | None:
    """Load a folder on the host as its user will; without memory for it, only compare names and shapes."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    has_tower = any(hasattr(child, "get_image_features") for child in policy.children())
    kind: Any = AutoModelForImageTextToText if has_tower else AutoModelForCausalLM
    outline = PolicyWeights(policy).outline
    fits = 1.2 * sum(tensor.nbytes for tensor in outline.values()) < free_bytes(torch.device("cpu"))
    try:
        loaded: Any = kind.from_pretrained(
            folder,
            dtype=policy.dtype,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            device_map=None if fits else "meta",
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ExportError(f"transformers cannot load it ({first_line(error)})") from error
    model, report = loaded
    for kind in ("missing_keys", "mismatched_keys"):
        if report[kind]:
            raise ExportError(f"transformers tells of {kind} on loading it, {sorted(map(str, report[kind]))[0]} first")
    unread = find_unread(model)
    if strange := {*unread.drafts, *unread.others} - {*carried}:
        raise ExportError(f"transformers has no place for {min(strange)} on loading it")
    if not fits:
        return None
    reopened = PolicyWeights(model)
    for _ in reopened:
        pass
    for name in [*digests, *reopened.digests]:
        if digests.get(name) != reopened.digests.get(name):
            raise ExportError(f"{name} in the loaded model differs from {name} on the disk")
    never_sample(model, logit_map(policy).never)
    return expected.gap(model, policy.dtype)
