"""GRPOModule in a real Trainer, on rollouts made by hand."""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Sequence
from contextlib import nullcontext
from inspect import signature
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from conftest import random_policy, table_rows
from hand_made import (
    MAX_TOKENS,
    Batches,
    Budgets,
    Nudge,
    StepRecorder,
    as_groups,
    fit,
    flat,
    full_logprobs,
    make_module,
    make_rollout,
    make_trainer,
    nudge,
    random_groups,
    relative_error,
    sgd,
    weights_of,
)

from lit_grpo import module as module_file
from lit_grpo.callbacks import RunSummary
from lit_grpo.module import GRPOModule
from lit_grpo.rewards import RewardError, RewardSpec
from lit_grpo.rewards.function import RewardFunction
from lit_grpo.types import Rollout, RolloutGroup, SamplingParams
from lit_grpo.update.advantages.estimator import Advantages, GroupRewards
from lit_grpo.update.advantages.functions import Scale, group_advantages
from lit_grpo.update.batches.microbatch import least_tokens, num_row_tokens
from lit_grpo.update.learner import Learner
from lit_grpo.update.logprobs import reference as reference_file
from lit_grpo.update.logprobs.reference import Reference
from lit_grpo.update.objective.kl import KLTerm
from lit_grpo.update.objective.objective import Objective
from lit_grpo.update.objective.tokens import Normalization
from lit_grpo.update.step import Step

NAN = math.nan
MIXED = [[1.0, 0.0, 0.0, 1.0], [0.0, 1.0, 0.2, 0.5]]
# A mixed group, a uniform one, one with missing rewards, one without any, and another mixed one.
ALL_KINDS = [
    [1.0, 0.0, 0.0, 1.0],
    [0.5, 0.5, 0.5, 0.5],
    [NAN, 1.0, 0.0, NAN],
    [NAN, NAN, NAN, NAN],
    [0.0, 0.3, 1.0, 0.2],
]


def naive_step(
    policy: Any,
    groups: Sequence[RolloutGroup],
    normalization: Normalization = "token",
    scale: Scale = "group",
    epsilon_high: float = 0.2,
    beta: float = 0.0,
    reference: Any = None,
    temperature: float = 1.0,
) -> tuple[float, torch.Tensor]:
    """Loss and gradient of a step as the formula says: one rollout after another, with full logits."""
    rewards = GroupRewards.of(groups, [])
    advantages = group_advantages(rewards.rewards_R, rewards.groups_R, scale).tolist()
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    valid = [(r, a) for r, a in zip(rollouts, advantages, strict=True) if not math.isnan(a) and r.completion.num_tokens]
    num_tokens = sum(rollout.completion.num_tokens for rollout, _ in valid)
    policy.zero_grad()
    total = 0.0
    for rollout, advantage in valid:
        completion, prompt = rollout.completion, rollout.prompt.token_ids
        input_ids = torch.cat([torch.tensor(prompt), completion.token_ids_T])[None]
        logits = policy(input_ids=input_ids, use_cache=False).logits[0, len(prompt) - 1 : -1] / temperature
        logprobs = logits.log_softmax(-1).gather(-1, completion.token_ids_T[:, None]).squeeze(-1)
        ratio = (logprobs - completion.logprobs_T).exp()
        losses = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1 + epsilon_high) * advantage)
        if beta:
            difference = full_logprobs(reference, rollout, temperature) - logprobs
            losses = losses + beta * (difference.exp() - difference - 1)
        divisor = {
            "token": num_tokens,
            "sequence": len(valid) * completion.num_tokens,
            "constant": len(valid) * MAX_TOKENS,
        }[normalization]
        loss = losses.sum() / divisor
        loss.backward()
        total += float(loss.detach())
    return total, torch.cat([parameter.grad.flatten() for parameter in policy.parameters()])


# ---- arguments -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_generations": 0}, "num_generations must be from 1 to 65536, not 0"),
        ({"eval_num_generations": 0}, "eval_num_generations must be from 1 to 65536, not 0"),
        ({"pass_at_k": (1, 4), "eval_num_generations": 3}, "pass_at_k holds 4, but there are 3 completions a prompt"),
        ({"pass_at_k": (0,)}, "pass_at_k holds 0"),
        (
            {"advantages": Advantages("mc_grpo"), "num_generations": 2},
            "num_generations is 2, .* the median is the mean",
        ),
        (
            {"advantages": Advantages("gdpo"), "objective": Objective(kl=KLTerm(0.1, place="reward"))},
            r"estimator gdpo needs rewards without a KL term, but .*; set .*kl\.place to loss",
        ),
    ],
)
def test_a_wrong_argument_is_named_with_its_value(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_module("nowhere", **options)


def test_the_default_optimizer_takes_steps_that_a_pretrained_policy_survives() -> None:
    optimizer = make_module("nowhere", optimizer=signature(GRPOModule).parameters["optimizer"].default).make_optimizer
    made = optimizer([torch.nn.Parameter(torch.zeros(1))])
    assert type(made) is torch.optim.AdamW and made.param_groups[0]["lr"] == 1e-6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_generations": 1}, "num_generations is 1, but a group needs at least 2 completions"),
        ({"rewards": []}, r"model\.rewards is empty; name at least one, such as lit_grpo\.rewards\.exact_match"),
        ({"sampling": SamplingParams(temperature=0.0)}, r"sampling\.temperature is 0: .* set it above 0"),
        ({"sampling": SamplingParams(top_p=0.9)}, r"sampling\.top_p, top_k and min_p leave tokens out"),
        ({"sampling": SamplingParams(top_k=5)}, r"set them in eval_sampling"),
        ({"sampling": SamplingParams(min_p=0.1)}, r"leave them at 1, 0 and 0 for training"),
    ],
)
def test_fit_refuses_before_it_looks_for_the_policy(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit(make_module("nowhere", **options), [])


def test_a_batch_without_rollouts_names_the_callback_that_is_missing(policy_folder: Path) -> None:
    with pytest.raises(RuntimeError, match=r"no rollouts; give the Trainer callbacks=default_callbacks\(\)"):
        fit(make_module(policy_folder), [])


def test_more_minibatches_than_prompts_is_an_error(policy_folder: Path, policy: Any) -> None:
    with pytest.raises(ValueError, match="num_minibatches is 3, but a batch has 2 prompts; lower it"):
        fit(make_module(policy_folder, num_minibatches=3), random_groups(policy, MIXED))


def test_a_row_longer_than_a_micro_batch_is_an_error(policy_folder: Path, policy: Any) -> None:
    groups = random_groups(policy, MIXED)
    least = least_tokens([rollout for group in groups for rollout in group.rollouts], shared_prefix=True)
    with pytest.raises(ValueError, match=f"set it to at least {least}"):
        fit(make_module(policy_folder, max_tokens_per_micro_batch=least - 1), groups)


@pytest.mark.parametrize("change", ["eval", "gradient_checkpointing_enable"])
def test_a_callback_that_leaves_the_policy_in_another_mode_is_found_out(
    policy_folder: Path, policy: Any, change: str
) -> None:
    class Careless(pl.Callback):
        def on_train_batch_start(
            self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any, **kwargs: Any
        ) -> None:
            assert isinstance(pl_module, GRPOModule)
            getattr(pl_module.policy, change)()

    with pytest.raises(RuntimeError, match="a callback has changed it and must put it back"):
        fit(make_module(policy_folder), random_groups(policy, MIXED), callbacks=[Careless()])


# ---- the gradient of a step ----------------------------------------------------------------------------


STEPS = list(itertools.product(("token", "sequence", "constant"), (0.0, 0.1), (True, False)))


@pytest.mark.parametrize(
    ("normalization", "beta", "shares_prefix"),
    table_rows(STEPS, [("token", 0.0, True), ("sequence", 0.1, False), ("constant", 0.1, True)]),
)
def test_the_gradient_is_that_of_the_formula_however_the_step_is_split(
    policy_folder: Path,
    policy: Any,
    normalization: Normalization,
    beta: float,
    shares_prefix: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not shares_prefix:
        monkeypatch.setattr(module_file, "prefix_refusal", lambda model: "a test says so")
    groups = random_groups(policy, ALL_KINDS, noise=0.4)
    longest = max(num_row_tokens(rollout) for group in groups for rollout in group.rollouts)
    budgets = Budgets([longest, longest + 7, 3 * longest, 10_000])
    module = make_module(
        policy_folder, objective=Objective(normalization=normalization, kl=KLTerm(beta), epsilon=0.2, epsilon_high=0.3)
    )
    with nullcontext() if shares_prefix else pytest.warns(match="with a prompt of its own: a test says so"):
        recorder = fit(module, *[groups] * 4, callbacks=[Nudge(), budgets])

    nudged = random_policy()
    nudge(nudged)
    loss, gradient = naive_step(nudged, groups, normalization, epsilon_high=0.3, beta=beta, reference=policy)
    assert budgets.num_forwards[0] >= 5 and budgets.num_forwards[-1] == 1
    assert budgets.num_forwards == sorted(budgets.num_forwards, reverse=True)
    for step, logs in zip(recorder.gradients, recorder.logs, strict=True):
        assert relative_error(flat(step), gradient) < 1e-5
        assert logs["loss"] == pytest.approx(loss, rel=1e-4)
        assert logs["clip_ratio/low"] > 0 and logs["clip_ratio/high"] > 0


def test_a_run_without_any_reward_ends_after_three_batches_and_names_the_functions(
    policy_folder: Path, policy: Any
) -> None:
    without, some = random_groups(policy, [[NAN] * 4]), random_groups(policy, [[NAN, 1.0, 0.0, NAN]])
    fit(make_module(policy_folder), some, without, without, some, without, without)
    with pytest.raises(RewardError) as caught:
        fit(make_module(policy_folder), some, without, without, without)
    assert str(caught.value) == (
        "No rollout of 3 batches in a row has a reward, so there is nothing to learn from: each of exact_match "
        "(lit_grpo.rewards.exact_match) returned None or failed; let one apply, and check its weight and the data."
    )


def test_a_run_whose_rewards_give_nothing_to_the_first_batch_ends_at_once(policy_folder: Path, policy: Any) -> None:
    def silent(completion: str) -> None: ...

    rewards = [RewardSpec("exact_match"), silent]
    without, some = scored(random_groups(policy, [[NAN] * 4])), scored(random_groups(policy, [[NAN, 1.0, 0.0, NAN]]))
    with pytest.raises(RewardError) as caught:
        fit(make_module(policy_folder, rewards=rewards), without)
    assert str(caught.value) == (
        "No completion of the first batch has a reward: exact_match (exact_match), silent (silent) returned None for "
        "each of them; return a number, because None says that a function does not apply to a completion."
    )
    fit(make_module(policy_folder, rewards=rewards, on_reward_error="none"), without, some)  # they may have failed
    with pytest.warns(
        UserWarning, match=r"No completion of the first batch has a value of silent \(silent\), which"
    ) as w:
        fit(make_module(policy_folder, rewards=rewards), some, some, without)
    assert sum("first batch has a value of" in str(each.message) for each in w) == 1


def test_rewards_of_weight_zero_alone_are_refused_unless_something_else_is_learned_from(
    policy_folder: Path, policy: Any
) -> None:
    module = make_module(policy_folder, rewards=[RewardSpec("exact_match", weight=0.0)])
    without = random_groups(policy, [[NAN] * 4])
    with pytest.raises(ValueError, match=r"All functions of model\.rewards have the weight 0, which only logs"):
        fit(module, without)
    module.settings.learns_unrewarded = True  # as plug-ins say that learn from a teacher
    fit(module, *[without] * 4)


def test_a_run_that_teaches_nothing_says_so_once_and_on_its_card(
    policy_folder: Path, policy: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    flat = scored(random_groups(policy, [[0.1] * 4, [1.0] * 4]))
    with pytest.warns(UserWarning, match=r"The last 3 batches, up to update 2, had no learning signal: ") as w:
        fit(make_module(policy_folder), *[flat] * 7, callbacks=[RunSummary()])
    assert sum("had no learning signal" in str(each.message) for each in w) == 1
    assert re.search(
        r"^no signal +7 of 7 batches, in which no group had rewards that differ", capsys.readouterr().out, re.M
    )


def test_temperature_divides_the_logits_of_policy_and_reference(policy_folder: Path, policy: Any) -> None:
    groups = random_groups(policy, MIXED)
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        rollout.completion.logprobs_T = full_logprobs(policy, rollout, temperature=0.6)
    sampling = SamplingParams(temperature=0.6, max_tokens=MAX_TOKENS)
    recorder = fit(make_module(policy_folder, sampling=sampling, objective=Objective(kl=KLTerm(0.1))), groups)
    assert recorder.logs[0]["sampling/logprob_gap_max"] < 1e-5
    assert recorder.logs[0]["kl"] == pytest.approx(0, abs=1e-6)
    gradient = naive_step(policy, groups, beta=0.1, reference=policy, temperature=0.6)[1]
    assert relative_error(flat(recorder.gradients[0]), gradient) < 1e-5


# ---- what must not move a weight -----------------------------------------------------------------------


def test_a_uniform_batch_counts_as_a_step_and_moves_no_weight_whatever_the_optimizer_remembers(
    policy_folder: Path, policy: Any
) -> None:
    class Weights(pl.Callback):
        def __init__(self) -> None:
            self.after: list[torch.Tensor] = []

        def on_train_batch_end(
            self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any, **kwargs: Any
        ) -> None:
            assert isinstance(pl_module, GRPOModule)
            self.after.append(weights_of(pl_module))

    module = make_module(
        policy_folder, optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.5)
    )
    weights = Weights()
    mixed, uniform = random_groups(policy, MIXED), random_groups(policy, [[0.7] * 4, [NAN] * 4])
    recorder = fit(module, mixed, uniform, uniform, mixed, callbacks=[weights])
    first, second, third, fourth = weights.after
    assert torch.equal(first, second) and torch.equal(second, third)
    assert not torch.equal(third, fourth)
    assert module.policy_version == len(recorder.gradients) == 4
    assert [logs["update/tokens"] > 0 for logs in recorder.logs] == [True, False, False, True]
    assert [logs["loss"] for logs in recorder.logs[1:3]] == [0.0, 0.0]
    assert recorder.logs[1]["frac_reward_zero_std"] == 1.0


def test_an_update_whose_gradient_is_not_finite_is_left_out_and_several_in_a_row_end_the_run(
    policy_folder: Path, policy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where a run without a folder writes
    broken, sound = (random_groups(policy, [[0.0, reward, 0.0, reward]]) for reward in (1e30, 1.0))
    make = functools.partial(make_module, policy_folder, advantages=Advantages(scale="none"))  # 1e30 overflows the norm
    module = make(optimizer=sgd(1.0))
    recorder = fit(module, broken, broken)
    expected = torch.cat([parameter.detach().flatten() for parameter in policy.parameters()])
    assert torch.equal(weights_of(module), expected)
    assert [logs["update/skipped"] for logs in recorder.logs] == [1.0, 1.0]
    assert module.policy_version == 2
    module = make(optimizer=sgd(1e-3))
    recorder = fit(module, broken, broken, sound, broken, broken)
    assert [logs["update/skipped"] for logs in recorder.logs] == [1.0, 1.0, 0.0, 1.0, 1.0]
    assert not torch.equal(weights_of(module), expected) and weights_of(module).isfinite().all()
    said = (
        r"collapsed at update 2: the gradient's norm is (nan|inf) .* 3 times in a row .*is in .*broken-update-2-rank-0"
    )
    with pytest.raises(FloatingPointError, match=said):
        fit(make(optimizer=sgd(1.0)), broken, broken, broken)
    with pytest.raises(FloatingPointError, match=r"collapsed at update 0: .* 1 times in a row"):
        fit(make(optimizer=sgd(1.0), max_skipped_updates=1), broken)


# ---- steps and versions --------------------------------------------------------------------------------


class NotesSteps(Learner):
    """Notes the prompts of each optimizer step."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.seen: list[list[str]] = []

    def make_step(self, rollouts: Sequence[Rollout], *args: Any, **kwargs: Any) -> Step:
        self.seen.append([rollout.prompt.prompt_id for rollout in rollouts])
        return super().make_step(rollouts, *args, **kwargs)


def test_iterations_times_minibatches_are_that_many_steps_with_each_group_once_an_iteration(
    policy_folder: Path, policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module_file, "Learner", NotesSteps)
    module = make_module(policy_folder, num_iterations=3, num_minibatches=2)
    groups = random_groups(policy, [*MIXED, MIXED[0]])
    recorder = fit(module, groups)
    assert isinstance(module.learner, NotesSteps)
    first, second = ["train/0"] * 4 + ["train/1"] * 4, ["train/2"] * 4
    assert module.learner.seen == [first, second] * 3
    assert module.policy_version == len(recorder.gradients) == 6
    # Each step is normalized by its own tokens, with the advantages of whole groups.
    for step, part in enumerate([groups[:2], groups[2:]] * 3):
        assert relative_error(flat(recorder.gradients[step]), naive_step(policy, part)[1]) < 1e-5


def test_the_lr_scheduler_is_stepped_once_an_optimizer_step_and_the_rate_used_is_logged(
    policy_folder: Path, policy: Any
) -> None:
    module = make_module(
        policy_folder,
        num_minibatches=2,
        optimizer=sgd(0.8),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
    )
    recorder = fit(module, random_groups(policy, MIXED), random_groups(policy, MIXED))
    assert [logs["lr"] for logs in recorder.logs] == pytest.approx([(0.8 + 0.4) / 2, (0.2 + 0.1) / 2])
    optimizer = module.optimizers()
    assert not isinstance(optimizer, list)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)


def test_the_policy_version_survives_a_checkpoint(policy_folder: Path, policy: Any, tmp_path: Path) -> None:
    groups = random_groups(policy, MIXED)
    options = {"num_iterations": 3, "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=0.01)}
    trainer, before = make_trainer(), make_module(policy_folder, **options)
    trainer.fit(before, train_dataloaders=Batches([groups, groups]))
    assert before.policy_version == 6
    trainer.save_checkpoint(tmp_path / "last.ckpt")

    class AtStart(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            assert isinstance(pl_module, GRPOModule)
            self.version, self.weights = pl_module.policy_version, weights_of(pl_module)

    start, after = AtStart(), make_module(policy_folder, **options)
    assert after.policy_version == 0
    make_trainer(start, max_epochs=2).fit(after, Batches([groups, groups]), ckpt_path=tmp_path / "last.ckpt")
    assert start.version == 6 and torch.equal(start.weights, weights_of(before))
    assert after.policy_version == 12


# ---- the model -----------------------------------------------------------------------------------------


def test_gradient_checkpointing_computes_each_layer_again_and_gives_the_same_gradient(
    policy_folder: Path, policy: Any
) -> None:
    class CountsLayers(pl.Callback):
        def __init__(self) -> None:
            self.calls = 0

        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            assert isinstance(pl_module, GRPOModule)
            layer = pl_module.policy.get_submodule("model.layers.0")
            layer.get_submodule("mlp").register_forward_pre_hook(self._count)

        def _count(self, *_: Any) -> None:
            self.calls += 1

    groups, counts, gradients = random_groups(policy, MIXED), [], []
    for checkpointing in (False, True, "selective"):
        counter = CountsLayers()
        module = make_module(policy_folder, gradient_checkpointing=checkpointing)
        gradients.append(flat(fit(module, groups, callbacks=[counter]).gradients[0]))
        counts.append(counter.calls)
    assert counts == [1, 2, 2]
    assert max(relative_error(gradient, gradients[0]) for gradient in gradients[1:]) < 1e-5


def count_loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    loads: list[str] = []

    def load(policy: str, *options: Any, **more: Any) -> Any:
        loads.append(policy)
        return original(policy, *options, **more)

    original = module_file.load_policy
    for place in (module_file, reference_file):
        monkeypatch.setattr(place, "load_policy", load)
    return loads


def test_without_a_kl_term_no_reference_is_loaded(
    policy_folder: Path, policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = count_loads(monkeypatch)
    recorder = fit(make_module(policy_folder), random_groups(policy, MIXED))
    assert len(loads) == 1
    assert "kl" not in recorder.logs[0]


def test_the_reference_stays_as_it_was_and_out_of_parameters_and_checkpoints(
    policy_folder: Path, policy: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    loads = count_loads(monkeypatch)
    module = make_module(policy_folder, objective=Objective(kl=KLTerm(0.1)), optimizer=sgd(0.1))
    trainer, recorder = make_trainer(recorder := StepRecorder()), recorder
    groups = random_groups(policy, MIXED, noise=0.0)
    trainer.fit(module, train_dataloaders=Batches([groups, groups]))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    assert len(loads) == 2
    assert recorder.logs[0]["kl"] == pytest.approx(0, abs=1e-6) and recorder.logs[1]["kl"] > 1e-5

    names = {f"policy.{name}" for name in policy.state_dict()}
    saved = torch.load(tmp_path / "last.ckpt", weights_only=False)["state_dict"]
    for state in (module.state_dict(), saved):
        assert set(state) == names
    assert len(list(module.parameters())) == len(list(policy.parameters()))
    assert isinstance(module.learner.reference, Reference)
    for kept, first in zip(module.learner.reference.model.parameters(), policy.parameters(), strict=True):
        assert torch.equal(kept, first) and not kept.requires_grad and kept.grad is None


def test_the_reference_is_loaded_for_fit_where_validation_came_first(policy_folder: Path, policy: Any) -> None:
    """The command line validates before it fits, with the same module."""
    module, trainer = (
        make_module(policy_folder, objective=Objective(kl=KLTerm(0.1))),
        make_trainer(recorder := StepRecorder()),
    )
    trainer.validate(module, Batches([scored(random_groups(policy, MIXED))]), verbose=False)
    assert not hasattr(module, "learner")
    trainer.fit(module, train_dataloaders=Batches([random_groups(policy, MIXED)]))
    assert "kl" in recorder.logs[0]


# ---- validation and predict ----------------------------------------------------------------------------


def scored(groups: list[RolloutGroup]) -> list[RolloutGroup]:
    """The groups with each reward as that of the first reward function."""
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        rollout.rewards = {"exact_match": None if math.isnan(rollout.reward) else rollout.reward}
    return groups


def test_validation_counts_who_passes_over_all_batches(policy_folder: Path) -> None:
    def group(prompt_id: str, rewards: list[float]) -> list[RolloutGroup]:
        reason = "length" if prompt_id == "a" else "stop"
        rollouts = [
            make_rollout([5], [6] * (sample + 1), reward, prompt_id=prompt_id, sample_id=sample, finish_reason=reason)
            for sample, reward in enumerate(rewards)
        ]
        return scored(as_groups(rollouts))

    module = make_module(policy_folder, eval_num_generations=4, pass_at_k=(1, 2, 4), pass_threshold=0.5)
    batches = Batches([group("a", [1, 0, 0.5, 0]) + group("b", [0, 0, 0.4, 0]), group("c", [1, 1, 1, 1])])
    trainer = make_trainer()
    for stage, run in (("val", trainer.validate), ("test", trainer.test), ("val", trainer.validate)):
        (logs,) = run(module, batches, verbose=False)
        expected = {
            "pass@1": (1 / 2 + 0 + 1) / 3,
            "pass@2": (5 / 6 + 0 + 1) / 3,
            "pass@4": (1 + 0 + 1) / 3,
            "reward": 5.9 / 12,
            "completion_length": 2.5,
            "truncated": 1 / 3,
        }
        assert {name: logs[f"{stage}/{name}"] for name in expected} == pytest.approx(expected)


def two_rewards(completion: str) -> float:
    return float(completion.isdigit())


TWO = [RewardSpec("format_match", args={"pattern": "."}), two_rewards]


def test_the_named_reward_decides_who_passes_and_every_reward_is_logged(policy_folder: Path) -> None:
    groups = as_groups([make_rollout([5], [6], 1.0, sample_id=sample) for sample in range(4)])
    for rollout, correct in zip(groups[0].rollouts, (1.0, 0.0, None, 0.0), strict=True):
        rollout.rewards = {"format_match": 1.0, "two_rewards": correct}
    for chosen, passed in ((None, 1.0), ("format_match", 1.0), ("two_rewards", 0.25)):
        module = make_module(policy_folder, rewards=TWO, eval_num_generations=4, pass_reward=chosen)
        assert module.settings.pass_rule is module.pass_rule
        (logs,) = make_trainer().validate(module, Batches([groups]), verbose=False)
        assert logs["val/pass@1"] == passed
        assert logs["val/rewards/format_match/mean"] == 1.0
        assert logs["val/rewards/two_rewards/mean"] == pytest.approx(1 / 3)  # where it applies


def test_a_reward_that_is_to_decide_and_is_not_there_is_refused_before_anything_is_loaded(policy_folder: Path) -> None:
    names = r"^model\.pass_reward 'corect' names no reward function: the names are format_match, two_rewards; write one"
    with pytest.raises(ValueError, match=names):
        make_module(policy_folder, rewards=TWO, pass_reward="corect").setup("validate")
    with pytest.raises(ValueError, match=r"^model\.pass_reward 'corect' names no .*: model\.rewards has none; "):
        make_module(policy_folder, rewards=[], pass_reward="corect").setup("predict")


@pytest.mark.parametrize("own", [TWO, []])
def test_a_reward_that_a_plug_in_brings_may_decide(policy_folder: Path, own: list[Any]) -> None:
    module = make_module(policy_folder, rewards=own, pass_reward="solved", pass_threshold=0.5)
    module.join_rewards([RewardFunction.of(lambda completion: 1.0, "solved")])
    module.pass_rule.check([function.name for function in module.rewards])
    assert str(module.pass_rule) == str(module.settings.pass_rule) == "solved >= 0.5"
    assert module.pass_rule.passes({"solved": 0.5}) and not module.pass_rule.passes({"format_match": 1.0})


def test_predict_returns_a_row_for_each_completion(policy_folder: Path) -> None:
    rollouts = [
        make_rollout([5, 6], [7, 1], 1.0, [-0.5, -0.25], sample_id=0),
        make_rollout([5, 6], [8], NAN, [-2.0], sample_id=1, finish_reason="length"),
    ]
    rollouts[0].rewards = {"exact_match": 1.0}
    rows = make_trainer().predict(make_module(policy_folder, rewards=[]), Batches([as_groups(rollouts)]))
    common = {"prompt_id": "train/0", "prompt": "", "completion": "", "columns": {}}
    assert rows == [
        [
            {
                **common,
                "sample_id": 0,
                "token_ids": [7, 1],
                "logprob": -0.75,
                "finish_reason": "stop",
                "reward": 1.0,
                "rewards": {"exact_match": 1.0},
            },
            {**common, "sample_id": 1, "token_ids": [8], "logprob": -2.0, "finish_reason": "length"},
        ]
    ]


def test_a_held_out_prompt_that_no_reward_can_judge_is_left_out_of_pass_at_k(policy_folder: Path) -> None:
    groups = as_groups([make_rollout([5], [6], 1.0, sample_id=sample) for sample in range(2)])
    groups += as_groups([make_rollout([7], [6], 0.5, sample_id=sample) for sample in range(2)])
    for rewards, rollout in zip(
        (1.0, 0.0, None, None), [each for group in groups for each in group.rollouts], strict=True
    ):
        rollout.rewards = {"format_match": 1.0, "two_rewards": rewards}
    module = make_module(policy_folder, rewards=TWO, eval_num_generations=2, pass_reward="two_rewards")
    (logs,) = make_trainer().validate(module, Batches([groups]), verbose=False)
    assert logs["val/pass@1"] == 0.5 and logs["val/reward"] == 0.75
