"""The learner without Lightning, on groups of any size: its gradient is that of the formulas."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from conftest import random_policy
from hand_made import MAX_TOKENS, full_logprobs, make_rollout, random_groups

from lit_grpo.methods.entropy_target import EntropyTarget
from lit_grpo.metrics import rollout_metrics
from lit_grpo.plugins import fresh
from lit_grpo.ranks import Ranks
from lit_grpo.types import OBSERVED, Completion, PassRule, Prompt, Rollout, RolloutGroup
from lit_grpo.update.advantages.estimator import ESTIMATORS, Advantages, GroupRewards
from lit_grpo.update.batches.layout import PackedRow
from lit_grpo.update.batches.microbatch import least_tokens, make_micro_batches
from lit_grpo.update.learner import Learner
from lit_grpo.update.learner_settings import LearnerSettings
from lit_grpo.update.logprobs.reference import Reference, ReferenceSettings
from lit_grpo.update.objective.corrections import Correction
from lit_grpo.update.objective.kl import KLTerm
from lit_grpo.update.objective.objective import EntropyBonus, Objective

NAN = math.nan
OF_SOMETHING = ("sampling/", "advantages/")  # NaN where there is nothing to measure
LOW, HIGH = 0.2, 0.3


class PlainSteps:
    """What a loop without any framework does; it keeps each step's gradient, and ``before_step`` may interrupt it."""

    def __init__(self, policy: torch.nn.Module, lr: float = 0.0) -> None:
        self.policy_version, self.gradients, self.scales = 0, list[torch.Tensor](), list[float]()
        self.optimizer = torch.optim.SGD(policy.parameters(), lr=lr)
        self.before_step: Callable[[], None] = lambda: None

    def add_gradient(self, compute_loss: Callable[[], torch.Tensor], exchange: bool) -> None:
        compute_loss().backward()

    def take_step(self, scale: float = 1.0) -> float:
        self.before_step()
        parameters: list[torch.Tensor] = self.optimizer.param_groups[0]["params"]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        self.gradients.append(torch.cat([gradient.flatten() for gradient in gradients]))
        self.scales.append(scale)
        (group,) = self.optimizer.param_groups
        group["lr"], lr = group["lr"] * scale, group["lr"]
        self.optimizer.step()
        group["lr"] = lr
        self.policy_version += 1
        return 0.0


def make_learner(
    lr: float = 0.0, double: bool = True, policy: Any = None, **changes: Any
) -> tuple[Learner, PlainSteps]:
    policy = (policy or random_policy()).train()
    policy = policy.double() if double else policy
    defaults: dict[str, Any] = {
        "objective": Objective(),
        "advantages": Advantages(),
        "weights": {"exact": 1.0},
        "temperature": 1.0,
        "max_tokens": MAX_TOKENS,
        "max_grad_norm": 0.0,
        "pass_rule": PassRule("exact"),
    }
    steps = PlainSteps(policy, lr)
    return Learner(policy, steps, LearnerSettings(**(defaults | changes))), steps


def gradient_of(groups: Sequence[RolloutGroup]) -> torch.Tensor:
    """The gradient of one update from rollouts, rewarded by what their lengths leave over."""
    for group in groups:
        for rollout in group.rollouts:
            rollout.reward = float(rollout.completion.num_tokens % 3)
            rollout.rewards = {"exact": rollout.reward}
    learner, steps = make_learner(max_tokens=128)
    learner.learn(list(groups))
    return steps.gradients[0]


def member(prompt: Prompt, sample: int, versions: Sequence[int], trained: Sequence[bool], reward: float) -> Rollout:
    """A rollout of random tokens; sampled ones have log-probs near those of the policy."""
    generator = torch.Generator().manual_seed(hash((prompt.token_ids, sample)) % 2**31)
    tokens = torch.randint(2, 30, (len(versions),), generator=generator)
    rollout = make_rollout(prompt.token_ids, tokens.tolist(), reward, None, prompt.prompt_id, sample)
    exact_T = full_logprobs(random_policy(), rollout) + 0.3 * torch.randn(len(tokens), generator=generator)
    logprobs_T = exact_T.where(torch.tensor(versions) != OBSERVED, 0.0)
    completion = Completion(
        rollout.completion.request, tokens, logprobs_T, versions, "stop", trained_T=torch.tensor(trained)
    )
    return Rollout(rollout.prompt, completion, {"exact": None if math.isnan(reward) else reward}, reward)


def ragged_groups() -> list[RolloutGroup]:
    """Groups of 5, 3 and 0 members: some with observed or masked tokens, one not kept, one without a token to learn."""
    first, second, third = Prompt("a", (3, 4, 5), ""), Prompt("b", (7,), ""), Prompt("c", (9, 2), "")
    o = OBSERVED
    five = [
        member(first, 0, [0] * 6, [True] * 6, 1.0),
        member(first, 1, [0, 0, o, o, 1, 1, 1], [True] * 7, 0.0),  # sampled, observed, sampled
        member(first, 2, [0] * 4, [True] * 4, 0.25),
        member(first, 4, [1] * 5, [True, True, False, False, True], 0.6),  # sample 3 is missing
        member(first, 5, [o, o, o], [True] * 3, 0.75),  # nothing but observed
    ]
    three = [
        member(second, 0, [o, 0, 0], [True] * 3, 0.0),  # observed first
        member(second, 1, [1] * 9, [True] * 9, 1.0),
        member(second, 2, [0] * 2, [True] * 2, 0.0),
    ]
    five[2].kept = False
    return [RolloutGroup(first, five), RolloutGroup(second, three), RolloutGroup(third, [])]


OBJECTIVES: dict[str, dict[str, Any]] = {"turn": {"loss": "dapo", "ratio": "turn"}}


def reference_gradient(
    groups: Sequence[RolloutGroup],
    name: str,
    of_token: Callable[[Rollout, float, int], float] = lambda rollout, advantage, token: advantage,
) -> torch.Tensor:
    """One token after another in float64, by the formulas of DAPO (eq. 12), GRPO (eq. 3) and GSPO (eq. 5).

    ``turn`` is DAPO with the geometric mean of each turn's ratios. ``of_token`` makes a token's advantage of that of
    its rollout.
    """
    policy: Any = random_policy().double()
    scored = []
    for group in groups:
        rewards = [rollout.reward for rollout in group.rollouts]
        for rollout in group.rollouts:
            advantage = (rollout.reward - statistics.fmean(rewards)) / (statistics.stdev(rewards) + 1e-4)
            places = [t for t in range(rollout.completion.num_tokens) if rollout.completion.trained_T[t]]
            if rollout.kept and places:
                scored.append((rollout, advantage, places))
    num_tokens = sum(len(places) for _, _, places in scored)
    for rollout, advantage, places in scored:
        prompt, tokens_T = rollout.prompt.token_ids, rollout.completion.token_ids_T
        input_ids = torch.cat([torch.tensor(prompt), tokens_T])[None]
        logprobs_TV = policy(input_ids=input_ids, use_cache=False).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        log_ratios = [logprobs_TV[t, tokens_T[t]] - float(rollout.completion.logprobs_T[t]) for t in places]
        ratios = [log_ratio.exp() for log_ratio in log_ratios]
        if name == "gspo":
            ratios = [(torch.stack(log_ratios).sum() / len(places)).exp()]
        if name == "turn":
            versions = rollout.completion.versions_T.tolist()
            turns = [versions[:t].count(OBSERVED) for t in places]  # the same for all tokens of a turn
            ratios = [
                torch.stack([each for each, other in zip(log_ratios, turns, strict=True) if other == turn]).mean().exp()
                for turn in turns
            ]
        advantages = [of_token(rollout, advantage, token) for token in places][: len(ratios)]
        pairs = zip(ratios, advantages, strict=True)
        losses = [-torch.minimum(r * advantage, r.clamp(1 - LOW, 1 + HIGH) * advantage) for r, advantage in pairs]
        divisor = num_tokens if name in ("dapo", "turn") else len(scored) * len(ratios)
        (torch.stack(losses).sum() / divisor).backward()
    return torch.cat([parameter.grad.flatten() for parameter in policy.parameters()])


@pytest.mark.parametrize("shares_prefix", [True, False])
@pytest.mark.parametrize("name", ["dapo", "grpo", "gspo", "turn"])
def test_groups_of_five_three_and_no_members_train_to_the_gradient_of_the_formula(
    name: str, shares_prefix: bool
) -> None:
    groups = ragged_groups()
    expected = reference_gradient(groups, name)
    least = least_tokens([rollout for group in groups for rollout in group.rollouts], shares_prefix)
    for max_tokens in (least, least + 3, 20, 10_000):
        learner, steps = make_learner(
            objective=Objective(**OBJECTIVES.get(name, {"loss": name}), epsilon=LOW, epsilon_high=HIGH),
            max_tokens_per_micro_batch=max_tokens,
            shares_prefix=shares_prefix,
        )
        logs = learner.learn(groups)
        assert float((steps.gradients[0] - expected).norm() / expected.norm()) < 1e-6, max_tokens
        assert logs["update/tokens"] == 6 + 5 + 3 + 2 + 9 + 2


@pytest.mark.parametrize("name", ["entropy", "kl_reward", "top_entropy", "correction"])
def test_no_measure_meets_a_token_that_is_not_trained_on(name: str) -> None:
    """The log-probs that stand beside observed and masked tokens are made absurd, and change nothing."""
    objective = {
        "entropy": Objective(entropy=EntropyBonus(0.1)),
        "kl_reward": Objective(kl=KLTerm(0.1, "k1", place="reward")),
        "top_entropy": Objective(top_entropy_quantile=0.5),
        "correction": Objective(correction=Correction("sequence_truncate")),
    }[name]
    results = []
    for absurd in (0.0, -300.0):
        groups = ragged_groups()
        for rollout in (rollout for group in groups for rollout in group.rollouts):
            completion = rollout.completion
            completion.logprobs_T = completion.logprobs_T.where(completion.trained_T, absurd)
        learner, steps = make_learner(objective=objective, num_minibatches=2)
        if name == "kl_reward":
            reference: Any = random_policy(seed=1).double()
            learner.reference = Reference(reference, torch.device("cpu"), ReferenceSettings())
        results.append((learner.learn(groups), steps.gradients))
    (logs, gradients), (absurd_logs, absurd_gradients) = results
    assert absurd_logs == logs
    assert all(torch.equal(*pair) for pair in zip(gradients, absurd_gradients, strict=True))
    assert gradients[0].norm() > 1e-3


@pytest.mark.parametrize("estimator", [name for name, row in ESTIMATORS.items() if row.scales[0] != "batch"])
def test_ragged_groups_have_the_advantages_that_each_would_have_alone(estimator: Any) -> None:
    sizes, functions = [5, 1, 0, 3, 2], ["exact"]
    prompts = [Prompt(f"p{number}", (number,), "") for number in range(len(sizes))]
    groups = [
        RolloutGroup(
            prompt, [member(prompt, s, [0], [True], (0.3 * s + len(prompt.prompt_id)) % 1) for s in range(size)]
        )
        for prompt, size in zip(prompts, sizes, strict=True)
    ]

    def advantages(some: Sequence[RolloutGroup]) -> list[float]:
        rewards = GroupRewards.of(some, functions)
        history = make_learner()[0].history
        return Advantages(estimator).compute(rewards, torch.ones(1), history).tolist()

    alone = [value for group in groups for value in advantages([group])]
    assert advantages(groups) == pytest.approx(alone, nan_ok=True)
    assert len(alone) == 11
    parts = [GroupRewards.of(groups[:3], functions), GroupRewards.of(groups[3:], functions)]
    whole = GroupRewards.concatenate(parts)
    assert whole.groups_R.tolist() == [0] * 5 + [1] + [3] * 3 + [4] * 2
    assert whole.prompt_ids == [prompt.prompt_id for prompt in prompts]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_batch_of_a_group_of_one_and_one_of_none_is_finite(estimator: Any) -> None:
    prompts = Prompt("a", (3,), ""), Prompt("b", (4,), "")
    groups = [RolloutGroup(prompts[0], [member(prompts[0], 0, [0] * 3, [True] * 3, 0.5)]), RolloutGroup(prompts[1], [])]
    learner, steps = make_learner(advantages=Advantages(estimator), num_minibatches=2)
    logs = learner.learn(groups)
    assert all(math.isfinite(value) for name, value in logs.items() if not name.startswith(OF_SOMETHING))
    assert len(steps.gradients) == 2 and float(steps.gradients[1].norm()) == 0
    rollout_logs = rollout_metrics(groups, GroupRewards.of(groups, ["exact"]), 4, Ranks())
    assert rollout_logs["frac_no_rollout"] == 0.5 and rollout_logs["frac_reward_zero_std"] == 1.0
    assert all(math.isfinite(value) for value in rollout_logs.values())


def test_a_batch_without_any_rollout_is_trained_on_without_a_word() -> None:
    groups = [RolloutGroup(Prompt("a", (3,), ""), [])]
    learner, _ = make_learner()
    logs = learner.learn(groups)
    assert all(math.isfinite(value) != name.startswith(OF_SOMETHING) for name, value in logs.items())
    logs = rollout_metrics(groups, GroupRewards.of(groups, ["exact"]), 0, Ranks())
    assert logs["frac_no_rollout"] == 1.0 and math.isnan(logs["completions/max_length"])
    assert math.isnan(logs["reward"]) and math.isnan(logs["rewards/exact/mean"])


def test_two_completions_of_one_key_are_refused_before_anything_is_measured() -> None:
    """Their values are looked up by key, so that the second would get those of the first."""
    groups = ragged_groups()
    groups[0].rollouts.append(member(groups[0].prompt, 1, [0] * 3, [True] * 3, 0.5))
    learner, steps = make_learner()
    with pytest.raises(ValueError, match=r"2 completions are sample \(1,\) of prompt 'a', visit 0, .* of its own"):
        learner.learn(groups)
    with pytest.raises(ValueError, match=r"2 completions are sample \(1,\) of prompt 'a'"):
        learner.learn(iter([groups]))
    assert steps.policy_version == 0


# ---- what is remembered --------------------------------------------------------------------------------


def test_an_interrupt_before_the_first_step_counts_no_visit() -> None:
    learner, steps = make_learner(advantages=Advantages("dcpo"))

    def interrupt() -> None:
        raise KeyboardInterrupt

    steps.before_step = interrupt
    with pytest.raises(KeyboardInterrupt):
        learner.learn(ragged_groups())
    assert learner.history.records == {}
    steps.before_step = lambda: None
    learner.learn(ragged_groups())
    assert {name: record.num_visits for name, record in learner.history.records.items()} == {"a": 1, "b": 1}


def test_an_entropy_target_learns_nothing_from_a_step_without_tokens() -> None:
    """An entropy of 0 over no token would read as one below the target."""
    plugin = fresh(EntropyTarget(0.5, 0.1))
    learner, _ = make_learner(plugins=[plugin])
    before = plugin.state_dict()
    learner.learn([RolloutGroup(Prompt("a", (3,), ""), [])])
    assert plugin.state_dict() == before
    learner.learn(ragged_groups())
    assert plugin.state_dict() != before


def test_the_kl_controller_learns_nothing_from_a_batch_without_tokens() -> None:
    """A KL of 0 over no token would read as one below the target."""
    term = KLTerm(0.1, "k1", place="reward", target=0.01, horizon=4)
    learner, _ = make_learner(objective=Objective(kl=term))
    reference: Any = random_policy(seed=1).double()
    learner.reference = Reference(reference, torch.device("cpu"), ReferenceSettings())
    observed = ragged_groups()[0].rollouts[4]
    learner.learn([RolloutGroup(observed.prompt, [observed])])
    assert learner.beta == 0.1
    learner.learn(ragged_groups())
    assert learner.beta != 0.1


# ---- numbers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["none", "token_truncate"])
def test_a_token_without_a_sampled_logprob_is_refused_with_its_prompt_and_sample(mode: Any) -> None:
    groups = ragged_groups()
    groups[0].rollouts[3].completion.logprobs_T[3:] = NAN  # token 3 is not trained on
    learner, steps = make_learner(objective=Objective(correction=Correction(mode)))
    with pytest.raises(
        ValueError, match=r"Sample \(4,\) of prompt 'a', visit 0, has no sampled log-prob \(NaN\) for token 4"
    ):
        learner.learn(groups)
    assert steps.gradients == []
    groups[0].rollouts[3].completion.logprobs_T[4] = -0.5
    groups[0].rollouts[3].completion.logprobs_T[2] = NAN  # not trained on
    learner.learn(groups)


def test_rewards_that_bfloat16_cannot_tell_apart_teach_under_a_default_of_bfloat16() -> None:
    prompt = Prompt("a", (3, 4), "")
    groups = [RolloutGroup(prompt, [member(prompt, s, [0] * 3, [True] * 3, 1.0 + 0.001 * s) for s in range(4)])]
    gradients = []
    for dtype in (torch.float32, torch.bfloat16):
        learner, steps = make_learner(double=False)
        torch.set_default_dtype(dtype)  # as Lightning does for bf16-true
        try:
            learner.learn(groups)
        finally:
            torch.set_default_dtype(torch.float32)
        gradients.append(steps.gradients[0])
    assert gradients[0].norm() > 1e-3
    assert float((gradients[1] - gradients[0]).norm() / gradients[0].norm()) < 1e-5


def test_rollouts_are_cut_and_laid_out_once_for_all_that_is_measured_of_them_and_all_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The reference, log-probs before the first step, entropies before each, and two gradients; then another batch."""
    cut = list[int]()

    def counted(rollouts: Sequence[Rollout], *rest: Any, **options: Any) -> list[PackedRow]:
        cut.append(len(rollouts))
        return make_micro_batches(rollouts, *rest, **options)

    monkeypatch.setattr("lit_grpo.update.passes.make_micro_batches", counted)
    objective = Objective("grpo", kl=KLTerm(0.3), top_entropy_quantile=0.5)
    learner, steps = make_learner(objective=objective, num_iterations=2)
    learner.reference = Reference(make_learner()[0].policy, torch.device("cpu"), ReferenceSettings())
    for _ in range(2):
        learner.learn(random_groups(random_policy(), [[1.0, 0.0, 0.5], [0.0, 1.0]]))
    assert cut == [5, 5] and len(steps.gradients) == 4
