"""What a report says to try next: each row of the table on a run that it is for, and on one that it is not for."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from test_docs import anchors, unknown_settings

from lit_grpo.tools.dashboard import explain
from lit_grpo.tools.dashboard.report.advice import ADVICE, MOST, what_to_try

DOCS = Path(__file__).parents[1] / "docs"
NAN = float("nan")
RISING = [0.01 * step for step in range(20)]
NOISE = [0.4, 0.6, 0.5, 0.45, 0.55] * 4
VARIED = {"frac_reward_zero_std": [0.2] * 20}

# By the row's place in the table: metrics of a run that it is for, the start of what is said, and a run that is fine.
Metrics = dict[str, list[float]]
RUNS: list[tuple[str, Metrics, str, Metrics]] = [
    (
        "skipped steps",
        {"update/skipped": [0.0, 0.5, 0.0, 0.0]},
        "The loss or the gradient was not finite in 12.50% of the optimizer steps",
        {"update/skipped": [0.0] * 999 + [1.0]},  # one of a thousand
    ),
    (
        "log-prob gap",
        {"sampling/logprob_gap_mean": [0.02, 0.02, 0.02, 0.25]},
        "Log-probs of trainer and generator differ by 0.25 nats per token",
        {"sampling/logprob_gap_mean": [0.3, 0.02, 0.02, 0.02]},
    ),
    (
        "no reward",
        {"frac_no_reward": [0.25] * 4},
        "25% of the rollouts got no reward",
        {"frac_no_reward": [1.0, 0.0, 0.0, 0.0]},
    ),
    (
        "no reward",
        {"num_reward_errors": [0.0, 3.0, 0.0, 0.0]},
        "Reward functions failed or took too long 0.75 times per batch",
        {"num_reward_errors": [0.0] * 99 + [1.0]},
    ),
    (
        "zero variance",
        {"frac_reward_zero_std": [0.9] * 8, "val/pass@1": [NAN] * 7 + [0.1]},
        "90% of the groups had completions of equal reward, which give no gradient (frac_reward_zero_std), and pass@1 "
        "is 10%: use easier prompts",
        {"frac_reward_zero_std": [0.7] * 8, "val/pass@1": [NAN] * 7 + [0.1]},
    ),
    (
        "zero variance",
        {"frac_reward_zero_std": [0.9] * 8, "val/pass@1": [0.8] * 8},
        "90% of the groups had completions of equal reward, which give no gradient (frac_reward_zero_std), and pass@1 "
        "is 80%: use harder prompts",
        {"frac_reward_zero_std": [0.9] * 8, "val/pass@1": [0.99] * 8},  # the prompts are mastered
    ),
    (
        "zero variance",
        {"frac_reward_zero_std": [0.95] * 20, "reward": NOISE},
        "95% of the groups had completions of equal reward, which give no gradient (frac_reward_zero_std), and the "
        "reward did not rise",
        {"frac_reward_zero_std": [0.95] * 20, "reward": RISING},
    ),
    (
        "collapse",
        {"entropy": [2.0] * 10 + [0.01] * 10, "reward": [0.5] * 10 + [0.1] * 10},
        "The entropy fell from 2 to 0.01 nats while the reward did not rise",
        {"entropy": [2.0] * 10 + [0.01] * 10, "reward": RISING},
    ),
    (
        "flat reward",
        {"reward": NOISE, **VARIED},
        "The reward moved from 0.5 to 0.5 in 20 updates, within its noise, and only 20% of the groups",
        {"reward": RISING, **VARIED},
    ),
    (
        "truncation",
        {"completions/clipped_ratio": [0.0, 0.1, 0.2, 0.4]},
        "40% of the completions were truncated at the limit",
        {"completions/clipped_ratio": [0.5, 0.1, 0.05, 0.02]},
    ),
    (
        "KL",
        {"kl": [0.01 * 1.5**step for step in range(20)]},
        "The KL divergence from the reference rose ever faster, to 12 nats per token",
        {"kl": [0.01 * step for step in range(20)]},
    ),
    (
        "overfitting",
        {"val/pass@1": [0.2, 0.3, 0.6, 0.6, 0.5, 0.4, 0.3, 0.3] + [NAN] * 12, "reward": RISING},
        "pass@1 on held-out prompts fell from 60% to 30% while the reward rose from 0.02 to 0.17",
        {"val/pass@1": [0.2, 0.3, 0.6, 0.6, 0.7, 0.6, 0.7, 0.65] + [NAN] * 12, "reward": RISING},
    ),
    (
        "clipping",
        {"clip_ratio/high": [0.3] * 4},
        "30% of the tokens had a ratio that was clipped from above",
        {"clip_ratio/high": [0.1] * 4},
    ),
    (
        "reward wait",
        {"time/reward_wait_s": [5.0] * 4, "time/step_s": [20.0] * 4},
        "25% of the time all completions were decoded and rewards were missing",
        {"time/reward_wait_s": [1.0] * 4, "time/step_s": [20.0] * 4},
    ),
    (
        "idle slots",
        {"rollout/bubble_ratio": [0.7] * 4, "time/rollout_s": [15.0] * 4, "time/step_s": [20.0] * 4},
        "70% of the slot steps were idle, and rollouts took 75% of the time",
        {"rollout/bubble_ratio": [0.7] * 4, "time/rollout_s": [5.0] * 4, "time/step_s": [20.0] * 4},
    ),
]


def tried(metrics: Metrics) -> list[str]:
    return [row["sentence"] for row in what_to_try({name: np.array(values) for name, values in metrics.items()})]


@pytest.mark.parametrize("place", range(len(ADVICE)), ids=lambda place: f"{place}-{ADVICE[place].name}")
def test_a_row_applies_to_the_run_that_it_is_for_and_not_to_another(place: int) -> None:
    name, wrong, says, fine = RUNS[place]
    assert name == ADVICE[place].name
    (sentence,) = tried(wrong)
    assert sentence.startswith(says) and any(field in sentence for field in ADVICE[place].settings)
    assert tried(fine) == []


def test_a_run_with_everything_wrong_gets_the_five_most_serious_sentences() -> None:
    metrics = {name: values for _, wrong, *_ in RUNS for name, values in wrong.items()}
    assert [sentence.split()[0] for sentence in tried(metrics)] == ["The", "Log-probs", "25%", "40%", "The"]
    assert len(ADVICE) > MOST


@pytest.mark.parametrize("values", [[], [NAN], [0.0], [float("inf")], [1.0, NAN], [-1.0, 2.0, 3.0]])
def test_a_few_or_odd_values_of_all_metrics_are_read_without_a_mistake(values: list[float]) -> None:
    names = {condition.metric for advice in ADVICE for condition in advice.when}
    assert len(tried(dict.fromkeys([*names, "time/step_s"], values))) <= MOST


def test_noise_around_a_steady_rise_is_not_said_to_be_flat() -> None:
    generator = np.random.default_rng(0)
    said = 0
    for _ in range(200):
        reward = np.linspace(0.2, 0.6, 40) + generator.normal(0, 0.1, 40)
        said += bool(what_to_try({"reward": reward, "frac_reward_zero_std": np.full(40, 0.2)}))
    assert said <= 4


def test_rows_name_metrics_settings_and_headings_that_there_are() -> None:
    for advice in ADVICE:
        for condition in advice.when:
            assert explain(condition.metric) is not None, condition.metric
        assert all(setting in advice.sentence for setting in advice.settings)
        named = set(re.findall(r"\b(?:model|data|rollout)\.[a-z_.]*[a-z_]", advice.sentence))
        assert named == set(advice.settings) and not unknown_settings(" ".join(f"`{name}`" for name in named))
        page, _, heading = advice.page.partition("#")
        assert heading in anchors(DOCS / page), advice.page
        assert advice.sentence.endswith(".") and ". " not in advice.sentence, "one sentence"


@pytest.mark.parametrize("place", [place for place, advice in enumerate(ADVICE) if advice.name == "zero variance"])
def test_groups_without_variance_are_no_fault_of_a_run_that_also_learns_otherwise(place: int) -> None:
    _, wrong, *_ = RUNS[place]
    assert len(tried(wrong)) == 1
    for loss in ("ce/loss", "token_loss"):
        assert tried(wrong | {loss: [1.0] * 20}) == []
