"""Exact match of the policies that runs have kept, on held-out rows of their task.

It is greedy of all of them, and sampled too of each run's first and last. All systems' policies are scored by this, so
that none is judged by its own evaluation.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path

import torch

from benchmarks.learning_callbacks import POLICIES
from benchmarks.rollouts import roll_out, slots
from benchmarks.shipped_tasks import ShippedTask
from lit_grpo.policy.architecture.vision import give_vision
from lit_grpo.policy.loading import load_policy, load_tokenizer, load_vision
from lit_grpo.types import SamplingParams

SCORES = "scores.json"
TEMPERATURES = {"greedy": 0.0, "sampled": 1.0}


@dataclass(frozen=True)
class Scoring:
    """Scores what the runs in the folders ``of``, beside this one, have kept, on so many ``held_out`` rows."""

    name: str
    of: tuple[str, ...]
    config: str
    held_out: int
    alone: bool = False

    def words(self, folder: Path) -> list[str]:
        """The arguments of the Python process in ``folder``."""
        return ["-m", "benchmarks.policy_scores", json.dumps(asdict(self))]


def main(scoring: Scoring) -> None:
    """Write a file of ``{run: {update: {greedy, sampled}}}``, the latter of the first and last update alone."""
    task = ShippedTask(scoring.config)
    tokenizer = load_tokenizer(task.policy)
    prompts = task.prompts(tokenizer, task.rows("validation", scoring.held_out))
    max_tokens, exact_match = task.model["sampling"]["max_tokens"], task.reward
    sees = prompts[0].pictures is not None
    known: dict[tuple[str, str], float] = {}  # runs begin with one and the same policy

    def score(folder: Path, kinds: Iterable[str]) -> dict[str, float]:
        policy = load_policy(str(folder), vision=sees)
        if sees:
            give_vision(policy, load_vision(task.policy, tokenizer))
        which = sha256(b"".join(weight.numpy().tobytes() for weight in policy.state_dict().values())).hexdigest()
        generator = slots(policy, tokenizer, num_slots=128)
        for kind in kinds:
            if (which, kind) not in known:
                sampling = SamplingParams(temperature=TEMPERATURES[kind], max_tokens=max_tokens)
                groups, _ = roll_out(generator, prompts, 1, sampling)
                rewards = [exact_match(group.rollouts[0].completion.text, **group.prompt.columns) for group in groups]
                known[which, kind] = statistics.fmean(float(value or 0) for value in rewards)
        return {kind: known[which, kind] for kind in kinds}

    scores: dict[str, dict[int, dict[str, float]]] = {}
    for run in scoring.of:
        first, *between, last = sorted((Path("..") / run / POLICIES).iterdir())
        scores[run] = {int(folder.name): score(folder, TEMPERATURES) for folder in (first, last)}
        scores[run] |= {int(folder.name): score(folder, ("greedy",)) for folder in between}
    Path(SCORES).write_text(json.dumps(scores))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Scoring(**json.loads(sys.argv[1])))
