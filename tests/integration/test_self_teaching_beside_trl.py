"""Self-distillation beside TRL 1.16: the teachers' prompts and the gradient are those of its trainers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import random_policy, save_policy
from test_learner import make_learner
from test_self_teaching import RIGHT, group_of, started
from test_sft import data_of

from lit_grpo.cli.command_line import run
from lit_grpo.data import PromptDataModule
from lit_grpo.methods.sdft import SDFT
from lit_grpo.methods.sdpo import SDPO
from lit_grpo.plugins import GroupBatch
from lit_grpo.types import Rollout, RolloutGroup
from lit_grpo.update.objective.objective import Objective

pytest.importorskip("trl")
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("exact_norms"),
]
CHAT = (
    "{% for m in messages %}{{ m.role[0] }}#{{ m.content }}<eos>{% endfor %}{% if add_generation_prompt %}a#{% endif %}"
)
TEMPLATES: dict[str, Any] = {
    "template": "{prompt}{solution}{feedback} = good",
    "solution_template": " = {solution} -",
    "feedback_template": " bad * {feedback} *",
}
SYSTEM = [{"role": "system", "content": "no ink"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_policy(tmp_path, template=CHAT)
    return tmp_path


def rows_of(form: str) -> list[dict[str, Any]]:
    texts = ["12 + 3", "a"]
    prompts: list[Any] = texts if form == "text" else [[*SYSTEM, {"role": "user", "content": each}] for each in texts]
    return [{"prompt": each, "solution": f"deep {number}"} for number, each in enumerate(prompts)]


def trl_trainer(data: PromptDataModule, **settings: Any) -> Any:
    """What TRL's builders read of a trainer, with the data's own tokenizer."""
    from trl.experimental.sdpo.sdpo_trainer import SDPOTrainer

    tokenizer: Any = data._tokenizer
    accelerator = SimpleNamespace(
        device="cpu", process_index=0, gather=lambda values: values, pad_across_processes=lambda values, **_: values
    )
    trainer = SimpleNamespace(
        accelerator=accelerator,
        model=SimpleNamespace(training=True),
        num_generations=3,
        processing_class=tokenizer,
        _tokenizer=tokenizer,
        chat_template_kwargs={},
        args=SimpleNamespace(**settings),
    )
    untruncated: Any = SDPOTrainer._tokenize_prompts_untruncated
    trainer._tokenize_prompts_untruncated = trainer._tokenize_prompts = lambda prompts: untruncated(trainer, prompts)
    return trainer


def padded(rollouts: Sequence[Rollout]) -> tuple[torch.Tensor, torch.Tensor]:
    """Completions and their mask, as TRL has them: padded on the right with <pad>."""
    ids = [rollout.completion.token_ids_T for rollout in rollouts]
    masks = [torch.ones_like(each) for each in ids]
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(ids, batch_first=True), pad(masks, batch_first=True)


def prompts_of(batch: dict[str, torch.Tensor], num_completion: int) -> list[list[int]]:
    pairs = zip(batch["teacher_input_ids"], batch["teacher_attention_mask"], strict=True)
    return [ids[:-num_completion][mask[:-num_completion].bool()].tolist() for ids, mask in pairs]


def sdpo_groups(data: PromptDataModule, policy: Any = None) -> list[RolloutGroup]:
    return [
        group_of(data, 0, ["13", "15 = 15", "c = 15"], [0, 1, 1], ["no", "", "long"], policy),
        group_of(data, 1, ["0 1", "b", "fog"], [0, 0, 0], ["", "dim", ""], policy),
    ]


FEEDBACK = {"always": (True, False), "without_solution": (True, True), "never": (False, False)}


@pytest.mark.parametrize("form", ["text", "chat"])
@pytest.mark.parametrize("feedback", FEEDBACK)
@pytest.mark.parametrize("own_solution", [False, True])
def test_the_teacher_sees_what_that_of_trl_sees(form: str, feedback: Any, own_solution: bool, folder: Path) -> None:
    from trl.experimental.sdpo.sdpo_trainer import SuccessfulRolloutTeacherContextBuilder

    data = data_of(folder, *rows_of(form))
    plugin = started(SDPO(**TEMPLATES, feedback=feedback, own_solution=own_solution), random_policy(), data)
    groups = sdpo_groups(data)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    trainer = trl_trainer(
        data,
        reprompt_template=TEMPLATES["template"],
        solution_template=TEMPLATES["solution_template"].replace("{solution}", "{successful_previous_attempt}"),
        feedback_template=TEMPLATES["feedback_template"].replace("{feedback}", "{feedback_raw}"),
        max_reprompt_len=10**6,
        success_reward_threshold=1.0,
        dont_reprompt_on_self_success=not own_solution,
        use_successful_as_teacher=True,
        include_environment_feedback=FEEDBACK[feedback][0],
        environment_feedback_only_without_solution=FEEDBACK[feedback][1],
        remove_thinking_from_demonstration=False,
    )
    ids, mask = padded(rollouts)
    batch = SuccessfulRolloutTeacherContextBuilder(trainer).build(
        {"completion_ids": ids, "completion_mask": mask},
        [rollout.prompt.columns["prompt"] for rollout in rollouts],
        torch.tensor([rollout.reward for rollout in rollouts]),
        [rollout.feedback for rollout in rollouts],
    )
    own = list[list[int] | None]()
    for group in groups:
        hints = plugin.hints(group, GroupBatch([group], 0, RIGHT, lambda value: [value]))
        for rollout, its in zip(group.rollouts, hints, strict=True):
            prompt, _ = plugin._fitting(rollout, its, {})
            own.append(None if prompt is None else list(prompt.token_ids))
    taught = batch["self_distillation_mask"].bool().tolist()
    assert taught == [each is not None for each in own]
    expected = prompts_of(batch, ids.shape[1])
    assert [each for each in own if each] == [
        each for each, is_taught in zip(expected, taught, strict=True) if is_taught
    ]


@pytest.mark.parametrize("form", ["text", "chat"])
def test_the_teacher_of_a_column_sees_what_that_of_trl_sees(form: str, folder: Path) -> None:
    from trl.experimental.sdft.sdft_trainer import DemonstrationTeacherContextBuilder

    data = data_of(folder, *rows_of(form))
    plugin = started(SDFT(template="{prompt} = {demonstration} - no"), random_policy(), data)
    groups = sdpo_groups(data)
    trainer = trl_trainer(data, teacher_prompt_template="{prompt} = {privileged_context} - no")
    ids, mask = padded([group.rollouts[0] for group in groups])
    columns = [group.prompt.columns for group in groups]
    batch = DemonstrationTeacherContextBuilder(trainer).build(
        [each["prompt"] for each in columns], [each["solution"] for each in columns], ids, mask
    )
    found = list[list[int]]()
    for group in groups:
        ((hint,), *_) = plugin.hints(group, GroupBatch([group], 0, RIGHT, lambda value: [value]))
        found.append(list(plugin.write(group.prompt, hint).token_ids))
    assert found == prompts_of(batch, ids.shape[1])


@pytest.mark.parametrize(
    "plugin", [SDPO(**TEMPLATES), SDPO(**TEMPLATES, weight=0.4), SDFT(template="{demonstration} {prompt}")]
)
def test_the_gradient_is_that_of_trl(plugin: SDPO | SDFT, folder: Path) -> None:
    """TRL's value of the loss is another: it has log_ratio.detach() * log p where ours has -log_ratio * ratio."""
    from trl.experimental.sdpo.loss_utils import compute_sampled_token_self_distillation_loss
    from trl.experimental.sdpo.sdpo_trainer import DistillationLogits, SDPOTrainer

    data = data_of(folder, *rows_of("chat"))
    learner, steps = make_learner(objective=Objective(normalization="sequence"))
    policy: Any = learner.policy
    groups, begun = sdpo_groups(data, policy), started(plugin, policy, data)
    learner.settings.set_plugins(begun)
    logs = learner.learn(groups)
    policy.zero_grad()
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    ids, mask = padded(rollouts)
    own, its, taught = [], [], []
    for group in groups:
        hints = begun.hints(group, GroupBatch([group], 0, RIGHT, lambda value: [value]))
        for rollout, hint in zip(group.rollouts, hints, strict=True):
            prompt, _ = begun._fitting(rollout, hint, {})
            taught.append(prompt is not None)
            for logits, asked in ((own, rollout.prompt), (its, prompt or rollout.prompt)):
                logits.append(logits_of(policy, asked.token_ids, ids[len(taught) - 1]))
    metrics: Any = {"train": {"self_distillation/policy_loss": []}}
    trainer: Any = SimpleNamespace(
        model=policy,
        loss_type="grpo",
        importance_sampling_level="token",
        epsilon_low=0.2,
        epsilon_high=0.2,
        accelerator=SimpleNamespace(gather=lambda values: values),
        args=SimpleNamespace(distillation_mode="sampled_token", distillation_alpha=1.0, distillation_is_clip=2.0),
        _metrics=metrics,
        _log_self_distillation_metric=lambda *_: None,
    )
    student = torch.stack(own)
    inputs = {"completion_ids": ids, "completion_mask": mask, "old_per_token_logps": None}
    inputs["advantages"] = torch.tensor([rollout.advantage for rollout in rollouts], dtype=torch.float64)
    loss_mask = mask * torch.tensor(taught)[:, None]
    logits = DistillationLogits(ids, mask, loss_mask, student, torch.stack(its).detach())
    distilled = SDPOTrainer._compute_self_distillation_loss(trainer, policy, inputs, logits)
    loss = plugin.weight * distilled
    if plugin.weight < 1:
        loss = loss + (1 - plugin.weight) * SDPOTrainer._compute_policy_loss(trainer, inputs, student)
    loss.backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in policy.parameters()])
    assert float((steps.gradients[0] - expected).norm() / expected.norm()) < 1e-6
    # The value: TRL's tokens have (log p - log p_teacher) log p, and ours log p - log p_teacher.
    per_token = (
        compute_sampled_token_self_distillation_loss(student, logits.teacher_logits, ids, distillation_alpha=1.0)
        / student.log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    )
    ours = plugin.weight * ((per_token * loss_mask).sum(1) / loss_mask.sum(1).clamp(min=1)).mean()
    policy_loss = (1 - plugin.weight) * -inputs["advantages"].mean()
    assert logs["loss"] == pytest.approx(float(ours + policy_loss), abs=1e-6)


def logits_of(policy: Any, prompt_ids: Sequence[int], completion_T: torch.Tensor) -> torch.Tensor:
    ids_T = torch.cat([torch.tensor(prompt_ids), completion_T])
    return policy(input_ids=ids_T[None]).logits[0, len(prompt_ids) - 1 : -1]


SHARES = ("taught", "misfit", "feedback")


def test_a_run_learns_from_correct_completions_and_feedback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rewards.py").write_text(
        "def score(completion, answer, log_feedback):\n"
        "    right = completion.split('=')[-1] == answer\n"
        "    log_feedback(None if right else answer)\n"
        "    return float(right)\n"
    )
    spec = {
        "sdpo": {
            "weight": 0.5,
            "template": "{solution}{feedback}{prompt}",
            "solution_template": "{solution}=",
            "feedback_template": "{feedback}=",
        }
    }
    arguments = {
        "trainer.max_steps": 2,
        "trainer.limit_val_batches": 0,
        "data.batch_size": 4,
        "model.num_generations": 4,
        "model.teacher.policy": "average",
        "model.objective.normalization": "sequence",
        "model.rewards": json.dumps([{"function": "rewards.py:score", "name": "correct"}]),
        "rollout.plugins": json.dumps([spec]),
        "sample_logger.every_n_updates": 1,
    }
    run(["fit", "--config", "arithmetic", *(f"--{name}={value}" for name, value in arguments.items())])
    header, *rows = [line.split(",") for line in Path("runs/arithmetic/metrics.csv").read_text().splitlines()]
    assert len(rows) == 2
    for row in rows:
        taught, misfit, told = (float(row[header.index(f"teacher/{name}_share")]) for name in SHARES)
        assert 0 < told <= taught <= 1 and misfit == 0
    samples = [json.loads(line) for line in Path("runs/arithmetic/samples.jsonl").read_text().splitlines()]
    told = [sample.get("feedback/correct") for sample in samples]
    assert all((text is None) == (sample["reward"] == 1) for text, sample in zip(told, samples, strict=True))
