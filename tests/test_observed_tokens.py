"""Tokens that the policy only reads: no gradient at all, and no place in any number."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import random_policy
from hand_made import make_rollout
from test_learner import make_learner

from lit_grpo.metrics import rollout_metrics
from lit_grpo.policy.architecture.decoder import decoder_of
from lit_grpo.ranks import Ranks
from lit_grpo.types import OBSERVED, Completion, Prompt, Rollout, RolloutGroup
from lit_grpo.update.advantages.estimator import GroupRewards
from lit_grpo.update.logprobs.reference import Reference, ReferenceSettings
from lit_grpo.update.objective.kl import KLTerm
from lit_grpo.update.objective.objective import EntropyBonus, Objective

PROMPTS = (Prompt("a", (3, 4, 5), ""), Prompt("b", (7,), ""))
LENGTHS = ((4, 6, 3), (5, 2, 7))
"""Of turns by completion and prompt: the n-th has n + 1 turns of about equal length."""
OBSERVED_ID = 11
UNCLIPPED = Objective(epsilon=0.999, epsilon_high=1e6)
ALL = Objective(kl=KLTerm(0.1), entropy=EntropyBonus(0.05))


def groups_of(observed: int) -> list[RolloutGroup]:
    """Groups of completions that observe so many tokens before each turn but the first, and one that begins with some.

    What is sampled, with its log-probs, is the same for every number.
    """
    groups = []
    for prompt, lengths in zip(PROMPTS, LENGTHS, strict=True):
        rollouts = []
        for sample, length in enumerate(lengths):
            generator = torch.Generator().manual_seed(100 * len(groups) + sample)
            sampled = torch.randint(12, 30, (length,), generator=generator).tolist()
            logprobs = (-3.4 + 0.3 * torch.randn(length, generator=generator)).tolist()
            ends = {length * (turn + 1) // (sample + 1) for turn in range(sample)} | ({0} if sample == 1 else set())
            tokens, values, versions = [], [], []
            for place in range(length):
                if place in ends:
                    tokens += [OBSERVED_ID] * observed
                    values += [0.0] * observed
                    versions += [OBSERVED] * observed
                tokens.append(sampled[place])
                values.append(logprobs[place])
                versions.append(0)
            reward = (1.0, 0.0, 0.25)[sample]
            request = make_rollout(prompt.token_ids, sampled, reward, None, prompt.prompt_id, sample).completion.request
            completion = Completion(request, tokens, values, versions, "stop")
            rollouts.append(Rollout(prompt, completion, {"exact": reward}, reward))
        groups.append(RolloutGroup(prompt, rollouts))
    return groups


def blind_policy(seed: int = 0) -> Any:
    """A policy whose logits are the same after whatever it has read, so that what it reads can be left out."""
    policy: Any = random_policy(seed=seed, tie_word_embeddings=False)
    with torch.no_grad():
        embedded = policy.get_input_embeddings().weight
        embedded.copy_(embedded[5].expand_as(embedded).clone())  # that of padding is 0
    return policy.double()


@pytest.mark.parametrize("shares_prefix", [True, False])
@pytest.mark.parametrize("name", ["dapo", "grpo", "gspo"])
def test_observed_tokens_are_in_no_number(name: str, shares_prefix: bool) -> None:
    """Loss, gradient, denominators, KL, entropy, clipping and lengths are what they are without them."""
    found = []
    for observed in (0, 5):
        groups = groups_of(observed)
        objective = Objective(name, kl=KLTerm(0.1), entropy=EntropyBonus(0.05))
        learner, steps = make_learner(
            policy=blind_policy(), objective=objective, shares_prefix=shares_prefix, max_tokens=64, num_minibatches=2
        )
        learner.reference = Reference(blind_policy(seed=1), torch.device("cpu"), ReferenceSettings())
        logs = learner.learn(groups)
        logs |= rollout_metrics(groups, GroupRewards.of(groups, ["exact"]), 0, Ranks())
        gradients = torch.stack(steps.gradients).split([each.numel() for each in learner.policy.parameters()], dim=1)
        of_head = [name for name, _ in learner.policy.named_parameters()].index("lm_head.weight")
        found.append((logs, gradients[of_head]))
        assert sum(rollout.completion.num_observed for group in groups for rollout in group.rollouts) == 8 * observed
    (without, gradient), (with_observed, other) = found
    torch.testing.assert_close(other, gradient, rtol=1e-9, atol=1e-15)
    assert float(gradient.norm()) > 1e-4 and without["kl"] > 0 and without["entropy"] > 0
    assert without["update/tokens"] == sum(map(sum, LENGTHS)) and without["completions/max_length"] == 7
    del without["grad_norm"]  # that of embeddings is among it, which observed tokens have too
    for key, value in without.items():
        assert with_observed[key] == pytest.approx(value, rel=1e-9, nan_ok=True), key


@pytest.mark.parametrize("objective", [UNCLIPPED, ALL, replace(UNCLIPPED, loss="grpo")])
def test_the_gradient_of_what_predicts_an_observed_token_is_exactly_0(objective: Objective) -> None:
    """By the last hidden states, each of which is used for the next token alone."""
    (group, _) = groups_of(5)
    learner, _ = make_learner(objective=objective, shares_prefix=False, max_tokens=64)
    learner.reference = Reference(blind_policy(seed=1), torch.device("cpu"), ReferenceSettings())
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(_: Any, __: Any, inputs: dict[str, Any], output: Any) -> None:
        if output.last_hidden_state.requires_grad:
            output.last_hidden_state.retain_grad()
            seen.append((inputs["input_ids"], output.last_hidden_state))

    handle = decoder_of(learner.policy).register_forward_hook(keep, with_kwargs=True)
    learner.learn([group])
    handle.remove()
    num_observed = num_trained = 0
    for ids_BT, states_BTH in seen:
        assert states_BTH.grad is not None
        has_gradient_BT = states_BTH.grad.norm(dim=-1) > 0
        before_observed_BT = ids_BT[:, 1:] == OBSERVED_ID
        assert not has_gradient_BT[:, :-1][before_observed_BT].any()
        num_observed += int(before_observed_BT.sum())
        num_trained += int(has_gradient_BT.sum())
    assert num_observed == sum(rollout.completion.num_observed for rollout in group.rollouts) == 20
    assert num_trained == sum(LENGTHS[0])
