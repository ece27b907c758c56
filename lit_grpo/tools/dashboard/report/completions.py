"""The completions in a report: samples, the same prompts at several updates, and before and after the training."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lit_grpo.process.terminal import visible

MAX_SAMPLES = 400
MAX_CHARACTERS = 4_000  # of a text
MAX_TEXT = 1_500_000  # characters of all rows of completions in a file
MAX_PROMPTS = 24  # shown at several updates, or with the completions of several policies
MAX_POLICIES = 4
SHARES = {"samples": 0.5, "over_time": 0.15, "held_out": 0.15, "evaluation": 0.2}
"""The fraction of MAX_TEXT that each kind of rows may take."""


def completions(
    samples: Sequence[Mapping[str, Any]],
    evaluated: Sequence[Mapping[str, Any]],
    validated: Sequence[Mapping[str, Any]] = (),
    num_runs: int = 1,
) -> dict[str, Any]:
    """Return the completions that a page shows of one run.

    Args:
        samples: Rows of ``samples.jsonl``: completions of training, oldest first.
        evaluated: Rows of evaluation/completions.jsonl, at most one for each prompt and policy.
        validated: Rows of ``val_samples.jsonl``: completions of held-out prompts.
        num_runs: Number of runs that share the page, and so the limit of its text.
    """
    room = {name: share * MAX_TEXT / num_runs for name, share in SHARES.items()}
    newest = [_sample(row) for row in reversed(samples[-MAX_SAMPLES:])]
    return {
        "samples": _fitting(newest, room["samples"])[::-1],
        "num_samples": len(samples),
        "over_time": _fitting(over_time(samples), room["over_time"]),
        "held_out": _fitting(over_time(validated, least=1), room["held_out"]),
        "evaluation": _evaluation(evaluated, room["evaluation"]),
    }


def over_time(samples: Iterable[Mapping[str, Any]], least: int = 2) -> list[dict[str, Any]]:
    """Return the prompts with samples of several updates: first those whose reward changed, of most updates first.

    Each has its samples of the first, the middle and the last of its updates: the one with the highest reward, and the
    one with the lowest if that differs.

    Args:
        samples: Completions with their ``prompt_id``, ``step`` and ``reward``.
        least: The number of updates that a prompt needs.
    """
    found: dict[str, dict[int, list[Mapping[str, Any]]]] = {}
    for row in samples:
        name, step = row.get("prompt_id") or row.get("prompt"), row.get("step")
        if name is not None and isinstance(step, int):
            found.setdefault(str(name), {}).setdefault(step, []).append(row)
    several = sorted(
        (of_prompt for of_prompt in found.values() if len(of_prompt) >= least), key=_changed_and_often, reverse=True
    )
    prompts = []
    for of_prompt in several[:MAX_PROMPTS]:
        steps = sorted(of_prompt)
        moments = []
        for step in sorted({steps[0], steps[len(steps) // 2], steps[-1]}):
            ranked = sorted(map(_sample, of_prompt[step]), key=lambda row: rank(row["reward"]), reverse=True)
            shown = ranked[:1] if ranked[-1]["reward"] == ranked[0]["reward"] else [ranked[0], ranked[-1]]
            moments.append({"step": step, "number": len(ranked), "shown": list(map(_text_and_reward, shown))})
        last = of_prompt[steps[-1]][0]
        prompts.append(
            {
                "prompt_id": shown_value(last.get("prompt_id")),
                "prompt": shown_value(last.get("prompt")),
                "images": last.get("prompt_images"),
                "num_updates": len(steps),
                "moments": moments,
            }
        )
    return prompts


def _evaluation(rows: Sequence[Mapping[str, Any]], room: float) -> dict[str, Any] | None:
    """Return completions of the same prompts by several policies side by side; None without two policies.

    The first policy of the file counts as *before*, the last one as *after*. Prompts on which they differ come first.
    """
    policies = list(dict.fromkeys(str(row["policy"]) for row in rows))
    policies = policies if len(policies) <= MAX_POLICIES else [*policies[: MAX_POLICIES - 1], policies[-1]]
    if len(policies) < 2:
        return None
    by_prompt: dict[str, dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        by_prompt.setdefault(str(row["prompt_id"]), {})[str(row["policy"])] = row
    counts: dict[str, int] = dict.fromkeys(("gained", "lost", "both", "neither"), 0)
    kinds: dict[str, list[dict[str, Any]]] = {name: [] for name in (*counts, "")}
    for name, of_policy in by_prompt.items():
        first, last = (of_policy.get(policy, {}).get("correct") for policy in (policies[0], policies[-1]))
        kind = ""
        if isinstance(first, bool) and isinstance(last, bool):
            kind = {(False, True): "gained", (True, False): "lost", (True, True): "both"}.get((first, last), "neither")
            counts[kind] += 1
        cells = [of_policy.get(policy) for policy in policies]
        prompt = next((row.get("prompt") for row in of_policy.values()), None)
        shown = [None if row is None else _text_and_reward(row) | {"correct": row.get("correct")} for row in cells]
        kinds[kind].append({"prompt_id": visible(name), "prompt": shown_value(prompt), "kind": kind, "cells": shown})
    # Gained and lost prompts in turn, so that neither crowds the other out.
    changed = [row for pair in _in_turn(kinds["gained"], kinds["lost"]) for row in pair]
    ordered = [*changed, *kinds["neither"], *kinds["both"], *kinds[""]]
    return {
        "policies": [visible(policy) for policy in policies],
        "counts": counts,
        "num_prompts": len(by_prompt),
        "prompts": _fitting(ordered[:MAX_PROMPTS], room),
    }


def _in_turn(one: Sequence[Any], other: Sequence[Any]) -> Iterable[list[Any]]:
    for place in range(max(len(one), len(other))):
        yield [*one[place : place + 1], *other[place : place + 1]]


def _fitting(rows: Sequence[dict[str, Any]], characters: float) -> list[dict[str, Any]]:
    """Return the first rows that together take no more characters than this."""
    taken = []
    for row in rows:
        characters -= len(json.dumps(row, ensure_ascii=False))
        if characters < 0:
            break
        taken.append(row)
    return taken


def _text_and_reward(row: Mapping[str, Any]) -> dict[str, Any]:
    return {"completion": shown_value(row.get("completion")), "reward": shown_value(row.get("reward"))}


def _changed_and_often(of_prompt: Mapping[int, Sequence[Mapping[str, Any]]]) -> tuple[bool, int]:
    """Return whether the highest reward has changed from first to last update, and the number of updates."""
    first, last = (max(rank(row.get("reward")) for row in of_prompt[step]) for step in (min(of_prompt), max(of_prompt)))
    return first != last, len(of_prompt)


def rank(reward: Any) -> float:
    """Return the number by which a reward of a row is ordered; what is no number is the lowest."""
    return max(min(reward, 1e300), -1e300) if isinstance(reward, int | float) else -math.inf


def _sample(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a completion, with rewards by function and columns of the data, which have prefixes in the row."""
    own = ("step", "prompt_id", "prompt", "completion", "tokens", "finish", "reward", "advantage")
    rest = {name: value for name, value in row.items() if name not in (*own, "prompt_images") and value is not None}
    parts = {kind: {} for kind in ("rewards", "columns", "extra")}
    for name, value in rest.items():
        kind, _, short = name.partition("/")
        kind, short = (kind, short) if kind in ("rewards", "columns") and short else ("extra", name)
        parts[kind][visible(short)] = shown_value(value)
    shown = {name: shown_value(row.get(name)) for name in own}
    more = {"characters": len(str(row.get("completion") or "")), "images": row.get("prompt_images")}
    return shown | parts | more


def shown_value(value: Any) -> Any:
    """Return a value of a row as JSON has it, a long text cut."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    text = str(value)
    shown = visible(text[: MAX_CHARACTERS + 1])
    return shown if len(shown) <= MAX_CHARACTERS else shown[:MAX_CHARACTERS] + " …"
