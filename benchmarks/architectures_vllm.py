"""Every causal language model that vLLM knows: its weights are sent to a running engine, and what it samples is exact.

Of each family a small random model is saved and loaded as a policy, and an engine starts for it. Then all weights and
buffers of the policy change, and are sent as a run sends them. The log-probs of what the engine then samples are
compared with plain Hugging Face forwards of the changed model. Each family has a process of its own.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS, Claim, Options, Row, finish, need, note, parse_options
from lit_grpo.rollout.vllm.arguments import installed_version, server_environment
from tests.doubles.small_models import families

LIMIT = 1e-4
"""The most that a log-prob may be off, in nats. In float32 the roundings of a small model add up to 1e-6 or 1e-5."""
ROUNDED = 0.01
"""Likewise where vLLM computes a part in bfloat16 (Apertus's activation) or by an approximation (BLOOM's GELU)."""
PATIENCE_S = 240.0
QUICK = ("gemma2", "gpt2", "llama", "qwen3_moe")
OUTCOMES = ("exact", "rounded", "refused", "not run here", "not built")
"""The last but one: vLLM's CPU build does not run the family, or not so small a model, and a sentence says it."""
PARTIAL = RESULTS / "architectures_vllm.jsonl"
"""The rows so far of a run that takes long: one that is begun again goes on from them."""


def known(names: Sequence[str]) -> list[str]:
    """Return the families of which vLLM has a model class."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from vllm.model_executor.models.registry import ModelRegistry

    theirs = ModelRegistry.get_supported_archs()
    return [name for name in names if MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name] in theirs]


def judge(family: str, log: Path, slack: float = 1.0) -> Row:
    """Have a process of its own take a family through an engine; return its row of the table.

    Args:
        family: The name that transformers gives the family, as ``qwen3_moe``.
        log: A file for what the process prints.
        slack: What the limit is multiplied by; processors round differently.
    """
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = _origin().Process(target=_answer, args=(family, theirs, str(log)))
    process.start()
    theirs.close()
    figures: dict[str, Any] = {"outcome": "no answer", "detail": f"none within {PATIENCE_S:g} s"}
    try:
        if ours.poll(PATIENCE_S):
            figures = ours.recv()
    except EOFError:
        figures = {"outcome": "no answer", "detail": f"its process ended: {log.read_text().strip()[-300:]}"}
    finally:
        process.kill()
        process.join()
    return {"family": family, "gap": "", "detail": ""} | figures | {"outcome": _outcome(figures, slack)}


def _outcome(figures: dict[str, Any], slack: float) -> str:
    if figures["outcome"] == "computed":
        gap = figures["gap"]
        return "exact" if gap <= slack * LIMIT else "rounded" if gap <= ROUNDED else "mismatch"
    said = figures.get("detail", "").startswith("vLLM ") and " could not " in figures["detail"]
    return "not run here" if figures["outcome"] == "refused" and said else figures["outcome"]


def _origin() -> Any:
    """Processes that begin with all that is to be imported."""
    os.environ |= {"OMP_NUM_THREADS": "1"} | server_environment()
    origin = multiprocessing.get_context("forkserver")
    origin.set_forkserver_preload(
        ["benchmarks.architectures_vllm_case", "vllm.v1.engine.llm_engine", "vllm.v1.worker.cpu_worker"]
    )
    return origin


def _answer(*of_case: Any) -> None:
    from benchmarks.architectures_vllm_case import answer

    answer(*of_case)


def sweep(names: Sequence[str], kept: Path) -> list[Row]:
    """Return a row for each family; those that ``kept`` holds already are taken from there, others are added to it."""
    rows: dict[str, Row] = {}
    if kept.exists():
        rows = {row["family"]: row for row in map(json.loads, kept.read_text().splitlines())}
    for name in names:
        if name in rows:
            continue
        with tempfile.NamedTemporaryFile() as log:
            rows[name] = row = judge(name, Path(log.name))
        with kept.open("a") as file:
            file.write(json.dumps(row) + "\n")
        note(" ".join(f"{value:.2g}" if isinstance(value, float) else str(value) for value in row.values()))
    return [rows[name] for name in names]


def main(options: Options) -> int:
    """Judge all families that vLLM knows."""
    need("vllm")
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "rows.jsonl" if options.quick else PARTIAL
        rows = sweep(QUICK if options.quick else known(families()), kept)
    counts = {outcome: sum(row["outcome"] == outcome for row in rows) for outcome in OUTCOMES}
    defects = len(rows) - sum(counts.values())
    claims = [
        Claim("families that are exact", counts["exact"], ">=", 40),
        Claim("families with a wrong result or a traceback", defects, "<=", 0),
    ]
    settings: Row = {
        "vllm": installed_version(),
        "head_size": 32,
        "rows": "2 prompts, 3 completions each",
        "limit_nats": LIMIT,
        **counts,
    }
    code = finish("architectures_vllm", options, settings, rows, claims)
    if not options.quick:
        PARTIAL.unlink()
    return code


if __name__ == "__main__":
    assert __doc__ is not None
    sys.exit(main(parse_options(__doc__)))
