"""CPU time that the host spends on a decode step, without a model, beside an earlier commit.

All that the host does for a step is counted, in microseconds of CPU time of its thread (``host_cost_case`` says what is
left out). Parts are measured in further steps of the same rollout, less what timing takes; ``all`` is measured without
timing them. Other Python of the slots, such as putting lowered weights in place, counts in ``slots``. In bf16-mixed,
with prompts of 24 tokens, up to 1,024 tokens a completion, the default scheduling policy and lengths that are
predicted:

- *nothing ends*: all slots decode, from step 200 on.
- *completions end*: each token ends one with a chance of 1/256, and another takes its place.
- *memory is scarce*: the same, with memory for 384 tokens a slot.

Both commits are measured in turn, each in a process of its own, and the least of all repeats counts. As
``host_cost_drafts`` it is the last commit whose slots could not draft, beside slots that do not draft now, with more
repeats.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict

from benchmarks.earlier_commit import earlier_commit
from benchmarks.host_cost_case import PARTS, HostCase
from benchmarks.processes import CaseProcess
from benchmarks.report import ROOT, Claim, Options, Row, finish, note, options_parser

BEFORE = {"host_cost": "6f696627", "host_cost_drafts": "517d35e7"}
"""The earlier commit of each study."""
MODULE = "benchmarks.host_cost_case"
WORKS = {"nothing ends": (False, False), "completions end": (True, False), "memory is scarce": (True, True)}
SCHEDULING = ("loop", "events", "ledger", "plan", "predictions", "buffer")
COLUMNS = ("all", *SCHEDULING, *(part for part in PARTS if part not in SCHEDULING), "copies", "sampling", "texts")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all cases in turn, several times."""
    parser = options_parser(__doc__ or "")
    parser.add_argument("study", nargs="?", choices=BEFORE, default="host_cost")
    asked = parser.parse_args(arguments)
    options = Options(asked.quick, asked.device, asked.policy, asked.output)
    commit, has_drafts = BEFORE[asked.study], asked.study == "host_cost_drafts"
    sizes, repeats, num_steps = ((8, 64), 10, 100) if has_drafts else ((8, 64, 256, 1024), 2, 100)
    if options.quick:
        sizes, repeats, num_steps = (8, 16), 1, 8
    cases = {
        (work, rows): HostCase(rows, ends, is_scarce, num_steps)
        for rows in sizes
        for work, (ends, is_scarce) in WORKS.items()
    }
    least: dict[tuple[str, int, str], dict[str, float]] = {}
    with earlier_commit(commit) as before, ExitStack() as open_processes:
        roots = {"now": ROOT}
        if before is not None:
            shutil.copy(ROOT / "benchmarks" / "host_cost_case.py", before / "benchmarks")
            roots = {commit: before, **roots}
        processes = {
            name: open_processes.enter_context(CaseProcess(MODULE, next(iter(cases.values())), root=root))
            for name, root in roots.items()
        }
        for repeat in range(repeats):
            for (work, rows), case in cases.items():
                note(f"repeat {repeat + 1} of {repeats}: {work}, {rows} rows")
                for name, process in processes.items():
                    process.go_on(asdict(case))
                    found, best = process.answer(), least.setdefault((work, rows, name), {})
                    best |= {part: min(us, best.get(part, us)) for part, us in found.items()}
    table: list[Row] = [
        {"work": work, "rows": rows, "code": name, "queued_us": round(found["queued"], 1)}
        | {f"{part}_us": round(found.get(part, 0.0), 1) for part in COLUMNS}
        for (work, rows, name), found in least.items()
    ]
    settings: Row = {"before": commit, "steps": num_steps, "repeats": repeats, "first step": 200}
    if not has_drafts:
        claims = _claims(least, sizes, commit)
    else:
        pairs = {case: [least.get((*case, code), {}).get("all", 0.0) for code in ("now", commit)] for case in cases}
        claims = [
            Claim(f"all of a step now / at {commit}, {rows} rows, {work}", now / then, "<=", 1.01)
            for (work, rows), (now, then) in pairs.items()
            if then
        ]
    program = f"host_cost {asked.study}" if has_drafts else None
    return finish(asked.study, options, settings, table, claims, program)


def _claims(least: dict[tuple[str, int, str], dict[str, float]], sizes: tuple[int, ...], commit: str) -> list[Claim]:
    def scheduling(work: str, rows: int, name: str = "now") -> float:
        return sum(least[work, rows, name].get(part, 0.0) for part in SCHEDULING)

    some, most = sizes[1], sizes[-1]
    steady, scarce = "nothing ends", "memory is scarce"
    growth = scheduling(steady, most) / scheduling(steady, sizes[0])
    claims = [
        Claim(f"us of CPU a step, {some} rows, {steady}", least[steady, some, "now"]["all"], "<=", 800),
        Claim(f"scheduling with {most} rows over that with {sizes[0]}, {steady}", growth, "<=", 1.5),
    ]
    if (scarce, some, commit) in least:
        for rows in (some, most):
            ratio = scheduling(scarce, rows, commit) / scheduling(scarce, rows)
            claims.append(Claim(f"scheduling at {commit} over now, {rows} rows, {scarce}", ratio, ">=", 2))
        ratio = least[steady, some, commit]["all"] / least[steady, some, "now"]["all"]
        claims.append(Claim(f"all of a step at {commit} over now, {some} rows, {steady}", ratio, ">=", 1.2))
    return claims


if __name__ == "__main__":
    assert __doc__ is not None
    sys.exit(main())
