"""Loading a policy and its tokenizer, and checking what training needs."""

from __future__ import annotations

import math
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import util
from inspect import signature
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import SafetensorError

from lit_grpo.compatibility import Clash, check_clashes
from lit_grpo.policy.adapters import check_config
from lit_grpo.policy.architecture.attention import attention_calls
from lit_grpo.policy.architecture.decoder import (
    attention_name,
    configured_length,
    context_length,
    in_evaluation,
    inner_model,
)
from lit_grpo.policy.architecture.outline import bare_model
from lit_grpo.policy.architecture.unread import known_unread, remember_unread
from lit_grpo.policy.architecture.vision import Vision, tower_parameters
from lit_grpo.policy.gguf import GGUFError, GGUFFile, gguf_file, unreadable, without_bars
from lit_grpo.policy.hub import hub_or_cache, stored_file
from lit_grpo.policy.named import NAMED, own_folder, resolve_policy
from lit_grpo.policy.nf4 import check_quantized, keep_as_it_is, nf4_config
from lit_grpo.policy.saved import check_layers, check_settings, compare_with_files
from lit_grpo.policy.sharding import class_of
from lit_grpo.policy.tokenizers import read_tokenizer
from lit_grpo.policy.weights import PolicyWeights
from lit_grpo.process.inputs import kind_of, read_json, typed
from lit_grpo.process.packages import require
from lit_grpo.process.terminal import first_line

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


LoadedPolicy = tuple["PreTrainedModel", "PreTrainedTokenizerBase | None"]
"""A loaded model with its tokenizer; None means the tokenizer of the place that the model was loaded from."""


def as_loaded(policy: Any) -> str | LoadedPolicy:
    """Return a policy's name, or a loaded model with its tokenizer."""
    from transformers import PreTrainedModel

    if isinstance(policy, str | Path):
        return own_folder(str(policy))
    if isinstance(policy, tuple) and (len(policy) != 2 or isinstance(policy[0], str | Path)):
        kinds = ", ".join(type(one).__name__ for one in policy)
        raise ValueError(f"policy is a tuple of {kinds}; give a name, a loaded model, or a pair (model, tokenizer).")
    model, tokenizer = policy if isinstance(policy, tuple) else (policy, None)
    model = _with_adapters_inside(model)
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"policy is of type {type(model).__name__}; give a name, a folder or a PreTrainedModel.")
    return model, tokenizer


def _with_adapters_inside(model: Any) -> Any:
    """Unwrap a ``PeftModel``: return its model, with the adapters as transformers itself adds them."""
    if not (util.find_spec("peft") and isinstance(model, torch.nn.Module) and hasattr(model, "get_base_model")):
        return model
    inner: Any = model.get_base_model()  # pyrefly: ignore[not-callable]
    if not getattr(inner, "_hf_peft_config_loaded", False):
        inner.peft_config, inner._hf_peft_config_loaded = model.peft_config, True
    return inner


@dataclass(frozen=True)
class AdapterFolder:
    """A policy that is an adapter of peft: its folder or hub id, and those of its base."""

    name: str
    base: str


def adapter_folder(policy: str) -> AdapterFolder | None:
    """Return the adapter in a folder or of a hub id; ``None`` if there is a model."""
    from transformers.utils.peft_utils import find_adapter_config_file

    name = resolve_policy(policy)
    if gguf_file(name) is not None:  # llama.cpp keeps adapters in files of their own, which are not read
        return None
    with hub_or_cache(name):
        try:
            path = find_adapter_config_file(name)
        except OSError:  # loading the model reports what is wrong
            return None
    if path is None:
        return None
    fields = typed(read_json(Path(path)), dict[str, Any], str(path), "save the adapter_config.json again")
    base = fields.get("base_model_name_or_path")
    if not base:
        raise ValueError(
            f"Policy {policy!r} is an adapter whose adapter_config.json names no base_model_name_or_path; put the name "
            "or folder of the model there that it was trained on."
        )
    return AdapterFolder(name, resolve_policy(base))


@dataclass(frozen=True)
class SavedFiles:
    """A policy as ``save_pretrained`` writes it; :class:`GGUFFile` is the other kind of files.

    Args:
        place: The folder or hub id.
    """

    place: str
    errors = (Exception,)
    """Errors that transformers raises for files that it cannot use: those on types in a config are plain ones."""

    @contextmanager
    def alone(self) -> Iterator[SavedFiles]:
        yield self

    def options(self) -> dict[str, Any]:
        return {}

    def weight_options(self, dtype: str, nf4: bool) -> dict[str, Any]:
        return {"use_safetensors": True, "quantization_config": nf4_config(dtype) if nf4 else None}

    def check(self) -> None:
        check_settings(self.place)

    def finish(self, model: PreTrainedModel) -> None:
        check_quantized(model, self.place)

    def complete(self, config: PreTrainedConfig) -> PreTrainedConfig:
        compare_with_files(self.place, config)
        return config


def files_note(policy: str | LoadedPolicy, dtype: str, model: PreTrainedModel) -> str:
    """Return a sentence on what a policy's files hold that a run should know; mostly there is none.

    Of a loaded model's files no dtypes are known; ``dtype`` is what the weights are read as.
    """
    adapter = adapter_folder(policy) if isinstance(policy, str) else None
    files = gguf_file(resolve_policy(policy) if adapter is None else adapter.base) if isinstance(policy, str) else None
    notes = ("" if files is None else files.note(dtype), known_unread(model).sentence(class_of(model).__name__))
    return "; ".join(filter(None, notes))


def load_config(policy: str) -> PreTrainedConfig:
    """Read the configuration of a policy, and compare it with the files; a ValueError says what is wrong."""
    with _reading(policy, "config") as files:
        return _config_of(files)


def _config_of(files: SavedFiles | GGUFFile) -> PreTrainedConfig:
    from transformers import AutoConfig

    files.check()
    return files.complete(AutoConfig.from_pretrained(files.place, trust_remote_code=False, **files.options()))


def longest_sequence(policy: str | LoadedPolicy) -> int | None:
    """Return the most tokens of a sequence that a policy takes, without loading it; None if its config says nothing."""
    if not isinstance(policy, str):
        return configured_length(policy[0].config)
    adapter = adapter_folder(policy)
    return configured_length(load_config(policy if adapter is None else adapter.base))


@contextmanager
def _reading(policy: str, what: str) -> Iterator[SavedFiles | GGUFFile]:
    from safetensors import SafetensorError

    name = resolve_policy(policy)
    files = gguf_file(name) or SavedFiles(name)
    with hub_or_cache(files.place), without_bars():
        try:
            _check_files(Path(name))
            with files.alone() as alone:
                yield alone
        except SafetensorError as error:
            raise ValueError(f"The weights of policy {policy!r} are damaged ({error}); {_remedy(name)}.") from error
        except files.errors as error:  # RuntimeError: weights of another shape than the config's
            raise ValueError(_load_failure(name, what, error)) from error


_TEXTS, MOST_TEXT_BYTES = (".json", ".txt", ".jinja"), 512 * 2**20


def _check_files(folder: Path) -> None:
    """Refuse what is no file among the files of a folder, and texts that are too long: transformers reads any."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        kind = path.stat().st_mode if path.exists() else stat.S_IFREG
        if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
            raise ValueError(f"{path} is {kind_of(kind)}, and not a file; save the policy again.")
        if path.suffix in _TEXTS and path.exists() and path.stat().st_size > MOST_TEXT_BYTES:
            raise ValueError(f"{path} has more than {MOST_TEXT_BYTES / 2**20:,.0f} MiB; save the policy again.")


def load_tokenizer(policy: str | LoadedPolicy) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a policy, or return the one that was given with a loaded model."""
    if not isinstance(policy, str):
        model, given = policy
        if given is not None:
            return _with_end(given, type(model).__name__)
        if not model.name_or_path:
            raise ValueError(f"policy is a {type(model).__name__} that was made, not loaded; give its tokenizer too.")
        policy = model.name_or_path
    name = _tokenizer_place(resolve_policy(policy))
    with _reading(name, "tokenizer") as files:
        tokenizer = read_tokenizer(name, files.place, files.options())
    tokenizer.name_or_path = name  # a GGUF file's was the folder that it was read from
    if len(tokenizer) <= len(tokenizer.all_special_ids):  # transformers made it from the model's type alone
        raise ValueError(_load_failure(name, "tokenizer", ValueError("it has no vocabulary; save the tokenizer there")))
    return _with_end(tokenizer, name)


def _tokenizer_place(name: str) -> str:
    """Return where a policy's tokenizer is; that of an adapter without its own is its base's."""
    adapter = adapter_folder(name)
    if adapter is None:
        return name
    with hub_or_cache(name):
        return adapter.base if stored_file(name, "tokenizer_config.json") is None else name


def _with_end(tokenizer: PreTrainedTokenizerBase, name: str) -> PreTrainedTokenizerBase:
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"The tokenizer of policy {name!r} names no eos_token, so no completion could end; "
            "add one to its tokenizer_config.json."
        )
    return tokenizer


_MUTUAL = {("gemma3", False): True, ("gemma4", "vision"): False}
"""Families, with ``use_bidirectional_attention``, in which the tokens of an image see one another.

They do so in all layers (True), or in those with a sliding window.
"""


def mutual_of(model: PreTrainedModel) -> bool | None:
    """Return whether tokens of an image see one another in all layers (True), or where these slide; None if nowhere.

    Raises:
        ValueError: Tokens see others in both directions in another way.
    """
    both_ways = getattr(model.config.get_text_config(), "use_bidirectional_attention", None) or False
    mutual = _MUTUAL.get((model.config.model_type, both_ways))
    if mutual is None and (both_ways or "token_type_ids" in signature(inner_model(model).forward).parameters):
        raise ValueError(
            f"Tokens of {type(model).__name__} see others in both directions in a way that is not supported; take "
            "another policy, or train on texts alone."
        )
    return mutual


def load_vision(policy: str | LoadedPolicy, tokenizer: PreTrainedTokenizerBase) -> Vision:
    """Return what reads images for a policy, from its configuration and the settings of its image processor.

    Raises:
        ValueError: The policy has no vision tower, one that is not supported, or no such settings.
    """
    from transformers import AutoModelForImageTextToText

    if not isinstance(policy, str):
        return Vision(policy[0], tokenizer, str(policy[0].name_or_path), mutual_of(policy[0]))
    adapter = adapter_folder(policy)
    name = policy if adapter is None else adapter.base
    config = load_config(name)
    if type(config) not in AutoModelForImageTextToText._model_mapping:
        raise ValueError(f"Policy {policy!r} is of the kind {config.model_type}, which sees no images; take another.")
    outline = bare_model(config, vision=True)
    return Vision(outline, tokenizer, resolve_policy(name), mutual_of(outline))


def load_policy(
    policy: str | LoadedPolicy,
    dtype: str = "float32",
    nf4: bool = False,
    outline: bool = False,
    vision: bool = False,
) -> PreTrainedModel:
    """Load the causal language model of a policy, from safetensors only, and switch its dropout off.

    Args:
        policy: A name, a folder or a hub id; a loaded model is returned itself, in its own dtype.
        dtype: The dtype of the weights.
        nf4: Keep the linear layers, except the head, in four bits; they cannot be trained then.
        outline: Leave the weights on the device ``meta``, for ranks that get them from another rank.
        vision: Load the vision tower too.

    Raises:
        ValueError: There is no such model, it is no causal language model with safetensors, its files are damaged or
            lack a weight, or its kind is not supported.
    """
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # one progress bar: the trainer's
    if not isinstance(policy, str):
        needs, lacks = "model.lora.base nf4 needs a policy by its name", "model.policy is a loaded model"
        check_clashes([Clash(needs, lacks, found=nf4)])
        _check_kept(policy[0])
        remember_unread(policy[0])
        _switch_dropout_off(policy[0])
        attend_in_full(policy[0])
        return policy[0]
    adapter = adapter_folder(policy)
    model = _load_model(policy if adapter is None else adapter.base, dtype, nf4, outline, vision)
    if adapter is not None:
        _load_adapter(model, adapter, outline)
    context_length(model)
    if nf4:
        keep_as_it_is(model)
    _switch_dropout_off(model)
    if not outline:
        attend_in_full(model)
    return model


def _load_model(policy: str, dtype: str, nf4: bool, outline: bool, vision: bool) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    with _reading(policy, "model") as files:
        weight_options = files.weight_options(dtype, nf4)
        config = _config_of(files)
        config._attn_implementation = None  # ignore the file's choice: transformers takes sdpa, else eager
        kinds: Any = AutoModelForCausalLM, AutoModelForImageTextToText
        has_tower = vision or [type(config) in kind._model_mapping for kind in kinds] == [False, True]
        kind = kinds[has_tower]
        loaded: Any = kind.from_pretrained(
            files.place,
            config=config,
            dtype=dtype,
            trust_remote_code=False,
            output_loading_info=True,
            device_map="meta" if outline else None,
            **files.options(),
            **weight_options,
        )
        model, report = loaded
        check_layers(model, report["unexpected_keys"])
    _check_weights(policy, resolve_policy(policy), model, report)
    remember_unread(model)
    files.finish(model)
    for weight in tower_parameters(model) if has_tower and not vision else ():
        weight.requires_grad_(False)  # the family has no class for texts alone
    return model


def _load_adapter(model: PreTrainedModel, adapter: AdapterFolder, outline: bool) -> None:
    """Add an adapter to its base, from safetensors; an outline gets an adapter without content.

    Raises:
        ValueError: peft is not installed, or the adapter's files are incomplete or do not fit the base.
    """
    require("peft", f"Policy {adapter.name!r} is an adapter, which needs peft; install the extra lit_grpo[lora].")
    from peft import PeftConfig

    with hub_or_cache(adapter.name):
        try:
            config = PeftConfig.from_pretrained(adapter.name)
        except _UNREADABLE as error:
            raise _not_on_its_base(adapter, error) from error
        check_config(config, f"Policy {adapter.name!r}")
        try:
            if outline:
                model.add_adapter(config)
                return
            if stored_file(adapter.name, _ADAPTER) is None:
                raise ValueError(f"it has no {_ADAPTER}; save it with safetensors.")
            conversions = getattr(model, "_weight_conversions", None)
            report = model.load_adapter(adapter.name, is_trainable=True, use_safetensors=True)
            cast(Any, model)._weight_conversions = conversions  # load_adapter has put the adapter's in their place
        except _UNREADABLE as error:
            raise _not_on_its_base(adapter, error) from error
    if lacking := sorted(map(str, [*report.missing_keys, *report.unexpected_keys, *report.mismatched_keys])):
        raise ValueError(
            f"Policy {adapter.name!r} is an adapter that does not fit its base {adapter.base!r}: {len(lacking)} of its "
            f"weights, such as {lacking[0]}, are on one side alone; set base_model_name_or_path in its "
            "adapter_config.json to the model that it was trained on."
        )


_ADAPTER = "adapter_model.safetensors"
_UNREADABLE = (OSError, ValueError, RuntimeError, TypeError, KeyError, SafetensorError)


def _not_on_its_base(adapter: AdapterFolder, error: BaseException) -> ValueError:
    return ValueError(
        f"Policy {adapter.name!r} is an adapter that cannot be put on its base {adapter.base!r}: {first_line(error)}."
    )


def _check_weights(policy: str, name: str, model: PreTrainedModel, report: Mapping[str, Any]) -> None:
    """Refuse weights that the files lack, which would be random, and weights with NaN or infinity."""
    if missing := sorted(report["missing_keys"]):
        raise ValueError(
            f"The files of policy {policy!r} lack {len(missing)} of the model's weights, such as {missing[0]}; "
            f"{_remedy(name)}."
        )
    for place, weight in model.named_parameters():
        if (
            weight.is_floating_point()
            and not weight.is_meta
            and not math.isfinite(float(weight.detach().sum(dtype=torch.float32)))
        ):
            raise ValueError(
                f"Weight {place} of policy {policy!r} holds NaN or infinity, so the run that made it has failed; take "
                "an earlier checkpoint or another policy."
            )


def _check_kept(model: PreTrainedModel) -> None:
    """Refuse a loaded model with a weight that a model made from its config lacks: no export could be opened again."""
    try:
        bare = bare_model(model.config)
    except (ValueError, KeyError):  # a class of the user's own, of which nothing is known
        return
    ignored = getattr(bare, "_keys_to_ignore_on_load_unexpected", None) or ()
    known = set(PolicyWeights(bare).names)
    for name in PolicyWeights(model).names:
        if name not in known and not any(re.search(pattern, name) for pattern in ignored):
            raise ValueError(
                f"model.policy has the weight {name}, which a {type(bare).__name__} made from its config lacks, so "
                "that its export could not be opened again; delete the weight from the model before training."
            )


def _remedy(name: str) -> str:
    for named in NAMED.values():
        if str(named.folder) == name:
            return named.remedy
    if gguf_file(name) is not None:
        return "download the GGUF file again"
    if Path(name).is_dir():
        return "save it there again"
    return f"download it again: hf download {name} --force-download"


_NOISE = ("drop", "jitter", "noise")
_DRAWS = "router_jitter_noise"  # an attribute of routers that draw experts at random; others call it ``jitter_noise``


def _switch_dropout_off(model: PreTrainedModel) -> None:
    """Switch off dropout and noise in routing, because with them the trainer's log-probs differ from the generator's.

    Their strength is the ``p`` of a dropout module, or a number of a module or the config (``attention_dropout``,
    ``layerdrop``, ``jitter_noise``), which becomes 0. PhiMoE's routers draw experts at random in training mode, and use
    ``router_jitter_noise`` as a threshold in both modes. They keep the number and stay in evaluation mode, which passes
    gradients on as well.
    """
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if _DRAWS in vars(module):
            module.train = MethodType(_stay_in_evaluation, module)
    for owner in (*model.modules(), model.config.get_text_config()):
        for name, value in vars(owner).items():
            if any(noise in name for noise in _NOISE) and name != _DRAWS and isinstance(value, float):
                setattr(owner, name, 0.0)


def _stay_in_evaluation(module: torch.nn.Module, mode: bool = True) -> torch.nn.Module:
    return torch.nn.Module.train(module, False)


def attend_in_full(model: PreTrainedModel) -> None:
    """Switch from torch's attention to transformers' own if the model caps scores or has sinks.

    torch's attention ignores both. Gemma 2, for example, would be trained without its cap and decoded with it.
    """
    if attention_name(model) != "sdpa":
        return
    try:
        with in_evaluation(model):
            calls = attention_calls(model, 2)
    except ValueError:  # the model does not use transformers' attention interface
        return
    if any(call.cap is not None or call.has_sinks for call in calls):
        model.set_attn_implementation("eager")


def embeddings(model: PreTrainedModel) -> list[torch.Tensor]:
    """Return the weights that have a row for each token: the embedding's, and the head's if the model has a head."""
    modules = (model.get_input_embeddings(), model.get_output_embeddings())
    return [cast(torch.Tensor, module.weight) for module in modules if module is not None]


def _load_failure(name: str, what: str, error: Exception) -> str:
    if isinstance(error, GGUFError):
        return str(error)
    if "trust_remote_code" in str(error):
        return f"Policy {name!r} needs code of its own, which is never run; take a model that transformers knows."
    if "ignore_mismatched_sizes" in str(error):
        return (
            f"The config.json of policy {name!r} describes weights of other shapes than its files hold (hidden_size, "
            "vocab_size and the like; the report above names the weights); put the config of these weights beside them."
        )
    if gguf_file(name) is not None:
        return f"The GGUF file of policy {name!r} holds no {what} that transformers can use: {unreadable(error)}."
    if Path(name).is_dir():
        return f"The policy folder {name!r} holds no usable {what}: {unreadable(error)}."
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        return f"There is no policy folder {name!r}; give the path of a folder made by save_pretrained."
    return (
        f"No {what} could be loaded for policy {name!r}: {unreadable(error)}. "
        f"Give {', '.join(map(repr, NAMED))}, a folder made by save_pretrained, a GGUF file, or the id of a model you "
        "can download."
    )
