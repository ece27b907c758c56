"""Checks that prompts are rendered as the policy expects them."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lit_grpo.data.overlap import REMEDY, shared_validation
from lit_grpo.display.pictures import data_url
from lit_grpo.policy.architecture.vision import open_image, sees, vision_of
from lit_grpo.policy.loading import embeddings
from lit_grpo.policy.named import is_packaged
from lit_grpo.policy.spec import eos_token_ids
from lit_grpo.process.files import replace_file
from lit_grpo.process.terminal import counted, html_text, on_one_line
from lit_grpo.tools.doctor.patient import Patient
from lit_grpo.tools.doctor.report import WIDTH, CheckResult
from lit_grpo.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NUM_SHOWN = 3
SHARED_SHOWN = 8  # characters shown of the beginning that all prompts share
QUOTE_WIDTH = WIDTH - 5  # columns without the margin of a quote
MOST_SHOWN = 512  # pixels of an image's longer side on the page
PAGE = (
    '<!doctype html><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
    "style-src 'unsafe-inline'; img-src data:\"><title>Prompts</title><style>pre{white-space:pre-wrap}</style>"
)
_MARKER = re.compile(r"<\|[^|<>\s]{1,40}\|>|<[a-z]+_of_[a-z]+>|\[/?INST\]|</?s>")
_NUM_TOKENS = 64  # of a prompt, for its likelihood
_NUM_SHUFFLES = 4
_LIKELIER = 0.9  # the surprise of a prompt must be below this share of that of its tokens in another order


def check_prompts(patient: Patient) -> Iterator[CheckResult]:
    """Show a few prompts, and check how they begin and end."""
    prompts, tokenizer = patient.prompts, patient.module.tokenizer
    lengths = [len(prompt.token_ids) for prompt in prompts]
    yield CheckResult("pass", "prompts", f"{len(prompts)} of {min(lengths)} to {max(lengths)} tokens")
    shown = [str(tokenizer.decode(list(prompt.token_ids), skip_special_tokens=False)) for prompt in prompts[:NUM_SHOWN]]
    if sees(patient.module.policy):
        mark = str(tokenizer.decode([vision_of(patient.module.policy).feature_token]))
        runs = re.compile(f"(?:{re.escape(mark)}){{2,}}")
        shown = [runs.sub(lambda run: f"[{len(run[0]) // len(mark)} x {mark}]", text) for text in shown]
        yield _images(patient, prompts[:NUM_SHOWN], shown)
    for text in differing_parts([on_one_line(text) for text in shown]):
        patient.report.quote(text)
    if shared := shared_validation(patient.data.prompts):
        yield CheckResult("warn", "validation", shared, f"pass@1 tells nothing of new prompts; {REMEDY}")
    elif patient.data.prompts.get("validation"):
        yield CheckResult("pass", "validation", "prompts that are not trained on")
    yield from _chat(patient, prompts)
    bos, ends = tokenizer.bos_token_id, eos_token_ids(patient.module.policy, tokenizer)
    if bos is not None and any(prompt.token_ids[:2] == (bos, bos) for prompt in prompts):
        yield CheckResult(
            "fail", "prompt begins", f"twice with {tokenizer.bos_token}", "take it out of the data or the template"
        )
    if any(prompt.token_ids[-1] in ends for prompt in prompts):
        yield CheckResult(
            "fail", "prompt ends", "in a token that ends completions", "correct the chat template, or the data"
        )


def _images(patient: Patient, prompts: Sequence[Prompt], texts: Sequence[str]) -> CheckResult:
    """Write a page of the first prompts with their images as the policy gets them; say what each image takes."""
    vision, parts, taken = vision_of(patient.module.policy), [PAGE], list[int]()
    for prompt, text in zip(prompts, texts, strict=True):
        parts.append(f"<h2>{html_text(prompt.prompt_id)}</h2>")
        for data in () if prompt.pictures is None else prompt.pictures.images:
            image = open_image(data)
            taken.append(len(vision.tokens_of(data)))
            size = f"{image.width} x {image.height} pixels, {counted(taken[-1], 'token')}"
            image.thumbnail((MOST_SHOWN, MOST_SHOWN))
            parts.append(f'<figure><img src="{data_url(image)}" alt=""><figcaption>{size}</figcaption></figure>')
        parts.append(f"<pre>{html_text(text)}</pre>")
    path = Path(patient.trainer.default_root_dir).parent / "doctor-prompts.html"
    replace_file(path, "\n".join(parts).encode("utf-8", "backslashreplace"))
    each = f"{min(taken)} to {max(taken)} tokens an image; " if taken else "none in the first prompts; "
    return CheckResult("pass", "images", f"{each}the first {len(prompts)} prompts are in {path}")


def differing_parts(texts: Sequence[str], width: int = QUOTE_WIDTH) -> list[str]:
    """Quote texts within a width; shorten long ones at the beginning that all texts share, and in the middle.

    All prompts may begin with one system prompt, while the question and the generation prompt are at the end.
    """
    begin = _common(texts) if len(texts) > 1 else 0
    quotes = []
    for text in texts:
        room = width - len('""')
        if len(text) > room:
            text = "…" + text[max(begin - SHARED_SHOWN, 0) :] if begin > SHARED_SHOWN + 1 else text
        if len(text) > room:
            half = (room - len(" … ")) // 2
            text = f"{text[:half]} … {text[-(room - len(' … ') - half) :]}"
        quotes.append(f'"{text}"')
    return quotes


def _common(texts: Sequence[str]) -> int:
    """Count the characters of the beginning that all texts share."""
    least, greatest = min(texts), max(texts)
    pairs = enumerate(zip(least, greatest, strict=False))
    return next((place for place, (one, other) in pairs if one != other), len(least))


def _chat(patient: Patient, prompts: Sequence[Prompt]) -> Iterator[CheckResult]:
    tokenizer, renderer = patient.module.tokenizer, patient.data.renderer
    is_chat = renderer.chat_template or (
        renderer.chat_template is None
        and (renderer.system_prompt is not None or any(prompt.messages is not None for prompt in prompts))
    )
    if not is_chat and tokenizer.chat_template is not None:
        yield CheckResult(
            "warn",
            "chat template",
            "the tokenizer has one, and prompts do not use it",
            "set data.chat_template to true, unless the policy is to continue plain text",
        )
    elif not is_chat:
        yield CheckResult("pass", "chat template", "none, and none is asked for: plain text")
    else:
        yield _template(patient, prompts[0])


def _template(patient: Patient, prompt: Prompt) -> CheckResult:
    """Check how the template renders a message with known text."""
    tokenizer, said = patient.module.tokenizer, "lorem 42"
    options = patient.data.renderer.chat_template_kwargs or {}
    with_end, without = (_render(tokenizer, said, end, options) for end in (True, False))
    name, remedy = "chat template", "give the policy's own tokenizer, with its template"
    if said not in with_end:
        return CheckResult("fail", name, "leaves out what the user says", remedy)
    markers = dict.fromkeys(_MARKER.findall(with_end))
    split = {marker: _num_tokens(tokenizer, marker) for marker in markers}
    if wrong := next((marker for marker in split if split[marker] != 1), None):
        return CheckResult(
            "fail", name, f"{wrong} becomes {split[wrong]} tokens, because it is another model's", remedy
        )
    if not with_end.startswith(without) or with_end == without:
        return CheckResult("fail", name, "adds nothing to ask for an answer (add_generation_prompt)", remedy)
    ending = with_end[len(without) :]
    text = str(tokenizer.decode(list(prompt.token_ids), skip_special_tokens=False))
    renderer = patient.data.renderer
    goes_on = renderer.continue_final_message or renderer.adds(prompt.columns)  # to be gone on with
    if not text.rstrip().endswith(ending.rstrip()) and not goes_on:
        return CheckResult("fail", name, "prompts do not end in the generation prompt", remedy)
    return CheckResult("pass", name, f'ends in "{on_one_line(ending)}"')


def _render(tokenizer: PreTrainedTokenizerBase, said: str, ends: bool, options: dict[str, Any]) -> str:
    message = [{"role": "user", "content": said}]
    return str(tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=ends, **options))


def _num_tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    return len(tokenizer(text, add_special_tokens=False)["input_ids"])


def check_tokenizer(patient: Patient) -> Iterator[CheckResult]:
    """Check that the tokenizer is the policy's, by its size, special tokens, a round trip and a likelihood."""
    module, tokenizer = patient.module, patient.module.tokenizer
    num_rows = min(len(weight) for weight in embeddings(module.policy))
    largest, remedy = max(tokenizer.get_vocab().values()), "take the tokenizer that the policy was trained with"
    ends = eos_token_ids(module.policy, tokenizer)
    figure = f"{len(tokenizer)} tokens for {num_rows} rows of embeddings"
    configured = module.policy.config.get_text_config().eos_token_id
    configured = [configured] if isinstance(configured, int) else configured or []
    unknown = [end for end in configured if end not in tokenizer.all_special_ids]
    if max(largest, *ends) >= num_rows:
        yield CheckResult("fail", "tokenizer", figure, remedy)
    elif len(tokenizer) < 0.9 * num_rows:
        yield CheckResult("warn", "tokenizer", figure, remedy)
    elif unknown:
        yield CheckResult("warn", "tokenizer", f"the policy ends with {unknown}, which is no special token", remedy)
    else:
        yield CheckResult("pass", "tokenizer", figure)
    yield _there_and_back(patient)
    yield _likelihood(patient)


def _there_and_back(patient: Patient) -> CheckResult:
    tokenizer = patient.module.tokenizer
    for prompt in patient.prompts[:100]:
        text = tokenizer.decode(list(prompt.token_ids), skip_special_tokens=False)
        if tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) != prompt.token_ids:
            return CheckResult(
                "warn",
                "round trip",
                f"{prompt.prompt_id} as text and back gives other tokens",
                "no harm to training, which never turns text back into tokens; check that the prompt above reads well",
            )
    return CheckResult("pass", "round trip", "prompts as text and back are the same tokens")


def _likelihood(patient: Patient) -> CheckResult:
    """Compare how much prompts surprise the policy with how much their tokens in another order do.

    A policy of the package has never been trained to predict prompts, and always has its own tokenizer.
    """
    if is_packaged(patient.module.policy_name):
        return CheckResult("pass", "likelihood", "not needed: the policy and its tokenizer come with the package")
    rng = random.Random(0)
    rows = [prompt.token_ids[-_NUM_TOKENS:] for prompt in patient.prompts[:16] if len(prompt.token_ids) > 2]
    own = _surprise(patient, rows)
    others = [_surprise(patient, [rng.sample(row, len(row)) for row in rows]) for _ in range(_NUM_SHUFFLES)]
    shuffled = sum(others) / _NUM_SHUFFLES
    figure = f"{own:.1f} nats a token of the prompts, {shuffled:.1f} of the same in another order"
    if rows and not own < _LIKELIER * shuffled:
        return CheckResult(
            "warn",
            "likelihood",
            figure,
            "the tokenizer is another model's, unless the policy has never learned to predict prompts",
        )
    return CheckResult("pass", "likelihood", figure)


@torch.no_grad()
def _surprise(patient: Patient, rows: Sequence[Sequence[int]]) -> float:
    """Return the policy's mean negative log-prob of all tokens except each row's first, in nats."""
    policy, total, count = patient.module.policy, 0.0, 0
    for row in rows:
        ids_BT = torch.tensor([list(row)], device=patient.device)
        with patient.computing():
            logits_TV = policy(input_ids=ids_BT, use_cache=False).logits[0, :-1].float()
        total += float(torch.nn.functional.cross_entropy(logits_TV, ids_BT[0, 1:], reduction="sum"))
        count += len(row) - 1
    return total / max(count, 1)
