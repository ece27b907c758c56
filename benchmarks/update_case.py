"""Optimizer steps on given groups in a process of its own: how long they take, and how much memory.

Run by the benchmarks of the update phase. After a warm-up, and again for each line of its standard input, it takes a
step and prints a line of JSON.
"""

from __future__ import annotations

import gc
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch

from benchmarks.processes import CaseProcess, Figures, quiet_trainer, read_case, tell
from benchmarks.random_policies import TO_UPDATE, random_qwen3, save_random_policy
from benchmarks.report import note
from benchmarks.update_work import BatchOnDemand, Work, floor_flops
from lit_grpo.memory import PeakMemory
from lit_grpo.methods import make_plugins
from lit_grpo.module import GRPOModule
from lit_grpo.plugins import fresh
from lit_grpo.rewards import RewardSpec
from lit_grpo.types import SamplingParams
from lit_grpo.update.learner_settings import LearnerSettings
from lit_grpo.update.logprobs.checkpointing import Checkpointing
from lit_grpo.update.logprobs.teacher import TeacherSettings

OPTIONS: dict[str, Any] = {"use_reentrant": False}
TIMED_ROWS = 4  # of TRL's
TEACHER = "teacher"
"""Its folder, in that of the policy."""
STATE_BYTES = 12  # of a parameter's gradient and AdamW's two moments
System = Literal["lit_grpo", "TRL", "TRL, GPU path of its head"]
"""On a CPU TRL's head scores prompt tokens too, unless it is made to take its GPU path, which leaves them out."""


@dataclass(frozen=True)
class Case:
    """The case of one process.

    ``size`` is tokens a micro-batch for lit_grpo, rows a micro-batch for TRL. ``share`` lays completions out after a
    common prompt. ``warm`` counts gradients and the optimizer's state as part of the idle process. ``first`` is how
    many completions of each group the warm-up has: all, unless told otherwise. Of several ``ranks``, which share every
    row, the process is the one that torchrun's variables say. ``plugin`` is one that
    says which tokens are trained on, or how they go through the policy, such as ``nat:share=0.5``. ``teacher`` is a
    policy that scores the tokens within each step; TRL's trainer is then its DistillationTrainer. ``cpu_time`` makes
    all seconds CPU seconds of the process, for a machine that others use too. ``whole`` times all of TRL's
    micro-batches and does not scale some of them up; ``liger`` has TRL take the kernels of liger.
    """

    system: System
    size: int
    work: Work
    policy: str = "34M"
    device: str = "cpu"
    threads: int = 1
    checkpointing: Checkpointing = False
    share: bool = True
    warm: bool = False
    first: int | None = None
    ranks: int = 1
    plugin: str | None = None
    teacher: str | None = None
    cpu_time: bool = False
    whole: bool = False
    liger: bool = False


class Probe(pl.Callback):
    """Times the training steps of a case, and tells after each what was measured."""

    def __init__(self, case: Case) -> None:
        self.peak, self.warm = PeakMemory(torch.device(case.device)), case.warm
        self.device, self.layer_runs = case.device, 0
        self.seconds = time.process_time if case.cpu_time else time.perf_counter

    def begin(self, model: torch.nn.Module | None = None) -> None:
        """The process is idle. Runs of the first layer of ``model`` are counted from now on."""
        gc.collect()
        self.idle_gib = self.peak.current_gib()
        self.peak.reset()
        if model is not None:
            decoder: Any = model.get_decoder()  # pyrefly: ignore[not-callable]
            decoder.layers[0].register_forward_pre_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.layer_runs += 1

    def clock(self) -> float:
        """Return the time when the device has finished."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        return self.seconds()

    def start(self) -> float:
        """Return the time when a step begins, after a look at how fast the machine is at the moment."""
        self.rate = matmul_tflops(self)
        return self.clock()

    def tell(self, seconds: float) -> None:
        """Answer with what was measured of a step; the first layer runs twice in it where activations are made again.

        The rate of matrix products is the better one of those before and after it.
        """
        peak_mib = (self.peak.peak_gib() - self.idle_gib) * 1024
        rate = max(self.rate, matmul_tflops(self))
        tell({"seconds": seconds, "peak_mib": peak_mib, "layer_runs": self.layer_runs, "matmul_tflops": rate})
        self.layer_runs = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Model and optimizer are loaded."""
        self.begin(pl_module.policy)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """A step begins."""
        if self.warm and batch_idx == 1:
            self.begin()
            weights = [weight for weight in pl_module.parameters() if weight.requires_grad and weight.grad is None]
            self.idle_gib += sum(weight.nbytes for weight in weights) / 2**30  # gradients, freed between steps
        self.began = self.start()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        """A step has ended."""
        self.tell(self.clock() - self.began)


class PlainRows(pl.Callback):
    """Makes the module lay out each completion after a prompt of its own."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Switch."""
        assert isinstance(pl_module, GRPOModule)
        pl_module.settings.shares_prefix = False


def run_lit_grpo(case: Case, folder: str) -> None:
    """Steps of a real fit."""
    module = GRPOModule(
        policy=folder,
        rewards=[RewardSpec("lit_grpo.rewards.exact_match")],
        num_generations=max(case.work.group_size, 2),
        sampling=SamplingParams(max_tokens=case.work.limit),
        max_tokens_per_micro_batch=case.size,
        sequence_parallel_size=case.ranks,
        gradient_checkpointing=case.checkpointing,
        optimizer=partial(torch.optim.AdamW, fused=True),
        teacher=None if case.teacher is None else TeacherSettings(str(Path(folder, TEACHER))),
    )
    teach(module.settings, case.plugin)
    probe = Probe(case)
    precision = "bf16-mixed" if case.device == "cuda" else "32-true"
    callbacks: list[pl.Callback] = [probe] if case.share else [PlainRows(), probe]
    ranks = {"devices": case.ranks, "strategy": "ddp" if case.ranks > 1 else "auto"}
    trainer = quiet_trainer(case.device, callbacks, precision=precision, max_epochs=1, **ranks)
    trainer.fit(module, train_dataloaders=BatchOnDemand(case.work, case.first))


def teach(settings: LearnerSettings, plugin: str | None) -> None:
    """Let a plug-in say which tokens are trained on, or how they go through the policy; None for plain GRPO."""
    settings.set_plugins(*map(fresh, make_plugins([plugin] if plugin else []).values()))


def run_trl(case: Case, folder: str) -> None:
    """TRL's own preparation, loss and backward, micro-batch after micro-batch, and AdamW.

    All of TRL's micro-batches are padded to one shape, so the first ``TIMED_ROWS`` rows of a group are timed and their
    loss and backward scaled to all. Its warm-up is one micro-batch. TRL's flag for checkpointing acts in ``train()``
    alone, so the model is told itself.
    """
    import trl.trainer.utils as trl_utils

    if case.system != "TRL":
        module: Any = trl_utils if case.teacher is None else import_module("trl.trainer.distillation_trainer")
        module._use_triton = lambda device: True
    trainer, rows = (_trl_trainer if case.teacher is None else _trl_distiller)(case, folder)
    model: Any = trainer.model
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model.train()
    if case.checkpointing:
        model.gradient_checkpointing_enable(OPTIONS)
    per_step = trainer.args.gradient_accumulation_steps
    timed = per_step if case.whole else min(per_step, max(1, TIMED_ROWS // case.size))
    probe = Probe(case)

    def step(number_of: int) -> None:
        began, computing = probe.start(), 0.0
        for trainer._step in range(number_of):
            inputs = trainer._prepare_inputs(rows)
            ready = probe.clock()
            with trainer.compute_loss_context_manager():
                loss = trainer.compute_loss(model, inputs)
            loss.backward()
            computing += probe.clock() - ready
        optimizer.step()
        optimizer.zero_grad()
        probe.tell(probe.clock() - began + computing * (per_step / number_of - 1))

    probe.begin(model)
    step(1)
    for _ in iter(sys.stdin.readline, ""):
        step(timed)


def _trl_options(case: Case, folder: str, num_rollouts: int) -> dict[str, Any]:
    """Options that all of TRL's trainers have."""
    return {
        "output_dir": tempfile.mkdtemp(dir=folder),
        "per_device_train_batch_size": case.size,
        "gradient_accumulation_steps": num_rollouts // case.size,
        "max_completion_length": case.work.limit,
        "use_cpu": case.device == "cpu",
        "bf16": case.device == "cuda",
        "report_to": [],
        "gradient_checkpointing": bool(case.checkpointing),
        "gradient_checkpointing_kwargs": OPTIONS,
        "use_liger_kernel": case.liger,
    }


def _trl_distiller(case: Case, folder: str) -> tuple[Any, list[dict[str, str]]]:
    """TRL's trainer that distils on the student's own tokens, with these in place of its sampling."""
    from datasets import Dataset
    from trl.trainer.distillation_config import DistillationConfig
    from trl.trainer.distillation_trainer import DistillationTrainer

    rollouts = [rollout for group in case.work.groups() for rollout in group.rollouts]
    options = _trl_options(case, folder, len(rollouts))
    rows = [{"prompt": "1+1="} for _ in rollouts]
    trainer: Any = DistillationTrainer(
        model=folder,
        teacher_model=str(Path(folder, TEACHER)),
        args=DistillationConfig(**options, teacher_model_init_kwargs={"dtype": "float32"}),
        train_dataset=Dataset.from_list(rows),
    )
    prompt_ids = [list(rollout.prompt.token_ids) for rollout in rollouts]
    completion_ids = [rollout.completion.token_ids_T.tolist() for rollout in rollouts]
    trainer._generate = lambda prompts: (prompt_ids, completion_ids, None, None, [])
    return trainer, rows


def _trl_trainer(case: Case, folder: str) -> tuple[Any, list[dict[str, str]]]:
    from datasets import Dataset
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    rollouts = [rollout for group in case.work.groups() for rollout in group.rollouts]
    config = GRPOConfig(**_trl_options(case, folder, len(rollouts)), num_generations=case.work.group_size)

    def hand_over(prompts: list[str], trainer: Any) -> dict[str, Any]:
        return {
            "prompt_ids": [list(rollout.prompt.token_ids) for rollout in rollouts],
            "completion_ids": [rollout.completion.token_ids_T.tolist() for rollout in rollouts],
            "logprobs": [rollout.completion.logprobs_T.tolist() for rollout in rollouts],
        }

    rows = [{"prompt": "1+1="} for _ in rollouts]
    trainer = GRPOTrainer(
        model=folder,
        reward_funcs=[lambda **_: [rollout.reward for rollout in rollouts]],
        args=config,
        train_dataset=Dataset.from_list(rows),
        rollout_func=hand_over,
    )
    trainer.current_gradient_accumulation_steps = config.gradient_accumulation_steps
    return trainer, rows


def matmul_tflops(probe: Probe) -> float:
    """The best rate of a large matrix product, in the dtype that the steps multiply in."""
    dtype, size = (torch.bfloat16, 8192) if probe.device == "cuda" else (torch.float32, 1024)
    left, right = (torch.randn(size, size, device=probe.device, dtype=dtype) for _ in range(2))
    best = 0.0
    for _ in range(8):
        began = probe.clock()
        left @ right
        best = max(best, 2 * size**3 / (probe.clock() - began) / 1e12)
    return best


def main() -> None:
    """Run the case that is given as JSON."""
    fields = read_case()
    fields["work"] = Work(**fields["work"])
    case = Case(**fields)
    torch.set_num_threads(case.threads)
    torch.manual_seed(0)
    sizes = replace(TO_UPDATE[case.policy], vocab_size=case.work.vocab_size)
    model = random_qwen3(sizes, "meta")
    alone = replace(case.work, group_size=1, num_groups=case.work.group_size * case.work.num_groups)
    works = {"floor_tflop": case.work, "unshared_floor_tflop": alone}  # each prompt once, and once a completion
    figures = {name: floor_flops(model, work) / 1e12 for name, work in works.items()}
    figures["state_mib"] = STATE_BYTES * model.num_parameters() / 2**20
    with tempfile.TemporaryDirectory() as folder:
        save_random_policy(Path(folder), sizes, case.device)
        if case.teacher is not None:
            teacher = replace(TO_UPDATE[case.teacher], vocab_size=case.work.vocab_size)
            save_random_policy(Path(folder, TEACHER), teacher, case.device)
            scoring = random_qwen3(teacher, "meta")  # forward alone, a third of a forward and a backward
            figures |= {name: figures[name] + floor_flops(scoring, work) / 3e12 for name, work in works.items()}
        tell(figures)
        (run_lit_grpo if case.system == "lit_grpo" else run_trl)(case, folder)


class Steps:
    """The steps of a case, taken in a process of its own when they are asked for.

    ``seconds`` are those of each, and ``shares`` how near each came to the rate of matrix products at that moment.

    Args:
        case: What to measure.
        environment: Variables of the process beside those of this one.
    """

    def __init__(self, case: Case, environment: Mapping[str, str] | None = None) -> None:
        note(f"{case.system}, {case.size} a micro-batch, {case.policy}, {case.work}")
        self.case, self.seconds, self.shares = case, list[float](), list[float]()
        self._process = CaseProcess("benchmarks.update_case", case, environment)

    def __enter__(self) -> Steps:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.__exit__()

    def warm_up(self) -> None:
        """Wait until the process has done so."""
        self.figures = self._process.answer() | self._process.answer()

    def take(self) -> None:
        """Take a step."""
        self.begin()
        self.end()

    def begin(self) -> None:
        """Let the process take a step."""
        self._process.go_on()

    def end(self) -> None:
        """Wait until it has."""
        self.figures |= self._process.answer()
        self.seconds.append(self.figures["seconds"])
        floor_s = self.figures["floor_tflop"] / self.figures["matmul_tflops"]
        self.shares.append(floor_s / self.figures["seconds"])


def measure(case: Case, repeats: int = 1, environment: Mapping[str, str] | None = None) -> Figures:
    """Take some steps of a case, one after another; return its figures and all their ``seconds``."""
    with Steps(case, environment) as steps:
        steps.warm_up()
        for _ in range(repeats):
            steps.take()
        return steps.figures | {"seconds": steps.seconds}


if __name__ == "__main__":
    main()
