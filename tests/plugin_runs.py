"""A short run with each plug-in that ships, to be done by one process or by several ranks together."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from conftest import random_policy, save_tokenizer
from hand_made import VOCAB_SIZE, StepRecorder, make_module, make_trainer, weights_of

from lit_grpo.callbacks import RolloutScheduler, WeightSync
from lit_grpo.data import MixtureWeights
from lit_grpo.data.module import PromptDataModule
from lit_grpo.rewards import RewardSpec
from lit_grpo.types import SamplingParams
from lit_grpo.update.logprobs.teacher import TeacherSettings
from lit_grpo.update.objective.corrections import Correction
from lit_grpo.update.objective.kl import KLTerm
from lit_grpo.update.objective.objective import Objective

CHAT = (
    "{% for m in messages %}{{ m.role[0] }}#{{ m.content }}<eos>{% endfor %}{% if add_generation_prompt %}a#{% endif %}"
)
TAUGHT = {"teacher": TeacherSettings("average", average_rate=0.5)}
SELF_TAUGHT = TAUGHT | {"num_iterations": 2}
TALK = {"environments": {"factory": f"{__file__}:Talk", "max_turns": 3}}
LIKELY = {"depth": 0, "low": 0.5, "high": 1.0, "rise": 0.0, "unsure": 0.2}
OF_SETS = [{"copo": {"datasets": ["odd"]}}, {"copo": {"datasets": ["even"], "rho": 1.0}}]

RUNS: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "a3po": (["a3po"], {"objective": Objective(correction=Correction("token_truncate")), "num_iterations": 2}),
    "arpo": ([TALK, {"arpo": {"width": 8}}], {}),
    "arrol": ([{"arrol": {"at": 2}}], {}),
    "balanced": (["balanced:rounds=2,passed=1,failed=1"], {}),
    "buckets": (["buckets"], {}),
    "capo": (["capo"], {}),
    "copo": (["copo"], {}),
    "copo, twice": (OF_SETS, {}),
    "curriculum": (["curriculum"], {}),
    "d3s": (["d3s:keep=3"], {}),
    "d3s_tokens": (["d3s_tokens"], {}),
    "dars_equal": (["dars_equal"], {}),
    "dars_hardness": (["dars_hardness"], {}),
    "distill": ([{"distill": {"top_k": 3}}], TAUGHT),
    "dps": (["dps:candidates=2"], {}),
    "drpo": (["drpo"], {}),
    "echo": ([TALK, "echo"], {}),
    "echo, sft": ([TALK, "echo", {"sft": {"column": "solution", "weight": 0.5}}], {}),
    "echo_tree": (["majority_vote", {"echo_tree": {"width": 8, **LIKELY}}], {"num_iterations": 2}),
    "entropy_target": (["entropy_target"], {}),
    "environments": ([TALK], {}),
    "eptree": ([{"eptree": {"tokens": 2, "rounds": 1, "branches": 2}}], {}),
    "gigpo": ([TALK, "gigpo"], {}),
    "greso": (["greso:begin_at=0.3"], {}),
    "latr": ([{"latr": {"width": 8, "least": 0.1, "gap": 0.3, "look_ahead": 2}}], {}),
    "majority_vote": (["majority_vote"], {}),
    "max_entropy": (["max_entropy:keep=3"], {}),
    "mt_grpo": ([TALK, "mt_grpo"], {}),
    "nat": (["nat"], {}),
    "nat_uniform": (["nat_uniform"], {}),
    "near_half": (["near_half"], {}),
    "novelty": (["novelty"], {}),
    "phases": (["phases"], {}),
    "pods": (["pods:keep=3"], {}),
    "poise": (["poise:at=4"], {}),
    "prompt_gdro": (["prompt_gdro:bins=2"], {}),
    "random_members": (["random_members:keep=3"], {}),
    "reference_hint": (["reference_hint"], {}),
    "repo": (["repo"], {}),
    "return_to_go": ([TALK, "return_to_go"], {}),
    "rlep": (["rlep"], {}),
    "router_loss": (["router_loss"], {}),
    "scope": ([{"scope": {"judge": f"{__file__}:first_step", "separator": "a"}}], TAUGHT),
    "sdft": (["sdft"], SELF_TAUGHT),
    "sdpo": (["sdpo"], SELF_TAUGHT),
    "seco": (["seco:chunk=4"], {}),
    "sft": ([{"sft": {"column": "solution", "weight": 0.5}}], {}),
    "snapshots": (["snapshots"], {"num_iterations": 2}),
    "spaco": (["spaco:chunk=4"], {}),
    "strategy_hint": (["strategy_hint"], {}),
    "tr_dpo": (["tr_dpo"], {"objective": Objective(kl=KLTerm(0.1))}),
    "trace": ([TALK, {"trace": {"width": 8}}], {}),
    "treepo": ([{"treepo": {"width": 12, "segment": 2}}], {}),
    "vcpo": (["vcpo"], {}),
}
"""Plug-ins and further options of a module, of runs that ranks do as one process does."""
UNEQUAL: dict[str, tuple[list[Any], dict[str, Any]]] = {
    **{name: ([name], {}) for name in ("knapsack", "rollout_gdro", "uniform", "variance", "xrpo")},
    **{name: ([name], {}) for name in ("april", "sortedrl", "sortedrl_partial")},
    "chunked": (["chunked:tokens_per_update=6"], {}),
    "replace_flat": (["replace_flat"], {}),
    "aepo": ([TALK, {"aepo": {"width": 8}}], {}),
    "goodput": (["goodput"], {}),
    "noise_scale": (["noise_scale"], {}),
    "norm_test": (["norm_test"], {}),
}
"""Those whose choices or figures are of parts that ranks have for themselves.

They divide the completions of a rank's prompts or keep some of them open, fill groups in the order in which turns end,
or estimate noise from the gradients of parts, of which each rank has its own.
"""
APART = {
    "agent": "is the plug-in environments with another driver",
    "swarm": "needs another run; see tests/integration/test_swarm_runs.py",
    "train_mtp": "needs a policy with a layer of multi-token prediction; see tests/test_train_mtp.py",
    "asynchronous": "needs a generator with devices of its own; see BESIDE",
    "periodic": "needs a generator with devices of its own; see BESIDE",
}


def even_length(completion: str, num_tokens: int, log_metric: Callable[[str, float], None]) -> float:
    """A reward that about half of all completions get, which logs a figure of those with an odd letter."""
    if sum(map(ord, completion)) % 2:
        log_metric("mine/length", num_tokens)
    return float(num_tokens % 2 == 0)


def first_step(completion: str) -> float:
    """A judge for whom the first or the second step is wrong."""
    return 1.0 + (len(completion) > 4 and "a" in completion)


class Talk:
    """Answers up to three turns; each earns what its length says."""

    def reset(self, number: int) -> None:
        self.left, self.earned = 1 + number % 3, 0.0

    def respond(self, text: str) -> str | None:
        self.left, self.earned = self.left - 1, float(len(text) % 3)
        return "b" * self.left or None

    def turn_reward(self) -> float:
        return self.earned

    def state(self) -> list[float]:
        return [self.left, self.earned]

    def restore(self, state: list[float]) -> None:
        self.left, self.earned = int(state[0]), state[1]


def save_policies(folder: Path) -> None:
    """Save the policies of the runs, once: their tokenizer has a chat template, and one of them has routers."""
    torch.manual_seed(5)
    config: Any = cast("Any", transformers.Qwen3MoeConfig)(
        vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=6, num_experts_per_tok=2,
        max_position_embeddings=128, bos_token_id=0, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    for name, make in (("chat", random_policy), ("routers", lambda: transformers.Qwen3MoeForCausalLM(config))):
        if not (folder / name).exists():
            policy: Any = make()
            policy.save_pretrained(folder / name)
            save_tokenizer(folder / name, chat_template=CHAT)


def run_plugin(name: str, policies: Path, output: Path, **trainer: Any) -> dict[str, Any]:
    """Three batches of four prompts in all, of nine that there are, and a validation after each."""
    plugins, options = (RUNS | UNEQUAL)[name]
    ranks = trainer.get("devices", 1)
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    folder = output / f"{name}-{rank}-of-{ranks}"
    folder.mkdir()
    policy, is_chat = policies / ("routers" if name == "router_loss" else "chat"), TALK in plugins
    rows = []
    for number in range(9):
        content: Any = f"{number}+{number}="
        row = {"prompt": [{"role": "user", "content": content}] if is_chat else content, "number": number}
        row |= {"solution": str(number), "strategy": "b", "task": "a", "level": number % 3}
        rows.append(row | ({"dataset": ("even", "odd")[number % 2]} if "twice" in name else {}))
    for split, some in (("train", rows), ("validation", rows[:3])):
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, some)))
    source: dict[str, Any] = {split: str(folder / f"{split}.jsonl") for split in ("train", "validation")}
    mixture: dict[str, Any] = {"mixture": MixtureWeights({"even": 1.0, "odd": 1.0})} if "twice" in name else {}
    data = PromptDataModule(str(policy), **source, batch_size=4 // ranks, eval_batch_size=1, **mixture)
    given: dict[str, Any] = {
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        "rewards": [RewardSpec(f"{__file__}:even_length")],
        "pass_reward": "even_length",
        "num_generations": 6,
        "sampling": SamplingParams(max_tokens=20, max_observed=32) if is_chat else SamplingParams(max_tokens=9),
        "max_tokens_per_micro_batch": 256,
    }
    module, recorder = make_module(policy, **(given | options)), StepRecorder()
    own = {"max_steps": 3 * module.settings.updates_per_batch, "max_epochs": -1, "val_check_interval": 1}
    callbacks = RolloutScheduler(plugins=plugins), WeightSync(), recorder
    make_trainer(*callbacks, default_root_dir=str(folder), **own, **trainer).fit(module, datamodule=data)
    return {"weights": weights_of(module), "version": module.policy_version, "logs": [*map(shared, recorder.logs)]}


OF_THE_MACHINE = ("time/", "perf/", "memory/", "lengths/")
OF_SLOTS = ("steps", "steps_over_bound", "bubble_ratio", "slots_in_use", "kv_tokens_peak", "set_asides", "parked")


def shared(columns: dict[str, float]) -> dict[str, float]:
    """Return what is logged but for seconds, bytes, and what depends on the slots and predictions of each rank."""
    own = [f"rollout/{name}" for name in (*OF_SLOTS, "probe_tokens")] + ["environments/waiting_share"]
    return {name: each for name, each in columns.items() if not name.startswith(OF_THE_MACHINE) and name not in own}
