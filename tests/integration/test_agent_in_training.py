"""Runs on what agents do that know nothing of this project, with the client of ``openai``."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import lightning.pytorch as pl
import pytest
from conftest import read_metrics, table_rows

import lit_grpo
from lit_grpo.plugins import Listener
from lit_grpo.tasks.calculator import calculate
from lit_grpo.types import Completion
from tests.doubles.conversations import chat_tokenizer, chatty_policy

ROOT = Path(__file__).parents[2]
GIVEN: list[list[list[int]]] = []
"""The token ids of each trajectory's turns, as agents got them."""


def solve(base_url: str, api_key: str, prompt: str, **columns: Any) -> float:
    """Two turns, of which the second is streamed."""
    openai = importlib.import_module("openai")
    client = openai.OpenAI(base_url=base_url, api_key=api_key)
    ids = {"return_token_ids": True, "stop_token_ids": [chat_tokenizer().eos_token_id]}  # where the policy's turns end
    asked: Any = {"model": client.models.list().data[0].id, "extra_body": ids}
    messages: list[Any] = [{"role": "user", "content": prompt}]
    choice = client.chat.completions.create(messages=messages, **asked).choices[0]
    messages += [choice.message.model_dump(), {"role": "user", "content": "Once more."}]
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(messages=messages, stream=True, **asked)]
    text = "".join(chunk.delta.content or "" for chunk in chunks)
    GIVEN.append([choice.token_ids, chunks[0].token_ids])
    assert chunks[-1].finish_reason == "stop" and text == decoded(GIVEN[-1][1])
    return float(len(text) % 5)


def earning(base_url: str, api_key: str, prompt: str, **columns: Any) -> Any:
    """The same, with what each turn earned."""
    reward = solve(base_url, api_key, prompt)
    return {"reward": reward, "turn_rewards": [float(len(turn) % 2) for turn in GIVEN[-1]]}


async def async_solve(base_url: str, api_key: str, prompt: str, **columns: Any) -> float:
    openai = importlib.import_module("openai")
    messages: list[Any] = [{"role": "user", "content": prompt}]
    given: list[list[int]] = []
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for _ in range(2):
            create = client.chat.completions.create
            answered = await create(model="any", messages=messages, extra_body={"return_token_ids": True})
            given.append(answered.choices[0].token_ids)
            await asyncio.sleep(0.01)
            messages += [answered.choices[0].message, {"role": "user", "content": "Once more."}]
    GIVEN.append(given)
    return float(len(given[1]) % 5)


TOOL = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Compute an arithmetic expression.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}
HTTP = httpx.Client(timeout=600, trust_env=False)


def calculates(base_url: str, api_key: str, prompt: str, **columns: Any) -> None:
    """Calls the calculator as the policy says, and lets its answers be read."""
    messages: list[Any] = [{"role": "user", "content": prompt}]
    for _ in range(3):
        headers, asked = {"Authorization": f"Bearer {api_key}"}, {"messages": messages, "tools": [TOOL]}
        answered = HTTP.post(f"{base_url}/chat/completions", json=asked, headers=headers)
        if answered.status_code == 400 and answered.json()["error"]["code"] == "context_length_exceeded":
            return
        messages.append(answered.raise_for_status().json()["choices"][0]["message"])
        for call in messages[-1].get("tool_calls", []):
            try:
                said = calculate(**json.loads(call["function"]["arguments"]))
            except Exception as error:  # as the policy is told of it by environments
                said = str({"error": str(error)})
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": said})
        if messages[-1]["role"] == "assistant":
            return


MALFORMED: list[dict[str, Any]] = [
    {"stop": 5},
    {"stream_options": 5},
    {"guided_regex": "a+"},
    {"structured_outputs": {"regex": "a+"}},
    {"temperature": "hot"},
    {"messages": "Say something."},
    {"tools": [{"type": "function"}]},
    {"top_logprobs": [1]},
    {"n": 10**30},
    {"messages": [{"role": "user", "content": "x" * 10**7}]},
]


def careless(base_url: str, api_key: str, prompt: str, number: int, **columns: Any) -> float:
    """Two turns; the agent of one row sends malformed requests between them."""
    headers, url = {"Authorization": f"Bearer {api_key}"}, f"{base_url}/chat/completions"
    messages: list[Any] = [{"role": "user", "content": prompt}]
    answered = HTTP.post(url, json={"messages": messages, "seed": number}, headers=headers).raise_for_status()
    messages += [answered.json()["choices"][0]["message"], {"role": "user", "content": "Once more."}]
    for fields in MALFORMED if number == 0 else ():
        refused = HTTP.post(url, json={"messages": messages, **fields}, headers=headers)
        assert refused.status_code == 400 and refused.json()["error"]["message"].endswith("."), refused.text
    return float(len(HTTP.post(url, json={"messages": messages}, headers=headers).raise_for_status().text) % 5)


@pytest.mark.nightly
def test_malformed_requests_of_one_agent_cost_no_trajectory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    hears = Hears()
    run = lit_grpo.train(
        chatty_policy(chat_tokenizer()),
        [{"prompt": "Say something.", "number": number} for number in range(2)],
        [],
        tokenizer=chat_tokenizer(),
        max_steps=1,
        batch_size=2,
        num_generations=4,
        sampling={"max_tokens": 400, "max_observed": 60},
        callbacks={"rollout": {"plugins": [{"agent": {"run": careless, "timeout_s": 20}}]}},
        trainer={"accelerator": "cpu", "callbacks": [hears], "enable_progress_bar": False},
    )
    assert len(hears.completions) == 8 and all(len(each.turns) == 2 for each in hears.completions)
    (row,) = [row for row in read_metrics(run.folder / "metrics.csv") if row.get("environments/turns")]
    assert float(row["environments/refused_requests"]) == 4 * len(MALFORMED)
    assert float(row["environments/dropped"]) == float(row["environments/failures"]) == 0


def decoded(token_ids: Sequence[int]) -> str:
    return str(chat_tokenizer().decode(token_ids, skip_special_tokens=True))


class Hears(pl.Callback, Listener):
    def __init__(self) -> None:
        self.completions: list[Completion] = []

    def on_completion(self, completion: Completion) -> None:
        self.completions.append(completion)


@pytest.mark.parametrize(
    ("agent", "credit"),
    table_rows([(solve, []), (async_solve, []), (earning, ["mt_grpo"])], [(earning, ["mt_grpo"])]),
)
def test_an_agent_of_openais_client_trains_on_the_tokens_that_were_sampled(
    agent: Any, credit: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("openai")
    monkeypatch.chdir(tmp_path)
    GIVEN.clear()
    hears, policy = Hears(), chatty_policy(chat_tokenizer())
    before = {name: value.clone() for name, value in policy.named_parameters()}
    rows = [{"prompt": "Say something.", "seed": number} for number in range(4)]
    run = lit_grpo.train(
        policy,
        rows,
        [],
        tokenizer=chat_tokenizer(),
        max_steps=2,
        batch_size=2,
        num_generations=3,
        sampling={"max_tokens": 400, "max_observed": 60},
        callbacks={"rollout": {"plugins": [{"agent": {"run": agent}}, *credit]}},
        trainer={"accelerator": "cpu", "callbacks": [hears], "enable_progress_bar": False},
    )
    assert len(hears.completions) == 12 and all(len(each.turns) == 2 for each in hears.completions)
    assert sorted(each.turns for each in hears.completions) == sorted(GIVEN)
    for completion in hears.completions:
        assert completion.token_ids_T[completion.trained_T].tolist() == [
            token for turn in completion.turns for token in turn
        ]
    logged = read_metrics(run.folder / "metrics.csv")
    values = {name: [float(row[name]) for row in logged if row.get(name)] for name in logged[0]}
    assert values["environments/turns"] == [2, 2] and values["environments/refused_requests"] == [0, 0]
    assert values["environments/dropped"] == [0, 0] and len(values[f"rewards/{agent.__name__}/mean"]) == 2
    assert any((value != before[name]).any() for name, value in policy.named_parameters())


def fit(folder: Path, name: str, *words: str) -> list[dict[str, str]]:
    """The rows that a run of the calculator's config logs."""
    few = ["--data.batch_size", "4", "--trainer.limit_val_batches", "0", "--run.name", name]
    command = [sys.executable, "-m", "lit_grpo", "fit", "--config", "calculator", *words, *few]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return read_metrics(folder / "runs" / name / "metrics.csv")


AGENT = ["--rollout.plugins", json.dumps([{"agent": {"run": f"{__file__}:calculates"}}])]


@pytest.mark.nightly
def test_an_agent_that_does_as_an_environment_is_trained_on_as_one(tmp_path: Path) -> None:
    """Where it calls the tool itself, each trajectory has the same tokens; they may come in another order."""
    runs = [fit(tmp_path, name, "--trainer.max_steps", "2", *more) for name, more in (("plain", []), ("agent", AGENT))]
    names = ("reward", "environments/turns", "environments/tool_calls", "completions/mean_length", "grad_norm")
    plain, agent = ([[float(row[name]) for name in names] for row in run if row["reward"]] for run in runs)
    assert [row[:-1] for row in plain] == [row[:-1] for row in agent] and len(plain) == 2 and plain[1][2] > 0
    assert [row[-1] for row in agent] == pytest.approx([row[-1] for row in plain], rel=1e-5)


@pytest.mark.nightly
def test_vllm_answers_agents_too(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    row = fit(tmp_path, "vllm", "--config", "generators/vllm", "--trainer.max_steps", "1", *AGENT)[-1]
    assert float(row["environments/tool_calls"]) > 0 and float(row["environments/turns"]) > 1
    assert float(row["sampling/logprob_gap_mean"]) < 1e-4  # of the tokens of all turns
