"""Checks of a training run's settings before anything expensive starts; each says what does not fit, and the remedy."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from lit_grpo.checkpoints.form import place_of
from lit_grpo.compatibility import SHARDS, Clash, Requirement, check_clashes, check_together
from lit_grpo.limits import Completions, check_value
from lit_grpo.policy.architecture.vision import sees
from lit_grpo.process.terminal import first_line
from lit_grpo.process.urls import is_url
from lit_grpo.strategies.fsdp2 import FSDP2Strategy
from lit_grpo.strategies.ray import check_environment, ray_strategies
from lit_grpo.types import Prompt, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lit_grpo.policy.adapters import LoraSettings
    from lit_grpo.rewards.function import RewardFunction
    from lit_grpo.rollout.generator import Generator
    from lit_grpo.update.learner_settings import LearnerSettings

_AVERAGES = (
    "would give the policy weights that its generator does not sample with; leave it out, and average the policies "
    "that python -m lit_grpo export takes out of several checkpoints"
)
REFUSED: dict[type[pl.Callback], str] = {
    GradientAccumulationScheduler: (
        "accumulates gradients over batches, but a step is cut into micro-batches by model.max_tokens_per_micro_batch; "
        "leave it out, and raise data.batch_size for larger steps"
    ),
    LearningRateFinder: (
        "looks for a rate by the loss of single batches, which says nothing of a policy; leave it out, and set "
        "model.optimizer.init_args.lr"
    ),
    BatchSizeFinder: (
        "looks for a number of rows that fits in memory; leave it out, and set model.max_tokens_per_micro_batch to "
        "auto, which does so for tokens"
    ),
    StochasticWeightAveraging: _AVERAGES,
    WeightAveraging: _AVERAGES,
    BaseFinetuning: (
        "freezes layers by the names of another module; leave it out, and set model.lora, or requires_grad of a loaded "
        "model's weights"
    ),
    ModelPruning: "replaces weights outside of an update; leave it out, and prune the exported policy",
}
"""Lightning's callbacks that cannot do here what they do elsewhere, each with the reason and the remedy."""
FORMAT = 16
"""Of checkpoints; it changes whenever what they hold does."""


def check_rewarded(rewards: Sequence[RewardFunction], num_generations: int, learns_unrewarded: bool) -> None:
    """Check that completions are rewarded and compared, or that a plug-in learns without that."""
    if learns_unrewarded:
        return
    if not rewards:
        raise ValueError("model.rewards is empty; name at least one, such as lit_grpo.rewards.exact_match.")
    if not any(function.weight for function in rewards):
        raise ValueError(
            "All functions of model.rewards have the weight 0, which only logs their values; give at least one "
            "another weight."
        )
    if num_generations < 2:
        raise ValueError(
            f"num_generations is {num_generations}, but a group needs at least 2 completions: "
            "an advantage compares a completion with the others of its prompt."
        )


def check_generations(num_generations: int, eval_num_generations: int, pass_at_k: Sequence[int]) -> None:
    """Refuse numbers of completions that nothing can be computed from."""
    check_value("num_generations", num_generations, Completions)
    check_value("eval_num_generations", eval_num_generations, Completions)
    for k in pass_at_k:
        if not 1 <= k <= eval_num_generations:
            raise ValueError(
                f"pass_at_k holds {k}, but there are {eval_num_generations} completions a prompt in "
                "validation; give values between 1 and eval_num_generations."
            )


def check_checkpoint(
    checkpoint: Mapping[str, Any], weights: Mapping[str, torch.Tensor], path: Path | str | None
) -> None:
    """Refuse a checkpoint that is of another policy."""
    theirs = {name: tuple(tensor.shape) for name, tensor in checkpoint["state_dict"].items()}
    own = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    for name in [*own, *theirs]:
        if theirs.get(name) != own.get(name):
            raise ValueError(
                f"{place_of(path)} is of another policy: the shape of {name} is {theirs.get(name, 'none')} there and "
                f"{own.get(name, 'none')} here; set model.policy and model.lora to what it was trained with."
            )


def check_format(checkpoint: Mapping[str, Any], path: Path | str | None) -> None:
    """Refuse to go on from a checkpoint of another format."""
    if (theirs := checkpoint.get("format", "earlier")) != FORMAT:
        raise ValueError(
            f"{place_of(path)} is of another version of lit_grpo (format {theirs!s:.40}, where this one has {FORMAT}), "
            "and training cannot go on from it; go on with that version, or take its policy out with python -m "
            "lit_grpo export and begin a new run on it."
        )


def total_updates(trainer: pl.Trainer, updates_per_batch: int) -> int | None:
    """Return how many updates a run is to make, if its trainer says so; what epochs come to is known once it trains."""
    limits = [trainer.max_steps] if trainer.max_steps >= 0 else []
    batches, epochs = trainer.num_training_batches, trainer.max_epochs
    if epochs is not None and epochs >= 0 and math.isfinite(batches):
        limits.append(int(batches) * epochs * updates_per_batch)
    return min(limits, default=None)


def check_intervals(options: Mapping[str, Any]) -> None:
    """Refuse intervals of validations that Lightning refuses without naming the field, or divides by.

    Args:
        options: Arguments of a Trainer, or the fields of ``trainer``; what is missing has a run's default.
    """
    epochs, interval = options.get("check_val_every_n_epoch"), options.get("val_check_interval")
    if epochs is not None and (type(epochs) is not int or epochs < 1):
        raise ValueError(
            f"trainer.check_val_every_n_epoch is {epochs}, but it counts epochs between two validations; give a whole "
            "number of at least 1, or leave it out and set trainer.val_check_interval."
        )
    if isinstance(interval, float) and (epochs is None or not 0 < interval <= 1):
        raise ValueError(
            f"trainer.val_check_interval is {interval}, but it counts updates, because prompts are drawn without "
            "end; give a whole number, such as 10, or a fraction of an epoch with trainer.check_val_every_n_epoch 1."
        )
    if isinstance(interval, int) and interval < 1:
        raise ValueError(
            f"trainer.val_check_interval is {interval}, but it counts updates between two validations; give a whole "
            "number of at least 1, or leave data.validation out for a run without validations."
        )
    if options.get("barebones"):
        raise ValueError("trainer.barebones leaves out loggers and callbacks that a run needs; leave it out.")


def epoch_length(trainer: pl.Trainer) -> int | None:
    """Return the number of batches in an epoch of a trainer's training prompts; None if they are not known."""
    data: Any = getattr(trainer, "datamodule", None)
    if "train" not in getattr(data, "prompts", {}):
        return None
    length, limit = len(data.train_dataloader()), trainer.limit_train_batches
    return min(length, limit) if isinstance(limit, int) else int(length * limit)


def check_epoch(trainer: pl.Trainer) -> None:
    """Refuse an interval of validations that is longer than the epoch in which it is counted."""
    interval, length = _interval(trainer), epoch_length(trainer)
    in_epochs = trainer.check_val_every_n_epoch is not None
    if length is not None and in_epochs and isinstance(interval, int) and interval > length:
        raise ValueError(
            f"trainer.val_check_interval is {interval}, but with trainer.check_val_every_n_epoch it counts the batches "
            f"of one epoch, which has {length}; give at most {length}, or leave check_val_every_n_epoch out, so that "
            "it counts the batches of the run."
        )


def check_trainer(trainer: pl.Trainer, dtype: str) -> None:
    """Refuse strategies, precisions and callbacks that do not work, and what the trainer must leave to the module."""
    # by exact type: DeepSpeedStrategy is a DDPStrategy too
    kind = type(trainer.strategy)
    if kind in ray_strategies():
        check_environment(trainer.strategy)
    elif kind not in (SingleDeviceStrategy, DDPStrategy, FSDP2Strategy):
        strategy = kind.__name__
        raise ValueError(f"trainer.strategy {strategy} is not supported; use one device, ddp or fsdp2.")
    if trainer.precision not in ("32-true", "bf16-mixed", "bf16-true"):
        raise ValueError(f"trainer.precision {trainer.precision!r} is not supported; use bf16-mixed or 32-true.")
    if trainer.precision == "bf16-true" and dtype != "bfloat16":
        raise ValueError(
            f"trainer.precision bf16-true would make the weights bfloat16, but model.dtype is {dtype}; use bf16-mixed, "
            "or set model.dtype to bfloat16 too."
        )
    interval = _interval(trainer)
    check_intervals({**vars(trainer), "val_check_interval": interval if isinstance(interval, int) else None})
    check_left_to_module(
        trainer.gradient_clip_val, trainer.accumulate_grad_batches, trainer.gradient_clip_algorithm is not None
    )
    for callback in trainer.callbacks:  # pyrefly: ignore[missing-attribute]
        for kind, reason in REFUSED.items():
            if isinstance(callback, kind):
                raise ValueError(f"trainer.callbacks has {type(callback).__name__}, which {reason}.")


def make_part(field: str, make: Callable[[Any], Any], of: Any) -> Any:
    """Make an optimizer of weights, or a schedule of an optimizer, as the user asks.

    Args:
        field: Setting that errors name: ``model.optimizer`` or ``model.lr_scheduler``.
        make: Function of one argument that makes the optimizer or the schedule.
        of: Argument of ``make``: the weights to optimize, or the optimizer to schedule.
    """
    try:
        return make(of)
    except (TypeError, ValueError, RuntimeError, AssertionError, KeyError, IndexError) as error:
        name = getattr(getattr(make, "func", make), "__name__", "")
        named = f"{field} {name}" if name.isidentifier() else field
        other = "torch.optim.AdamW" if field == "model.optimizer" else "CosineAnnealingLR"
        raise ValueError(
            f"{named} cannot be made ({first_line(error).rstrip('.')}); change its arguments ({field}.init_args), or "
            f"take another, such as {other}."
        ) from error


def check_stepping(optimizer: Any, weights: Sequence[torch.nn.Parameter]) -> None:
    """Refuse an optimizer that cannot step with nothing but gradients of the trained weights, or not in float32."""
    name = type(optimizer).__name__
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(
            f"model.optimizer makes an object of type {name}; give a function of the weights that returns one "
            "torch.optim.Optimizer, such as functools.partial(torch.optim.AdamW, lr=1e-5)."
        )
    if not {id(one) for group in optimizer.param_groups for one in group["params"]} & {id(one) for one in weights}:
        raise ValueError(
            f"model.optimizer {name} holds no weight of the policy, so that nothing would be trained; make it of the "
            "weights that it is given."
        )
    if _needed(type(optimizer).step):
        raise ValueError(
            f"model.optimizer {name} computes the loss again within a step (its step needs a closure), but an update "
            "has one gradient, summed over micro-batches; take one that needs gradients alone, such as AdamW."
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ValueError(
            f"model.optimizer {name} needs sparse gradients, and a policy has none; take torch.optim.AdamW."
        )
    largest = torch.finfo(torch.float32).max
    for option, value in ((option, value) for group in optimizer.param_groups for option, value in group.items()):
        if isinstance(value, float) and not abs(value) <= largest:
            raise ValueError(f"model.optimizer {name} has {option} {value}; give a number of at most {largest:.2g}.")


def check_schedule(scheduler: Any, optimizer: torch.optim.Optimizer) -> None:
    """Refuse a schedule that cannot be stepped once per update of the optimizer."""
    kind = type(scheduler).__name__
    if not callable(getattr(scheduler, "step", None)):
        raise ValueError(
            f"model.lr_scheduler makes an object of type {kind}; give a function of the optimizer that returns one "
            "schedule of torch.optim.lr_scheduler, or leave it out for a constant rate."
        )
    if needed := _needed(type(scheduler).step):
        raise ValueError(
            f"model.lr_scheduler {kind} needs {needed[0]} at each step, but a schedule is stepped after each update "
            "without any; take one that goes by steps, such as torch.optim.lr_scheduler.CosineAnnealingLR."
        )
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise ValueError(
            f"model.lr_scheduler {kind} is that of another optimizer than model.optimizer; make it of the optimizer "
            "that it is given."
        )


def _needed(method: Callable[..., Any]) -> list[str]:
    """Return the names of the arguments that a method of a class cannot do without, but for ``self``."""
    _, *parameters = inspect.signature(method).parameters.values()
    return [one.name for one in parameters if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]


def check_monitors(trainer: pl.Trainer, validates: bool, names: Sequence[str], may_log: bool) -> str | None:
    """Check that what EarlyStopping and ModelCheckpoint monitor is there when they look at it.

    Args:
        trainer: The trainer of a run.
        validates: Whether the run has validation prompts.
        names: Names of the metrics that a validation logs, such as ``val/reward``.
        may_log: Whether the user's own reward functions or callbacks may log more.

    Returns:
        A warning about a metric that only the user's own code could log; None if there is nothing to warn of.
    """
    length = epoch_length(trainer)
    for callback in trainer.callbacks:  # pyrefly: ignore[missing-attribute]
        if not isinstance(callback, EarlyStopping | ModelCheckpoint):
            continue
        kind, name = type(callback).__name__, callback.monitor or ""
        held_out = name.startswith(("val", "eval", "test"))
        stops, at_epochs = (
            isinstance(callback, EarlyStopping),
            bool(getattr(callback, "_check_on_train_epoch_end", False)),
        )
        if not validates and (held_out or (stops and not at_epochs)):
            or_epochs = ", or let it look at the end of each epoch with check_on_train_epoch_end" if stops else ""
            raise ValueError(
                f"trainer.callbacks has {kind}, which looks at its metric after each validation, but the run has no "
                f"validation; give data.validation, or leave {kind} out{'' if held_out else or_epochs}."
            )
        if held_out and at_epochs and length is not None and not _validates_within(trainer, length):
            raise ValueError(
                f"trainer.callbacks has {kind} with monitor {name!r} and check_on_train_epoch_end, but an epoch ends "
                f"after {length} batches, before the first validation; leave check_on_train_epoch_end out, or set "
                f"trainer.val_check_interval to {length} or less."
            )
        if held_out and name not in names:
            said = f"trainer.callbacks has {kind} with monitor {name!r}, but validation logs {', '.join(names)}"
            if may_log:
                return f"{said}; the run ends with an error unless a reward or callback of yours logs {name!r}."
            raise ValueError(f"{said}; take one of these.")
    return None


def _validates_within(trainer: pl.Trainer, length: int) -> bool:
    """Return whether there is a validation in the first ``length`` batches for sure."""
    interval, epochs = _interval(trainer), trainer.check_val_every_n_epoch
    return interval is not None and (epochs == 1 or (epochs is None and interval <= length))


def _interval(trainer: pl.Trainer) -> int | float | None:
    return getattr(trainer, "val_check_interval", None)


def check_ranks(
    trainer: pl.Trainer,
    policy: object,
    lora: LoraSettings | None,
    settings: LearnerSettings,
) -> None:
    """Refuse what ranks cannot do together: share rows, or need whole weights where each has a shard of them."""
    size = settings.sequence_parallel_size
    if trainer.world_size % size:
        raise ValueError(
            f"model.sequence_parallel_size is {size}, but the run has {trainer.world_size} ranks (devices times "
            "num_nodes); take a divisor of that."
        )
    parts = settings.parts()
    if isinstance(trainer.strategy, FSDP2Strategy):
        whole = frozenset({"unsharded_weights"})
        parts += [
            SHARDS,
            Requirement("model.lora.base nf4", whole, chosen=lora is not None and lora.base == "nf4"),
            Requirement("model.policy, a loaded model and no name,", whole, chosen=not isinstance(policy, str)),
        ]
    check_together(parts)


def check_left_to_module(
    gradient_clip_val: float | None, accumulate_grad_batches: int, has_algorithm: bool = False
) -> None:
    """Refuse what the trainer does for others and the module for itself."""
    if gradient_clip_val:
        raise ValueError(
            f"trainer.gradient_clip_val is {gradient_clip_val}, but gradients are clipped to "
            "model.max_grad_norm; set that, and leave gradient_clip_val out."
        )
    if has_algorithm:
        raise ValueError(
            "trainer.gradient_clip_algorithm is set, but gradients are clipped by their norm, to model.max_grad_norm; "
            "leave gradient_clip_algorithm out."
        )
    if accumulate_grad_batches != 1:
        raise ValueError(
            f"trainer.accumulate_grad_batches is {accumulate_grad_batches}, but a step is cut into "
            "micro-batches by model.max_tokens_per_micro_batch; set that, and raise data.batch_size for larger steps."
        )


def check_callbacks(trainer: pl.Trainer) -> None:
    """Refuse a trainer in which one of the two callbacks that make rollouts is missing.

    Raises:
        ValueError: It is; where neither is there and no data module of prompts, rollouts come from elsewhere.
    """
    callbacks = trainer.callbacks  # pyrefly: ignore[missing-attribute]
    there = {kind.__name__ for callback in callbacks for kind in type(callback).__mro__}
    missing = [name for name in ("RolloutScheduler", "WeightSync") if name not in there]
    prompts = getattr(trainer.datamodule, "prompts", None)  # pyrefly: ignore[missing-attribute]
    if len(missing) == 1 or (missing and prompts is not None):
        raise ValueError(
            f"trainer.callbacks lacks {' and '.join(missing)}; give the Trainer callbacks=default_callbacks(), and "
            "**TRAINER_DEFAULTS, both of lit_grpo.training."
        )


def check_order(trainer: pl.Trainer, *kinds: type[pl.Callback]) -> None:
    """Refuse callbacks in another order than this: Lightning calls them in the order of its list."""
    found = [callback for callback in trainer.callbacks if isinstance(callback, kinds)]  # pyrefly: ignore[missing-attribute]
    for first, second in pairwise(found):
        ranks = [next(rank for rank, kind in enumerate(kinds) if isinstance(one, kind)) for one in (first, second)]
        if ranks[0] > ranks[1]:
            raise ValueError(
                f"trainer.callbacks lists {type(first).__name__} before {type(second).__name__}; put it after, for "
                "each works on what the one before it has done."
            )


def check_training_sampling(sampling: SamplingParams) -> None:
    """Refuse sampling that the objective cannot learn from."""
    if sampling.temperature == 0:
        raise ValueError(
            "sampling.temperature is 0: greedy completions of a prompt are all the same, so there is nothing to "
            "learn from; set it above 0, or set eval_sampling.temperature for greedy validation."
        )
    if sampling.truncates:
        raise ValueError(
            "sampling.top_p, top_k and min_p leave tokens out, which the objective's log-probs would not know of; "
            "set them in eval_sampling, and leave them at 1, 0 and 0 for training."
        )


def check_prompt_lengths(
    prompts: Mapping[str, Sequence[Prompt]],
    sampling: SamplingParams,
    eval_sampling: SamplingParams,
    context: int,
) -> int:
    """Check that every prompt leaves room for its completion, before anything is sampled.

    Returns:
        The most tokens of a prompt and what may follow it.
    """
    most = 0
    for split, rows in prompts.items():
        used = sampling if split == "train" else eval_sampling
        room = used.room
        longest = max(rows, key=lambda prompt: len(prompt.token_ids))
        total = len(longest.token_ids) + room
        said = f"Prompt {longest.prompt_id!r} has {len(longest.token_ids)} tokens and up to {room} may follow"
        if total > context:
            observed = ", sampling.max_observed" if used.max_observed else ""
            raise ValueError(
                f"{said}, but the model's context is {context}; lower sampling.max_tokens{observed} or "
                "data.max_prompt_tokens."
            )
        most = max(most, total)
    return most


def check_token_ids(prompts: Mapping[str, Sequence[Prompt]], num_embeddings: int) -> None:
    """Check that the policy has an embedding for every token of every prompt."""
    for rows in prompts.values():
        for prompt in rows:
            if (largest := max(prompt.token_ids)) >= num_embeddings:
                raise ValueError(
                    f"Prompt {prompt.prompt_id!r} has the token {largest}, but the policy has embeddings for "
                    f"{num_embeddings} alone: its tokenizer is another model's; put the policy's own beside it."
                )


def check_images(
    prompts: Mapping[str, Sequence[Prompt]],
    policy: PreTrainedModel,
    generator: Generator,
    teacher: str,
    settings: LearnerSettings,
    observes: bool,
) -> None:
    """Refuse images where a part of the run cannot see them, and a tower that sees none in training.

    Where the run ``observes``, tools and environments may show images too.
    """
    shown = next((each for rows in prompts.values() for each in rows if each.pictures is not None), None)
    if shown is None:
        if not sees(policy):
            return
        if "train" in prompts and not observes:
            raise ValueError(
                "model.vision loads a vision tower, and no prompt of data.train has an image; name the column with the "
                "images in data.image_column, or leave model.vision out."
            )
    needs = "model.vision is set" if shown is None else f"prompt {shown.prompt_id!r} has images"
    decoder = type(generator).__name__
    check_clashes(
        [
            Clash(needs, "model.vision is none", not sees(policy), "set model.vision to frozen or trained"),
            Clash(needs, f"{decoder} decodes texts alone", "images" not in generator.abilities, "use SlotGenerator"),
            Clash(needs, "a server of model.teacher is shown texts alone", is_url(teacher), "take a model's files"),
            Clash(needs, "model.sequence_parallel_size divides texts alone", settings.sequence_parallel_size > 1),
        ]
    )


def check_micro_batch(
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    max_tokens: int,
    shares_prefix: bool,
    most_of_chunk: int | None = None,
) -> None:
    """Check that micro-batches have room for every training prompt and its completion, before anything is sampled.

    Args:
        prompts: For training, at least one.
        sampling: Sampling parameters for training.
        max_tokens: The most that go through the model at once.
        shares_prefix: Whether a prompt may be in another micro-batch than its completion.
        most_of_chunk: The most tokens of a completion that are in one micro-batch, where longer ones are cut.
    """
    longest = max(prompts, key=lambda prompt: len(prompt.token_ids))
    num_tokens = len(longest.token_ids)
    room = min(sampling.room, most_of_chunk or sampling.room)
    least = max(num_tokens, room) if shares_prefix else num_tokens + room
    if least > max_tokens:
        raise ValueError(
            f"Prompt {longest.prompt_id!r} has {num_tokens} tokens and up to {sampling.room} may follow, but "
            f"max_tokens_per_micro_batch is {max_tokens}; the smallest that works is {least}."
        )
