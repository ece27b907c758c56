"""The policy of a run: that of a checkpoint, or the folder that the run has exported."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from typing_extensions import TypedDict

from lit_grpo.checkpoints import settled
from lit_grpo.policy.architecture.unread import known_unread
from lit_grpo.policy.architecture.vision import give_vision, has_tower
from lit_grpo.policy.loading import load_policy, load_tokenizer, load_vision
from lit_grpo.policy.saving import export
from lit_grpo.policy.weights import PolicyWeights
from lit_grpo.process.inputs import read_json, typed
from lit_grpo.tools.commands.export import NotLoadedError, load_checkpoint

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class _Config(TypedDict, total=False):
    """A model's config.json, as far as it is read here."""

    dtype: Literal["float64", "float32", "float16", "bfloat16"] | None


@dataclass(frozen=True)
class RunPolicy:
    """A run's policy in memory.

    Args:
        policy: The model, perhaps with adapters.
        tokenizer: Tokenizer of the model, with its chat template.
        version: The update that made it.
        adapter: Folder of an adapter that has been merged into the model already.
    """

    policy: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    version: int
    adapter: Path | None = None

    @classmethod
    def find(cls, run: Path, checkpoint: str, last_update: int) -> RunPolicy:
        """Load the policy of the checkpoint ``last`` or ``best``, or else the policy that the run exported.

        Raises:
            ValueError: There is neither, or it cannot be read.
        """
        path, folder = settled(run / "checkpoints" / f"{checkpoint}.ckpt"), run / "policy"
        exported = checkpoint == "last" and os.path.lexists(folder / "config.json")
        if exported and not path.exists():
            return cls.of_folder(folder, last_update)
        if not path.exists():
            there = sorted(one.name.removesuffix(".ckpt") for one in path.parent.glob("*.ckpt"))
            other = f"give --checkpoint {there[0]}" if there else "a run keeps it at its end if checkpoint is not null"
            raise ValueError(f"The run in {str(run)!r} has no checkpoint {str(path)!r}; {other}.")
        try:
            module = load_checkpoint(path)
        except NotLoadedError:
            if not exported:
                raise
            return cls.of_folder(folder, last_update)
        return cls(module.policy, module.tokenizer, module.policy_version)

    @classmethod
    def of_folder(cls, folder: Path, version: int) -> RunPolicy:
        """Load the policy that a run has exported."""
        path, remedy = folder / "config.json", "copy the policy again"
        try:
            dtype = typed(read_json(path), _Config, str(path), remedy).get("dtype")
        except OSError as error:
            raise ValueError(f"{path} cannot be read ({error.strerror}); {remedy}.") from None
        adapter = folder / "adapter"
        tokenizer, sees = load_tokenizer(str(folder)), has_tower(folder)
        policy = load_policy(str(folder), dtype or "float32", vision=sees)
        if sees:
            give_vision(policy, load_vision(str(folder), tokenizer), trained=True)
        return cls(policy, tokenizer, version, adapter if adapter.is_dir() else None)

    @cached_property
    def outline(self) -> dict[str, torch.Tensor]:
        """The weights that will be written, without content."""
        return PolicyWeights(self.policy).outline

    @property
    def num_bytes(self) -> int:
        """The size of the weights, and of what an export carries beside them."""
        carried = [stored.outline for stored in known_unread(self.policy).drafts.values()]
        return sum(tensor.nbytes for tensor in [*self.outline.values(), *carried])

    @property
    def num_weights(self) -> int:
        return sum(tensor.numel() for tensor in self.outline.values())

    def gguf_bytes(self, kind: str) -> int:
        """Return the size of a GGUF file of the policy.

        Raises:
            ValueError: The policy has no form in GGUF.
        """
        from lit_grpo.tools.finishing.gguf_writer import planned_bytes

        shapes = {name: tuple(tensor.shape) for name, tensor in self.outline.items()}
        return planned_bytes(self.policy.config, shapes, self.tokenizer, kind)

    def export(self, folder: Path) -> int:
        """Write the policy's folder, with the adapter alone if there is one, and compare it with the policy.

        Returns:
            The number of tensors of multi-token prediction, which are carried as they are in the base.
        """
        compared = export(self.policy, self.tokenizer, folder)
        if self.adapter is not None:
            shutil.copytree(self.adapter, folder / "adapter")
        return 0 if compared is None else compared.num_carried
