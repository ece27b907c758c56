"""Drafts in the slots of models whose layers have states, and drafts by the policy's own heads: the same samples."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import table_rows
from torch.nn.functional import scaled_dot_product_attention

from lit_grpo.policy.architecture.decoder import hidden_states, token_logits
from lit_grpo.policy.architecture.heads import prediction_head
from lit_grpo.policy.loading import load_policy, load_tokenizer
from lit_grpo.policy.spec import PolicySpec
from lit_grpo.rollout.sampling import request_key, sample_tokens, uniform
from lit_grpo.rollout.slots.drafts.heads import Heads
from lit_grpo.rollout.slots.generator import SlotGenerator
from lit_grpo.tasks import ArithmeticRows
from lit_grpo.types import Completion, Key, Prompt, Request, SamplingParams
from tests.doubles.draft_layers import add_layer
from tests.doubles.small_models import small_model

SHIPPED = Path(__file__).parents[1] / "lit_grpo" / "policy" / "tiny_hybrid"
OTHERS = ("lfm2", "falcon_h1", "mamba", "jamba")
"""Convolution states alone, attention and a state in one layer, states without attention, experts."""


@pytest.fixture(scope="module")
def with_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(shutil.copytree(SHIPPED, tmp_path_factory.mktemp("base") / "policy"))
    add_layer(folder, 2)
    return folder


@pytest.fixture(scope="module")
def policies(with_heads: Path) -> Callable[[str], Any]:
    return cache(lambda name: small_model(name, {}).eval() if name in OTHERS else load_policy(str(with_heads)))


def started(model: Any, num_slots: int, points: tuple[int, ...] = (), **options: Any) -> SlotGenerator:
    generator = SlotGenerator(num_slots, kv_memory="256MiB", **options)
    generator.start(PolicySpec(model, load_tokenizer(str(SHIPPED))))
    generator.load_weights(model.named_parameters(), 0)
    generator.feature_points = points
    return generator


class Rollout:
    """All that a generator reports until all requests are through.

    Args:
        generator: Decodes.
        todo: Requests, in order.
        stops: By numbers of steps, the numbers of requests that are stopped then, and go on at once.
        fork_at: Completions of more tokens are gone on with in another way after so many, once they have ended.
    """

    def __init__(
        self, generator: SlotGenerator, todo: list[Request], stops: dict[int, list[int]], fork_at: int
    ) -> None:
        self.done: dict[Key, Completion] = {}
        self.seen: dict[tuple[Any, int], np.ndarray] = {}
        self.num_steps = self.num_active = self.num_drafted = self.num_accepted = 0
        waiting, generator.keeps_ended = list(todo), True
        while waiting or generator.capacity().free_slots < generator.num_slots:
            free = generator.capacity().free_slots
            generator.submit(waiting[:free])
            waiting = waiting[free:]
            events = generator.step()
            self.num_steps += 1
            self.num_active += events.num_active
            self.num_drafted += events.num_drafted
            self.num_accepted += sum(events.beyond.values())
            assert events.num_tokens == events.num_active + sum(events.beyond.values())
            for each in events.observations:
                self.seen |= {(key, each.num_tokens): row for key, row in zip(each.keys, each.features, strict=True)}
            for completion in events.finished:
                self.done[completion.request.key] = completion
                if completion.num_tokens > fork_at and len(completion.request.path) == 1:
                    path = (*completion.request.path, 1)
                    waiting.append(replace(completion.request, path=path, prefix=completion.until(fork_at)))
            waiting[:0] = generator.abort([todo[number].key for number in stops.get(self.num_steps, ())])


def check_same(drafted: Rollout, plain: Rollout) -> None:
    assert drafted.done.keys() == plain.done.keys() and drafted.seen.keys() == plain.seen.keys()
    for key, completion in drafted.done.items():
        other = plain.done[key]
        assert completion.token_ids_T.tolist() == other.token_ids_T.tolist()
        assert (completion.text, completion.finish_reason) == (other.text, other.finish_reason)
        assert torch.allclose(completion.logprobs_T, other.logprobs_T, atol=1e-4)
        assert completion.entropy == pytest.approx(other.entropy, abs=1e-4)
        assert torch.equal(completion.versions_T, other.versions_T)
    for place, features_F in drafted.seen.items():
        assert np.allclose(features_F, plain.seen[place], atol=1e-3)


def draw(seed: int) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Draw a policy, options of the generator, and what is decoded."""
    rng = random.Random(seed)
    name = rng.choice(["heads", "heads", "text", *OTHERS])
    vocabulary = 96 if name in OTHERS else 15
    sampling = SamplingParams(
        temperature=rng.choice([0, 0.3, 0.7, 1.0]),
        max_tokens=rng.choice([1, 2, 9, 33, 40]),
        top_k=rng.choice([0, 0, 3]),
        stop=rng.choice([(), (), ("11", "2=")]),
    )
    prompts = [
        Prompt(f"row/{n}", tuple(rng.randrange(2, vocabulary) for _ in range(rng.choice([1, 2, 7, 31, 40]))), "")
        for n in range(rng.choice([1, 3]))
    ]
    todo = [Request(prompt, (sample,), sampling, seed) for prompt in prompts for sample in range(rng.choice([2, 5]))]
    stops = {rng.randrange(1, 12): [rng.randrange(len(todo)) for _ in range(2)] for _ in range(rng.choice([0, 3]))}
    options = {
        "num_slots": rng.choice([1, 3, 6, 16]),
        "points": tuple(sorted(rng.sample(range(1, 12), rng.choice([0, 0, 2])))),
        "drafts": rng.choice([1, 2, 3, 5, 8]),
        "drafter": "heads" if name == "heads" else "text",
    }
    return name, options, {"todo": todo, "stops": stops, "fork_at": rng.choice([3, 17, 100])}


SEEDS = range(60)


@pytest.mark.parametrize("seed", table_rows(SEEDS, [*range(4), 13]))
def test_drafts_change_no_sample_of_a_model_with_states(seed: int, policies: Any) -> None:
    name, options, rollout = draw(seed)
    without: dict[str, Any] = options | {"drafts": "off"}
    plain = Rollout(started(policies(name), **without), **rollout)
    drafted = Rollout(started(policies(name), **options), **rollout)
    check_same(drafted, plain)
    assert plain.num_drafted == 0 and drafted.num_steps <= plain.num_steps


def exercises(count: int, sampling: SamplingParams) -> list[Request]:
    tokenizer = load_tokenizer(str(SHIPPED))
    rows = [row["prompt"] for row in ArithmeticRows(num_rows=3).rows()]
    prompts = [Prompt(text, tuple(tokenizer.encode(text)), text) for text in rows]
    return [Request(prompt, (sample,), sampling) for prompt in prompts for sample in range(count)]


@pytest.mark.parametrize("name", ["text", "lfm2"])
def test_right_drafts_save_steps_of_a_model_with_states(name: str, policies: Any) -> None:
    todo = exercises(6, SamplingParams(temperature=0.0 if name == "lfm2" else 1.0, max_tokens=40))
    plain, drafted = (Rollout(started(policies(name), 24, drafts=most), todo, {}, 100) for most in ("off", 3))
    check_same(drafted, plain)
    assert 0 < drafted.num_accepted < drafted.num_drafted  # some were wrong, and states did not go on with them
    assert drafted.num_active < plain.num_active


def by_whole_sequences(model: Any, request: Request, ids: list[int], sampling: SamplingParams, most: int) -> list[int]:
    """Draft by forward passes over all that there is, with nothing kept."""
    head, keys_1, count = prediction_head(model), np.array([request_key(request)], np.uint64), 0
    ids_1T = torch.tensor([ids])
    hidden_1TD = hidden_states(model, ids_1T)[:, :-1]  # of all but the last token

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float) -> torch.Tensor:
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)

    drafted = list[int]()
    while len(drafted) < most:
        tokens_1T = torch.tensor([[*ids[1:], *drafted]])
        u_1TD = head(hidden_1TD, tokens_1T, 1 + torch.arange(tokens_1T.shape[1])[None], attend)
        place = len(ids) - len(request.prompt.token_ids) + count
        logits_1V = token_logits(model, u_1TD[:, -1])
        number_1 = torch.from_numpy(uniform(keys_1, np.array([place])))
        drafted.append(int(sample_tokens(logits_1V, sampling, number_1)[0]))
        hidden_1TD, count = torch.cat([hidden_1TD, u_1TD[:, -1:]], 1), count + 1
    return drafted


@torch.no_grad()
def test_the_cache_drafts_what_whole_sequences_draft(
    policies: Any, with_heads: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through forks, requests that are stopped and go on, rows that move, prompts of one token, and wrong drafts."""
    sampling = SamplingParams(temperature=0.8, max_tokens=14)
    model, compared, draft = load_policy(str(with_heads)).eval(), [], Heads.draft

    def watched(self: Heads, rows: Any, most_B: np.ndarray, *others: Any) -> Any:
        proposals = draft(self, rows, most_B, *others)
        for row, (proposal, most) in enumerate(zip(proposals, most_B.tolist(), strict=True)):
            ids = [*rows.requests[row].prompt.token_ids, *rows.token_ids(row).tolist()]
            expected = by_whole_sequences(model, rows.requests[row], ids, sampling, most)
            compared.append((list(proposal), expected))
        return proposals

    monkeypatch.setattr(Heads, "draft", watched)
    prompts = [Prompt("row/0", (3, 4, 5, 9, 2), ""), Prompt("row/1", (7,), "")]
    todo = [Request(prompt, (sample,), sampling) for prompt in prompts for sample in range(3)]
    generator = started(policies("heads"), 4, drafts=3, drafter="heads")
    drafted = Rollout(generator, todo, {3: [0, 3], 6: [1]}, 6)
    check_same(drafted, Rollout(started(policies("heads"), 4, drafts="off"), todo, {3: [0, 3], 6: [1]}, 6))
    wrong = [pair for pair in compared if pair[0] != pair[1]]
    assert len(compared) > 60 and not wrong and any(len(set(expected)) > 1 for _, expected in compared)


@pytest.mark.parametrize("policy", [str(SHIPPED), "tiny"])
def test_heads_that_a_policy_has_not_are_refused_before_anything_is_decoded(policy: str) -> None:
    with pytest.raises(ValueError, match="holds no layer of multi-token prediction"):
        started(load_policy(policy), 4, drafts=3, drafter="heads")


def test_heads_without_a_number_of_drafts_and_without_states_are_refused(with_heads: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no price for auto; set model\.generator\.drafts to a number"):
        SlotGenerator(4, drafter="heads")
    model = small_model("qwen3_5_text", {"layer_types": ["full_attention"] * 2})
    model.save_pretrained(tmp_path)
    add_layer(tmp_path, 1)
    with pytest.raises(ValueError, match=r"only where its layers keep recurrent states"):
        started(load_policy(str(tmp_path)), 4, drafts=3, drafter="heads")
