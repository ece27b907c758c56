"""What a tree of rollouts saves, against the share of tokens that its leaves have in common.

Each prompt has a tree of depth three: eight leaves, all equally long, that divide in two at three places. The update
takes the same leaves once with every common prefix computed once and once completion by completion (the prompt is
shared on both sides), interleaved; the best that sharing can do is the quotient of the tokens.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.random_policies import TO_UPDATE, random_qwen3
from benchmarks.report import Claim, Options, Row, finish, note, parse_options

if TYPE_CHECKING:
    import torch

    from lit_grpo.types import Rollout

VOCAB_SIZE, PROMPT_TOKENS, NEVER = 1000, 64, 10**9
SAVED = (0.0, 0.25, 0.5, 0.7)  # of the leaves' tokens


def main(options: Options) -> int:
    """Measure update by update at each share of common tokens."""
    from dataclasses import replace

    num_prompts, num_tokens, repeats, sizes = (2, 60, 2, "smallest") if options.quick else (2, 288, 5, "7M")
    model = random_qwen3(replace(TO_UPDATE[sizes], vocab_size=VOCAB_SIZE), options.device).train()
    rows: list[Row] = []
    claims: list[Claim] = []
    for share in SAVED:
        leaves = [leaf for number in range(num_prompts) for leaf in _leaves(number, num_tokens, share)]
        row = _compare(model, leaves, repeats)
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
    settings: Row = {
        "policy": f"random Qwen3, {sizes}",
        "prompts": num_prompts,
        "prompt_tokens": PROMPT_TOKENS,
        "leaves": 8,
        "leaf_tokens": num_tokens,
    }
    return finish("trees", options, settings, rows, claims)


def _leaves(number: int, num_tokens: int, share: float) -> list[Rollout]:
    """Return the leaves of a prompt's tree, of which ``share`` of all tokens is saved when prefixes are shared."""
    from lit_grpo.types import Completion, Prompt, Request, Rollout, SamplingParams

    rng = random.Random(number)
    token = partial(rng.randrange, 2, VOCAB_SIZE)
    prompt = Prompt(str(number), tuple(token() for _ in range(PROMPT_TOKENS)), "")
    paths: list[list[int]] = [[]]
    between = round(share * 8 * num_tokens / 17)  # 8 T leaf tokens, of which 1 + 2 + 4 for 24 stretches are left
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


def _update(model: Any, leaves: Sequence[Rollout], least_shared: int) -> tuple[torch.Tensor, int, float]:
    """Return the gradient of a weighted sum of log-probs, the tokens through the policy, and the seconds."""
    import torch

    from lit_grpo.update.batches.microbatch import make_micro_batches
    from lit_grpo.update.logprobs.forward import micro_batch_logprobs
    from lit_grpo.update.prefix.sharing import shared_prefixes

    model.zero_grad(set_to_none=True)
    weights = [1.0 if row % 2 else -0.5 for row in range(len(leaves))]
    num_tokens, begin = 0, time.perf_counter()
    with shared_prefixes(model):
        for micro_batch in make_micro_batches(leaves, weights, 4096, least_shared=least_shared):
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
