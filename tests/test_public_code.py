"""Methods beside numbers that their papers' own code printed, in float64, for the literal inputs here."""

from __future__ import annotations

import math

import pytest
import torch
from hand_made import make_rollout

from lit_grpo.budgets.history import PromptHistory, Visit
from lit_grpo.methods.drpo import DecoupledLength
from lit_grpo.methods.pods import MaxVariance
from lit_grpo.methods.reinforce_ada import Balanced
from lit_grpo.methods.treepo import relative_advantages
from lit_grpo.types import PassRule, Rollout, RolloutGroup
from lit_grpo.update.advantages.estimator import GroupRewards
from lit_grpo.update.advantages.functions import group_advantages, virtual_maximum_advantages
from lit_grpo.update.advantages.smoothing import smoothed_advantages
from lit_grpo.update.objective.objective import Objective
from lit_grpo.update.objective.proximal import interpolated_logprobs
from lit_grpo.update.objective.step_size import effective_share
from lit_grpo.update.objective.tokens import Tokens, log_ratios

NAN = math.nan
TOKENS = [  # log-prob, log-prob before, advantage
    (-1.0, -1.2, 1.0),
    (-0.5, -1.5, 1.0),
    (-2.0, -1.0, 1.0),
    (-1.0, -1.2, -0.7),
    (-0.2, -2.2, -0.7),
    (-3.0, -1.0, -0.7),
    (-0.1, -5.0, 1.0),
    (-6.0, -5.0, -1.0),
    (-1.0, -5.0, -1.0),
]


@pytest.mark.parametrize(
    ("objective", "losses", "gradients"),
    [
        (  # compute_gppo_loss of suu990901/KlearReasoner at 5d2d0b8, bounds 0.2 and 0.28, c 3
            Objective("gppo", epsilon=0.2, epsilon_high=0.28),
            [-1.2214027582, -1.28, -0.3678794412, 0.8549819307, 2.1, 0.56, -1.28, 0.8, 3.0],
            [-1.2214027582, -1.28, -0.3678794412, 0.8549819307, 0.0, 0.56, -1.28, 0.8, 0.0],
        ),
        (  # compute_policy_loss_dcpo of lime-RL/DCPO at 01787b0, clip_type dynamic, 0.16 and 0.2, c 10
            Objective("dcpo"),
            [-1.2214027582, -1.5706716649, -0.3678794412, 0.8549819307, 5.1723392693, 0.35, -5.9710722734, 0.5, 10.0],
            [-1.2214027582, 0.0, -0.3678794412, 0.8549819307, 5.1723392693, 0.0, 0.0, 0.0, 0.0],
        ),
    ],
)
def test_losses_of_tokens(objective: Objective, losses: list[float], gradients: list[float]) -> None:
    logprobs_N, old_N, advantages_N = torch.tensor(TOKENS, dtype=torch.float64).unbind(1)
    logprobs_N = logprobs_N.clone().requires_grad_()
    ones_C = torch.ones(len(TOKENS), dtype=torch.int64)
    tokens = Tokens(logprobs_N, old_N, old_N, old_N, advantages_N, ones_C)
    loss_N, _ = objective.recipe.surrogate(log_ratios(tokens, "token"), tokens, **objective.surrogate_parameters)
    loss_N.sum().backward()
    assert logprobs_N.grad is not None
    assert loss_N.tolist() == pytest.approx(losses, abs=1e-9)
    assert logprobs_N.grad.tolist() == pytest.approx(gradients, abs=1e-9)


@pytest.mark.parametrize(
    ("rewards", "advantages"),
    [
        ([0.0, 0.0, 0.0, 0.0], [-0.4472125955] * 4),
        ([1.0, 0.0, 0.0, 1.0], [0.73029541, -1.095443115, -1.095443115, 0.73029541]),
        ([0.5, 0.25, 0.0, 1.0], [-0.1118031489, -0.6708188933, -1.2298346376, 1.0062283399]),
        ([1.0, 1.0, 1.0, 1.0], [0.0] * 4),
    ],
)
def test_advantages_of_ngrpo(rewards: list[float], advantages: list[float]) -> None:
    """``compute_ngrpo_outcome_advantage`` of nangongrui-ngr/NGRPO at e7a3804."""
    found_R = virtual_maximum_advantages(torch.tensor(rewards).double(), torch.zeros(4, dtype=torch.int64), 1.0)
    assert found_R.tolist() == pytest.approx(advantages, abs=1e-9)


def test_advantages_of_dcpo_over_four_visits() -> None:
    """``compute_dcpo_outcome_advantage`` of lime-RL/DCPO at 01787b0, mean and deviation handed from visit to visit."""
    history, groups_R = PromptHistory(), torch.zeros(4, dtype=torch.int64)
    visits = {
        (1.0, 0.0, 0.0, 1.0): [0.8660254038, -0.8660254038, -0.8660254038, 0.8660254038],
        (1.0, 1.0, 0.0, 1.0): [0.5882407126, 0.5882407126, -1.313734521, 0.5882407126],
        (0.0, 0.0, 0.0, 0.0): [-0.2571722499] * 4,
        (1.0, 0.0, 0.0, 0.0): [1.2508113122, -0.5501622624, -0.5501622624, -0.5501622624],
    }
    for number, (rewards, advantages) in enumerate(visits.items()):
        found_R = smoothed_advantages(torch.tensor(rewards).double(), groups_R, ["a"], history)
        assert found_R.tolist() == pytest.approx(advantages, abs=2e-9)
        history.note([Visit("a", number, rewards, int(sum(rewards)), 4, number)])
        history.commit()


@pytest.mark.parametrize(
    ("rewards", "keep", "advantages"),
    [
        (
            [1.0, 0.5, 0.2, 0.9, 0.0, 0.4, 0.7, 0.1],
            4,
            {0: 0.9561821777, 3: 0.7649457422, 7: -0.7649457422, 4: -0.9561821777},
        ),
        ([0.3, 0.8, 0.6, 0.1, 0.95], 3, {4: 0.7345564507, 1: 0.4040060479, 3: -1.1385624986}),
    ],
)
def test_members_and_advantages_of_pods(rewards: list[float], keep: int, advantages: dict[int, float]) -> None:
    """``maxvargrpo_trainer.py`` of YixuanEvenXu/pods at 187f43b."""
    rollouts = [make_rollout((3,), (4,), reward, sample_id=number) for number, reward in enumerate(rewards)]
    group = RolloutGroup(rollouts[0].prompt, rollouts)
    given = GroupRewards.of([group], [])
    chosen_R = MaxVariance(keep).choose(given, rollouts, lambda some: {}, 0.0)
    assert {*torch.nonzero(chosen_R).flatten().tolist()} == advantages.keys()
    found = group_advantages(given.only(chosen_R).rewards_R, given.groups_R).tolist()
    assert {number: found[number] for number in advantages} == pytest.approx(advantages, abs=1e-6)


def test_the_gradient_of_drpo() -> None:
    """``compute_policy_loss_drpo`` of Optimization-AI/DRPO at 405f702: lambda 0.1, tau 10, 12 tokens at most."""
    lengths, rewards = (2, 5, 3, 4, 6, 1), (1.0, 1.0, 0.0, 0.0, 1.0, 0.0)
    of_a_token = [-0.4473236213, -0.0146874235, 0.1199528309, 0.0845139422, -0.0053192733, 0.3020857383]
    rollouts = []
    for number, (length, reward) in enumerate(zip(lengths, rewards, strict=True)):
        logprobs = [-(12 * number + place + 1) / 20 for place in range(length)]
        rollout = make_rollout((3,), [4] * length, reward, logprobs, sample_id=number)
        rollouts.append(Rollout(rollout.prompt, rollout.completion, {"exact": reward}, reward))
    group = RolloutGroup(rollouts[0].prompt, rollouts)
    (advantages,) = DecoupledLength().shape([group], [[0.0] * 6], PassRule("exact"), lambda own: [own])
    found = [-advantage / 6 / length for advantage, length in zip(advantages, lengths, strict=True)]
    assert found == pytest.approx(of_a_token, abs=1e-8)


def test_reinforce_ada_ends_a_prompt_where_its_code_does() -> None:
    """Of RLHFlow/Reinforce-Ada at 05be605: ``balanced`` with n = 4 waits for 2 and 2, ``positive_focused`` for one."""
    balanced, positive = Balanced(rounds=4, passed=2, failed=2), Balanced(rounds=4, passed=1, failed=0)
    for passed in range(9):
        assert (balanced.more(8, passed, 1, 8) == 0) == (passed >= 2 and 8 - passed >= 2)
        assert (positive.more(8, passed, 1, 8) == 0) == (passed >= 1)
    assert balanced.more(32, 0, 4, 8) == positive.more(32, 0, 4, 8) == 0


def test_advantages_of_treepo_before_they_are_whitened() -> None:
    """``compute_tree_reinforce_plus_plus_baseline_outcome_advantage`` of multimodal-art-projection/TreePO at f055523.

    With ``adv_weight_strategy="average"``, as its training script has it; a token here is a segment there.
    """
    leaves = [(2, 4, 10), (2, 4, 11), (2, 5, 12), (3, 6, 13), (3, 6, 14), (3, 7, 15), (8, 9, 16)]
    rewards = [1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.5]
    completions = [make_rollout((1,), leaf, sample_id=number).completion for number, leaf in enumerate(leaves)]
    expected = [0.5555555556, -0.4444444444, -0.4166666667, 0.2777777778, 0.2777777778, -0.5833333333, 0.0]
    assert relative_advantages(completions, rewards, 1) == pytest.approx(expected, abs=1e-9)


def test_the_proximal_policy_of_a_3po() -> None:
    """``compute_prox_logp_approximations`` (loglinear) of inclusionAI/AReaL at 4aef98d8d; its alpha is float32."""
    sampled_N, logprobs_N = torch.tensor([[-1.0, -2.0, -0.5, -3.0, -0.25], [-0.8, -2.4, -0.6, -1.0, -0.2]]).double()
    found_N = interpolated_logprobs(logprobs_N, sampled_N, torch.tensor([7, 6, 5, 2, 4]), 7)
    assert found_N.tolist() == pytest.approx([-1.0, -2.0, -0.55, -1.3999999762, -0.2166666657], abs=1e-7)


def test_the_effective_samples_of_vcpo() -> None:
    """``ess_ratio`` of ``compute_ess_info`` in mit-han-lab/vcpo at c7f030f: (5.5)^2 / (4 x 11.41)."""
    weights_C = torch.tensor([1.2, 0.4, 0.9, 3.0], dtype=torch.float64)
    assert effective_share(weights_C.log()) == pytest.approx(0.6627957926, abs=1e-9)
