"""Greedy and sampled exact match of the policies that a run has kept, on held-out rows of its task.

Both systems' policies are scored by this, so that neither is judged by its own evaluation.
"""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path

import torch
import yaml
from transformers import AutoModelForCausalLM

from benchmarks.learning_callbacks import POLICIES
from benchmarks.report import ROOT
from benchmarks.rollouts import roll_out, slots
from lit_grpo.data import ArithmeticRows, KnightsRows
from lit_grpo.policy.loading import EMBEDDED, load_tokenizer
from lit_grpo.rewards import ExactMatch
from lit_grpo.types import Prompt, SamplingParams

SOURCES = {source.__name__: source for source in (ArithmeticRows, KnightsRows)}
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
        """What Python is to run in ``folder``."""
        return ["-m", "benchmarks.policy_scores", json.dumps(asdict(self))]


def main(scoring: Scoring) -> None:
    """Write a file of ``{run: {update: {greedy, sampled}}}``."""
    settings = yaml.safe_load((ROOT / "configs" / f"{scoring.config}.yaml").read_text())
    model, source = settings["model"], settings["data"]["validation"]
    tokenizer = load_tokenizer(str(EMBEDDED[model["policy"]]))
    rows = list(SOURCES[source["class_path"]](scoring.held_out, source["init_args"]["split"]).rows())
    prompts = [Prompt(str(n), tuple(tokenizer.encode(row["prompt"])), row["prompt"], row) for n, row in enumerate(rows)]
    (reward,) = model["rewards"]
    exact_match = ExactMatch(**reward["args"])
    known: dict[str, dict[str, float]] = {}  # runs begin with one and the same policy

    def score(folder: Path) -> dict[str, float]:
        policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        which = sha256(b"".join(weight.numpy().tobytes() for weight in policy.state_dict().values())).hexdigest()
        if which not in known:
            generator = slots(policy, tokenizer, num_slots=128)
            known[which] = {}
            for name, temperature in TEMPERATURES.items():
                sampling = SamplingParams(temperature=temperature, max_tokens=model["sampling"]["max_tokens"])
                groups, _ = roll_out(generator, prompts, 1, sampling)
                rewards = [exact_match(group.rollouts[0].completion.text, **group.prompt.columns) for group in groups]
                known[which][name] = statistics.fmean(float(value or 0) for value in rewards)
        return known[which]

    scores = {
        run: {int(folder.name): score(folder) for folder in sorted((Path("..") / run / POLICIES).iterdir())}
        for run in scoring.of
    }
    Path(SCORES).write_text(json.dumps(scores))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Scoring(**json.loads(sys.argv[1])))
