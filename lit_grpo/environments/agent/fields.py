"""The fields of an agent's request: one table of what each must be, and of what becomes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Required

import pydantic
from pydantic_core import from_json
from typing_extensions import TypedDict

from lit_grpo.data.chat import Message, UnusableRow, read_message
from lit_grpo.environments.tools import Tool
from lit_grpo.process.inputs import reader_of, typed
from lit_grpo.process.terminal import listed
from lit_grpo.types import SamplingParams

Route = Literal["chat", "tokens"]
"""OpenAI's ``/v1/chat/completions``, or vLLM's ``/inference/v1/generate``."""
Rule = Literal["used", "run", "ignored", "refused"]
"""What becomes of a field: it is used; the run's own value is taken in its place, and the user is told once; it is
ignored, and the user is told once; it is refused, because the reply would not be what it asks for."""
_SHOWN = 60  # characters of a value in a sentence


class Refused(Exception):
    """A refused request of an agent, with the reason and the remedy.

    Args:
        sentence: Error message for the agent's author.
        code: Error code, one word.
        status: Status of the HTTP answer. Clients of ``openai`` repeat a request after a 409, so 409 is never sent.
    """

    def __init__(self, sentence: str, code: str = "invalid_request", status: int = 400) -> None:
        super().__init__(sentence)
        self.code, self.status = code, status


# ---- the types of fields ---------------------------------------------------------------------------------


class Form(NamedTuple):
    """The type of a field.

    Args:
        name: The type in words, after "must be".
        type: The type, as pydantic reads it strictly.
    """

    name: str
    type: Any


_INTEGER = Annotated[int, pydantic.Field(ge=-(2**63), lt=2**63)]
FLAG = Form("true or false", bool)
INTEGER = Form("an integer of at most 64 bits", _INTEGER)
NUMBER = Form("a finite number", pydantic.FiniteFloat)
TEXT = Form("a text", str)
NAME = Form("a text of at most 1,024 characters", Annotated[str, pydantic.Field(max_length=1024)])
OBJECT = Form("an object", dict[str, Any])
LIST = Form("a list", list[Any])
TEXTS = Form("a list of texts", list[str])
INTEGERS = Form("a list of integers", list[_INTEGER])
TEXT_OR_TEXTS = Form("a text or a list of texts", str | list[str])
TEXT_OR_OBJECT = Form("a text or an object", str | dict[str, Any])
FLAG_OR_INTEGER = Form("true, false or an integer", bool | _INTEGER)
NUMBERS = Form("an object of numbers", dict[str, pydantic.FiniteFloat])
FLAGS = Form("an object of true or false", dict[str, bool | None])


class Field(NamedTuple):
    """A field of a request.

    Args:
        form: Type of the field. Null is allowed everywhere, and stands for a field that is left out.
        rule: What becomes of it.
        same: Values that are no cause to refuse or to tell, because they ask for what happens anyway.
        why: Why it is ignored or refused, after "because".
    """

    form: Form
    rule: Rule
    same: tuple[Any, ...] = ()
    why: str = "all completions of a run are sampled in the same way"


def _used(form: Form) -> Field:
    return Field(form, "used")


def _refused(form: Form, *same: Any) -> Field:
    return Field(form, "refused", same)


_READS = "it would change what the policy reads"
_TEXT_ALONE = "messages are text alone"
_NO_ENGINE = "it concerns the engine, and not the reply"
_NO_BOOKS = "a run keeps no such books"
_ALONE = "replies have the log-probs of the sampled tokens alone"
_SHOWS = "it concerns how the reply is shown"

SAMPLING: Mapping[str, Field] = {
    **dict.fromkeys(("temperature", "top_p", "min_p"), Field(NUMBER, "run")),
    **dict.fromkeys(("top_k", "max_tokens", "max_completion_tokens"), Field(INTEGER, "run")),
    "stop": Field(TEXT_OR_TEXTS, "run"),
    "stop_token_ids": Field(INTEGERS, "run"),
    "logprobs": _used(FLAG_OR_INTEGER),
    **dict.fromkeys(("n", "best_of"), _refused(INTEGER, 1)),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), _refused(NUMBER, 0)),
    **dict.fromkeys(("repetition_penalty", "length_penalty"), _refused(NUMBER, 1)),
    **dict.fromkeys(("ignore_eos", "use_beam_search", "early_stopping", "watermarking"), _refused(FLAG, False)),
    "min_tokens": _refused(INTEGER, 0),
    "logit_bias": _refused(NUMBERS, {}),
    "bad_words": _refused(TEXTS, []),
    "guided_json": _refused(TEXT_OR_OBJECT),
    "guided_choice": _refused(LIST),
    **dict.fromkeys(("guided_regex", "guided_grammar"), _refused(TEXT)),
    **dict.fromkeys(("structured_outputs", "structural_tag", "repetition_detection"), _refused(TEXT_OR_OBJECT)),
    **dict.fromkeys(("allowed_token_ids", "trace_decode_token_ids"), _refused(INTEGERS)),
    "thinking_token_budget": _refused(INTEGER),
    **dict.fromkeys(("extra_args", "vllm_xargs"), _refused(OBJECT, {})),
    "logits_processors": _refused(LIST, []),
    "truncate_prompt_tokens": Field(INTEGER, "refused", (), _READS),
    "truncation_side": Field(NAME, "ignored", (), "nothing is truncated"),
    "seed": Field(INTEGER, "ignored", (), "the run's own seed decides, or all completions of a group would be equal"),
    "top_logprobs": Field(INTEGER, "ignored", (0,), _ALONE),
    **dict.fromkeys(("prompt_logprobs", "prompt_logprob_start"), Field(INTEGER, "ignored", (), _ALONE)),
    **dict.fromkeys(("prompt_logprob_token_ids", "logprob_token_ids"), Field(LIST, "ignored", ([],), _ALONE)),
    "flat_logprobs": Field(FLAG, "ignored", (False,), _ALONE),
    **dict.fromkeys(("guided_decoding_backend", "guided_whitespace_pattern"), Field(TEXT, "ignored")),
    "include_stop_str_in_output": Field(FLAG, "ignored", (True,), "replies keep the text at which a run stops"),
    "output_kind": Field(INTEGER, "ignored", (), _SHOWS),
    "stream_interval": Field(INTEGER, "ignored", (), "a reply comes as a whole"),
    **dict.fromkeys(("skip_reading_prefix_cache", "skip_clone"), Field(FLAG, "ignored", (False,), _NO_ENGINE)),
    "routed_experts_prompt_start": Field(INTEGER, "ignored", (0,), "replies have no experts"),
    "priority": Field(INTEGER, "ignored", (0,), "the run's plan decides the order"),
}
"""Fields that either route may have, in the body or in its ``sampling_params``."""
_BOTH: Mapping[str, Field] = {
    **SAMPLING,
    "model": _used(NAME),
    "sampling_params": _used(OBJECT),
    "cache_salt": Field(NAME, "ignored", (), _NO_ENGINE),
    **dict.fromkeys(("kv_transfer_params", "ec_transfer_params"), Field(OBJECT, "ignored", (), _NO_ENGINE)),
    "session_id": Field(NAME, "ignored", (), "the address says which trajectory it is"),
}
_CHAT: Mapping[str, Field] = {
    **_BOTH,
    "messages": _used(LIST),
    "tools": _used(LIST),
    **dict.fromkeys(("stream", "return_token_ids", "return_tokens_as_token_ids"), _used(FLAG)),
    "stream_options": _used(FLAGS),
    "tool_choice": _refused(TEXT_OR_OBJECT, "auto"),
    "parallel_tool_calls": _refused(FLAG, True),
    "functions": _refused(LIST, []),
    "function_call": _refused(TEXT_OR_OBJECT, "auto"),
    "response_format": _refused(OBJECT, {"type": "text"}),
    "reasoning_effort": Field(NAME, "refused", (), _READS),
    "verbosity": _refused(NAME, "medium"),
    "chat_template_kwargs": _refused(OBJECT, {}),
    "chat_template": Field(TEXT, "refused", (), _READS),
    "documents": Field(LIST, "refused", ([],), _READS),
    "web_search_options": Field(OBJECT, "refused", (), _READS),
    **dict.fromkeys(("echo", "continue_final_message", "add_special_tokens"), _refused(FLAG, False)),
    "add_generation_prompt": _refused(FLAG, True),
    "modalities": _refused(TEXTS, ["text"]),
    "audio": Field(OBJECT, "refused", (), _TEXT_ALONE),
    "prediction": Field(OBJECT, "ignored", (), "it would save time alone"),
    "moderation": Field(OBJECT, "ignored", (), _NO_BOOKS),
    "metadata": Field(OBJECT, "ignored", ({},), _NO_BOOKS),
    "store": Field(FLAG, "ignored", (False,), _NO_BOOKS),
    **dict.fromkeys(("user", "safety_identifier"), Field(NAME, "ignored", (), _NO_BOOKS)),
    "service_tier": Field(NAME, "ignored", ("auto", "default"), _NO_BOOKS),
    **dict.fromkeys(("prompt_cache_key", "prompt_cache_retention"), Field(NAME, "ignored", (), _NO_ENGINE)),
    "prompt_cache_options": Field(OBJECT, "ignored", (), _NO_ENGINE),
    "include_reasoning": Field(FLAG, "ignored", (True,), "a reply has all that was sampled"),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens"), Field(FLAG, "ignored", (True,), _SHOWS)),
    "detokenize": Field(FLAG, "ignored", (True,), _SHOWS),
    **dict.fromkeys(("return_prompt_text", "return_token_offsets"), Field(FLAG, "ignored", (False,), _SHOWS)),
    **dict.fromkeys(("mm_processor_kwargs", "media_io_kwargs"), Field(OBJECT, "ignored", ({},), _TEXT_ALONE)),
    "mm_payload": Field(NAME, "ignored", (), _TEXT_ALONE),
    "return_mm_kwargs": Field(FLAG, "ignored", (), _TEXT_ALONE),
    "request_id": Field(NAME, "ignored", (), "the endpoint numbers replies"),
}
_TOKENS: Mapping[str, Field] = {
    **_BOTH,
    "token_ids": _used(INTEGERS),
    "request_id": _used(NAME),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens", "detokenize"), _used(FLAG)),  # of no text
    "stream": Field(FLAG, "refused", (False,), "a reply comes as a whole"),
    "stream_options": Field(FLAGS, "ignored", (), "a reply comes as a whole"),
    "output_mode": _refused(NAME, "tokens"),
    "features": Field(OBJECT, "refused", (), _TEXT_ALONE),
    "content_parts": Field(LIST, "refused", ([],), _TEXT_ALONE),
    "token_offsets": Field(LIST, "ignored", (), _SHOWS),
    "return_token_ids": Field(FLAG, "ignored", (False,), "the agent has sent them"),
    "reasoning_ended": Field(FLAG, "ignored", (), _NO_ENGINE),
    "reasoning_parser_kwargs": Field(OBJECT, "ignored", (), _NO_ENGINE),
}
FIELDS: Mapping[Route, Mapping[str, Field]] = {"chat": _CHAT, "tokens": _TOKENS}
"""The fields that the endpoint knows: those of OpenAI's chat completions API and of vLLM's extensions of it, and those
of vLLM's ``/inference/v1/generate``."""
_OF_RUN = {"max_completion_tokens": "max_tokens"}  # how model.sampling names a field


# ---- reading a request -----------------------------------------------------------------------------------


class Body(NamedTuple):
    """The body of a request whose fields have their types.

    Args:
        fields: The fields that are there, without those that are null.
        told: What the user is told of them once: by the name of a field, a sentence.
        unknown: Names of fields that the endpoint does not know.
    """

    fields: Mapping[str, Any]
    told: Mapping[str, str]
    unknown: Sequence[str]


def read_body(data: bytes, route: Route, sampling: SamplingParams, ends: Sequence[int]) -> Body:
    """Read the body of a request, and check its fields.

    Args:
        data: Body of the request, as bytes of JSON.
        route: The route that it came by.
        sampling: The sampling parameters of the trajectory.
        ends: The token ids at which the run ends a turn.

    Raises:
        Refused: It is no JSON object, a field has another type, or the run does not sample as a field asks.
    """
    fields = _filled(_read_json(data))
    told: dict[str, str] = {}
    unknown: list[str] = []
    for part in (fields, _filled(_checked("sampling_params", fields.get("sampling_params", {}), OBJECT))):
        for name, value in part.items():
            field = FIELDS[route].get(name)
            if field is None:
                unknown.append(name)
            elif sentence := _sentence(name, _checked(name, value, field.form), field, sampling, ends):
                told[name] = sentence
    return Body(fields, told, unknown)


def _read_json(data: bytes) -> dict[str, Any]:
    try:
        value = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        why = str(error).replace(" at line 1 column", " at column")
        if "hex escape" in why or "surrogate" in why:
            why = f"half of a surrogate pair, which is no character, {why.partition(' at ')[2]}"
        raise Refused(f"The request is not JSON in UTF-8: {why}; send a JSON object.") from None
    if not isinstance(value, dict):
        raise Refused("The request must be a JSON object.")
    return value


def _filled(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _checked(name: str, value: Any, form: Form) -> Any:
    try:
        return reader_of(form.type).validate_python(value, strict=True)
    except pydantic.ValidationError:
        raise Refused(f"{name} must be {form.name}, not {_shown(value)}.") from None


def _shown(value: Any) -> str:
    written = repr(value)
    return written if len(written) <= _SHOWN else f"{written[:_SHOWN]}..."


def _sentence(name: str, value: Any, field: Field, sampling: SamplingParams, ends: Sequence[int]) -> str | None:
    """Return what the user is told of a field once; None where it gets what it asks for."""
    if name in ("stop", "stop_token_ids"):
        return _check_ends(name, value, sampling, ends)
    if field.rule == "used" or value in field.same:
        return None
    if field.rule == "run":
        held = getattr(sampling, _OF_RUN.get(name, name))
        if value == held or (value == -1 and not held):  # -1 keeps all tokens, as 0 does
            return None
        return (
            f"An agent requests {name} {_shown(value)}, but gets {held}, the value of model.sampling, because all "
            "completions of a run are sampled with the same parameters."
        )
    if field.rule == "ignored":
        return f"An agent requests {name} {_shown(value)}, which is ignored, because {field.why}."
    if field.same:
        raise Refused(f"{name} must be {field.same[0]!r} here, not {_shown(value)}; leave it out.")
    raise Refused(f"{name} cannot be set here (it is {_shown(value)}), because {field.why}; leave it out.")


def _check_ends(name: str, value: Any, sampling: SamplingParams, ends: Sequence[int]) -> None:
    if name == "stop":
        if unknown := {*([value] if isinstance(value, str) else value)} - {*sampling.stop}:
            raise Refused(f"The run does not stop at {listed(sorted(unknown))}; name them in model.sampling.stop.")
    elif unknown := {*value} - {*ends}:
        raise Refused(
            f"The run does not stop at the token ids {listed(sorted(unknown))} of stop_token_ids, but at "
            f"{listed(ends)}; leave them out, or add them to eos_token_id of the policy's generation_config."
        )


# ---- conversations ----------------------------------------------------------------------------------------

_MEND = "send messages and tools as OpenAI's chat completions API describes them"
_Role = Annotated[str, pydantic.Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,63}$")]
_Name = Annotated[str, pydantic.Field(pattern=r"^[A-Za-z0-9_.:/-]{1,128}$")]


class _Called(TypedDict, total=False):
    name: str
    arguments: str | dict[str, Any] | None


class _Call(_Called, total=False):
    id: str | None
    type: Literal["function"] | None
    function: _Called


class _Message(TypedDict, total=False):
    role: Required[_Role]
    name: Annotated[str, pydantic.Field(max_length=1024)] | None
    tool_call_id: str | None
    tool_calls: list[_Call] | None
    reasoning: str | None
    reasoning_content: str | None
    refusal: str | None


class _Schema(TypedDict, total=False):
    type: str | list[str]
    anyOf: list[_Schema]
    oneOf: list[_Schema]
    properties: dict[str, _Schema]


class _Described(TypedDict, total=False):
    name: Required[_Name]
    description: str | None
    parameters: _Schema | None


class _Tool(TypedDict, total=False):
    type: Literal["function"]
    function: Required[_Described]


def read_messages(given: Sequence[Any] | None) -> list[Message]:
    """Return the messages of a request, each with its content as one text."""
    if not given:
        raise Refused("messages must be a list of chat messages.")
    messages: list[Message] = []
    for number, message in enumerate(given):
        try:
            messages.append(read_message(message))
        except UnusableRow as error:
            raise Refused(f"The request {error} (messages[{number}]).") from None
    _check(messages, list[_Message], "messages")
    return messages


def read_tools(given: Sequence[Any] | None) -> dict[str, Tool]:
    """Return the tools of a request, by name."""
    _check(given or [], list[_Tool], "tools")
    tools: dict[str, Tool] = {}
    for each in given or ():
        function = _filled(each["function"])
        if function["name"] in tools:
            raise Refused(f"tools has two functions with the name {function['name']!r}; rename one of them.")
        schema = {"type": "function", **_filled(each), "function": function}
        tools[function["name"]] = Tool(function["name"], _elsewhere, schema)
    return tools


def _check(value: Any, form: Any, name: str) -> None:
    try:
        typed(value, form, name, _MEND)
    except ValueError as error:
        raise Refused(str(error)) from None


def _elsewhere(**arguments: Any) -> None:
    """Stand for a tool that the agent calls itself."""
