"""What boards are told of a real run: every metric explained, at its own update, under its section."""

from __future__ import annotations

import io
import json
import math
import re
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from conftest import random_policy, read_metrics
from wandb_file import WandbRun, read_wandb

import lit_grpo
from lit_grpo.cli.command_line import run
from lit_grpo.policy.loading import load_tokenizer
from lit_grpo.tools.dashboard import explain, sections
from lit_grpo.tools.dashboard.tensorboard import tag

ROOT = Path(__file__).parents[2]
STEP = "trainer/global_step"
# Two updates a batch, and all that adds a metric on the embedded generator.
CONFIG = {
    "seed_everything": 7,
    "run": {"name": "task", "wandb": "offline"},
    "trainer": {"accelerator": "cpu", "enable_progress_bar": False, "val_check_interval": 1},
    "model": {
        "rewards": [{"function": "lit_grpo.rewards.ExactMatch", "name": "errors"}, {"function": "rewards.py:digits"}],
        "generator": {"class_path": "lit_grpo.rollout.slots.SlotGenerator", "init_args": {"num_slots": 4}},
        "num_generations": 4,
        "num_minibatches": 2,
        "sampling": {"max_tokens": 16},
        "objective": {
            "kl": {"beta": 0.01, "target": 0.1},
            "off_policy_threshold": 10.0,
            "off_policy_kl": 50.0,
            "correction": {"mode": "token_truncate"},
        },
        "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 1e-3}},
    },
    "rollout": {"plugins": ["vcpo", {"entropy_target": {"target": 0.5, "coefficient": 0.001}}]},
    "data": {"train": "prompts.jsonl", "validation": "prompts.jsonl", "batch_size": 4},
    "sample_logger": {"every_n_updates": 1},
    "rollout_timeline": {"every_n_updates": 1},
}
REWARDS = """
def digits(completion, log_metric):
    log_metric("mine/digits", sum(c.isdigit() for c in completion))
    return sum(c.isdigit() for c in completion) / max(len(completion), 1)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, policy_folder: Path) -> Path:
    """The folder of a run of three batches, two updates each, that was interrupted after two of them."""
    import wandb

    place = tmp_path_factory.mktemp("boards")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        rows = [{"prompt": f"{n}+{n + 1}=", "answer": str(2 * n + 1)} for n in range(8)]
        (place / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (place / "rewards.py").write_text(REWARDS)
        (place / "config.yaml").write_text(json.dumps(CONFIG))
        said = io.StringIO()
        for steps, more in ((4, []), (6, ["--ckpt_path", "runs/task/checkpoints/last.ckpt"])):
            policy = ["--model.policy", str(policy_folder), "--trainer.max_steps", str(steps)]
            with redirect_stdout(said):
                run(["fit", "--config", "config.yaml", *policy, *more])
            wandb.finish()
        (place / "said.txt").write_text(said.getvalue())
    return place / "runs" / "task"


@pytest.fixture(scope="module")
def runs(folder: Path) -> list[WandbRun]:
    """What W&B was told before the interruption, and after it."""
    paths = sorted((folder / "wandb").glob("offline-run-*/*.wandb"))
    until = time.monotonic() + 20
    while True:
        runs = [read_wandb(path) for path in paths]
        if all(run.ended for run in runs):
            return runs
        assert time.monotonic() < until, runs  # finish may return before a busy machine has written the last of it
        time.sleep(0.1)


@pytest.fixture(scope="module")
def table(folder: Path) -> list[dict[str, str]]:
    return read_metrics(folder / "metrics.csv")


def test_every_metric_is_explained_and_one_that_this_run_lacks_says_what_it_needs(
    table: list[dict[str, str]],
) -> None:
    logged = {name for row in table for name, value in row.items() if value} - {"step"}
    assert {name for name in logged if explain(name) is None} == {"mine/digits", "val/mine/digits"}
    known = {metric.name: metric for section in sections() for metric in section.metrics}
    seen = {name for name, metric in known.items() if any(metric.covers(one) for one in logged)}
    assert [name for name in known.keys() - seen if not known[name].when] == []  # the others say what they need


def test_a_run_says_that_a_row_is_a_batch_of_several_updates(folder: Path, table: list[dict[str, str]]) -> None:
    said = " ".join((folder.parents[1] / "said.txt").read_text().split())
    assert "one row per batch of 2 updates, so step is 2, 4, 6 ..." in said
    assert [row["step"] for row in table if row["reward"]] == ["2", "4", "6"]


def test_every_value_is_a_number(table: list[dict[str, str]]) -> None:
    missing = {name for row in table for name, value in row.items() if value and not math.isfinite(float(value))}
    assert missing <= {name for name in missing if re.match(r"completions/\w+_terminated_length|lengths/", name)}


def test_a_reward_named_errors_keeps_its_name(table: list[dict[str, str]]) -> None:
    assert all(row["num_reward_errors"] == "0.0" for row in table if row["num_reward_errors"])
    assert any(row["rewards/errors/mean"] for row in table)


def test_seconds_add_up_and_totals_go_on_after_a_resume(table: list[dict[str, str]], policy_folder: Path) -> None:
    prompt_tokens = len(load_tokenizer(str(policy_folder))("0+1=")["input_ids"])
    trained = [{name: float(value) for name, value in row.items() if value} for row in table if row["reward"]]
    for before, row in zip([{}, *trained[:-1]], trained, strict=True):
        parts = sum(row[f"time/{name}_s"] for name in ("rollout", "update", "validation", "checkpoint", "other"))
        assert parts == pytest.approx(row["time/step_s"], rel=1e-3, abs=1e-3)
        assert row["num_tokens"] == before.get("num_tokens", 0.0) + row["rollout/tokens"] + 16 * prompt_tokens
        assert row["update/steps"] == row["step"] - before.get("step", 0.0) == 2
        assert row["num_completions"] == before.get("num_completions", 0.0) + 16
        assert row["time/total_s"] == pytest.approx(before.get("time/total_s", 0.0) + row["time/step_s"])
        assert 0 < row["perf/mfu"] < 1.5
    assert trained[1]["time/validation_s"] > 0


def test_wandb_holds_all_of_the_table_at_its_own_update(runs: list[WandbRun], table: list[dict[str, str]]) -> None:
    told: dict[int, dict[str, Any]] = {}
    for row in (row for one in runs for row in one.rows if STEP in row):
        told[row[STEP]] = told.get(row[STEP], {}) | row
    for row in table:
        expected = {name: float(value) for name, value in row.items() if value and name != "step"}
        ours = {name: float(told[int(row["step"])][name]) for name in expected}
        assert ours == pytest.approx(expected, nan_ok=True)


def test_tables_and_pictures_are_of_the_update_that_they_stand_at(runs: list[WandbRun], folder: Path) -> None:
    logged = {
        key: [row[STEP] for run in runs for row in run.rows if f"{key}._type" in row] for key in ("samples", "timeline")
    }
    kept = [json.loads(line)["step"] for line in (folder / "samples.jsonl").read_text().splitlines()]
    pictures = sorted(int(path.stem.removeprefix("update-")) for path in (folder / "timelines").iterdir())
    assert (
        logged == {"samples": sorted(set(kept)), "timeline": pictures} == {"samples": [2, 4, 6], "timeline": [2, 4, 6]}
    )


def test_steps_of_wandb_go_on_where_an_offline_run_is_resumed(runs: list[WandbRun], folder: Path) -> None:
    first, second = ([row["_step"] for row in one.rows] for one in runs)
    assert first == sorted(set(first)) and second == sorted(set(second))
    assert second[0] == first[-1] + 1  # after a clean end no step is left out
    assert int((folder / "wandb-step").read_text()) == second[-1] + 1


def test_wandb_holds_config_tags_rules_and_resumes(runs: list[WandbRun], policy_folder: Path) -> None:
    first, second = runs
    assert first.id == second.id
    assert first.tags == [policy_folder.name, "dapo", "SlotGenerator"]
    assert first.config["model"]["num_minibatches"] == 2 and first.config["data"]["batch_size"] == 4
    assert first.config["versions"]["torch"] and first.config["trainer"]["max_steps"] == 4
    assert first.config["rollout"]["plan"] and second.config["trainer"]["max_steps"] == 6
    assert first.summaries["reward"] == {"max", "last"}
    assert first.summaries["rollout/steps_over_bound"] == {"min", "last"}


def test_tensorboard_begins_with_the_reward(folder: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.custom_scalar import layout_pb2
    from tensorboard.plugins.hparams.metadata import EXPERIMENT_TAG, SESSION_START_INFO_TAG

    files: list[Any] = [EventAccumulator(str(path)).Reload() for path in sorted(folder.glob("events.out.*"))]
    tags = {name for events in files for name in events.Tags()["scalars"]}
    (content,) = files[0].Tensors("custom_scalars__config__")
    layout: Any = layout_pb2.Layout.FromString(  # type: ignore[attr-defined]
        content.tensor_proto.string_val[0]
    )
    assert [category.title for category in layout.category] == [section.title for section in sections()]
    patterns = [name for c in layout.category for chart in c.chart for name in chart.multiline.tag]
    assert {EXPERIMENT_TAG, SESSION_START_INFO_TAG} <= files[0].PluginTagToContent("hparams").keys()
    assert sorted(tags)[0] == tag("reward") == "1 Learning/reward"
    assert "7 Own/mine/digits" in tags
    in_panels = {name for name in tags if any(re.match(pattern, name) for pattern in patterns)}
    assert {tag(name) for name in ("val/pass@1", "time/update_s", "rewards/digits/mean")} <= in_panels


def test_a_workspace_names_only_metrics_that_there_are() -> None:
    pytest.importorskip("wandb_workspaces")
    from lit_grpo.tools.dashboard.workspace import make_workspace

    workspace = make_workspace("someone", "something")
    assert [section.name for section in workspace.sections] == [section.title for section in sections()]
    plots: list[Any] = [panel for section in workspace.sections for panel in section.panels]
    assert all(explain(name) for plot in plots for name in plot.y)
    families = [re.compile(plot.metric_regex) for plot in plots if plot.metric_regex]
    names = ["val/pass@8", "rewards/digits/mean", "lengths/spearman_at_32", "lengths/within_at_8"]
    assert all(any(family.match(name) for family in families) for name in names)
    stacked = [plot.title for plot in plots if plot.plot_type == "stacked-area"]
    assert set(stacked) == {"Seconds of a training iteration", "Tokens by updates since they were sampled (fractions)"}


def test_a_run_from_python_tells_its_settings_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy_folder: Path
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.metadata import SESSION_START_INFO_TAG
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData  # type: ignore[attr-defined]

    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(2)]
    told = lit_grpo.train(
        random_policy(),  # type: ignore[arg-type]
        rows,
        ["lit_grpo.rewards.exact_match"],
        tokenizer=load_tokenizer(str(policy_folder)),
        max_steps=1,
        batch_size=1,
        num_generations=2,
        sampling={"max_tokens": 4},
        trainer={"accelerator": "cpu", "enable_progress_bar": False},
    )
    (path,) = told.folder.glob("events.out.*")
    content = EventAccumulator(str(path)).Reload().PluginTagToContent("hparams")[SESSION_START_INFO_TAG]
    values = HParamsPluginData.FromString(content).session_start_info.hparams
    assert values["model.sampling.max_tokens"].number_value == 4
    assert values["data.train"].string_value.startswith("[{")
