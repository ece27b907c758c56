"""Metrics of rollouts, and of validation."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch

from lit_grpo.ranks import Reduce
from lit_grpo.types import OBSERVED, RolloutGroup
from lit_grpo.update.advantages.estimator import GroupRewards
from lit_grpo.update.advantages.functions import less_group_mean, uniform_groups


class Means:
    """Means of named numbers, over batches and then over ranks; NaN for a mean over nothing.

    They are kept in float64 on the host, whatever precision and device a run has. A number that is NaN is left out.

    Args:
        names: All of them; the same on every rank.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._totals: dict[str, tuple[float, int]] = dict.fromkeys(names, (0.0, 0))

    def add(self, values: Mapping[str, torch.Tensor | float]) -> None:
        """Count numbers, each of them alike."""
        for name, value in values.items():
            numbers, (total, count) = torch.as_tensor(value, dtype=torch.float64), self._totals[name]
            self._totals[name] = (total + float(numbers.nansum()), count + int(numbers.isfinite().sum()))

    def compute(self, reduce_sum: Reduce) -> dict[str, float]:
        """Return the means by name; the reduction runs over ranks."""
        totals = reduce_sum(torch.tensor(list(self._totals.values()), dtype=torch.float64)).tolist()
        pairs = zip(self._totals, totals, strict=True)
        return {name: total / count if count else math.nan for name, (total, count) in pairs}


def rollout_metrics(
    groups: Sequence[RolloutGroup], rewards: GroupRewards, version: int, reduce_sum: Reduce, reduce_max: Reduce
) -> dict[str, float]:
    """Return what is logged of a batch's rollouts on all ranks, kept or not, by name; NaN for a mean over nothing.

    Args:
        groups: Of this rank; any of them may have no member.
        rewards: Theirs.
        version: The policy's, to tell how stale the tokens are that a policy has sampled.
        reduce_sum: Sums over ranks.
        reduce_max: Takes the maximum over ranks.
    """
    completions = [rollout.completion for group in groups for rollout in group.rollouts]
    lengths = [completion.num_tokens for completion in completions]
    versions_T = torch.cat([torch.empty(0, dtype=torch.int64), *(completion.versions_T for completion in completions)])
    staleness_T = version - versions_T[versions_T != OBSERVED]
    logprobs_T = torch.cat([torch.empty(0), *(completion.logprobs_T for completion in completions)])
    values = {
        "reward": rewards.rewards_R,
        "reward_std": less_group_mean(rewards.rewards_R.double(), rewards.groups_R).square(),
        "frac_reward_zero_std": uniform_groups(rewards.rewards_R, rewards.groups_R, len(groups)),
        "frac_no_reward": rewards.rewards_R.isnan(),
        "frac_no_rollout": torch.tensor([not group.rollouts for group in groups]),
        "completions/mean_length": torch.tensor(lengths),
        "completions/clipped_ratio": torch.tensor([completion.finish_reason == "length" for completion in completions]),
        "completions/mean_logprob": logprobs_T[versions_T != OBSERVED],
        "staleness/mean": staleness_T,
        **{f"rewards/{name}": rewards.by_function_RK[:, k] for k, name in enumerate(rewards.functions)},
    }
    means = Means(values)
    means.add(values)
    logs = means.compute(reduce_sum)
    logs["reward_std"] = math.sqrt(logs["reward_std"])
    largest = reduce_max(torch.tensor([max(lengths, default=0), max(staleness_T.tolist(), default=0)]).double())
    logs["completions/max_length"], logs["staleness/max"] = largest.tolist()
    return logs


class CollapseWatch:
    """Notices a policy that says the same however often it is asked, and is not rewarded for it.

    From there nothing is learned: completions of a prompt are equal, and so are their rewards.
    """

    def __init__(self) -> None:
        self._best, self._num_batches = 0.0, 0

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint keeps."""
        return {"best": self._best, "num_batches": self._num_batches}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on from it."""
        self._best, self._num_batches = state["best"], int(state["num_batches"])

    def sentence(self, logs: Mapping[str, float], version: int) -> str | None:
        """Return what to say of a batch with these metrics, once it is the third of its kind in a row."""
        reward, certain = logs["reward"], logs["completions/mean_logprob"] > -1e-3
        collapsed = certain and logs["frac_reward_zero_std"] == 1 and (reward <= 0 or reward < self._best)
        self._num_batches = self._num_batches + 1 if collapsed else 0
        self._best = max(self._best, reward)
        if self._num_batches != 3:
            return None
        return (
            f"The policy collapsed at update {version}: its completions of a prompt are all the same, with a reward of "
            f"{reward:.3g} (the best mean was {self._best:.3g}), so nothing is left to learn from; lower the learning "
            "rate, and go on from an earlier checkpoint."
        )


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Estimate without bias the chance that at least one of ``k`` samples passes.

    ``1 - C(n - c, k) / C(n, k)`` (Chen et al., "Evaluating Large Language Models Trained on Code",
    arXiv 2107.03374, eq. 1).
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} needs at least {k} samples a prompt and k >= 1, but there are {num_samples}.")
    return 1.0 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)
