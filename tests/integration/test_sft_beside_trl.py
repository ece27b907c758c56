"""Examples beside TRL 1.16: tokens, loss and gradient are those of its ``SFTTrainer`` with ``completion_only_loss``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import random_policy, save_policy
from test_learner import make_learner
from test_sft import sft

from lit_grpo.data import PromptDataModule
from lit_grpo.types import RolloutGroup

pytest.importorskip("trl")
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("exact_norms"),
]
# No line break after the end token, which TRL would train on.
CHAT = (
    "{% for m in messages %}{{ m.role[0] }}#{{ m.content }}<eos>{% endfor %}{% if add_generation_prompt %}a#{% endif %}"
)
ROWS = [("12 + 3", "c = 15"), ("a", "b"), ("4 * 4 - 1", "0" * 30), ("a", "deep cabin")]


def trl_step(folder: Path, policy: Any, rows: list[dict[str, Any]]) -> tuple[Any, float]:
    """The batch that TRL's trainer makes of all rows, and its loss, whose gradient the policy then has."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    arguments = SFTConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=len(rows),
        use_cpu=True,
        bf16=False,
        report_to=[],
        max_length=None,
        disable_tqdm=True,
        gradient_checkpointing=False,
        completion_only_loss=True,
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    trainer = SFTTrainer(policy, arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    (batch,) = trainer.get_train_dataloader()
    loss: Any = trainer.compute_loss(policy, batch)
    loss.backward()
    return batch, float(loss.detach())


@pytest.mark.parametrize("form", ["text", "chat"])
def test_tokens_loss_and_gradient_are_those_of_trl(form: str, tmp_path: Path) -> None:
    save_policy(tmp_path, template=CHAT)
    if form == "text":
        theirs: list[dict[str, Any]] = [{"prompt": prompt, "completion": answer} for prompt, answer in ROWS]
    else:
        theirs = [
            {"prompt": [{"role": "user", "content": prompt}], "completion": [{"role": "assistant", "content": answer}]}
            for prompt, answer in ROWS
        ]
    policy: Any = random_policy().train().double()
    batch, loss = trl_step(tmp_path, policy, theirs)
    expected = torch.cat([parameter.grad.flatten() for parameter in policy.parameters()])

    rows: Any = [{"prompt": prompt, "solution": answer} for prompt, answer in ROWS]
    data = PromptDataModule(policy=str(tmp_path), train=rows, batch_size=1, chat_template=form == "chat")
    data.setup("fit")
    plugin = sft(data, per_update=len(rows))
    learner, steps = make_learner(plugins=[plugin])
    prompt = data.prompts["train"][0]
    logs = learner.learn([RolloutGroup(prompt, [])])
    assert logs["loss"] == pytest.approx(loss, rel=1e-6)  # TRL computes log-probs in float32
    assert float((steps.gradients[0] - expected).norm() / expected.norm()) < 1e-6

    tokens = sorted([*example.prompt_ids, *example.answer_ids_T] for example in data.answered("train", "solution"))
    pairs = zip(batch["input_ids"], batch["attention_mask"], strict=True)
    assert sorted(ids[mask.bool()].tolist() for ids, mask in pairs) == tokens
    assert logs["ce/tokens"] == int((batch["labels"][:, 1:] != -100).sum())
