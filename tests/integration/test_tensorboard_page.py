"""TensorBoard on a run's folder, as a browser draws it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import random_policy

import lit_grpo
from lit_grpo.policy.loading import load_tokenizer
from lit_grpo.tools.dashboard import sections

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, policy_folder: Path) -> Path:
    """The folder of a run of two updates."""
    policy: Any = random_policy()
    return lit_grpo.train(
        policy,
        [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(2)],
        ["lit_grpo.rewards.exact_match"],
        tokenizer=load_tokenizer(str(policy_folder)),
        max_steps=2,
        batch_size=2,
        num_generations=2,
        sampling={"max_tokens": 4},
        dir=str(tmp_path_factory.mktemp("runs")),
        trainer={"accelerator": "cpu", "enable_progress_bar": False},
    ).folder


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    """Where TensorBoard shows it."""
    pytest.importorskip("tensorboard")
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(folder.parent), "--host", "127.0.0.1"]
    with subprocess.Popen([*command, "--port", "0"], stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        said = iter(server.stderr.readline, "")
        yield next(found[0] for line in said if (found := re.search(r"http://\S+", line)))
        server.terminate()


def test_the_first_card_is_the_reward_and_sections_come_in_their_order(
    browser: Any, address: str, folder: Path
) -> None:
    page = browser.new_page(viewport={"width": 1360, "height": 900})
    page.goto(address)
    card = page.locator("card-view").first
    card.get_by_text(folder.name).first.wait_for(timeout=60_000)  # the table below the curve
    assert "".join(card.inner_text().split("\n")[:2]) == "1 Learning/reward"
    groups = [title for title in page.locator(".group-title").all_inner_texts() if title[0].isdigit()]
    titles = [f"{number} {section.title}" for number, section in enumerate(sections(), 1)]
    assert len(groups) > 2 and groups == titles[: len(groups)]  # the last is for metrics of one's own
    page.close()
