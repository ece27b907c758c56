"""Loss, gradient and advantages beside TRL 1.16's own.

TRL's side is a real ``GRPOTrainer``: its ``rollout_func`` hands over the same tokens and its reward function
the same rewards, so that advantages, padding (prompts on the left, completions on the right), reference
log-probs and the token count all come out of its ``_generate_and_score_completions``; only the log-probs of
the policy that sampled are put in afterwards. Our side is the real GRPOModule in a real Lightning Trainer.

With a KL term TRL is told ``use_bias_correction_kl=False``: the term is that of the GRPO paper's equation 4,
where TRL's default multiplies it by the probability ratio (DeepSeek-V3.2, arXiv 2512.02556).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from conftest import random_policy
from hand_made import (
    MAX_TOKENS,
    fit,
    flat,
    make_module,
    random_groups,
    relative_error,
)

from lit_grpo.module import GRPOModule
from lit_grpo.policy.loading import load_tokenizer
from lit_grpo.rewards import RewardSpec
from lit_grpo.types import Completion, RolloutGroup, SamplingParams
from lit_grpo.update.advantages.estimator import Advantages, ScaleBy
from lit_grpo.update.objective.kl import KLTerm
from lit_grpo.update.objective.objective import Objective
from lit_grpo.update.objective.tokens import Normalization

trl = pytest.importorskip("trl")

pytestmark = pytest.mark.filterwarnings("ignore")

LOSS_TYPES = {"token": "dapo", "sequence": "grpo", "constant": "dr_grpo"}
REWARDS = [[1.0, 0.0, 0.0, 1.0], [0.3, 0.3, 0.3, 0.3], [0.0, 2.0, -1.5, 0.25], [0.0, 0.0, 1.0, 0.1]]
TEMPERATURE = 0.9
WEIGHTS = {"narrow": 1.0, "wide": 0.5}


@torch.no_grad()
def nudge(model: Any) -> None:
    """Move a policy away from the reference; double precision, so that rounding hides nothing."""
    generator = torch.Generator().manual_seed(7)
    for parameter in model.double().parameters():
        parameter += 0.02 * torch.randn(parameter.shape, generator=generator)


class Nudge(pl.Callback):
    """Nudges the module's policy before it is trained."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, GRPOModule)
        nudge(pl_module.policy)


class NotesAdvantages(pl.Callback):
    """Keeps the advantages of the last batch."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.advantages_R = torch.tensor([rollout.advantage for rollout in batch.rollouts])


def trl_step(folder: Path, groups: Sequence[RolloutGroup], output: Path, **settings: Any) -> tuple[Any, Any, Any]:
    """A GRPOTrainer on these rollouts: the trainer, its inputs and the loss, after backward."""
    from datasets import Dataset
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    rollouts = [rollout for group in groups for rollout in group.rollouts]
    names = list(rollouts[0].rewards)
    by_function = [[rollout.rewards[name] for rollout in rollouts] for name in names]
    values = by_function or [[rollout.reward for rollout in rollouts]]

    def hand_over(prompts: list[str], trainer: Any) -> dict[str, Any]:
        return {
            "prompt_ids": [list(rollout.prompt.token_ids) for rollout in rollouts],
            "completion_ids": [rollout.completion.token_ids_T.tolist() for rollout in rollouts],
            "logprobs": [rollout.completion.logprobs_T.tolist() for rollout in rollouts],
        }

    rows: list[Any] = [{"prompt": "1+1="} for _ in rollouts]
    config = GRPOConfig(
        output_dir=str(output),
        per_device_train_batch_size=len(rollouts),
        num_generations=len(groups[0].rollouts),
        max_completion_length=MAX_TOKENS,
        temperature=TEMPERATURE,
        use_cpu=True,
        bf16=False,
        report_to=[],
        gradient_checkpointing=False,
        use_bias_correction_kl=False,
        **settings,
    )
    trainer = GRPOTrainer(
        model=str(folder),
        reward_funcs=[lambda rewards=rewards, **_: rewards for rewards in values],
        args=config,
        train_dataset=Dataset.from_list(rows),
        rollout_func=hand_over,
    )
    trainer.current_gradient_accumulation_steps = 1
    assert trainer.model is not None
    nudge(trainer.model)
    trainer.model.train()
    inputs = trainer._generate_and_score_completions(rows)
    old = torch.nn.utils.rnn.pad_sequence([rollout.completion.logprobs_T for rollout in rollouts], batch_first=True)
    inputs["old_per_token_logps"] = old
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    return trainer, inputs, loss


@pytest.mark.parametrize(
    ("normalization", "epsilon_high", "beta", "scale"),
    [
        ("token", None, 0.0, "group"),  # the default objective
        ("sequence", 0.28, 0.04, "batch"),
        ("constant", 0.28, 0.04, "none"),
    ],
)
def test_loss_gradient_and_advantages_are_those_of_trl(
    policy_folder: Path,
    policy: Any,
    tmp_path: Path,
    normalization: Normalization,
    epsilon_high: float | None,
    beta: float,
    scale: ScaleBy,
) -> None:
    nudged = random_policy()
    nudge(nudged)
    groups = random_groups(nudged, REWARDS, noise=0.3, temperature=TEMPERATURE)
    recorded = NotesAdvantages()
    module = make_module(
        policy_folder,
        sampling=SamplingParams(temperature=TEMPERATURE, max_tokens=MAX_TOKENS),
        objective=Objective(normalization=normalization, epsilon=0.2, epsilon_high=epsilon_high, kl=KLTerm(beta)),
        advantages=Advantages(scale=scale),
        max_tokens_per_micro_batch=60,  # several micro-batches; TRL's is one
    )
    ours = fit(module, groups, callbacks=[Nudge(), recorded])
    trainer, inputs, loss = trl_step(
        policy_folder,
        groups,
        tmp_path,
        loss_type=LOSS_TYPES[normalization],
        epsilon_high=epsilon_high,
        beta=beta,
        scale_rewards=scale,
    )

    torch.testing.assert_close(recorded.advantages_R, inputs["advantages"], rtol=1e-6, atol=1e-6)
    assert ours.logs[0]["loss"] == pytest.approx(float(loss), rel=1e-6, abs=1e-7)
    theirs = {name: parameter.grad for name, parameter in trainer.model.named_parameters()}
    assert list(theirs) == list(ours.gradients[0])
    assert relative_error(flat(ours.gradients[0]), flat(theirs)) < 1e-6
    for name, gradient in theirs.items():
        assert relative_error(ours.gradients[0][name], gradient) < 2e-6, name
    metrics = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    assert metrics["clip_ratio/low_mean"] > 0 and metrics["clip_ratio/high_mean"] > 0  # there was something to clip
    for which in ("low", "high") if beta else ():  # without a KL term groups of equal rewards are in no mean
        assert ours.logs[0][f"clip_ratio/{which}"] == pytest.approx(metrics[f"clip_ratio/{which}_mean"], abs=1e-6)
    if beta:
        assert metrics["kl"] > 1e-3
        assert ours.logs[0]["kl"] == pytest.approx(metrics["kl"], rel=1e-5)


def test_advantages_of_several_rewards_are_those_of_trl(policy_folder: Path, policy: Any, tmp_path: Path) -> None:
    """GDPO: TRL normalizes each reward function's values, some of them missing, before it adds them up."""
    groups = random_groups(policy, REWARDS, temperature=TEMPERATURE)
    wide = torch.randn(16, generator=torch.Generator().manual_seed(3)).tolist()
    for index, rollout in enumerate(rollout for group in groups for rollout in group.rollouts):
        rollout.rewards = {
            "narrow": None if index % 5 == 2 else rollout.reward,
            "wide": None if index % 4 == 2 else 50 * wide[index],
        }
    module = make_module(
        policy_folder,
        rewards=[RewardSpec("lit_grpo.rewards.exact_match", weight, name) for name, weight in WEIGHTS.items()],
        advantages=Advantages("gdpo"),
    )
    recorded = NotesAdvantages()
    fit(module, groups, callbacks=[recorded])
    _, inputs, _ = trl_step(
        policy_folder,
        groups,
        tmp_path,
        multi_objective_aggregation="normalize_then_sum",
        reward_weights=list(WEIGHTS.values()),
    )
    ours = recorded.advantages_R
    assert ours.isnan().tolist() == [index == 2 for index in range(16)]  # no function had a value
    torch.testing.assert_close(ours.nan_to_num(0.0), inputs["advantages"], rtol=1e-5, atol=1e-6)


SHARED = {
    *("reward", "reward_std", "frac_reward_zero_std", "loss", "entropy", "kl"),
    *(f"completions/{which}_length" for which in ("mean", "min", "max")),
    *(f"completions/{which}_terminated_length" for which in ("mean", "min", "max")),
    *("completions/clipped_ratio", *(f"rewards/{name}/{figure}" for name in WEIGHTS for figure in ("mean", "std"))),
}
"""What both log under one name in a step with a KL term."""


def test_metrics_of_the_same_name_have_the_same_values(policy_folder: Path, tmp_path: Path) -> None:
    """All groups have variance, so that both train on all tokens; what differs otherwise is in docs/migration.md."""
    nudged = random_policy()
    nudge(nudged)
    groups = random_groups(nudged, [row for row in REWARDS if len(set(row)) > 1], noise=0.3, temperature=TEMPERATURE)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    end = load_tokenizer(str(policy_folder)).eos_token_id
    for index, rollout in enumerate(rollouts):
        rollout.rewards = {"narrow": rollout.reward, "wide": None if index % 4 == 2 else float(index)}
        rollout.reward += WEIGHTS["wide"] * (rollout.rewards["wide"] or 0.0)
        whole = rollout.completion
        tokens = [*whole.token_ids_T.tolist()[:-1], end] if index % 3 else whole.token_ids_T
        reason = "stop" if index % 3 else "length"
        rollout.completion = Completion(whole.request, tokens, whole.logprobs_T, whole.versions_T, reason)
    module = make_module(
        policy_folder,
        rewards=[RewardSpec("lit_grpo.rewards.exact_match", weight, name) for name, weight in WEIGHTS.items()],
        sampling=SamplingParams(temperature=TEMPERATURE, max_tokens=MAX_TOKENS),
        objective=Objective(kl=KLTerm(0.04)),
    )
    ours = fit(module, groups, callbacks=[Nudge()]).logs[0]
    trainer, _, loss = trl_step(policy_folder, groups, tmp_path, beta=0.04, reward_weights=list(WEIGHTS.values()))
    logged = trainer._metrics["train"]
    by_function = {f"rewards/{name}/{figure}": logged[f"rewards/<lambda>/{figure}"][number]
                   for number, name in enumerate(WEIGHTS) for figure in ("mean", "std")}  # fmt: skip
    theirs = {name: values[-1] for name, values in logged.items()} | by_function | {"loss": float(loss)}
    assert theirs.keys() & ours.keys() == SHARED
    assert {name: ours[name] for name in SHARED} == pytest.approx({name: theirs[name] for name in SHARED}, rel=1e-5)
    seen = sum(len(rollout.prompt.token_ids) + rollout.completion.num_sampled for rollout in rollouts)
    assert theirs["num_tokens"] == seen  # what ThroughputMonitor counts too
