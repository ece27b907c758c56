"""Plug-ins that act on some of the data sets of a run: each sees the rows of its own data sets alone.

``restricted`` makes a plug-in one that is limited to data sets, and ``joined`` makes one plug-in of several that decide
the same for different data sets. Neither the plug-ins nor their callers know of it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, reduce
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from lit_grpo.plugins import Plugin, ask, overriding, read
from lit_grpo.types import GroupBatch
from lit_grpo.update.advantages.estimator import GroupRewards
from lit_grpo.update.plugin import LearningBatch

if TYPE_CHECKING:
    from lit_grpo.types import Prompt, Rollout

Kind = TypeVar("Kind", bound=Plugin)
Hook = Callable[..., Any]


def part_of(plugin: Plugin, batch: GroupBatch) -> tuple[Any, list[int]]:
    """Return the part of a batch that a plug-in acts on, and the places of its rollouts in the batch."""
    own = [number for number, group in enumerate(batch.groups) if group.prompt.is_of(plugin.datasets)]
    places = [place for place, rollout in enumerate(batch.rollouts) if rollout.prompt.is_of(plugin.datasets)]
    if isinstance(batch, LearningBatch):
        groups = [batch.groups[number] for number in own]
        return replace(batch, groups=groups, rewards=batch.rewards.of_groups(own)), places
    return replace(batch, groups=[batch.groups[number] for number in own]), places


def _of_batch(whole: Hook) -> Hook:
    """Limit a hook that returns nothing, or values by completion or by name."""

    def limited(self: Plugin, batch: GroupBatch) -> Any:
        return whole(self, part_of(self, batch)[0])

    return limited


def _by_rollout(whole: Hook) -> Hook:
    """Limit a hook that returns a value for each rollout of a batch: for others, None."""

    def limited(self: Plugin, batch: LearningBatch) -> Any:
        part, places = part_of(self, batch)
        returned = whole(self, part)
        if returned is None:
            return None
        values: list[Any] = [None] * len(batch.rollouts)
        for place, value in zip(places, returned, strict=True):
            values[place] = value
        return values

    return limited


def _choosing(whole: Hook) -> Hook:
    """Limit the choice of rollouts: others are chosen if they have a reward."""

    def limited(self: Plugin, batch: LearningBatch) -> torch.Tensor | GroupRewards:
        part, places = part_of(self, batch)
        chosen = whole(self, part)
        if isinstance(chosen, GroupRewards):
            kept_R = torch.ones(len(batch.rollouts), dtype=torch.bool)
            kept_R[places] = ~chosen.rewards_R.isnan()
            return batch.rewards.only(kept_R)
        chosen_R = ~batch.rewards.rewards_R.isnan()
        chosen_R[places] = chosen
        return chosen_R

    return limited


def _shaping(whole: Hook) -> Hook:
    """Limit the shaping of advantages: those of other groups stay."""

    def limited(self: Plugin, batch: GroupBatch, advantages: Sequence[Sequence[float]]) -> Sequence[Sequence[float]]:
        own = [number for number, group in enumerate(batch.groups) if group.prompt.is_of(self.datasets)]
        returned = whole(self, part_of(self, batch)[0], [advantages[number] for number in own])
        shaped = dict(zip(own, returned, strict=True))
        return [shaped.get(number, before) for number, before in enumerate(advantages)]

    return limited


def _masking(whole: Hook) -> Hook:
    """Limit the mask of tokens: those of others are all trained on."""

    def limited(self: Plugin, batch: LearningBatch, rollouts: Sequence[Rollout]) -> Any:
        returned = whole(self, part_of(self, batch)[0], [each for each in rollouts if each.prompt.is_of(self.datasets)])
        return None if returned is None else _filled(self, rollouts, torch.bool) | returned

    return limited


def _weighing(whole: Hook) -> Hook:
    """Limit the weights of tokens: those of others are 1."""

    def limited(self: Plugin, rollouts: Sequence[Rollout], version: int) -> Any:
        returned = whole(self, [each for each in rollouts if each.prompt.is_of(self.datasets)], version)
        return None if returned is None else _filled(self, rollouts, torch.float32) | returned

    return limited


def _filled(plugin: Plugin, rollouts: Sequence[Rollout], dtype: torch.dtype) -> dict[Any, torch.Tensor]:
    """Return ones for the tokens of rollouts that a plug-in does not act on."""
    others = [each.completion for each in rollouts if not each.prompt.is_of(plugin.datasets)]
    return {each.request.key: torch.ones(each.num_trained, dtype=dtype) for each in others}


def _of_completion(nothing: Any) -> Callable[[Hook], Hook]:
    """Limit a hook whose first argument is one completion, request or group; for others it returns ``nothing``."""

    def limit(whole: Hook) -> Hook:
        def limited(self: Plugin, of: Any, *others: Any) -> Any:
            prompt: Prompt = of.prompt if hasattr(of, "prompt") else of.request.prompt
            return whole(self, of, *others) if prompt.is_of(self.datasets) else nothing

        return limited

    return limit


def _of_prompt(whole: Hook) -> Hook:
    """Limit a hook that returns a prompt: others stay."""

    def limited(self: Plugin, prompt: Prompt, writer: Any) -> Prompt:
        return whole(self, prompt, writer) if prompt.is_of(self.datasets) else prompt

    return limited


def _of_requests(whole: Hook) -> Hook:
    def limited(self: Plugin, requests: Sequence[Any]) -> Any:
        return whole(self, [request for request in requests if request.prompt.is_of(self.datasets)])

    return limited


def _of_rewards(whole: Any) -> Any:
    def limited(self: Plugin) -> Any:
        return [replace(function, datasets=self.datasets) for function in whole.fget(self)]

    return property(limited)


LIMITS: Mapping[str, Callable[[Any], Any]] = {
    "choose_rollouts": _choosing,
    "shape_advantages": _shaping,
    "credit": _by_rollout,
    "ce_weights": _by_rollout,
    "candidate_tokens": _of_batch,
    "token_mask": _masking,
    "token_weights": _weighing,
    "chunks": _of_completion(()),
    "rewrite": _of_prompt,
    "longest_rewrite": _of_prompt,
    "add_members": _of_batch,
    "on_update_end": _of_batch,
    "on_requests": _of_requests,
    "on_turn": _of_completion(None),
    "on_completion": _of_completion(None),
    "on_drop": _of_completion(None),
    "on_group": _of_completion(None),
    "rewards": _of_rewards,
}
"""How each hook is limited to data sets that sees rollouts or prompts."""
WHOLE_RUN = {
    **dict.fromkeys(("prompt_chance", "prompt_state", "next_prompt_state"), "chooses among all prompts"),
    **dict.fromkeys(("first_round", "next_round", "shared_round"), "spends the completions of all prompts"),
    **dict.fromkeys(("num_parts", "batch_size"), "decides how many prompts a batch has"),
    **dict.fromkeys(("step_scale", "entropy_coefficient", "loss_term"), "changes the optimizer step as a whole"),
    **dict.fromkeys(("old_logprobs", "proximal_logprobs"), "decides what the ratios of all tokens are taken to"),
    "choose_from_batch": "compares the rollouts of the whole batch",
    "observes": "looks at hidden states of all completions",
    "on_step": "acts on all requests of a rollout",  # unless it leads those that it is asked for, by on_turn
}
"""Hooks that cannot be limited to data sets: what a plug-in that overrides one does, after its name."""


def restricted(name: str, plugin: Kind, datasets: Iterable[str]) -> Kind:
    """Return a copy of a plug-in that acts on the rows of some data sets alone.

    Args:
        name: What messages call it.
        plugin: Any plug-in whose hooks see rollouts or prompts.
        datasets: Names of data sets, at least one.

    Raises:
        ValueError: What it does concerns the whole run.
    """
    kind = type(plugin)
    leads = bool(overriding([plugin], "on_turn"))
    concerns = [hook for hook in WHOLE_RUN if overriding([plugin], hook) and not (leads and hook == "on_step")]
    why = next((WHOLE_RUN[hook] for hook in concerns), None)
    if why is None and not overriding([plugin], *LIMITS, "examples"):
        why = "does nothing by rows"
    if why is not None:
        raise ValueError(f"rollout.plugins {name} {why}, which cannot be limited to data sets; leave datasets out.")
    limited = copy.copy(plugin)
    limited.__class__ = _limited(kind, frozenset(datasets))
    return limited


def _checked(hook: str, whole: Any) -> Any:
    """Return a hook that reads what it returns of a part, before it becomes a part of the whole."""
    if isinstance(whole, property):
        return whole
    return lambda self, *arguments: read(self, hook, whole(self, *arguments), *arguments)


@cache
def _limited(kind: type[Plugin], datasets: frozenset[str]) -> Any:
    """Return a class like another whose row-wise hooks see the rows of some data sets alone."""
    own = [hook for hook in LIMITS if getattr(kind, hook) is not getattr(Plugin, hook)]
    hooks = {hook: LIMITS[hook](_checked(hook, getattr(kind, hook))) for hook in own}
    return type(kind.__name__, (kind,), {"datasets": datasets, "__module__": kind.__module__, **hooks})


def joined(plugins: Sequence[Plugin]) -> Plugin | None:
    """Return the one plug-in of a list, a plug-in that asks each of several for its data sets, or None for none."""
    if len(plugins) < 2:
        return next(iter(plugins), None)
    return _joining(" and ".join(type(plugin).__name__ for plugin in plugins))(plugins)


@cache
def _joining(names: str) -> Any:
    """Return the class that asks several plug-ins, under their names, which messages show."""
    return type(names, (_Joined,), {"__module__": __name__})


class _Joined(Plugin):
    """Asks several plug-ins, each limited to other data sets, and puts together what they return."""

    def __init__(self, plugins: Sequence[Plugin]) -> None:
        self._plugins = plugins

    def _ask(self, hook: str, *arguments: Any) -> list[Any]:
        return [ask(plugin, hook, *arguments) for plugin in overriding(self._plugins, hook)]

    def choose_rollouts(self, batch: LearningBatch) -> torch.Tensor | GroupRewards:
        """Choose those that each would choose."""
        chosen = self._ask("choose_rollouts", batch)
        only = [each for each in chosen if isinstance(each, GroupRewards)]
        kept_R = [~each.rewards_R.isnan() if isinstance(each, GroupRewards) else each for each in chosen]
        all_R = reduce(torch.logical_and, kept_R)
        if not only:
            return all_R
        counted_R = reduce(torch.logical_and, [~each.rewards_R.isnan() for each in only])
        if not torch.equal(all_R, counted_R):
            raise ValueError(
                f"{type(self).__name__} choose rollouts, of which some leave the others out of the statistics of their "
                "groups and some do not; take plug-ins that do the same."
            )
        return batch.rewards.only(all_R)

    def shape_advantages(self, batch: GroupBatch, advantages: Sequence[Sequence[float]]) -> Sequence[Sequence[float]]:
        """Let one after another shape the advantages of its rows."""
        for plugin in overriding(self._plugins, "shape_advantages"):
            advantages = ask(plugin, "shape_advantages", batch, advantages)
        return advantages

    def credit(self, batch: LearningBatch) -> Any:
        """Take each rollout's values from the plug-in of its data set."""
        return _first_of_each(self._ask("credit", batch))

    def token_mask(self, batch: LearningBatch, rollouts: Sequence[Rollout]) -> Any:
        """Train on the tokens that each would train on."""
        return _multiplied(self._ask("token_mask", batch, rollouts))

    def token_weights(self, rollouts: Sequence[Rollout], version: int) -> Any:
        """Multiply the weights; those of other data sets are 1."""
        return _multiplied(self._ask("token_weights", rollouts, version))

    def chunks(self, completion: Any, version: int) -> Any:
        """Take the chunks of the plug-in of the completion's data set."""
        return next(filter(None, self._ask("chunks", completion, version)), ())

    def rewrite(self, prompt: Prompt, writer: Any) -> Prompt:
        """Let the plug-in of the prompt's data set rewrite it."""
        return reduce(lambda asked, plugin: ask(plugin, "rewrite", asked, writer), self._plugins, prompt)

    def longest_rewrite(self, prompt: Prompt, writer: Any) -> Prompt:
        """Let the plug-in of the prompt's data set return its longest form."""
        return reduce(lambda asked, plugin: ask(plugin, "longest_rewrite", asked, writer), self._plugins, prompt)


def _first_of_each(lists: Sequence[Sequence[Any] | None]) -> list[Any] | None:
    """Return for each rollout the first value that is not None; None if no list has any."""
    known = [each for each in lists if each is not None]
    if not known:
        return None
    return [next((value for value in values if value is not None), None) for values in zip(*known, strict=True)]


def _multiplied(maps: Sequence[Mapping[Any, torch.Tensor] | None]) -> dict[Any, torch.Tensor] | None:
    known = [each for each in maps if each is not None]
    return {key: reduce(torch.mul, [each[key] for each in known]) for key in known[0]} if known else None
