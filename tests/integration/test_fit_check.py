"""What a run is said to take, beside what it takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from benchmarks.make_tiny import make_tokenizer
from benchmarks.memory_case import Case
from benchmarks.processes import LEAN, measured
from benchmarks.random_policies import Sizes as Qwen3Sizes
from benchmarks.random_policies import random_qwen3
from lit_grpo.tools.commands.fit_check import main as fit_check
from lit_grpo.training.forecast import Demand, Sizes, forecast, largest

pytestmark = pytest.mark.integration


@pytest.mark.nightly
def test_the_forecast_is_above_the_measured_peaks_by_at_most_two_fifths(tmp_path: Path) -> None:
    policy: Any = random_qwen3(Qwen3Sizes(4, 256, 1024, 8, 4, 32))
    policy.save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    case = Case("lit_grpo", str(tmp_path), "cpu", 2, group_size=256, num_slots=32, max_tokens=128,
                max_tokens_per_micro_batch=4096)  # fmt: skip
    figures = measured("benchmarks.memory_case", case, LEAN)
    sizes = Sizes.of(AutoConfig.from_pretrained(tmp_path))
    taken = forecast(sizes, Demand(32, 256, prompt_tokens=8, max_tokens=128, micro_batch_tokens=4096))
    assert sizes.parameters == policy.num_parameters()
    assert taken.resident["weights"] == 4 * policy.num_parameters()
    update = sum(taken.update.values()) / 2**20  # the moments of AdamW come when the activations have gone
    assert 1.0 <= update / figures["update_mib"] <= 1.4, (update, figures)
    rollout = sum(taken.rollout.values()) / 2**20
    assert 0.8 <= rollout / figures["rollout_mib"] <= 1.4, (rollout, figures)


def test_what_is_largest_fits_and_one_more_does_not() -> None:
    sizes = Sizes(4, 10**6, 4000, 10**5, 256, 256, 25_000.0, 5000.0)
    demand = Demand(32, 8, 64, 128, 2048)
    for field in ("num_slots", "micro_batch_tokens"):
        limit = 400 * 2**20
        most = largest(sizes, demand, field, limit)
        at, beyond = (forecast(sizes, Demand(**{**vars(demand), field: value})).peak for value in (most, most + 1))
        assert at <= limit < beyond


def test_the_command_tells_what_fits(capsys: pytest.CaptureFixture[str]) -> None:
    for memory, verdict, code in (("8GiB", "it fits into 8 GiB", 0), ("64MiB", "it does not fit into 0.0625 GiB", 1)):
        with pytest.raises(SystemExit) as exit_:
            fit_check(["--config", "arithmetic", "--memory", memory])
        said = capsys.readouterr().out
        assert exit_.value.code == code and verdict in said
        assert "keys and values" in said and "model.generator.num_slots can be" in said
    with pytest.raises(SystemExit, match="2"):
        fit_check(["--config", "arithmetic", "--model.generator", "vllm"])
    assert "reserves its memory by itself" in capsys.readouterr().err
