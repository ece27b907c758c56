"""Tokens a step with drafts from text that is there, by identity with the tokens that were really sampled.

Rollouts of a chat model are recorded (``recorded_rollouts``), before and after training, and replayed step by step in
as many slots, in first come order: each row drafts up to k tokens of what it, its siblings (as far as they are at that
step) and the prompt's earlier visit have come to, and gets those that equal the recorded ones, and one more. A drafted
token that is accepted is the token that would have been sampled, so this is what drafts would have saved, but for
kernels that round differently by the number of rows. Replayed without drafts a rollout takes the recorded steps.

Tokens a step are of a row: of all; in the tail, where fewer than a quarter of the slots decode; and of the last one of
each group. The earlier visit of a trained policy is that of the untrained one. ``us`` is the CPU time of ``show`` and
``follow`` a row and step, ``open_us`` that of the first ``show`` of a row, the least of three replays each. Rows with
``matched`` have the accepted tokens of a draft by its source and match. The target for the tail is for a policy of 0.5
billion parameters, given by ``--policy``; SmolLM2 is measured beside it.
"""

from __future__ import annotations

import sys
import tempfile
import time
import tracemalloc
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.recorded_rollouts import (
    ROLLOUTS,
    RecordedCompletion,
    Recording,
    is_recorded,
    read_prompts,
    read_recording,
    read_rollout,
    record,
)
from benchmarks.report import ROOT, Claim, Options, Row, finish, note, parse_options
from lit_grpo.policy.named import SMOLLM2, TINY
from lit_grpo.rollout.slots.drafts.suffix import LONGEST, TOKEN_BYTES, Proposal, SuffixDrafter
from lit_grpo.types import Key

TOKENS = (3, 7)
TAIL = 1 / 4
"""Share of the slots of which fewer decode in the tail."""
SOURCES = {
    "own text": (False, False),
    "and siblings": (True, False),
    "and earlier visit": (False, True),
    "all three": (True, True),
}
"""Whether a row drafts from its siblings, and from the prompt's earlier visit."""
QUICK: dict[str, Any] = {"per_kind": 1, "group": 4, "max_tokens": 48, "num_slots": 16}
QUICK |= {"updates": 1, "task_prompts": 2, "task_tokens": 16}
REPEATS = 3
TAIL_TOKENS, MOST_US = 1.25, 20


@dataclass
class Replay:
    """A replayed rollout.

    Attributes:
        steps: Steps of the rollout.
        tokens: Tokens that rows got, of ``all``, in the ``tail``, and of the ``last`` of a group.
        row_steps: Steps of rows, likewise.
        drafted: Drafted tokens by source.
        accepted: Those that were sampled, by source.
        by_match: Drafts and their accepted tokens, by source and by the number of tokens that matched.
        ended: The step at which each completion ended, in the order of the recording.
        seconds: CPU seconds of ``show`` and ``follow``.
        open_s: CPU seconds of the first ``show`` of rows.
    """

    steps: int = 0
    tokens: Counter[str] = field(default_factory=Counter)
    row_steps: Counter[str] = field(default_factory=Counter)
    drafted: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)
    by_match: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)
    ended: dict[tuple[str, int], int] = field(default_factory=dict)
    seconds: float = 0.0
    open_s: float = 0.0

    def per_step(self, where: str) -> float:
        """Tokens of a row and step."""
        return self.tokens[where] / self.row_steps[where] if self.row_steps[where] else float("nan")

    def draft(self, proposal: Proposal, sampled: Sequence[int]) -> int:
        """Count a draft, of which the tokens up to the first that was not ``sampled`` are accepted; return these."""
        accepted = 0
        for token, right in zip(proposal.token_ids, sampled, strict=False):
            if token != right:
                break
            accepted += 1
        if proposal.token_ids:
            self.drafted[proposal.source] += len(proposal.token_ids)
            self.accepted[proposal.source] += accepted
            drafts, tokens = self.by_match.get((proposal.source, proposal.matched), (0, 0))
            self.by_match[proposal.source, proposal.matched] = (drafts + 1, tokens + accepted)
        return accepted


def replay(
    prompts: dict[str, list[int]],
    rollout: Sequence[RecordedCompletion],
    num_slots: int,
    most: int = 0,
    siblings: bool = True,
    earlier: Sequence[RecordedCompletion] = (),
) -> Replay:
    """Replay a rollout with up to ``most`` drafted tokens a row and step; 0 is without drafts."""
    replayed, source, clock = Replay(), SuffixDrafter(most), time.thread_time
    keys: list[Key] = []
    for each in rollout:
        group = each.prompt if siblings else f"{each.prompt}, {each.sample}"
        keys.append((group, 1, (each.sample,)))
    for group in dict.fromkeys(key[0] for key in keys):
        of_prompt = [each for each in earlier if group == each.prompt or group.startswith(f"{each.prompt}, ")]
        for each in of_prompt:
            source.show((group, 0, (each.sample,)), prompts[each.prompt], each.token_ids)
            source.close((group, 0, (each.sample,)), ended=True)
        source.release([(group, 0)])
        if of_prompt and not siblings:  # one row would read the earlier visit as slowly as all together should
            for _ in range(sum(len(each.token_ids) for each in of_prompt)):
                source.show((group, 1, (-1,)), prompts[of_prompt[0].prompt], ())
            source.close((group, 1, (-1,)), ended=False)
    waiting, rows = deque(range(len(rollout))), dict[int, int]()
    left = Counter(each.prompt for each in rollout)
    while waiting or rows:
        began = clock()
        while waiting and len(rows) < num_slots:
            row = waiting.popleft()
            rows[row] = 0
            source.show(keys[row], prompts[rollout[row].prompt], ())
        replayed.open_s += clock() - began
        replayed.steps += 1
        proposals = {row: source.follow(keys[row], most) for row in rows}
        replayed.seconds += clock() - began
        gained: dict[int, int] = {}
        for row, num_tokens in rows.items():
            each = rollout[row]
            accepted = replayed.draft(proposals[row], each.token_ids[num_tokens:])
            gained[row] = min(accepted + 1, len(each.token_ids) - num_tokens)
            where = ["all"]
            where += ["tail"] if len(rows) < TAIL * num_slots else []
            where += ["last"] if left[each.prompt] == 1 else []
            for name in where:
                replayed.tokens[name] += gained[row]
                replayed.row_steps[name] += 1
        texts = {row: rollout[row].token_ids[: rows[row] + number] for row, number in gained.items()}
        began = clock()
        for row, tokens in texts.items():
            source.show(keys[row], prompts[rollout[row].prompt], tokens)
        replayed.seconds += clock() - began
        for row, number in gained.items():
            rows[row] += number
            if rows[row] == len(rollout[row].token_ids):
                del rows[row]
                source.close(keys[row], ended=True)
                left[rollout[row].prompt] -= 1
                replayed.ended[rollout[row].prompt, rollout[row].sample] = replayed.steps
    return replayed


def index_bytes(prompts: dict[str, list[int]], rollout: Sequence[RecordedCompletion]) -> float:
    """Return the bytes of memory that the index takes for a token of the groups in flight."""
    source, num_tokens = SuffixDrafter(1), sum(len(each.token_ids) for each in rollout)
    num_tokens += sum(len(prompts[prompt]) for prompt in {each.prompt for each in rollout})
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for each in rollout:
        source.show((each.prompt, 0, (each.sample,)), prompts[each.prompt], each.token_ids)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return (after - before) / num_tokens


def main(options: Options) -> int:
    """Record a policy if that has not been done, replay all recordings, and judge."""
    torch.set_num_threads(1)
    settings: Row = {"longest match": LONGEST, "temperature": 1.0, "decoding": "bf16-mixed", "threads": 1}
    settings["kept bytes a token"] = TOKEN_BYTES
    table: list[Row] = []
    claims: list[Claim] = []
    with _folder(options) as folder:
        policy = options.policy or (TINY if options.quick else SMOLLM2)
        recording = Recording(policy, **(QUICK if options.quick else {}))
        record(recording, folder / Path(policy).name)
        for place in sorted(place for place in folder.iterdir() if is_recorded(place)):
            rows = _rows(place)
            table += rows
            claims += _claims(place.name, rows, is_judged=options.quick or place.name != SMOLLM2)
            settings[place.name] = _setting(place)
            note(f"{place.name}: {settings[place.name]}")
    return finish("drafts_gate", options, settings, table, claims)


@contextmanager
def _folder(options: Options) -> Iterator[Path]:
    """The folder of recordings, which a quick form does not keep."""
    if options.quick:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)
    else:
        yield ROOT / "runs" / "drafts_gate"


def _rows(folder: Path) -> list[Row]:
    prompts, recording, name = read_prompts(folder), read_recording(folder), folder.name
    first, second, trained = (read_rollout(folder, each) for each in ROLLOUTS)
    rows, matches = list[Row](), list[Row]()
    for when, rollout in (("before", second), ("after", trained)):
        without = replay(prompts, rollout, recording.num_slots)
        recorded = {(each.prompt, each.sample): each.ended for each in rollout}
        assert without.ended == recorded, "a replay without drafts does not take the recorded steps"
        for most in TOKENS:
            for sources, (siblings, visit) in SOURCES.items():
                of = prompts, rollout, recording.num_slots, most, siblings, first if visit else ()
                replayed, *again = (replay(*of) for _ in range(REPEATS if siblings else 1))
                num_drafted, num_accepted = sum(replayed.drafted.values()), sum(replayed.accepted.values())
                row: Row = {"policy": name, "training": when, "k": most, "from": sources}
                row |= {where: round(replayed.per_step(where), 3) for where in ("all", "tail", "last")}
                row |= {
                    "tail_row_steps": replayed.row_steps["tail"],
                    "steps": replayed.steps,
                    "of": without.steps,
                    "drafted": round(num_drafted / replayed.row_steps["all"], 3),
                    "accepted": round(num_accepted / max(num_drafted, 1), 3),
                }
                row |= {
                    f"of_{source}": round(replayed.accepted[source] / number, 3)
                    for source, number in sorted(replayed.drafted.items())
                }
                if siblings:  # else each row has an index of its own
                    seconds = min(each.seconds for each in (replayed, *again))
                    row["us"] = round(seconds / replayed.row_steps["all"] * 1e6, 2)
                    row["open_us"] = round(min(each.open_s for each in (replayed, *again)) / len(rollout) * 1e6, 2)
                rows.append(row)
                if (most, siblings, visit) == (TOKENS[-1], True, True):
                    matches += [
                        {"policy": name, "training": when, "k": most, "from": source, "matched": matched}
                        | {"drafts": drafts, "tokens_a_draft": round(tokens / drafts, 3)}
                        for (source, matched), (drafts, tokens) in sorted(replayed.by_match.items())
                    ]
    return rows + matches


def _setting(folder: Path) -> str:
    """What was recorded, as text."""
    recording = read_recording(folder)
    rollouts = [read_rollout(folder, each) for each in ROLLOUTS]
    means = [sum(len(each.token_ids) for each in rollout) / len(rollout) for rollout in rollouts]
    at_limit = [sum(len(each.token_ids) == recording.max_tokens for each in rollout) for rollout in rollouts]
    return (
        f"{len(read_prompts(folder))} prompts, {recording.group} completions of at most {recording.max_tokens} tokens, "
        f"{recording.num_slots} slots; {recording.updates} updates of {recording.task_prompts} x "
        f"{recording.task_prompts} completions of at most {recording.task_tokens} tokens; mean tokens of the three "
        f"rollouts {', '.join(f'{mean:.1f}' for mean in means)}, completions at the limit "
        f"{', '.join(map(str, at_limit))}; index {index_bytes(read_prompts(folder), rollouts[1]):.0f} bytes a token"
    )


def _claims(name: str, rows: Sequence[Row], is_judged: bool) -> list[Claim]:
    def of(training: str, most: int, sources: str, column: str) -> float:
        (row,) = (r for r in rows if column in r and (r["training"], r["k"], r["from"]) == (training, most, sources))
        return float(row[column])

    text = f"{name}: tokens a step in the tail after training, k = 7, from all three"
    tail = Claim(text, of("after", 7, "all three", "tail"), ">=", TAIL_TOKENS)
    cost = max(float(row["us"]) for row in rows if row["from"] == "all three")
    return [
        *([tail] if is_judged else []),
        Claim(f"{name}: us of CPU a row and step, from all three, the most", cost, "<=", MOST_US),
    ]


if __name__ == "__main__":
    assert __doc__ is not None
    sys.exit(main(parse_options(__doc__)))
