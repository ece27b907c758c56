"""A run that is really killed while agents are at work, and goes on from its checkpoint."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import lightning.pytorch as pl
import pytest
from conftest import read_metrics

from lit_grpo.types import PromptBatch
from tests.doubles.conversations import chat_tokenizer, chatty_policy

ROOT = Path(__file__).parents[2]
ASKING, SILENT, LATER, NEVER = 2, 3, 6, 8
"""Rows whose agents are at work when the run is killed: two since the first update, with a turn and without one, and
one since the second. From the last of these rows on they are at work at the end, too."""
TRAINED_ON = {1: {0, 1}, 2: {4, 5}, 3: {2, 3}, 4: {6, 7}}
"""The rows of each update; the run is killed in the third."""
NUM_GENERATIONS = 2


def note(name: str, **values: Any) -> None:
    with Path(name).open("a") as file:
        file.write(json.dumps(values) + "\n")


def noted(folder: Path, name: str) -> list[dict[str, Any]]:
    path = folder / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


async def until(name: str, lines: int = 1) -> None:
    while len(noted(Path(), name)) < lines:
        await asyncio.sleep(0.02)


async def works(base_url: str, api_key: str, session_id: str, number: int, **columns: Any) -> float:
    """Take two turns; agents of some rows wait for what comes only after the kill."""
    note("begun.jsonl", number=number, base_url=base_url, api_key=api_key, session_id=session_id)
    messages: list[Any] = [{"role": "user", "content": "Say something."}]
    async with httpx.AsyncClient(timeout=60, trust_env=False, headers={"Authorization": f"Bearer {api_key}"}) as client:
        if number == 5:
            await until("asked.jsonl", NUM_GENERATIONS)
        if number == SILENT:
            await until("resumed.jsonl")
        if number >= LATER:
            await until("ended.jsonl", 2 * NUM_GENERATIONS if number < NEVER else 99)
        for turn in range(2):
            answered = await client.post(f"{base_url}/chat/completions", json={"messages": messages})
            messages += [
                answered.raise_for_status().json()["choices"][0]["message"],
                {"role": "user", "content": "On."},
            ]
            if number == ASKING and not turn:
                note("asked.jsonl", number=number)
                await until("resumed.jsonl")
        if number in (ASKING, SILENT):
            note("ended.jsonl", number=number)
        if number == LATER:
            before = noted(Path(), "begun.jsonl")[0]
            for url, key in (
                (base_url, before["api_key"]),
                (base_url.replace(session_id, before["session_id"]), api_key),
            ):
                headers = {"Authorization": f"Bearer {key}"}
                answered = await client.post(f"{url}/chat/completions", json={"messages": messages}, headers=headers)
                note("refused.jsonl", status=answered.status_code, is_same=key == api_key)
    return float(len(messages[-2]["content"]) % 5)


class Notes(pl.Callback):
    """Notes what each update has trained on."""

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: PromptBatch, batch_idx: int
    ) -> None:
        for group in batch.groups:
            for rollout in group.rollouts:
                completion = rollout.completion
                row, turns = completion.request.prompt.columns["number"], len(completion.turns)
                note(
                    "trained_on.jsonl", step=trainer.global_step, row=row, path=completion.request.path[0], turns=turns
                )


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    """Start the run, in a process of its own."""
    few = {
        "run.name": "kept",
        "model.policy": "policy",
        "model.num_generations": NUM_GENERATIONS,
        "model.sampling": {"max_tokens": 400, "max_observed": 60},
        "rollout.plugins": [
            "april",
            {"agent": {"run": f"{__file__}:works", "timeout_s": 600, "trajectory_timeout_s": 600}},
        ],
        "data.train": "rows.jsonl",
        "data.shuffle": False,
        "data.batch_size": 2,
        "checkpoint.every_n_updates": 1,
        "trainer.max_steps": len(TRAINED_ON),
        "trainer.accelerator": "cpu",
        "trainer.callbacks": [{"class_path": f"{Path(__file__).stem}.Notes"}],
    }
    options = [f"--{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in few.items()]
    paths = [ROOT, ROOT / "tests", Path(__file__).parent]
    return subprocess.Popen(
        [sys.executable, "-m", "lit_grpo", "fit", *options, *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.nightly
def test_agents_at_work_when_a_run_is_killed_begin_again_and_nothing_is_lost_or_trained_on_twice(
    tmp_path: Path,
) -> None:
    chatty_policy(chat_tokenizer()).save_pretrained(tmp_path / "policy")
    chat_tokenizer().save_pretrained(tmp_path / "policy")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"number": row}) + "\n" for row in range(20)))
    checkpoints = tmp_path / "runs" / "kept" / "checkpoints"
    run = start(tmp_path)
    most = time.monotonic() + 240
    while len(noted(tmp_path, "begun.jsonl")) < 8 * NUM_GENERATIONS or _kept(checkpoints) < 2:
        assert run.poll() is None and time.monotonic() < most, run.communicate()[0] if run.poll() is not None else ""
        time.sleep(0.05)
    run.kill()
    run.wait()
    (tmp_path / "resumed.jsonl").write_text("{}\n")
    assert {each["step"] for each in noted(tmp_path, "trained_on.jsonl")} == {1, 2}
    resumed = start(tmp_path, "--ckpt_path", str(checkpoints / "last.ckpt"))
    said, _ = resumed.communicate(timeout=300)
    assert resumed.returncode == 0, said

    trained_on = noted(tmp_path, "trained_on.jsonl")
    assert sorted((each["step"], each["row"], each["path"]) for each in trained_on) == [
        (step, row, path)
        for step, rows in TRAINED_ON.items()
        for row in sorted(rows)
        for path in range(NUM_GENERATIONS)
    ]
    assert {each["turns"] for each in trained_on} == {2}
    begun = Counter(each["number"] for each in noted(tmp_path, "begun.jsonl"))
    twice = {ASKING, SILENT, LATER, LATER + 1}
    assert begun == {row: (1 + (row in twice)) * NUM_GENERATIONS for row in begun} and begun.keys() >= {*range(NEVER)}
    rows = read_metrics(tmp_path / "runs" / "kept" / "metrics.csv")
    restarted = [float(row["environments/restarted"]) for row in rows if row.get("environments/restarted")]
    assert restarted == [0, 0, 2 * NUM_GENERATIONS, 0]  # those of the checkpoint, with a turn and without one
    refused = {(each["status"], each["is_same"]) for each in noted(tmp_path, "refused.jsonl")}
    assert refused == {(401, False), (404, True)}  # what the killed run gave out is worth nothing


def _kept(checkpoints: Path) -> int:
    """The number of updates that the last checkpoint has."""
    import torch

    path = checkpoints / "last.ckpt"
    return torch.load(path, weights_only=False, mmap=True)["global_step"] if path.exists() else 0
