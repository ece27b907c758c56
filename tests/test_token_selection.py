"""Learning from part of the tokens, over a run: against a float64 computation, however a step is split."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from conftest import random_policy
from hand_made import Batches, StepRecorder, fit, learning_batch, make_module, make_trainer, random_groups, weights_of
from test_learner import make_learner, member

from lit_grpo.methods import make_plugins
from lit_grpo.methods.d3s import D3S, TokenShare
from lit_grpo.methods.members import MaxEntropy, RandomCompletions, mean_entropies
from lit_grpo.module import GRPOModule
from lit_grpo.plugins import RunFacts
from lit_grpo.policy.loading import load_tokenizer
from lit_grpo.policy.spec import PolicySpec
from lit_grpo.rollout.loop import RolloutLoop
from lit_grpo.rollout.session import RolloutSession
from lit_grpo.rollout.slots.generator import SlotGenerator
from lit_grpo.types import OBSERVED, Prompt, Rollout, RolloutGroup, SamplingParams
from lit_grpo.update.batches.microbatch import least_tokens
from lit_grpo.update.objective.objective import EntropyBonus, Objective

SCHEDULE = D3S(4, tokens=0.9, first_keep=2, first_tokens=0.2)
LOW, HIGH = 0.2, 0.28


def groups_of_eleven(flat: bool = False) -> list[RolloutGroup]:
    """Groups of 4, 4 and 3, of which the second may have equal rewards; some tokens are not trained on."""
    rng = np.random.default_rng(5)
    rewards = [*rng.random((2, 4)).tolist(), rng.random(3).tolist()]
    rewards[1] = [0.5] * 4 if flat else rewards[1]
    groups = []
    for number, values in enumerate(rewards):
        prompt = Prompt(f"p{number}", tuple(range(3, 5 + number)), "")
        members = []
        for sample, reward in enumerate(values):
            length = int(rng.integers(2, 9))
            versions = [OBSERVED if sample == 1 and place == 1 else 0 for place in range(length)]
            trained = [not (sample == 2 and place == 0) for place in range(length)]
            members.append(member(prompt, sample, versions, trained, reward))
        groups.append(RolloutGroup(prompt, members))
    return groups


def expected_advantages(groups: Sequence[RolloutGroup], size: int) -> list[tuple[Rollout, float]]:
    """Those of so many rollouts whose variance is the largest of all subsets; normalized over whole groups."""
    scored = []
    for group in groups:
        rewards = [rollout.reward for rollout in group.rollouts]
        mean, deviation = statistics.fmean(rewards), statistics.stdev(rewards)
        scored += [(rollout, (rollout.reward - mean) / (deviation + 1e-4)) for rollout in group.rollouts]
    return list(max(itertools.combinations(scored, size), key=lambda some: statistics.pvariance([a for _, a in some])))


def expected_gradient(chosen: Sequence[tuple[Rollout, float]], share: float) -> torch.Tensor:
    """DAPO's loss (eq. 12) of the share of tokens whose |A| x H is largest, over the number of all their tokens."""
    policy: Any = random_policy().double()
    losses, scores = [], []
    for rollout, advantage in chosen:
        prompt, completion = rollout.prompt.token_ids, rollout.completion
        input_ids = torch.cat([torch.tensor(prompt), completion.token_ids_T])[None]
        logprobs_TV = policy(input_ids=input_ids, use_cache=False).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        for place in completion.trained_T.nonzero().flatten().tolist():
            probs_V = logprobs_TV[place].detach().exp()
            scores.append(abs(advantage) * -sum(float(p) * math.log(float(p)) for p in probs_V))
            gap = logprobs_TV[place, completion.token_ids_T[place]] - float(completion.logprobs_T[place])
            ratio = gap.exp()
            losses.append(-torch.minimum(ratio * advantage, ratio.clamp(1 - LOW, 1 + HIGH) * advantage))
    threshold = np.quantile(scores, 1 - share)
    kept = torch.tensor([score >= threshold for score in scores])
    if min(scores) > 0:
        assert abs(int(kept.sum()) - share * len(scores)) <= 1
    (torch.stack(losses) * kept).sum().div(len(losses)).backward()
    return torch.cat([parameter.grad.flatten() for parameter in policy.parameters()])


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.parametrize("shares_prefix", [True, False])
def test_a_step_has_the_gradient_of_the_chosen_tokens_however_it_is_split(shares_prefix: bool) -> None:
    groups = groups_of_eleven()
    expected = expected_gradient(expected_advantages(groups, 6), 0.3)
    assert error(expected_gradient(expected_advantages(groups, 6), 1.0), expected) > 0.1
    least = least_tokens([rollout for group in groups for rollout in group.rollouts], shares_prefix)
    for max_tokens in (least, least + 5, 10_000):
        learner, steps = make_learner(
            objective=Objective(epsilon=LOW, epsilon_high=HIGH),
            plugins=[D3S(2, tokens=0.3)],
            max_tokens_per_micro_batch=max_tokens,
            shares_prefix=shares_prefix,
        )
        learner.learn(groups)
        assert error(steps.gradients[0], expected) < 1e-6, max_tokens


def test_rollouts_are_chosen_by_advantages_in_double_precision() -> None:
    (group, *_), plugin = groups_of_eleven(), D3S(2)
    for rollout, advantage in zip(group.rollouts, (0.0, 1.0 + 1e-9, 1.0, 0.5), strict=True):
        rollout.advantage = advantage
    plugin.on_batch(learning_batch([group]).of(plugin))
    assert [math.isnan(rollout.advantage) for rollout in group.rollouts] == [False, False, True, True]


def test_rollouts_and_tokens_of_every_update_are_those_of_the_schedule() -> None:
    """Two updates on each of three batches: rollouts by what was made before the batch, tokens before the update."""
    groups = groups_of_eleven()
    learner, steps = make_learner(
        objective=Objective(epsilon=LOW, epsilon_high=HIGH), plugins=[SCHEDULE], num_iterations=2, total_updates=6
    )
    for _ in range(3):
        learner.learn(groups)
    sizes = []
    for version, gradient in enumerate(steps.gradients):
        before, now = (version - version % 2) / 6, version / 6
        sizes.append(min(11, math.floor(3 * ((1 - before) * 2 + before * 4) + 0.5)))
        share = (1 - now) * 0.2 + now * 0.9
        assert error(gradient, expected_gradient(expected_advantages(groups, sizes[-1]), share)) < 1e-6, version
    assert sizes == [6, 6, 8, 8, 10, 10]


def test_tokens_without_an_advantage_are_part_of_the_share_and_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rollouts; those of the second group have advantage 0."""
    groups = groups_of_eleven(flat=True)
    learner, steps = make_learner(objective=Objective(epsilon=LOW, epsilon_high=HIGH), plugins=[TokenShare(0.4)])
    measured: list[Rollout] = []
    measure = learner.passes.measure

    def watched(rollouts: Sequence[Rollout], *what: Any, **more: Any) -> Any:
        measured.extend(rollouts)
        return measure(rollouts, *what, **more)

    monkeypatch.setattr(learner.passes, "measure", watched)
    learner.learn(groups)
    expected = expected_gradient(expected_advantages(groups, 11), 0.4)
    assert error(steps.gradients[0], expected) < 1e-6
    assert [r.completion.request.key for r in measured] == [
        r.completion.request.key for group in (groups[0], groups[2]) for r in group.rollouts
    ]


def test_an_entropy_bonus_is_of_the_tokens_that_are_trained_on() -> None:
    """The mean over these alone, and the step's entropy that a target is compared with likewise."""
    groups = groups_of_eleven()
    chosen = expected_advantages(groups, 6)
    plain = expected_gradient(chosen, 0.5)
    policy: Any = random_policy().double()
    entropies, scores = [], []
    for rollout, advantage in chosen:
        prompt, completion = rollout.prompt.token_ids, rollout.completion
        input_ids = torch.cat([torch.tensor(prompt), completion.token_ids_T])[None]
        logprobs_TV = policy(input_ids=input_ids, use_cache=False).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        entropy_T = -(logprobs_TV.exp() * logprobs_TV).sum(-1)[completion.trained_T]
        entropies.append(entropy_T)
        scores.append(abs(advantage) * entropy_T.detach())
    score_N = torch.cat(scores)
    kept_N = score_N >= torch.quantile(score_N, 0.5)
    (-0.1 * torch.cat(entropies)[kept_N].mean()).backward()
    bonus = torch.cat([parameter.grad.flatten() for parameter in policy.parameters()])
    objective = Objective(epsilon=LOW, epsilon_high=HIGH, entropy=EntropyBonus(0.1))
    selection = D3S(2, tokens=0.5)
    learner, steps = make_learner(objective=objective, plugins=[selection], max_tokens_per_micro_batch=20)
    learner.learn(groups)
    assert error(steps.gradients[0], plain + bonus) < 1e-6


# ---- by entropy ----------------------------------------------------------------------------------------


def test_entropies_that_slots_tell_are_those_that_the_learner_measures(policy_folder: Path) -> None:
    learner, steps = make_learner(double=False, plugins=[MaxEntropy(3)])
    generator = SlotGenerator(4)
    assert "entropies" in generator.abilities
    generator.start(PolicySpec(learner.policy, load_tokenizer(str(policy_folder))))
    generator.load_weights(learner.policy.named_parameters(), 1)
    prompts = [Prompt("a", (2, 3, 4), ""), Prompt("b", (9,), "")]
    groups, _ = RolloutLoop(generator).collect(prompts, 6, SamplingParams(max_tokens=12), seed=0)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    for number, rollout in enumerate(rollouts):
        rollout.reward = float(number % 3)
        rollout.rewards = {"exact": rollout.reward}
    told = mean_entropies(rollouts, {})
    learner.learn(groups)
    by_told = [math.isnan(rollout.advantage) for rollout in rollouts]
    for rollout in rollouts:
        rollout.completion.entropy = math.nan
    measured = mean_entropies(rollouts, learner.passes.by_completion(rollouts, "entropy"))
    torch.testing.assert_close(told, measured, rtol=1e-5, atol=1e-6)
    assert told.std() > 1e-3
    learner.learn(groups)
    assert [math.isnan(rollout.advantage) for rollout in rollouts] == by_told
    for group in groups:
        mine = [mean_entropies([r], learner.passes.by_completion([r], "entropy")).item() for r in group.rollouts]
        kept = [entropy for entropy, r in zip(mine, group.rollouts, strict=True) if not math.isnan(r.advantage)]
        assert sorted(kept) == sorted(mine)[-3:]
    assert torch.equal(steps.gradients[0], steps.gradients[1]) and steps.gradients[0].norm() > 1e-3


def test_a_generator_that_tells_no_entropies_is_named_before_training(policy_folder: Path) -> None:
    class Mute(SlotGenerator):
        abilities = frozenset()

    groups = random_groups(random_policy(), [[1.0, 0.0, 0.3, 0.2]])
    said = "MaxEntropy goes by entropies, and Mute tells none: they are measured, for which every completion goes"
    with pytest.warns(match=said):
        module = make_module(policy_folder, generator=Mute(4), plugins=[MaxEntropy(2)])
    fit(module, groups)
    assert sum(not math.isnan(rollout.advantage) for rollout in groups[0].rollouts) == 2


# ---- the end of a run ----------------------------------------------------------------------------------

REWARDS = [[1.0, 0.0, 0.3, 0.2], [0.0, 1.0, 1.0, 0.5]]


class Endless(Batches):
    """Without a length."""

    __len__ = None  # pyrefly: ignore[bad-override]


@pytest.mark.parametrize(
    ("options", "updates"),
    [({"max_epochs": 2}, 2 * 3 * 2), ({"max_epochs": 2, "max_steps": 5}, 5), ({"max_epochs": -1, "max_steps": 4}, 4)],
)
def test_a_run_knows_how_many_updates_it_has(policy_folder: Path, options: dict[str, Any], updates: int) -> None:
    groups = random_groups(random_policy(), REWARDS)
    module = make_module(policy_folder, plugins=[SCHEDULE], num_iterations=2)
    make_trainer(**options).fit(module, train_dataloaders=Batches([groups] * 3))
    assert module.settings.total_updates == updates
    for module.policy_version in (0, 1, updates):
        assert module.learner.progress == module.policy_version / updates


def test_a_run_of_no_update_is_let_through(policy_folder: Path) -> None:
    module = make_module(policy_folder, plugins=[SCHEDULE])
    groups = random_groups(random_policy(), REWARDS)
    make_trainer(max_steps=0, max_epochs=-1).fit(module, train_dataloaders=Batches([groups]))
    assert module.policy_version == 0


@pytest.mark.parametrize(("loader", "epochs"), [(Batches, -1), (Endless, 3)])
def test_a_schedule_of_a_run_without_end_is_refused(policy_folder: Path, loader: Any, epochs: int) -> None:
    groups = random_groups(random_policy(), REWARDS)
    module = make_module(policy_folder, plugins=[SCHEDULE])
    recorder = StepRecorder()
    with pytest.raises(
        ValueError,
        match=r"rollout\.plugins D3S: it begins with first_keep 2 and first_tokens 0\.2 and m.* set trainer\.max_steps",
    ):
        make_trainer(recorder, max_epochs=epochs).fit(module, train_dataloaders=loader([groups] * 3))
    assert recorder.gradients == []
    if epochs == -1:
        assert not hasattr(module, "policy")  # before it is loaded


def test_two_choices_of_tokens_are_refused(policy_folder: Path) -> None:
    both: Any = {"objective": Objective(top_entropy_quantile=0.5), "plugins": [TokenShare(first_tokens=0.5)]}
    said = r"top_entropy_quantile 0\.5 needs all tokens .* TokenShare chooses a share .* first_tokens 0\.5; remove one"
    with pytest.raises(ValueError, match=said):
        make_module(policy_folder, **both)
    with pytest.raises(ValueError, match=said):
        make_learner(**both)
    facts = RunFacts(num_prompts=2, num_generations=4, max_tokens=12, updates_per_batch=1)
    parts = make_module(policy_folder, objective=both["objective"]).settings.parts()
    with pytest.raises(ValueError, match=r"quantile 0\.5 needs .*plugins d3s_tokens chooses a share of them"):
        RolloutSession(make_plugins(["d3s_tokens:tokens=0.5"])).check(facts, parts)
    make_module(policy_folder, **(both | {"plugins": [RandomCompletions(2)]}))


class Save(pl.Callback):
    """Saves a checkpoint after the second update."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any, **__: Any) -> None:
        assert isinstance(pl_module, GRPOModule)
        if pl_module.policy_version == 2:
            trainer.save_checkpoint(self.path)


def test_a_resumed_run_is_as_far_in_its_schedule(policy_folder: Path, tmp_path: Path) -> None:
    groups = [random_groups(random_policy(), REWARDS, seed) for seed in range(4)]
    options: dict[str, Any] = {"plugins": [SCHEDULE], "optimizer": lambda p: torch.optim.SGD(p, lr=0.3)}

    def run(batches: Sequence[Any], *callbacks: pl.Callback, **resume: Any) -> GRPOModule:
        module = make_module(policy_folder, **options)
        trainer = make_trainer(*callbacks, max_steps=4, max_epochs=-1)
        trainer.fit(module, train_dataloaders=Batches(batches), **resume)
        return module

    whole = run(groups, Save(tmp_path / "half.ckpt"))
    resumed = run(groups[2:], ckpt_path=tmp_path / "half.ckpt", weights_only=False)
    assert resumed.policy_version == whole.policy_version == 4
    assert torch.equal(weights_of(resumed), weights_of(whole))
