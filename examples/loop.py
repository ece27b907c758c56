# /// script
# requires-python = ">=3.11"
# dependencies = ["lit_grpo", "torch>=2.11"]
# [tool.uv.sources]
# lit_grpo = { path = "..", editable = true }
# ///
"""GRPO as one loop, without Lightning: the page to read first. ``python examples/loop.py``."""

import torch

from lit_grpo.policy import load_policy, load_tokenizer
from lit_grpo.policy.spec import PolicySpec
from lit_grpo.rollout.loop import RolloutLoop
from lit_grpo.rollout.slots.generator import SlotGenerator
from lit_grpo.tasks import ArithmeticRows
from lit_grpo.types import Prompt, SamplingParams
from lit_grpo.update.advantages.estimator import Advantages
from lit_grpo.update.learner import Learner
from lit_grpo.update.learner_settings import LearnerSettings
from lit_grpo.update.objective.objective import Objective


class Steps:
    """Backward passes and optimizer steps: Lightning's part of an update."""

    policy_version = 0

    def __init__(self, policy):
        self.optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4)

    def add_gradient(self, compute_loss, exchange):
        """Add the gradient of a micro-batch; on several ranks it is exchanged after the last (``exchange``)."""
        compute_loss().backward()

    def take_step(self, scale=1.0):
        """Take an optimizer step; return the learning rate, which is logged."""
        self.optimizer.step()
        self.policy_version += 1
        return self.optimizer.param_groups[0]["lr"]


if __name__ == "__main__":
    policy, tokenizer, sampling = load_policy("tiny").train(), load_tokenizer("tiny"), SamplingParams(max_tokens=64)
    generator = SlotGenerator(num_slots=8)  # which decode 32 completions: memory does not limit the size of a group
    generator.start(PolicySpec(policy, tokenizer))
    settings = LearnerSettings(Objective(), Advantages(), {"exact": 1.0}, sampling.temperature, sampling.max_tokens)
    steps = Steps(policy)
    learner = Learner(policy, steps, settings)
    prompts = [
        Prompt(f"row/{number}", tuple(tokenizer.encode(row["prompt"])), row["prompt"], columns=row)
        for number, row in enumerate(ArithmeticRows(num_rows=8).rows())
    ]
    for batch in (prompts[:4], prompts[4:]):
        generator.load_weights(PolicySpec(policy, tokenizer).weights(), steps.policy_version)
        groups, rollout = RolloutLoop(generator, plan="lpt").collect(batch, 8, sampling, seed=0)
        members = [member for group in groups for member in group.rollouts]
        for member in members:
            member.reward = float(member.completion.text.split("=")[-1] == member.prompt.columns["answer"])
            member.rewards = {"exact": member.reward}
        reward, metrics = sum(member.reward for member in members) / len(members), learner.learn(groups)
        print(
            f"update {steps.policy_version}: reward {reward:.2f}, loss {metrics['loss']:.4f}, log-prob gap "
            f"{metrics['sampling/logprob_gap_max']:.1e}, {rollout.num_steps} steps of decoding"
        )
