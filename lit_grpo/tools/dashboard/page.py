"""The page of the docs on metrics: ``python -m lit_grpo.tools.dashboard.page > docs/metrics.md``."""

from __future__ import annotations

from collections.abc import Iterator

from lit_grpo.tools.dashboard.specification import Metric, Section, sections

HEAD = """# What a run logs

A run writes a row for each update to `metrics.csv`, and the same values to TensorBoard and Weights & Biases, in the
sections of this page. A `*` stands for a name or a number. A metric that TRL logs by the same name has the same
meaning. `NaN` is the mean of nothing. A reward function adds its own metrics with `log_metric` (they come last).

Curves can be drawn by updates, by sampled tokens (`num_tokens`), by completions (`num_completions`) or by time
(`time/total_s`), all of which continue in a resumed run. This page and the boards are made from
`lit_grpo/tools/dashboard/metrics.yaml`.
"""


def metrics_page() -> str:
    """Return the page, in Markdown."""
    return "\n".join([HEAD, *(line for section in sections() for line in _section(section))])


def _section(section: Section) -> Iterator[str]:
    yield f"## {section.title}\n"
    yield f"{section.about}\n"
    yield "| metric | what it is | normal | otherwise |"
    yield "|---|---|---|---|"
    yield from map(_row, section.metrics)
    yield ""


def _row(metric: Metric) -> str:
    means = metric.means if metric.when is None else f"{metric.means} Needs: {metric.when}."
    return f"| `{metric.name}` | {means} | {metric.normal} | {metric.otherwise} |".replace("| - |", "| |")


if __name__ == "__main__":
    print(metrics_page(), end="")
