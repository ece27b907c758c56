"""pass@k against brute force, and metrics that do not depend on how a step is split."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hand_made import as_groups, make_module, make_rollout, make_tokens, random_groups

from lit_grpo.callbacks import ThroughputMonitor
from lit_grpo.findings.rewards import BatchWatch, NoSignalCount, has_no_signal
from lit_grpo.metrics import Means, pass_at_k, rollout_metrics, staleness_shares
from lit_grpo.ranks import Ranks
from lit_grpo.types import OBSERVED, Completion, PromptBatch, RolloutGroup
from lit_grpo.update.advantages.estimator import GroupRewards
from lit_grpo.update.metrics import GapLimits, TokenMetrics, gap_sums
from lit_grpo.update.objective.policy_loss import LossOutputs

NAN = math.nan


def brute_force_pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """The share of all subsets of k samples that hold one that passed."""
    subsets = list(itertools.combinations(range(num_samples), k))
    return sum(min(subset) < num_passed for subset in subsets) / len(subsets)


@pytest.mark.parametrize("num_samples", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_subsets_that_hold_a_pass(num_samples: int) -> None:
    for num_passed in range(num_samples + 1):
        for k in range(1, num_samples + 1):
            expected = brute_force_pass_at_k(num_samples, num_passed, k)
            assert pass_at_k(num_samples, num_passed, k) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("k", [0, 3, -1])
def test_pass_at_k_needs_k_samples(k: int) -> None:
    with pytest.raises(ValueError, match=rf"pass@{k} needs at least {k} samples a prompt and k >= 1, but there are 2"):
        pass_at_k(2, 1, k)


def test_means_leave_out_what_is_missing_and_add_up_over_batches() -> None:
    means = Means(["reward", "length", "never"])
    means.add({"reward": torch.tensor([1.0, NAN, 0.5]), "length": 3})
    means.add({"reward": NAN, "length": 4})
    assert means.compute(alone) == pytest.approx({"reward": 0.75, "length": 3.5, "never": NAN}, nan_ok=True)


def test_numbers_are_reduced_on_the_host_whatever_the_device_has() -> None:
    """MPS has no float64."""
    for value in (0.1, torch.tensor(0.1, dtype=torch.float64)):
        total = Ranks("mps").sum(value)
        assert (total.device.type, total.dtype, float(total)) == ("cpu", torch.float64, 0.1)
    nowhere = torch.empty(3, device="meta")  # as MPS, neither a CPU nor a GPU of NVIDIA's
    sums = gap_sums(nowhere, torch.tensor([2, 1]))
    assert torch.float64 not in {value.dtype for value in sums.values() if value.device.type == "meta"}


def test_means_tell_apart_what_a_default_of_bfloat16_would_not() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        means = Means(["reward"])
        means.add({"reward": 1.003})
        assert means.compute(alone)["reward"] == 1.003
        assert float(Ranks().sum(1.003)) == 1.003
    finally:
        torch.set_default_dtype(torch.float32)


def alone(tensor: torch.Tensor) -> torch.Tensor:
    """The reduction over one rank."""
    return tensor


def add(
    metrics: TokenMetrics,
    entropy_N: torch.Tensor,
    gap_N: torch.Tensor,
    loss: float = 0.0,
    fresh_N: torch.Tensor | None = None,
    lengths: list[int] | None = None,
) -> None:
    """Add a micro-batch whose log-probs are off by so much, of a policy of version 1; by default of one completion."""
    fresh_N = torch.ones(len(gap_N), dtype=torch.bool) if fresh_N is None else fresh_N
    tokens = make_tokens(
        logprob=gap_N,
        sampled_logprob=torch.zeros_like(gap_N),
        old_logprob=torch.zeros_like(gap_N),
        entropy=entropy_N,
        advantage=torch.zeros_like(gap_N),
        length=torch.tensor([len(gap_N)] if lengths is None else lengths),
        version=fresh_N.long(),
    )
    metrics.add(tokens, LossOutputs(torch.tensor(loss), {}, entropy_N.sum()), version=1)


NORM = torch.tensor(2.0)


def test_token_means_do_not_depend_on_the_split() -> None:
    entropy_N, gap_N = torch.tensor([1.0, 2.0, 3.0, 6.0]), torch.tensor([0.1, -0.3, 0.0, 0.2])

    def gather(*cuts: int) -> dict[str, float]:
        metrics = TokenMetrics()
        for entropy, gap in zip(entropy_N.tensor_split(cuts), gap_N.tensor_split(cuts), strict=True):
            add(metrics, entropy, gap, float(entropy.sum() / 4), lengths=[1] * len(gap))
        assert metrics.read(NORM) == 2.0 and metrics.loss == 3.0 and metrics.entropy == 12.0
        assert torch.equal(metrics.log_weights_C, gap_N)
        metrics.finish_update({"grad_norm": 2.0, "lr": 0.5})
        return metrics.compute(alone, alone)

    expected = {
        "entropy": 3.0,
        "loss": 3.0,
        "sampling/logprob_gap_mean": 0.15,
        "sampling/logprob_gap_max": 0.3,
        "sampling/kl": (0.105170918 - 0.1 + 0.740818221 - 1 + 0.3 + 0.221402758 - 0.2) / 4,  # exp(d) - 1 - d
        "sampling/ess_token": 4.067391897**2 / (4 * 4.262039092),  # of weights exp(0.1), exp(-0.3), 1, exp(0.2)
        "sampling/ess_sequence": 4.067391897**2 / (4 * 4.262039092),  # each completion has one token
        "update/tokens": 4.0,
        "update/steps": 1.0,
        "grad_norm": 2.0,
        "lr": 0.5,
    }
    for cuts in ((), (1,), (1, 2, 3), (0, 3), (4,)):  # the last two have an empty part
        assert gather(*cuts) == pytest.approx(expected), cuts


def test_loss_and_gradient_norm_are_means_over_the_updates_of_a_batch() -> None:
    metrics = TokenMetrics()
    for loss, norm in ((1.0, 4.0), (3.0, 8.0)):
        add(metrics, torch.tensor([2.0]), torch.tensor([0.0]), loss)
        metrics.read(NORM)
        metrics.finish_update({"grad_norm": norm})
    logs = metrics.compute(alone, alone)
    assert (logs["loss"], logs["grad_norm"], logs["entropy"], logs["update/tokens"]) == (2.0, 6.0, 2.0, 2.0)


def test_a_step_that_starts_again_counts_once_and_a_provisional_loss_is_scaled() -> None:
    metrics = TokenMetrics()
    add(metrics, torch.tensor([5.0]), torch.tensor([9.0]), 7.0)
    metrics.forget_step()
    add(metrics, torch.tensor([2.0]), torch.tensor([0.5]), 3.0)
    metrics.read(NORM, scale=2.0)
    metrics.finish_update({})
    logs = metrics.compute(alone, alone)
    assert (logs["loss"], metrics.loss, logs["entropy"], logs["update/tokens"]) == (6.0, 6.0, 2.0, 1.0)
    assert logs["sampling/logprob_gap_max"] == 0.5


def test_a_batch_without_tokens_compares_nothing() -> None:
    metrics = TokenMetrics()
    metrics.finish_update({"grad_norm": 0.0})
    logs = metrics.compute(alone, alone)
    assert {name for name, value in logs.items() if math.isnan(value)} == {
        "sampling/logprob_gap_mean",
        "sampling/logprob_gap_max",
        "sampling/kl",
        "sampling/ess_token",
        "sampling/ess_sequence",
    }
    assert (logs["grad_norm"], logs["loss"], logs["update/tokens"]) == (0.0, 0.0, 0.0)
    assert not metrics.gap_problem(alone, alone)


def test_a_batch_sampled_with_other_weights_is_refused_by_its_fresh_tokens() -> None:
    gap_N, fresh_N = torch.tensor([0.1, -0.3, 9.0]), torch.tensor([True, True, False])

    def problem(limits: GapLimits) -> str:
        metrics = TokenMetrics(limits)
        for gap, fresh in zip(gap_N.split(2), fresh_N.split(2), strict=True):
            add(metrics, torch.ones_like(gap), gap, fresh_N=fresh)
        metrics.read(NORM)
        return metrics.gap_problem(alone, alone)

    assert not problem(GapLimits(mean=0.2001, token=0.3001))
    assert problem(GapLimits(mean=0.1999)).endswith("weight_sync.max_logprob_gap allows 0.1999 on average")
    assert "by up to 0.3 nats a token, 0.2 on average" in problem(GapLimits(token=0.2999))


def test_one_token_in_a_thousand_may_be_above_the_limit_and_none_twenty_times() -> None:
    def problem(num_above: int, gap: float) -> str:
        limits = GapLimits(token=0.05)
        metrics = TokenMetrics(limits)
        for part in torch.tensor([gap] * num_above + [0.0] * (3000 - num_above)).split(1000):
            add(metrics, torch.ones_like(part), part)
        metrics.read(NORM)
        return metrics.gap_problem(alone, alone)

    assert not problem(3, 0.9)
    assert "weight_sync.max_token_gap allows a token 0.05, which 4 of 3000 are above" in problem(4, 0.06)
    assert "by up to 1.5 nats a token" in problem(1, 1.5)


def test_one_completion_whose_log_probs_are_off_is_refused_among_many() -> None:
    def problem(gap: float, length: int, **limits: Any) -> str:
        metrics = TokenMetrics(GapLimits(**limits))
        gap_N = torch.cat([torch.full((length,), gap), torch.zeros(5000)])
        add(metrics, torch.ones_like(gap_N), gap_N, lengths=[length, 1000, 4000])
        metrics.read(NORM)
        return metrics.gap_problem(alone, alone)

    assert not problem(0.5, 6, mean=0.2, token=2.0)  # 3 nats in all, of which a token may be 2 off
    assert "and by 0.3 on average over one completion, one token of it aside" in problem(0.5, 10, mean=0.2, token=2.0)
    assert not problem(3.0, 1, mean=1.2, token=2.0)
    assert "which 1 of 5001 are above" in problem(3.0, 1, mean=1.2, token=2.0, spares=False)


def test_a_rank_without_tokens_sends_the_same_list_of_sums_as_one_with_tokens() -> None:
    """Otherwise the all-reduce would add up different things, or hang."""
    lengths = []

    def count(tensor: torch.Tensor) -> torch.Tensor:
        lengths.append(tensor.numel())
        return tensor

    for num_tokens in (3, 0):
        metrics = TokenMetrics()
        add(metrics, torch.ones(num_tokens), torch.ones(num_tokens))
        metrics.read(NORM)
        metrics.finish_update({"grad_norm": 0.0})
        metrics.compute(count, alone)
    assert lengths[0] == lengths[1]


class SeveralRanks(Ranks):
    """One of some ranks that have told beforehand what they give."""

    def __init__(self, told: list[list[Any]], own: int) -> None:
        super().__init__()
        self.told, self.number, self.count = told, own, 0

    def gather(self, value: Any) -> list[Any]:
        """What each rank gives to this call."""
        if len(self.told[self.number]) == self.count:
            self.told[self.number].append(value)
        self.count += 1
        return [rank[self.count - 1] for rank in self.told if len(rank) >= self.count]

    def sum(self, value: float | torch.Tensor) -> torch.Tensor:
        return torch.stack([torch.as_tensor(one, dtype=torch.float64) for one in self.gather(value)]).sum(0)

    def max(self, value: float | torch.Tensor) -> torch.Tensor:
        return torch.stack([torch.as_tensor(one, dtype=torch.float64) for one in self.gather(value)]).amax(0)


def metrics_of(
    groups: list[RolloutGroup], version: int, functions: tuple[str, ...] = (), ranks: Ranks | None = None
) -> dict[str, float]:
    return rollout_metrics(groups, GroupRewards.of(groups, functions), version, ranks or Ranks())


def test_rollout_metrics_of_two_groups() -> None:
    rollouts = [
        make_rollout([5], [6] * 2, 1.0, prompt_id="a", version=3),
        make_rollout([5], [6] * 8, 0.0, prompt_id="a", version=1, finish_reason="length"),
        make_rollout([5], [6] * 4, 0.5, prompt_id="b", version=3),
        make_rollout([5], [], NAN, prompt_id="b", version=3, finish_reason="abort"),
    ]
    for rollout, value in zip(rollouts, (1.0, 0.0, 0.5, None), strict=True):
        rollout.rewards = {"exact": value, "never": None}
    logs = metrics_of(as_groups(rollouts), 3, ("exact", "never"))
    assert math.isnan(logs.pop("rewards/never/mean")) and math.isnan(logs.pop("rewards/never/std"))
    assert logs == pytest.approx(
        {
            "reward": 0.5,
            "reward_std": 0.5,
            "reward_std_within": math.sqrt((0.25 + 0.25 + 0) / 3),
            "frac_reward_zero_std": 0.5,
            "frac_no_reward": 0.25,
            "frac_no_rollout": 0.0,
            "completions/mean_length": 3.5,
            "completions/min_length": 0.0,
            "completions/p50_length": 3.0,
            "completions/p95_length": 7.4,
            "completions/max_length": 8.0,
            "completions/mean_terminated_length": 2.0,
            "completions/min_terminated_length": 0.0,
            "completions/max_terminated_length": 4.0,
            "completions/clipped_ratio": 0.25,
            "completions/mean_logprob": math.log(0.5),
            "staleness/mean": 8 * 2 / 14,
            "staleness/max": 2.0,
            "staleness/p95": 2.0,
            "staleness/fresh": 6 / 14,
            "rewards/exact/mean": 0.5,
            "rewards/exact/std": 0.5,
        }
    )


def test_rollout_metrics_of_two_ranks_are_those_of_all_rollouts() -> None:
    """One rank has no reward at all, and the other the longest completion."""
    rollouts = [
        make_rollout([5], [6] * length, reward, prompt_id=prompt_id, version=length % 3)
        for prompt_id, length, reward in (("a", 2, NAN), ("a", 3, NAN), ("b", 4, 1.0), ("b", 9, 0.0))
    ]
    parts = [as_groups(rollouts[:2]), as_groups(rollouts[2:])]
    expected = metrics_of(as_groups(rollouts), 2)
    assert (expected["reward"], expected["completions/max_length"]) == (0.5, 9.0)
    told: list[list[Any]] = [[], []]
    for own, part in enumerate(parts):  # each tells what it gives
        metrics_of(part, 2, (), SeveralRanks(told, own))
    for own, part in enumerate(parts):
        assert metrics_of(part, 2, (), SeveralRanks(told, own)) == pytest.approx(expected)


def test_the_shares_of_tokens_by_their_age_are_of_all_ranks_and_add_up_to_one() -> None:
    ages = {0: 6, 1: 3, 2: 2, 3: 2, 4: 1, 9: 6}
    rollouts = [
        make_rollout([5], [6] * tokens, 1.0, prompt_id=str(age), version=9 - age) for age, tokens in ages.items()
    ]
    told: list[list[Any]] = [[], []]
    parts = [as_groups(rollouts[:2]), as_groups(rollouts[2:])]
    for own, part in enumerate(parts):
        staleness_shares(part, 9, SeveralRanks(told, own))
    shares = [staleness_shares(part, 9, SeveralRanks(told, own)) for own, part in enumerate(parts)]
    assert shares[0] == shares[1] == pytest.approx({
        "staleness/share_1": 0.15,
        "staleness/share_2_to_3": 0.2,
        "staleness/share_4_to_7": 0.05,
        "staleness/share_8_or_more": 0.3,
    })  # fmt: skip
    assert staleness_shares(as_groups(rollouts), 9, Ranks()) == shares[0]
    assert all(math.isnan(share) for share in staleness_shares([], 9, Ranks()).values())


def test_rollouts_without_a_token_or_a_reward_give_finite_counts_and_missing_means() -> None:
    logs = metrics_of(as_groups([make_rollout([5], [], NAN, finish_reason="abort", sample_id=n) for n in range(2)]), 0)
    assert {name for name, value in logs.items() if math.isnan(value)} == {
        *("reward", "reward_std", "reward_std_within", "completions/mean_logprob"),
        *(f"staleness/{name}" for name in ("mean", "p95", "max", "fresh")),
    }
    assert logs["frac_no_reward"] == logs["frac_reward_zero_std"] == 1.0


def test_a_policy_that_says_the_same_and_is_not_rewarded_for_it_is_called_collapsed_once() -> None:
    watch = BatchWatch([], "raise")

    def said(reward: float, logprob: float = -1e-4, uniform: float = 1.0) -> str | None:
        logs = {"reward": reward, "completions/mean_logprob": logprob, "frac_reward_zero_std": uniform}
        return watch.collapse(logs, 7)

    assert [said(0.4), said(0.4), said(0.4), said(0.4)] == [None] * 4  # certain, and as good as ever
    assert [said(0.0), said(0.0), said(0.0, logprob=-0.1), said(0.0), said(0.0, uniform=0.5)] == [None] * 5
    assert [said(0.0), said(0.0)] == [None] * 2
    sentence = said(0.0)
    assert sentence is not None and sentence.startswith("The policy collapsed at update 7: its completions of a prompt")
    assert "the best mean was 0.4" in sentence
    assert said(0.0) is None


def test_three_batches_in_a_row_that_teach_nothing_are_told_once() -> None:
    watch, count = BatchWatch([], "raise"), NoSignalCount()

    def said(uniform: float, advantage: float) -> str | None:
        metrics = {"frac_reward_zero_std": uniform, "advantages/max_abs": advantage}
        count.add(metrics)
        return watch.missing_signal(metrics, 7)

    teacherless = {"frac_reward_zero_std": 1.0, "advantages/max_abs": 0.0}
    assert has_no_signal(teacherless) and not has_no_signal(teacherless | {"token_loss": 0.5})
    others = [(1.0, 0.0), (1.0, 1e-9), (0.5, 1.2), (1.0, 0.7), (1.0, NAN), (1.0, 0.0), (1.0, 0.0)]
    assert [said(*each) for each in others] == [None] * 7  # an estimator may learn from uniform groups
    assert not count.is_worth_a_word
    sentence = said(1.0, 0.0)
    assert sentence == (
        "The last 3 batches, up to update 7, had no learning signal: in every group all rewards are equal; use easier "
        "prompts if all completions are wrong and harder ones if all are correct, raise model.num_generations, or use "
        "a reward with values in between."
    )
    resumed = BatchWatch([], "raise")
    resumed.load_state_dict(watch.state_dict())
    watch = resumed
    assert [said(1.0, 0.0) for _ in range(5)] == [None] * 5
    assert count.is_worth_a_word and str(count).startswith("10 of 13 batches, in which no group")


def test_num_tokens_counts_a_prompt_once_per_completion_and_what_reset_said_as_trl_does(
    policy_folder: Path, policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = random_groups(policy, [[1.0, 0.0], [0.0, 1.0]])
    whole = groups[0].rollouts[0].completion
    versions = [OBSERVED] * 3 + [0] * whole.num_tokens
    tokens, logprobs = [5] * 3 + whole.token_ids_T.tolist(), [0.0] * 3 + whole.logprobs_T.tolist()
    groups[0].rollouts[0].completion = Completion(whole.request, tokens, logprobs, versions, "stop")
    batch = PromptBatch([group.prompt for group in groups])
    batch.groups = groups
    module, logged = make_module(policy_folder), dict[str, float]()
    monkeypatch.setattr(module, "log_dict", logged.update)
    rollouts = batch.rollouts
    sampled = sum(rollout.completion.num_sampled for rollout in rollouts)
    prompts = sum(len(rollout.prompt.token_ids) for rollout in rollouts)
    ThroughputMonitor(0).on_train_batch_start(cast(Any, None), module, batch, 0)
    assert logged == {"num_tokens": sampled + prompts + 3, "num_completions": 4}
