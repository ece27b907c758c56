"""A run of TRL's GRPOTrainer on a task of ours, in this folder: same policy, prompts, reward, optimizer and schedule.

It leaves what our runs leave: a clock, and some of its policies. All but what a :class:`TRLRun` has as fields is read
from the shipped configuration of the task.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.learning_callbacks import Stopwatch, is_kept, policy_folder, write_time
from benchmarks.shipped_tasks import ShippedTask

LONGEST_PROMPT = 160


@dataclass(frozen=True)
class TRLRun:
    """One run.

    ``rows`` are those of a micro-batch, ``continuous`` decodes by transformers' continuous batching instead of
    ``generate``, ``gpu_head`` makes the LM head take the path that it takes on a GPU, which scores no prompt token, and
    ``bf16`` computes in bfloat16.
    """

    name: str
    config: str
    seed: int
    updates: int
    rows: int
    continuous: bool = False
    gpu_head: bool = True
    bf16: bool = False
    prompts: int = 16
    group: int = 16
    alone: bool = False

    def words(self, folder: Path) -> list[str]:
        """The arguments of the Python process in ``folder``."""
        return ["-m", "benchmarks.trl_run", json.dumps(asdict(self))]


def main(run: TRLRun) -> None:
    """Train."""
    import trl.trainer.utils as trl_utils
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl.trainer.grpo_trainer import GRPOTrainer

    if run.gpu_head:
        trl_utils._use_triton = lambda device: True
    task, num_tokens = ShippedTask(run.config), 0
    model, exact_match = task.model, task.reward

    def correct(completions: list[Any], completion_ids: list[list[int]], answer: list[str], **_: Any) -> list[Any]:
        nonlocal num_tokens
        num_tokens += sum(map(len, completion_ids))
        texts = [each if isinstance(each, str) else each[0]["content"] for each in completions]
        return [exact_match(text, answer=each) for text, each in zip(texts, answer, strict=True)]

    class Keep(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            trainer.model.save_pretrained(policy_folder(0))
            self.watch = Stopwatch()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            write_time(self.watch, state.global_step, tokens=num_tokens)
            self.watch.stop()
            if is_kept(state.global_step, run.updates):
                trainer.model.save_pretrained(policy_folder(state.global_step))
            self.watch.go_on()

    config = _config(run, model)
    trainer: Any = GRPOTrainer(
        model=task.policy,
        reward_funcs=[correct],
        args=config,
        train_dataset=Dataset.from_list(task.rows("train")),
        callbacks=[Keep()],
    )
    optimizer = getattr(torch.optim, model["optimizer"]["class_path"])
    trainer.optimizer = optimizer(trainer.model.parameters(), **model["optimizer"]["init_args"], fused=True)
    schedule = getattr(torch.optim.lr_scheduler, model["lr_scheduler"]["class_path"])
    steps = model["lr_scheduler"]["init_args"] | {"total_iters": run.updates}
    trainer.lr_scheduler = schedule(trainer.optimizer, **steps)
    trainer.train()


def _config(run: TRLRun, model: dict[str, Any]) -> Any:
    """The settings of TRL's trainer, with the sampling of ours."""
    from trl.trainer.grpo_config import GRPOConfig

    per_step = run.prompts * run.group
    return GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        seed=run.seed,
        max_steps=run.updates,
        per_device_train_batch_size=min(run.rows, per_step),
        gradient_accumulation_steps=max(per_step // run.rows, 1),
        num_generations=run.group,
        temperature=model["sampling"]["temperature"],
        max_completion_length=model["sampling"]["max_tokens"],
        use_transformers_continuous_batching=run.continuous,
        transformers_continuous_batching_config=_batching(per_step, model["sampling"]["max_tokens"]),
        use_cpu=True,
        bf16=run.bf16,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )


def _batching(num_rows: int, max_tokens: int) -> dict[str, Any]:
    """Continuous batching with room for all rows at a time; by default it takes half of the machine's memory."""
    page = 32
    return {
        "page_size": page,
        "num_blocks": num_rows * (-(-(LONGEST_PROMPT + max_tokens) // page) + 1),
        "max_batch_tokens": max(256, num_rows),
        "max_requests_per_batch": num_rows,
        "use_async_batching": False,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(TRLRun(**json.loads(sys.argv[1])))
