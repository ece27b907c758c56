"""One training step in a process of its own, and the memory that its rollout and its update took at their peak.

Run by :mod:`benchmarks.group_size_memory`; prints one line of JSON.
"""

from __future__ import annotations

import gc
import tempfile
from dataclasses import dataclass
from typing import Any, Literal, cast

import lightning.pytorch as pl
import torch

from benchmarks.processes import quiet_trainer, read_case, tell
from benchmarks.shipped_tasks import ShippedTask
from benchmarks.workloads import NOISE_REWARD, HardRows, arithmetic_prompts, load, noise_reward
from lit_grpo.callbacks import RolloutScheduler, WeightSync
from lit_grpo.data.module import PromptDataModule
from lit_grpo.data.sources import GivenRows, RowSource
from lit_grpo.memory import PeakMemory
from lit_grpo.module import GRPOModule
from lit_grpo.rewards import RewardSpec
from lit_grpo.rollout.slots.generator import SlotGenerator
from lit_grpo.types import PromptBatch, SamplingParams
from lit_grpo.update.advantages.functions import group_advantages

System = Literal["lit_grpo", "generate", "TRL"]


@dataclass(frozen=True)
class Case:
    """The case of one process.

    The prompts are exercises of the demo, or those of a configuration, with images if ours has ``vision``. ``rows`` are
    those of TRL's micro-batch.
    """

    system: System
    policy: str
    device: str
    num_prompts: int
    group_size: int
    num_slots: int
    max_tokens: int
    max_tokens_per_micro_batch: int
    config: str | None = None
    rows: int = 4
    vision: Literal["none", "frozen", "trained"] = "none"

    @property
    def source(self) -> RowSource:
        """The rows of the prompts."""
        if self.config is None:
            return HardRows(self.num_prompts)
        return GivenRows(ShippedTask(self.config).rows("train", self.num_prompts))


class Phases:
    """The idle process, and how far each phase rises above it at its peak."""

    def __init__(self, device: torch.device) -> None:
        gc.collect()
        self._peak = PeakMemory(device)
        self._idle_gib = self._peak.current_gib()
        self._figures: dict[str, float] = {"idle_mib": self._idle_gib * 1024}
        self._peak.reset()

    def end(self, phase: str) -> None:
        """Note the peak of a phase, and begin the next."""
        self._figures[f"{phase}_mib"] = (self._peak.peak_gib() - self._idle_gib) * 1024
        self._peak.reset()

    def report(self, num_tokens: int) -> None:
        """Answer with the figures."""
        tell(self._figures | {"tokens": num_tokens})


class PhaseProbe(pl.Callback):
    """Measures the first step of a fit. Stands after RolloutScheduler, whose rollout has ended when it is called."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The process is idle: model and optimizer are loaded."""
        self.phases = Phases(pl_module.device)
        self.learns = False

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        """See whether there is something to learn."""
        self.learns = any(weight.grad is not None and bool(weight.grad.any()) for weight in pl_module.parameters())

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """The rollout has ended."""
        self.phases.end("rollout")

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: PromptBatch, batch_idx: int
    ) -> None:
        """The update has ended."""
        self.phases.end("update")
        if not self.learns:
            raise RuntimeError("All rewards were equal, so there was no update to measure; take another prompt.")
        self.phases.report(sum(rollout.completion.num_tokens for rollout in batch.rollouts))


def run_lit_grpo(case: Case) -> None:
    """One step of a real fit."""
    module = GRPOModule(
        policy=case.policy,
        generator=SlotGenerator(case.num_slots),
        rewards=[RewardSpec(NOISE_REWARD)],
        num_generations=case.group_size,
        sampling=SamplingParams(max_tokens=case.max_tokens),
        max_tokens_per_micro_batch=case.max_tokens_per_micro_batch,
        vision=case.vision,
    )
    trainer = quiet_trainer(case.device, [RolloutScheduler(), WeightSync(), PhaseProbe()], max_steps=1)
    column = None if case.vision == "none" else "image"
    data = PromptDataModule(case.policy, train=case.source, batch_size=case.num_prompts, image_column=column)
    trainer.fit(module, datamodule=data)


def run_generate(case: Case) -> None:
    """The same step as it is usually taken: all completions at once by ``generate``, and one batch for the update."""
    model, tokenizer = cast(tuple[Any, Any], load(case.policy, case.device))
    optimizer = torch.optim.AdamW(model.parameters())
    prompts = arithmetic_prompts(tokenizer, case.num_prompts, HardRows(case.num_prompts))
    inputs = tokenizer([prompt.text for prompt in prompts], return_tensors="pt", padding=True, padding_side="left")
    input_ids, mask = inputs["input_ids"].to(case.device), inputs["attention_mask"].to(case.device)
    phases = Phases(model.device)
    with torch.inference_mode():
        output_BT = model.generate(
            input_ids=input_ids,
            attention_mask=mask,
            num_return_sequences=case.group_size,
            max_new_tokens=case.max_tokens,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
        )
    phases.end("rollout")
    tokens_BT = output_BT.clone()
    completions_BT = tokens_BT[:, input_ids.shape[1] :]
    texts = tokenizer.batch_decode(completions_BT, skip_special_tokens=True)
    rewards_R = torch.tensor([noise_reward(text) for text in texts])
    groups_R = torch.arange(case.num_prompts).repeat_interleave(len(texts) // case.num_prompts)
    advantages_B1 = group_advantages(rewards_R, groups_R).view(-1, 1).to(case.device)
    ended_BT = (completions_BT == tokenizer.eos_token_id).cumsum(-1) - (completions_BT == tokenizer.eos_token_id).int()
    sampled_BT = ended_BT == 0
    mask_BT = torch.cat([mask.repeat_interleave(case.group_size, 0), sampled_BT], -1)
    model.train()
    logits_BTV = model(input_ids=tokens_BT, attention_mask=mask_BT, use_cache=False).logits
    logprobs_BT = (
        logits_BTV[:, input_ids.shape[1] - 1 : -1].log_softmax(-1).gather(-1, completions_BT[..., None])[..., 0]
    )
    ratio_BT = (logprobs_BT - logprobs_BT.detach()).exp()
    loss = -(ratio_BT * advantages_B1 * sampled_BT).sum() / sampled_BT.sum()
    loss.backward()
    optimizer.step()
    phases.end("update")
    phases.report(int(sampled_BT.sum()))


def run_trl(case: Case) -> None:
    """One step of TRL's GRPOTrainer, whose micro-batches have ``rows`` rows."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl.trainer import utils
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    utils._use_triton = lambda device: True  # its head scores no prompt token
    per_step = case.num_prompts * case.group_size
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        max_steps=1,
        per_device_train_batch_size=min(case.rows, per_step),
        gradient_accumulation_steps=max(per_step // case.rows, 1),
        num_generations=case.group_size,
        max_completion_length=case.max_tokens,
        use_cpu=case.device == "cpu",
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )

    class Probe(TrainerCallback):
        num_tokens = 0

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            self.phases = Phases(torch.device(case.device))

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            self.phases.end("update")
            self.phases.report(self.num_tokens)

    probe = Probe()

    def noise(completions: list[Any], completion_ids: list[list[int]], **_: Any) -> list[Any]:
        probe.phases.end("rollout")
        probe.num_tokens = sum(map(len, completion_ids))
        texts = (each if isinstance(each, str) else each[0]["content"] for each in completions)
        return [noise_reward(text) for text in texts]

    dataset = Dataset.from_list(list(case.source.rows()))
    trainer = GRPOTrainer(case.policy, [noise], config, train_dataset=dataset, callbacks=[probe])
    trainer.train()


def main() -> None:
    """Run the case that is given as JSON."""
    case = Case(**read_case())
    torch.set_num_threads(1)
    torch.manual_seed(0)
    {"lit_grpo": run_lit_grpo, "generate": run_generate, "TRL": run_trl}[case.system](case)


if __name__ == "__main__":
    main()
