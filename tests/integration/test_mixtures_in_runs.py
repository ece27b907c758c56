"""Runs on several data sets: what is drawn, rewarded, logged and refused."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import read_metrics

import lit_grpo
from lit_grpo.plugins import Plugin
from lit_grpo.rewards import RewardSpec

pytestmark = pytest.mark.filterwarnings("ignore")
ROWS = [
    {"prompt": f"{number}+1=", "answer": str(number), **({"hint": "x"} if name == "b" else {}), "dataset": name}
    for name, size in (("a", 6), ("b", 4))
    for number in range(size)
]


def of_a(completion: str, answer: str) -> float:
    return float(sum(map(ord, completion)) % 3)


def of_b(completion: str, hint: str) -> float:
    return float(len(completion) % 2)


class Answering(Plugin):
    """Answers each turn with nothing."""

    def on_turn(self, completion: Any) -> None:
        return None


REWARDS = [RewardSpec(f"{__file__}:of_a", datasets=["a"]), RewardSpec(f"{__file__}:of_b", datasets=["b"])]
SIZES: dict[str, Any] = {
    "max_steps": 3,
    "batch_size": 4,
    "num_generations": 2,
    "sampling": {"max_tokens": 4},
    "eval_sampling": {"max_tokens": 4},
    "trainer": {"enable_progress_bar": False, "accelerator": "cpu", "val_check_interval": 3},
}


def train(policy: Path, folder: Path, **changes: Any) -> Any:
    data = {"mixture": {"weights": {"a": 3, "b": 1}}}
    settings: dict[str, Any] = {"validation": ROWS, "rewards": REWARDS, "data": data, **SIZES, **changes}
    return lit_grpo.train(str(policy), ROWS, settings.pop("rewards"), dir=str(folder), **settings)


def test_each_data_set_has_its_share_its_rewards_and_its_metrics(policy_folder: Path, tmp_path: Path) -> None:
    plugins = [{"drpo": {"datasets": ["b"]}}, {"nat_uniform": {"datasets": ["a"]}}]
    run = train(policy_folder, tmp_path, callbacks={"rollout": {"plugins": plugins}})
    rows = [row for row in read_metrics(run.folder / "metrics.csv") if row["datasets/a/reward"]]
    assert [(row["datasets/a/prompts"], row["datasets/b/prompts"]) for row in rows] == [("3.0", "1.0")] * 3
    for row in rows:
        assert float(row["datasets/a/reward"]) == pytest.approx(float(row["rewards/of_a/mean"]))
        assert float(row["datasets/b/reward"]) == pytest.approx(float(row["rewards/of_b/mean"]))
    held_out = [row for row in read_metrics(run.folder / "metrics.csv") if row["val/datasets/a/pass@1"]]
    assert len(held_out) == 2
    for row in held_out:
        by_dataset = [float(row[f"val/datasets/{name}/pass@1"]) for name in "ab"]
        assert (6 * by_dataset[0] + 4 * by_dataset[1]) / 10 == pytest.approx(float(row["val/pass@1"]))


def test_a_killed_mixture_resumes_bit_by_bit(policy_folder: Path, tmp_path: Path) -> None:
    whole = train(policy_folder, tmp_path / "whole", max_steps=4, callbacks={"checkpoint": {"every_n_updates": 2}})
    part = train(policy_folder, tmp_path / "part", max_steps=2)
    from lit_grpo.__main__ import start

    arguments = ["fit", "--config", str(part.folder / "config.yaml"), "--trainer.max_steps", "4"]
    with pytest.MonkeyPatch.context() as patch:
        last = str(part.folder / "checkpoints" / "last.ckpt")
        patch.setattr("sys.argv", ["lit_grpo", *arguments, "--ckpt_path", last])
        start()
    found, expected = (
        torch.load(run.folder / "checkpoints" / "last.ckpt", weights_only=False)["state_dict"] for run in (part, whole)
    )
    assert all(torch.equal(found[name], expected[name]) for name in expected)


UNKNOWN = r"reward 'of_c' is limited to data set 'c', but the data sets are 'a', 'b'; name one of them"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a reward of an unknown data set": (
        {"rewards": [*REWARDS, RewardSpec(f"{__file__}:of_a", name="of_c", datasets=["c"])]},
        UNKNOWN,
    ),
    "a plug-in of an unknown data set": (
        {"callbacks": {"rollout": {"plugins": [{"drpo": {"datasets": ["d"]}}]}}},
        r"rollout\.plugins drpo \(d\) is limited to data set 'd'",
    ),
    "turns that another data set has": (
        {
            "callbacks": {
                "rollout": {
                    "plugins": [
                        {f"{__name__}.Answering": {"datasets": ["b"]}},
                        {"echo": {"datasets": ["a"]}},
                    ]
                }
            }
        },
        r"echo \(a\) needs completions of several turns, but this run on 'a' has one turn per completion; add envir",
    ),
    "a data set without a reward": ({"rewards": REWARDS[:1]}, "Data set 'b' has no reward function with a weight"),
    "no data sets": ({"data": {}}, "no row names a data set; set data.mixture"),
    "a data set without a weight": ({"data": {"mixture": {"weights": {"a": 1}}}}, "has no weight for 'b'"),
    "a column that its rows lack": (
        {"rewards": [RewardSpec(f"{__file__}:of_b", datasets=["a"]), RewardSpec(f"{__file__}:of_a", datasets=["b"])]},
        "'hint'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_data_set_has_is_refused_before_anything_is_written(
    case: str, policy_folder: Path, tmp_path: Path
) -> None:
    changes, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        train(policy_folder, tmp_path, **changes)


def test_a_data_set_of_weight_0_is_imitated_and_never_sampled(policy_folder: Path, tmp_path: Path) -> None:
    plugins = [{"sft": {"column": "answer", "datasets": ["b"], "weight": 0.5}}]
    settings: dict[str, Any] = {"callbacks": {"rollout": {"plugins": plugins}}, "rewards": REWARDS[:1]}
    run = train(policy_folder, tmp_path, data={"mixture": {"weights": {"a": 1, "b": 0}}}, validation=None, **settings)
    rows = [row for row in read_metrics(run.folder / "metrics.csv") if row["ce/loss"]]
    assert Counter(row["datasets/a/prompts"] for row in rows) == {"4.0": 3}
    assert all("datasets/b/prompts" not in row or not row["datasets/b/prompts"] for row in rows)
