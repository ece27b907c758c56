"""Predicted lengths of completions after 0, 8, 32 and 64 tokens.

Two traces: the demo's policy on its own prompts on two visits, its weights drifting in between; and the same on the
exercises with the longest workings of many, whose lengths differ most within a prompt. To both belong prompts of the
other split, which the predictor was never told about, with what it had learned by then. Each prediction is made before
the length is known, and learned from only when its rollout has ended. Those of the first visit are not counted, so that
there is a history. Beside it stands the predictor without a history, and without features. The correlation "within" is
of the logs of lengths less the mean of their group.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.report import Claim, Options, Row, finish, note, parse_options
from benchmarks.workloads import HardRows, arithmetic_prompts, load
from lit_grpo.budgets.history import PromptHistory
from lit_grpo.data.sources import RowSource
from lit_grpo.policy.architecture.decoder import hidden_states, token_logits
from lit_grpo.scheduling.jobs import Job
from lit_grpo.scheduling.lengths import LengthPredictor, spearman, within_correlation
from lit_grpo.tasks import ArithmeticRows
from lit_grpo.types import Prompt

POINTS = (0, 8, 32, 64)
DRIFT = 0.02
NUM_SCALARS = 2  # at the end of the features: the mean log-prob so far and the entropy of the next token
HARDEST_OF = 4  # exercises for each one of the hard ones
Said = dict[int, list[tuple[np.ndarray, np.ndarray, np.ndarray]]]
"""By point, predicted and actual totals of each rollout, and the groups."""


@dataclass(frozen=True)
class Record:
    """One rollout: ``lengths``, shape (jobs,), and by point the features, shape (jobs, D), of all that reach it.

    Rows of jobs that have ended by then hold anything.
    """

    jobs: list[Job]
    lengths: np.ndarray
    features: dict[int, np.ndarray]


def sampled(
    policy: Any, prompts: Sequence[Prompt], visit: int, group_size: int, max_tokens: int, points: Sequence[int]
) -> Record:
    """Sample completions of prompts of equal length; the features come from one forward of their tokens."""
    prompt_tokens = len(prompts[0].token_ids)
    rows_BT = torch.tensor([prompt.token_ids for prompt in prompts for _ in range(group_size)])
    end = policy.generation_config.eos_token_id
    with torch.inference_mode():
        tokens_BT = policy.generate(
            input_ids=rows_BT, max_new_tokens=max_tokens, do_sample=True, temperature=1.0, top_k=0, pad_token_id=0
        )
        ended_BT = tokens_BT[:, prompt_tokens:] == end
        lengths = torch.where(ended_BT.any(1), ended_BT.int().argmax(1) + 1, ended_BT.shape[1]).numpy()
        needed = prompt_tokens + min(max(points), tokens_BT.shape[1] - prompt_tokens)
        features = _features(policy, tokens_BT[:, :needed], prompt_tokens, points)
    jobs = [
        Job((p.prompt_id, visit, (sample,)), prompt_tokens, max_tokens) for p in prompts for sample in range(group_size)
    ]
    return Record(jobs, lengths, features)


def _features(policy: Any, tokens_BT: torch.Tensor, prompt_tokens: int, points: Sequence[int]) -> dict[int, np.ndarray]:
    """Return the last hidden state after ``point`` tokens, the mean log-prob of these, and the entropy of the next."""
    hidden_BTH = hidden_states(policy, tokens_BT)
    logprobs_BTV = torch.log_softmax(token_logits(policy, hidden_BTH), -1)
    taken_BT = logprobs_BTV[:, prompt_tokens - 1 : -1].gather(-1, tokens_BT[:, prompt_tokens:, None])[..., 0]
    features = {}
    for point in points:
        last = prompt_tokens + point - 1
        if last < tokens_BT.shape[1]:
            entropy_B = -(logprobs_BTV[:, last].exp() * logprobs_BTV[:, last]).sum(-1)
            mean_B = taken_BT[:, :point].sum(1) / max(point, 1)
            features[point] = torch.cat([hidden_BTH[:, last], mean_B[:, None], entropy_B[:, None]], 1).numpy()
    return features


def drift(policy: Any, size: float, seed: int) -> None:
    """Move every weight matrix at random, by ``size`` times the spread of its entries, as training would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.ndim > 1:
                parameter += size * parameter.std() * torch.randn(parameter.shape, generator=generator)


def main(options: Options) -> int:
    """Replay the traces and report rank correlation and errors by point."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    num_prompts, per_rollout, group_size, visits = (8, 4, 4, 2) if options.quick else (96, 16, 16, 2)
    max_tokens = 96 if options.quick else 160
    hard = HardRows(num_prompts, HARDEST_OF * num_prompts)
    others = HardRows(4 * per_rollout, HARDEST_OF * 4 * per_rollout, "validation")
    sizes = per_rollout, group_size, visits, max_tokens
    demo = _sampled(options, ArithmeticRows(num_prompts), ArithmeticRows(4 * per_rollout, "validation"), *sizes)
    traces = {
        "demo": demo,
        "hard": _sampled(options, hard, others, *sizes),
    }
    first_visit = num_prompts // per_rollout
    rows: list[Row] = []
    found: dict[tuple[str, str, int], Row] = {}
    for trace, (records, held_out) in traces.items():
        for name, said in _systems(records, held_out).items():
            of_trace = {point: told[first_visit : len(records)] for point, told in said.items()}
            of_unseen = {point: told[len(records) :] for point, told in said.items()}
            rows += _rows(trace, name, of_trace, found) + _rows(f"{trace}, held out", name, of_unseen, found)
    settings: Row = {
        "prompts": num_prompts,
        "group_size": group_size,
        "visits": visits,
        "completions_a_rollout": per_rollout * group_size,
        "max_tokens": max_tokens,
        "drift": DRIFT,
        "mean_tokens": float(np.concatenate([record.lengths for record in demo[0]]).mean()),
    }
    return finish("length_prediction", options, settings, rows, _claims(found))


def _sampled(
    options: Options,
    rows: RowSource,
    others: RowSource,
    per_rollout: int,
    group_size: int,
    visits: int,
    max_tokens: int,
) -> tuple[list[Record], list[Record]]:
    """Sample prompts, in an order by chance, over all visits, and then others, each in one rollout."""
    policy, tokenizer = load(options.policy or "tiny", options.device)
    prompts = arithmetic_prompts(tokenizer, 0, rows)
    prompts = [prompts[row] for row in np.random.default_rng(0).permutation(len(prompts))]
    records = []
    for visit in range(visits):
        if visit:
            drift(policy, DRIFT, visit)
        for first in range(0, len(prompts), per_rollout):
            part = prompts[first : first + per_rollout]
            records.append(sampled(policy, part, visit, group_size, max_tokens, POINTS))
        note(f"visit {visit}: {sum(int(record.lengths.sum()) for record in records)} tokens sampled so far")
    texts = [str(row["prompt"]) for row in others.rows()]
    unseen = [Prompt(f"validation/{n}", tuple(tokenizer.encode(text)), text) for n, text in enumerate(texts)]
    return records, [sampled(policy, unseen, 0, group_size, max_tokens, POINTS)]


def _systems(records: Sequence[Record], held_out: Sequence[Record]) -> dict[str, Said]:
    """Return what each predictor said of all records; nothing is learned from those held out."""
    forgetful = LengthPredictor(POINTS, NUM_SCALARS)
    forgetful.share(PromptHistory())  # of which nobody commits what is noted
    return {
        "predictor": _replay(LengthPredictor(POINTS, NUM_SCALARS), records, held_out),
        "without history": _replay(forgetful, records, held_out),
        "without features": _replay(LengthPredictor(POINTS), records, held_out, features=False),
    }


def _replay(
    predictor: LengthPredictor, records: Sequence[Record], held_out: Sequence[Record], features: bool = True
) -> Said:
    """Show records to a predictor, all completions token by token side by side."""
    said: Said = {point: [] for point in POINTS}
    for number, record in enumerate([*records, *held_out]):
        predictor.begin(record.jobs)
        alive = np.arange(len(record.jobs))
        for point in POINTS:
            for row in alive[record.lengths[alive] <= point].tolist():
                predictor.finish(record.jobs[row], int(record.lengths[row]))
            alive = alive[record.lengths[alive] > point]
            jobs = [record.jobs[row] for row in alive]
            predictor.progress({job.key: point for job in jobs})
            if features and jobs:
                predictor.observe([job.key for job in jobs], point, record.features[point][alive])
            said[point].append((predictor.estimate(jobs), record.lengths[alive], _groups(record)[alive]))
        if number < len(records):
            for row in alive.tolist():
                predictor.finish(record.jobs[row], int(record.lengths[row]))
            predictor.end(commit=True)
    return said


def _groups(record: Record) -> np.ndarray:
    """Number the groups of a record, shape (jobs,)."""
    return np.unique([job.key[0] for job in record.jobs], return_inverse=True)[1]


def _rows(trace: str, system: str, said: Said, found: dict[tuple[str, str, int], Row]) -> list[Row]:
    """Return a row for each point, and note it."""
    rows: list[Row] = []
    for point, told in said.items():
        if sum(len(actual) for _, actual, _ in told):
            predicted, actual = (np.concatenate([part[column] for part in told]) for column in (0, 1))
            groups = np.concatenate([1_000_000 * number + part[2] for number, part in enumerate(told)])
            row: Row = {"trace": trace, "system": system, "tokens_seen": point, "completions": len(actual)}
            row["spearman"] = spearman(predicted, actual)
            row["within"] = within_correlation(predicted, actual, groups)
            row["log_error"] = float(np.abs(np.log(predicted / actual)).mean())
            row["mae_tokens"] = float(np.abs(predicted - actual).mean())
            found[trace, system, point] = row
            rows.append(row)
    return rows


def _claims(found: dict[tuple[str, str, int], Row]) -> list[Claim]:
    def figure(trace: str, point: int, system: str = "predictor", column: str = "spearman") -> float:
        return float(found[trace, system, point][column]) if (trace, system, point) in found else 0.0

    def gain(trace: str, system: str, point: int) -> float:
        return figure(trace, point) - figure(trace, point, system)

    before, within = "rank correlation before decoding", "rank correlation within groups after 32 tokens"
    return [
        Claim(f"{before}, demo", figure("demo", 0), ">=", 0.7),
        Claim(f"{before}, demo, less that without history", gain("demo", "without history", 0), ">=", 0.0),
        Claim(f"{before}, prompts never seen", figure("demo, held out", 0), ">=", 0.3),
        Claim("rank correlation after 8 tokens, prompts never seen", figure("demo, held out", 8), ">=", 0.3),
        Claim("after 32 tokens, demo, less that without features", gain("demo", "without features", 32), ">=", 0.0),
        Claim(f"{within}, prompts never seen", figure("demo, held out", 32, column="within"), ">=", 0.4),
        Claim(f"{within}, hard prompts never seen", figure("hard, held out", 32, column="within"), ">=", 0.4),
    ]


if __name__ == "__main__":
    assert __doc__ is not None
    sys.exit(main(parse_options(__doc__)))
