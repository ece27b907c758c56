"""The page docs/architectures.md, made of the newest results: ``python -m benchmarks.architectures_page``."""

from __future__ import annotations

import json
import re
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
*vLLM* says what becomes of the family there: an engine starts, all weights and buffers change, and are sent as a run
sends them (`python -m benchmarks.architectures_vllm`, {vllm_result}, in float32 on vLLM {vllm}'s CPU build, heads of
32 dimensions). Of {vllm_known} families that vLLM has a class for, **{vllm_exact} are exact**: a number is the largest
difference in nats between a sampled log-prob and that of a plain forward with the changed weights. {vllm_rounded}
*Refused* and *not here* are sentences below, said before the first token; the latter are of vLLM's CPU build or of a
package that it lacks, and may be different on a GPU. A dash: vLLM has no class of its own for the family.

*Log-probs* is the largest difference in nats of a sampled or learnt token, *gradient* that of the whole gradient as a
share of its norm, *LoRA* the largest difference in nats between the policy with adapters and its export.

A family that is not in the table is judged when a run loads it, in the same way: by a few tokens that go through the
model in all the ways in which a run sends them."""
REASONS = """## Why not

The sentences that a run ends with, or, for the slots and the shared prefix, that it says."""


def newest() -> Path:
    """The newest result file."""
    return max(RESULTS.glob("architectures-*.json"))


def newest_with_vllm() -> Path:
    """The newest result file of weights that are sent to vLLM."""
    return max(RESULTS.glob("architectures_vllm-*.json"))


def architectures_page(path: Path, path_with_vllm: Path) -> str:
    """Return the page of the two result files."""
    result, with_vllm = (json.loads(each.read_text()) for each in (path, path_with_vllm))
    return "\n".join([*_parts(result, path.stem, with_vllm, path_with_vllm.stem), ""])


def _parts(result: dict[str, Any], name: str, with_vllm: dict[str, Any], name_with_vllm: str) -> Iterator[str]:
    rows = result["rows"]
    in_vllm = {row["family"]: row for row in with_vllm["rows"]}
    outcomes = [row["outcome"] for row in in_vllm.values()]
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
        vllm=with_vllm["settings"]["vllm"],
        vllm_result=f"`{name_with_vllm}`",
        vllm_known=len(in_vllm),
        vllm_exact=outcomes.count("exact"),
        vllm_rounded=_rounded([row["family"] for row in in_vllm.values() if row["outcome"] == "rounded"]),
    )
    yield "\n## Exact\n\n| family | slots | prefix | vLLM | log-probs | gradient | LoRA |"
    yield "|---|---|---|---|---|---|---|"
    for row in counts["exact"]:
        slots = "yes" if row["slots"] == "decode" else "no"
        prefix = "yes" if row["prefix"] == "shared" else "no"
        gap = max(value for value in (row["sampled"], row["learnt"]) if value != "")
        lora = f"{row['adapted']:.1e}" if isinstance(row["adapted"], float) else "refused"
        vllm = _vllm_cell(in_vllm.get(row["family"]))
        yield f"| `{row['family']}` | {slots} | {prefix} | {vllm} | {gap:.1e} | {row['gradient']:.1e} | {lora} |"
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
    for what, outcome in (("vLLM", "refused"), ("vLLM, not here", "not run here")):
        told_of = [row for row in in_vllm.values() if row["outcome"] == outcome]
        yield from _reasons(what, ((row["family"], _cut(_of_family(row), 400)) for row in told_of))
    yield from _reasons("not built", ((row["family"], _cut(row["detail"])) for row in counts["not built"]))


def _vllm_cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return "-"
    if row["gap"] != "":
        return f"{row['gap']:.1e}"
    return "not here" if row["outcome"] == "not run here" else str(row["outcome"])


def _rounded(families: list[str]) -> str:
    if not families:
        return ""
    names = " and ".join(f"`{family}`" for family in families)
    return f"vLLM computes a part of {names} with rounding or by an approximation, with fresh weights too."


def _of_family(row: dict[str, Any]) -> str:
    """The sentence of a row, with FAMILY for its name and without the figures, which differ."""
    sentence = re.sub(rf"\b{re.escape(row['family'])}\b", "FAMILY", _without_name(row["detail"]))
    return re.sub(r"\b\d[\d.e-]* (?=nats|of their|makes)", "N ", sentence)


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


def _cut(sentence: str, length: int = 120) -> str:
    return sentence if len(sentence) < length else sentence[: length - 3] + "..."


if __name__ == "__main__":
    print(architectures_page(newest(), newest_with_vllm()), end="")
