"""Ranks that were not given the same: rows, settings, rewards, plug-ins, policy or versions.

Every rank reads its data and settings itself. Where they differ, prompts are sampled twice or never, or ranks wait for
each other without end, so a run compares them when it is set up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch

from lit_grpo.checkpoints.resuming import PLUGINS
from lit_grpo.policy.weights import is_adapter, persistent_buffers
from lit_grpo.process.origins import digest_of_code, digest_of_file, versions
from lit_grpo.ranks import Ranks
from lit_grpo.settings import as_plain

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

NOT_SET = "not set"
MOST_SHOWN = 60  # characters of a value
OWN = (
    "trainer.default_root_dir",
    "trainer.logger",
    "trainer.enable_progress_bar",
    "trainer.devices",
    "trainer.profiler",
)
"""Settings that each rank may have for itself."""
CONTENTS = ("model.policy", *(f"data.{name}" for name in ("policy", "train", "validation", "test", "predict")))
"""Settings whose contents are compared: their paths may differ from machine to machine."""
TRAINER = (
    *("max_steps", "max_epochs", "val_check_interval", "check_val_every_n_epoch", "limit_train_batches"),
    *("limit_val_batches", "num_sanity_val_steps", "precision", "fast_dev_run"),
)
"""Attributes of Lightning's Trainer that decide how many steps and validations a run makes."""
MODULE = (
    *("num_generations", "eval_num_generations", "sampling", "eval_sampling", "pass_at_k", "on_reward_error"),
    *("keep_special_tokens", "sampling_seed", "lora", "reference"),
)
LEARNER = (
    *("objective", "advantages", "num_iterations", "num_minibatches", "max_tokens_per_micro_batch", "max_grad_norm"),
    *("max_skipped_updates", "sequence_parallel_size", "gradient_checkpointing"),
)
"""Attributes of the module, and of its settings, that are settings of the group ``model``."""
NUM_SAMPLED = 1024  # elements of a weight that are compared


def check_alike(ranks: Ranks, told: Mapping[str, object]) -> None:
    """Refuse ranks to which different values were told; every rank calls it.

    Args:
        ranks: The ranks of the run.
        told: Values of this rank by the names of their settings; they are compared by their ``repr``.

    Raises:
        ValueError: A value differs. The message names each such setting, with the values and ranks.
    """
    everywhere = ranks.gather({name: repr(value) for name, value in told.items()})
    names = dict.fromkeys(name for of_rank in everywhere for name in of_rank)
    texts = {name: [of_rank.get(name, NOT_SET) for of_rank in everywhere] for name in names}
    differing = [_differing(name, values) for name, values in texts.items() if len({*values}) > 1]
    if differing:
        raise ValueError(
            f"The ranks of this run were not given the same: {'; '.join(differing)}; give every rank the same "
            "settings, files and packages, and use the same seed on each for what is random."
        )


def check_rows(ranks: Ranks, splits: Mapping[str, Sequence[str]]) -> None:
    """Refuse ranks that have read different rows, or the same rows in another order; every rank calls it.

    Args:
        ranks: The ranks of the run.
        splits: A digest of each row, by the name of the split, such as ``data.train``.

    Raises:
        ValueError: A split differs. The message names each such split, the ranks and the first row that differs.
    """
    everywhere = ranks.gather({name: _digest(rows) for name, rows in splits.items()})
    if all(each == everywhere[0] for each in everywhere):
        return
    read = ranks.gather({name: [*rows] for name, rows in splits.items()})
    names = dict.fromkeys(name for each in read for name in each)
    found = [text for name in names if (text := _of_rows(name, [each.get(name, []) for each in read]))]
    raise ValueError(
        f"The ranks of this run have read different rows: {'; '.join(found)}. Each rank reads the data itself: give "
        "all of them the same rows in the same order (shuffle with a fixed seed, or leave the order to data.shuffle), "
        "and every machine the same files."
    )


def _of_rows(name: str, read: Sequence[Sequence[str]]) -> str:
    """Say how the rows of a split differ between ranks; empty if they do not."""
    first = read[0]
    for rank, rows in enumerate(read):
        if [*rows] == [*first]:
            continue
        place = next((at for at, pair in enumerate(zip(first, rows, strict=False)) if pair[0] != pair[1]), None)
        where = "" if place is None else f", from row {place} on"
        if len(rows) != len(first):
            return f"{name} has {len(first)} rows on rank 0 and {len(rows)} on rank {rank}{where}"
        if sorted(rows) == sorted(first):
            return f"{name} has the same {len(rows)} rows in another order on rank {rank} than on rank 0{where}"
        number = sum(one != other for one, other in zip(first, rows, strict=True))
        return f"{name} has other rows on rank {rank} than on rank 0 ({number} of {len(rows)}{where})"
    return ""


def _digest(rows: Sequence[str]) -> str:
    return blake2b("\n".join(rows).encode(), digest_size=16).hexdigest()


def _differing(name: str, values: Sequence[str]) -> str:
    """Say which ranks have which value, as ``data.seed is 0 on rank 0 and 1 on ranks 1, 2``."""
    ranks_of: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks_of.setdefault(value, []).append(rank)
    said = [
        f"{value if len(value) <= MOST_SHOWN else f'{value[:MOST_SHOWN]}...'} on rank{'s'[: len(ranks) > 1]} "
        f"{', '.join(map(str, ranks))}"
        for value, ranks in ranks_of.items()
    ]
    return f"{name} is {' and '.join(said)}"


def of_run(trainer: Any, module: Any) -> dict[str, object]:
    """Return what every rank of a run must be given alike, by name; only this rank's values."""
    told: dict[str, object] = {f"trainer.{name}": getattr(trainer, name) for name in TRAINER}
    told["trainer.strategy"] = type(trainer.strategy).__name__
    told |= {f"the version of {name}": number for name, number in versions().items() if name != "system"}
    for owner, names in ((module, MODULE), (getattr(module, "settings", None), LEARNER)):
        told |= _flat({f"model.{name}": as_plain(getattr(owner, name)) for name in names if hasattr(owner, name)})
    given = getattr(module, "given", {})
    told |= {**_flat(given), **_code(given)}
    rewards = getattr(module, "rewards", [])
    told["model.rewards"] = [function.name for function in rewards]
    for function in rewards:
        arguments = {"weight": function.weight, "datasets": sorted(function.datasets), "retries": function.retries}
        told |= {f"{name} of reward {function.name!r}": value for name, value in arguments.items()}
        told[f"the code of reward {function.name!r}"] = digest_of_code(function.call)
    for callback in trainer.callbacks:
        if hasattr(callback, "plugins"):
            told |= {PLUGINS: as_plain(callback.plugins), **_code(callback.plugins)}
            for name, plugin in callback.session.plugins.items():
                told[f"the code of {PLUGINS} {name}"] = digest_of_code(plugin)
    return told


def of_policy(
    policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, has_weights: bool, adds_adapters: bool
) -> dict[str, object]:
    """Return digests of a policy's config and weights, and of its tokenizer. Of each weight some elements are read.

    Args:
        policy: The policy right after loading.
        tokenizer: Tokenizer of the policy, whose vocabulary and chat template are compared.
        has_weights: Whether every rank has the weights; otherwise their names and shapes are compared.
        adds_adapters: Whether its adapters are new. They are left out then: the first rank's are sent to the others.
    """
    config = {name: value for name, value in policy.config.to_dict().items() if name != "_name_or_path"}
    everything = (*policy.named_parameters(), *persistent_buffers(policy))
    weights = [(name, weight) for name, weight in everything if not (adds_adapters and is_adapter(name))]
    rules: Any = tokenizer.backend_tokenizer if tokenizer.is_fast else None
    told: dict[str, object] = {
        "the config of model.policy": _digest([f"{name} {config[name]}" for name in sorted(config, key=str)]),
        "the shapes of model.policy": _digest([f"{name} {tuple(weight.shape)}" for name, weight in weights]),
        "the chat template of model.policy": _digest([str(tokenizer.chat_template)]),
        "the tokenizer of model.policy": _digest(
            [
                str(sorted(tokenizer.get_vocab().items())) if rules is None else rules.to_str(),
                str(sorted(tokenizer.special_tokens_map.items(), key=str)),
            ]
        ),
    }
    if has_weights:
        told["the weights of model.policy"] = _digest([_sample(weight) for _, weight in weights])
    return told


def _sample(weight: torch.Tensor) -> str:
    """Return a digest of some elements of a weight; empty if it is in four bits, which machines round differently."""
    if hasattr(weight, "quant_state"):
        return ""
    flat = weight.detach().reshape(-1)
    some = flat[:: max(1, len(flat) // NUM_SAMPLED)].cpu().contiguous()
    return blake2b(some.view(torch.uint8).numpy().tobytes(), digest_size=8).hexdigest()


def _flat(settings: Mapping[str, Any], before: str = "") -> dict[str, object]:
    """Flatten settings to the names that they have on the command line, without those that a rank may have alone."""
    flat: dict[str, object] = {}
    for name, value in settings.items():
        full = f"{before}{name}"
        if full in OWN or full in CONTENTS:
            continue
        flat |= _flat(value, f"{full}.") if isinstance(value, Mapping) and value else {full: value}
    return flat


def _code(settings: Any) -> dict[str, object]:
    """Return a digest of each file of code that settings name: ``my_env.py:Game``, or a function or class."""
    if isinstance(settings, Mapping):
        return {name: digest for value in settings.values() for name, digest in _code(value).items()}
    if isinstance(settings, list | tuple):
        return {name: digest for value in settings for name, digest in _code(value).items()}
    if isinstance(settings, str) and ".py:" in settings:
        return {f"the code of {settings}": digest_of_file(settings.partition(":")[0])}
    is_code = isinstance(settings, FunctionType | type)
    return {f"the code of {settings.__qualname__}": digest_of_code(settings)} if is_code else {}
