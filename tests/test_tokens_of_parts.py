"""The tokens of a part of a text are those that it has in the whole, or it is refused, by tokenizers of 16 kinds."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
from conftest import table_rows
from tokenizers import AddedToken

from lit_grpo.data.chat import UnusableRow
from lit_grpo.data.control import ControlTokens
from lit_grpo.data.examples import render_example
from lit_grpo.data.parts import PartTokens, num_common
from lit_grpo.data.rendering import PromptRenderer, Rendered
from lit_grpo.data.writing import PromptWriter
from lit_grpo.environments import Environments
from lit_grpo.environments.agent import Agent
from lit_grpo.environments.chat import Chat
from lit_grpo.plugins import fresh
from lit_grpo.policy.spec import PolicySpec
from lit_grpo.rewards.runner import Surroundings, TrainerState, rollout_inputs
from lit_grpo.types import Completion, Prompt, Request, Rollout, SamplingParams
from tests.doubles.conversations import template_of
from tests.doubles.tokenizers import CHATML, KINDS

ASKED = {"role": "user", "content": "what is one plus two"}
tokenizer_of = cache(lambda kind: KINDS[kind]())
Outcome = tuple[str, list[int] | str, list[int]]
"""A name; the tokens, or the sentence of a refusal; and the tokens of the whole text."""


def whole_ids(tokenizer: Any, text: str, is_plain: bool = False) -> list[int]:
    """The tokens of a text, without those that the tokenizer puts after each text."""
    ids = list(tokenizer(text, add_special_tokens=is_plain)["input_ids"])
    after = list(tokenizer("", add_special_tokens=True)["input_ids"])[-1:] if is_plain else []
    return ids[:-1] if after and after == ids[-1:] else ids


def text_of(tokenizer: Any, messages: list[Any], **options: Any) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False, **options)


def outcome(name: str, make: Callable[[], list[int]], whole: list[int]) -> Outcome:
    try:
        return name, make(), whole
    except (UnusableRow, ValueError) as error:
        return name, str(error), whole


# ---- five parts of the project ------------------------------------------------------------------------------

TURNS = [
    {"role": "assistant", "content": "The"},
    {"role": "user", "content": "thank you"},
    {"role": "assistant", "content": "12 hello"},
]
ANSWERS: dict[str, tuple[Any, Any]] = {
    "digits": ("what is 12=", "12"),
    "a word after a space": ("what is", " one"),
    "a space on the other side": ("what is ", "one"),
    "half a word": ("what is one pl", "us two"),
    "an accent of its own": ("cafe", "\u0301 12"),
    "chat": ([ASKED], "The answer is 12"),
    "chat with a number": ([ASKED], "12"),
    "chat with spaces first": ([ASKED], "  12 "),
    "chat with a line break first": ([ASKED], "\n\ncaf\u00e9"),
    "two turns": ([ASKED], TURNS),
}


def sft(tokenizer: Any) -> Iterator[Outcome]:
    prompt: Any
    answer: Any
    for name, (prompt, answer) in ANSWERS.items():
        row, renderer = {"prompt": prompt}, PromptRenderer()
        messages = answer if isinstance(answer, list) else [{"role": "assistant", "content": answer}]
        if isinstance(prompt, str):
            whole = [*whole_ids(tokenizer, f"{prompt}{answer}", is_plain=True), tokenizer.eos_token_id]
        else:
            whole = whole_ids(tokenizer, text_of(tokenizer, [*prompt, *messages]))
            whole = whole[: len(whole) - whole[::-1].index(tokenizer.eos_token_id)]

        def make(row: Any = row, answer: Any = answer, renderer: PromptRenderer = renderer) -> list[int]:
            example = render_example(renderer, tokenizer, row, answer, "all", "row 0")
            assert example.prompt_ids == renderer.render(row, tokenizer).token_ids
            assert example.learned_T[-1] and example.answer_ids_T[-1] == tokenizer.eos_token_id
            return [*example.prompt_ids, *example.answer_ids_T.tolist()]

        yield outcome(name, make, whole)


SAID = ("", "?", " more", "\n12", "12", "=")


class Room:
    """An environment that says something first, and answers."""

    def reset(self, **row: Any) -> str:
        return "12"

    def respond(self, text: str) -> str:
        return "12"


def rendered_with(worker: Any, tokenizer: Any, row: dict[str, Any]) -> Prompt:
    worker.prepare(tokenizer, {})
    rendered: Rendered = PromptRenderer(conversing=worker).render(row, tokenizer)
    return Prompt("train/0", rendered.token_ids, rendered.text, row, messages=rendered.messages)


def environments(tokenizer: Any) -> Iterator[Outcome]:
    worker = fresh(Environments(factory=Room))
    try:
        prompt = rendered_with(worker, tokenizer, {"prompt": ASKED["content"]})
    except ValueError as error:
        yield "the first words", str(error), []
        return
    finally:
        worker.close()
    chat = Chat(tokenizer)
    for said in SAID:
        whole = text_of(tokenizer, [{**ASKED, "content": ASKED["content"] + said}], add_generation_prompt=True)
        make = lambda said=said: [*prompt.token_ids, *chat.opening(prompt, said, [])]  # noqa: E731
        yield outcome(f"first {said!r}", make, whole_ids(tokenizer, whole))
        assert chat.text_of(chat.conversation(prompt, said), []) == whole
    for answer in ("12", " thank you", "\n12", "caf\u00e9"):
        turns = [ASKED, {"role": "assistant", "content": "The answer is 12"}]
        sampled = whole_ids(tokenizer, text_of(tokenizer, turns))
        sampled = sampled[: len(sampled) - sampled[::-1].index(tokenizer.eos_token_id)]
        new = {"role": "user", "content": answer}
        whole = whole_ids(tokenizer, text_of(tokenizer, [*turns, new], add_generation_prompt=True))
        make = lambda sampled=sampled, new=new: [*sampled, *chat.following([new], sampled[-1])]  # noqa: E731
        yield outcome(f"after a turn {answer!r}", make, whole)


def agents(tokenizer: Any) -> Iterator[Outcome]:
    worker = fresh(Agent(run=lambda base_url, api_key: 0.0))
    try:
        prompt = rendered_with(worker, tokenizer, {"number": 3})
    except ValueError as error:
        yield "what it writes", str(error), []
        return
    finally:
        worker.close()
    chat = Chat(tokenizer)
    for said in ("12", " hello", "what is one", "\nuser"):
        for messages in ([{"role": "user", "content": said}], [{"role": "system", "content": said}, ASKED]):
            whole = whole_ids(tokenizer, text_of(tokenizer, messages, add_generation_prompt=True))

            def make(messages: list[Any] = messages) -> list[int]:
                following = chat.beginning(prompt, messages, [])
                assert following is not None, "no agent could begin"
                return [*prompt.token_ids, *following]

            yield outcome(f"{messages[0]['role']} {said!r}", make, whole)


LONG = "The Caf\u00e9 12 thank you thank you"
SOLUTION = "The answer is 12, caf\u00e9 hello"


def hinted(tokenizer: Any, asked: Any, solution: str, share: float, most: int = 512) -> tuple[Prompt, PromptWriter]:
    renderer = PromptRenderer(max_prompt_tokens=most)
    row = {"prompt": asked}
    rendered = renderer.render(row, tokenizer)
    prompt = Prompt("train/0", rendered.token_ids, rendered.text, row, messages=rendered.messages)
    writer = PromptWriter(renderer, tokenizer, {"train/0": row})
    return writer.put_after(prompt, solution, share), writer


def written(tokenizer: Any, asked: Any) -> tuple[str, bool]:
    is_plain = isinstance(asked, str)
    return asked if is_plain else text_of(tokenizer, asked, add_generation_prompt=True), is_plain


def hints(tokenizer: Any) -> Iterator[Outcome]:
    for asked in ("what is 12=", "what is", [ASKED]):
        text, is_plain = written(tokenizer, asked)
        solution = SOLUTION if not is_plain else " " + SOLUTION
        whole = whole_ids(tokenizer, text + solution, is_plain)
        for share in (0.2, 0.6, 1.0):

            def make(asked: Any = asked, solution: str = solution, share: float = share, text: str = text) -> list[int]:
                prompt, _ = hinted(tokenizer, asked, solution, share)
                assert prompt.given and solution.startswith(prompt.given) and prompt.text == text + prompt.given
                return list(prompt.token_ids)

            name, ids, _ = outcome(f"{share} after {text[-12:]!r}", make, whole)
            yield name, ids, whole[: len(ids)] if isinstance(ids, list) else whole
        prompt, writer = hinted(tokenizer, asked, "", 1.0)
        writer.most_tokens = len(prompt.token_ids) + 6
        try:
            before = writer.put_before(prompt, f"{LONG} {LONG} ")
        except ValueError as error:  # a cut word that it does not know
            yield f"before {text[-12:]!r}", str(error), []
            continue
        begun = LONG[: num_common(before.text[text.index("what is") :], LONG)]
        assert begun and before.text == text.replace("what is", begun + "what is")  # as it was written, not lower-cased
        yield f"before {text[-12:]!r}", list(before.token_ids), whole_ids(tokenizer, before.text, is_plain)


def rewards(tokenizer: Any) -> Iterator[Outcome]:
    """What a reward model tokenizes: the texts of prompt and completion, whose tokens the policy has sampled."""
    policy: Any = PolicySpec(None, tokenizer)  # pyrefly: ignore[bad-argument-type]
    surroundings = Surroundings(TrainerState(), lambda name, value: None)
    for asked, share in (("what is", 0.0), ("what is", 0.5), ([ASKED], 0.0), ([ASKED], 0.5)):
        text, is_plain = written(tokenizer, asked)
        solution = " " + SOLUTION if is_plain else SOLUTION
        whole = whole_ids(tokenizer, text + solution, is_plain)

        def make(asked: Any = asked, share: float = share, solution: str = solution, whole: Any = whole) -> list[int]:
            prompt = hinted(tokenizer, asked, solution if share else "", share)[0]
            num = len(prompt.token_ids)
            if tuple(whole[:num]) != prompt.token_ids:
                raise UnusableRow("is sampled from other tokens")
            request = Request(prompt, (0,), SamplingParams())
            sampled = request.prefix.followed_by(whole[num:], [0.0] * len(whole[num:]), 0)
            completion = Completion.of(request, sampled, "stop", policy.text_of(whole[num:], prompt))
            inputs = rollout_inputs(Rollout(prompt, completion), surroundings)
            assert inputs["prompt"] == written(tokenizer, asked)[0]
            return whole_ids(tokenizer, inputs["prompt"] + inputs["completion"], isinstance(asked, str))

        yield outcome(f"{share} after {text[-12:]!r}", make, whole)


PARTS = {"sft": sft, "agents": agents, "environments": environments, "hints": hints, "rewards": rewards}
TABLE = [(kind, part) for kind in KINDS for part in PARTS]
QUICK = [*((kind, "sft") for kind in KINDS), *(("Unigram, first", part) for part in PARTS)]


BORDER = "move a space or line break to the other side of the border, or change the words there"
NO_PLACES = "no fast tokenizer"
UNKNOWN = "characters that the tokenizer does not know"
OF_BYTES = {"a space on the other side": BORDER, "half a word": BORDER}
REFUSED: dict[tuple[str, str], dict[str, str]] = {
    **{
        (kind, "sft"): OF_BYTES
        for kind in ("byte BPE", "byte BPE, prefix space", "lower-casing", "begins and ends", "stripping", "plain end")
    },
    ("NFC", "sft"): {**OF_BYTES, "an accent of its own": BORDER},
    ("NFKC Unigram", "sft"): {"an accent of its own": BORDER},
    ("WordPiece", "sft"): {"half a word": BORDER},
    ("WordLevel", "sft"): {"half a word": UNKNOWN, "an accent of its own": UNKNOWN},
    ("WordLevel", "hints"): dict.fromkeys(
        ("before 'what is 12='", "before 'what is'", r"before '|>assistant\n'"), UNKNOWN
    ),
    ("slow", "environments"): {"the first words": NO_PLACES},
    ("slow", "agents"): {"what it writes": NO_PLACES},
}
"""What is refused, and the remedy; all else has the tokens of the whole text."""


@pytest.mark.parametrize(("kind", "part"), table_rows(TABLE, quick=QUICK))
def test_tokens_are_those_of_the_whole_text_or_refused(kind: str, part: str) -> None:
    tokenizer = tokenizer_of(kind)
    refused: dict[str, str] = {}
    for name, ids, whole in PARTS[part](tokenizer):
        if isinstance(ids, str):
            refused[name] = ids
        else:
            assert tokenizer.convert_ids_to_tokens(ids) == tokenizer.convert_ids_to_tokens(whole), name
    expected = REFUSED.get((kind, part), {})
    assert refused.keys() == expected.keys()
    assert all(remedy in refused[name] for name, remedy in expected.items())


# ---- the owner ----------------------------------------------------------------------------------------------


def test_a_token_that_takes_the_spaces_beside_it_ends_its_part() -> None:
    tokenizer = tokenizer_of("stripping")
    parts = ("<|im_start|>user", "\nhello <|im_end|>", " \n", "<|im_start|>assistant\n12")
    divided = PartTokens(tokenizer, *parts).divided()
    assert divided[1][-1] == tokenizer.eos_token_id and not divided[2]
    assert [*itertools.chain(*divided)] == tokenizer("".join(parts), add_special_tokens=False)["input_ids"]


def test_a_control_token_that_two_parts_spell_is_refused_where_texts_are_covered() -> None:
    tokenizer = tokenizer_of("byte BPE")
    covered = ControlTokens.of(tokenizer).cover("<|im_start|>")
    with pytest.raises(UnusableRow, match="at the border"):
        PartTokens(tokenizer, f"what {covered} is <|im_", "end|> one").divided()
    first, last = PartTokens(tokenizer, f"what {covered} is", "<|im_end|> one").divided()
    assert tokenizer.decode(first) == "what <|im_start|> is" and tokenizer.decode(last) == "<|im_end|> one"
    assert tokenizer.convert_tokens_to_ids("<|im_start|>") not in first


@pytest.mark.parametrize("kind", ["byte BPE", "Prepend", "slow"])
def test_no_character_is_cut(kind: str) -> None:
    tokenizer, text = tokenizer_of(kind), "a\U0001f600\u00fc12"
    tokens = PartTokens(tokenizer, text)
    for num in range(len(tokens.ids) + 2):
        ids, head = tokens.head(num)
        assert ids == tokens.ids[: len(ids)] and len(ids) <= num
        if kind != "slow":  # which does not tell where characters end
            assert text.startswith(head) and text.endswith(tokens.tail(num)) and (num < 2 or head)


# ---- turns: where they end, and how they begin ---------------------------------------------------------------

OPENED = CHATML.replace("assistant\n", "assistant\n<think>\n")
CUTS_THOUGHTS = OPENED.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")
HIDES = CHATML.replace("{{ m.content }}", "{% for part in m.content if part is mapping %}{{ part.text }}{% endfor %}")
ROLES_END = CHATML.replace("<|im_end|>\n", "")
ENDLESS = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
ENDLESS += "{% if add_generation_prompt %}assistant:{% endif %}"
TWO_ENDS = CHATML.replace("<|im_end|>\n{% endfor", "<s><|im_end|>\n</s>{% endfor")


def thinking(template: str = CHATML, special: bool = True, eos: str = "<|im_end|>") -> Any:
    """A byte-level tokenizer that has the tags of thoughts as tokens."""
    tokenizer = KINDS["byte BPE"]()
    tokenizer.add_tokens([AddedToken(each, special=special, normalized=False) for each in ("<think>", "</think>")])
    tokenizer.chat_template, tokenizer.eos_token = template, eos
    return tokenizer


def imitated(tokenizer: Any, answer: Any, asked: Any = None, turns: Any = "all") -> list[str]:
    """The texts that are imitated of a row, one for each run of tokens."""
    example = render_example(PromptRenderer(), tokenizer, {"prompt": asked or [ASKED]}, answer, turns, "row 0")
    runs = itertools.groupby(
        zip(example.answer_ids_T.tolist(), example.learned_T.tolist(), strict=True), lambda x: x[1]
    )
    return [tokenizer.decode([token for token, _ in run]) for is_learned, run in runs if is_learned]


THOUGHT = "<think>one plus two</think>The answer is 12"
MIDDLE = [*TURNS[:2], {**TURNS[2], "content": THOUGHT}]
ENDS: dict[str, tuple[Any, Any, list[str]]] = {
    "special tags of thoughts, an end that is not special": (
        lambda: thinking(CHATML.replace("<|im_end|>", "<end>"), eos="</s>"),
        THOUGHT,
        [f"{THOUGHT}<end>\n</s>"],  # no token: what the template writes, and the end-of-sequence token
    ),
    "an end that is an added token": (lambda: KINDS["plain end"](), "12", ["12<end>"]),
    "an end beside tags that are special": (thinking, THOUGHT, [f"{THOUGHT}<|im_end|>"]),
    "an answer that ends in a tag": (thinking, "12</think>", ["12</think><|im_end|>"]),
    "an answer that ends in the end": (thinking, "12<|im_end|>", ["12<|im_end|><|im_end|>"]),
    "several ends": (lambda: thinking(TWO_ENDS), "12", ["12<s><|im_end|>"]),
    "several turns": (thinking, MIDDLE, ["The<|im_end|>", f"{THOUGHT}<|im_end|>"]),
    "an end of the whole text after the last turn": (
        lambda: thinking(
            CHATML.replace("\n{% endfor", "\n{% if loop.last and not add_generation_prompt %}</s>{% endif %}{% endfor"),
            eos="</s>",
        ),
        TURNS,
        ["The<|im_end|>", "12 hello<|im_end|>\n</s>"],
    ),
    "turns that the next role ends": (lambda: thinking(ROLES_END), MIDDLE, ["The<|im_start|>", f"{THOUGHT}<|im_end|>"]),
    "a template without ends": (lambda: thinking(ENDLESS), "12", [" 12\n<|im_end|>"]),
    "an opened thought, and an answer with one": (
        lambda: thinking(OPENED),
        "<think>\nhm\n</think>\n\n12",
        ["hm\n</think>\n\n12<|im_end|>"],
    ),
}


@pytest.mark.parametrize("name", ENDS)
def test_a_turn_ends_with_what_the_template_writes_after_its_content(name: str) -> None:
    make, answer, expected = ENDS[name]
    assert imitated(make(), answer) == expected


@pytest.mark.parametrize("end", ["</think>", "<s>", "<|im_end|>"])
def test_a_text_that_ends_in_a_special_token_ends_with_the_end_token_too(end: str) -> None:
    assert imitated(thinking(), f"12{end}", "what is") == [f"12{end}" + "<|im_end|>" * (end != "<|im_end|>")]


@pytest.mark.parametrize("special", [True, False])
def test_an_ordinary_answer_after_an_opened_thought_has_an_empty_one(special: bool) -> None:
    """As Qwen3.5's template writes it, in each turn; and it is said."""
    tokenizer = thinking(OPENED, special)
    with pytest.warns(UserWarning, match=r"imitated with an empty thought\. Give answers with thoughts"):
        assert imitated(tokenizer, "12") == ["\n</think>\n\n12<|im_end|>"]
    with pytest.warns(UserWarning, match="empty thought"):
        turns = imitated(tokenizer, [*TURNS[:2], {"role": "assistant", "content": "<think>\nhm\n</think>\n\n12"}])
    assert turns == ["\n</think>\n\nThe<|im_end|>", "hm\n</think>\n\n12<|im_end|>"]


def test_qwen3_5_writes_the_same(recwarn: pytest.WarningsRecorder) -> None:
    if (template := template_of("qwen3_5_think")) is None:
        pytest.skip("TRL is not installed")
    assert imitated(thinking(template), "12") == ["\n</think>\n\n12<|im_end|>"] and not recwarn.list


REFUSED_TURNS: dict[str, tuple[Any, Any, str]] = {
    "thoughts that the template cuts": (
        CUTS_THOUGHTS,
        THOUGHT,
        "give the policy's tokenizer a chat template that keeps",
    ),
    "a thought that it cuts from nothing": (
        CUTS_THOUGHTS,
        "12",
        r"ends in '<\|im_start\|>assistant\\n<think>\\n'; give the",
    ),
    "a thought after one that is closed": (
        CHATML.replace("assistant\n", "assistant\n<think>\n\n</think>\n\n"),
        THOUGHT,
        r"take the thought out of the answer, or set data\.chat_template_kwargs \(often enable_thinking: true\)",
    ),
    "an answer that is not shown": (HIDES, "12", "an answer that the chat template does not show"),
    "turns without an end": (ENDLESS, TURNS, "ends with no token, so that the policy would not learn to end them"),
    "a weight of a half": (CHATML, [{**TURNS[0], "weight": 0.5}], r"a turn with weight 0\.5; give 0 .* or 1"),
    "a weight that is a text": (CHATML, [{**TURNS[0], "weight": "0"}], "a turn with weight '0'; give 0"),
    "nothing left": (CHATML, [{**TURNS[0], "weight": 0}], "nothing to imitate, because each turn of the assistant has"),
}


@pytest.mark.parametrize("name", REFUSED_TURNS)
def test_turns_that_cannot_be_imitated_are_refused_with_a_remedy_that_helps(name: str) -> None:
    template, answer, sentence = REFUSED_TURNS[name]
    for turns in ("all", "last") if name != "turns without an end" else ("all",):
        if name != "nothing left" or turns == "all":
            with pytest.raises(UnusableRow, match=sentence) as refusal:
                imitated(thinking(template), answer, turns=turns)
            assert name == "turns without an end" or "set turns to last" not in str(refusal.value)


WEIGHTS: dict[tuple[Any, Any], list[str]] = {
    (1, 1): ["The<|im_end|>", "12 hello<|im_end|>"],
    (None, 1.0): ["The<|im_end|>", "12 hello<|im_end|>"],
    (0, None): ["12 hello<|im_end|>"],
    (0.0, True): ["12 hello<|im_end|>"],
    (1, 0): ["The<|im_end|>"],
    (None, False): ["The<|im_end|>"],
}


@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_turn_of_weight_0_is_not_imitated(weights: tuple[Any, Any]) -> None:
    """What it says still stands before the turns that follow it; what follows the last imitated turn is left out."""
    tokenizer = thinking()
    turns = [{**TURNS[0], "weight": weights[0]}, {**TURNS[1], "weight": 0}, {**TURNS[2], "weight": weights[1]}]
    example = render_example(PromptRenderer(), tokenizer, {"prompt": [ASKED]}, turns, "all", "row 0")
    assert imitated(tokenizer, turns) == WEIGHTS[weights]
    whole = text_of(tokenizer, [ASKED, *TURNS]).rstrip("\n")
    ids = [*example.prompt_ids, *example.answer_ids_T.tolist()]
    assert whole_ids(tokenizer, whole)[: len(ids)] == ids
    conversation = [{"role": "user", "content": "hello"}, {**TURNS[0], "weight": 0}, ASKED, TURNS[2]]
    assert imitated(tokenizer, None, conversation) == ["12 hello<|im_end|>"]


# ---- conversations that go on -----------------------------------------------------------------------------


def test_a_turn_that_a_stop_string_ends_gets_its_end_token_whatever_token_is_its_last() -> None:
    """Also if the template writes the same ordinary token after the end."""
    chat = Chat(thinking())
    answer = [{"role": "user", "content": "12"}]
    tokenizer: Any = chat.tokenizer
    ended, end = chat.following(answer, tokenizer.eos_token_id), tokenizer.eos_token_id
    for last in tokenizer("\n user", add_special_tokens=False)["input_ids"]:
        assert chat.following(answer, last) == [end, *ended]


def test_an_environments_text_is_shown_to_reward_functions_as_it_is() -> None:
    chat = Chat(tokenizer_of("lower-casing"))
    shown = chat.shorten("The Answer " * 40, 10)[0]
    assert shown.startswith("The A") and shown.endswith("Answer ")
