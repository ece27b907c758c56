"""The Modelfile that Ollama makes a model from: a GGUF file, its chat template in Go's language, and end tokens."""

from __future__ import annotations

from collections.abc import Sequence
from os.path import commonprefix
from pathlib import Path
from typing import TYPE_CHECKING

from lit_grpo.data.chat import EndlessTemplate, Message, UnusableRow, render_chat
from lit_grpo.policy.loading import load_tokenizer
from lit_grpo.tools.finishing.vocabulary import CONVERSATIONS, Vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NO_TEMPLATE = (
    "# There is no TEMPLATE, because no text in Go's template language was found to equal the chat template. Ollama\n"
    "# takes the most similar one that it has. Compare a conversation with the tokenizer's before you rely on it."
)


def write_modelfile(path: Path, weights: Sequence[str], folder: Path, vocabulary: Vocabulary) -> None:
    """Write a Modelfile: the lines that name its ``weights``, then the template and the end tokens of a policy."""
    tokenizer = load_tokenizer(str(folder))
    template = go_template(tokenizer, vocabulary) if vocabulary.has_chat else "{{ .Prompt }}"
    stops = [vocabulary.tokens[row] for kind, row in vocabulary.ids.items() if kind in ("eos", "eot", "eom")]
    lines = [*weights, NO_TEMPLATE if template is None else f'TEMPLATE """{template}"""']
    lines += [f'PARAMETER stop "{stop}"' for stop in stops if stop.isprintable() and '"' not in stop]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def go_template(tokenizer: PreTrainedTokenizerBase, vocabulary: Vocabulary) -> str | None:
    """Return the chat template in Go's language with Ollama's variables; None if none is found that equals it.

    The texts around messages are read off two conversations. The template is returned if other conversations, put
    together of these texts, are what the tokenizer makes of them. It lacks the BOS token, which Ollama adds itself.
    """
    begin = vocabulary.tokens[vocabulary.ids["bos"]] if vocabulary.adds.get("bos") else ""
    roles = {"SYSTEM0": "system", "USER1": "user", "ASSISTANT2": "assistant", "USER3": "user"}
    chat: list[Message] = [{"role": role, "content": text} for text, role in roles.items()]
    try:
        first, to_user, from_user, from_assistant, last = _around(chat, tokenizer, begin)
        alone, _ = _around(chat[1:2], tokenizer, begin)
        user = commonprefix([one[::-1] for one in (alone, to_user, from_assistant)])[::-1]  # noqa: RUF071
        user_end = commonprefix([from_user, last])  # noqa: RUF071  # letters are compared, not folders
        default, answer = alone.removesuffix(user), last.removeprefix(user_end)
        around = {
            "system": (first, to_user.removesuffix(user)),
            "user": (user, user_end),
            "assistant": (from_user.removeprefix(user_end), from_assistant.removesuffix(user)),
        }
        for messages in CONVERSATIONS:
            texts = [one["content"].join(around[one["role"]]) for one in messages]
            start = begin if messages[0]["role"] == "system" else begin + default
            if start + "".join(texts) + answer != render_chat(messages, tokenizer, {}):
                return None
    except (UnusableRow, EndlessTemplate, ValueError):  # the last: a message is missing
        return None
    if set('{}"') & set("".join([default, answer, *map("".join, around.values())])):
        return None  # which mean something in Go's language, or end the Modelfile's quotation
    cases = [f'if eq .Role "{role}" }}}}{"{{ .Content }}".join(pair)}' for role, pair in around.items()]
    return (
        f"{{{{ if not .System }}}}{default}{{{{ end }}}}" if default else ""
    ) + f"{{{{ range .Messages }}}}{{{{ {'{{ else '.join(cases)}{{{{ end }}}}{{{{ end }}}}{answer}"


def _around(messages: list[Message], tokenizer: PreTrainedTokenizerBase, begin: str) -> list[str]:
    """Return the texts before, between and after the messages of a conversation.

    Raises:
        ValueError: The chat template leaves a message out, or shows it twice.
    """
    left, found = render_chat(messages, tokenizer, {}).removeprefix(begin), list[str]()
    for message in messages:
        before, left = left.split(message["content"])
        found.append(before)
    return [*found, left]
