"""The page of the docs on metrics: ``python -m lit_grpo.tools.dashboard.page > docs/metrics.md``."""

from __future__ import annotations

from collections.abc import Iterator

from lit_grpo.tools.dashboard.specification import Metric, Section, sections

HEAD = """# Metrics

A run writes one row per batch to `metrics.csv`, and the same values to TensorBoard and Weights & Biases, in the
sections of this page. A `*` in a name stands for a name or a number. A metric that TRL logs by the same name has the
same meaning, except for what [From TRL](migration.md#metrics-of-trl) names. A mean over no values is `NaN`. A reward
function adds its own metrics with `log_metric`. Curves can be drawn by updates, `num_tokens`, `num_completions` or
`time/total_s`; all of these continue in a resumed run. Reports, TensorBoard and W&B show these texts too. All are made
from `lit_grpo/tools/dashboard/metrics.yaml`.

The column `step` counts optimizer steps (updates), as TRL's `global_step`. TRL with `logging_steps: 1` logs each step.
Here a batch is one row. If `model.num_iterations` x `model.num_minibatches` is 4, a row stands for 4 steps, and `step`
is 4, 8, 12 ...; `update/steps` is their number. In such a row `loss`, `grad_norm`, `entropy`, `kl`, the clip ratios and
`lr` are means over the steps of the batch, `sampling/*` compares log-probs before its first step, and figures of
rollouts are those of the batch.

The figures of a rollout are those of all ranks: counts are sums, means are over the completions, groups or slots of all
ranks, and the seconds of a rollout are those of the slowest rank. If two plug-ins of a kind act on different data sets,
the names of their metrics begin with `datasets/` and the names of their data sets, as in `datasets/sums/copo/local`.
"""


def metrics_page() -> str:
    return "\n".join([HEAD, *(line for section in sections() for line in _section(section))])


def _section(section: Section) -> Iterator[str]:
    yield f"## {section.title}\n"
    yield f"{section.about}\n"
    yield "| metric | meaning | normal value | if it differs |"
    yield "|---|---|---|---|"
    needs = dict.fromkeys([None, *(metric.when for metric in section.metrics)])
    for needed in needs:
        if needed is not None:
            yield f"| *with {needed}* | | | |"
        yield from (_row(metric) for metric in section.metrics if metric.when == needed)
    yield ""


def _row(metric: Metric) -> str:
    return f"| `{metric.name}` | {metric.means} | {metric.normal} | {metric.otherwise} |".replace("| - |", "| |")


if __name__ == "__main__":
    print(metrics_page(), end="")
