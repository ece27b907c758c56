"""Tokens trained on are the tokens sampled, whatever templates make of conversations; templates."""

from __future__ import annotations

import copy

import pytest
from conftest import table_rows

from lit_grpo.data.rendering import PromptRenderer
from lit_grpo.environments import Environments
from lit_grpo.environments.chat import Chat
from lit_grpo.environments.tools import Tool
from lit_grpo.plugins import fresh
from lit_grpo.types import Prompt
from tests.doubles.conversation_check import NUM_CONVERSATIONS, check, wrong
from tests.doubles.conversations import CHATML, FAMILIES, GENERATORS, Talkative, chat_tokenizer, play, template_of

FEW = ("smollm2", 4)


@pytest.mark.parametrize(
    ("family", "number"), table_rows([*((family, NUM_CONVERSATIONS) for family in FAMILIES), FEW], quick=[FEW])
)
def test_tokens_trained_on_are_tokens_sampled_in_random_conversations(family: str, number: int) -> None:
    """Each is what a float64 forward of the whole gives; observed ones have no gradient and are in no number."""
    if template_of(family) is None:
        pytest.skip("TRL, whose wheel has the templates, is not installed")
    assert wrong(check(play(family, GENERATORS["slots"], number)), "slots") == []


# ---- templates ----------------------------------------------------------------------------------------


def turn_right(degrees: int, quickly: bool = False, what: str = "") -> str:
    """Turn.

    Args:
        degrees: How far.
        quickly: Whether at once.
        what: Which thing.
    """
    return ""


SCHEMAS = [Tool.of(turn_right).schema]


@pytest.mark.parametrize(
    ("family", "told"),
    [("qwen2_5", 0), ("llama3_1", 0), ("qwen3", 1), ("smollm2", 1), ("qwen3_training", 0), ("qwen3_8", 0)],
)
def test_templates_are_tried_before_anything_is_sampled(family: str, told: int) -> None:
    template = template_of(family)
    if template is None:
        pytest.skip("TRL is not installed")
    chat = Chat(chat_tokenizer(template, FAMILIES.get(family, "<|im_end|>")))
    assert len(chat.check(SCHEMAS, calls=True, responds=True)) == told


def test_a_template_that_rewrites_earlier_turns_is_told_of() -> None:
    if (template := template_of("qwen3")) is None:
        pytest.skip("TRL is not installed")
    (told,) = Chat(chat_tokenizer(template)).check(SCHEMAS, calls=False, responds=True)
    assert "differently after a user's answer and a user's answer to a turn with reasoning" in told


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "need a chat template, but the policy's tokenizer has none"),
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}", "ends an assistant's turn with no special token"),
        (
            "{% if messages[-1].role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}" + CHATML,
            "cannot show a tool's answer: the conversation is refused by the chat template: no tools",
        ),
        (
            CHATML.replace("{% if message.content %}", "{% if message.content and message.role != 'tool' %}"),
            "does not show a tool",
        ),
    ],
)
def test_templates_that_cannot_go_on_are_refused(template: str | None, message: str) -> None:
    tokenizer = copy.deepcopy(chat_tokenizer())
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match=message):
        Chat(tokenizer).check(SCHEMAS, calls=True, responds=True)


def test_a_turn_that_does_not_end_with_its_token_gets_it() -> None:
    chat = Chat(chat_tokenizer())
    answer = [{"role": "user", "content": "hi"}]
    ended, end = chat.following(answer, chat_tokenizer().eos_token_id), chat_tokenizer().eos_token_id
    assert chat.following(answer, 65) == [end, *ended]


@pytest.mark.parametrize("family", FAMILIES)
def test_what_follows_a_turn_is_what_the_template_writes_there(family: str) -> None:
    """For templates that only add, rendering a conversation whole gives the same tokens as piece by piece."""
    if (template := template_of(family)) is None:
        pytest.skip("TRL is not installed")
    tokenizer = chat_tokenizer(template, FAMILIES[family])
    chat = Chat(tokenizer)
    turns = [{"role": "user", "content": "Go."}, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes."}]
    render = lambda messages, goes_on: tokenizer.apply_chat_template(  # noqa: E731
        messages, add_generation_prompt=goes_on, return_dict=False
    )
    answers = [{"role": "user", "content": "the answer"}]
    if family == "qwen3":  # which takes reasoning out where the user answers
        answers = [{"role": "tool", "name": "f", "content": "the answer"}]
    before = render(turns, False)
    before = before[: len(before) - before[::-1].index(tokenizer.eos_token_id)]
    assert [*before, *chat.following(answers, before[-1])] == render([*turns, *answers], True)


def test_completions_of_a_group_share_the_prompt_up_to_what_an_environment_says() -> None:
    worker = fresh(Environments(factory=Talkative))
    worker.prepare(chat_tokenizer(), {})
    rendered = PromptRenderer(conversing=worker).render({"prompt": "Talk.", "seed": 1}, chat_tokenizer())
    assert rendered.text == "<|im_start|>user\nTalk.<|im_end|>\n<|im_start|>assistant\n"
    prompt = Prompt("a", rendered.token_ids, rendered.text, messages=rendered.messages)
    shown = chat_tokenizer().decode(rendered.token_ids)
    assert rendered.text.startswith(shown) and not shown.endswith("<|im_end|>")
    for said in ("", " More.", ".", "\n\n", "x"):
        opening = Chat(chat_tokenizer()).opening(prompt, said, [])
        whole = f"<|im_start|>user\nTalk.{said}<|im_end|>\n<|im_start|>assistant\n"
        assert [*rendered.token_ids, *opening] == chat_tokenizer()(whole)["input_ids"]
    worker.close()


@pytest.mark.parametrize("row", [{}, {"prompt": None}, {"prompt": ""}], ids=["absent", "null", "empty"])
def test_a_row_needs_no_prompt_where_an_environment_begins_the_conversation(row: dict[str, str | None]) -> None:
    worker = fresh(Environments(factory=Talkative))
    worker.prepare(chat_tokenizer(), {})
    rendered = PromptRenderer(conversing=worker).render({**row, "seed": 1}, chat_tokenizer())
    assert rendered.text == "<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n"
    worker.close()
