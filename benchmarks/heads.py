"""Drafts by a policy's own heads: tokens a step, before and after training, with heads that are trained along or not.

The policy is the shipped Qwen3.5 of 0.2 million parameters, which has no heads: its layer of multi-token prediction is
fitted here, on completions that the policy has sampled, before anything is measured. Drafts change no sample, so all
systems decode the same tokens, which is checked.
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from benchmarks.report import Claim, Row, finish, parse_options
from lit_grpo.methods.train_mtp import TrainMTP
from lit_grpo.plugins import fresh
from lit_grpo.policy.architecture.decoder import hidden_states, token_logits
from lit_grpo.policy.architecture.heads import prediction_head
from lit_grpo.policy.loading import load_policy, load_tokenizer
from lit_grpo.policy.named import NAMED, TINY_HYBRID
from lit_grpo.policy.spec import PolicySpec
from lit_grpo.ranks import Ranks
from lit_grpo.rollout.loop import RolloutLoop, RolloutStats
from lit_grpo.rollout.slots.generator import SlotGenerator
from lit_grpo.tasks import ArithmeticRows
from lit_grpo.types import Prompt, RolloutGroup, SamplingParams
from lit_grpo.update.advantages.estimator import Advantages
from lit_grpo.update.learner import Learner
from lit_grpo.update.learner_settings import LearnerSettings
from lit_grpo.update.objective.objective import Objective
from lit_grpo.update.plugin import TrainingRun

SAMPLING = SamplingParams(max_tokens=64)
DEPTHS = 3
SLOTS = 64


def exercises(tokenizer: Any, split: Literal["train", "validation"], number: int) -> list[Prompt]:
    rows = ArithmeticRows(split=split, num_rows=number).rows()
    return [
        Prompt(f"{split}/{place}", tuple(tokenizer.encode(row["prompt"])), row["prompt"], columns=row)
        for place, row in enumerate(rows)
    ]


def decode(
    policy: Any, tokenizer: Any, prompts: Sequence[Prompt], count: int, seed: int, **options: Any
) -> tuple[list[RolloutGroup], RolloutStats, float]:
    """Return completions of each prompt, what they took, and the seconds."""
    generator = SlotGenerator(SLOTS, **options)
    generator.start(PolicySpec(policy, tokenizer))
    generator.load_weights(policy.named_parameters(), 0)
    began = time.perf_counter()
    groups, stats = RolloutLoop(generator, plan="lpt").collect(prompts, count, SAMPLING, seed=seed)
    return groups, stats, time.perf_counter() - began


def padded(groups: Sequence[RolloutGroup]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all sequences, padded on the right, and which tokens were sampled, both of shape (B, T)."""
    rows, sampled = list[torch.Tensor](), list[torch.Tensor]()
    for rollout in (member for group in groups for member in group.rollouts):
        prompt, ids_T = torch.tensor(rollout.prompt.token_ids), rollout.completion.token_ids_T
        rows.append(torch.cat([prompt, ids_T]))
        sampled.append(torch.cat([torch.zeros_like(prompt), torch.ones_like(ids_T)]).bool())
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(rows, batch_first=True), pad(sampled, batch_first=True)


def fit_heads(policy: Any, groups: Sequence[RolloutGroup], num_steps: int) -> list[float]:
    """Fit the policy's layer of multi-token prediction on its own samples, for several tokens ahead; return losses."""
    layer = prediction_head(policy).requires_grad_(True)
    ids_BT, sampled_BT = padded(groups)
    with torch.no_grad():
        hidden_BTD = hidden_states(policy, ids_BT)[:, :-1]
    optimizer, losses = torch.optim.AdamW(layer.parameters(), 3e-3, weight_decay=0.1), list[float]()
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, num_steps)
    drawn = torch.Generator().manual_seed(0)

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float) -> torch.Tensor:
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)

    for _ in range(num_steps):
        rows_b = torch.randint(0, len(ids_BT), (64,), generator=drawn)
        before_bTD, tokens_bT, total = hidden_BTD[rows_b], ids_BT[rows_b], torch.zeros(())
        for depth in range(DEPTHS):  # what was made of a token takes the place of its hidden state
            own_bT = tokens_bT[:, 1 + depth :]
            positions_bT = 1 + torch.arange(own_bT.shape[1]).expand_as(own_bT)
            u_bTD = layer(before_bTD, own_bT, positions_bT, attend)
            is_target_bT = sampled_BT[rows_b][:, 2 + depth :]
            logits_NV = token_logits(policy, u_bTD[:, :-1][is_target_bT])
            total = total + cross_entropy(logits_NV, tokens_bT[:, 2 + depth :][is_target_bT])
            before_bTD = u_bTD[:, :-1]
        optimizer.zero_grad()
        total.backward()
        torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(float(total.detach()) / DEPTHS)
    layer.requires_grad_(False)
    policy.zero_grad()
    return losses


def with_heads(folder: Path, num_fitted: int, num_steps: int) -> tuple[float, float]:
    """Write the shipped policy with fitted heads into a folder; return the loss at the beginning and at the end."""
    shutil.copytree(NAMED[TINY_HYBRID].folder, folder)
    path = folder / "model.safetensors"
    own = load_file(path)
    size, number = len(own["model.norm.weight"]), max(int(name.split(".")[2]) for name in own if ".layers." in name)
    of_layer, drawn = f"model.layers.{number}.", torch.Generator().manual_seed(0)
    layer = {name.replace(of_layer, "mtp.layers.0."): own[name].clone() for name in own if name.startswith(of_layer)}
    norms = ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding")
    layer |= {f"mtp.{name}.weight": torch.zeros(size) for name in norms}
    layer["mtp.fc.weight"] = torch.randn((size, 2 * size), generator=drawn) / (2 * size) ** 0.5
    save_file(own | layer, path, {"format": "pt"})
    policy, tokenizer = load_policy(str(folder)), load_tokenizer(str(folder))
    groups, _, _ = decode(policy, tokenizer, exercises(tokenizer, "train", num_fitted), 2, 1, drafts="off")
    losses = fit_heads(policy, groups, num_steps)
    save_file(own | prediction_head(policy).stored(), path, {"format": "pt"})
    return sum(losses[:10]) / 10, sum(losses[-10:]) / 10


class Steps:
    """Backward passes and optimizer steps; keeps the gradient of the first."""

    def __init__(self, policy: Any, rate: float) -> None:
        self.policy, self.policy_version = policy, 0
        self.optimizer = torch.optim.AdamW(policy.parameters(), rate, betas=(0.9, 0.99), weight_decay=0.0)
        self.first = torch.empty(0)

    def add_gradient(self, compute_loss: Any, exchange: bool) -> None:
        compute_loss().backward()

    def take_step(self, scale: float = 1.0) -> float:
        if not self.policy_version:
            self.first = torch.cat([one.grad.flatten() for one in self.policy.parameters() if one.grad is not None])
        self.optimizer.step()
        self.policy_version += 1
        return 0.0


def trained(folder: Path, num_updates: int, plugins: Sequence[TrainMTP]) -> tuple[Any, torch.Tensor, float]:
    """Return the policy after some updates, the gradient of the first, and the mean reward of the last."""
    policy, tokenizer = load_policy(str(folder)).train(), load_tokenizer(str(folder))
    prediction_head(policy)  # in both, so that memory lies alike, on which sums' last bits depend
    for plugin in plugins:
        plugin.on_train_start(TrainingRun(policy, None, 0, 1, Ranks(policy.device)))
    settings = LearnerSettings(
        Objective(), Advantages(), {"exact": 1.0}, SAMPLING.temperature, SAMPLING.max_tokens, plugins=plugins
    )
    steps = Steps(policy, 1e-3)
    learner, prompts, reward = Learner(policy, steps, settings), exercises(tokenizer, "train", 2048), 0.0
    random.Random(0).shuffle(prompts)
    for update in range(num_updates):
        groups, _, _ = decode(policy, tokenizer, prompts[16 * update : 16 * (update + 1)], 16, 2 + update, drafts="off")
        members = [member for group in groups for member in group.rollouts]
        for member in members:
            member.reward = float(member.completion.text.split("=")[-1] == member.prompt.columns["answer"])
            member.rewards = {"exact": member.reward}
        reward = sum(member.reward for member in members) / len(members)
        learner.learn(groups)
    return policy, steps.first, reward


def measure(name: str, policy: Any, tokenizer: Any, prompts: Sequence[Prompt]) -> list[Row]:
    """Return what drafts of both kinds bring on the same completions, and check that these are the same."""
    rows, expected = list[Row](), None
    for drafter, drafts in (("", "off"), ("text", 3), ("heads", 1), ("heads", 3), ("heads", 7)):
        options = {"drafts": drafts} | ({"drafter": drafter} if drafter else {})
        groups, stats, seconds = decode(policy.eval(), tokenizer, prompts, 4, 99, **options)
        found = [member.completion.token_ids_T.tolist() for group in groups for member in group.rollouts]
        expected = expected or found
        rows.append(
            {
                "policy": name,
                "drafter": drafter or "none",
                "k": 0 if drafts == "off" else drafts,
                "tokens_per_step": stats.num_tokens / stats.active_slot_steps,
                "accepted_of_drafted": stats.accepted.total() / max(stats.num_drafted, 1),
                "steps": stats.num_steps,
                "seconds": seconds,
                "other_tokens": sum(a != b for a, b in zip(found, expected, strict=True)),
            }
        )
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Fit heads, train, and measure."""
    options = parse_options("Tokens a step by a policy's own heads, and what training does to them.", arguments)
    torch.set_num_threads(1)
    num_fitted, num_steps, num_updates, num_held_out = (4, 20, 1, 2) if options.quick else (768, 700, 10, 32)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "policy"
        first, last = with_heads(folder, num_fitted, num_steps)
        tokenizer = load_tokenizer(str(folder))
        held_out = exercises(tokenizer, "validation", num_held_out)
        rows = measure("before", load_policy(str(folder)), tokenizer, held_out)
        frozen, plain_gradient, reward = trained(folder, num_updates, [])
        along, gradient, _ = trained(folder, num_updates, [fresh(TrainMTP(learning_rate=1e-3))])
        rows += measure("after training, heads as they were", frozen, tokenizer, held_out)
        rows += measure("after training, heads trained along", along, tokenizer, held_out)
    of = {(row["policy"], row["drafter"], row["k"]): float(row["tokens_per_step"]) for row in rows}
    along_3, frozen_3 = (of[f"after training, heads {how}", "heads", 3] for how in ("trained along", "as they were"))
    settings: Row = {
        "completions": 4 * num_held_out,
        "slots": SLOTS,
        "max_tokens": SAMPLING.max_tokens,
        "fitted_on": 2 * num_fitted,
        "fit_steps": num_steps,
        "fit_loss_first": first,
        "fit_loss_last": last,
        "updates": num_updates,
        "reward_of_last_update": reward,
    }
    claims = [
        Claim("tokens a step by the heads, k = 3, before training", of["before", "heads", 3], ">=", 2.0),
        Claim("tokens a step by heads trained along, k = 3", along_3, ">=", 2.0),
        Claim("the same over heads as they were", along_3 / frozen_3, ">=", 1.0),
        Claim("completions that drafts changed", float(sum(int(row["other_tokens"]) for row in rows)), "<=", 0.0),
        Claim(
            "relative change of the first policy gradient by train_mtp",
            float((gradient - plain_gradient).norm() / plain_gradient.norm()),
            "<=",
            1e-6,
        ),
    ]
    return finish("heads", options, settings, rows, claims)


if __name__ == "__main__":
    sys.exit(main())
