"""The result of an evaluation: its table, its sentences and its files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.table import Table

from lit_grpo.faults import json_line
from lit_grpo.process.files import replace_file
from lit_grpo.process.terminal import counted, may_fail, one_line
from lit_grpo.tools.evaluation.figures import FRACTIONS, Figure, PairedComparison, Pass, compare
from lit_grpo.tools.evaluation.held_out import SamplingPass, Scored
from lit_grpo.tools.evaluation.picture import draw
from lit_grpo.tools.evaluation.side_by_side import side_by_side

GREEDY, SAMPLED = "greedy", "sampled"


@dataclass(frozen=True)
class Conditions:
    """Conditions of an evaluation.

    Args:
        split: The split of the data, ``test`` or ``validation``.
        source: The rows in words.
        num_rows: Number of rows that every policy was asked.
        num_left_out: Number of rows that were left out, because they are unusable for a policy.
        passes: The passes over the rows.
        temperature_from: The field that the temperature of the samples is from.
        ks: Values of k for pass@k.
        seed: Seed with which completions were sampled.
        pass_rule: When a completion is correct, as ``correct >= 1``.
        majority: How answers are told apart, or why there is no majority.
        has_answers: Whether there is a majority.
    """

    split: str
    source: str
    num_rows: int
    num_left_out: int
    passes: Sequence[SamplingPass]
    temperature_from: str
    ks: Sequence[int]
    seed: int
    pass_rule: str
    majority: str
    has_answers: bool

    def sentences(self) -> list[str]:
        """Return the conditions in sentences."""
        sampled = next((one for one in self.passes if not one.greedy), None)
        said = [f"{counted(self.num_rows, 'row')} of {self.source}; a completion is correct if {self.pass_rule}."]
        if self.num_left_out:
            said.append(
                f"{counted(self.num_left_out, 'row')} left out, because a policy cannot be asked "
                f"{'it' if self.num_left_out == 1 else 'them'}."
            )
        greedy = next((one for one in self.passes if one.greedy), None)
        if greedy is not None:
            most = counted(greedy.sampling.max_tokens, "token")
            said.append(f"Greedy: 1 completion per row at temperature 0, at most {most}.")
        if sampled is not None:
            changed = [
                f"{name} {getattr(sampled.sampling, name):g}"
                for name, default in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0))
                if getattr(sampled.sampling, name) != default
            ]
            at = ", ".join([f"temperature {sampled.sampling.temperature:g} ({self.temperature_from})", *changed])
            said.append(f"Sampled: {counted(sampled.num_samples, 'completion')} per row at {at}, seed {self.seed}.")
            said.append(f"{'Majority: ' if self.has_answers else ''}{self.majority}.")
        said.append(
            "In parentheses: 95% intervals over rows, of fractions of rows by Wilson, otherwise by the bootstrap."
        )
        return said


class Result:
    """The completions of all policies, and what is computed of them.

    Args:
        conditions: What was evaluated on, and how.
        completions: For each policy by name, the completions of each pass, in the order of the passes.
        sources: For each policy by name, the value of ``model.policy``, and the checkpoint if there is one.
    """

    def __init__(
        self,
        conditions: Conditions,
        completions: Mapping[str, Sequence[Sequence[Scored]]],
        sources: Mapping[str, Mapping[str, str | None]],
    ) -> None:
        self.conditions, self.completions, self.sources = conditions, completions, sources
        graded = {
            one.prompt_id
            for collected in completions.values()
            for rows in collected
            for one in rows
            if one.correct is not None
        }
        self.num_ungraded = conditions.num_rows - len(graded)
        self._passes: dict[str, dict[str, Pass]] = {}
        for name, collected in completions.items():
            self._passes[name] = {}
            for how, rows in zip(conditions.passes, collected, strict=True):
                counted_rows = [one for one in rows if one.prompt_id in graded or not graded]
                way = GREEDY if how.greedy else SAMPLED
                self._passes[name][way] = Pass(counted_rows, how.num_samples, () if how.greedy else conditions.ks)

    @cached_property
    def figures(self) -> dict[str, dict[str, dict[str, Figure]]]:
        """The figures by policy, by way of decoding and by name."""
        return {name: {how: one.figures() for how, one in passes.items()} for name, passes in self._passes.items()}

    @cached_property
    def comparisons(self) -> dict[str, dict[str, PairedComparison]]:
        """Every policy except the first, compared with the first, by way of decoding."""
        (_, first), *others = self._passes.items()
        return {name: {how: compare(first[how], one) for how, one in passes.items()} for name, passes in others}

    def table(self) -> Table:
        """Return the figures as a table with a column for each policy."""
        table = Table("", "figure")
        for name in self.figures:
            table.add_column(one_line(name), justify="right", overflow="fold")
        ways = next(iter(self.figures.values()))
        for how, figures in ways.items():
            for place, name in enumerate(figures):
                cells = [_cell(name, of_policy[how][name]) for of_policy in self.figures.values()]
                table.add_row("" if place else how, name, *cells)
            table.add_section()
        return table

    def sentences(self) -> list[str]:
        """Return the comparisons and the conditions in sentences."""
        first, said = next(iter(self.figures)), []
        for name, by_way in self.comparisons.items():
            for how, one in by_way.items():
                test = "McNemar's exact test" if how == GREEDY else "exact paired permutation test"
                rows = f"{counted(one.better, 'row')} better, {one.worse:,} worse"
                said.append(
                    f"{name} compared with {first}, {how}: {100 * one.difference:+.1f} points "
                    f"({100 * one.low:+.1f} to {100 * one.high:+.1f}), p = {one.p:.2g} ({test}; {rows})."
                )
        about, *others = self.conditions.sentences()
        return [*said, about, *self._ungraded(), *others]

    def _ungraded(self) -> list[str]:
        """Return a sentence on the rows that are in no figure."""
        number, rule = self.num_ungraded, self.conditions.pass_rule
        if number == self.conditions.num_rows:
            return [f"No row got a reward that says whether {rule}, so nothing counts as correct."]
        they = "it is" if number == 1 else "they are"
        return [
            f"{counted(number, 'row')} of these got no reward that says whether {rule}, as without an answer; {they} "
            "in no figure."
        ] * (number > 0)

    def write(self, folder: Path) -> list[str]:
        """Write the files of :mod:`lit_grpo.tools.evaluation`; return their names.

        The completions and the figures come first. If the page or the picture cannot be made, a warning says why.
        """
        write_completions(folder, self.completions)
        written = ["completions.jsonl"]

        def write(name: str, text: str) -> None:
            replace_file(folder / name, text.encode("utf-8", "backslashreplace"))
            written.append(name)

        content = json.loads(json_line(self._content()))
        write("evaluation.json", json.dumps(content, indent=1, ensure_ascii=False) + "\n")
        with may_fail("side_by_side.html", "the completions are in completions.jsonl"):
            greedy = {name: by_pass[0] for name, by_pass in self.completions.items()}
            write("side_by_side.html", side_by_side(greedy, self.conditions.sentences()[0]))
        if find_spec("matplotlib") is not None:
            with may_fail("evaluation.svg", "its figures are in evaluation.json"):
                write("evaluation.svg", draw(self.figures))
        return written

    def _content(self) -> dict[str, Any]:
        """Return the content of ``evaluation.json``."""
        conditions = asdict(self.conditions)
        conditions["passes"] = [
            {"greedy": one.greedy, "num_samples": one.num_samples, "sampling": asdict(one.sampling)}
            for one in self.conditions.passes
        ]
        first = next(iter(self.figures))
        return {
            "format": 1,
            "conditions": conditions | {"num_ungraded": self.num_ungraded},
            "policies": [
                {
                    "name": name,
                    **self.sources[name],
                    "figures": {
                        how: {figure: value._asdict() for figure, value in figures.items()}
                        for how, figures in by_way.items()
                    },
                }
                for name, by_way in self.figures.items()
            ],
            "comparisons": [
                {"policy": name, "first": first, **{how: one._asdict() for how, one in by_way.items()}}
                for name, by_way in self.comparisons.items()
            ],
        }


def write_completions(folder: Path, completions: Mapping[str, Sequence[Sequence[Scored]]]) -> None:
    """Write the completions of the policies that have been evaluated so far."""
    lines = [json_line(one.line()) for by_pass in completions.values() for rows in by_pass for one in rows]
    replace_file(folder / "completions.jsonl", "".join(lines).encode("utf-8", "backslashreplace"))


def _cell(name: str, figure: Figure) -> str:
    """Write a figure with its interval."""
    if figure.value != figure.value:
        return "none"
    if name.startswith(FRACTIONS):
        return f"{100 * figure.value:.1f}% ({100 * figure.low:.1f} to {100 * figure.high:.1f})"
    return f"{figure.value:.3g} ({figure.low:.3g} to {figure.high:.3g})"
