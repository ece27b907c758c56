"""Who is asked, and the norms of gradients, on two ranks: real processes and gloo. This file is also their script."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import forks
import pytest
import torch
from conftest import random_policy
from hand_made import (
    Batches,
    StepRecorder,
    flat,
    make_module,
    make_trainer,
    random_groups,
    relative_error,
    sgd,
    weights_of,
)

from lit_grpo.callbacks import RolloutScheduler, WeightSync
from lit_grpo.data.module import PromptDataModule
from lit_grpo.plugins import Plugin, RunNumbers
from lit_grpo.rewards import RewardSpec
from lit_grpo.types import RolloutGroup, SamplingParams
from lit_grpo.update.step import Step

pytestmark = [pytest.mark.nightly, pytest.mark.filterwarnings("ignore")]

TESTS = Path(__file__).parent.parent
REWARDS = [[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 1.0, 0.0], [1.0, 1.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0]]
"""Of four prompts, the last of which teaches nothing."""
RULES = {"dps": ["dps:candidates=2"], "gdro": ["prompt_gdro:bins=2", "rollout_gdro"]}


class Hearing(Plugin):
    """Keeps what it hears."""

    def __init__(self) -> None:
        self.heard: list[tuple[float, float, float]] = []

    @property
    def numbers(self) -> RunNumbers:
        return RunNumbers(num_parts=2)

    def on_optimizer_step(self, step: Step) -> None:
        self.heard += [(norm.square, norm.signal, norm.noise) for norm in step.norms]


def mark(completion: str, prompt: str) -> float:
    return float(sum(map(ord, completion)) % (2 + int(prompt[0]) % 3) == 0)


def measure(policy: str, groups: list[RolloutGroup], sizer: Plugin | None, **trainer: Any) -> torch.Tensor:
    """Learn from groups once; return the gradient."""
    module, recorder = make_module(policy, [] if sizer is None else [sizer]), StepRecorder()
    make_trainer(recorder, **trainer).fit(module, train_dataloaders=Batches([groups]))
    return flat(recorder.gradients[0])


def ask(policy: str, output: Path, name: str, plugins: list[str], **trainer: Any) -> dict[str, Any]:
    """Seven batches of four prompts in all, of nine that there are."""
    folder = output / f"{name}-{trainer.get('devices', 1)}"
    folder.mkdir(exist_ok=True)
    (folder / "train.jsonl").write_text("\n".join(json.dumps({"prompt": f"{n}+{n}="}) for n in range(9)))
    size = 4 // trainer.get("devices", 1)
    data = PromptDataModule(policy, train=str(folder / "train.jsonl"), batch_size=size)
    options: dict[str, Any] = {"rewards": [RewardSpec(f"{__file__}:mark")], "sampling": SamplingParams(max_tokens=16)}
    module = make_module(policy, optimizer=sgd(0.3), **options)
    scheduler = RolloutScheduler(plugins=[*plugins])
    own = {"max_steps": 7, "max_epochs": -1, "limit_val_batches": 0, "default_root_dir": str(folder)}
    make_trainer(scheduler, WeightSync(), **own, **trainer).fit(module, datamodule=data)
    stream, records = data.state_dict(), module.learner.history.state_dict()
    sizer = scheduler.session.sizer
    kept = {} if sizer is None else sizer.state_dict()
    return {"stream": stream, "records": records, "weights": weights_of(module), "sizer": kept}


def main(policy: str, output: str) -> None:
    """Be one of two ranks."""
    torch.set_num_threads(1)
    devices: dict[str, Any] = {"devices": 2, "strategy": "ddp"}
    rank, sizer = int(os.environ.get("LOCAL_RANK", 0)), Hearing()
    groups = random_groups(random_policy(), REWARDS, noise=0.05)[2 * rank : 2 * rank + 2]
    found: dict[str, Any] = {"gradient": measure(policy, groups, sizer, **devices), "heard": sizer.heard}
    for name, plugins in RULES.items():
        found[name] = ask(policy, Path(output), name, plugins, **devices)
    grown = ["norm_test:eta=0.2,most=8,warm_up=1,smoothing=0.5"]
    found["norm_test"] = ask(policy, Path(output), "norm_test", grown, **devices)
    torch.save(found, Path(output) / f"rank-{rank}.pt")


@pytest.fixture(scope="module")
def ranks(policy_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What came of the runs on each rank."""
    output = tmp_path_factory.mktemp("ranks")
    python_path = os.pathsep.join([str(TESTS), str(TESTS / "integration"), str(TESTS.parent)])
    environment = os.environ | {"PYTHONPATH": python_path, "OMP_NUM_THREADS": "1"}
    process = forks.run([sys.executable, __file__, str(policy_folder), str(output)], 400, env=environment, cwd=output)
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-4000:]
    return [torch.load(output / f"rank-{rank}.pt", weights_only=False) for rank in (0, 1)]


def test_norms_are_of_each_ranks_prompts_and_the_gradient_is_that_of_one_process(
    ranks: list[dict[str, Any]], policy_folder: Path
) -> None:
    groups = random_groups(random_policy(), REWARDS, noise=0.05)
    whole = measure(str(policy_folder), groups, None)
    for outcomes in ranks:
        assert relative_error(outcomes["gradient"], whole) < 1e-5
    tokens = [sum(r.completion.num_trained for r in group.rollouts) for group in groups]
    each = [
        measure(str(policy_folder), [group], None) * of_it / sum(tokens)
        for group, of_it in zip(groups[:3], tokens, strict=False)
    ]
    one, other, third = each  # the fourth has none
    expected = [
        (float(one @ one + third @ third), 2 / 16, 2 / 16),
        (float((one + other) @ (one + other) + third @ third), 8 / 16, 4 / 16),
        (float(whole @ whole), 1.0, 1 / 4),
    ]
    for outcomes in ranks:
        assert outcomes["heard"] == [pytest.approx(norm, rel=1e-4) for norm in expected]


@pytest.mark.parametrize("name", RULES)
def test_two_ranks_ask_as_one_process_does(
    name: str, ranks: list[dict[str, Any]], policy_folder: Path, tmp_path: Path
) -> None:
    first, second = (outcomes[name] for outcomes in ranks)
    assert first["stream"] == second["stream"] and first["records"] == second["records"]
    assert torch.equal(first["weights"], second["weights"])
    if name != "gdro":  # whose budget each rank divides for its own prompts
        alone = ask(str(policy_folder), tmp_path, name, RULES[name])
        assert first["stream"].pop("ask") == pytest.approx(alone["stream"].pop("ask"))
        assert first["stream"] == alone["stream"] and first["records"].keys() == alone["records"].keys()
        assert relative_error(first["weights"], alone["weights"]) < 1e-5


def test_ranks_agree_how_large_a_batch_is(ranks: list[dict[str, Any]]) -> None:
    first, second = (outcomes["norm_test"] for outcomes in ranks)
    assert first["sizer"] == second["sizer"] and 2 <= first["sizer"]["prompts"] <= 4
    assert first["stream"] == second["stream"] and torch.equal(first["weights"], second["weights"])


if __name__ == "__main__":
    main(*sys.argv[1:])
