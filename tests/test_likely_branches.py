"""LATR and ECHO's trees: where paths branch, which branches are pruned, and what tokens count, by brute force."""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import random_policy, table_rows
from hand_made import full_logprobs, learning_batch, make_rollout, make_tokens
from test_trees import PROMPTS, SAMPLING, Found, by_prompt

from lit_grpo.methods.echo_tree import EntropyConfidence
from lit_grpo.methods.latr import LookAhead, distance, longest_end
from lit_grpo.methods.shared.branches import OtherTokens
from lit_grpo.plugins import Listener, RunFacts, fresh
from lit_grpo.policy.loading import load_tokenizer
from lit_grpo.policy.spec import PolicySpec
from lit_grpo.rollout.generator import StepEvents
from lit_grpo.rollout.loop import RolloutLoop
from lit_grpo.rollout.slots.generator import SlotGenerator
from lit_grpo.types import Key, Rollout, RolloutGroup, SamplingParams, alone
from lit_grpo.update.objective.recipes import clipped

MAX_TOKENS = SAMPLING.max_tokens
ALL = 200  # slots, so that all paths of a prompt have equally many tokens
Begun = dict[Key, list[int]]
LATR = LookAhead(60, least=0.13, gap=0.04, look_ahead=5, edit=0.0)
ECHO = EntropyConfidence(
    60, depth=4, low=1.5, high=2.75, rise=0.2, unsure=0.145, most=3, hopeless=0.0, doubtful=0.0, spike=9.0
)
SMALL = [replace(LATR, width=12, edit=0.95), replace(ECHO, width=12, hopeless=0.12)]
SAME: list[dict[str, float]] = [{"edit": 0.95}, {"suffix": 0.3}, {"rouge": 0.3}]
UNSURE: list[dict[str, float]] = [{"hopeless": 0.12}, {"doubtful": 0.2}, {"spike": 0.1}]


@pytest.fixture(scope="module")
def policy() -> Any:
    return random_policy()


@pytest.fixture(scope="module")
def make(policy: Any, policy_folder: Path) -> Callable[[int], SlotGenerator]:
    def make_generator(num_slots: int) -> SlotGenerator:
        generator = SlotGenerator(num_slots)
        generator.start(PolicySpec(policy, load_tokenizer(str(policy_folder))))
        generator.load_weights(policy.named_parameters(), 0)
        return generator

    return make_generator


@pytest.fixture(scope="module")
def eos_ids(make: Any) -> list[int]:
    return make(1)._eos_ids.tolist()


@pytest.fixture(scope="module")
def collect(make: Any, eos_ids: list[int]) -> Callable[..., tuple[Found, Begun, OtherTokens]]:
    """Samples groups of two first paths; returns all, what each branch began with, and the plug-in."""

    @cache
    def sample(kind: type[Any], settings: tuple[tuple[str, Any], ...], num_slots: int) -> tuple[Found, Begun, Any]:
        begun: Begun = {}

        class Told(kind):
            def on_step(self, events: StepEvents) -> Any:
                answer = super().on_step(events)
                for request in () if answer is None else answer.submit:
                    if request.prefix.num_tokens:
                        begun[request.key] = request.prefix.token_ids_T.tolist()
                return answer

        worker = fresh(Told(**dict(settings)))
        worker.on_policy_start(eos_ids)
        loop = RolloutLoop(make(num_slots), plan="short_last", listeners=[worker])
        groups, _ = loop.collect(PROMPTS, 2, SamplingParams(max_tokens=MAX_TOKENS), 0)
        return (
            {each.completion.request.key: each.completion for group in groups for each in group.rollouts},
            begun,
            worker,
        )

    return lambda plugin, num_slots=ALL: sample(
        type(plugin), tuple((each.name, getattr(plugin, each.name)) for each in fields(plugin)), num_slots
    )


def distributions(policy: Any, found: Found) -> Mapping[Key, torch.Tensor]:
    """Of all tokens of all completions the log-probs of the whole vocabulary, by the model's own forward in float64."""
    double, its = copy.deepcopy(policy).double(), {}
    for key, completion in found.items():
        prompt = completion.request.prompt.token_ids
        logits_TV = double(torch.tensor([[*prompt, *completion.token_ids_T.tolist()]]), use_cache=False).logits[0]
        its[key] = logits_TV[len(prompt) - 1 : -1].detach().log_softmax(-1)
    return its


def branches_of(
    found: Found, begun: Begun, policy: Any, others: Callable[[torch.Tensor, list[int], int], Sequence[int]]
) -> Iterator[tuple[Key, list[int]]]:
    """What each path is to branch into, if ``others`` says it of its own distributions up to one, and of its tokens."""
    first = {key: completion for key, completion in found.items() if key in begun or len(key[2]) == 1}
    for key, logprobs_TV in distributions(policy, first).items():  # fresh ones find no room
        tokens, birth = found[key].token_ids_T.tolist(), len(begun.get(key, [0])) - 1
        for place in range(birth + (key in begun), len(tokens) - 1):
            for other in others(logprobs_TV[birth : place + 1], tokens, place):
                yield key, [*tokens[:place], other]


def check_branches(found: Found, begun: Begun, expected: Iterator[tuple[Key, list[int]]]) -> None:
    parents = {(*key[:2], key[2][:-1]): None for key in begun}
    told = sorted((key[0], key[2][:-1], tokens) for key, tokens in begun.items())
    assert told == sorted((key[0], key[2], tokens) for key, tokens in expected)
    assert len(told) > 12 and parents.keys() <= found.keys()
    assert all(sum(key[0] == prompt.prompt_id for key in begun) < 58 for prompt in PROMPTS)  # all had room


# ---- samples ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plugin", table_rows(SMALL, SMALL[:1]))
def test_each_branch_is_what_it_would_be_by_itself(plugin: OtherTokens, collect: Any, make: Any, policy: Any) -> None:
    """With fewer slots than paths; the token that a branch begins with has the log-prob of the policy too."""
    found, begun, worker = collect(plugin, 3)
    double, by_itself = copy.deepcopy(policy).double(), make(1)
    for key, completion in found.items():
        expected_T = full_logprobs(double, Rollout(completion.request.prompt, completion))
        assert torch.allclose(completion.logprobs_T, expected_T, atol=1e-5) and completion.trained_T.all()
        if key in begun:
            had = completion.until(len(begun[key]))
            assert had.token_ids_T.tolist() == begun[key] and had.oldest_version == had.newest_version == 0
            by_itself.submit([completion.request.after(had)])
            while not (again := by_itself.step().finished):
                pass
            assert again[0].token_ids_T.tolist() == completion.token_ids_T.tolist()
    assert all(len(members) == 12 for members in by_prompt(found).values())
    metrics = worker.metrics(alone)
    kept = [key for key in begun if key in found]
    assert metrics["rollout/pruned_completions"] == len(begun) - len(kept) > 0
    assert metrics["rollout/branched_share"] > len(kept) / 36 - 1e-9


def test_steps_report_the_likeliest_tokens_of_truncated_distributions(make: Any, policy: Any) -> None:
    class Looks(Listener):
        def __init__(self) -> None:
            self.told: list[Any] = []

        @property
        def likeliest(self) -> int:
            return 4

        def on_step(self, events: StepEvents) -> None:
            self.told.append(events.likeliest)

    sampling, looks = SamplingParams(max_tokens=6, temperature=0.7, top_k=3), Looks()
    groups, _ = RolloutLoop(make(2), listeners=[looks]).collect(PROMPTS[:1], 2, sampling, 0)
    found = {each.completion.request.key: each.completion for each in groups[0].rollouts}
    exact, places = distributions(policy, found), dict.fromkeys(found, 0)
    for step in looks.told:
        for row, key in enumerate(step.keys):
            logprobs, ids = (exact[key][places[key]] / 0.7).sort(descending=True)
            expected = [*logprobs[:3].log_softmax(-1).tolist(), -math.inf]
            assert step.ids_BK[row, :3].tolist() == ids[:3].tolist()
            assert step.logprobs_BK[row].tolist() == pytest.approx(expected, abs=1e-5)
            assert step.entropies_B[row] == pytest.approx(-sum(p * math.exp(p) for p in expected[:3]), abs=1e-5)
            assert step.token_ids_B[row] == found[key].token_ids_T[places[key]]
            places[key] += 1
    assert places == {key: completion.num_tokens for key, completion in found.items()}


# ---- LATR ---------------------------------------------------------------------------------------------


def test_paths_branch_where_two_tokens_are_likely(collect: Any, policy: Any, eos_ids: list[int]) -> None:
    found, begun, _ = collect(LATR)

    def others(logprobs_TV: torch.Tensor, tokens: list[int], place: int) -> list[int]:
        (first, second), ids = logprobs_TV[-1].exp().topk(2)
        is_key = second > LATR.least and first - second < LATR.gap
        return [t for t in ids.tolist() if t != tokens[place]][:1] if is_key else []

    expected = branches_of(found, begun, policy, others)
    check_branches(found, begun, (each for each in expected if each[1][-1] not in eos_ids))


@pytest.mark.parametrize("changes", table_rows(SAME, SAME[:1]))
def test_branches_that_say_the_same_are_pruned_with_what_began_in_them(
    changes: dict[str, Any], collect: Any, eos_ids: list[int]
) -> None:
    everything, born, _ = collect(LATR)
    found, begun, _ = collect(replace(LATR, **changes))
    pruned: dict[Key, int] = {}
    for key, beginning in born.items():
        birth, end = len(beginning) - 1, len(beginning) - 1 + LATR.look_ahead
        own, other = everything[key], everything[(*key[:2], key[2][:-1])]
        a, b = (each.token_ids_T[birth:end].tolist() for each in (own, other))
        if own.num_tokens > end <= other.num_tokens and not {*b} & {*eos_ids} and is_alike(a, b, **changes):
            pruned[key] = end
    gone = {
        key
        for key, completion in everything.items()
        for above, end in pruned.items()
        if key[:2] == above[:2] and key[2][: len(above[2])] == above[2] and completion.num_tokens > end
    }
    assert {key for key in begun if key in found} == born.keys() - gone
    assert 0 < len(gone) < len(born)


def is_alike(a: list[int], b: list[int], edit: float = 0.0, suffix: float = 1.0, rouge: float = 1.0) -> bool:
    """The three measures by recursion and by all pairs of places."""

    @cache
    def edits(i: int, j: int) -> int:
        if not i or not j:
            return i + j
        return min(edits(i - 1, j) + 1, edits(i, j - 1) + 1, edits(i - 1, j - 1) + (a[i - 1] != b[j - 1]))

    @cache
    def lcs(i: int, j: int) -> int:
        if not i or not j:
            return 0
        return lcs(i - 1, j - 1) + 1 if a[i - 1] == b[j - 1] else max(lcs(i - 1, j), lcs(i, j - 1))

    ends = [
        n
        for one, other in ((a, b), (b, a))
        for n in range(1, len(one) + 1)
        for start in range(len(other) - n + 1)
        if one[-n:] == other[start : start + n]
    ]
    size = len(a)
    return edits(size, size) / size < edit or max(ends, default=0) / size > suffix or lcs(size, size) / size > rouge


def test_measures_equal_the_authors_code() -> None:
    """``suffix_match_score`` and ``rouge_l_score`` of starreeze/latr at 2adb0ed, which has edits from torchaudio."""
    rows = {
        ((1, 1, 2, 3, 0, 0, 3, 2), (1, 1, 2, 1, 0, 0, 3, 3)): (0.125, 0.75),
        ((3, 1, 1, 1, 3, 0, 0, 1, 0, 2, 0, 2), (1, 1, 3, 0, 3, 1, 0, 3, 0, 3, 3, 1)): (2 / 12, 7 / 12),
        ((3, 1, 2, 0, 0, 1, 3, 1, 2, 3, 2, 3), (2, 0, 0, 1, 3, 1, 2, 3, 2, 3, 3, 1)): (10 / 12, 10 / 12),
    }
    for (a, b), (suffix, rouge) in rows.items():
        assert max(longest_end(a, b), longest_end(b, a)) / len(a) == pytest.approx(suffix)
        assert (2 * len(a) - distance(a, b, 2)) / 2 / len(a) == pytest.approx(rouge)


# ---- ECHO ---------------------------------------------------------------------------------------------


def signals(logprobs_TV: torch.Tensor, top: int) -> tuple[list[float], list[float]]:
    probs_TV = logprobs_TV.exp()
    return (-(probs_TV * logprobs_TV).sum(1)).tolist(), probs_TV.topk(top).values.mean(1).tolist()


def mean_of_last(values: Sequence[float], number: int) -> float:
    return statistics.fmean(values[-number:])


def rise(entropies: Sequence[float], window: int) -> float:
    return entropies[-1] - mean_of_last(entropies[:-1], window) if len(entropies) > 1 else 0.0


def test_paths_go_on_with_as_many_tokens_as_entropy_and_confidence_say(
    collect: Any, policy: Any, eos_ids: list[int]
) -> None:
    found, begun, _ = collect(ECHO)

    def others(logprobs_TV: torch.Tensor, tokens: list[int], place: int) -> list[int]:
        entropies, confidences = signals(logprobs_TV, ECHO.top)
        entropy, group = entropies[-1], mean_of_last(confidences, 4)
        if len(entropies) <= ECHO.depth or entropy < ECHO.high or group > ECHO.unsure or rise(entropies, 4) < ECHO.rise:
            return []
        number = round(1 + 2 * (entropy - ECHO.low) / (ECHO.high - ECHO.low) - (group - ECHO.unsure) / ECHO.unsure)
        likely = [t for t in logprobs_TV[-1].topk(5).indices.tolist() if t != tokens[place]]
        return likely[: min(max(number, 1), ECHO.most) - 1]

    expected = branches_of(found, begun, policy, others)
    check_branches(found, begun, (each for each in expected if each[1][-1] not in eos_ids))


@pytest.mark.parametrize("changes", table_rows(UNSURE, UNSURE[:1]))
def test_branches_that_stay_unsure_are_pruned(changes: dict[str, Any], collect: Any, policy: Any) -> None:
    everything, born, _ = collect(ECHO)
    found, begun, _ = collect(replace(ECHO, **changes))
    gone: set[Key] = set()
    for key, logprobs_TV in distributions(policy, {key: everything[key] for key in born}).items():
        own = signals(logprobs_TV[len(born[key]) - 1 :], ECHO.top)
        for end in range(2, everything[key].num_tokens - len(born[key]) + 1):  # the first step is its parent's
            entropies, confidences = (each[:end] for each in own)
            tails = [mean_of_last(confidences[:number], 8) for number in range(1, end + 1)]
            ups = [rise(entropies[:number], 4) for number in range(1, end + 1)]
            falls = (
                end > 3 and tails[-1] < tails[-2] < tails[-3] < tails[-4] and tails[-1] <= changes.get("doubtful", 0)
            )
            spikes = end > 2 and min(ups[-3:]) > 0 and ups[-1] > changes.get("spike", 9.0)
            if mean_of_last(confidences, 4) < changes.get("hopeless", 0) or falls or spikes:
                at = len(born[key]) - 1 + end
                gone |= {
                    below
                    for below, completion in everything.items()
                    if below[:2] == key[:2] and below[2][: len(key[2])] == key[2] and completion.num_tokens > at
                }
                break
    assert {key for key in begun if key in found} == born.keys() - gone
    assert 0 < len(gone) < len(born)


WIDTHS = [1, 1, 1, 3, 1, 1, 1, 4, 1, 1, 4, 1, 1, 1, 4, 1, 1, 4, 1, 1, 1, 4, 3, 1]
OF_SINES = [
    *((1.9179810835, 1.8436071941), (1.1418916161, 2.3391141348), (1.3877760892, 1.9937443397)),
    *((1.5249429815, 1.9562775055), (1.4991241428, 2.042387369), (1.4772704374, 2.0071676899)),
    *((1.19074699, 2.3809059087), (1.8989555547, 1.8433451961), (1.3125325566, 2.283425371)),
    *((1.2475773209, 2.350169636), (1.6576609656, 1.8241082902), (1.4394658216, 2.075537815)),
    *((1.3875036399, 2.0286142446), (1.2295567076, 2.3010623137), (1.8343813406, 1.8035141154)),
    *((1.3516294357, 1.9816485312), (1.0252429073, 2.5630903318), (1.681094951, 1.8745453699)),
    *((1.4209860953, 2.0899990028), (1.3484663128, 2.0102102409), (1.3321030514, 2.1023580529)),
    *((1.8078627774, 1.8901222339), (1.51457529, 1.9423242), (1.0606360729, 2.5399488201)),
]
FLATTER = [
    *((1.3492579389, 2.0725601239), (0.8646390262, 2.7250191962), (1.3458177371, 2.0464902832)),
    *((1.298551369, 2.1866993366), (1.2190086976, 2.4238968024), (1.4938930043, 1.9868329857)),
    *((1.2852692146, 2.2693041684), (1.5418517003, 1.9710675857), (1.3356721713, 2.2450312694)),
    *((1.4927855888, 2.0202498854), (1.5648341648, 1.8697356181), (1.3403941574, 2.1514660505)),
]


def test_widths_and_prunings_equal_the_authors_code() -> None:
    """``DeepConfBranchController`` of user683/ECHO at 6f7b311, with the field that it reads named as it reads it.

    Its confidences, the means of -log p, are given as they are.
    """
    settings = EntropyConfidence(low=1.0, high=1.5, rise=0.03, unsure=2.1)
    assert [settings.num_paths(OF_SINES[: end + 1]) for end in range(24)] == WIDTHS
    never: dict[str, Any] = {"hopeless": 0.0, "doubtful": 0.0, "spike": 9.0}
    first = {
        "doubtful": [(FLATTER, never | {"doubtful": 9.0}, 11), (FLATTER, never | {"doubtful": 9.0, "tail": 5}, 7)],
        "spike": [(OF_SINES, never | {"spike": 0.08}, 5), (FLATTER, never | {"spike": 0.05}, 5)],
        "hopeless": [(OF_SINES, never | {"hopeless": 1.99}, 0), (OF_SINES, never, None)],
    }
    for rows in first.values():
        for its, its_fields, expected in rows:
            ends = [end for end in range(len(its)) if EntropyConfidence(**its_fields).is_pruned(its[: end + 1])]
            assert next(iter(ends), None) == expected


def test_advantages_and_bounds_equal_the_authors_code() -> None:
    """``apply_hybrid_advantage_shaping`` of user683/ECHO at 6f7b311, with the numbers of its configuration."""
    lengths, advantages = (20, 3, 7), (1.0, -0.5, -0.5)
    rollouts = [make_rollout((3,), [4] * size, 1.0, sample_id=number) for number, size in enumerate(lengths)]
    plugin = fresh(EntropyConfidence())
    plugin._signals = {
        rollout.completion.request.key: [
            (abs(math.sin(1.7 * t + i)) * 2, 0.2 * abs(math.cos(0.9 * t + 2 * i))) for t in range(lengths[i])
        ]
        for i, rollout in enumerate(rollouts)
    }
    for rollout, advantage in zip(rollouts, advantages, strict=True):
        rollout.advantage = advantage
    plugin.on_batch(learning_batch([RolloutGroup(rollouts[0].prompt, rollouts)]).of(plugin))
    found = [rollout.columns["token_advantage"].tolist() for rollout in rollouts]
    assert found[0][:6] == pytest.approx([0.8, 1.128049, 1.001103, 1.011976, 0.86371, 1.196014], abs=1e-4)
    assert found[1] == pytest.approx([-0.57167, -0.407982, -0.529126], abs=1e-4)
    assert found[2] == pytest.approx([-0.544371, -0.555125, -0.482336, -0.469937, -0.554068, -0.547714, -0.4], abs=1e-4)
    bounds = [rollout.columns["epsilon"].tolist() for rollout in rollouts]
    for its, size, expected in zip(bounds, lengths, (0.19558873, 0.19524479, 0.19554523), strict=True):
        assert its == pytest.approx([expected] * size, abs=1e-7)


def test_tokens_are_clipped_at_bounds_of_their_own() -> None:
    ratios, advantages = [0.7, 0.85, 1.15, 1.3, 1.15, 0.85], [-1.0, -1.0, 1.0, 1.0, 1.0, -1.0]
    epsilons = [0.1, 0.1, 0.1, 0.4, math.nan, math.nan]  # NaN: those of the objective
    log_ratio_N = torch.tensor(ratios, dtype=torch.float64).log().requires_grad_()
    tokens = make_tokens(advantage=torch.tensor(advantages).double(), epsilon=torch.tensor(epsilons).double())
    loss_N, _ = clipped(log_ratio_N, tokens, epsilon=0.2, epsilon_high=0.2)
    loss_N.sum().backward()
    assert loss_N.tolist() == pytest.approx([0.9, 0.9, -1.1, -1.3, -1.15, 0.85])
    assert log_ratio_N.grad is not None
    assert log_ratio_N.grad.tolist() == pytest.approx([0, 0, 0, -1.3, -1.15, 0.85])


# ---- what does not fit --------------------------------------------------------------------------------


@pytest.mark.parametrize("plugin", [LookAhead(8), EntropyConfidence(8)])
def test_a_generator_that_does_not_report_distributions_is_refused(plugin: OtherTokens) -> None:
    facts = RunFacts(1, 4, 64, 1, generator="VLLM", abilities={"own_weights"})
    with pytest.raises(ValueError, match=r"model.generator VLLM does not report; take model.generator slots"):
        plugin.check(facts)


def test_fields_that_do_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match=r"low must be below high, 1.0, not 2.0"):
        EntropyConfidence(low=2.0, high=1.0)
    with pytest.raises(ValueError, match=r"look_ahead is 64, and sampling.max_tokens is 64"):
        LookAhead(8, look_ahead=64).check(RunFacts(1, 4, 64, 1))
