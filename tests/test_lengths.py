"""Lengths learned online."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable

import numpy as np
import pytest

from lit_grpo.budgets.history import PromptHistory
from lit_grpo.scheduling.jobs import Job, Lengths
from lit_grpo.scheduling.lengths import LengthPredictor, spearman

LIMIT = 2000
Shown = Callable[[np.ndarray, np.random.Generator], np.ndarray]
"""Makes features, shape (jobs, D), of the log lengths that are expected of each job."""


def jobs_of(prompts: int, group_size: int, visit: int, limit: int = LIMIT) -> list[Job]:
    return [
        Job((f"p{prompt}", visit, (sample,)), 5, limit) for prompt in range(prompts) for sample in range(group_size)
    ]


def lengths_of(logs: np.ndarray) -> np.ndarray:
    return np.clip(np.exp(logs), 1, LIMIT).astype(int)


def truthful(expected: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return np.column_stack([2 * expected, rng.normal(size=(len(expected), 3))])


def worthless(expected: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return rng.normal(size=(len(expected), 20))


def forgetful() -> LengthPredictor:
    """Return a predictor that knows nothing of earlier visits: of its history nobody commits what is noted."""
    predictor = LengthPredictor()
    predictor.share(PromptHistory())
    return predictor


def train(predictor: LengthPredictor, rollouts: int, shown: Shown | None, new_prompts: bool = False) -> float:
    """Show rollouts of 16 prompts with 8 completions each; return the rank correlation in the second half of them.

    Logs of lengths have a spread of 0.7 between prompts, and of 0.3 within.
    """
    rng = np.random.default_rng(0)
    effects = rng.normal(0, 0.7, 16)
    correlations = []
    for number in range(rollouts):
        effects = rng.normal(0, 0.7, 16) if new_prompts else effects
        jobs = [
            Job((f"p{number * new_prompts}/{job.key[0]}", *job.key[1:]), 5, LIMIT) for job in jobs_of(16, 8, number)
        ]
        expected = np.repeat(4 + effects, 8)
        actual = lengths_of(expected + rng.normal(0, 0.3, len(jobs)))
        predictor.begin(jobs)
        if shown is not None:
            predictor.observe([job.key for job in jobs], 0, shown(expected, rng))
        correlations.append(spearman(predictor.estimate(jobs), actual))
        for row in np.argsort(actual).tolist():
            predictor.finish(jobs[row], int(actual[row]))
        predictor.end(commit=True)
    return float(np.mean(correlations[rollouts // 2 :]))


def test_nothing_is_known_before_the_first_rollout_has_ended() -> None:
    predictor = LengthPredictor()
    jobs = jobs_of(2, 2, 0, limit=77)
    predictor.begin(jobs)
    lengths: Lengths = predictor
    assert lengths.estimate(jobs).tolist() == [77.0] * 4
    assert not predictor.informative
    assert predictor.metrics() == {"lengths/informative": 0.0, "lengths/ignored": 0.0}


def test_lengths_follow_features_that_tell_of_them() -> None:
    predictor = forgetful()
    assert train(predictor, 12, truthful, new_prompts=True) > 0.85
    assert predictor.informative
    assert predictor.metrics()["lengths/spearman_at_0"] > 0.7
    assert predictor.metrics()["lengths/log_error_at_0"] < 0.4


def test_the_history_of_a_prompt_foretells_its_next_visit() -> None:
    with_history, without = LengthPredictor(), forgetful()
    assert train(with_history, 12, None) > 0.85
    assert train(without, 12, None) == 0.0
    assert with_history.informative
    assert not without.informative


def test_worthless_features_are_not_informative() -> None:
    predictor = LengthPredictor()
    train(predictor, 12, worthless, new_prompts=True)
    assert not predictor.informative
    assert abs(predictor.metrics()["lengths/spearman_at_0"]) < 0.3


def test_a_completion_that_goes_on_is_expected_to_be_longer_than_it_is() -> None:
    predictor = LengthPredictor()
    train(predictor, 4, None)
    jobs = jobs_of(1, 5, 9)
    predictor.begin(jobs)
    decoded = [0, 30, 100, 900, LIMIT - 1]
    predictor.progress({job.key: tokens for job, tokens in zip(jobs, decoded, strict=True)})
    estimates = predictor.estimate(jobs)
    assert (estimates > decoded).all()
    assert (np.diff(estimates) > 0).all()
    assert estimates[-1] == LIMIT


def test_what_is_left_of_exponential_lengths_stays_the_same() -> None:
    predictor = forgetful()
    lengths = np.ceil(-200 * np.log(1 - (np.arange(4096) + 0.5) / 4096)).astype(int)
    lengths = np.random.default_rng(0).permutation(lengths)
    for visit in range(2):
        jobs = jobs_of(512, 8, visit, limit=100_000)
        predictor.begin(jobs)
        for job, length in zip(jobs, lengths.tolist(), strict=True):
            predictor.finish(job, length)
        predictor.end(commit=True)
    jobs = jobs_of(4, 1, 9, limit=100_000)
    predictor.begin(jobs)
    decoded = np.array([0, 100, 200, 400])
    predictor.progress({job.key: tokens for job, tokens in zip(jobs, decoded.tolist(), strict=True)})
    assert predictor.estimate(jobs) - decoded == pytest.approx(np.full(4, 200.0), rel=0.12)


def test_revision_changes_when_estimates_of_waiting_jobs_do() -> None:
    predictor = LengthPredictor()
    train(predictor, 2, None)
    revisions = [predictor.revision]
    jobs = jobs_of(8, 8, 9)
    predictor.begin(jobs)
    revisions.append(predictor.revision)
    predictor.observe([jobs[0].key], 0, np.ones((1, 4)))
    revisions.append(predictor.revision)
    for job in jobs[:4]:
        predictor.finish(job, 5)
    revisions.append(predictor.revision)
    predictor.end(commit=True)
    revisions.append(predictor.revision)
    assert [after > before for before, after in itertools.pairwise(revisions)] == [True, True, False, True]


def test_the_state_of_a_predictor_is_plain_and_brings_back_its_estimates() -> None:
    first, second = LengthPredictor(num_scalars=1), LengthPredictor(num_scalars=1)
    wide = np.random.default_rng(1).normal(size=(1, 200))

    def shown(expected: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        return expected[:, None] * wide + rng.normal(size=(len(expected), 200))

    train(first, 6, shown)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    second.history.load_state_dict(json.loads(json.dumps(first.history.state_dict())))
    assert second.informative == first.informative
    assert second.metrics() == first.metrics()
    rng = np.random.default_rng(2)
    for visit in (8, 9):  # learning goes on in the same way too
        jobs, features = jobs_of(20, 4, visit), rng.normal(size=(80, 200))
        for predictor in (first, second):
            predictor.begin(jobs)
            predictor.observe([job.key for job in jobs], 0, features)
        assert first.estimate(jobs).tolist() == second.estimate(jobs).tolist()
        for number, job in enumerate(jobs):
            first.finish(job, 5 + number)
            second.finish(job, 5 + number)
        first.end(commit=True)
        second.end(commit=True)


def test_the_state_of_other_points_is_refused() -> None:
    with pytest.raises(ValueError, match=r"has .*'points': \[0, 8, 32, 64\]"):
        LengthPredictor(points=(0, 16)).load_state_dict(LengthPredictor().state_dict())


def test_rows_that_are_not_finite_are_ignored_and_counted() -> None:
    predictor = LengthPredictor()
    train(predictor, 6, truthful, new_prompts=True)
    jobs = jobs_of(2, 1, 9)
    predictor.begin(jobs)
    before = predictor.estimate(jobs)
    predictor.observe([job.key for job in jobs], 0, np.array([[np.nan, 0, 0, 0], [20.0, 0, 0, 0]]))
    after = predictor.estimate(jobs)
    assert after[0] == before[0]
    assert after[1] > before[1]
    assert predictor.metrics()["lengths/ignored"] == 1


def show(predictor: LengthPredictor, visit: int, finished: int = 128) -> None:
    """Show a rollout of 16 prompts with 8 completions each, of which so many have finished, up to its end."""
    rng = np.random.default_rng(visit)
    jobs, actual = jobs_of(16, 8, visit), lengths_of(rng.normal(4, 0.7, 128))
    predictor.begin(jobs)
    features = rng.normal(size=(128, 100))
    features[0, 0] = np.nan
    predictor.observe([job.key for job in jobs], 0, features)
    for job, length in list(zip(jobs, actual.tolist(), strict=True))[:finished]:
        predictor.finish(job, length)


def test_a_rollout_whose_update_was_interrupted_counts_once_when_it_is_repeated() -> None:
    whole, interrupted, resumed = LengthPredictor(), LengthPredictor(), LengthPredictor()
    for visit in range(4):
        for predictor in (whole, interrupted):
            show(predictor, visit)
        if visit == 2:  # between advantages and step
            resumed.load_state_dict(json.loads(json.dumps(interrupted.state_dict())))
            resumed.history.load_state_dict(json.loads(json.dumps(interrupted.history.state_dict())))
            show(resumed, visit)
            interrupted = resumed
        for predictor in (whole, interrupted):
            predictor.end(commit=True)
    assert interrupted.state_dict() == whole.state_dict()
    assert interrupted.history.records == whole.history.records
    assert interrupted.metrics() == whole.metrics()


@pytest.mark.parametrize("visits", [0, 3])
def test_nothing_is_learned_from_a_rollout_that_was_aborted(visits: int) -> None:
    predictor, other = LengthPredictor(), LengthPredictor()
    for visit in range(visits):
        for each in (predictor, other):
            show(each, visit)
            each.end(commit=True)
    show(predictor, 9, finished=50)
    predictor.end(commit=False)
    assert predictor.state_dict() == other.state_dict()
    for each in (predictor, other):
        show(each, 10)
        each.end(commit=True)
    assert predictor.state_dict() == other.state_dict()


def test_completions_that_a_rollout_leaves_unfinished_are_not_taken_for_short_ones() -> None:
    cut, whole = forgetful(), forgetful()
    rng = np.random.default_rng(0)
    for visit in range(10):
        jobs = jobs_of(32, 8, visit)
        actual = lengths_of(rng.normal(4, 0.7, len(jobs)))
        for predictor in (cut, whole):
            predictor.begin(jobs)
            longest = 60 if predictor is cut and visit else LIMIT
            predictor.progress({job.key: int(min(length, longest)) for job, length in zip(jobs, actual, strict=True)})
            for job, length in zip(jobs, actual.tolist(), strict=True):
                if length <= longest:
                    predictor.finish(job, length)
            predictor.end(commit=True)
    jobs = jobs_of(1, 1, 99)
    cut.begin(jobs)
    whole.begin(jobs)
    assert cut.estimate(jobs)[0] == pytest.approx(whole.estimate(jobs)[0], rel=0.25)


def own_ways(predictor: LengthPredictor, visits: int, last: bool = False) -> tuple[list[Job], np.ndarray]:
    """Show rollouts whose completions tell their own lengths after 8 tokens; the last up to then only, if ``last``."""
    rng, jobs, actual = np.random.default_rng(0), [], np.empty(0)
    for visit in range(visits):
        jobs, own = jobs_of(16, 8, visit), rng.normal(0, 0.7, 128)
        actual = np.maximum(lengths_of(5 + own), 10)
        predictor.begin(jobs)
        predictor.progress({job.key: 8 for job in jobs})
        predictor.observe([job.key for job in jobs], 8, own[:, None] + rng.normal(0, 0.2, (128, 3)))
        if last and visit == visits - 1:
            break
        for job, length in zip(jobs, actual.tolist(), strict=True):
            predictor.finish(job, length)
        predictor.end(commit=True)
    return jobs, actual


def test_completions_of_a_prompt_are_ordered_by_what_they_show() -> None:
    predictor = LengthPredictor(points=(0, 8))
    assert predictor.within_correlation(8) == 0.0
    own_ways(predictor, 6)
    assert predictor.within_correlation(8) > 0.8
    assert predictor.within_correlation(0) == 0.0  # all are alike before decoding
    metrics = predictor.metrics()
    assert metrics["lengths/within_at_8"] == predictor.within_correlation(8)
    assert "lengths/within_at_0" not in metrics


def test_the_outcome_has_what_was_foretold_at_each_point() -> None:
    predictor = LengthPredictor(points=(0, 8, 32))
    jobs, actual = own_ways(predictor, 4, last=True)
    at_8 = predictor.estimate(jobs)
    for job, length in list(zip(jobs, actual.tolist(), strict=True))[:100]:
        predictor.finish(job, length)
    outcome = predictor.outcome()
    assert outcome.points == (0, 8, 32)
    assert outcome.said.shape == (128, 3)
    assert outcome.said[:, 1].tolist() == at_8.tolist()  # what has come since has changed nothing
    assert not np.isnan(outcome.said[:, 0]).any()
    assert np.isnan(outcome.said[:, 2]).all()
    assert outcome.totals.tolist() == [*actual[:100].tolist(), *[0] * 28]
    assert outcome.groups.tolist() == np.repeat(np.arange(16), 8).tolist()


def test_what_is_learned_of_rollouts_is_bounded() -> None:
    predictor = LengthPredictor(points=(0,))
    sizes = []
    for visit in range(30):
        jobs = [Job((f"{visit}/{prompt}", visit, (sample,)), 5, 500) for prompt in range(64) for sample in range(16)]
        predictor.begin(jobs)
        predictor.observe([job.key for job in jobs], 0, np.ones((len(jobs), 3)) * visit)
        for number, job in enumerate(jobs):
            predictor.finish(job, 1 + number % 400)
        predictor.end(commit=True)
        sizes.append(len(json.dumps(predictor.state_dict())))
    assert sizes[-1] < 1.1 * sizes[9]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"points": (8, 0)}, r"points must be ascending .*, not \(8, 0\)"),
        ({"points": (-1, 8)}, r"points must be ascending numbers of tokens from 0 on"),
        ({"points": (0, 64), "max_tokens": 64}, r"points names 64 tokens, but a completion has at most 64; leave"),
    ],
)
def test_bad_arguments_get_one_sentence(arguments: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        LengthPredictor(**arguments)


def test_bad_observations_get_one_sentence() -> None:
    predictor = LengthPredictor()
    jobs = jobs_of(1, 2, 0)
    predictor.begin(jobs)
    predictor.observe([job.key for job in jobs], 0, np.ones((2, 4)))
    keys = [job.key for job in jobs]
    with pytest.raises(ValueError, match=r"num_tokens is 9, but features are observed at \(0, 8, 32, 64\) tokens"):
        predictor.observe(keys, 9, np.ones((2, 4)))
    with pytest.raises(ValueError, match=r"one row for each of 2 jobs, not shape \(3, 4\)"):
        predictor.observe(keys, 8, np.ones((3, 4)))
    with pytest.raises(ValueError, match="features has 5 columns, but those before had 4"):
        predictor.observe(keys, 8, np.ones((2, 5)))
    with pytest.raises(ValueError, match=r"does not know the job \('p0', 1, \(0,\)\); give it to begin\(\) first"):
        predictor.estimate(jobs_of(1, 1, 1))
