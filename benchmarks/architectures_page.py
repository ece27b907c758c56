"""The page docs/architectures.md, made of the newest result: ``python -m benchmarks.architectures_page``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS

HEAD = """# Architectures

What becomes of each causal language model that transformers {transformers} knows, measured on small random models by
`python -m benchmarks.architectures` ({result}). **{exact} families are exact**: log-probs that are sampled, log-probs
that are learnt from, the gradient, the export and the export with LoRA adapters all agree with plain Hugging Face
forwards, one unpadded row at a time. **{refused} are refused** in one sentence before the first token. {other}

*Slots* says whether the embedded generator decodes the family; where it does not, let vLLM decode it
(`--model.generator lit_grpo.rollout.vllm.VLLMGenerator`): the update is exact all the same. *Prefix* says whether a
prompt goes through the update once for its whole group; where it does not, each completion has a prompt of its own.
*Log-probs* is the largest difference in nats of a sampled or learnt token, *gradient* that of the whole gradient as a
share of its norm, *LoRA* the largest difference in nats between the policy with adapters and its export.

A family that is not in the table is judged when a run loads it, in the same way: by a few tokens that go through the
model in all the ways in which a run sends them."""
REASONS = """## Why not

The sentences that a run ends with, or, for the slots and the shared prefix, that it says."""


def newest() -> Path:
    """The newest result file."""
    return max(RESULTS.glob("architectures-*.json"))


def architectures_page(path: Path) -> str:
    """Return the page of a result file."""
    result = json.loads(path.read_text())
    return "\n".join([*_parts(result, path.stem), ""])


def _parts(result: dict[str, Any], name: str) -> Iterator[str]:
    rows = result["rows"]
    counts = {
        outcome: [row for row in rows if row["outcome"] == outcome] for outcome in ("exact", "refused", "not built")
    }
    others = [row["family"] for row in rows if row["outcome"] not in counts]
    told = f"{len(counts['not built'])} could not be built so small, or want a package that is not installed."
    if others:
        told += f" **Wrong or failing:** {', '.join(others)}."
    yield HEAD.format(
        transformers=result["versions"]["transformers"],
        result=f"`{name}`",
        exact=len(counts["exact"]),
        refused=len(counts["refused"]),
        other=told,
    )
    yield "\n## Exact\n\n| family | slots | prefix | log-probs | gradient | LoRA |\n|---|---|---|---|---|---|"
    for row in counts["exact"]:
        slots = "yes" if row["slots"] == "decode" else "no"
        prefix = "yes" if row["prefix"] == "shared" else "no"
        gap = max(value for value in (row["sampled"], row["learnt"]) if value != "")
        lora = f"{row['adapted']:.1e}" if isinstance(row["adapted"], float) else "refused"
        yield f"| `{row['family']}` | {slots} | {prefix} | {gap:.1e} | {row['gradient']:.1e} | {lora} |"
    yield f"\n{REASONS}\n\n| what | sentence | families |\n|---|---|---|"
    yield from _reasons("policy", ((row["family"], _without_name(row["detail"])) for row in counts["refused"]))
    exact = counts["exact"]
    yield from _reasons(
        "slots", ((row["family"], _without_name(row["slots"])) for row in exact if row["slots"] != "decode")
    )
    yield from _reasons("prefix", ((row["family"], row["prefix"]) for row in exact if row["prefix"] != "shared"))
    yield from _reasons(
        "LoRA", ((row["family"], _without_name(row["adapted"])) for row in exact if isinstance(row["adapted"], str))
    )
    yield from _reasons("not built", ((row["family"], _cut(row["detail"])) for row in counts["not built"]))


def _reasons(what: str, sentences: Iterator[tuple[str, str]]) -> Iterator[str]:
    families: dict[str, list[str]] = {}
    for family, sentence in sentences:
        families.setdefault(sentence, []).append(f"`{family}`")
    for sentence, names in sorted(families.items()):
        yield f"| {what} | {_cell(sentence)} | {', '.join(names)} |"


def _cell(sentence: str) -> str:
    return sentence.replace("|", "\\|").replace("<", "&lt;").replace("{", "&#123;")


def _without_name(sentence: str) -> str:
    """A sentence with MODEL for its class, so that those of several families are one."""
    return " ".join("MODEL" + word[len(word.rstrip(":.,")) :] if _is_class(word) else word for word in sentence.split())


def _is_class(word: str) -> bool:
    return word.rstrip(":.,").endswith(("ForCausalLM", "LMHeadModel", "Decoder", "WithLMHead", "ConditionalGeneration"))


def _cut(sentence: str) -> str:
    return sentence if len(sentence) < 120 else sentence[:117] + "..."


if __name__ == "__main__":
    print(architectures_page(newest()), end="")
