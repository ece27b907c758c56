"""Conversations of the shapes that chat data comes in, rendered by templates of the shapes that models come with."""

import warnings
from pathlib import Path
from typing import Any

import pytest

from lit_grpo.data import chat
from lit_grpo.data.module import PromptDataModule
from lit_grpo.types import Prompt

PLAIN = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
# Arguments as Qwen 2.5 and Llama 3.1 write them, as DeepSeek V3 does, and as a template that glues with a tilde does.
OF_DICTS = (
    "{% for m in messages %}{{ m.role }}: {% if 'tool_calls' in m %}"
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('one call') }}{% endif %}"
    "{{ m.tool_calls[0].function.arguments | tojson }}"
    "{% else %}{{ m.content }}{% endif %}{{ '\n' }}{% endfor %}"
)
OF_TEXT = (
    "{% for m in messages %}{{ m['role'] + ': ' }}{% if m['content'] is none %}"
    "{{ 'call ' + m['tool_calls'][0]['function']['arguments'] }}{% else %}{{ m['content'] }}"
    "{% endif %}{{ '\n' }}{% endfor %}"
)
GLUED = OF_TEXT.replace("'call ' + m", "'call ' ~ m")
# As Qwen 3 looked for thoughts at first: null is not iterable.
LOOKS_INSIDE = (
    "{% for m in messages %}{{ m.role }}: {{ 'thought' if '</think>' in m.content else m.content }}"
    "{% for call in m.tool_calls %}{{ call.function.arguments | tojson }}{% endfor %}{{ '\n' }}{% endfor %}"
)


def save_tokenizer(folder: Path, template: str) -> str:
    """Save a tokenizer of single bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    signs = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = Tokenizer(models.BPE({"<eos>": 0} | {sign: place for place, sign in enumerate(signs, 1)}, []))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return str(folder)


def prompts_of(folder: Path, template: str, *conversations: Any, **options: Any) -> list[Prompt]:
    policy = save_tokenizer(folder, template)
    rows: Any = [{"prompt": each} for each in conversations]
    data = PromptDataModule(policy, train=rows, batch_size=1, **options)
    data.setup("fit")
    return data.prompts["train"]


def parts(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text} for text in texts]


def history(arguments: Any) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    return [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3"},
    ]


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ({"type": "image", "url": "a.png"}, "a part of type 'image', and a prompt is text alone"),
        ({"type": "text"}, "has a part of a chat message that is not"),
        ("bare", "has a chat message that is not"),
    ],
)
def test_a_part_that_is_no_text_is_refused(tmp_path: Path, part: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        prompts_of(tmp_path, PLAIN, [{"role": "user", "content": [*parts("see"), part]}])


@pytest.mark.parametrize("arguments", [{"x": 1}, '{"x": 1}'])
@pytest.mark.parametrize(
    ("template", "said"), [(OF_DICTS, ""), (OF_TEXT, "call "), (GLUED, "call "), (LOOKS_INSIDE, "")]
)
def test_earlier_tool_calls_are_rendered_as_the_template_takes_them(
    tmp_path: Path, template: str, said: str, arguments: Any
) -> None:
    with warnings.catch_warnings(action="error"):
        (prompt,) = prompts_of(tmp_path, template, history(arguments))
    assert prompt.text == f'user: hi\nassistant: {said}{{"x": 1}}\ntool: 3\n'


def test_a_template_that_shows_no_tool_calls_says_so_and_writes_no_null(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"earlier tool calls, and the tokenizer's chat template does not show"):
        (prompt,) = prompts_of(tmp_path, PLAIN, history({"x": 1}))
    assert prompt.text == "user: hi\nassistant: \ntool: 3\n"


def test_fields_without_a_value_are_as_if_they_were_not_there(tmp_path: Path) -> None:
    """Tables give all messages the same fields."""
    message = {"role": "user", "content": "hi", "tool_calls": None}
    (prompt,) = prompts_of(tmp_path, OF_DICTS, [message])
    assert prompt.text == "user: hi\n"


def test_a_call_at_the_end_cannot_be_continued(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="row 0 ends in a tool call, which cannot be continued; add the tool's answer"):
        prompts_of(tmp_path, OF_DICTS, history({})[:2], continue_final_message=True)


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        ("{{ messages[0].content + 1 }}", 'TypeError: can only concatenate str (not "int") to str'),
        ("{{ 1 // 0 }}", "ZeroDivisionError: "),
        ("{% for i in range(10**9) %}{% endfor %}", "OverflowError: Range too big"),
        ("{% if %}", "TemplateSyntaxError: Expected an expression"),
        ("{{ messages[0].content.nothing.more }}", "UndefinedError: 'str object' has no attribute 'nothing'"),
    ],
)
def test_an_error_of_a_template_names_the_row_the_complaint_and_the_remedy(
    tmp_path: Path, template: str, complaint: str
) -> None:
    with pytest.raises(ValueError) as caught:
        prompts_of(tmp_path, template, [{"role": "user", "content": "hi"}])
    assert f"row 0 makes the tokenizer's chat template fail ({complaint}" in str(caught.value)
    assert "); give messages that it takes, or mend the template" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_template_that_does_not_end_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "LIMIT_S", 0.3)
    endless = "{% if messages[0].content == 'loop' %}" + "{% for i in range(9999) %}" * 4 + "{% endfor %}" * 4
    rows = [[{"role": "user", "content": text}] for text in ("hi", "loop")]
    with pytest.raises(ValueError, match=r"row 1 of the list given keeps the tokenizer's chat template busy for more "):
        prompts_of(tmp_path, endless + "{% endif %}hi", *rows, unusable_rows="drop")
