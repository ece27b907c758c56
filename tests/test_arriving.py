"""Learning from groups one after another is learning from all of them together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import table_rows
from hand_made import Batches, StepRecorder, fit, flat, make_module, make_trainer, random_groups, relative_error

from lit_grpo.methods import make_plugins
from lit_grpo.methods.vcpo import EffectiveSamples
from lit_grpo.module import GRPOModule
from lit_grpo.rollout.session import RolloutSession
from lit_grpo.types import PromptBatch, RolloutGroup
from lit_grpo.update.advantages.estimator import Advantages
from lit_grpo.update.learner_settings import check_arriving
from lit_grpo.update.objective.corrections import Correction
from lit_grpo.update.objective.kl import KLTerm
from lit_grpo.update.objective.objective import EntropyBonus, Objective

REWARDS = [[1.0, 0.0, 0.5], [0.0, 1.0], [0.0, 0.0, 0.0], [1.0, float("nan"), 0.0, 2.0], [0.25, 0.5]]
OBJECTIVES = {
    "dapo": Objective(entropy=EntropyBonus(0.01)),
    "grpo": Objective("grpo", kl=KLTerm(0.05)),
    "dr_grpo": Objective("dr_grpo", mask_truncated=True),
    "gspo": Objective("gspo"),
    "luspo": Objective("luspo"),
    "corrected": Objective(correction=Correction("token_truncate")),
    "vcpo": Objective(off_policy_kl=0.5),
    "kl in the reward": Objective(kl=KLTerm(0.05, place="reward")),
}


class Arrivals(Batches):
    """Gives the groups of each batch one after another, in another order."""

    def __iter__(self) -> Iterator[PromptBatch]:
        for batch in super().__iter__():
            groups, batch.groups = batch.groups, []
            batch.arriving = self._arriving(batch, groups)
            yield batch

    def _arriving(self, batch: PromptBatch, groups: list[RolloutGroup]) -> Iterator[list[RolloutGroup]]:
        for places in ([3], [], [0, 4], [2], [1]):
            yield [groups[place] for place in places]
        batch.groups = groups


def as_they_come(module: GRPOModule, *batches: Sequence[RolloutGroup]) -> StepRecorder:
    recorder = StepRecorder()
    make_trainer(recorder).fit(module, train_dataloaders=Arrivals(batches))
    return recorder


@pytest.mark.parametrize("name", table_rows(OBJECTIVES, ["grpo", "dr_grpo", "vcpo", "kl in the reward"]))
@pytest.mark.parametrize("max_tokens", table_rows([24, 8192], [24]))
def test_the_gradient_is_that_of_all_groups_together(policy_folder: Path, name: str, max_tokens: int) -> None:
    settings: dict[str, Any] = {"objective": OBJECTIVES[name], "max_tokens_per_micro_batch": max_tokens}
    settings["plugins"] = [EffectiveSamples()] if name == "vcpo" else []
    module = make_module(policy_folder, **settings)
    module.configure_model()
    groups = random_groups(module.policy, REWARDS)
    together = fit(make_module(policy_folder, **settings), groups)
    arrived = as_they_come(make_module(policy_folder, **settings), groups)
    assert relative_error(flat(arrived.gradients[0]), flat(together.gradients[0])) < 1e-6
    for key, value in together.logs[0].items():
        assert arrived.logs[0][key] == pytest.approx(value, rel=1e-4, abs=1e-7, nan_ok=True), key


def test_memory_that_runs_out_takes_all_parts_again(policy_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lit_grpo.update.micro_batch_size import MicroBatchSize

    module = make_module(policy_folder)
    module.configure_model()
    groups = random_groups(module.policy, REWARDS)
    together = fit(make_module(policy_folder), groups)
    module = make_module(policy_folder, max_tokens_per_micro_batch="auto")
    monkeypatch.setattr("lit_grpo.update.passes.estimate_tokens", lambda *_: 40)
    add_gradient, calls = module.add_gradient, []

    def fails_once(compute_loss: Any, exchange: bool) -> None:
        calls.append(exchange)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        add_gradient(compute_loss, exchange)

    module.add_gradient = fails_once
    arrived = as_they_come(module, groups)
    budget = module.learner.passes.budget
    assert isinstance(budget, MicroBatchSize) and budget.tokens < 40
    assert relative_error(flat(arrived.gradients[0]), flat(together.gradients[0])) < 1e-6
    assert arrived.logs[0]["loss"] == pytest.approx(together.logs[0]["loss"], rel=1e-4)
    assert not any(calls)  # one rank has nobody to exchange with


WHOLE_BATCH = (
    "needs the whole batch, of all ranks, before its first gradient, but a plug-in with overlap within learns "
    "from groups while others of their batch decode"
)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"advantages": Advantages("reinforce_plus_plus")},
            f"model.advantages.estimator reinforce_plus_plus {WHOLE_BATCH}",
        ),
        (
            {"plugins": ["d3s_tokens:tokens=1.0,first_tokens=0.5"]},
            f"rollout.plugins d3s_tokens {WHOLE_BATCH}",
        ),
        ({"plugins": ["d3s:keep=2"]}, f"rollout.plugins d3s {WHOLE_BATCH}"),
        ({"plugins": ["capo"]}, f"rollout.plugins capo {WHOLE_BATCH}"),
        ({"objective": Objective(top_entropy_quantile=0.5)}, f"model.objective.top_entropy_quantile 0.5 {WHOLE_BATCH}"),
        (
            {"objective": Objective("grpo", entropy=EntropyBonus(0.1))},
            f"model.objective.entropy with normalization sequence {WHOLE_BATCH}",
        ),
        (
            {"max_tokens_per_micro_batch": "auto"},
            "a plug-in with overlap within needs a fixed number of tokens per micro-batch, but "
            "model.max_tokens_per_micro_batch auto halves the number wherever the memory of a rank runs out",
        ),
    ],
)
def test_what_needs_all_groups_beforehand_is_refused(
    policy_folder: Path, settings: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=f"{sentence}.*take a plug-in with overlap none"):
        check(policy_folder, **settings)
    check(policy_folder, plugins=["pods:keep=2", "replace_flat"])


def check(policy_folder: Path, plugins: Sequence[str] = (), **options: Any) -> None:
    parts = RolloutSession(make_plugins(plugins)).parts()
    check_arriving(make_module(policy_folder, **options).settings, num_ranks=2, plugins=parts)
