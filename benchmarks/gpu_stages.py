"""The stages of ``benchmarks.gpu``: each returns rows of what it has found.

``python -m benchmarks.gpu_stages NAME`` runs one on the first GPU, and prints its rows as a line of JSON.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from benchmarks import modes
from benchmarks.baseline_plans import FULL_GROUP
from benchmarks.decode_systems import Run, Steps, naive, ours
from benchmarks.decode_systems import Work as DecodeWork
from benchmarks.random_policies import QWEN3_1_7B, QWEN3_7M, TO_UPDATE, Sizes, kv_bytes, random_qwen3
from benchmarks.report import Row
from benchmarks.rollouts import roll_out, slots
from benchmarks.update_work import Work
from benchmarks.workloads import long_tailed
from lit_grpo.memory import PeakMemory
from lit_grpo.policy.spec import PolicySpec
from lit_grpo.types import Prompt, RolloutGroup, SamplingParams
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


def slots_alive(scale: Scale) -> list[Row]:
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
    return [row | {"same_completions": sum(one == other for one, other in pairs) / len(pairs)} for row in rows]


@torch.no_grad()
def _gaps(policy: Any, groups: list[RolloutGroup], scale: Scale) -> list[float]:
    """Return the difference of sampled log-probs from those of the policy's own forward, by completion."""
    gaps = []
    for rollout in (group.rollouts[0] for group in groups):
        (row,) = make_micro_batches([rollout], scale.most_tokens, shared_prefix=False)
        micro_batch = row.to(torch.device(scale.device, 0))
        logprobs_N, _ = micro_batch_logprobs(policy, micro_batch, 1.0)
        gaps.append(float((logprobs_N.cpu() - rollout.completion.logprobs_T).abs().max()))
    return gaps


def update_alive(scale: Scale) -> list[Row]:
    """Compare FlexAttention forward and backward with padded rows: the gradient, the seconds and the memory."""
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
    return [row | {"gradient_off": off} for row in rows] + [_optimizer_step(policy, [group], scale)]


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


def vllm_alive(scale: Scale) -> list[Row]:
    """Start vLLM in this process, sync, prove, sample, sleep, wake, and sync changed weights."""
    from lit_grpo.rollout.proof import SyncProof
    from lit_grpo.rollout.vllm.engine import VLLMGenerator
    from lit_grpo.rollout.weights.tensors import check_arrival

    policy: Any = random_qwen3(Sizes(2, 128, 256, 4, 4, 64), scale.device, torch.bfloat16)
    tokenizer, rows = make_tokenizer(), list[Row]()
    begun = scale.wait()
    generator = VLLMGenerator(8, kv_memory="256MiB", engine_args={"max_model_len": 256})
    generator.start(PolicySpec(policy, tokenizer))
    proof = SyncProof(tokenizer, max_gap=0.1, max_growth=1.3)
    prompts = [Prompt("a", (3, 4, 5), "")]
    for version in range(3):
        weights = generator.weights()
        check_arrival(weights.digests, generator.load_weights(weights, version).digests)
        gap = proof.measure(generator, policy)
        groups, _ = roll_out(generator, prompts, 8, SamplingParams(max_tokens=64))
        seconds, begun = scale.wait() - begun, time.perf_counter()
        row: Row = {"version": version, "seconds": seconds, "relative_gap": gap.relative}
        row |= {"accepted": int(proof.accepts(gap)), "gap_to_forward": max(_gaps(policy, groups, scale))}
        rows.append(row | {name.removeprefix("vllm/"): value for name, value in generator.sleep().items()})
        with torch.no_grad():
            for weight in policy.parameters():
                weight.mul_(1.02)
    generator.close()
    return rows


def the_papers_pair(scale: Scale) -> list[Row]:
    """Decode a group of 32 of the Qwen3-1.7B configuration: full group, naive micro groups, ours; memory and rate."""
    policy: Any = random_qwen3(scale.real, scale.device, torch.bfloat16)
    group_size, num_slots, prompt_tokens, limit = (4, 2, 16, 6) if scale.tiny else (32, 8, 512, 1024)
    bytes_per_s = _bandwidth(scale.device, 2**20 if scale.tiny else 2**30)
    ours(_work(policy, 2, 2, prompt_tokens, 4), "short_last")()  # a warm-up
    work = _work(policy, group_size, num_slots, prompt_tokens, limit)
    whole = replace(work, num_rows=group_size)
    steps = {name: Steps([], [], []) for name in ("ours", "full group")}
    systems: dict[str, Run] = {
        "ours": ours(work, "short_last", steps["ours"]),
        "full group": ours(whole, FULL_GROUP, steps["full group"]),
        "naive": naive(work),
    }
    rows: list[Row] = []
    for name, run in systems.items():
        figures = _measure(work, run)
        if name in steps:
            figures["bandwidth_share"] = _least_s(work, steps[name], bytes_per_s) / figures["seconds"]
        rows.append({"G": group_size, "system": name, "gb_per_s": bytes_per_s / 1e9, **_rounded(figures)})
    return rows


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


def update_beside_trl(scale: Scale) -> list[Row]:
    """Take an update of the Qwen3-1.7B configuration beside TRL's: one shape of work, one size of micro-batches."""
    from benchmarks.update_case import Case
    from benchmarks.update_vs_trl import WORKS, compare
    from benchmarks.update_vs_trl import Sizes as MicroBatches

    work = replace(WORKS["a"], vocab_size=VOCAB_SIZE)
    case = Case("lit_grpo", 0, work, "Qwen3-1.7B", scale.device, checkpointing=True)
    rows, _ = compare("a", case, MicroBatches((16_384,), (8,)), repeats=1)
    return rows


def idle_time(scale: Scale) -> list[Row]:
    """Count idle slots and useful tokens of modes in slots, on long-tailed work."""
    work = modes.Work(2, 2, 2, 4, 8) if scale.tiny else modes.Work(6, 16, 8, 64, 384)
    lengths = long_tailed(work.prompts, work.num_generations, work.limit)
    policy = random_qwen3(TO_UPDATE["smallest"] if scale.tiny else replace(QWEN3_7M, layers=8), scale.device)
    generator = slots(policy, make_tokenizer(), work.num_slots, lengths)
    arms = [modes.Arm("synchronous"), modes.Arm("synchronous", "short_last"), modes.Arm("april"), modes.Arm("sortedrl")]
    rows: list[Row] = []
    for arm in arms:
        begun = scale.wait()
        figures = modes.measure(arm, work, generator, lengths)
        rows.append({"mode": arm.mode, "plan": arm.plan, "seconds": scale.wait() - begun, **figures})
    return rows


STAGES: dict[str, tuple[Callable[[Scale], list[Row]], int, str]] = {
    "slots alive": (slots_alive, 60, ""),
    "update alive": (update_alive, 60, ""),
    "vLLM alive": (vllm_alive, 130, "vLLM has no kernels of a pretended GPU"),
    "the paper's pair": (the_papers_pair, 130, ""),
    "update beside TRL": (update_beside_trl, 130, "its processes are those of update_vs_trl --quick"),
    "idle time": (idle_time, 60, ""),
}
"""By name, in the order of worth: the function, its most seconds, and why it is not rehearsed, if it is not."""


def finite(rows: list[Row]) -> bool:
    """Whether every figure is a finite number."""
    return all(math.isfinite(value) for row in rows for value in row.values() if not isinstance(value, str))


def main() -> None:
    """Run one stage; its rows are the last line."""
    print(json.dumps(STAGES[sys.argv[1]][0](Scale())))


if __name__ == "__main__":
    main()
