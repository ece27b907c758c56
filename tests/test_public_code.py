"""Methods beside numbers that their papers' own code printed, in float64, for the literal inputs here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import test_copo
import test_turn_credit
import torch
from hand_made import as_groups, credited, learning_batch, make_micro_batch, make_rollout, make_tokens, plugin
from test_allocation import at
from test_chunked_backward import Drawn
from test_learner import make_learner
from test_loop import FakeGenerator, controller, prompts

from lit_grpo.budgets.history import PromptHistory, Visit
from lit_grpo.methods.arpo import AEPO, ARPO
from lit_grpo.methods.copo import Blended
from lit_grpo.methods.drpo import DecoupledLength
from lit_grpo.methods.gigpo import GiGPO
from lit_grpo.methods.knapsack import Knapsack
from lit_grpo.methods.noise_scale import NormTest, estimate
from lit_grpo.methods.seco import SeCO
from lit_grpo.methods.treepo import relative_advantages
from lit_grpo.plugins import Plugin
from lit_grpo.rollout.buffer import RolloutBuffer
from lit_grpo.types import Completion, PassRule, Rollout, RolloutGroup, SamplingParams
from lit_grpo.update.advantages.estimator import Advantages, GroupRewards
from lit_grpo.update.advantages.functions import group_advantages, virtual_maximum_advantages
from lit_grpo.update.advantages.smoothing import smoothed_advantages
from lit_grpo.update.logprobs.forward import micro_batch_logprobs
from lit_grpo.update.objective.corrections import Correction
from lit_grpo.update.objective.objective import Objective
from lit_grpo.update.objective.policy_loss import policy_loss
from lit_grpo.update.objective.tokens import StepTotals, log_ratios
from lit_grpo.update.plugin import SquaredNorm
from lit_grpo.update.prefix.sharing import shared_prefixes

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
    tokens = make_tokens(logprob=logprobs_N, old_logprob=old_N, advantage=advantages_N, length=ones_C)
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


def test_the_gradient_of_drpo() -> None:
    """``compute_policy_loss_drpo`` of Optimization-AI/DRPO at 405f702: lambda 0.1, tau 10, 12 tokens at most."""
    lengths, rewards = (2, 5, 3, 4, 6, 1), (1.0, 1.0, 0.0, 0.0, 1.0, 0.0)
    of_a_token = [-0.4473236213, -0.0146874235, 0.1199528309, 0.0845139422, -0.0053192733, 0.3020857383]
    rollouts = []
    for number, (length, reward) in enumerate(zip(lengths, rewards, strict=True)):
        logprobs = [-(12 * number + place + 1) / 20 for place in range(length)]
        rollout = make_rollout((3,), [4] * length, reward, logprobs, sample_id=number)
        rollouts.append(Rollout(rollout.prompt, rollout.completion, {"exact": reward}, reward))
        rollouts[-1].advantage = 0.0
    batch, plugin = learning_batch([RolloutGroup(rollouts[0].prompt, rollouts)]), DecoupledLength()
    plugin.on_batch(replace(batch, pass_rule=PassRule("exact")).of(plugin))
    found = [-rollout.advantage / 6 / length for rollout, length in zip(rollouts, lengths, strict=True)]
    assert found == pytest.approx(of_a_token, abs=1e-8)


def test_advantages_of_treepo_before_they_are_whitened() -> None:
    """``compute_tree_reinforce_plus_plus_baseline_outcome_advantage`` of multimodal-art-projection/TreePO at f055523.

    With ``adv_weight_strategy="average"``, as its training script has it; a token here is a segment there.
    """
    leaves = [(2, 4, 10), (2, 4, 11), (2, 5, 12), (3, 6, 13), (3, 6, 14), (3, 7, 15), (8, 9, 16)]
    rewards = [1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.5]
    completions = [make_rollout((1,), leaf, sample_id=number).completion for number, leaf in enumerate(leaves)]
    expected = [0.5555555556, -0.4444444444, -0.4166666667, 0.2777777778, 0.2777777778, -0.5833333333, 0.0]
    assert relative_advantages(completions, rewards, 1) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    ("mode", "low", "loss", "gradients"),
    [
        ("token_mask", None, 0.4468593692, [-0.1499843, 0, 0, 0, 0.4705281, 0, 0, 0, 0.1111111]),
        ("token_mask", 0.5, 0.4141589736, [-0.1499843, 0, 0, 0, 0.4705281, 0, 0, 0, 0.1111111]),
        ("token_truncate", None, 0.3147097841, [-0.1499843, 0, -0.0613132, 0.142497, 0.4705281, 0, 0, 0, 0.1111111]),
        ("token_truncate", 0.5, 0.3264538330, [-0.1499843, 0, -0.0613132, 0.142497, 0.4705281, 0, 0, 0, 0.1111111]),
    ],
)
def test_the_decoupled_loss_of_areal(mode: Any, low: float | None, loss: float, gradients: list[float]) -> None:
    """``ppo_actor_loss_fn`` of inclusionAI/AReaL at 4aef98d8d, ``mask`` and ``clamp`` of single tokens.

    Its clip bounds are 0.2 and 0.28, the weights' at most 1.5; it has the weights in float32.
    """
    rows = [  # log-prob, that of the proximal policy, that of the policy that sampled, advantage
        (-1.0, -1.2, -1.3, 1.0),
        (-0.5, -1.5, -1.0, 1.0),
        (-2.0, -1.0, -2.0, 1.0),
        (-1.0, -1.2, -1.9, -0.7),
        (-0.2, -2.2, -2.0, -0.7),
        (-3.0, -1.0, -1.1, -0.7),
        (-0.1, -0.5, -2.5, 1.0),
        (-6.0, -5.0, -4.0, -1.0),
        (-1.0, -1.4, -1.0, -1.0),
    ]
    logprobs_N, proximal_N, sampled_N, advantages_N = torch.tensor(rows, dtype=torch.float64).unbind(1)
    logprobs_N = logprobs_N.clone().requires_grad_()
    lengths_C = torch.ones(9, dtype=torch.int64)
    objective = Objective("dapo", epsilon=0.2, epsilon_high=0.28, correction=Correction(mode, low=low, high=1.5))
    tokens = make_tokens(
        logprob=logprobs_N,
        sampled_logprob=sampled_N,
        old_logprob=proximal_N,
        entropy=torch.zeros(9),
        advantage=advantages_N,
        length=lengths_C,
    )
    found = policy_loss(tokens, objective, StepTotals(9, 9, 1)).loss
    found.backward()
    assert logprobs_N.grad is not None
    assert found.item() == pytest.approx(loss, abs=1e-7)
    assert logprobs_N.grad.tolist() == pytest.approx(gradients, abs=1e-6)


@pytest.mark.parametrize(
    ("rates", "num_generations", "counts"),
    [
        ((0.5, 0.25, 0, 0.75, 1, 0, 0.125), 8, [7, 12, 5, 8, 2, 5, 17]),
        ((0, 0.625, 0.25, 0.5, 0, 1), 16, [37, 6, 9, 6, 36, 2]),
        ((0.875, 0.375, 0, 0.5, 0.25), 4, [2, 5, 2, 5, 6]),
        ((0.5, 0.5, 0, 0, 0, 0, 0, 0), 16, [5, 5, 20, 20, 20, 20, 19, 19]),
    ],
)
def test_the_divisions_of_knapsack_rl(rates: Sequence[float], num_generations: int, counts: list[int]) -> None:
    """``sampling_budget_by_knapsack`` of liziniu/KnapsackRL at ca5d5f5, at least 2 a prompt."""
    assert Knapsack().first_round(at(*rates), num_generations) == counts


@pytest.mark.parametrize(("eta", "num_prompts"), [(0.9, 4), (0.5, 12), (0.3, 33)])
def test_the_batch_size_of_adadagrad(eta: float, num_prompts: int) -> None:
    """``norm_test`` of timlautk/AdAdaGrad at cc126fb, of the gradients of a batch of 4; the variance is 0.86."""
    rows = [[1.0, 0.5, -0.2], [0.3, 0.9, 0.1], [0.8, -0.4, 0.6], [-0.5, 0.2, 0.3]]
    gradients_BD = torch.tensor(rows, dtype=torch.float64)
    norms = [SquaredNorm(float(gradient_D.square().sum()), signal=1, noise=1) for gradient_D in gradients_BD]
    found = estimate([*norms, SquaredNorm(float(gradients_BD.mean(0).square().sum()), signal=1, noise=1 / 4)])
    assert found is not None and found == pytest.approx((0.29 - 0.86 / 4, 0.86), abs=1e-9)
    assert NormTest(eta=eta, most=99).size(*found, now=4, began=4) == num_prompts


@pytest.mark.parametrize(
    ("lengths", "baseline", "of_verl", "of_openrlhf"),
    [
        (
            [3] * 8,
            False,
            [0.9208416514, -1.3458454892, -0.2125019189, -1.3458454892, 0.9208416514, 0.9208416514, -0.779173704],
            [0.9406469911, -1.3747917563, -0.2170723826, -1.3747917563, 0.9406469911, 0.9406469911, -0.7959320694],
        ),
        (
            [3] * 8,
            True,
            [1.6430247506, -0.9858148503, 0.3286049501, -0.9858148503, 0.4929074252, 0.4929074252, -1.4787222755],
            [1.6783627868, -1.0070176721, 0.3356725574, -1.0070176721, 0.503508836, 0.503508836, -1.5105265081],
        ),
        (
            [1, 4, 2, 3, 1, 2, 4, 3],
            False,
            [1.2463459795, -1.0197376187, 0.1133041804, -1.0197376187, 1.2463459795, 1.2463459795, -0.4532167191],
            [1.2787240902, -1.0462287506, 0.1162476698, -1.0462287506, 1.2787240902, 1.2787240902, -0.4649905404],
        ),
        (
            [1, 4, 2, 3, 1, 2, 4, 3],
            True,
            [2.1323311412, -0.6414329452, 0.745449098, -0.6414329452, 0.9188093534, 0.9188093534, -1.1615137114],
            [2.1877255444, -0.658096313, 0.7648146157, -0.658096313, 0.9426784818, 0.9426784818, -1.1916879113],
        ),
    ],
)
def test_advantages_of_reinforce_plus_plus(
    lengths: list[int], baseline: bool, of_verl: list[float], of_openrlhf: list[float]
) -> None:
    """verl at b178a3c (``core_algos.py``) and OpenRLHF at 3c3be62 (``experience_maker.py``), the authors' own.

    verl divides by the deviation of n - 1 tokens, OpenRLHF by that of n. By default deviation and mean are over
    completions, which is the same where all have as many tokens.
    """
    rewards, num_tokens = [1.0, 0.0, 0.5, 0.0, 1.0, 1.0, 0.25, 1.0], sum(lengths)
    rollouts = [
        make_rollout((3,), [4] * length, reward, prompt_id=str(number // 4), sample_id=number)
        for number, (length, reward) in enumerate(zip(lengths, rewards, strict=True))
    ]
    given = GroupRewards.of(as_groups(rollouts), [])
    name = "reinforce_plus_plus_baseline" if baseline else "reinforce_plus_plus"
    found_R = Advantages(name, "tokens").compute(given, torch.empty(0), PromptHistory())
    assert found_R.tolist()[:7] == pytest.approx(of_openrlhf, abs=1e-6)
    assert (found_R * math.sqrt((num_tokens - 1) / num_tokens)).tolist()[:7] == pytest.approx(of_verl, abs=1e-6)
    by_default_R = Advantages(name).compute(given, torch.empty(0), PromptHistory()) * math.sqrt(8 / 7)
    assert (by_default_R.tolist()[:7] == pytest.approx(of_openrlhf, rel=4e-4)) == (len({*lengths}) == 1)


@pytest.mark.parametrize(
    ("scale", "tolerance", "expected"),
    [
        (
            False,
            1e-7,
            [
                [0.90460472, 0.94083336, 0.47125],
                [-0.88464532, -1.07416668],
                [0.57210467, 0.43624999, 0.47125],
                [-0.59206407, -0.125, -0.24166668, -0.37875],
            ],
        ),
        (
            True,
            1e-3,
            [
                [1.60894747, 1.54878475, 1.17974117],
                [-1.71034021, -1.91319457],
                [1.09061385, 1.0355981, 1.17974117],
                [-0.98922111, -0.26111594, -0.418938, -1.30615293],
            ],
        ),
    ],
)
def test_advantages_of_gigpo(scale: bool, tolerance: float, expected: list[list[float]]) -> None:
    """``compute_gigpo_outcome_advantage`` of langfengQ/DrMAS at 3b556f2c, ``mean_norm`` and ``mean_std_norm``.

    langfengQ/verl-agent at 20bd331b gives the same with ``compute_mean_std_cross_steps=False``; by default it counts an
    episode once for each of its steps. The epsilons are 1e-6, ours 1e-4.
    """
    start, door, key, wall = (), (7, 7), (8,), (9,)
    members = [
        test_turn_credit.episode(0, 1.0, [start, door, key], [0.0, 0.5, 1.0]),
        test_turn_credit.episode(1, 0.0, [start, door], [0.25, 0.0]),
        test_turn_credit.episode(2, 1.0, [start, key, key], [0.0, 0.0, 1.0]),
        test_turn_credit.episode(3, 0.5, [start, wall, door, key], [0.0, -0.5, 0.0, 0.5]),
    ]
    rewards_R = torch.tensor([member.reward for member in members], dtype=torch.float64)
    advantages = group_advantages(rewards_R, torch.zeros(4).long(), "group" if scale else "none").tolist()
    found = credited(GiGPO(weight=0.7, gamma=0.95, scale=scale), test_turn_credit.group(*members), advantages)
    for its_turns, its_expected in zip(found, expected, strict=True):
        assert its_turns == pytest.approx(its_expected, abs=tolerance)


@pytest.mark.parametrize(
    ("gamma", "rho", "expected"),
    [
        (
            20.0,
            1.5,
            [
                [0.8564398, 0.8564398, -0.6372142, -0.6372142, -0.6372142, -0.6372142, 0.8564398, -0.6372142],
                [1.3587287] * 8,
                [-1.0190466] * 8,
                [-0.929152, -0.929152, 0.929152, 0.929152, 0.929152, 0.929152, -0.929152, -0.929152],
            ],
        ),
        (
            5.0,
            1.0,
            [
                [1.1194478, 1.1194478, -0.7026367, -0.7026367, -0.7026367, -0.7026367, 1.1194478, -0.7026367],
                [1.349635] * 8,
                [*([-0.9574153] * 7), -0.695476],
                [-0.9139193, -0.9139193, 0.9139193, 0.9139193, 0.9139193, 0.9139193, -0.9139193, -0.9139193],
            ],
        ),
    ],
)
def test_advantages_of_copo(gamma: float, rho: float, expected: list[list[float]]) -> None:
    """What the loss of hijih/copo-code at f66883fb makes of a token's gradient in the first step on a batch.

    ``compute_grpo_outcome_advantage_with_global`` without its coefficient, ``compute_policy_loss_with_global`` with
    ``only-soft``; its epsilon is 1e-6, ours 1e-4.
    """
    answers = {"aabbccab": "11000010", "aaaaaaaa": "11111111", "bbbbbbba": "00000001", "aabbbbcd": "00111100"}
    groups = [test_copo.group(each, list(each), [float(reward) for reward in answers[each]]) for each in answers]
    for found, its_expected in zip(test_copo.shape(Blended(gamma=gamma, rho=rho), groups), expected, strict=True):
        assert found == pytest.approx(its_expected, rel=5e-4)


@pytest.mark.parametrize(
    ("draw", "rise", "rounds", "of_arpo", "of_aepo"),
    [
        (0.5, 0.0, 0, True, True),
        (0.5, 0.0, 1, True, False),
        (0.13, 1.4, 0, True, False),
        (0.1, -2.0, 0, True, False),
        (0.42, -1.0, 0, False, False),
        (0.55, 1.8, 0, True, True),
        (0.9, -1.6, 0, False, True),
        (0.53, 1.1, 6, True, True),
        (0.83, 0.7, 3, False, True),
        (0.99, 2.0, 25, False, False),
    ],
)
def test_which_turns_branch_in_arpo_and_aepo(
    draw: float, rise: float, rounds: int, of_arpo: bool, of_aepo: bool
) -> None:
    """``vllm_rollout_with_tools.py`` of RUC-NLPIR/ARPO at 410211f: of ARPO and of AEPO, weight 0.2, threshold 0.5."""
    assert ARPO().branches(draw, rise, rounds) == of_arpo
    assert AEPO().branches(draw, rise, rounds) == of_aepo


def test_the_rollouts_of_april() -> None:
    """``generate_rollout_async`` of RLsys-Foundation/APRIL at a72b585: 2 groups of 2 an update, 4 begun.

    The lengths of the completions were given, as here. Its runs begin 64 groups for 32.
    """
    lengths = [(3, 9), (2, 4), (1, 2), (5, 12), (3, 3), (2, 7), (6, 8), (1, 5), (4, 4), (10, 1), (2, 2), (3, 6)]
    generator = FakeGenerator(99, {f"p{number}": [*pair] for number, pair in enumerate(lengths)})
    mode = plugin("april")
    rollouts = controller(generator, buffer=RolloutBuffer(mode.rule(2, 2)))
    waiting = iter(prompts(*generator.lengths))
    found = []
    for _ in range(5):
        new = [next(waiting) for _ in range(mode.num_wanted(len(rollouts.buffer), 2))]
        groups, stats = rollouts.collect(new, 2, SamplingParams(max_tokens=99), seed=0)
        left: dict[str, int] = {}  # the most tokens that a completion of each unfinished group has
        for request in rollouts.buffer.unfinished:
            left[request.key[0]] = max(request.prefix.num_tokens, left.get(request.key[0], 0))
        found.append(([group.prompt.prompt_id for group in groups], stats.num_steps, left))
        rollouts.buffer.end_update()
    assert found == [
        (["p1", "p2"], 4, {"p0": 4, "p3": 4}),
        (["p0", "p4"], 5, {"p3": 9, "p5": 5}),
        (["p3", "p5"], 3, {"p6": 3, "p7": 3}),
        (["p7", "p8"], 4, {"p6": 7, "p9": 4}),
        (["p6", "p10"], 2, {"p9": 6, "p11": 2}),
    ]


def sine_llama() -> Any:
    """A Llama in float64 whose weights are sines of their places."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=11,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
    )
    policy: Any = LlamaForCausalLM(config).double().train()
    for number, parameter in enumerate(policy.parameters()):
        waves = torch.sin(torch.arange(parameter.numel()).double() * 0.7 + number).view_as(parameter)
        parameter.data = waves * 0.5 if parameter.ndim == 2 else 1 + 0.1 * waves
    return policy


def in_short(gradient_D: torch.Tensor) -> list[float]:
    """Sums of all its numbers, by three waves, and its norm."""
    places_D = torch.arange(len(gradient_D)).double()
    return [*(float(gradient_D @ torch.cos(k * places_D)) for k in (1, 2, 3)), float(gradient_D.norm())]


def test_log_probs_and_gradient_of_prefix_grouper() -> None:
    """``PrefixGrouper`` of johncaged/PrefixGrouper at 1accedc, with its attention of a Hugging Face decoder."""
    groups = {(3, 4, 5): [[6, 7, 8, 9], [10, 2], [3]], (7, 2, 8, 4, 9): [[5, 6], [4, 10, 3]]}
    rollouts = [
        make_rollout(prompt, tokens, prompt_id=str(prompt), sample_id=number)
        for prompt, members in groups.items()
        for number, tokens in enumerate(members)
    ]
    policy = sine_llama()
    with shared_prefixes(policy):
        logprobs_N, _ = micro_batch_logprobs(policy, make_micro_batch(rollouts, [0.0] * 5), 1.0)
        (logprobs_N * torch.linspace(-1, 1, 12).double()).sum().backward()
    expected = [-2.2637538284, -2.5861952852, -3.265458693, -3.808888894, -3.4865208038, -3.4663021256]
    expected += [-1.7287466125, -3.3260780011, -2.5219689978, -3.3973856455, -2.3481355013, -2.3218097331]
    assert logprobs_N.tolist() == pytest.approx(expected, abs=1e-9)
    gradient_D = torch.cat([parameter.grad.flatten() for parameter in policy.parameters()])
    assert in_short(gradient_D) == pytest.approx([-9.6222648238, -3.0463855469, 3.7698098322, 9.25135996], abs=1e-8)


@pytest.mark.parametrize(
    ("chunking", "trained", "expected"),
    [
        (SeCO(3), [1] * 9, [-0.9791125392, -0.4529096310, -0.2953988699, 1.0113590280]),
        (
            Drawn(3, drawn=(0, 2), factor=1.5),
            [0, 1, 1] * 3,
            [-0.5072992808, -1.2617968362, -0.3744102066, 1.0014346565],
        ),
        (
            Drawn(3, drawn=(1, 2), factor=1.5),
            [0, 1, 1] * 3,
            [-0.3371640759, -1.1488158321, -0.4278666304, 1.1879361834],
        ),
        (
            Drawn(3, drawn=(0, 1, 2), factor=1.5),
            [0, 1, 1] * 3,
            [-0.7091187998, -1.3665071272, -0.4889288349, 1.6450254210],
        ),
    ],
)
def test_the_gradients_of_seco_and_spaco(chunking: Plugin, trained: Sequence[int], expected: list[float]) -> None:
    """``SecoCache`` and ``ModelForTraining`` of wenhaoli-xmu/seco at 8d69b46: chunks of 3 tokens, the prompt is one.

    SpaCO: the steps of ``draw_curve/spaco.py`` with ``--unbiased_estimate``. Each drawn chunk, and the gradient through
    its keys and values, has the factor 1.5, except for the prompt. The first token of each chunk has no loss here,
    because that code counts it with the chunk before.
    """
    policy, members = sine_llama(), []
    for number, tokens in enumerate(([6, 7, 8, 9, 10, 2, 3, 5, 7], [4, 8])):
        input_ids_BT = torch.tensor([[3, 4, 5, *tokens]])
        with torch.no_grad():
            logprobs_TV = policy(input_ids=input_ids_BT).logits[0, 2:-1].log_softmax(-1)
        logprobs = logprobs_TV.gather(-1, torch.tensor(tokens)[:, None])[:, 0].tolist()
        made = make_rollout([3, 4, 5], tokens, 1.0 - number, logprobs, sample_id=number)
        its, own_T = made.completion, torch.tensor(trained if number == 0 else [1, 1]).bool()
        completion = Completion(its.request, its.token_ids_T, its.logprobs_T, its.versions_T, "stop", trained_T=own_T)
        members.append(Rollout(made.prompt, completion, {"exact": made.reward}, made.reward))
    learner, steps = make_learner(
        policy=policy, objective=Objective("dapo"), advantages=Advantages(scale="none"), plugins=[chunking]
    )
    learner.learn([RolloutGroup(members[0].prompt, members)])
    assert in_short(steps.gradients[0]) == pytest.approx(expected, abs=1e-6)
