"""The backward pass in chunks: the gradient of the whole completion, in mean over draws of chunks, and its memory."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from conftest import random_policy, table_rows
from hand_made import make_rollout, step_of, watch_rows
from test_learner import make_learner, member, ragged_groups
from test_shared_prefix import FAMILIES, QUICK, family

from lit_grpo.methods import make_plugins
from lit_grpo.methods.nat import Uniform
from lit_grpo.methods.pods import MaxVariance
from lit_grpo.methods.seco import SeCO, SpaCO
from lit_grpo.plugins import RunFacts
from lit_grpo.types import Completion, Prompt, Rollout, RolloutGroup
from lit_grpo.update.objective.corrections import Correction
from lit_grpo.update.objective.objective import Objective
from lit_grpo.update.plugin import Chunk


def long_groups() -> list[RolloutGroup]:
    """Two prompts, completions from 3 to 23 tokens; every other reward is 1."""
    groups = []
    for number, lengths in enumerate([(23, 3, 9, 17), (12, 20)]):
        prompt = Prompt(f"p{number}", tuple(range(3, 8 + number)), "")
        groups.append(
            RolloutGroup(prompt, [of_length(prompt, sample, length) for sample, length in enumerate(lengths)])
        )
    return groups


def of_length(prompt: Prompt, sample: int, length: int) -> Rollout:
    return member(prompt, sample, [0] * length, [True] * length, float(sample % 2))


def gradient(groups: Any = None, **changes: Any) -> torch.Tensor:
    learner, steps = make_learner(**changes)
    learner.learn(groups or long_groups())
    return steps.gradients[0]


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    ("name", "chunk"),
    table_rows([(name, chunk) for name in ("dapo", "grpo") for chunk in (2, 5, 11, 22)], [("dapo", 5), ("grpo", 11)]),
)
def test_the_gradient_is_that_of_the_whole_however_small_chunks_are(name: str, chunk: int) -> None:
    objective = Objective(name)
    whole = gradient(objective=objective)
    assert error(gradient(objective=objective, plugins=[SeCO(chunk)], max_tokens_per_micro_batch=40), whole) < 1e-6
    single = {"objective": objective, "double": False}
    assert error(gradient(plugins=[SeCO(chunk)], **single), gradient(**single)) < 2e-6


@pytest.mark.parametrize("name", table_rows(FAMILIES, QUICK))
def test_and_with_every_kind_of_attention(name: str) -> None:
    models = [family(name) for _ in range(2)]
    for model in models:
        model.set_experts_implementation("eager")  # others know no float64
    whole = gradient(policy=models[0])
    assert error(gradient(policy=models[1], plugins=[SeCO(4)]), whole) < 2e-6


@pytest.mark.parametrize("hybrid", table_rows([False, True], [False]))
@pytest.mark.parametrize("checkpointing", [True, "selective"])
def test_and_with_gradient_checkpointing(checkpointing: Any, hybrid: bool) -> None:
    from lit_grpo.update.logprobs.checkpointing import checkpoint_layers

    policy: Any = random_policy(hybrid=hybrid)
    checkpoint_layers(policy, checkpointing)
    chunked = gradient(policy=policy, plugins=[SeCO(4)], gradient_checkpointing=checkpointing)
    whole = gradient(policy=random_policy(hybrid=hybrid))
    assert error(chunked, whole) < (1e-5 if hybrid else 1e-6)  # a gated DeltaNet computes in single precision


def test_and_with_observed_tokens_selections_and_old_log_probs() -> None:
    changes: dict[str, Any] = {
        "objective": Objective(correction=Correction("token_truncate")),
        "num_iterations": 2,
    }
    whole = gradient(ragged_groups(), plugins=[MaxVariance(2)], **changes)
    assert error(gradient(ragged_groups(), plugins=[MaxVariance(2), SeCO(3)], **changes), whole) < 1e-6


def test_and_with_a_random_part_of_the_tokens() -> None:
    whole = gradient(plugins=[Uniform(0.5)])
    assert error(gradient(plugins=[Uniform(0.5), SeCO(4)]), whole) < 1e-6


def test_a_completion_may_be_longer_than_a_micro_batch() -> None:
    with pytest.raises(ValueError, match="max_tokens_per_micro_batch is 9"):
        gradient(max_tokens_per_micro_batch=9)
    assert error(gradient(max_tokens_per_micro_batch=9, plugins=[SeCO(8)]), gradient()) < 1e-6


def test_a_chunk_that_is_large_enough_is_plain_grpo_bit_for_bit() -> None:
    assert torch.equal(gradient(plugins=[SeCO(23)]), gradient())
    assert torch.equal(gradient(plugins=[SpaCO(5, share=1.0)]), gradient(plugins=[SeCO(5)]))


def one_long_and_one_short() -> list[RolloutGroup]:
    prompt = Prompt("p", (3, 4, 5), "")
    return [RolloutGroup(prompt, [of_length(prompt, sample, length) for sample, length in enumerate((14, 3))])]


@dataclass
class Drawn(SpaCO):
    """The chunks of one draw, by their numbers, each of which counts ``factor``."""

    drawn: tuple[int, ...] = ()
    factor: float = 1.0

    def weight(self, completion: Completion, version: int, number: int) -> float:
        return self.factor if number in self.drawn else 0.0


def mean_over_draws(share: float, factor: float) -> torch.Tensor:
    """The expected gradient of one long completion in four chunks, over all draws with their chances."""
    groups, total = one_long_and_one_short(), torch.zeros(())
    for number in range(5):
        for drawn in itertools.combinations(range(4), number):
            chance = share**number * (1 - share) ** (4 - number)
            rule = Drawn(4, drawn=drawn, factor=factor)
            total = total + chance * gradient(groups, plugins=[rule])
    return total - gradient(groups)


def test_the_mean_over_all_draws_of_chunks_is_the_gradient_of_the_whole() -> None:
    """Exactly; without the factor what the chunks would add is missing."""
    whole = gradient(one_long_and_one_short())
    assert float(mean_over_draws(0.6, 1 / 0.6).norm() / whole.norm()) < 1e-6
    assert float(mean_over_draws(0.6, 1.0).norm() / whole.norm()) > 0.05


def test_rows_and_what_is_kept_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """No row is longer than a chunk or its prompt, and keys and values are given up on the way."""
    learner, _ = make_learner(plugins=[SeCO(4)])
    seen = watch_rows(learner, monkeypatch)
    logs = learner.learn(long_groups())
    of_chunks = [micro_batch for micro_batch in seen if micro_batch.chunk is not None]
    assert len(of_chunks) == 6 + 3 + 5 + 3 + 5
    assert max(micro_batch.input_ids_BT.numel() for micro_batch in of_chunks) == 4
    assert logs["update/tokens"] == 23 + 3 + 9 + 17 + 12 + 20
    ends = [end for row in seen for end in (*row.carried, *(own for _, own in row.in_row))]
    assert ends and not any(span._carried for end in ends for span in end.chain)


def chunks_by(plugin: SeCO, version: int) -> Sequence[Chunk]:
    """Chunks of a completion of 23 tokens."""
    step = step_of(plugin, "on_minibatch", [make_rollout([3, 4], list(range(2, 25)), 1.0)], version=version)
    chunks = step.rollouts[0].columns.get("chunks", ())
    return chunks if len(chunks) > 1 else ()


def test_chunks_cover_a_completion_and_are_the_same_again() -> None:
    assert chunks_by(SeCO(23), 0) == ()
    assert chunks_by(SeCO(10), 0) == [Chunk(0, 7), Chunk(7, 15), Chunk(15, 23)]
    drawn = [chunks_by(SpaCO(2, share=0.25), version) for version in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    weights = [chunk.weight for version in range(300) for chunk in chunks_by(SpaCO(2, share=0.25), version)]
    assert set(weights) == {0.0, 4.0} and abs(sum(weights) / len(weights) - 1) < 0.1


def test_what_does_not_go_with_chunks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"ratio sequence needs all tokens of a completion .*SeCO sends those of more"):
        make_learner(objective=Objective("gspo"), plugins=[SeCO(4)])
    with pytest.raises(ValueError, match="SeCO needs packed rows, which this policy cannot have"):
        make_learner(plugins=[SeCO(4)], shares_prefix=False)
    with pytest.raises(ValueError, match="max_tokens_per_micro_batch is 6"):
        gradient(plugins=[SeCO(8)], max_tokens_per_micro_batch=6)
    assert make_plugins(["spaco:chunk=8,share=0.5"])["spaco"] == SpaCO(8, 0.5)


def test_chunks_that_no_completion_fills_twice_are_refused_where_some_are_to_be_left_out() -> None:
    facts = RunFacts(num_prompts=1, num_generations=4, max_tokens=16, updates_per_batch=1, max_observed=8)
    with pytest.raises(ValueError, match=r"chunk is 24, and a completion has at most 24 tokens, .* give less"):
        SpaCO(24).check(facts)
    SpaCO(23).check(facts)
    SeCO(24).check(facts)  # has the whole gradient however few chunks there are
