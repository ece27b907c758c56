"""Plug-ins that add to the loss, in pairs: the gradient is that of the objective and of a mean for each of them.

The references are plain forwards of one sequence after another in float64, with the formulas of the plug-ins' files.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import random_policy, table_rows
from test_learner import make_learner
from test_mixture import mixed_groups
from test_router_loss import gradients
from test_router_loss import policy as policy_with_routers
from test_sft import data_of, sft
from test_teachers import logits_of, rollouts_of, teacher_of
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from lit_grpo.data import PromptDataModule
from lit_grpo.methods.distill import Distill
from lit_grpo.methods.echo import Echo
from lit_grpo.methods.entropy_target import EntropyTarget
from lit_grpo.methods.router_loss import RouterLoss
from lit_grpo.plugins import Plugin, fresh, restricted
from lit_grpo.ranks import Ranks
from lit_grpo.types import OBSERVED, Rollout
from lit_grpo.update.plugin import TrainingRun

pytestmark = pytest.mark.usefixtures("exact_norms")
NOBODYS = ("9=", "b"), ("8+1", "c + d1"), ("9=", "0123")
"""Prompts, which no group has, and answers."""


@dataclass
class Place:
    """What references are computed from: the groups' rollouts, the examples, the policy and the teacher."""

    rollouts: list[Rollout]
    data: PromptDataModule
    policy: Any
    teacher: Any
    through: list[Rollout]

    @property
    def learned(self) -> list[Rollout]:
        return [each for each in self.rollouts if each.kept and each.completion.num_trained]

    @property
    def num_tokens(self) -> int:
        return sum(each.completion.num_trained for each in self.learned)


def policy_for(names: Sequence[str]) -> Any:
    """A policy with routers only if they are trained: these compute in float32 whatever the others do."""
    return policy_with_routers() if "router_loss" in names else random_policy()


def teacher_for(names: Sequence[str]) -> Any:
    generator, model = torch.Generator().manual_seed(4), policy_for(names).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model


def logprobs_of(model: Any, rollout: Rollout) -> torch.Tensor:
    return logits_of(model, rollout).log_softmax(-1)


def chosen(model: Any, rollout: Rollout) -> torch.Tensor:
    return logprobs_of(model, rollout).gather(-1, rollout.completion.token_ids_T[:, None]).squeeze(-1)


def of_sft(place: Place, weight: float) -> torch.Tensor:
    total, number = torch.zeros(()), 0
    for example in place.data.answered("train", "solution"):
        begin, learned_T = len(example.prompt_ids), torch.from_numpy(example.learned_T)
        ids_T = torch.tensor([*example.prompt_ids, *example.answer_ids_T.tolist()])
        logits_TV = place.policy(input_ids=ids_T[None]).logits[0, begin - 1 : -1]
        total = total + logits_TV.log_softmax(-1).gather(-1, ids_T[begin:, None]).squeeze(-1)[learned_T].sum()
        number += int(learned_T.sum())
    return -weight * total / number


def of_echo(place: Place, weight: float, datasets: Sequence[str]) -> torch.Tensor:
    own = [each for each in place.rollouts if each.kept and each.prompt.dataset in datasets]
    logprobs = [chosen(place.policy, each)[each.completion.versions_T == OBSERVED] for each in own]
    return -weight * torch.cat(logprobs).mean()


def of_distill(place: Place, weight: float, top_k: int, beta: float, datasets: Sequence[str]) -> torch.Tensor:
    """Of the tokens of its data sets, divided as the objective's loss is: by all tokens."""
    total = torch.zeros(())
    for rollout in (each for each in place.learned if each.prompt.dataset in datasets):
        own, its = (
            logprobs_of(model, rollout)[rollout.completion.trained_T] for model in (place.policy, place.teacher)
        )
        ids = its.topk(top_k).indices
        p, q = (
            torch.cat([each.gather(-1, ids).exp(), 1 - each.gather(-1, ids).exp().sum(-1, keepdim=True)], -1)
            for each in (own, its.detach())
        )
        m = beta * q + (1 - beta) * p
        total = total + (beta * (q * (q / m).log()).sum() if beta < 1 else 0.0)
        total = total + ((1 - beta) * (p * (p / m).log()).sum() if beta < 1 else (p * (p / q).log()).sum())
    return weight * total / place.num_tokens


def of_entropy(place: Place, coefficient: float) -> torch.Tensor:
    logprobs = [logprobs_of(place.policy, each)[each.completion.trained_T] for each in place.learned]
    return coefficient * sum(((each.exp() * each).sum() for each in logprobs), torch.zeros(())) / place.num_tokens


def of_routers(place: Place, coefficient: float) -> torch.Tensor:
    """Of all sequences that go through the policy, each prompt once."""
    layers: list[list[torch.Tensor]] = [[], []]
    seen: set[tuple[int, ...]] = set()
    for rollout in place.through:
        prompt = rollout.prompt.token_ids
        ids_T = torch.cat([torch.tensor(prompt), rollout.completion.token_ids_T[:-1]])
        logits = place.policy(input_ids=ids_T[None], output_router_logits=True).router_logits
        for layer, logits_TE in zip(layers, logits, strict=True):
            layer.append(logits_TE[len(prompt) if prompt in seen else 0 :])
        seen.add(prompt)
    balance: Any = load_balancing_loss_func
    return coefficient * balance(tuple(torch.cat(layer) for layer in layers), 6, 2)


BOTH = ("sums", "puzzles")
Reference = Callable[[Place], torch.Tensor]


def entropy_target() -> EntropyTarget:
    plugin = fresh(EntropyTarget(target=1.0, coefficient=0.3))
    plugin.last_entropy = 0.0
    return plugin


LOSSES: dict[str, tuple[Callable[[PromptDataModule], Plugin], Reference]] = {
    "sft": (lambda data: sft(data, weight=0.5, per_update=3), lambda place: of_sft(place, 0.5)),
    "echo": (lambda _: fresh(Echo(0.25)), lambda place: of_echo(place, 0.25, BOTH)),
    "distill": (lambda _: fresh(Distill(0.7, 3, 0.4)), lambda place: of_distill(place, 0.7, 3, 0.4, BOTH)),
    "entropy_target": (lambda _: entropy_target(), lambda place: of_entropy(place, 0.3)),
    "router_loss": (lambda _: fresh(RouterLoss(0.3)), lambda place: of_routers(place, 0.3)),
    "sft (sums)": (
        lambda data: restricted("sft", sft(data, weight=0.5, per_update=3), ["sums"]),
        lambda place: of_sft(place, 0.5),
    ),
    "echo (sums)": (
        lambda _: fresh(restricted("echo", Echo(0.25), ["sums"])),
        lambda place: of_echo(place, 0.25, ["sums"]),
    ),
    "echo (puzzles)": (
        lambda _: fresh(restricted("echo", Echo(0.75), ["puzzles"])),
        lambda place: of_echo(place, 0.75, ["puzzles"]),
    ),
    "distill (puzzles)": (
        lambda _: fresh(restricted("distill", Distill(0.7, 3), ["puzzles"])),
        lambda place: of_distill(place, 0.7, 3, 1.0, ["puzzles"]),
    ),
}


def excludes(one: str, other: str) -> bool:
    """Whether two decide the same for the same rows, which is refused."""
    kinds, limited = {one.partition(" ")[0], other.partition(" ")[0]}, "(" in one and "(" in other
    return len(kinds) == 1 and not (limited and kinds == {"echo"})


PAIRS = [" and ".join(pair) for pair in itertools.combinations(LOSSES, 2) if not excludes(*pair)]
QUICK = ["sft and echo", "echo (sums) and echo (puzzles)", "sft and distill", "echo and distill (puzzles)"]
CHANGES: dict[str, dict[str, Any]] = {"one row": {}, "micro-batches": {"max_tokens_per_micro_batch": 25}}


def data_for(folder: Path) -> PromptDataModule:
    return data_of(folder, *({"prompt": prompt, "solution": answer} for prompt, answer in NOBODYS))


def learn(
    groups: Any, names: Sequence[str], plugins: Sequence[Plugin], **changes: Any
) -> tuple[torch.Tensor, dict[str, float], list[Rollout]]:
    """The gradient of an update, what it logs, and the rollouts that went through the policy."""
    learner, steps = make_learner(policy=policy_for(names), plugins=plugins, **changes)
    for plugin in plugins:
        teacher = teacher_of(teacher_for(names))
        plugin.on_train_start(TrainingRun(learner.policy, None, 0, 1, Ranks(), teacher=teacher))
    through, send = list[Rollout](), learner.passes.gradient

    def watched(parts: Any, *others: Any) -> None:
        through.extend(parts[-1].rollouts)
        send(parts, *others)

    learner.passes.gradient = watched  # pyrefly: ignore[bad-assignment]
    logs = learner.learn(groups)
    return steps.gradients[0], logs, through


@pytest.mark.parametrize(
    ("names", "cut"), table_rows(itertools.product(PAIRS, CHANGES), [*itertools.product(QUICK, ["micro-batches"])])
)
def test_two_that_add_to_the_loss_add_a_mean_each(names: str, cut: str, policy_folder: Path) -> None:
    pair = names.split(" and ")
    data, groups = data_for(policy_folder), mixed_groups()
    alone, _, _ = learn(mixed_groups(), pair, [], **CHANGES[cut])
    found, logs, through = learn(groups, pair, [LOSSES[name][0](data) for name in pair], **CHANGES[cut])
    place = Place(rollouts_of(groups), data, policy_for(pair).double(), teacher_for(pair), through)
    losses, expected = list[float](), list[torch.Tensor]()
    for name in pair:
        place.policy.zero_grad()
        loss = LOSSES[name][1](place)
        loss.backward()
        losses.append(loss.item() if name.startswith(("sft", "echo")) else 0.0)
        expected.append(gradients(place.policy))
    one, other = expected
    smaller = min(float(one.norm()), float(other.norm()))
    of_error = float(found.norm()) if "router_loss" in pair else smaller
    assert float((found - alone - one - other).norm()) < 1e-6 * of_error and smaller > 1e-3
    assert logs.get("ce/loss", 0.0) == pytest.approx(sum(losses), rel=1e-6)
