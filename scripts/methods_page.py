"""The page docs/methods.md, made of the newest result: ``python -m scripts.methods_page``."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.report import RESULTS, result_path

GRPO = "grpo"
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""The 0.975 quantile of Student's t by degrees of freedom, from 1 on."""
MEASURES = ("over_run", "end")
HEAD = """# Results by method

This page compares each method with plain GRPO at an **equal budget of generated tokens** (`python -m
benchmarks.methods`, `{result}`, on {cpu}, one thread). A run ends when it has generated the tokens of its task's
budget, with any number of updates.

*Mean over the run* is the held-out exact match averaged over the budget, *at the end* the final one; both in percent,
higher is better. A *gain* is the mean difference in points from plain GRPO with the same seed, with the 95% interval of
Student's t over the seeds. The result is **nothing** if the interval of the gain over the run includes 0: with so few
seeds no gain was seen, and there may still be one. Of twenty methods without effect, one is expected outside its
interval by chance. *Length* is the mean number of tokens per completion in the last quarter of the updates, *CPU s* the
seconds of rollouts and updates; those of `mt_grpo`, `capo`, `copo`, `maxrl`, `latr`, `echo_tree`, `scope`, `swarm`,
`dart` and the coresets were measured while other work ran, which doubled them or more. All policies are small; results
with large models are not known.

Rows named after a setting (`groups of 4`, `half as many completions`, `two iterations`, `loss grpo`) use no method. The
gain of a method that includes such a setting is its difference from that row: `swarm` trains on `half as many prompts`
of its own and as many of another run, and its gain is that of the setting. Tree methods begin with `half as many
completions` on tasks of several turns.

A run of `word_problems` has ten updates, in which a prompt is sampled once or twice. Methods that use earlier samplings
of a prompt hardly act there (`prompt_gdro` begins with the ninth update), and `early` rules have a warm-up of 4 updates
in place of 20. `spaco` has no row there: a completion of ten tokens is one chunk, so it equals plain GRPO.

All these methods are off by default. [Papers](papers.md) gives their sources, [choosing](choosing.md) recommends
settings.
"""
MEANS = ("seeds", "updates", "length", "CPU s")
COLUMNS = ("method", "mean over the run", "gain", "at the end", "gain", "result", *MEANS, "setting")


class Gain(NamedTuple):
    """A mean difference, and how far its 95% interval reaches to both sides."""

    mean: float
    reach: float

    def __str__(self) -> str:
        return f"{self.mean:+.1f}" + ("" if math.isnan(self.reach) else f" ± {self.reach:.1f}")

    @property
    def word(self) -> str:
        """The result of the method in a word."""
        if math.isnan(self.reach):
            return "one seed"
        return "nothing" if abs(self.mean) <= self.reach else "more" if self.mean > 0 else "less"


def newest() -> Path:
    """The newest result file, or the path of today's if there is none."""
    return max(RESULTS.glob("methods-2*.json"), default=result_path("methods", "cpu"))


def paired_gain(with_S: Sequence[float], without_S: Sequence[float]) -> Gain:
    """The gain over pairs of runs with the same seeds; from one pair its interval is NaN.

    Half an interval is ``t(0.975, S - 1) s / sqrt(S)`` with the standard deviation ``s`` of the S differences.
    """
    differences_S = [one - other for one, other in zip(with_S, without_S, strict=True)]
    mean, size = statistics.fmean(differences_S), len(differences_S)
    if size == 1:
        return Gain(mean, math.nan)
    t = T_975[min(size - 1, len(T_975)) - 1]
    return Gain(mean, t * statistics.stdev(differences_S) / math.sqrt(size))


def methods_page(path: Path) -> str:
    """Return the page of a result file."""
    result = json.loads(path.read_text())
    return "\n".join([HEAD.format(result=path.stem, cpu=result["machine"]["cpu"]), *tables(result), ""])


def tables(result: dict[str, Any]) -> Iterator[str]:
    """A table for each task that has another method beside plain GRPO, sorted by the gain over the run."""
    for task, words in result["settings"].items():
        of_task = [row for row in result["rows"] if row["task"] == task]
        plain = {row["seed"]: row for row in of_task if row["method"] == GRPO}
        by_method: dict[str, dict[int, dict[str, Any]]] = {}
        for row in of_task:
            if row["seed"] in plain:
                by_method.setdefault(row["method"], {})[row["seed"]] = row
        if len(by_method) < 2:
            continue
        lines = [_line(method, rows, plain) for method, rows in by_method.items()]
        yield f"\n## {task}\n\nSeeds {', '.join(map(str, sorted(plain)))}; all runs: `{words}`.\n"
        yield f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}"
        for _, cells in sorted(lines, key=lambda line: -line[0]):
            yield f"| {' | '.join(cells)} |"


def _line(
    method: str, with_it: dict[int, dict[str, Any]], plain: dict[int, dict[str, Any]]
) -> tuple[float, tuple[str, ...]]:
    """The gain that a method is sorted by, and the cells of its line."""
    runs = list(with_it.values())
    over_run, end = (
        paired_gain([100 * run[name] for run in runs], [100 * plain[seed][name] for seed in with_it])
        for name in MEASURES
    )
    mean = {
        name: statistics.fmean(run[name] for run in runs) for name in (*MEASURES, "updates", "late_length", "cpu_s")
    }
    costs = (str(len(runs)), *(f"{mean[name]:.0f}" for name in ("updates", "late_length", "cpu_s")))
    levels = [f"{100 * mean[name]:.1f}" for name in MEASURES]
    if method == GRPO:
        return 0.0, (method, levels[0], "-", levels[1], "-", "-", *costs, "")
    gains = [str(gain) for gain in (over_run, end)]
    set_by = runs[0]["set"].replace("|", "\\|")
    return over_run.mean, (method, levels[0], gains[0], levels[1], gains[1], over_run.word, *costs, f"`{set_by}`")


if __name__ == "__main__":
    print(methods_page(newest()), end="")
