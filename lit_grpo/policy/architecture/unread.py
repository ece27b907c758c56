"""Tensors in a policy's files that the model, as transformers builds it, has no place for.

Layers of multi-token prediction (MTP) are such tensors: they draft tokens for speculative decoding, and transformers
passes over them. An export carries them as they are. Other such tensors are left out of it.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from lit_grpo.policy.hub import weight_files
from lit_grpo.policy.weights import checkpoint_name, persistent_buffers

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_DRAFTS = re.compile(r"(^|[._])(mtp|nextn)", re.IGNORECASE)
"""The names of what drafts; of some families they are those of layers after the last one."""
_COUNT = re.compile(r"(?=.*(mtp|nextn)).*(layers|modules)$")
"""The fields of a configuration that count such layers."""
_LAYER = re.compile(r"^(|.*\.)layers\.(\d+)\.")
_PLAIN = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "BOOL": torch.bool,
}
"""The dtypes of tensors that are not quantized, by their names in safetensors."""
_KNOWN = "unread_tensors"
TRAINED = "_lit_grpo_trained_drafts"
"""The attribute of a model with its layer of multi-token prediction, once a run trains that."""


class Stored(NamedTuple):
    """A tensor in a file.

    Args:
        path: Path of the safetensors file that holds the tensor.
        dtype: The name of its dtype in safetensors.
        shape: Shape of the tensor, as the file's header gives it.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def outline(self) -> torch.Tensor:
        return torch.empty(self.shape, dtype=_PLAIN[self.dtype], device="meta")


@dataclass(frozen=True)
class Unread:
    """The tensors in a policy's files that its model has no place for.

    Args:
        drafts: Those of multi-token prediction, which exports carry, by name.
        others: The names of those that exports leave out.
        num_counted: The number of layers of multi-token prediction by the policy's configuration.
        trained: Those of ``drafts`` that a run has trained.
    """

    drafts: Mapping[str, Stored] = field(default_factory=dict[str, Stored])
    others: Collection[str] = ()
    num_counted: int = 0
    trained: Mapping[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])

    def read(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what exports carry, one tensor at a time.

        Raises:
            OSError, SafetensorError: A file is not there any more, or damaged.
        """
        for name, stored in self.drafts.items():
            if name in self.trained:
                yield name, self.trained[name].to(_PLAIN[stored.dtype])
                continue
            with safe_open(stored.path, "pt") as file:
                yield name, file.get_tensor(name)

    def sentence(self, model: str) -> str:
        """Say what becomes of these tensors; nothing if there are none."""
        parts = []
        if self.drafts:
            parts.append(
                f"the files also hold multi-token prediction ({_some(self.drafts)}): it is not trained, and exports "
                "carry it as it is, so fewer of its drafts are accepted the more the policy changes"
            )
        elif self.num_counted:
            parts.append(
                f"the config counts {self.num_counted} layer{'s' * (self.num_counted > 1)} of multi-token prediction, "
                "and the files hold none without quantization: exports count 0"
            )
        if self.others:
            them = "them" if len(self.others) > 1 else "it"
            parts.append(f"{model} has no place for {_some(self.others)} of the files: exports leave {them} out")
        return "; ".join(parts)


def _some(names: Collection[str]) -> str:
    number = f"{len(names)} tensors, such as " if len(names) > 1 else "the tensor "
    return f"{number}{min(names)}"


def remember_unread(model: PreTrainedModel) -> None:
    """Keep with a model that has been loaded what :func:`find_unread` finds now, for :func:`known_unread`."""
    setattr(model, _KNOWN, find_unread(model))


def known_unread(model: PreTrainedModel) -> Unread:
    """Return the tensors that were found when the model was loaded; its files may have changed since."""
    return getattr(model, _KNOWN, Unread())


def find_unread(model: PreTrainedModel) -> Unread:
    """Compare a model, perhaps with adapters, without content or in shards, with the files that it was loaded from."""
    try:
        stored = stored_tensors(weight_files(model.name_or_path) if model.name_or_path else ())
    except (OSError, ValueError, SafetensorError):  # removed since, or a name that is no place
        stored = {}
    has_place = _places(model) if stored else lambda name: False
    placed = {name for name in stored if has_place(name)}
    rest = {name: one for name, one in stored.items() if name not in placed}
    num_counted = counted_drafts(model.config)
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    drafts = {
        name: rest[name]
        for name in drafting(model.config, rest, {_stack(name) for name in placed})
        if num_counted or any(re.search(pattern, name) for pattern in ignored)
    }
    if any(one.dtype not in _PLAIN for one in drafts.values()):  # the export says nothing of quantization
        drafts = {}
    others = [name for name in rest if name not in drafts]
    head = vars(model).get(TRAINED)
    return Unread(drafts, others, num_counted, {} if head is None else head.stored())


def drafting(config: PreTrainedConfig, names: Iterable[str], stacks: Collection[str | None] | None = None) -> list[str]:
    """Return the names of tensors of multi-token prediction.

    Args:
        config: Configuration of the policy, which counts its layers.
        names: Names of tensors in its files.
        stacks: What stands before ``layers`` in the names of the model's own layers; None for anything.
    """
    first = config.get_text_config().num_hidden_layers
    extra = range(first, first + counted_drafts(config))

    def drafts(name: str) -> bool:
        layer = _LAYER.match(name)
        beyond = layer is not None and int(layer[2]) in extra and (stacks is None or _stack(name) in stacks)
        return beyond or _DRAFTS.search(name) is not None

    return [name for name in names if drafts(name)]


def _stack(name: str) -> str | None:
    layer = _LAYER.match(name)
    return None if layer is None else layer[1]


def counted_drafts(config: Any) -> int:
    return max([value for _, _, value in _counts(config)], default=0)


def count_no_drafts(config: Any) -> None:
    for fields, name, _ in list(_counts(config)):
        fields[name] = 0


def _counts(config: Any) -> Iterator[tuple[dict[str, Any], str, int]]:
    """Yield the fields that count such layers, those of parts of the model too."""
    fields = config if isinstance(config, dict) else vars(config)
    for name, value in fields.items():
        if isinstance(value, int) and not isinstance(value, bool) and _COUNT.search(name):
            yield fields, name, value
        elif name.endswith("_config") and (isinstance(value, dict) or hasattr(value, "to_dict")):
            yield from _counts(value)


def stored_tensors(paths: Iterable[str | Path]) -> dict[str, Stored]:
    """Return the tensors in safetensors files by name; only the headers are read."""
    found: dict[str, Stored] = {}
    for path in paths:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (no mapping)
                part = file.get_slice(name)
                found[name] = Stored(str(path), part.get_dtype(), tuple(part.get_shape()))
    return found


def _places(model: PreTrainedModel) -> Callable[[str], bool]:
    """Return whether a tensor of some name is loaded into a model, by the rules of transformers' loader."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    # not its state_dict, which makes shards of whole weights, on this rank alone
    tensors = (*model.named_parameters(remove_duplicate=False), *persistent_buffers(model))
    own: dict[str, Any] = {checkpoint_name(name): tensor for name, tensor in tensors}
    conversions: Any = copy.deepcopy(getattr(model, "_weight_conversions", None) or [])
    renamings = [one for one in conversions if isinstance(one, WeightRenaming)]
    converters = [one for one in conversions if isinstance(one, WeightConverter)]

    def has_place(name: str) -> bool:
        return any(
            rename_source_key(name, *rules, base_model_prefix=model.base_model_prefix, meta_state_dict=own)[0] in own
            for rules in ((renamings, converters), ([], []))
        )

    return has_place
