"""The greedy completions of several policies to the same prompts, side by side in one HTML file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from lit_grpo.process.terminal import counted, html_text
from lit_grpo.tools.evaluation.held_out import Scored

MAX_ROWS = 200
MAX_CHARACTERS = 4_000  # of a text
KINDS = {
    "fixed": "wrong in the first policy, correct in the last",
    "broken": "correct in the first policy, wrong in the last",
    "wrong": "wrong in both",
    "correct": "correct in both",
    "not graded": "without a reward that says whether they are correct",
}
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Side by side</title>
<style>
:root {{ color-scheme: light dark; --edge: #8a94a455; --good: #0a7a5c; --bad: #c02a3a; }}
body {{ font: 14px/1.5 system-ui, sans-serif; margin: 24px; }}
table {{ border-collapse: collapse; width: 100%; table-layout: fixed; }}
th, td {{ border: 1px solid var(--edge); padding: 8px 10px; text-align: left; vertical-align: top; }}
pre {{ margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; font: 12px/1.45 ui-monospace, Menlo, monospace; }}
.yes {{ color: var(--good); font-weight: 600; }} .no {{ color: var(--bad); font-weight: 600; }}
small {{ opacity: 0.7; }}
</style></head><body>
<h1>Side by side</h1>
<p>{about}</p>
{tables}
</body></html>
"""


def side_by_side(greedy: Mapping[str, Sequence[Scored]], about: str) -> str:
    """Return the page: first the rows on which the last policy differs from the first, then the others.

    Args:
        greedy: Greedy completions to the same rows, in the same order, for each policy by name.
        about: A sentence on the rows.
    """
    kinds: dict[str, list[tuple[Scored, ...]]] = {kind: [] for kind in KINDS}
    for row in zip(*greedy.values(), strict=True):
        before, after = row[0].correct, row[-1].correct
        kind = ("correct" if after else "broken") if before else ("fixed" if after else "wrong")
        kinds[kind if any(one.correct is not None for one in row) else "not graded"].append(row)
    left, tables = MAX_ROWS, []
    alone = len(greedy) == 1
    for kind, rows in kinds.items():
        shown = rows[:left]
        left -= len(shown)
        if not rows:
            continue
        title = kind.capitalize() if alone else KINDS[kind].capitalize()
        more = f", of which {len(shown)} are shown; completions.jsonl has all" if len(shown) < len(rows) else ""
        heads = "".join(f"<th>{_text(name)}</th>" for name in greedy)
        body = "".join(_row(row) for row in shown)
        tables.append(
            f"<h2>{title}: {counted(len(rows), 'row')}{more}</h2>\n"
            f"<table><thead><tr><th>prompt</th>{heads}</tr></thead><tbody>{body}</tbody></table>"
        )
    return _PAGE.format(about=_text(about), tables="\n".join(tables))


def _row(row: Sequence[Scored]) -> str:
    asked = "".join(f"<small>{_text(f'{name}: {value}')}</small><br>" for name, value in row[0].columns.items())
    cells = "".join(_cell(one) for one in row)
    return (
        f"<tr><td><small>{_text(row[0].prompt_id)}</small><pre>{_text(row[0].prompt)}</pre>{asked}</td>{cells}</tr>\n"
    )


def _cell(one: Scored) -> str:
    mark = '<span class="yes">correct</span>' if one.correct else '<span class="no">wrong</span>'
    mark = "not graded" if one.correct is None else mark
    reward = f"reward {one.reward:.3g}" if math.isfinite(one.reward) else "no reward"
    about = f"{reward}, {counted(one.length, 'token')}{', truncated' if one.truncated else ''}"
    return f"<td>{mark} <small>{about}</small><pre>{_text(one.completion)}</pre></td>"


def _text(text: str) -> str:
    """Return a text for HTML, without control characters, and not longer than the page can show."""
    cut = text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]} ..."
    return html_text(cut)
