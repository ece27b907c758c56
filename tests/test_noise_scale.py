"""The gradient noise scale: of gradients whose noise is known, of a learner's own, and the sizes that follow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import random_policy, table_rows
from hand_made import make_step, random_groups
from test_data import drawn, numbered
from test_learner import make_learner

from lit_grpo.budgets.history import PromptHistory
from lit_grpo.compatibility import SHARDS, Requirement
from lit_grpo.data.loaders import PromptLoader
from lit_grpo.methods import make_plugins
from lit_grpo.methods.noise_scale import Goodput, NoiseScale, NormTest, estimate
from lit_grpo.plugins import GroupBatch, Plugin, RunFacts, RunNumbers, fresh
from lit_grpo.rollout.session import RolloutSession
from lit_grpo.types import PassRule, RolloutGroup
from lit_grpo.update.advantages.estimator import Advantages
from lit_grpo.update.learner_settings import LearnerSettings
from lit_grpo.update.objective.objective import Objective
from lit_grpo.update.plugin import SquaredNorm
from lit_grpo.update.step import Step

SETTINGS: dict[str, Any] = {
    "objective": Objective(),
    "advantages": Advantages(),
    "weights": {"exact": 1.0},
    "temperature": 1.0,
    "max_tokens": 20,
}


def norms_of(gradients_PD: np.ndarray, ends: Sequence[Sequence[int]]) -> list[SquaredNorm]:
    """Squared norms of parts of prompts' gradients; ``ends`` has the ends of the parts of each rank, from 0 on."""
    number, begin = len(gradients_PD), 0
    ranks = []
    for of_rank in ends:
        ranks.append([(gradients_PD[begin : begin + end].sum(0) / number, end) for end in of_rank])
        begin += of_rank[-1]
    norms = []
    for parts in zip(*ranks, strict=True):
        square = sum(float(added @ added) for added, _ in parts)
        signal = sum(end**2 for _, end in parts) / number**2
        norms.append(SquaredNorm(square, signal, sum(end for _, end in parts) / number**2))
    whole = gradients_PD.mean(0)
    last = SquaredNorm(float(whole @ whole), 1.0, 1 / number)
    return [*norms[:-1], last] if len(ends) == 1 else [*norms, last]


def test_without_noise_the_signal_is_exact_and_two_parts_are_the_papers_formula() -> None:
    alike = np.tile([[0.6, -0.8]], (6, 1))
    assert estimate(norms_of(alike, [[2, 4, 6]])) == pytest.approx((1.0, 0.0), abs=1e-12)
    rng = np.random.default_rng(1)
    gradients = rng.normal(size=(6, 3)) + 1
    small, big = gradients[:2].mean(0), gradients.mean(0)
    expected = (6 * big @ big - 2 * small @ small) / (6 - 2)  # |G|^2, with 2 and 6 prompts
    trace = (small @ small - big @ big) / (1 / 2 - 1 / 6)
    assert estimate(norms_of(gradients, [[2, 6]])) == pytest.approx((expected, trace))


def test_what_cannot_be_told_apart_is_left_out() -> None:
    whole = SquaredNorm(1.0, 1.0, 0.25)
    for norms in ([], [whole], [SquaredNorm(0.0, 0.0, 0.0), whole], [SquaredNorm(math.nan, 0.25, 0.125), whole]):
        assert estimate(norms) is None


# ---- of a learner --------------------------------------------------------------------------------------


class Hearing(Plugin):
    """Keeps what it hears."""

    writes = frozenset({"scale"})

    def __init__(self, num_parts: int, scale: float = 1.0) -> None:
        self.parts, self.scale = num_parts, scale
        self.heard: list[list[SquaredNorm]] = []

    @property
    def numbers(self) -> RunNumbers:
        return RunNumbers(num_parts=self.parts)

    def on_gradient(self, step: Step) -> None:
        step["scale"] = self.scale

    def on_optimizer_step(self, step: Step) -> None:
        self.heard.append([*step.norms])


REWARDS = [[1.0, 0.0, 0.0], [1.0, 1.0], [0.0, 1.0, 1.0, 0.0], [0.0, 0.0], [1.0, 0.0]]
"""The second and fourth groups teach nothing."""


def groups() -> list[RolloutGroup]:
    return random_groups(random_policy(), REWARDS, noise=0.05)


def gradient(of: list[RolloutGroup], sizer: Plugin | None = None, **options: Any) -> torch.Tensor:
    learner, steps = make_learner(plugins=[] if sizer is None else [sizer], **options)
    learner.learn(of)
    return steps.gradients[0]


@pytest.mark.parametrize("max_tokens", [40, 10_000])
@pytest.mark.parametrize("num_parts", table_rows([2, 3, 5, 8], [2, 5]))
def test_a_learners_norms_are_those_of_its_prompts_gradients(num_parts: int, max_tokens: int) -> None:
    sizer = Hearing(num_parts)
    whole = gradient(groups(), sizer, max_tokens_per_micro_batch=max_tokens)
    plain = gradient(groups(), max_tokens_per_micro_batch=max_tokens)
    assert float((whole - plain).norm() / plain.norm()) < 1e-12
    tokens = [sum(r.completion.num_trained for r in group.rollouts) for group in groups()]
    each = [gradient([group]) * of_it / sum(tokens) for group, of_it in zip(groups(), tokens, strict=True)]
    ends = [5 * part // num_parts for part in range(1, num_parts)]
    (heard,) = sizer.heard
    for norm, end in zip(heard, [*ends, 5], strict=True):
        added = sum(each[:end], torch.zeros_like(plain))
        assert norm.square == pytest.approx(float(added @ added), rel=1e-6, abs=1e-18)
        assert (norm.signal, norm.noise) == pytest.approx(((end / 5) ** 2, end / 25))


def test_the_learning_rate_is_scaled() -> None:
    learner, steps = make_learner(plugins=[Hearing(2, scale=1.5)])
    learner.learn(groups())
    assert steps.scales == [1.5]


# ---- sizes ---------------------------------------------------------------------------------------------


def fed(rule: NoiseScale, signal: float, noise: float, prompts: int = 8, steps: int = 1, ranks: int = 1) -> NoiseScale:
    """Its worker, which has heard of steps that are exactly as expected."""
    sizer = fresh(rule)
    sizer.batch_size(prompts)
    for _ in range(steps):
        half, whole = (SquaredNorm(a * signal + c * noise, a, c) for a, c in ((0.25, 1 / 16), (1.0, 1 / 8)))
        sizer.on_optimizer_step(make_step(norms=[half, whole]))
        sizer.on_update_end(GroupBatch([], 1, PassRule(), lambda own: [own] * ranks))
    return sizer


def scale_of(rule: NoiseScale) -> float:
    step = make_step()
    rule.on_gradient(step.of(rule, "on_gradient"))
    return step.values["scale"]


def test_what_is_known_is_logged_and_a_mere_measure_changes_no_size() -> None:
    sizer = fed(NoiseScale(), 0.25, 5.0, steps=3)
    logs = sizer.on_update_end(GroupBatch([], 4, PassRule(), lambda own: [own]))
    expected = {"noise/signal": 0.25, "noise/trace": 5.0, "noise/scale": 20.0, "noise/prompts": 8.0}
    assert logs == pytest.approx(expected | {"noise/step_scale": 1.0}) and sizer.num_prompts == 8
    unknown = fresh(NoiseScale())
    unknown.batch_size(8)
    assert math.isnan(unknown.on_update_end(GroupBatch([], 1, PassRule(), lambda own: [own]))["noise/scale"])
    below = fed(NoiseScale(), -0.1, 5.0)
    assert math.isnan(below.on_update_end(GroupBatch([], 1, PassRule(), lambda own: [own]))["noise/scale"])


def test_the_norm_test_grows_a_batch_by_its_formula_and_never_shrinks_it() -> None:
    rule = NormTest(eta=0.5, most=64, warm_up=2)
    assert fed(rule, 1.0, 8.0, steps=1).num_prompts == 8  # warming up
    assert fed(rule, 1.0, 8.0, steps=2).num_prompts == math.ceil(8 / (0.25 * 2))  # |g|^2 = 1 + 8 / 8
    assert fed(rule, 1.0, 0.1, steps=2).num_prompts == 8  # the test holds
    assert fed(rule, 1.0, 1e6, steps=2).num_prompts == 32  # as |g|^2 is mostly noise
    assert fed(NormTest(most=12, warm_up=1), 1.0, 8.0).num_prompts == 12
    assert fed(NormTest(most=4, warm_up=1), 1.0, 8.0).num_prompts == 8
    two = fed(NormTest(eta=0.5, warm_up=1), 1.0, 8.0, prompts=4, ranks=2)
    assert two.num_prompts == 8 and scale_of(two) == pytest.approx(math.sqrt(2))


def test_goodput_is_best_at_the_noise_scale_where_steps_cost_nothing_by_themselves() -> None:
    rule = Goodput(calibration=1.0, warm_up=1, most=1024)
    fine = range(1, 4000)
    for scale in (3.0, 32.0, 500.0):
        assert fine[np.argmax([rule.goodput(size, scale) for size in fine])] == pytest.approx(scale, abs=1)
        slow = Goodput(overhead=50.0)
        by_hand = [size / (size + 50) * scale / (scale + size) * math.sqrt(size) for size in fine]
        assert [slow.goodput(size, scale) for size in fine] == pytest.approx(by_hand)
    assert fed(rule, 1.0, 32.0).num_prompts == 32 and fed(rule, 1.0, 2.0).num_prompts == 2
    assert fed(Goodput(warm_up=1), 1.0, 32.0).num_prompts == 64  # twice the noise scale, up to 64
    assert fed(Goodput(warm_up=1, least=4), 1.0, 0.5).num_prompts == 4
    assert fed(rule, 1.0, 10.0).num_prompts == 8  # 8 of 8, 16 is not a tenth better
    assert fed(Goodput(warm_up=1, most=5, least=5), 1.0, 32.0).num_prompts == 8  # no size fits
    assert scale_of(fed(rule, 1.0, 32.0)) == 2.0


def test_the_next_batch_of_the_stream_has_that_size() -> None:
    session = RolloutSession(make_plugins(["noise_scale"]))
    loader = PromptLoader(numbered(30), 3)
    session.open(PromptHistory(), loader)
    assert isinstance(session.sizer, NoiseScale) and session.sizer.num_prompts == loader.batch_size == 3
    batches = iter(loader)
    assert len(drawn(next(batches))) == 3
    session.sizer.num_prompts = 5
    session.open(PromptHistory(), loader)
    assert [len(drawn(next(batches))) for _ in range(2)] == [5, 5] and loader.state_dict()["prompts_consumed"] == 8


@pytest.mark.parametrize(
    ("part", "sentence"),
    [
        (SHARDS, "the full weights on each rank, but trainer.strategy fsdp2 shards them; take ddp"),
        (
            LearnerSettings(**SETTINGS, sequence_parallel_size=2).parts()[-1],
            "complete packed rows, and separate prompts, on each rank, but model.sequence_parallel_size 2 "
            "lets ranks share the tokens of each",
        ),
        (
            LearnerSettings(**SETTINGS, max_tokens_per_micro_batch="auto").parts()[-1],
            "a fixed number of tokens per micro-batch, but .* auto halves the number",
        ),
    ],
)
def test_what_it_needs_of_a_run_is_told(part: Requirement, sentence: str) -> None:
    facts = RunFacts(num_prompts=4, num_generations=8, max_tokens=20, updates_per_batch=1)
    RolloutSession(make_plugins(["noise_scale"])).check(facts, [])
    with pytest.raises(ValueError, match=rf"^rollout\.plugins noise_scale needs {sentence}"):
        RolloutSession(make_plugins(["noise_scale"])).check(facts, [part])
    with pytest.raises(ValueError, match=r"noise_scale: it needs one optimizer step on each batch, and .* takes 2"):
        RolloutSession(make_plugins(["noise_scale"])).check(replace(facts, updates_per_batch=2), [])
    with pytest.raises(ValueError, match="norm_test and goodput, which both decide how many prompts a batch has"):
        make_plugins(["norm_test", "goodput"])
