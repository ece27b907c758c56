"""Corrections for stale tokens, beside plain loops in float64: weights, filters, step sizes and proximal policies."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from conftest import random_policy
from hand_made import fit, make_module, make_tokens, relative_error, step_of, weights_of
from test_learner import make_learner, member
from test_objective_in_module import stale_groups

from lit_grpo.methods.a3po import InterpolatedPolicy
from lit_grpo.methods.vcpo import EffectiveSamples, effective_share
from lit_grpo.plugins import Plugin
from lit_grpo.types import Prompt, RolloutGroup
from lit_grpo.update.objective.corrections import Correction, CorrectionMode, correction_weights
from lit_grpo.update.objective.objective import Objective
from lit_grpo.update.objective.policy_loss import policy_loss
from lit_grpo.update.objective.tokens import StepTotals, Tokens, near_completions
from lit_grpo.update.plugin import Batch

VCPO = Objective(
    "grpo",
    epsilon=1.0,
    epsilon_high=1e9,
    correction=Correction("sequence_truncate", high=8.0),
)
VERSIONS = [0, 0, 1, 2, 4]  # of the tokens of a completion, by turns; the policy is at 4


def stale_batch() -> list[RolloutGroup]:
    """Two groups whose tokens are up to four updates old."""
    groups = []
    for number, (ids, rewards) in enumerate([((3, 4, 5), [1.0, 0.0, 0.2, 0.0]), ((7,), [0.0, 1.0, 0.4])]):
        prompt = Prompt(f"train/{number}", ids, "")
        lengths = [5, 8, 3, 6]
        members = [
            member(prompt, sample, [VERSIONS[t % 5] for t in range(lengths[sample])], [True] * lengths[sample], reward)
            for sample, reward in enumerate(rewards)
        ]
        groups.append(RolloutGroup(prompt, members))
    return groups


def formula(
    policy: Any,
    groups: Sequence[RolloutGroup],
    losses_of: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor],
) -> torch.Tensor:
    """Gradient of the mean over completions of the mean of ``losses_of(log-probs, sampled, versions, advantage)``."""
    policy.zero_grad()
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    for rollout in rollouts:
        prompt, tokens_T = rollout.prompt.token_ids, rollout.completion.token_ids_T
        input_ids = torch.cat([torch.tensor(prompt), tokens_T])[None]
        logprobs_TV = policy(input_ids=input_ids, use_cache=False).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        logprobs_T = logprobs_TV.gather(-1, tokens_T[:, None]).squeeze(-1)
        completion = rollout.completion
        losses = losses_of(logprobs_T, completion.logprobs_T.double(), completion.versions_T, float(rollout.advantage))
        (losses.mean() / len(rollouts)).backward()
    return torch.cat([parameter.grad.flatten() for parameter in policy.parameters()])


def updated(objective: Objective, groups: Sequence[RolloutGroup], **options: Any) -> tuple[Any, Any, dict[str, float]]:
    """The learner after one batch of a policy that has had four updates, its steps, and what it logs."""
    learner, steps = make_learner(objective=objective, max_tokens_per_micro_batch=16, **options)
    steps.policy_version = 4
    return learner, steps, learner.learn(list(groups))


# ---- weights -------------------------------------------------------------------------------------------


def weights_by_hand(ratios: list[list[float]], mode: str, low: float | None, high: float | None) -> list[float]:
    """One number after another: TRL's and verl's formulas."""
    weights = []
    for of_completion in ratios:
        total = math.fsum(of_completion)
        logs = {
            "token": of_completion,
            "sequence": [total] * len(of_completion),
            "geometric": [total / max(len(of_completion), 1)] * len(of_completion),
        }[mode.split("_")[0]]
        for log in logs:
            weight = math.exp(min(max(log, -20.0), 20.0))
            below, above = low is not None and weight < low, high is not None and weight > high
            if mode.endswith("mask"):
                weights.append(0.0 if below or above else 1.0 if mode.startswith("geometric") else weight)
            else:
                weights.append(low if below and low else high if above and high else weight)
    return weights


@pytest.mark.parametrize(("low", "high"), [(None, 3.0), (0.9, 1.1), (0.7, None), (None, None)])
@pytest.mark.parametrize("mode", [mode for mode in get_args(CorrectionMode) if mode != "none"])
def test_weights_are_those_of_a_plain_loop(mode: Any, low: float | None, high: float | None) -> None:
    random = torch.Generator().manual_seed(0)
    lengths = [3, 1, 0, 7, 400, 400]
    ratio_N = 0.3 * torch.randn(sum(lengths), generator=random, dtype=torch.float64)
    ratio_N[-800:-400] += 0.4  # products far beyond exp(20) and below exp(-20)
    ratio_N[-400:] -= 0.4
    ratio_N[0], ratio_N[1] = 30.0, -30.0
    actual_N = correction_weights(
        ratio_N, torch.zeros_like(ratio_N), torch.tensor(lengths), Correction(mode, low, high)
    )
    parts = [part.tolist() for part in ratio_N.split(lengths)]
    assert actual_N.tolist() == pytest.approx(weights_by_hand(parts, mode, low, high), rel=1e-12)
    assert actual_N.isfinite().all()


def test_a_sequence_weight_of_float32_is_neither_infinite_nor_left_out_by_rounding() -> None:
    lengths_C, none = torch.tensor([300, 300]), Correction("sequence_truncate", high=None)
    ratio_N = torch.tensor([1.0] * 300 + [-1.0] * 300)
    weights_N = correction_weights(ratio_N, torch.zeros(600), lengths_C, none)
    assert weights_N.isfinite().all() and (weights_N > 0).all()


def one_token_each(log_ratios: Sequence[float], advantages: Sequence[float]) -> Tokens:
    """Completions of one token, by the log of policy / sampler."""
    logprobs_N = torch.full((len(log_ratios),), -1.0, dtype=torch.float64, requires_grad=True)
    sampled_N = logprobs_N.detach() - torch.tensor(log_ratios, dtype=torch.float64)
    ones_C = torch.ones(len(log_ratios), dtype=torch.int64)
    entropy_N, advantages_N = torch.zeros(len(log_ratios)), torch.tensor(advantages, dtype=torch.float64)
    return make_tokens(
        logprob=logprobs_N,
        sampled_logprob=sampled_N,
        old_logprob=logprobs_N.detach(),
        entropy=entropy_N,
        advantage=advantages_N,
        length=ones_C,
    )


def test_metrics_tell_cut_weights_from_those_left_out() -> None:
    tokens = one_token_each([math.log(w) for w in (0.1, 0.5, 1.0, 1.9, 4.0)], [1.0] * 5)
    totals = StepTotals(5, 5, 12)

    def shares(mode: Any) -> dict[str, list[float]]:
        objective = Objective(correction=Correction(mode, 0.4, 2.0))
        metrics = policy_loss(tokens, objective, totals).metrics
        return {name: value.tolist() for name, value in metrics.items() if name.startswith("correction/")}

    cut, masked = shares("sequence_truncate"), shares("geometric_mask")
    assert cut["correction/truncated"] == [1.0, 0.0, 0.0, 0.0, 1.0] and sum(cut["correction/masked"]) == 0
    assert masked["correction/masked"] == [1.0, 0.0, 0.0, 0.0, 1.0] and "correction/truncated" not in masked
    assert masked["correction/weight"] == [0.0, 1.0, 1.0, 1.0, 0.0]
    assert cut["correction/weight"] == pytest.approx([0.4, 0.5, 1.0, 1.9, 2.0])


# ---- F-TIS ---------------------------------------------------------------------------------------------


def test_completions_are_near_by_the_sum_of_k3_and_good_ones_always() -> None:
    tokens = one_token_each([3.0, 3.0, 3.0, -3.0, 0.1, 0.1], [1.0, 0.0, -1.0, -1.0, 0.0, -1.0])
    near = near_completions(tokens, math.exp(3.0) - 1 - 3.0)  # where it is reached, it is not near
    assert near.tolist() == [True, False, False, True, True, True]
    assert near_completions(tokens, 1e9).all()
    assert near_completions(tokens, 1e-9).tolist() == [True] + [False] * 5


def test_a_step_of_f_tis_is_that_of_its_formula() -> None:
    gamma, groups = 0.2, stale_batch()
    objective = Objective("grpo", correction=Correction("token_truncate", high=2.0), off_policy_kl=gamma)
    _, steps, logs = updated(objective, groups)
    filtered: list[int] = []

    def losses(now_T: torch.Tensor, sampled_T: torch.Tensor, _: Any, advantage: float) -> torch.Tensor:
        pairs = [(float(now), float(then)) for now, then in zip(now_T.detach(), sampled_T, strict=True)]
        kl = sum(math.exp(now - then) - 1 - (now - then) for now, then in pairs)
        keep = advantage > 0 or kl < gamma
        filtered.extend([int(not keep)] * len(pairs))
        weights_T = torch.tensor([min(math.exp(now - then), 2.0) for now, then in pairs], dtype=torch.float64)
        return -weights_T * advantage * now_T * keep

    assert relative_error(steps.gradients[0], formula(random_policy().double(), groups, losses)) < 1e-5
    assert 0 < sum(filtered) < len(filtered)
    assert logs["off_policy_filtered"] == pytest.approx(sum(filtered) / len(filtered))


# ---- VCPO ----------------------------------------------------------------------------------------------


def share_by_hand(weights: Sequence[float]) -> float:
    return math.fsum(weights) ** 2 / (len(weights) * math.fsum(w * w for w in weights))


def test_the_effective_share_is_that_of_the_formula_whatever_the_size_of_weights() -> None:
    logs = [0.3, -1.2, 0.0, 2.0, -0.4]
    expected = share_by_hand([math.exp(log) for log in logs])
    for shift in (0.0, 2000.0, -2000.0):  # no exponential of these exists
        assert effective_share(torch.tensor(logs, dtype=torch.float64) + shift) == pytest.approx(expected)
    assert effective_share(torch.tensor([0.0, -2000.0])) == pytest.approx(0.5)
    assert effective_share(torch.zeros(7)) == pytest.approx(1.0)
    assert effective_share(torch.empty(0)) == 1.0
    for full_ess, expected in ((0.8, math.sqrt(0.5 / 0.8)), (0.4, 1.0)):
        step = step_of(EffectiveSamples(full_ess), "on_gradient", log_weights_C=torch.tensor([0.0, -2000.0]))
        assert step.values["scale"] == pytest.approx(expected, rel=1e-12)


def test_a_step_of_vcpo_has_its_gradient_and_size() -> None:
    """The gradient's weights are cut at 8, those of the effective sample size are not; there is no clip."""
    groups = stale_batch()
    for rollout in groups[0].rollouts[:2]:
        rollout.completion.logprobs_T -= 0.6 if rollout.reward else -0.5  # far from the policy on both sides
    _, steps, logs = updated(VCPO, groups, lr=0.3, plugins=[EffectiveSamples()])
    weights: list[float] = []

    def losses(now_T: torch.Tensor, sampled_T: torch.Tensor, _: Any, advantage: float) -> torch.Tensor:
        weights.append(math.exp(float((now_T.detach() - sampled_T).sum())))
        return -min(weights[-1], 8.0) * advantage * now_T

    policy = random_policy().double()
    expected = formula(policy, groups, losses)
    assert relative_error(steps.gradients[0], expected) < 1e-5
    assert max(weights) > 8
    assert steps.scales == [pytest.approx(math.sqrt(share_by_hand(weights)), rel=1e-5)]
    assert steps.scales[0] < 0.9 and logs["update/step_scale"] == steps.scales[0]


def test_each_step_on_a_batch_is_sized_by_its_own_completions_and_the_policy_before_it() -> None:
    groups = stale_batch()
    _, steps, logs = updated(VCPO, groups, lr=0.5, num_minibatches=2, plugins=[EffectiveSamples()])
    expected = []
    policy = random_policy().double()
    for number, group in enumerate(groups):
        weights: list[float] = []

        def losses(now_T: torch.Tensor, sampled_T: torch.Tensor, *_: Any, of: list[float] = weights) -> torch.Tensor:
            of.append(math.exp(float((now_T.detach() - sampled_T).sum())))
            return now_T

        formula(policy, [group], losses)
        expected.append(math.sqrt(share_by_hand(weights)))
        if number == 0:
            with torch.no_grad():
                parts = steps.gradients[0].split([parameter.numel() for parameter in policy.parameters()])
                for parameter, gradient in zip(policy.parameters(), parts, strict=True):
                    parameter -= 0.5 * expected[0] * gradient.view_as(parameter)
    assert steps.scales == pytest.approx(expected, rel=1e-5)
    assert logs["update/step_scale"] == pytest.approx(sum(expected) / 2, rel=1e-5)


def test_a_learning_rate_is_scaled_for_one_step_and_put_back_after_an_error_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights = [torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))]
    tensor = torch.tensor(0.4)
    optimizer = torch.optim.SGD([{"params": weights[:1], "lr": 0.1}, {"params": weights[1:], "lr": tensor}])
    groups, seen = optimizer.param_groups, list[list[float]]()

    def fails() -> None:
        seen.append([float(group["lr"]) for group in groups])
        raise KeyError

    monkeypatch.setattr(optimizer, "step", fails)
    module = make_module("tiny")
    monkeypatch.setattr(module, "optimizers", lambda: optimizer)
    with pytest.raises(KeyError):
        module.take_step(0.5)
    assert seen == [pytest.approx([0.05, 0.2])]
    assert groups[0]["lr"] == 0.1 and groups[1]["lr"] is tensor and float(tensor) == pytest.approx(0.4)


def test_adam_moves_by_the_scale_and_its_schedule_does_not_see_it(policy_folder: Path) -> None:
    policy, start, moves, rates = random_policy(), None, [], []
    for plugins in ([], [EffectiveSamples()]):
        module = make_module(
            policy_folder,
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.0, eps=1e-12),
            lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
        )
        module.set_plugins(*plugins)
        recorder = fit(module, stale_groups(policy))
        start = torch.cat([parameter.detach().flatten() for parameter in policy.parameters()])
        moves.append(weights_of(module) - start)
        rates.append(module.trainer.optimizers[0].param_groups[0]["lr"])
        scale = recorder.logs[0].get("update/step_scale", 1.0)
        assert recorder.logs[0]["lr"] == pytest.approx(1e-3)
    assert scale < 0.9 and relative_error(moves[1], scale * moves[0]) < 1e-3
    assert rates == [5e-4, 5e-4]


# ---- proximal policies ---------------------------------------------------------------------------------


def test_an_interpolated_policy_is_one_step_behind_on_the_line_from_the_sampler() -> None:
    now_N = torch.tensor([-1.0] * 5, dtype=torch.float64, requires_grad=True)
    sampled_N, ages_N = torch.full((5,), -3.0, dtype=torch.float64), torch.tensor([0, 1, 2, 4, 10])
    tokens, plugin = make_tokens(logprob=now_N, sampled_logprob=sampled_N, age=ages_N), InterpolatedPolicy()
    plugin.loss(tokens.of(plugin))
    assert tokens.old_logprobs_N.tolist() == pytest.approx([-3.0, -3.0, -2.0, -1.5, -1.2])  # a = 0, 0, 1/2, 3/4, 9/10
    assert not tokens.old_logprobs_N.requires_grad


def clipped(now_T: torch.Tensor, old_T: torch.Tensor, advantage: float) -> torch.Tensor:
    ratio_T = (now_T - old_T).exp()
    return -torch.minimum(ratio_T * advantage, ratio_T.clamp(0.8, 1.2) * advantage)


@pytest.mark.parametrize("mode", ["none", "token_truncate"])
def test_a_step_with_an_interpolated_policy_is_that_of_its_formula(mode: Any) -> None:
    groups = stale_batch()
    objective = Objective("grpo", correction=Correction(mode, high=1.2))
    _, steps, _ = updated(objective, groups, plugins=[InterpolatedPolicy()])

    def losses(
        now_T: torch.Tensor, sampled_T: torch.Tensor, versions_T: torch.Tensor, advantage: float
    ) -> torch.Tensor:
        shares_T = torch.tensor([1 - 1 / max(4 - int(v), 1) for v in versions_T], dtype=torch.float64)
        old_T = (1 - shares_T) * sampled_T + shares_T * now_T.detach()
        weights_T = (old_T - sampled_T).exp().clamp(max=1.2) if mode != "none" else 1.0
        return weights_T * clipped(now_T, old_T, advantage)

    assert relative_error(steps.gradients[0], formula(random_policy().double(), groups, losses)) < 1e-5


def test_a_recomputed_policy_without_a_correction_weighs_nothing() -> None:
    groups = stale_batch()
    _, steps, logs = updated(Objective("grpo", proximal="recomputed"), groups)
    plain = formula(random_policy().double(), groups, lambda now_T, _, __, advantage: -advantage * now_T)
    assert relative_error(steps.gradients[0], plain) < 1e-5
    assert logs["ratio/mean"] == pytest.approx(1.0)


def test_an_update_does_not_see_what_a_failed_one_has_written() -> None:
    class Wrong(Plugin):
        writes = frozenset({"old_logprob"})

        def on_batch(self, batch: Batch) -> None:
            for logprob in (-9.0, 1.0):
                for rollout in batch.rollouts:
                    batch.set("old_logprob", rollout, [logprob] * rollout.completion.num_trained)

    groups, objective = stale_batch(), Objective("grpo", correction=Correction("token_truncate"))
    with pytest.raises(ValueError, match=r"Wrong\.on_batch gives sample .* the old_logprob with 1 at place 0"):
        updated(objective, groups, plugins=[Wrong()])
    (_, again, _), (_, once, _) = updated(objective, groups), updated(objective, stale_batch())
    assert torch.equal(again.gradients[0], once.gradients[0])


# ---- what is refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"loss": "vespo", "correction": Correction("geometric_mask")},
            r"vespo needs corrections of single .*geometric_mask makes one .*; take token_truncate",
        ),
        (
            {"proximal": "sampled", "correction": Correction("token_mask")},
            r"mode token_mask needs ratios .*proximal sampled takes them to the sampler.*; set",
        ),
    ],
)
def test_an_objective_that_means_something_else_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Objective(**options)
