"""A policy's config.json and safetensors compared with each other, before memory is taken for the weights."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired

from typing_extensions import TypedDict

from lit_grpo.policy.architecture.outline import bare_model, ranges
from lit_grpo.policy.architecture.unread import Stored, stored_tensors
from lit_grpo.policy.hub import stored_file
from lit_grpo.process.inputs import open_input, read_json, typed

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_SIZES = (
    *("hidden_size", "n_embd", "num_attention_heads", "num_key_value_heads", "n_head", "head_dim", "vocab_size"),
    "max_position_embeddings",
)
_NUMBERS = ("intermediate_size", "moe_intermediate_size", "num_experts", "num_local_experts", "n_routed_experts")
_REMEDY = "put the config of these weights beside them"


class _Index(TypedDict):
    weight_map: dict[str, str]
    metadata: NotRequired[dict[str, Any]]


def check_settings(place: str) -> None:
    """Hold the numbers of a config.json to ranges, and refuse more layers than the files have weights."""
    from transformers.utils import CONFIG_NAME

    path = stored_file(place, CONFIG_NAME)
    if path is None:  # transformers says what is missing
        return
    numbers = ranges()
    settings = typed(read_json(path), dict[str, Any], str(path), _REMEDY)
    for name, value in _numbers(settings):
        form = None
        if name in _SIZES:
            form = numbers.positive
        elif name in _NUMBERS or name in _LAYERS:
            form = numbers.natural
        elif "norm" in name and name.endswith(("eps", "epsilon")):
            form = numbers.epsilon
        elif name == "rope_theta":
            form = numbers.rope_base
        if form is not None:
            typed(value, form, f"{name} in {path}", _REMEDY)
    layers = [value for name, value in _numbers(settings) if name in _LAYERS]
    held = _num_weights(place)
    if layers and held is not None and max(layers) > held:
        raise ValueError(
            f"its config.json names {max(layers)} layers (num_hidden_layers), but its files hold {held} weights in "
            f"all; {_REMEDY}"
        )


def _numbers(settings: dict[str, Any]) -> Iterator[tuple[str, int | float]]:
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _numbers(value)
        elif isinstance(value, int | float):
            yield name, value


def _num_weights(place: str) -> int | None:
    """Return how many weights the files of a policy hold; None if there is no index, and no file at hand."""
    from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

    index = stored_file(place, SAFE_WEIGHTS_INDEX_NAME)
    if index is not None:
        return len(typed(read_json(index), _Index, str(index), "save the policy again")["weight_map"])
    return len(_held(place)) if _files(place) else None


def compare_with_files(place: str, config: PreTrainedConfig) -> None:
    """Compare the model of a configuration with the headers of a folder's safetensors.

    Weights under the same name have one shape, and all weights together are not several times as many as the files
    hold. Weights that files of transformers hold under other names, or packed by a quantization, are left to it. Of a
    hub id nothing is compared, for its files may not be here yet.
    """
    held = _held(place)
    if not held or getattr(config, "quantization_config", None) is not None:
        return
    try:
        model = bare_model(config)
    except (ValueError, KeyError):  # no causal language model, of which transformers tells
        return
    weights = model.state_dict()
    for name, weight in weights.items():
        stored = held.get(name)
        if stored is not None and stored.shape != tuple(weight.shape):
            raise ValueError(
                f"its files hold {name} with the shape {stored.shape}, and its config.json describes "
                f"{tuple(weight.shape)}; {_REMEDY}"
            )
        if stored is not None and weight.is_floating_point() and "F" not in stored.dtype:
            raise ValueError(f"its files hold {name} as {stored.dtype}, which are no floats; save it there again")
    needed = sum(weight.numel() for name, weight in weights.items() if name not in model.all_tied_weights_keys)
    found = sum(prod(stored.shape) for stored in held.values())
    if needed > 2 * found:
        raise ValueError(
            f"its config.json describes a model of {needed:,} numbers, and its files hold {found:,}; {_REMEDY}"
        )


def check_layers(model: Any, unexpected: Iterable[str]) -> None:
    """Refuse weights of layers that a model lacks, or weights of other parts of its layers."""
    settings = model.config.get_text_config()
    numbered = (name.rpartition(".") for name, _ in model.named_modules())
    num_layers = Counter(lists for lists, _, number in numbered if number.isdigit())
    predicting = [getattr(settings, name, None) or 0 for name in ("num_nextn_predict_layers", "mtp_num_hidden_layers")]
    wrong = []
    for name in unexpected:
        found = re.match(r"(.*?)\.(\d+)\.", name)
        if found and (known := num_layers[found[1]]) and not 0 <= int(found[2]) - known < sum(predicting):
            wrong.append(name)
    if wrong:
        raise ValueError(
            f"its files hold {len(wrong)} weights of layers that the {type(model).__name__} of its config.json lacks, "
            f"such as {min(wrong)}; {_REMEDY}"
        )


def _held(place: str) -> dict[str, Stored]:
    paths = _files(place)
    for path in paths:
        open_input(path).close()
    return stored_tensors(paths)


def _files(place: str) -> list[Path]:
    from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

    index, whole = Path(place) / SAFE_WEIGHTS_INDEX_NAME, Path(place) / SAFE_WEIGHTS_NAME
    if whole.exists() or not index.exists():  # transformers takes the whole file first
        return [whole] if whole.exists() else []
    told = typed(read_json(index), _Index, str(index), "save the policy again")
    return [index.parent / name for name in sorted(set(told["weight_map"].values()))]
