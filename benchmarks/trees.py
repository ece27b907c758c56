"""Savings of a tree of rollouts, by the fraction of tokens that its leaves have in common.

Each prompt has a tree of depth three: eight leaves, all equally long, that divide in two at three places. The rollout
decodes the leaves in as many slots as there are prompts, and forks what is being decoded; beside it as many completions
begin at the prompt. The update takes the same leaves with every common prefix computed once, beside completion by
completion; the prompt is shared on both sides. The best that sharing can do is the quotient of the tokens.

The last row has no tree: the update alone, of what the demo's policy samples before its training. Its completions are
short and often alike, so that what they begin with in common saves more than forks do.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.random_policies import TO_UPDATE, random_qwen3
from benchmarks.report import Claim, Options, Row, finish, note, parse_options
from benchmarks.rollouts import roll_out, slots
from benchmarks.workloads import arithmetic_prompts, load

if TYPE_CHECKING:
    import torch

    from lit_grpo.types import Prompt, Rollout

VOCAB_SIZE, PROMPT_TOKENS, NEVER = 1000, 64, 10**9
SAVED = (0.0, 0.25, 0.5, 0.7)  # of the leaves' tokens


def main(options: Options) -> int:
    """Measure rollout and update at each share of common tokens."""
    num_prompts, num_tokens, repeats, sizes = (2, 60, 2, "smallest") if options.quick else (4, 192, 5, "7M")
    model = random_qwen3(replace(TO_UPDATE[sizes], vocab_size=VOCAB_SIZE), options.device).train()
    rows: list[Row] = []
    claims: list[Claim] = []
    for share in SAVED:
        between = int(share * 8 * num_tokens / 17)  # of 24 stretches in 8 leaves 1 + 2 + 4 are computed
        leaves = [leaf for number in range(num_prompts) for leaf in _leaves(number, num_tokens, between)]
        row: Row = {"what": f"{share:.0%} in common"}
        row |= _compare(model, leaves, repeats) | _compare_rollouts(model, num_prompts, num_tokens, between, repeats)
        rows.append(row)
        note(f"{share:.0%} in common: {row}")
        claims.append(
            Claim(
                f"gradient beside completion by completion, relative, {share:.0%} in common",
                float(row["difference"]),
                "<=",
                1e-6,
            )
        )
        claims.append(
            Claim(f"speed-up over the quotient of tokens, {share:.0%} in common", float(row["reached"]), ">=", 0.85)
        )
    rows.append(_demo(options.device, repeats))
    claims.append(Claim("speed-up of the demo's update", float(rows[-1]["speed_up"]), ">=", 1.0))
    settings: Row = {
        "policy": f"random Qwen3, {sizes}",
        "prompts": num_prompts,
        "prompt_tokens": PROMPT_TOKENS,
        "leaves": 8,
        "leaf_tokens": num_tokens,
    }
    return finish("trees", options, settings, rows, claims)


def _prompt(number: int) -> Prompt:
    from lit_grpo.types import Prompt

    rng = random.Random(number)
    return Prompt(str(number), tuple(rng.randrange(2, VOCAB_SIZE) for _ in range(PROMPT_TOKENS)), "")


def _leaves(number: int, num_tokens: int, between: int) -> list[Rollout]:
    """Return the leaves of a prompt's tree, which divide after so many tokens, again and again."""
    from lit_grpo.types import Completion, Request, Rollout, SamplingParams

    rng, prompt = random.Random(number), _prompt(number)
    token = partial(rng.randrange, 2, VOCAB_SIZE)
    paths: list[list[int]] = [[]]
    for _ in range(3):
        trunks = [[*path, *(token() for _ in range(between))] for path in paths]
        paths = [trunk for trunk in trunks for _ in range(2)]
    paths = [[*path, *(token() for _ in range(num_tokens - len(path)))] for path in paths]
    leaves: list[Rollout] = []
    for leaf, path in enumerate(paths):
        request = Request(prompt, (leaf,), SamplingParams(max_tokens=num_tokens))
        leaves.append(Rollout(prompt, Completion(request, path, [-1.0] * num_tokens, [0] * num_tokens, "length")))
    return leaves


def _compare(model: Any, leaves: Sequence[Rollout], repeats: int) -> Row:
    from lit_grpo.update.batches.layout import LEAST_SHARED

    shared, alone = partial(_update, model, leaves, LEAST_SHARED), partial(_update, model, leaves, NEVER)
    shared(), alone()  # what is compiled or allocated at first
    times: dict[str, list[float]] = {"shared": [], "alone": []}
    gradients: dict[str, torch.Tensor] = {}
    tokens: dict[str, int] = {}
    for _ in range(repeats):
        for name, update in (("shared", shared), ("alone", alone)):
            gradients[name], tokens[name], seconds = update()
            times[name].append(seconds)
    seconds, seconds_alone = statistics.median(times["shared"]), statistics.median(times["alone"])
    speed_up, ideal = seconds_alone / seconds, tokens["alone"] / tokens["shared"]
    difference = (gradients["shared"] - gradients["alone"]).norm() / gradients["alone"].norm()
    return {
        "tokens": tokens["shared"],
        "tokens_alone": tokens["alone"],
        "saved": round(1 - tokens["shared"] / tokens["alone"], 3),
        "update_s": round(seconds, 4),
        "update_alone_s": round(seconds_alone, 4),
        "speed_up": round(speed_up, 3),
        "ideal": round(ideal, 3),
        "reached": round(speed_up / ideal, 3),
        "difference": float(difference),
    }


def _demo(device: str, repeats: int) -> Row:
    """Compare the update of a batch of the demo, of 16 prompts with 16 completions each."""
    from lit_grpo.types import SamplingParams

    policy, tokenizer = load("tiny", device)
    groups, _ = roll_out(
        slots(policy, tokenizer, 64), arithmetic_prompts(tokenizer, 16), 16, SamplingParams(max_tokens=128)
    )
    leaves = [rollout for group in groups for rollout in group.rollouts]
    return {"what": "demo"} | _compare(policy.train(), leaves, repeats)


def _compare_rollouts(model: Any, num_prompts: int, num_tokens: int, between: int, repeats: int) -> Row:
    tree = partial(_rollout, model, num_prompts, num_tokens, between)
    alone = partial(_rollout, model, num_prompts, num_tokens, 0)
    tree(), alone()
    pairs = [(tree(), alone()) for _ in range(repeats)]
    seconds, seconds_alone = (statistics.median(pair[side][1] for pair in pairs) for side in (0, 1))
    decoded, decoded_alone = pairs[0][0][0], pairs[0][1][0]
    return {
        "decoded": decoded,
        "decoded_alone": decoded_alone,
        "rollout_s": round(seconds, 4),
        "rollout_alone_s": round(seconds_alone, 4),
        "rollout_speed_up": round(seconds_alone / seconds, 3),
        "rollout_ideal": round(decoded_alone / decoded, 3),
    }


def _rollout(model: Any, num_prompts: int, num_tokens: int, between: int) -> tuple[int, float]:
    """Decode eight leaves of each prompt in a slot for each; return how many tokens were decoded, and the seconds."""
    from benchmarks.make_tiny import make_tokenizer
    from lit_grpo.plugins import Answer, Listener
    from lit_grpo.policy.spec import PolicySpec
    from lit_grpo.rollout.loop import RolloutLoop
    from lit_grpo.rollout.slots.generator import SlotGenerator
    from lit_grpo.types import SamplingParams

    class Divider(Listener):
        """Divides each request after ``between`` tokens, three times."""

        forks = True

        def on_rollout_start(self, ledger: Any) -> None:
            self.ledger, self.depths = ledger, dict[Any, int]()

        def on_step(self, events: Any) -> Answer:
            forks: dict[Any, list[tuple[int, ...]]] = {}
            for key, tokens in self.ledger.progress().items():
                depth = self.depths.get(key, 0)
                if between and depth < 3 and tokens == (depth + 1) * between:
                    path = (*key[2], depth)
                    self.depths[key] = self.depths[(*key[:2], path)] = depth + 1
                    forks[key] = [path]
            return Answer(fork=forks)

    class Endless(PolicySpec):
        """A policy whose completions end at their limit alone."""

        @property
        def eos_ids(self) -> Sequence[int]:
            return (-1,)

    model.eval()
    generator = SlotGenerator(num_prompts)
    generator.start(Endless(model, make_tokenizer()))
    generator.load_weights(model.named_parameters(), 0)
    prompts = [_prompt(number) for number in range(num_prompts)]
    begin = time.perf_counter()
    groups, stats = RolloutLoop(generator, listeners=[Divider()]).collect(
        prompts, 1 if between else 8, SamplingParams(max_tokens=num_tokens), 0
    )
    seconds = time.perf_counter() - begin
    assert [len(group.rollouts) for group in groups] == [8] * num_prompts
    generator.close()
    model.train()
    return int(sum(stats.lengths)), seconds


def _update(model: Any, leaves: Sequence[Rollout], least_shared: int) -> tuple[torch.Tensor, int, float]:
    """Return the gradient of a weighted sum of log-probs, the tokens through the policy, and the seconds."""
    import torch

    from lit_grpo.update.batches.microbatch import make_micro_batches
    from lit_grpo.update.logprobs.forward import micro_batch_logprobs
    from lit_grpo.update.prefix.sharing import shared_prefixes

    model.zero_grad(set_to_none=True)
    for row, leaf in enumerate(leaves):
        leaf.advantage = 1.0 if row % 2 else -0.5
    num_tokens, begin = 0, time.perf_counter()
    with shared_prefixes(model):
        for micro_batch in make_micro_batches(leaves, 4096, least_shared=least_shared).filled(leaves):
            there = micro_batch.to(model.device)
            num_tokens += micro_batch.input_ids_BT.shape[1]
            logprobs_N, _ = micro_batch_logprobs(model, there, 1.0)
            (logprobs_N * there.advantages_N).sum().backward()
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
    return gradient, num_tokens, seconds


if __name__ == "__main__":
    assert __doc__ is not None
    sys.exit(main(parse_options(__doc__)))
