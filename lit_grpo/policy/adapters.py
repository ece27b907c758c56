"""LoRA adapters on the policy, through peft."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from huggingface_hub import save_torch_state_dict
from transformers.pytorch_utils import Conv1D

from lit_grpo.policy.saving import written_as_a_whole
from lit_grpo.policy.sharding import is_scattered, whole_state_dict
from lit_grpo.policy.weights import PolicyWeights

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class LoraSettings:
    """Train low-rank adapters (LoRA, arXiv 2106.09685) and leave the weights of the policy as they are.

    Args:
        r: The rank.
        alpha: The adapters' output is scaled by ``alpha / r``.
        target_modules: The linear layers that get one, by name; ``all-linear`` is all but the head.
        rslora: Scale by ``alpha / sqrt(r)`` instead (arXiv 2312.03732).
        base: ``nf4`` keeps the frozen linear layers in four bits (QLoRA, arXiv 2305.14314); needs bitsandbytes. The
            policy is then the rounded one with adapters: so it samples, and so it is exported.
    """

    r: int = 16
    alpha: float = 32.0
    target_modules: list[str] | str = "all-linear"
    rslora: bool = False
    base: Literal["nf4"] | None = None

    def __post_init__(self) -> None:
        if self.r < 1:
            raise ValueError(f"lora.r must be at least 1, not {self.r}.")
        if not self.alpha > 0:
            raise ValueError(f"lora.alpha must be above 0, not {self.alpha}.")
        if self.base not in (None, "nf4"):
            raise ValueError(f"lora.base must be nf4 or left out, not {self.base!r}.")


def add_adapters(policy: PreTrainedModel, settings: LoraSettings) -> None:
    """Give the policy adapters that change nothing yet, and freeze everything else.

    Raises:
        ValueError: peft is not installed, or no layer has one of the names.
    """
    if util.find_spec("peft") is None:
        raise ValueError("model.lora needs peft; install the extra lit_grpo[lora].")
    from peft import LoraConfig

    _check_targets(policy, settings.target_modules)
    config = LoraConfig(
        r=settings.r,
        lora_alpha=settings.alpha,  # pyright: ignore[reportArgumentType]
        target_modules=settings.target_modules,
        use_rslora=settings.rslora,
        lora_dropout=0.0,  # the trainer's log-probs must be the generator's
        task_type="CAUSAL_LM",
    )
    policy.add_adapter(config)


def _check_targets(policy: PreTrainedModel, targets: list[str] | str) -> None:
    """Refuse a name that no layer has: peft leaves it out as long as another one has any."""
    if isinstance(targets, str):  # all-linear, or a regular expression of which peft says that nothing matches
        return
    modules = dict(policy.named_modules())
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in modules):
            linear = [name for name, module in modules.items() if isinstance(module, torch.nn.Linear | Conv1D)]
            known = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
            raise ValueError(
                f"lora.target_modules names {target!r}, which no layer of {type(policy).__name__} is called; "
                f"its linear layers are {known}."
            )


def has_adapters(policy: PreTrainedModel) -> bool:
    """Whether the policy has adapters of :func:`add_adapters`."""
    return bool(getattr(policy, "_hf_peft_config_loaded", False))


class Exported:
    """The weights of a policy as Hugging Face's files have them, with adapters merged, and the adapters alone.

    All ranks make it; where each has a shard, they put the weights together on their hosts.

    Args:
        policy: The model.
        keep: Whether this rank is to save them.
    """

    def __init__(self, policy: PreTrainedModel, keep: bool = True) -> None:
        self._policy = policy
        self._weights = whole_state_dict(policy)
        self._merged: dict[str, torch.Tensor] = {}
        if has_adapters(policy):
            on_host = is_scattered(policy)
            merged = ((name, tensor.cpu() if on_host else tensor) for name, tensor in PolicyWeights(policy))
            self._merged = {name: _in_own_storage(tensor) for name, tensor in merged if keep}

    def save(self, folder: Path) -> None:
        """Save them, and the adapters in ``adapter/``."""
        policy = self._policy
        if not has_adapters(policy):
            policy.save_pretrained(folder, state_dict=self._weights)
            return
        policy.save_pretrained(folder / "adapter", state_dict=self._weights)
        save_torch_state_dict(self._merged, folder)
        config = deepcopy(policy.config)
        vars(config).pop("quantization_config", None)  # the merged weights are numbers
        config.save_pretrained(folder)
        if policy.generation_config is not None:
            policy.generation_config.save_pretrained(folder)


def export(policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, keep: bool = True) -> None:
    """Save policy and tokenizer, with adapters merged, and also alone in ``adapter/``; all ranks call it.

    Args:
        policy: The model.
        tokenizer: Its own.
        folder: Where to.
        keep: Whether this rank is to save them.

    Raises:
        ValueError: There is no room for it; what was there before is left as it was.
    """
    weights = Exported(policy, keep)
    if keep:
        with written_as_a_whole(folder) as aside:
            weights.save(aside)
            tokenizer.save_pretrained(aside)


def _in_own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without the padding that gathering uneven shards leaves behind it."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
