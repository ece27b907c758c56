"""Timed steps of a generator, from which the price of drafts comes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from lit_grpo.policy.architecture.decoder import RUN_FAILURES, raise_device_failure
from lit_grpo.process.terminal import error_text
from lit_grpo.ranks import Ranks
from lit_grpo.rollout.slots.drafts.price import StepCost
from lit_grpo.rollout.slots.drafts.suffix import Proposal, SuffixDrafter
from lit_grpo.types import Key, Prompt, Request, SamplingParams

if TYPE_CHECKING:
    from lit_grpo.rollout.generator import Decoder
    from lit_grpo.rollout.slots.rows import TokenRows

_TRIAL_ROWS, _TRIAL_STEPS, _TRIAL_S = 64, (3, 5), 0.5
"""Steps that are timed: their most rows, how many go by before and how many are timed of a size, and seconds."""


class TrialDrafter(SuffixDrafter):
    """Drafts nothing good, for steps that are timed."""

    def propose(self, rows: TokenRows, most_B: np.ndarray) -> list[Proposal]:
        """Return as many tokens as each row may try."""
        return [Proposal([0] * most) for most in most_B.tolist()]


def measure_cost(generator: Decoder, trial: TrialDrafter, context: int) -> StepCost | None:
    """Time some steps of a started generator in which nothing is in flight, with prompts of its own.

    Sizes are measured one after another, until the timed steps have taken half a second. What is compiled and recorded
    for them, real steps need too.

    Args:
        generator: Decodes; drafts by ``trial``.
        trial: Is told how many tokens to draft.
        context: The most tokens of a sequence.

    Returns:
        The cost. None, after a warning, if a step cannot be measured.

    Raises:
        torch.AcceleratorError, torch.OutOfMemoryError: The device failed, or its memory ran out.
    """
    rows, short, long = min(generator.capacity().slots, _TRIAL_ROWS), 64, min(1024, context // 2)
    cases = [(rows, 0, short), (1, 0, short), (rows, 0, long), (1, 7, short), (rows, 3, short)]
    cases.append((rows // 4 or 1, 7, long))
    columns, seconds, timed_s = list[np.ndarray](), list[float](), 0.0
    keys: list[Key] = []
    try:
        for case, (num_rows, trial.most_tokens, length) in enumerate(cases):
            if timed_s > _TRIAL_S and len(columns) > 3:
                break
            prompt = Prompt("price of a step", (0,) * length, "", visit=case)
            sampling = SamplingParams(max_tokens=sum(_TRIAL_STEPS) * (1 + trial.most_tokens))
            requests = [Request(prompt, (row,), sampling) for row in range(num_rows)]
            keys = [request.key for request in requests]
            generator.submit(requests)
            took, counts = list[float](), list[list[int]]()
            for number in range(sum(_TRIAL_STEPS)):
                began = time.perf_counter()
                events = generator.step()
                took.append(time.perf_counter() - began)
                if events.preempted:
                    raise ValueError(events.message)
                queries, drafts = events.num_active + events.num_drafted, int(events.num_drafted > 0)
                counts.append([1, queries, queries * (length + number), drafts, drafts * events.num_active])
            generator.release([prompt])
            generator.abort(keys)
            seconds.append(float(np.median(took[_TRIAL_STEPS[0] :])))
            columns.append(np.median(counts[_TRIAL_STEPS[0] :], axis=0))
            timed_s += sum(took[_TRIAL_STEPS[0] :])
    except RUN_FAILURES as error:
        raise_device_failure(error)
        generator.abort(keys)
        Ranks().warn(f"The price of a decode step cannot be measured ({error_text(error)}), so no drafts are tried.")
        return None
    return StepCost.fit(np.array(columns), np.array(seconds))
