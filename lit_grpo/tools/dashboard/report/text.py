"""The report as text, for a terminal and for an agent: figures, curves, completions, and what to try next."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich import box
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from lit_grpo.display.cards import Card
from lit_grpo.display.samples import Sample, Samples
from lit_grpo.process.terminal import counted, one_line
from lit_grpo.tools.dashboard.report.comparison import comparison, labels
from lit_grpo.tools.dashboard.report.completions import rank, shown_value
from lit_grpo.tools.dashboard.report.content import report_content
from lit_grpo.tools.dashboard.report.curves import points
from lit_grpo.tools.dashboard.report.folder import RunRecords
from lit_grpo.tools.dashboard.specification import filter_names

CURVES = (
    *("val/pass@*", "val/reward", "reward", "rewards/*/mean", "val/rewards/*/mean", "datasets/*/reward"),
    *("val/datasets/*/pass@1", "frac_reward_zero_std", "frac_no_reward", "completions/clipped_ratio"),
    *("completions/mean_length", "entropy", "kl", "loss", "ce/loss", "val/sft/loss", "grad_norm", "update/skipped"),
    *("sampling/logprob_gap_mean", "rollout/bubble_ratio", "rollout/tokens_per_step", "time/step_s"),
    "memory/*_peak_gib",
)
"""The metrics that are shown, in their order; ``metrics.csv`` has all."""
NUMBERS = ("first", "last", "least", "greatest")
NUMBER_WIDTH = 10
MOST_POINTS, LEAST_POINTS = 40, 8
LEAST_WIDTH = 60
BLOCKS, ASCII = "▁▂▃▄▅▆▇█", "_.-~=+*#"
MOST_SETTINGS = 40


def report_text(runs: Sequence[RunRecords], width: int, ascii_only: bool = False) -> str:
    """Return the report of one run or of several as text, in lines of at most ``width`` columns, but 60 at least.

    With ``ascii_only`` it has no characters but ASCII, those of the runs' own texts aside.
    """
    width = max(width, LEAST_WIDTH)
    file = io.StringIO()
    console = Console(
        file=file, width=width, color_system=None, markup=False, highlight=False, emoji=False, force_jupyter=False
    )
    writer = _Writer(console, width, ascii_only)
    if len(runs) == 1:
        writer.run(runs[0], labels(runs)[0])
    else:
        writer.several(runs)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"


class _Writer:
    """Writes the parts of a report in the order of reading."""

    def __init__(self, console: Console, width: int, ascii_only: bool) -> None:
        self.console, self.width, self.levels = console, width, ASCII if ascii_only else BLOCKS
        self._rule = "-" if ascii_only else "─"

    def run(self, run: RunRecords, name: str) -> None:
        """Write the report of one run."""
        content = report_content(run, name)
        self._heading(content)
        first, last = (int(run.steps[place]) if len(run.steps) else 0 for place in (0, -1))
        self._title(f"Curves, updates {first:,} to {last:,}")
        shown = _shown(run.columns)
        self._curves({metric: run.columns[metric] for metric in shown})
        if left := len(run.columns) - len(shown):
            self.console.print(f"metrics.csv has {counted(left, 'more metric')}.")
        self._completions(run)
        self._advice(content["advice"])

    def several(self, runs: Sequence[RunRecords]) -> None:
        """Write the comparison of several runs."""
        names, found = labels(runs), comparison(runs)
        contents = [report_content(run, name, len(runs)) for run, name in zip(runs, names, strict=True)]
        self._title("Final figures")
        figures = found["figures"]
        cells = [
            [" ".join(filter(None, row[place] or ("-",))) for row in figures["rows"]]
            for place in range(len(figures["columns"]))
        ]
        self._table(["", *names], [[title, *row] for title, row in zip(figures["columns"], cells, strict=True)])
        for title, rows in (("Settings that differ", found["settings"]), ("Versions that differ", found["versions"])):
            if rows:
                self._title(title)
                self._table(
                    ["", *names],
                    [
                        [field, *("-" if each is None else each for each in values)]
                        for field, values in rows[:MOST_SETTINGS]
                    ],
                )
            if len(rows) > MOST_SETTINGS:
                self.console.print(f"{counted(len(rows) - MOST_SETTINGS, 'more field')} differ; report.html has all.")
        self._title("Curves")
        metrics = _shown({name: column for run in runs for name, column in run.columns.items()})
        for metric in metrics:
            self.console.print(Text(one_line(metric)))
            having = [(name, run) for name, run in zip(names, runs, strict=True) if metric in run.columns]
            self._curves({name: run.columns[metric] for name, run in having}, "  ", metric == metrics[0])
        for run, content in zip(runs, contents, strict=True):
            self._heading(content)
            self._completions(run)
            self._advice(content["advice"])

    def _title(self, title: str) -> None:
        self.console.print()
        self.console.print(Rule(Text(title), characters=self._rule, align="left"))

    def _heading(self, content: Mapping[str, Any]) -> None:
        """Write the figures of a run, and what was found to be wrong."""
        facts = {name: f"{value} {more}".strip() for name, value, more in content["head"]["facts"]}
        self._title(f"{content['name']}: {content['head']['state']}")
        self.console.print(Card("", facts))
        for sentence in content["problems"]:
            self.console.print(Text(one_line(sentence)))

    def _table(self, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        table = Table(
            *map(one_line, head), box=box.ASCII_DOUBLE_HEAD if self._rule == "-" else box.SIMPLE_HEAD, pad_edge=False
        )
        for column in table.columns:
            column.overflow = "fold"
        for row in rows:
            table.add_row(*(Text(one_line(cell)) for cell in row))
        self.console.print(table)

    def _curves(self, rows: Mapping[str, np.ndarray], indent: str = "", has_head: bool = True) -> None:
        """Write a line for each curve: its form, and its first, last, least and greatest value."""
        names = [indent + one_line(name) for name in rows]
        numbers = len(NUMBERS) * NUMBER_WIDTH + 1
        label = min(self.width - numbers - LEAST_POINTS, max(map(cell_len, names), default=0) + 2)
        most = min(MOST_POINTS, self.width - label - numbers)
        if has_head:
            self.console.print(" " * (label + most + 1) + "".join(f"{name:>{NUMBER_WIDTH}}" for name in NUMBERS))
        for name, values in zip(names, rows.values(), strict=True):
            there = values[np.isfinite(values)]
            parts = [set_cell_size(_cut(name, label - 1), label), f"{sparkline(values, most, self.levels):{most + 1}}"]
            parts += [f"{_number(each):>{NUMBER_WIDTH}}" for each in (there[0], there[-1], there.min(), there.max())]
            self.console.print(Text("".join(parts), no_wrap=True), crop=True)

    def _completions(self, run: RunRecords) -> None:
        """Write the best and the worst completion of the last validation, or else of the last samples."""
        rows = run.validated or run.samples
        if not rows:
            return
        step = max(row["step"] for row in rows)
        ranked = sorted((row for row in rows if row["step"] == step), key=lambda row: rank(row.get("reward")))
        shown = ranked if len(ranked) < 2 else [ranked[-1], ranked[0]]
        what = "validation at" if run.validated else "samples of"
        self._title("Completions")
        self.console.print(Samples(f"{what} update {step:,}, best and worst", list(map(_sample, shown))))

    def _advice(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._title("What to try next")
        if not rows:
            self.console.print("No metric calls for a change.")
        for number, row in enumerate(rows, start=1):
            text = Text(one_line(f"{number}. {row['sentence']} ({row['page']}, {row['heading']})"))
            self.console.print(text)


def sparkline(values: np.ndarray, most: int, levels: str = BLOCKS) -> str:
    """Return a curve, (rows,), as characters of ascending height, each the mean of some rows; blank without a value."""
    if np.isfinite(values).sum() * 2 < len(values):  # logged now and then, as by validations
        values = values[np.isfinite(values)]
    means = points(values, most)["mean"]
    known = [value for value in means if value is not None]
    if not known:
        return ""
    least, greatest = min(known), max(known)
    size = greatest - least
    if not (size > 0 and math.isfinite(size)):
        return "".join(" " if value is None else levels[0] for value in means)
    places = [None if value is None else round((value - least) / size * (len(levels) - 1)) for value in means]
    return "".join(" " if place is None else levels[place] for place in places)


def _shown(columns: Mapping[str, np.ndarray]) -> list[str]:
    return list(dict.fromkeys(name for pattern in CURVES for name in sorted(filter_names(columns, pattern))))


def _number(value: float) -> str:
    text = f"{value:.4g}"
    return text if len(text) < NUMBER_WIDTH else f"{value:.2g}"


def _cut(text: str, width: int) -> str:
    """Return a text of at most so many columns; of a longer one the end, which tells names apart."""
    while cell_len(text) > width:
        text = f"~{text[2:]}"
    return text


def _sample(row: Mapping[str, Any]) -> Sample:
    texts = {name: str(shown_value(row.get(name)) or "") for name in ("prompt", "completion", "finish")}
    answer, tokens = shown_value(row.get("columns/answer")), row.get("tokens")
    return Sample(
        **texts,
        tokens=tokens if isinstance(tokens, int) else 0,
        reward=_finite(row.get("reward")),
        advantage=math.nan,
        rewards={
            name.removeprefix("rewards/"): None if value is None else _finite(value)
            for name, value in row.items()
            if name.startswith("rewards/")
        },
        reference={} if answer is None else {"answer": answer},
    )


def _finite(value: Any) -> float:
    """Return a number of a row as a float; NaN for what is none."""
    return rank(value) if isinstance(value, int | float) else math.nan
