"""The page docs/architectures.md, made of the newest results: ``python -m scripts.architectures_page``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS

HEAD = """# Architectures

This page lists the support of each causal language model in transformers {transformers}, measured on small random
models by `python -m benchmarks.architectures` (`{result}`). **{exact} families are exact**: the log-probs of sampling
and training, the gradient, the export and the export with LoRA adapters agree with plain Hugging Face forwards of one
unpadded row at a time. The largest differences are {gap:.1e} nats in a log-prob, {gradient:.1e} of the norm in a
gradient and {lora:.1e} nats in an export with adapters. **{refused} families are refused** with an error message before
the first token. {other}

- *Slots*: whether the generator `slots` decodes the family. If not, use vLLM; the update is exact.
- *Prefix*: whether the update computes a prompt once per group. If not, it computes it once per completion.
- *vLLM*: whether vLLM decodes exactly with weights that are sent to it (`python -m benchmarks.architectures_vllm`,
  `{vllm_result}`, float32, vLLM {vllm}'s CPU build). Of {vllm_known} families that vLLM has, **{vllm_exact} are
  exact**, to {vllm_gap:.1e} nats. *Not here* means that the CPU build, or a package that it lacks, cannot run the
  family; a GPU may differ. {vllm_rounded}

`nemotron_h` and `zamba2` are measured with a `time_step_min` near 0. transformers applies this lower bound of the time
step of Mamba 2 if a forward pass has several tokens, and not if it has one. With the default of 0.001, the log-probs of
sampling differ from those of training, with transformers' own cache too. The difference depends on the weights. In the
small random `nemotron_h` it is 5e-04 nats if the bias of all time steps is -12 (all are below the bound then), 7e-05
nats if it is -6, and rounding if it is -4 or more. The log-probs agree if the policy's config.json has a
`time_step_min` near 0, such as 1e-9; `sampling/logprob_gap_mean` shows the difference of a run.

A family that is not in the table is tested in the same way, on a few tokens, when a run loads it."""
REASON_WORDS = {
    r"depends on those that follow it": "a token's hidden state depends on those that follow it",
    r"not its output embedding applied": "its logits are not its output embedding applied to its last hidden state",
    r"names no longest sequence": "its config has no max length; add max_position_embeddings",
    r"holds no usable model": "transformers has no causal language model of its config",
    r"a forward over tok": "a forward over tokens fails",
    r"attention cannot be replaced": "its attention cannot be replaced",
    r"experts without the bias": "experts are chosen without the bias of their router, on a CPU",
    r"keeps old weights": "keeps old experts and attention sinks when new weights are sent",
    r"layers with a sliding window": "its sliding window is one token longer; set max_model_len to the window at most",
    r"ignores position_ids": "its forward pass ignores `position_ids`",
    r"layers remember more than keys and values": "its layers have state beyond a KV cache",
    r"hidden states come out [\d.]+% off": "its layers have state beyond a KV cache",
    r"peft gives MODEL no adapters for": "peft has no adapters for `all-linear`; name other layers",
    r"have one weight, so their two adapters": "several layers have one weight; name other layers",
    r"parameters of vLLM's model got no weight": "vLLM's model has parameters that the policy lacks",
    r"log-probs that vLLM's engine gives": "vLLM computes it differently",
    r"could not start an engine": "the engine does not start",
    r"could not (?:score given tokens|load the policy's weights)": "the engine fails",
}
"""The short form of a reason, by what its sentence holds; a sentence without one is cut."""


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
    counts = {kind: [row for row in rows if row["outcome"] == kind] for kind in ("exact", "refused", "not built")}
    exact = counts["exact"]
    yield _head(result, name, with_vllm, name_with_vllm, counts)
    yield "\n## Exact\n\n| slots | prefix | vLLM | families |\n|---|---|---|---|"
    kinds: dict[tuple[str, str, str], list[str]] = {}
    for row in exact:
        kind = (
            _yes(row["slots"] == "decode"),
            _yes(row["prefix"] == "shared"),
            vllm_outcome(in_vllm.get(row["family"])),
        )
        kinds.setdefault(kind, []).append(row["family"])
    for kind in sorted(kinds, reverse=True):
        yield f"| {' | '.join(kind)} | {_names(kinds[kind])} |"
    yield "\n## Reasons\n\nThe error message of a run has each reason in full, with the remedy.\n"
    yield "| not supported | reason | families |\n|---|---|---|"
    yield from _reasons("policy", ((row["family"], row["detail"]) for row in counts["refused"]))
    slots = ((row["family"], row["slots"]) for row in exact if row["slots"] != "decode")
    yield from _reasons("slots, and so prefix", slots)
    prefix = (row for row in exact if row["prefix"] != "shared" and row["slots"] == "decode")
    yield from _reasons("prefix", ((row["family"], row["prefix"]) for row in prefix))
    yield from _reasons("LoRA", ((row["family"], row["adapted"]) for row in exact if isinstance(row["adapted"], str)))
    for what, outcome in (("vLLM", "refused"), ("vLLM, not here", "not run here")):
        told_of = [row for row in in_vllm.values() if row["outcome"] == outcome]
        yield from _reasons(what, ((row["family"], row["detail"]) for row in told_of))
    not_built = _names(row["family"] for row in counts["not built"])
    yield f"| not built | too small, or a package is not installed | {not_built} |"


def _head(
    result: dict[str, Any],
    name: str,
    with_vllm: dict[str, Any],
    name_with_vllm: str,
    counts: dict[str, list[dict[str, Any]]],
) -> str:
    others = [row["family"] for row in result["rows"] if row["outcome"] not in counts]
    told = f"{len(counts['not built'])} could not be built that small, or need a package that is not installed."
    if others:
        told += f" **Wrong or failing:** {', '.join(others)}."
    exact, exact_in_vllm = counts["exact"], [row for row in with_vllm["rows"] if row["outcome"] == "exact"]
    return HEAD.format(
        transformers=result["versions"]["transformers"],
        result=name,
        exact=len(exact),
        refused=len(counts["refused"]),
        other=told,
        gap=max(row[each] for row in exact for each in ("sampled", "trained") if row[each] != ""),
        gradient=max(row["gradient"] for row in exact),
        lora=max(row["adapted"] for row in exact if isinstance(row["adapted"], float)),
        vllm=with_vllm["settings"]["vllm"],
        vllm_result=name_with_vllm,
        vllm_known=len(with_vllm["rows"]),
        vllm_exact=len(exact_in_vllm),
        vllm_gap=max(row["gap"] for row in exact_in_vllm if row["gap"] != ""),
        vllm_rounded=_rounded([row for row in with_vllm["rows"] if row["outcome"] == "rounded"]),
    )


def _yes(holds: bool) -> str:
    return "yes" if holds else "no"


def vllm_outcome(row: dict[str, Any] | None) -> str:
    """The cell of a family's row in the results of vLLM; None is a family that vLLM has no class of."""
    if row is None:
        return "no class"
    return "not here" if row["outcome"] == "not run here" else str(row["outcome"])


def _rounded(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return ""
    named = " and ".join(f"`{row['family']}` ({row['gap']:.1e} nats)" for row in rows)
    return f"It computes a part of {named} with rounding or by an approximation."


def _reasons(what: str, sentences: Iterator[tuple[str, str]]) -> Iterator[str]:
    families: dict[str, list[str]] = {}
    for family, sentence in sentences:
        families.setdefault(_reason(family, sentence), []).append(family)
    yield from (f"| {what} | {_cell(reason)} | {_names(names)} |" for reason, names in sorted(families.items()))


def _reason(family: str, sentence: str) -> str:
    """The short form of a sentence, without names of classes, so that those of several families are one."""
    plain = re.sub(rf"\b{re.escape(family)}\b", "it", _without_name(sentence))
    plain = re.sub(r"^SlotGenerator cannot decode MODEL: |; let vLLM decode it.*", "", plain)
    return next((short for found, short in REASON_WORDS.items() if re.search(found, plain)), _cut(plain))


def _names(families: Iterable[str]) -> str:
    return ", ".join(families)


def _cell(sentence: str) -> str:
    return sentence.replace("|", "\\|").replace("<", "&lt;").replace("{", "&#123;")


def _without_name(sentence: str) -> str:
    """A sentence with MODEL for its class, so that those of several families are one."""
    return " ".join("MODEL" + word[len(word.rstrip(":.,")) :] if _is_class(word) else word for word in sentence.split())


def _is_class(word: str) -> bool:
    return word.rstrip(":.,").endswith(("ForCausalLM", "LMHeadModel", "Decoder", "WithLMHead", "ConditionalGeneration"))


def _cut(sentence: str, length: int = 150) -> str:
    return sentence if len(sentence) < length else sentence[: length - 3] + "..."


if __name__ == "__main__":
    print(architectures_page(newest(), newest_with_vllm()), end="")
