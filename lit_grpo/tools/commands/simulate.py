"""Simulate scheduling policies on a trace, and print a table of the results."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import util
from pathlib import Path
from typing import Literal, NoReturn

import numpy as np

from lit_grpo.methods.plans import find_plan, shipped_plans
from lit_grpo.process.inputs import check_replaceable
from lit_grpo.rollout.slots.drafts.price import PricedDrafter, StepCost
from lit_grpo.rollout.slots.drafts.suffix import SuffixDrafter
from lit_grpo.scheduling.jobs import FittedLengths
from lit_grpo.scheduling.plans.plan import memory_bound, slot_bound
from lit_grpo.tools.simulation.drafts import DEVICES, DraftingReplay
from lit_grpo.tools.simulation.known import KnownLengths, lengths_of
from lit_grpo.tools.simulation.simulator import Engine, Schedule, simulate
from lit_grpo.tools.simulation.traces import FAMILIES, Trace, load_trace


@dataclass(frozen=True)
class PlanResult:
    """Result of a scheduling policy on the batches of a trace, one after the other."""

    plan: str
    bound: int
    schedules: list[Schedule]
    drafted: list[Schedule] = field(default_factory=list)  # with drafts

    @property
    def steps(self) -> int:
        return sum(schedule.steps for schedule in self.schedules)

    @property
    def bubble_ratio(self) -> float:
        """Share of the slots' steps in which they decode nothing."""
        return sum(schedule.bubble_ratio * schedule.steps for schedule in self.schedules) / self.steps

    @property
    def mean_completion(self) -> float:
        """Steps until a completion is done, from the start of its batch, on average."""
        return float(np.concatenate([schedule.ends for schedule in self.schedules]).mean())


def print_table(source: str, engine: Engine, outcomes: list[PlanResult], cost: StepCost | None) -> None:
    """Print a row for each plan; without a cost of a decode step, it has no times."""
    from rich.console import Console
    from rich.table import Table

    tokens = sum(int(span.end - span.start) for schedule in outcomes[0].schedules for _, span in schedule.spans)
    limit = "" if engine.kv_tokens is None else f", {engine.kv_tokens:,} KV tokens"
    completions = sum(len(schedule.ends) for schedule in outcomes[0].schedules)
    columns = ["plan", "steps", "over bound", "bubble ratio", "mean completion", "peak KV tokens"]
    columns += ["set aside"] if engine.kv_tokens is not None else []
    columns += ["time in s"] if cost is not None else []
    if outcomes[0].drafted:
        columns += ["steps with drafts", "tokens per row and step"]
        columns += ["time with drafts in s"] if cost is not None else []
    console = Console(width=None if Console().is_terminal else 120, markup=False, emoji=False)
    console.print(
        f"{source}: {completions:,} completions, {tokens:,} tokens, {engine.num_slots} slots"
        f"{limit}, lower bound {outcomes[0].bound:,} steps",
        highlight=False,
    )
    table = Table()
    table.add_column(columns[0], no_wrap=True)
    for column in columns[1:]:
        table.add_column(column, justify="right")
    for outcome in outcomes:
        table.add_row(*_cells(outcome, engine, cost))
    console.print(table, highlight=False)


def _cells(outcome: PlanResult, engine: Engine, cost: StepCost | None) -> list[str]:
    schedules = outcome.schedules
    cells = [
        outcome.plan,
        f"{outcome.steps:,}",
        f"{outcome.steps / outcome.bound:.3f}",
        f"{outcome.bubble_ratio:.3f}",
        f"{outcome.mean_completion:,.1f}",
        f"{max(schedule.peak_kv_tokens for schedule in schedules):,}",
    ]
    if engine.kv_tokens is not None:
        cells.append(str(sum(schedule.set_asides for schedule in schedules)))
    if cost is not None:
        cells.append(f"{sum(schedule.seconds(cost) for schedule in schedules):.3f}")
    if drafted := outcome.drafted:
        rows = sum(int((each.work[:, 0] - each.work[:, 2]).sum()) for each in drafted)
        plain = sum(int(each.work[:, 0].sum()) for each in schedules)  # as many as tokens
        cells += [f"{sum(each.steps for each in drafted):,}", f"{plain / rows:.3f}"]
        if cost is not None:
            cells.append(f"{sum(each.seconds(cost) for each in drafted):.3f}")
    return cells


Noise = float | Literal["none", "recorded"]
DEFAULT_TRACE = "lognormal_heavy"
MOST_NOISE = 20  # factors of 10^8 and more
MOST_DRAFTS = 32
MAX_POINTS = 2000  # of a curve in the picture


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Print the mistake, without the usage before it, and exit with code 2."""
        hint = "; --help lists all there are." if message.startswith("unrecognized arguments") else ""
        self.exit(2, f"error: {message}{hint}\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table for each trace, and write the picture; a mistake ends with one sentence and exit code 2."""
    parser = _make_parser()
    options = parser.parse_args(arguments)
    if options.output is not None and util.find_spec("matplotlib") is None:
        parser.error(
            f"--output is {options.output}, but matplotlib, which draws, is not installed; install the extra "
            "lit_grpo[plots], or leave it out."
        )
    try:
        if options.output is not None:
            check_replaceable(options.output)
        if options.step_cost is not None and options.device is not None:
            raise ValueError("--step_cost and --device both say what a step costs: give one of them.")
        if options.drafts == "auto" and options.step_cost is None and options.device is None:
            raise ValueError("--drafts auto chooses by the price of a step: give --device or --step_cost with it.")
        engine = Engine(options.slots, options.kv_tokens)
        sources = options.trace or [DEFAULT_TRACE]
        results = [(source, _outcomes(load_trace(source), engine, options)) for source in sources]
        for source, outcomes in results:
            print_table(source, engine, outcomes, options.step_cost or DEVICES.get(options.device))
        if options.output is not None:
            _write_picture(options.output, engine, results[0][1])
    except (ValueError, OSError) as error:
        parser.error(str(error))


def _make_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m lit_grpo simulate", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add(
        "--trace",
        action="append",
        metavar="FILE_OR_SPEC",
        help="Lengths: JSON lines with prompt_id, sample_id, prompt_tokens, tokens, and optionally visit, step (each "
        "is a batch of its own) and predicted; or a family with its settings, such as "
        f"lognormal_heavy:prompts=32,group=16,max_tokens=1024,seed=0. Families: {', '.join(FAMILIES)}. May be given "
        f"several times. Default: {DEFAULT_TRACE}.",
    )
    add("--slots", type=int, default=64, help="Completions that are decoded at a time. Default: %(default)s.")
    add("--kv_tokens", type=int, help="Tokens that the KV cache holds. Default: no limit.")
    add(
        "--noise",
        type=_parse_noise,
        default=0.0,
        help="Spread of the logarithm of the prediction's errors: 0 for true lengths, none where nothing is known, "
        "recorded for the predictions in the file. Default: 0.",
    )
    add(
        "--plans",
        nargs="+",
        metavar="PLAN",
        help=f"Plans: {', '.join(shipped_plans())}; balanced and infinite_sampling with an option, as in "
        "balanced:epsilon=0.05; or the class path of a plan of your own. Default: all that are named.",
    )
    add(
        "--probe_tokens",
        type=_parse_points,
        default=(),
        metavar="K[,K...]",
        help="Predictions are those after so many tokens of every completion, a probe, with nothing known before; with "
        "several numbers completions wait at each of them: time slices. Default: all is known before decoding.",
    )
    add(
        "--step_cost",
        type=_parse_step_cost,
        metavar="A,B,C",
        help="Milliseconds that a step takes: A + B x rows + C x tokens that they read, of prompts and completions. "
        "Default: no times.",
    )
    add("--device", choices=DEVICES, help="Seconds of a step as measured on a device, instead of --step_cost.")
    add(
        "--drafts",
        type=_parse_drafts,
        metavar="N",
        help="Decode with drafts too, as model.generator.drafts does, if the trace has token_ids: at most N tokens per "
        "row and step, or auto for as many as are worth their price. Default: without.",
    )
    add("--output", type=Path, metavar="PICTURE.png", help="Write who decoded when, of the first trace's first batch.")
    return parser


def _parse_noise(text: str) -> Noise:
    if text in ("none", "recorded"):
        return text
    try:
        sigma = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number: give 0 or more, none or recorded.") from None
    if not 0 <= sigma <= MOST_NOISE:
        raise argparse.ArgumentTypeError(
            f"{text} is no spread: give a number from 0 to {MOST_NOISE}, none or recorded."
        )
    return sigma


def _parse_points(text: str) -> tuple[int, ...]:
    points = tuple(int(part) for part in text.split(",") if part.strip().isdecimal() and len(part) < 12)
    if not points or len(points) != text.count(",") + 1 or list(points) != sorted({*points} - {0}):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no probe: give ascending numbers of tokens, such as 32 or 64,128."
        )
    return points


def _parse_drafts(text: str) -> int | Literal["auto"]:
    if text == "auto":
        return "auto"
    if not text.isdecimal() or len(text) > 3 or not 1 <= int(text) <= MOST_DRAFTS:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of drafts: give auto or 1 to {MOST_DRAFTS}.")
    return int(text)


def _parse_step_cost(text: str) -> StepCost:
    try:
        milliseconds = [float(part) for part in text.split(",")]
        if len(milliseconds) != 3:
            raise ValueError(f"there are {len(milliseconds)} numbers")
        return StepCost(*(value / 1000 for value in milliseconds))
    except ValueError as error:
        message = f"{text!r} is no cost ({error}): give three times in milliseconds, such as 20,0.1,0.0005."
        raise argparse.ArgumentTypeError(message) from None


def _outcomes(trace: Trace, engine: Engine, options: argparse.Namespace) -> list[PlanResult]:
    """Run all plans on all batches of a trace."""
    batches = trace.batches()
    for batch in batches:
        engine.check(batch)
    plans = {name: find_plan(name, "--plans") for name in options.plans or shipped_plans()}
    known = [(batch, _lengths(batch, options.noise, seed)) for seed, batch in enumerate(batches)]
    bound = sum(_bound(batch, engine) for batch in batches)
    outcomes = []
    for name, plan in plans.items():
        points = options.probe_tokens if plan.follows_lengths else ()
        schedules = [simulate(batch, plan, engine, lengths, points) for batch, lengths in known]
        after = f" after {', '.join(map(str, points))} tokens" if points else ""
        drafted = list[Schedule]()
        if options.drafts is not None:
            cost = options.step_cost or DEVICES.get(options.device)
            if options.drafts == "auto":
                assert cost is not None
                drafter: SuffixDrafter = PricedDrafter(engine.num_slots, cost)
            else:
                drafter = SuffixDrafter(options.drafts)
            for batch, lengths in known:
                drafted.append(simulate(batch, plan, engine, lengths, points, DraftingReplay(engine, batch, drafter)))
        outcomes.append(PlanResult(name + after, bound, schedules, drafted))
    return outcomes


def _lengths(trace: Trace, noise: Noise, seed: int) -> FittedLengths:
    """Return the length estimates of a batch; a different ``seed`` for each batch draws different errors."""
    if noise == "recorded":
        if trace.predicted is None:
            raise ValueError(f"{trace.name} has rows without predicted: give --noise a number or none.")
        return KnownLengths(trace.jobs, trace.predicted)
    return lengths_of(trace, None if noise == "none" else noise, seed)


def _bound(trace: Trace, engine: Engine) -> int:
    if engine.kv_tokens is None:
        return slot_bound(trace.lengths, engine.num_slots)
    return memory_bound(trace.group, trace.prompt_tokens, trace.lengths, engine.num_slots, engine.kv_tokens)


def _write_picture(path: Path, engine: Engine, outcomes: list[PlanResult]) -> None:
    from lit_grpo.scheduling.timeline import Timeline, draw_timeline

    timelines, num_batches = [], len(outcomes[0].schedules)
    part = f"the first of {num_batches} batches" if num_batches > 1 else ""  # the table is of all of them
    for outcome in outcomes:
        schedule = outcome.schedules[0]
        steps = np.unique(np.linspace(0, schedule.steps, MAX_POINTS).astype(np.int64))
        plan = f"{outcome.plan}, {part}" if part else outcome.plan
        title = f"{plan}: {schedule.steps:,} steps, bubble ratio {schedule.bubble_ratio:.2f}"
        spans, kv = [span for _, span in schedule.spans], (steps, schedule.kv_tokens_at(steps))
        timelines.append(Timeline(title, outcome.plan, spans, kv, engine.kv_tokens))
    path.parent.mkdir(parents=True, exist_ok=True)
    draw_timeline(timelines, slot_limit=engine.num_slots).savefig(path)
    print(f"The picture{f' of {part}' if part else ''} is in {path}.")
