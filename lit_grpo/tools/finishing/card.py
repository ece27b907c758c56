"""The model card of a finished run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from huggingface_hub import ModelCardData

from lit_grpo import __version__
from lit_grpo.process.terminal import code_span, fenced, markdown, shell, visible
from lit_grpo.tools.dashboard.report.folder import RunRecords
from lit_grpo.tools.finishing import record
from lit_grpo.tools.finishing.comparison import Cost
from lit_grpo.tools.finishing.origin import HUB_ID, Origin

MAX_CHARACTERS = 1_000
"""Of a prompt or a completion that the card shows."""


@dataclass(frozen=True)
class Contents:
    """Contents of a finished folder.

    Args:
        name: Name of the model.
        version: The update of its policy.
        checkpoint: Checkpoint that was finished: ``best`` or ``last``.
        num_weights: Number of the policy's weights.
        adapter_for: Programs that the folder ``adapter`` has the adapter alone for; empty without an adapter.
        has_picture: Whether there is a picture of the curves.
        gguf: The GGUF files by their kinds: name, size in bytes, and the comparison with the policy.
        has_chat: Whether llama.cpp renders conversations by the GGUF files.
        left_out: What GGUF files and their readers do in another way than the policy, a sentence each.
        place: What ``from_pretrained`` takes: the repository on the hub, or the folder that holds the card.
        tokenizer_class: The class of transformers that loads the tokenizer as its file describes it.
        model_class: The class of transformers that loads the model.
        num_carried: Number of tensors of multi-token prediction, which are the base's.
    """

    name: str
    version: int
    checkpoint: str
    num_weights: int
    adapter_for: Sequence[str]
    has_picture: bool
    gguf: Mapping[str, tuple[str, int, Cost]]
    has_chat: bool = False
    left_out: Sequence[str] = ()
    place: str = "."
    tokenizer_class: str = "AutoTokenizer"
    model_class: str = "AutoModelForCausalLM"
    num_carried: int = 0


def write_card(run: RunRecords, origin: Origin, contents: Contents) -> str:
    """Return the card: metadata as the hub reads them, and a text."""
    data = run.config.get("data") or {}
    told = data.get("train")
    told = (told.get("init_args") or {}).get("path") if isinstance(told, dict) else told
    license = origin.metadata
    metadata = ModelCardData(
        license=license["license"],
        license_name=license.get("license_name"),
        license_link=license.get("license_link"),
        base_model=origin.hub_id,
        base_model_relation=None if origin.hub_id is None else "finetune",
        datasets=[told] if isinstance(told, str) and HUB_ID.fullmatch(told) else None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["lit_grpo", _method(run), "reinforcement-learning" if _method(run) == "grpo" else "fine-tuned"],
    )
    parts = [
        f"# {markdown(contents.name)}",
        _about(run, origin, contents),
        _result(run, contents),
        _use(contents),
        "## Training",
        _table(
            ("", ""), _as_text([*record.data(run), *[(f"Reward {name}", text) for name, text in record.rewards(run)]])
        ),
        _table(("Setting", ""), _as_text(record.settings(run))),
        _samples(run, contents.version),
        _files(contents),
        _limits(run, origin, contents),
    ]
    return f"---\n{metadata.to_yaml()}\n---\n\n" + "\n\n".join(part for part in parts if part) + "\n"


def _method(run: RunRecords) -> str:
    return "grpo" if "reward" in run.columns or "ce/loss" not in run.columns else "sft"


def _about(run: RunRecords, origin: Origin, contents: Contents) -> str:
    base = f"[{origin.hub_id}](https://huggingface.co/{origin.hub_id})" if origin.hub_id else code_span(origin.name)
    how = "GRPO" if _method(run) == "grpo" else "supervised fine-tuning"
    which = "the checkpoint with the best held-out score" if contents.checkpoint == "best" else "its last checkpoint"
    lora = " with LoRA, merged into the base's weights here," if contents.adapter_for else ""
    return (
        f"{base} trained{lora} by {how} with lit_grpo {__version__} for {contents.version:,} updates. It has "
        f"{contents.num_weights:,} weights. The policy is that of {which}."
    )


def _result(run: RunRecords, contents: Contents) -> str:
    found = record.progress(run, contents.version)
    lines = [
        "## Result",
        "The run is too short to say whether the policy became better." if found is None else str(found),
    ]
    if found is not None and found.how:
        intervals = " Intervals are Wilson's, over rows." if found.rows is not None else ""
        lines.append(f"Measured on: {found.how[0].lower()}{found.how[1:]}{intervals}")
    if contents.checkpoint == "best":
        lines.append("The checkpoint was chosen by this held-out score, so the score is optimistic.")
    if contents.has_picture:
        lines.append("![Curves of the run](curves.png)")
    facts = [(name, value) for name, value in record.facts(run) if name != "Policy"]
    return "\n\n".join([*lines, _table(("The whole run", ""), _as_text(facts))])


def _use(contents: Contents) -> str:
    code = (
        f"from transformers import {contents.model_class}, {contents.tokenizer_class}",
        "",
        f'model = {contents.model_class}.from_pretrained("{contents.place}")',
        f'tokenizer = {contents.tokenizer_class}.from_pretrained("{contents.place}")',
    )
    lines = ["## Use", fenced("\n".join(code), "python")]
    if contents.gguf:
        name = shell(next(iter(contents.gguf.values()))[0])
        if contents.has_chat:
            lines += ["With llama.cpp, a conversation:", fenced(f"llama-cli -m {name}", "bash")]
        else:
            about = "With llama.cpp, a completion of a text (the file has no chat template that llama.cpp takes):"
            lines += [about, fenced(f"llama-completion -m {name} -no-cnv -p 'Once upon a time'", "bash")]
        lines += ["With Ollama:", fenced(f"ollama create {shell(contents.name)} -f Modelfile", "bash")]
    return "\n\n".join(lines)


def _samples(run: RunRecords, version: int) -> str:
    of_validation = record.validated(run, version)
    lines = []
    for step, rows in of_validation or record.sampled(run, version):
        lines.append(f"### At update {step:,}")
        for row in rows:
            reward = row.get("reward")
            lines.append(f"Reward {reward:.3g}:" if isinstance(reward, int | float) else "Without a reward:")
            lines += [fenced(_shortened(row.get("prompt"))), fenced(_shortened(row.get("completion")))]
    if not lines:
        return ""
    about = (
        "Completions of held-out prompts: the best and the worst of those that the run has kept of its last "
        "validation, and those of the first validation to the same prompts. Each time a prompt, then its completion."
        if of_validation
        else "Completions that were sampled in training, the best and the worst of those that the run has kept: each "
        "time a prompt, then its completion. The first ones are of the policy before its first update."
    )
    return "\n\n".join(["## Samples", about, *lines])


def _files(contents: Contents) -> str:
    rows = [("`model*.safetensors`, `config.json`, tokenizer", "the policy, for transformers and vLLM")]
    if contents.adapter_for:
        rows.append(("`adapter/`", f"the LoRA adapter alone, for {' and '.join(contents.adapter_for)}"))
    for kind, (name, size, cost) in contents.gguf.items():
        rows.append((code_span(name), f"for llama.cpp, {kind}, {size / 1e6:,.1f} MB; {cost_sentence(cost)}"))
    if contents.gguf:
        rows.append(("`Modelfile`", "for Ollama"))
    return "\n\n".join(["## Files", _table(("File", "Content"), rows)])


def cost_sentence(cost: Cost) -> str:
    """Say what a GGUF file costs."""
    if not cost.num_tokens:
        parts = ["not compared with the policy for want of memory"]
    else:
        parts = [
            f"its log-probs differ from the policy's by {cost.mean:.2g} nats per token on average and {cost.most:.2g} "
            f"at most ({cost.num_tokens:,} tokens)"
        ]
    if cost.num_apart:
        parts.append(f"transformers' reader splits {cost.num_apart} of {cost.num_texts} texts into other tokens")
    return "; ".join(parts)


def carried_sentence(num_carried: int, has_gguf: bool) -> str:
    """Say what becomes of tensors of multi-token prediction."""
    without = "; the GGUF files are without them" if has_gguf else ""
    return (
        f"{num_carried} tensors of multi-token prediction are the base's: they were not trained, so speculative "
        f"decoding accepts fewer of their drafts than before{without}."
    )


def _limits(run: RunRecords, origin: Origin, contents: Contents) -> str:
    lines = []
    if origin.license:
        told = origin.license.get("license_name") or origin.license["license"]
        lines.append(
            f"The license is {markdown(told)} ({origin.source}). Licenses of data and other parts are not checked."
        )
    else:
        lines.append(
            "**The license of the base model is not known**, so it is not known whether this model may be used or "
            "passed on. Ask those who made the base."
        )
    if _method(run) == "grpo":
        lines.append(
            "The policy was trained to raise the reward functions above on the prompts above. They measure nothing "
            "else: other abilities, safety and truthfulness were not tested, and may have become worse."
        )
    else:
        lines.append("The policy imitates its examples. Nothing else was tested.")
    if not any(name.startswith("val/") for name in run.columns):
        lines.append("The run had no held-out prompts, so nothing is known of prompts that it was not trained on.")
    if contents.num_carried:
        lines.append(carried_sentence(contents.num_carried, bool(contents.gguf)))
    if any(kind != "f32" for kind in contents.gguf):
        lines.append("GGUF files other than f32 hold rounded weights; the table of files says what rounding changes.")
    lines += [f"GGUF: {markdown(sentence)}" for sentence in contents.left_out]
    return "\n".join(["## Limits", "", *[f"- {line}" for line in lines]])


def _as_text(rows: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(markdown(name), markdown(value)) for name, value in rows]


def _table(head: tuple[str, str], rows: Sequence[tuple[str, str]]) -> str:
    """Return a table of two columns; empty without rows."""
    lines = [f"| {name} | {value} |" for name, value in rows]
    return "\n".join([f"| {head[0]} | {head[1]} |", "|---|---|", *lines]) if lines else ""


def _shortened(text: Any) -> str:
    told = visible("" if text is None else str(text))
    return told if len(told) <= MAX_CHARACTERS else f"{told[:MAX_CHARACTERS]} ..."
