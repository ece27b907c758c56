"""Calls in what policies write: each form, what is broken in it, and the chat templates whose calls are read back."""

from __future__ import annotations

import copy
import json
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from test_environment_tokens import turn_right
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lit_grpo.environments.calls import FORMATS, MalformedCall, ToolCall, Turn, read_turn
from lit_grpo.environments.chat import Chat
from lit_grpo.environments.tools import Tool
from tests.doubles.conversations import CHATML, chat_tokenizer

PAGE = Path(__file__).parents[1] / "docs" / "environments.md"


TOOLS = {"turn_right": Tool.of(turn_right)}
SCHEMAS = [TOOLS["turn_right"].schema]
CALL = ToolCall("turn_right", {"degrees": 90})
SEARCH = "<function=search>\n<parameter=query>\ncats\n</parameter>\n</function>\n"
DELETE = "<function=delete>\n<parameter=path>\n/tmp/a\n</parameter>\n</function>\n"
SEARCH_CALL, DELETE_CALL = ToolCall("search", {"query": "cats"}), ToolCall("delete", {"path": "/tmp/a"})


def check_calls(calls: Any, expected: Any) -> None:
    """Calls are those expected; a text stands for one broken call whose reason has it."""
    expected = [expected] if isinstance(expected, str) else expected
    assert len(calls) == len(expected), calls
    for call, wanted in zip(calls, expected, strict=True):
        if isinstance(wanted, str):
            assert isinstance(call, MalformedCall) and wanted in call.why, call
        else:
            assert call == wanted


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        ("hermes", '<tool_call>\n{"name": "turn_right", "arguments": {"degrees": 90}}\n</tool_call>', [CALL]),
        ("hermes", 'Well. <tool_call>{"name": "turn_right", "arguments": "{\\"degrees\\": 90}"}', [CALL]),
        (
            "hermes",
            '<tool_call>{"name": "a"}</tool_call><tool_call>{"name": "b"}</tool_call>',
            [ToolCall("a", {}), ToolCall("b", {})],
        ),
        ("hermes", '<tool_call>{"name": "a"}\n{"name": "b"}</tool_call>', [ToolCall("a", {}), ToolCall("b", {})]),
        ("hermes", '<tool_call>{"name": "a", <tool_call>{"name": "b"}</tool_call>', ["no JSON", ToolCall("b", {})]),
        ("hermes", "<tool_call>{'name': 'a'}</tool_call>", "no JSON"),
        ("hermes", '<tool_call>["a"]</tool_call>', "it is not {"),
        ("hermes", "<tool_call></tool_call>", "no JSON"),
        ("hermes", '<tool_call>{"name": "a", "arguments": [1]}</tool_call>', "not an object"),
        ("hermes", '<tool_call>{"name": "a", "parameters": {"b": 1}}</tool_call>', "'parameters' beside its name"),
        ("hermes", '<tool_call>{"name": "a", "b": 1}</tool_call>', "'b' beside its name"),
        ("hermes", '<tool_call>{"name": "a", "arguments": {"b": 1, "b": 2}}</tool_call>', "'b' is given twice"),
        ("hermes", '<tool_call>{"name": "a", "arguments": {"b": 1}, "arguments": {}}</tool_call>', "given twice"),
        ("hermes", '<tool_call>{"name": "a", "arguments": "{} {}"}</tool_call>', "follows them"),
        ("hermes", '{"name": "a"}\n</tool_call>', "</tool_call> stands where no call"),
        ("hermes", '<tool_call>{"name": "a", "arguments": {"b": ' + "9" * 5000 + "}}</tool_call>", "limit"),
        ("hermes", "<tool_call>" + '{"a":' * 20_000, "no JSON"),
        ("hermes", '<think>I could <tool_call>{"name": "a"}</tool_call></think>No.', []),
        (
            "hermes",
            'So: <think>or <tool_call>{"name": "a"}</tool_call></think><tool_call>{"name": "b"}',
            [ToolCall("b", {})],
        ),
        ("hermes", '<think>never closed <tool_call>{"name": "a"}</tool_call>', []),
        (
            "hermes",
            '<tool_call>{"name": "a", "arguments": {"b": "</think> </tool_call><tool_call>"}}</tool_call>',
            [ToolCall("a", {"b": "</think> </tool_call><tool_call>"})],
        ),
        (
            "qwen",
            "<tool_call>\n<function=turn_right>\n<parameter=degrees>\n90\n</parameter>\n<parameter=what>\n12\n"
            "</parameter>\n<parameter=quickly>\nTrue\n</parameter>\n</function>\n</tool_call>",
            [ToolCall("turn_right", {"degrees": 90, "what": "12", "quickly": True})],
        ),
        ("qwen", f"<tool_call>\n{SEARCH}{DELETE}</tool_call>", [SEARCH_CALL, DELETE_CALL]),
        ("qwen", f"<tool_call>\n{SEARCH}{SEARCH}</tool_call>", [SEARCH_CALL, SEARCH_CALL]),
        ("qwen", SEARCH, "<function= stands where no call"),
        ("qwen", f"<tool_call>\n{SEARCH}</tool_call>\n{DELETE}", [SEARCH_CALL, "<function= stands"]),
        ("qwen", f"<tool_call>\n{SEARCH[:-12]}{DELETE}</tool_call>", "it is not <function"),
        ("qwen", f"<tool_call>\n{SEARCH[:-25]}{DELETE}</tool_call>", "it is not <function"),
        ("qwen", f"<tool_call>\n{SEARCH[:30]}", "it is not <function"),
        ("qwen", '<tool_call>\n<function=a>\n{"b": 1}\n</function>\n</tool_call>', "it is not <function"),
        ("qwen", f"<tool_call>{SEARCH[:-13]}{SEARCH[18:]}</tool_call>", "'query' is given twice"),
        (
            "qwen",
            "<tool_call>\n<function=a>\n<parameter=b>\n<think>\n</think>\n</parameter>\n</function>\n</tool_call>",
            [ToolCall("a", {"b": "<think>\n</think>"})],
        ),
        ("qwen", "<tool_call>{}</tool_call>", "it is not <function"),
        ("qwen", f"<tool_call>\n{SEARCH.replace('cats', '</tool_call><tool_call>')}</tool_call>", ["it is not"] * 2),
        ("llama", '{"name": "turn_right", "parameters": {"degrees": 90}}', [CALL]),
        ("llama", '<|python_tag|>{"name": "turn_right", "parameters": {"degrees": 90}}', [CALL]),
        (
            "llama",
            '{"name": "a", "parameters": {}}; {"name": "b", "parameters": {}}',
            [ToolCall("a", {}), ToolCall("b", {})],
        ),
        ("llama", '{"name": "turn_right", "parameters": {"degrees": 90', "no JSON"),
        ("llama", '{"name": "a", "parameters": {"b": 1}, "arguments": {"c": 2}}', "beside its name"),
        ("llama", '<function=a>{"b": 1}</function>', "<function= stands"),
        ("llama", "<|python_tag|>print(1)", "<|python_tag|> stands"),
        ("llama", '{"name": "a", "parameters": {"b": "</think>"}}', [ToolCall("a", {"b": "</think>"})]),
        ("llama", 'The set {1, 2} is no call, nor is {"a": 1} within a text.', []),
        ("json", '{"name": "turn_right", "arguments": {"degrees": 90}}', [CALL]),
        ("json", '<tool_call>{"name": "a"}</tool_call>', "<tool_call> stands"),
        ("json", "An answer.", []),
        (
            "python",
            "<|tool_call_start|>[a(b='it\\'s (1, 2)', c=-3, d=True, e=[1, {\"f\": null}]), turn_right(degrees=90)]"
            "<|tool_call_end|>",
            [ToolCall("a", {"b": "it's (1, 2)", "c": -3, "d": True, "e": [1, {"f": None}]}), CALL],
        ),
        ("python", "<|tool_call_start|>[a(b=1, b=2)]<|tool_call_end|>", "'b' is given twice"),
        ("python", "<|tool_call_start|>[a(b='it's')]<|tool_call_end|>", "no list of calls"),
        ("python", "<|tool_call_start|>[a(b=open('x'))]<|tool_call_end|>", "no plain value"),
        ("python", "<|tool_call_start|>[a(1)]<|tool_call_end|>", "it is not [NAME"),
        ("python", "<|tool_call_start|>[a(**{'b': 1})]<|tool_call_end|>", "it is not [NAME"),
        ("python", "<|tool_call_start|>[]<|tool_call_end|>", "it is not [NAME"),
        ("python", "<|tool_call_start|>" + "[" * 100_000, "no list of calls"),
        ("python", "[a(b=1)]<|tool_call_end|>", "<|tool_call_end|> stands"),
        ("python", "Hello, print(b=1)", []),
    ],
)
def test_calls_are_read_whole_or_are_broken(form: str, text: str, expected: Any) -> None:
    check_calls(read_turn(text, FORMATS[form], TOOLS).calls, expected)


def test_reasoning_and_text_are_told_apart() -> None:
    turn = read_turn('<think>\nhm\n</think>\n\nLook: <tool_call>{"name": "a"}</tool_call>', FORMATS["hermes"], {})
    assert (turn.reasoning, turn.content) == ("hm", "Look:")
    assert turn.message["reasoning_content"] == "hm" and turn.message["tool_calls"][0]["function"]["name"] == "a"
    assert read_turn("hm</think>Yes.", FORMATS["hermes"], {}) == Turn("Yes.", "hm")


# ---- chat templates -------------------------------------------------------------------------------------

TOKEN = re.compile('<\\|[\\w"]+\\|?>|<\\w+\\|>|<\uff5c[^\uff5c]+\uff5c>|</?(?:think|tool_\\w+|arg_\\w+|end_of_\\w+)>')
ENDS = ("<|im_end|>", "<|eot_id|>", "<turn|>", "<|return|>", "<|eot|>", "<end_of_turn>", "<|end|>", "<|endoftext|>")


def shipped() -> Path | None:
    """The folder of the chat templates that TRL ships; None without TRL."""
    trl = find_spec("trl")
    return None if trl is None or trl.origin is None else Path(trl.origin).parent / "chat_templates"


def chat_of(tokenizer: Any, form: str | None = None) -> Any:
    """The chat of a tokenizer; its type would make type checkers doubt ids of tokens."""
    return Chat(tokenizer, form=form)


@cache
def family(name: str) -> Any:
    """A tokenizer of bytes with one of TRL's chat templates and the control tokens that it names."""
    if (folder := shipped()) is None:
        pytest.skip("TRL, whose wheel has the templates, is not installed")
    template = (folder / f"{name}.jinja").read_text()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = dict.fromkeys([*TOKEN.findall(template), "<\uff5cend▁of▁sentence\uff5c>", "<|endoftext|>", "<bos>"])
    tokenizer.add_tokens([AddedToken(each, special=not each.startswith(("</", "<t", "<a"))) for each in names])
    end = "<\uff5cend▁of▁sentence\uff5c>" if "deepseek" in name else next(end for end in ENDS if end in names)
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token=end, pad_token="<|endoftext|>"
    )
    made.chat_template = template
    return made


def read_as(chat: Any, text: str) -> Turn:
    """What a turn after a prompt says."""
    prompt = [{"role": "user", "content": "Go."}]
    before = chat.tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
    return chat.read(chat.tokenizer(text, add_special_tokens=False)["input_ids"], list(before), TOOLS)


def outcome(name: str) -> str:
    """The form in which calls of a template are read, or why it is refused."""
    try:
        chat = chat_of(family(name))
        chat.check(SCHEMAS, calls=True, responds=True)
    except ValueError as error:
        return "no calls" if "does not show tool calls" in str(error) else "no turns"
    return chat.form


@pytest.mark.parametrize("kind", [pytest.param("training", marks=pytest.mark.nightly), "original"])
def test_the_page_says_of_each_template_that_trl_ships_whether_its_calls_are_read_back(kind: str) -> None:
    if (folder := shipped()) is None:
        pytest.skip("TRL is not installed")
    listed: dict[str, str] = {}
    row = r"^\| (?:refused, )?`?([\w ]+)`? \|.*\| ([\w, ]+) \|$"
    for form, names in re.findall(row, PAGE.read_text(), re.MULTILINE):
        listed |= dict.fromkeys(names.split(", "), form)
    names = [path.stem for path in folder.glob("*.jinja") if path.stem.endswith("_training") == (kind == "training")]
    assert {name: outcome(name) for name in names} == {name: listed[name.removesuffix("_training")] for name in names}
    assert kind == "training" or {*names} == {*listed} - {"templates of TRL"}


@pytest.mark.parametrize(
    "name",
    [
        *("gemma4", "gemma4_v2", "gemma4_v5", "lfm2_v2", "lfm2_2_5", "gptoss", "glm4moe", "deepseekv3"),
        *("muse_glimmer", "qwen3", "qwen3_5_think", "nemotron_3_nano", "llama3_1"),
    ],
)
def test_what_a_template_writes_of_two_turns_is_read_back_and_gone_on_with(name: str) -> None:
    """Two calls of a conversation as the template writes it whole are read; what follows a call is what it adds."""
    chat = chat_of(family(name))
    arguments: Any = {"degrees": 90, "quickly": True, "what": 'the "left" one, {1}'}
    given = arguments if isinstance(chat._arguments, dict) else '{"degrees": 90, "quickly": true, "what": "left"}'
    arguments = arguments if isinstance(given, dict) else {**arguments, "what": "left"}
    call = {"id": "call00000", "type": "function", "function": {"name": "turn_right", "arguments": given}}
    said = [{"role": "user", "content": "Go."}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    answer = {"role": "tool", "name": "turn_right", "content": "It turned."}
    render = chat.tokenizer.apply_chat_template
    begins, alone = render(said[:1], tokenize=False, add_generation_prompt=True), render(said, tokenize=False)
    whole = render([*said, answer], tokenize=False, add_generation_prompt=True)
    start = next(place for place in range(len(begins), -1, -1) if alone.startswith(begins[:place]))
    turn = alone[start:].rstrip("\n")
    before = chat.tokenizer(alone[:start], add_special_tokens=False)["input_ids"]
    ids = chat.tokenizer(turn, add_special_tokens=False)["input_ids"]
    assert chat.read(ids, before, TOOLS).calls == (ToolCall("turn_right", arguments),)
    if name == "qwen3":
        return  # which writes a turn without reasoning in another way once it is answered
    followed = chat.tokenizer.decode([*before, *ids, *chat.following([answer], ids[-1])], skip_special_tokens=False)
    assert followed == whole


@pytest.mark.parametrize(
    ("name", "role", "last", "expected"),
    [
        ("gemma4", "tool", "<|tool_response>", "response:f{"),
        ("gemma4", "tool", "<turn|>", "<|tool_response>response:f{"),
        ("gptoss", "tool", "<|call|>", "<|start|>functions.f to=assistant"),
        ("gptoss", "user", "<|return|>", "<|start|>user"),
        ("gptoss", "user", "<|endoftext|>", "<|end|><|start|>user"),
        ("qwen3", "tool", "<|endoftext|>", "<|im_end|>\n<|im_start|>user"),
        ("deepseek_r1_distill", "tool", "<\uff5cend▁of▁sentence\uff5c>", "<\uff5ctool▁outputs▁begin\uff5c>"),
        ("cohere2", "user", "<|END_OF_TURN_TOKEN|>", "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>x"),
    ],
)
def test_what_follows_a_turn_depends_on_what_has_ended_it(name: str, role: str, last: str, expected: str) -> None:
    chat = chat_of(family(name))
    answer = {"role": role, "content": "x", **({"name": "f"} if role == "tool" else {})}
    ids = chat.following([answer], chat.tokenizer.convert_tokens_to_ids(last))
    assert chat.tokenizer.decode(ids).startswith(expected)


GEMMA = '<|tool_call>call:turn_right{degrees:90,what:<|"|>a, b:1<|"|>}<tool_call|>'
GEMMA_CALL = ToolCall("turn_right", {"degrees": 90, "what": "a, b:1"})
OSS = ' to=functions.turn_right<|channel|>commentary json<|message|>{"degrees": 90}<|call|>'
BEGIN = "<\uff5ctool▁calls▁begin\uff5c>"
DEEP = (
    "<\uff5ctool▁call▁begin\uff5c>function<\uff5ctool▁sep\uff5c>turn_right\n"
    '```json\n{"degrees": 90}\n```<\uff5ctool▁call▁end\uff5c>'
)
GLM = "<tool_call>turn_right\n<arg_key>degrees</arg_key>\n<arg_value>90</arg_value>\n</tool_call>"


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("gemma4", f"<|channel>thought\nhm<channel|>{GEMMA}<|tool_response>", [GEMMA_CALL]),
        ("gemma4", f"{GEMMA}{GEMMA}<|tool_response>", [GEMMA_CALL, GEMMA_CALL]),
        ("gemma4", GEMMA[:40], "could not parse"),
        ("gemma4", GEMMA.removesuffix("<tool_call|>") + GEMMA, "could not parse"),
        ("gemma4", "<|tool_call>call:turn_right{degrees:90,degrees:80}<tool_call|>", "given twice"),
        ("gemma4", "<|tool_call>turn_right(90)<tool_call|>", "<|tool_call> stands"),
        ("gemma4", "Just an answer.<turn|>", []),
        ("gptoss", OSS, [CALL]),
        (
            "gptoss",
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.turn_right "
            '<|constrain|>json<|message|>{"degrees": 90}<|call|>',
            [CALL],
        ),
        ("gptoss", OSS.replace("90}", "90"), "could not parse"),
        ("gptoss", OSS.replace("90}", '90, "degrees": 80}'), "'degrees' is given twice"),
        ("gptoss", '<|channel|>commentary<|message|>{"degrees": 90}<|call|>', "<|call|> stands"),
        ("gptoss", "<|channel|>final<|message|>Done.<|return|>", []),
        ("glm4moe", f"\n<think>hm</think>\n{GLM}<|observation|>", [CALL]),
        ("glm4moe", GLM[:60], "beside its arguments"),
        ("glm4moe", GLM.removesuffix("</tool_call>") + GLM, "'degrees' is given twice"),
        ("glm4moe", "<tool_call>{}</tool_call>", "<tool_call> stands"),
        ("deepseekv3", "Thought.</think>No call.", []),
        ("deepseekv3", f"Thought.</think>{BEGIN}{DEEP}{DEEP}", [CALL, CALL]),
        ("deepseekv3", f"{BEGIN}{DEEP}", [CALL]),
        ("deepseekv3", f"Thought.</think>{BEGIN}{DEEP[:60]}", "could not parse"),
        ("deepseekv3", f"Thought.</think>{BEGIN}{DEEP}".replace("function<", "tool<"), "stands where no call"),
    ],
)
def test_response_templates_read_calls_whole_or_broken(name: str, text: str, expected: Any) -> None:
    check_calls(read_as(chat_of(family(name)), text).calls, expected)


QWEN = {  # as response templates of tokenizers are written
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close_pattern": r"</think>\s*"},
        "tool_calls": {
            "open_pattern": r"<tool_call>\s*<function=(?P<name>[^\n>]+)>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*"},
    },
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"<tool_call>\n{SEARCH}</tool_call>", [SEARCH_CALL]),
        (f"<tool_call>\n{SEARCH}</tool_call>\n<tool_call>\n{DELETE}</tool_call>", [SEARCH_CALL, DELETE_CALL]),
        (f"<tool_call>\n{SEARCH}{DELETE}</tool_call>", "stands in it beside its arguments"),
        (f"<tool_call>\n{SEARCH}{SEARCH}</tool_call>", "'query' is given twice"),
        (f"<tool_call>\n{SEARCH[:-25]}{DELETE}</tool_call>", "stands in it beside its arguments"),
        (f"<tool_call>\n{SEARCH[:40]}", "stands in it beside its arguments"),
        (f"<tool_call>\n{SEARCH.replace('cats', '<function=delete>')}</tool_call>", "beside its arguments"),
        (SEARCH, "<function= stands"),
    ],
)
def test_a_response_template_of_the_tokenizer_never_merges_calls(text: str, expected: Any) -> None:
    tokenizer = copy.deepcopy(family("qwen3_6"))
    tokenizer.response_template = QWEN
    chat = chat_of(tokenizer)
    assert chat.form == "response_template"
    check_calls(read_as(chat, text).calls, expected)


GIVEN: Any = {"search": {"query": "cats", "limit": 3}, "delete": {"path": "/tmp/a", "force": True}}
FAMILIES = ("qwen3", "qwen3_6", "llama3_2", "lfm2_v2", "gemma4", "glm4moe", "gptoss", "deepseekv3", "muse_glimmer")


@pytest.mark.parametrize("name", FAMILIES)
def test_no_piece_that_is_missing_or_comes_twice_merges_two_calls(name: str) -> None:
    """Whatever is read of two calls, one after the other, has arguments of its own alone."""
    chat, text = chat_of(family(name)), ""
    render = chat.tokenizer.apply_chat_template
    for tool, given in GIVEN.items():
        arguments = given if isinstance(chat._arguments, dict) else json.dumps(given)
        call = {"type": "function", "function": {"name": tool, "arguments": arguments}}
        said = [{"role": "user", "content": "Go."}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        begins, whole = render(said[:1], tokenize=False, add_generation_prompt=True), render(said, tokenize=False)
        start = next(place for place in range(len(begins), -1, -1) if whole.startswith(begins[:place]))
        text += whole[start:].removesuffix("<|tool_response>").rstrip("\n").removesuffix(chat.tokenizer.eos_token)
    assert [call.name for call in chat._read(text, "", {}, chat.form).calls] == [*GIVEN]
    pieces = re.findall(r"</?[^<>\s]+>|\w+|\s+|.", text)
    for place in range(1, len(pieces)):
        for rest in (pieces[place + 1 :], pieces[place - 1 :], []):
            for call in chat._read("".join(pieces[:place] + rest), "", {}, chat.form).calls:
                if isinstance(call, ToolCall) and call.name in GIVEN:
                    assert not any(call.arguments.keys() & GIVEN[other] for other in {*GIVEN} - {call.name}), call


def test_calls_of_an_earlier_turn_are_not_made_again() -> None:
    """A parser that does not find where the turn begins reads all that came before it."""
    tokenizer = copy.deepcopy(family("qwen3_6"))
    tokenizer.response_template = {**QWEN, "start_anchor": "<|im_start|>nobody\n"}
    chat = chat_of(tokenizer)
    before = tokenizer(f"<tool_call>\n{DELETE}</tool_call><|im_end|>\n")["input_ids"]
    assert chat.read(tokenizer("Done.<|im_end|>")["input_ids"], before, TOOLS).calls == ()


def test_a_response_template_that_does_not_read_the_calls_of_its_chat_template_is_refused() -> None:
    tokenizer = copy.deepcopy(family("qwen3"))
    tokenizer.response_template = QWEN
    with pytest.raises(ValueError, match="which the tokenizer's response_template cannot parse, so that no tool"):
        chat_of(tokenizer).check(SCHEMAS, calls=True, responds=False)


# ---- before a run -----------------------------------------------------------------------------------------

ODD = CHATML.replace("'<tool_call>' + (call.function | tojson) + '</tool_call>'", "'[CALL]' + (call.function | tojson)")


def test_calls_that_cannot_be_read_back_are_refused_before_anything_is_sampled() -> None:
    with pytest.raises(
        ValueError,
        match=r"renders a call as '\[CALL\]\{.*which is in none of the formats qwen, hermes.* would ever run",
    ):
        chat_of(chat_tokenizer(ODD)).check(SCHEMAS, calls=True, responds=False)


def test_a_template_that_shows_no_calls_needs_to_be_told_their_form() -> None:
    silent = CHATML.replace("message.tool_calls or []", "[]")
    with pytest.raises(ValueError, match=r"does not show tool calls.*set calls to the format that the policy writes"):
        chat_of(chat_tokenizer(silent)).check(SCHEMAS, calls=True, responds=False)
    chat = chat_of(chat_tokenizer(silent), form="json")
    assert all("form" not in told for told in chat.check(SCHEMAS, calls=True, responds=False))
    answer = chat.following([{"role": "tool", "name": "f", "content": "x"}], chat.tokenizer.eos_token_id)
    assert chat.tokenizer.decode(answer) == "\n<|im_start|>tool\nx<|im_end|>\n<|im_start|>assistant\n"


def test_a_template_that_is_made_for_one_tool_is_read_back_with_that() -> None:
    own = """'<tool_call>{"name": "turn_right", "arguments": {"what": "' + call.function.arguments.what + '"}}'"""
    template = CHATML.replace("'<tool_call>' + (call.function | tojson) + '</tool_call>'", own)
    with pytest.raises(ValueError, match="does not show tool calls"):
        chat_of(chat_tokenizer(template)).check([], calls=True, responds=False)
    schema = {"type": "function", "function": {"name": "turn_right", "parameters": {"properties": {"what": {}}}}}
    chat = chat_of(chat_tokenizer(template))
    chat.check([schema], calls=True, responds=False)
    assert chat.form == "hermes"


def test_a_form_that_the_template_does_not_write_is_told_of() -> None:
    told = chat_of(chat_tokenizer(), form="llama").check(SCHEMAS, calls=True, responds=False)
    assert any("which is not the format llama: calls" in sentence for sentence in told)
