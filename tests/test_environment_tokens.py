"""Tokens learnt from are the tokens sampled, whatever templates make of conversations; formats of calls; templates."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from conftest import table_rows

from benchmarks.conversation_tokens import NUM_CONVERSATIONS, check, wrong
from benchmarks.conversations import (
    CHATML,
    FAMILIES,
    GENERATORS,
    Talkative,
    chat_tokenizer,
    play,
    template_of,
)
from lit_grpo.data.rendering import PromptRenderer
from lit_grpo.environments import Environments
from lit_grpo.environments.calls import FORMATS, BrokenCall, Call, Turn, format_of, read_turn
from lit_grpo.environments.chat import Chat
from lit_grpo.environments.tools import Tool
from lit_grpo.types import Prompt


@pytest.mark.parametrize("family", table_rows(FAMILIES, quick=["smollm2"]))
def test_tokens_learnt_are_tokens_sampled_in_random_conversations(family: str) -> None:
    """Each is what a float64 forward of the whole gives; observed ones have no gradient and are in no number."""
    if template_of(family) is None:
        pytest.skip("TRL, whose wheel has the templates, is not installed")
    assert wrong(check(play(family, GENERATORS["slots"], NUM_CONVERSATIONS)), "slots") == []


# ---- calls --------------------------------------------------------------------------------------------


def turn_right(degrees: int, quickly: bool = False, what: str = "") -> str:
    """Turn.

    Args:
        degrees: How far.
        quickly: Whether at once.
        what: Which thing.
    """
    return ""


TOOLS = {"turn_right": Tool.of(turn_right)}
CALL = Call("turn_right", {"degrees": 90})


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        ("hermes", '<tool_call>\n{"name": "turn_right", "arguments": {"degrees": 90}}\n</tool_call>', [CALL]),
        ("hermes", 'Well. <tool_call>{"name": "turn_right", "arguments": "{\\"degrees\\": 90}"}', [CALL]),
        ("hermes", '<tool_call>{"name": "a"}</tool_call><tool_call>{"name": "b"}</tool_call>', ["a", "b"]),
        ("hermes", "<tool_call>{'name': 'a'}</tool_call>", "no JSON"),
        ("hermes", '<tool_call>["a"]</tool_call>', "it is not {"),
        ("hermes", '<tool_call>{"name": "a", "arguments": [1]}</tool_call>', "not an object"),
        ("hermes", '<think>I could <tool_call>{"name": "a"}</tool_call></think>No.', []),
        ("hermes", '<think>never closed <tool_call>{"name": "a"}</tool_call>', []),
        (
            "qwen",
            "<tool_call>\n<function=turn_right>\n<parameter=degrees>\n90\n</parameter>\n<parameter=what>\n12\n"
            "</parameter>\n</function>\n</tool_call>",
            [Call("turn_right", {"degrees": 90, "what": "12"})],
        ),
        ("qwen", "<tool_call>{}</tool_call>", "it is not <function"),
        ("llama", '{"name": "turn_right", "parameters": {"degrees": 90}}', [CALL]),
        ("llama", '<|python_tag|>{"name": "turn_right", "parameters": {"degrees": 90}}', [CALL]),
        ("llama", '{"name": "turn_right", "parameters": {"degrees": 90', "no JSON"),
        ("llama", 'The set {1, 2} is no call, nor is {"a": 1} within a text.', []),
        ("json", '{"name": "turn_right", "arguments": {"degrees": 90}}', [CALL]),
        ("json", "An answer.", []),
    ],
)
def test_calls_are_read_and_broken_ones_are_no_text(form: str, text: str, expected: Any) -> None:
    calls = read_turn(text, FORMATS[form], TOOLS).calls
    if isinstance(expected, str):
        (broken,) = calls
        assert isinstance(broken, BrokenCall) and expected in broken.why
    else:
        assert list(calls) == [each if isinstance(each, Call) else Call(each, {}) for each in expected]


def test_reasoning_and_text_are_told_apart() -> None:
    turn = read_turn('<think>\nhm\n</think>\n\nLook: <tool_call>{"name": "a"}</tool_call>', FORMATS["hermes"], {})
    assert (turn.reasoning, turn.content) == ("hm", "Look:")
    assert turn.message["reasoning_content"] == "hm" and turn.message["tool_calls"][0]["function"]["name"] == "a"
    assert read_turn("hm</think>Yes.", FORMATS["hermes"], {}) == Turn("Yes.", "hm")


@pytest.mark.parametrize(("family", "form"), [("qwen3", "hermes"), ("llama3_1", "llama"), ("qwen3_5_think", "qwen")])
def test_the_format_is_what_the_template_writes(family: str, form: str) -> None:
    template = template_of(family)
    if template is None:
        pytest.skip("TRL is not installed")
    assert format_of(template) == form
    assert format_of("{{ messages }}") == "json"


def test_a_response_template_of_the_tokenizer_reads_calls() -> None:
    tokenizer = copy.deepcopy(chat_tokenizer())
    chat = Chat(tokenizer)
    tokenizer.response_template = {"anything": True}
    tokenizer.parse_response = lambda ids, prefix, tools: {
        "content": "hm",
        "tool_calls": [{"type": "function", "function": {"name": tools[0]["function"]["name"], "arguments": {"n": 1}}}]
        if prefix
        else [],
    }
    chat = Chat(tokenizer)
    ids = tokenizer("<tool_call>{oops</tool_call>")["input_ids"]
    assert chat.read(ids, [5], TOOLS) == Turn("hm", "", (Call("turn_right", {"n": 1}),))
    assert isinstance(chat.read(ids, [], TOOLS).calls[0], BrokenCall)  # which the template takes for text


# ---- templates ----------------------------------------------------------------------------------------

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


def test_a_template_that_shows_no_tools_is_told_of() -> None:
    (told,) = Chat(chat_tokenizer()).check(SCHEMAS, calls=True, responds=True)
    assert "shows no tools" in told


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "has no chat template, which turns need"),
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
    worker = Environments(factory=Talkative).worker()
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
