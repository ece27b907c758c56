"""The stages of ``benchmarks.gpu``: each yields rows of what it has found, each as soon as it is known.

``python -m benchmarks.gpu_stages NAME`` runs one on the first GPU, and prints a line of JSON for each row. With
``rehearse`` after the name it runs at a tiny size on the CPU.
"""

from __future__ import annotations

import csv
import itertools
import json
import math
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import torch

from benchmarks.baseline_plans import FULL_GROUP
from benchmarks.decode_systems import Run, Steps, naive, ours
from benchmarks.decode_systems import Work as DecodeWork
from benchmarks.random_policies import QWEN3_1_7B, QWEN3_7M, Sizes, kv_bytes, random_qwen3, save_random_policy
from benchmarks.report import ROOT, Row
from benchmarks.rollouts import roll_out, slots
from benchmarks.update_work import Work
from benchmarks.workloads import NOISE_REWARD, long_tailed
from lit_grpo.memory import PeakMemory
from lit_grpo.policy.spec import PolicySpec
from lit_grpo.rollout.slots import binding
from lit_grpo.types import Key, Prompt, RolloutGroup, SamplingParams
from lit_grpo.update.advantages.estimator import Advantages
from lit_grpo.update.batches.microbatch import make_micro_batches
from lit_grpo.update.learner import Learner
from lit_grpo.update.learner_settings import LearnerSettings
from lit_grpo.update.logprobs.forward import micro_batch_logprobs
from lit_grpo.update.objective.objective import Objective
from lit_grpo.update.prefix.sharing import shared_prefixes
from scripts.make_tiny import make_tokenizer

VOCAB_SIZE = 151_936


@dataclass(frozen=True)
class Scale:
    """Sizes of the stages: real sizes on a GPU, or tiny ones, to test that they run."""

    device: str = "cuda"
    tiny: bool = False

    most_tokens: ClassVar[int] = 2**20
    """Of a micro-batch, so that there is one."""

    @property
    def small(self) -> Sizes:
        """A policy that starts at once."""
        return Sizes(2, 64, 128, 4, 2, 16) if self.tiny else replace(QWEN3_7M, head_dim=64)

    @property
    def real(self) -> Sizes:
        """The paper's."""
        return replace(QWEN3_7M, layers=2) if self.tiny else QWEN3_1_7B

    def precision(self) -> Any:
        """The precision bf16-mixed, as Lightning has it."""
        return torch.autocast(self.device, torch.bfloat16, cache_enabled=False)

    def wait(self) -> float:
        """Return the time when the device has finished."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def slots_alive(scale: Scale) -> Iterator[Row]:
    """Decode with CUDA graphs and without: the same tokens, and log-probs near those of a plain forward."""
    policy: Any = random_qwen3(scale.small, scale.device)
    prompts = [Prompt("a", (3, 4, 5), ""), Prompt("b", tuple(3 + i % 10 for i in range(40)), "")]
    sampling = SamplingParams(max_tokens=8 if scale.tiny else 256)
    sampled, rows = [], list[Row]()
    for graphs in (True, False):
        generator = slots(policy, make_tokenizer(), 4 if scale.tiny else 32)
        if not graphs and generator._graphs is not None:
            generator._graphs = None
        row: Row = {"case": "with graphs" if generator._graphs is not None else "without graphs"}
        with scale.precision():
            for turn in ("first_s", "again_s"):
                begun = scale.wait()
                groups, stats = roll_out(generator, prompts, 4 if scale.tiny else 32, sampling)
                row[turn] = scale.wait() - begun
            row["ms_a_step"] = 1e3 * float(row["again_s"]) / stats.num_steps
            row["gap_to_forward"] = max(_gaps(policy, groups, scale))
        sampled.append([rollout.completion.token_ids_T.tolist() for group in groups for rollout in group.rollouts])
        rows.append(row)
    pairs = list(zip(*sampled, strict=True))
    yield from (row | {"same_completions": sum(one == other for one, other in pairs) / len(pairs)} for row in rows)


@torch.no_grad()
def _gaps(policy: Any, groups: list[RolloutGroup], scale: Scale) -> list[float]:
    """Return the difference of sampled log-probs from those of the policy's own forward, by completion."""
    gaps = []
    for rollout in (group.rollouts[0] for group in groups):
        (row,) = make_micro_batches([rollout], scale.most_tokens, shared_prefix=False)
        micro_batch = row.to(policy.device)
        logprobs_N, _ = micro_batch_logprobs(policy, micro_batch, 1.0)
        gaps.append(float((logprobs_N.cpu() - rollout.completion.logprobs_T).abs().max()))
    return gaps


def update_alive(scale: Scale) -> Iterator[Row]:
    """Compare attention over a shared prompt with padded rows, forward and backward: gradient, seconds, memory."""
    policy: Any = random_qwen3(scale.small, scale.device).train()
    work = Work(16, 8, 4, vocab_size=16) if scale.tiny else Work(256, 256, 16, vocab_size=16)
    (group,) = work.groups()
    for rollout in group.rollouts:
        rollout.advantage = rollout.reward - 0.5
    layouts = {
        name: make_micro_batches(group.rollouts, scale.most_tokens, shares_prefix)[0].filled(group.rollouts)
        for name, shares_prefix in (("shared prefix", True), ("rows", False))
    }
    gradients, rows = list[torch.Tensor](), list[Row]()
    for name, micro_batch in layouts.items():
        memory = PeakMemory(torch.device(scale.device))
        for turn in ("first_s", "again_s"):
            policy.zero_grad()
            memory.reset()
            begun = scale.wait()
            with shared_prefixes(policy) if micro_batch.stretches else nullcontext():
                there = micro_batch.to(torch.device(scale.device, 0))
                with scale.precision():
                    logprobs_N, _ = micro_batch_logprobs(policy, there, 1.0)
                (logprobs_N * there.advantages_N).sum().backward()
            seconds = scale.wait() - begun
            rows += [{"case": name}] if turn == "first_s" else []
            rows[-1] |= {turn: seconds, "peak_gib": memory.peak_gib()}
        grads = [weight.grad.flatten() for weight in policy.parameters() if weight.grad is not None]
        gradients.append(torch.cat(grads).cpu())
    off = float((gradients[0] - gradients[1]).norm() / gradients[1].norm())
    yield from (row | {"gradient_off": off} for row in rows)
    yield _optimizer_step(policy, [group], scale)


def _optimizer_step(policy: Any, groups: list[RolloutGroup], scale: Scale) -> Row:
    """One whole optimizer step by the learner, and what CUDA's own debug mode finds to wait for."""
    for rollout in groups[0].rollouts:
        rollout.rewards = {"exact": rollout.reward}
    settings = LearnerSettings(Objective(), Advantages(), {"exact": 1.0}, 1.0, 4096)
    learner = Learner(policy, _Steps(policy, scale), settings)
    begun = scale.wait()
    logs = learner.learn(groups)
    return {"case": "a step", "again_s": scale.wait() - begun, "grad_norm": logs["grad_norm"]}


class _Steps:
    """An optimization in bf16-mixed, with AdamW."""

    def __init__(self, policy: Any, scale: Scale) -> None:
        self.policy_version, self._scale = 0, scale
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6)

    def add_gradient(self, compute_loss: Callable[[], torch.Tensor], exchange: bool) -> None:
        """Add a gradient."""
        with self._scale.precision():
            loss = compute_loss()
        loss.backward()

    def take_step(self, scale: float = 1.0) -> float:
        """Take a step."""
        self.optimizer.step()
        self.policy_version += 1
        return 0.0


def vllm(scale: Scale) -> Iterator[Row]:
    """Start vLLM in this process, sync, prove, sample, sleep, wake, sync changed weights; then its decode rate."""
    if find_spec("vllm") is None:
        yield {"case": "vLLM is not installed on this machine"}
        return
    from lit_grpo.rollout.proof import SyncProof
    from lit_grpo.rollout.vllm.engine import VLLMGenerator
    from lit_grpo.rollout.weights.tensors import check_arrival

    dtype = torch.float32 if scale.device == "cpu" else torch.bfloat16
    policy: Any = random_qwen3(Sizes(2, 128, 256, 4, 4, 64), scale.device, dtype)
    tokenizer, begun = make_tokenizer(), scale.wait()
    generator = VLLMGenerator(8, kv_memory="64MiB" if scale.tiny else "256MiB", engine_args={"max_model_len": 256})
    generator.start(PolicySpec(policy, tokenizer))
    yield {"case": "start", "seconds": scale.wait() - begun}
    proof = SyncProof(tokenizer, max_gap=0.1, max_growth=1.3)
    prompts = [Prompt("a", (3, 4, 5), "")]
    for version in range(2 if scale.tiny else 3):
        begun, weights = scale.wait(), generator.weights()
        check_arrival(weights.digests, generator.load_weights(weights, version).digests)
        row: Row = {"case": f"version {version}", "sync_s": scale.wait() - begun}
        gap = proof.measure(generator, policy)
        groups, _ = roll_out(generator, prompts, 8, SamplingParams(max_tokens=64))
        row |= {"relative_gap": gap.relative, "accepted": int(proof.accepts(gap))}
        row |= {"gap_to_forward": max(_gaps(policy, groups, scale))}
        begun = scale.wait()
        slept = generator.sleep()
        row |= {"sleep_s": scale.wait() - begun} | {name.removeprefix("vllm/"): one for name, one in slept.items()}
        yield row
        with torch.no_grad():
            for weight in policy.parameters():
                weight.mul_(1.02)
    generator.close()
    yield from _rates(scale, dtype)


def _rates(scale: Scale, dtype: torch.dtype) -> Iterator[Row]:
    """Decode the same completions in vLLM and in slots, each warm; both sample from the same policy."""
    from lit_grpo.rollout.vllm.engine import VLLMGenerator

    policy: Any = random_qwen3(scale.real, scale.device, dtype)
    rows, limit = (4, 8) if scale.tiny else (64, 256)
    prompt = Prompt("train/0", tuple(3 + i % 10 for i in range(16 if scale.tiny else 512)), "")
    memory, longest = ("64MiB", 64) if scale.tiny else ("10GiB", 1024)
    engine = VLLMGenerator(rows, kv_memory=memory, engine_args={"max_model_len": longest})
    engine.start(PolicySpec(policy, make_tokenizer()))
    engine.load_weights(engine.weights(), 0)
    for name, generator in (("vLLM", engine), ("slots", slots(policy, make_tokenizer(), rows))):
        roll_out(generator, [prompt], rows, SamplingParams(max_tokens=limit))  # a warm-up
        begun = scale.wait()
        groups, stats = roll_out(generator, [prompt], rows, SamplingParams(max_tokens=limit))
        seconds = scale.wait() - begun
        tokens = sum(rollout.completion.num_tokens for group in groups for rollout in group.rollouts)
        yield {"case": f"{rows} rows, {name}", "tokens_per_s": tokens / seconds, "steps": stats.num_steps}
    engine.close()


GROUPS = {32: 8, 128: 32, 512: 64}
"""Completions of the prompt, and the slots that decode them."""
PAPER = {"papers_memory_over_full_group": 10.64 / 21.55, "papers_rate_over_naive": 1.25}
"""Infinite Sampling: 21.55 GB of a full group, 10.64 GB of its own, and over 25% more throughput than naive groups."""


def the_papers_pair(scale: Scale) -> Iterator[Row]:
    """Decode groups of the Qwen3-1.7B configuration: ours, full group, naive micro groups; memory and rate."""
    policy: Any = random_qwen3(scale.real, scale.device, torch.bfloat16)
    groups, prompt_tokens, limit = ({4: 2}, 16, 6) if scale.tiny else (GROUPS, 512, 1024)
    bytes_per_s = _bandwidth(scale.device, 2**20 if scale.tiny else 2**30)
    ours(_work(policy, 2, 2, prompt_tokens, 4), "short_last")()  # a warm-up
    for group_size, num_slots in groups.items():
        work = _work(policy, group_size, num_slots, prompt_tokens, limit)
        whole = replace(work, num_rows=group_size)
        steps = {name: Steps([], [], []) for name in ("ours", "full group")}
        systems: dict[str, Callable[[], Run]] = {
            "ours": lambda work=work, steps=steps: ours(work, "short_last", steps["ours"]),
            "full group": lambda work=whole, steps=steps: ours(work, FULL_GROUP, steps["full group"]),
            "naive": lambda work=work: naive(work),
        }
        found: dict[str, dict[str, float]] = {}
        for name, system in systems.items():
            figures = found[name] = _measure(work, system())
            if name in steps:
                figures["bandwidth_share"] = _least_s(work, steps[name], bytes_per_s) / figures["seconds"]
            told: Row = {"gb_per_s": bytes_per_s / 1e9, **_rounded(figures)}
            yield {"case": f"G = {group_size}, {name}", "slots": num_slots, **told}
        mine = found["ours"]
        yield {
            "case": f"G = {group_size}, ours over the others",
            "memory_over_full_group": mine["total_gib"] / max(found["full group"]["total_gib"], 1e-9),
            "above_weights_over_full_group": mine["peak_gib"] / max(found["full group"]["peak_gib"], 1e-9),
            "rate_over_full_group": mine["tokens_per_s"] / found["full group"]["tokens_per_s"],
            "rate_over_naive": mine["tokens_per_s"] / found["naive"]["tokens_per_s"],
            **PAPER,
        }


KERNELS = {
    "copies": r"memcpy|memset|copy_|_to_copy|aten::to$",
    "attention": r"_attend|_merge|attention|flash|fmha|row_segments",
    "products": r"gemm|gemv|cutlass|nvjet|xmma|cublas|splitk|aten::(mm|bmm|addmm|linear|matmul)$",
    "sampling": r"softmax|searchsorted|cumsum|scan|sort|topk|nansum",
    "compiled": r"^triton_",
    "indices": r"index|gather|scatter|embedding",
    "sums": r"reduce|norm|mean|aten::sum$",
}
"""By class, what the name of one of its kernels has, first come; all others are arithmetic by number."""


def kernel_class(name: str) -> str:
    """Return the class of a kernel, or of an operation of torch."""
    found = (kind for kind, pattern in KERNELS.items() if re.search(pattern, name, re.IGNORECASE))
    return next(found, "by number")


WAYS = {
    "": (True, True),
    ", by operations": (False, True),
    ", not ahead": (True, False),
    ", by operations, not ahead": (False, False),
}
"""By name, whether a layer's kernels between products are Triton's, and whether the host launches a step ahead."""


def decode_step(scale: Scale) -> Iterator[Row]:
    """Time warm decode steps of the Qwen3-1.7B configuration by number of rows, and their kernels by class.

    As a run decodes, then without the kernels between products, without the host running ahead, and without both.
    """
    policy: Any = random_qwen3(scale.real, scale.device, torch.bfloat16)
    prompt = Prompt("train/0", tuple(3 + i % 10 for i in range(16 if scale.tiny else 512)), "")
    bytes_per_s = _bandwidth(scale.device, 2**20 if scale.tiny else 2**30)
    warm, timed, traced = (1, 3, 2) if scale.tiny else (20, 60, 20)
    all_rows = (2,) if scale.tiny else (8, 32, 64, 256)
    for (way, (has_kernels, ahead)), rows in itertools.product(WAYS.items(), all_rows):
        lengths: dict[Key, int] = {("train/0", 0, (row,)): warm + timed + traced + 4 for row in range(rows)}
        with nullcontext() if has_kernels else mock.patch.object(binding, "layer_kernels", lambda shape: None):
            generator = slots(policy, make_tokenizer(), rows, lengths)
        generator.runs_ahead = ahead
        watch = _StepWatch(scale, warm, timed, traced)
        sampling = SamplingParams(max_tokens=max(lengths.values()))
        roll_out(generator, [prompt], rows, sampling, on_step=watch)
        held = kv_bytes(policy) * (len(prompt.token_ids) + rows * (warm + timed // 2))
        least_s = (sum(weight.nbytes for weight in policy.parameters()) + held) / bytes_per_s
        seconds, (milliseconds, kernels) = watch.seconds / timed, watch.by_class()
        yield {
            "case": f"{rows} rows{way}",
            "ms_a_step": 1e3 * seconds,
            "device_ms_a_step": sum(milliseconds.values()),
            "kernels_a_step": sum(kernels.values()),
            "bandwidth_share": least_s / seconds,
        }
        for kind in sorted(milliseconds, key=lambda kind: -milliseconds[kind]):
            yield {
                "case": f"{rows} rows{way}: {kind}",
                "device_ms_a_step": milliseconds[kind],
                "kernels_a_step": kernels[kind],
            }


class _StepWatch:
    """Called after each decode step: times some of them, and then traces others."""

    def __init__(self, scale: Scale, warm: int, timed: int, traced: int) -> None:
        self._scale, self._traced, self.seconds, self._count = scale, traced, 0.0, 0
        self._begin, self._trace, self._end = warm, warm + timed, warm + timed + traced
        kind = torch.profiler.ProfilerActivity
        kinds = [kind.CPU, kind.CUDA] if scale.device == "cuda" and not scale.tiny else [kind.CPU]
        self._profile = torch.profiler.profile(activities=kinds)

    def __call__(self, num_tokens: int) -> None:
        self._count += 1
        if self._count == self._begin:
            self.seconds = -self._scale.wait()
        elif self._count == self._trace:
            self.seconds += self._scale.wait()
            self._profile.start()
        elif self._count == self._end:
            self._scale.wait()
            self._profile.stop()

    def by_class(self) -> tuple[Counter[str], Counter[str]]:
        """Return milliseconds and number of kernels a step, by class; of operations on the host in a rehearsal."""
        events = self._profile.key_averages()
        of_device = [event for event in events if str(event.device_type).endswith("CUDA")]
        milliseconds, kernels = Counter[str](), Counter[str]()
        for event in of_device if self._scale.device == "cuda" and not self._scale.tiny else events:
            taken = event.self_device_time_total if of_device else event.self_cpu_time_total
            milliseconds[kernel_class(event.key)] += taken / 1e3 / self._traced
            kernels[kernel_class(event.key)] += event.count / self._traced
        return milliseconds, kernels


def _work(policy: Any, group_size: int, slots: int, prompt_tokens: int, limit: int) -> DecodeWork:
    prompt = Prompt("train/0", tuple(3 + i % 10 for i in range(prompt_tokens)), "")
    return DecodeWork(policy, make_tokenizer(), [prompt], long_tailed([prompt], group_size, limit), group_size, slots)


def _measure(work: DecodeWork, run: Run) -> dict[str, float]:
    device = work.policy.device
    if device.type == "cuda":
        torch.cuda.empty_cache()
    memory = PeakMemory(device)
    idle_gib = memory.current_gib()
    memory.reset()
    num_steps, elapsed_s = run()
    total_gib = memory.peak_gib()
    return {
        "seconds": elapsed_s,
        "steps": num_steps,
        "tokens_per_s": work.num_tokens / elapsed_s,
        "total_gib": total_gib,
        "peak_gib": total_gib - idle_gib,
    }


def _least_s(work: DecodeWork, steps: Steps, bytes_per_s: float) -> float:
    """The seconds that reading weights, keys and values takes at least."""
    weights = sum(weight.nbytes for weight in work.policy.parameters())
    held = sum(len(prompt.token_ids) for prompt in work.prompts) * len(steps.rows)
    held += sum(length * (length - 1) // 2 for length in work.lengths.values())
    return (weights * len(steps.rows) + kv_bytes(work.policy) * held) / bytes_per_s


def _bandwidth(device: str, num_bytes: int) -> float:
    """The bytes that the device's memory reads and writes in a second, the median of some copies."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target, seconds = torch.empty_like(source), []
    for _ in range(20):
        begin = time.perf_counter()
        target.copy_(source)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return 2 * num_bytes / statistics.median(seconds)


def _rounded(figures: dict[str, float]) -> Row:
    return {name: float(f"{value:.4g}") for name, value in figures.items()}


def update_beside_trl(scale: Scale) -> Iterator[Row]:
    """Take updates of the Qwen3-1.7B configuration beside TRL's: the same tokens a micro-batch, warm steps in turn.

    Both are tried with the same sizes of micro-batches, with gradient checkpointing and without; TRL also with liger
    where that is installed. GRPOTrainer 1.16 has no packing. Rows of TRL are padded to the longest, which counts as
    tokens of its micro-batch.
    """
    from benchmarks.update_case import Case
    from benchmarks.update_vs_trl import QUICK, WORKS, figures_of, in_turn

    work = QUICK if scale.tiny else replace(WORKS["a"], vocab_size=VOCAB_SIZE)
    row_tokens = work.prompt_tokens + max(map(max, work.lengths()))
    policy, repeats = ("smallest", 1) if scale.tiny else ("Qwen3-1.7B", 5)
    has_trl = find_spec("trl") is not None
    if not has_trl:
        yield {"case": "TRL is not installed on this machine"}
    for rows, checkpointing in ((4, True),) if scale.tiny else ((8, True), (2, False), (2, True)):
        mine = Case("lit_grpo", rows * row_tokens, work, policy, scale.device, checkpointing=checkpointing)
        theirs = [replace(mine, system="TRL", size=rows, whole=True)] if has_trl else []
        if has_trl and find_spec("liger_kernel") is not None:
            theirs.append(replace(theirs[0], liger=True))
        for steps in in_turn([mine, *theirs], repeats):
            yield figures_of("a", steps) | {"liger": "liger" if steps.case.liger else ""}


def fit(scale: Scale) -> Iterator[Row]:
    """Fit a hybrid of the sizes of Qwen3.5-0.8B for two updates, and resume its checkpoint for a third."""
    with tempfile.TemporaryDirectory() as folder:
        policy = Path(folder, "policy")
        if scale.tiny:
            save_random_policy(policy, Sizes(4, 64, 128, 4, 2, 16, tied=True, hybrid=True), scale.device)
        else:
            _save_hybrid(policy, scale.device)
        group, limit, batch = (4, 8, 2) if scale.tiny else (16, 128, 4)
        command = [
            *(sys.executable, "-m", "lit_grpo", "fit", "--config", "configs/arithmetic.yaml"),
            *("--model.policy", str(policy), "--run.dir", str(Path(folder, "runs")), "--data.batch_size", str(batch)),
            *("--model.rewards", json.dumps([{"function": NOISE_REWARD}]), "--model.num_generations", str(group)),
            *("--model.sampling.max_tokens", str(limit), "--trainer.val_check_interval", "null"),
            *("--model.gradient_checkpointing", "true", "--model.max_tokens_per_micro_batch", "4096"),
            *("--trainer.accelerator", "gpu" if scale.device == "cuda" else "cpu"),
            *(("--trainer.precision", "bf16-mixed") if scale.device == "cuda" else ()),
        ]
        yield from _updates(scale, [*command, "--trainer.max_steps", "2"], "begun", Path(folder))
        (last,) = Path(folder, "runs").rglob("last.ckpt")
        more = ["--trainer.max_steps", "3", "--ckpt_path", str(last)]
        yield from _updates(scale, [*command, *more], "resumed", Path(folder))


def _updates(scale: Scale, command: list[str], name: str, folder: Path) -> Iterator[Row]:
    """Run a fit; yield how long it took, and the figures of each of its updates.

    Raises:
        RuntimeError: It has failed.
    """
    before = {row["step"] for table in folder.rglob("metrics.csv") for row in _rows_of(table)}
    begun = scale.wait()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError((done.stderr.strip() or done.stdout.strip()).splitlines()[-1])
    yield {"case": name, "seconds": scale.wait() - begun}
    wanted = ("time/step_s", "time/rollout_s", "time/update_s", "memory/rollout_peak_gib", "memory/update_peak_gib")
    for table in folder.rglob("metrics.csv"):
        for row in _rows_of(table):
            if row["step"] not in before and row.get("time/update_s"):
                told = {figure: float(row[figure]) for figure in (*wanted, "reward", "loss") if row.get(figure)}
                yield {"case": f"{name}, update {row['step']}"} | told


def _rows_of(table: Path) -> list[dict[str, str]]:
    with table.open() as file:
        return list(csv.DictReader(file))


def _save_hybrid(folder: Path, device: str) -> None:
    """Save a policy of the sizes of Qwen3.5-0.8B, with random weights and the demo's tokenizer."""
    from transformers import AutoModelForCausalLM

    from scripts.make_tiny import EOS_ID, PAD_ID
    from scripts.what_fits import MODELS

    config = MODELS["Qwen3.5 0.8B"]
    config.eos_token_id, config.pad_token_id = EOS_ID, PAD_ID
    with torch.device(device):
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


@dataclass(frozen=True)
class Stage:
    """A stage.

    Args:
        function: Yields its rows.
        limit_s: Its most seconds.
        pretended: Whether it is rehearsed under the pretended GPU, in this process; others run on the CPU.
    """

    function: Callable[[Scale], Iterator[Row]]
    limit_s: int
    pretended: bool = True


STAGES = {
    "slots alive": Stage(slots_alive, 30),
    "decode step": Stage(decode_step, 80),
    "the paper's pair": Stage(the_papers_pair, 160),
    "update alive": Stage(update_alive, 40),
    "update beside TRL": Stage(update_beside_trl, 100, pretended=False),
    "vLLM": Stage(vllm, 70, pretended=False),
    "fit, checkpoint, resume": Stage(fit, 60, pretended=False),
}
"""By name, in the order of worth; nine minutes in all."""


def finite(rows: list[Row]) -> bool:
    """Whether every figure is a finite number."""
    return all(math.isfinite(value) for row in rows for value in row.values() if not isinstance(value, str))


def main() -> None:
    """Run one stage; each row is a line."""
    tiny = sys.argv[2:] == ["rehearse"]
    for row in STAGES[sys.argv[1]].function(Scale("cpu" if tiny else "cuda", tiny)):
        print(json.dumps({"row": row}), flush=True)


if __name__ == "__main__":
    main()
