"""The command line as a user meets it: a run, its folder, and what it says of mistakes."""

import contextlib
import json
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import yaml
from conftest import save_policy, table_rows

from lit_grpo import __version__
from lit_grpo.__main__ import main as start
from lit_grpo.cli.command_line import run
from lit_grpo.cli.parsing.names import GENERATORS
from lit_grpo.tools.commands.export import main as export
from lit_grpo.tools.commands.simulate import main as simulate
from lit_grpo.training.run_folder import RunFolder
from tests.task_folders import computed_metrics, write_task

ROOT = Path(__file__).parents[2]
GREEDY = '{"temperature": 0, "max_tokens": 16}'
REWARD = "def score(completion, answer):\n    return sum(c.isdigit() for c in completion) / max(len(completion), 1)\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy_folder: Path) -> Path:
    """A working directory with a task of its own."""
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{n}+{n + 1}=", "answer": str(2 * n + 1)} for n in range(24)]
    (tmp_path / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:6]))
    write_task(
        tmp_path,
        policy_folder,
        REWARD,
        rows,
        lr=1e-3,
        trainer={"max_steps": 4, "val_check_interval": 2},
        model={"sampling": {"max_tokens": 16}},
        data={"validation": "held_out.jsonl", "batch_size": 3},
        checkpoint={"every_n_updates": 1},
    )
    return tmp_path


def fit(*arguments: str) -> None:
    run(["fit", "--config", "config.yaml", *arguments])


def metrics(name: str) -> list[dict[str, str]]:
    return computed_metrics(Path("runs", name))


def weights(name: str) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(f"runs/{name}/policy").state_dict()


def test_a_run_records_its_memory_by_part_beside_the_estimate_of_fit_check(folder: Path) -> None:
    from lit_grpo.policy.loading import load_config
    from lit_grpo.training.forecast import Demand, Sizes, forecast

    fit("--trainer.max_steps", "2", "--model.max_tokens_per_micro_batch", "512")
    told = json.loads(Path("runs/task/memory.json").read_text())
    saved = sum(weight.nbytes for weight in weights("task").values())
    measured, expected = told["measured"], told["forecast"]
    assert told["device"] == "cpu" and told["update"] == 1
    assert saved == measured["gradients"] == expected["update"]["gradients"]
    assert saved <= measured["weights"] < 1.01 * saved  # with buffers
    assert measured["optimizer"] == pytest.approx(expected["update"]["optimizer"], rel=0.01) and measured["other"] > 0
    assert measured["kv_token"] == 4 * 2 * 2 * 2 * 16  # float32, layers, keys and values, heads, head size
    settings = yaml.safe_load(Path("runs/task/config.yaml").read_text())
    slots, group = settings["model"]["generator"]["init_args"]["num_slots"], settings["model"]["num_generations"]
    sizes = Sizes.of(load_config(settings["model"]["policy"]))
    demand = Demand(slots, group, settings["data"]["max_prompt_tokens"], 16, micro_batch_tokens=512)
    assert expected["rollout"]["keys and values"] == forecast(sizes, demand).rollout["keys and values"]
    assert expected["update"]["activations"] == forecast(sizes, demand).update["activations"]


def test_a_run_that_fit_check_cannot_estimate_records_why(folder: Path) -> None:
    fit("--trainer.max_steps", "1", "--model.optimizer", "torch.optim.Adagrad")
    told = json.loads(Path("runs/task/memory.json").read_text())
    assert told["forecast"]["why"].startswith("model.optimizer is Adagrad, whose state is not known here")
    assert told["measured"]["optimizer"] >= told["measured"]["gradients"]


def test_fit_leaves_metrics_samples_checkpoints_and_a_policy_that_transformers_loads(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    fit()
    rows = metrics("task")
    assert [int(row["step"]) for row in rows] == [0, 1, 2, 3, 4]
    assert [bool(row["val/pass@1"]) for row in rows] == [True, False, True, False, True]
    assert all(row["reward"] and row["loss"] and row["entropy"] for row in rows[1:])
    assert all(float(row["sampling/logprob_gap_max"]) < 1e-4 for row in rows[1:])
    samples = [json.loads(line) for line in Path("runs/task/samples.jsonl").read_text().splitlines()]
    assert len(samples) == 4
    assert {"prompt", "completion", "reward", "finish"} <= samples[0].keys()
    assert {path.name for path in Path("runs/task/checkpoints").iterdir()} == {"best.ckpt", "last.ckpt"}
    assert Path("runs/task/config.yaml").exists()
    model = AutoModelForCausalLM.from_pretrained("runs/task/policy")
    tokenizer: Any = AutoTokenizer.from_pretrained("runs/task/policy")
    generated = cast(Any, model).generate(**tokenizer("1+2=", return_tensors="pt"), max_new_tokens=3, do_sample=False)
    assert generated.shape[1] > 4


@pytest.mark.nightly
def test_same_seed_gives_the_same_metrics_and_weights(folder: Path) -> None:
    for name, seed in (("one", "7"), ("two", "7"), ("other", "8")):
        fit("--run.name", name, "--seed_everything", seed, "--trainer.max_steps", "2")
    assert metrics("one") == metrics("two")
    assert metrics("one") != metrics("other")
    first, second = weights("one"), weights("two")
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_second_run_beside_a_living_one_gets_a_folder_of_its_own(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with RunFolder() as living:
        living.claim(Path("runs/task"), resumes=False)
        living.open()
        fit("--trainer.max_steps", "1")
        assert [path.name for path in Path("runs/task").iterdir()] == ["versions.json"]  # of the living one
    said = capsys.readouterr().err
    assert (
        said
        == "The run in runs/task still goes on, so this one is in runs/task-1; to resume it, add --run.name task-1.\n"
    )
    assert {"metrics.csv", "policy", "config.yaml", "checkpoints"} <= {
        path.name for path in Path("runs/task-1").iterdir()
    }
    assert yaml.safe_load(Path("runs/task-1/config.yaml").read_text())["run"]["name"] == "task-1"


def test_an_optimizer_setting_on_the_command_line_holds_for_a_resumed_run(folder: Path) -> None:
    fit("--trainer.max_steps", "2")
    checkpoint = ["--ckpt_path", "runs/task/checkpoints/last.ckpt", "--run.name", "on"]
    with pytest.warns(UserWarning, match=r"checkpoint's: model\.optimizer\.lr was 0\.001 and is now 1e-06\."):
        fit(*checkpoint, "--trainer.max_steps", "3", "--model.optimizer.lr", "1e-6")
    assert float(metrics("on")[-1]["lr"]) == pytest.approx(1e-6)


def test_settings_that_a_checkpoint_would_override_are_refused_and_others_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    linear = "--model.lr_scheduler=torch.optim.lr_scheduler.LinearLR"
    fit("--trainer.max_steps", "1", linear)
    resume = ["--trainer.max_steps", "2", "--ckpt_path", "runs/task/checkpoints/last.ckpt"]
    for options, said in (
        ([linear, "--model.optimizer.lr", "1e-6"], "model.optimizer.lr was 0.001 and is now 1e-06; leave them"),
        ([linear, "--model.lr_scheduler.total_iters=9"], "model.lr_scheduler.total_iters was 5 and is now 9; leave"),
        ([linear, "--model.optimizer=torch.optim.Adam"], "now torch.optim.adam.Adam"),
        ([], "model.lr_scheduler was torch.optim.lr_scheduler.LinearLR and is now None"),
    ):
        with pytest.raises(SystemExit, match="2"):
            fit(*resume, *options)
        assert said in capsys.readouterr().err
    named = (
        r"other settings .*: model\.objective\.loss was dapo and is now gspo, "
        r"rollout\.plugins was \[\] and is now \['greso', 'knapsack'\]\."
    )
    with pytest.warns(UserWarning, match=named):
        others = "--rollout.plugins", "[greso, knapsack]"
        fit(*resume, linear, "--model.objective.loss", "gspo", *others)


@pytest.mark.parametrize("lora", table_rows([False, True], [False]))
def test_a_checkpoint_is_exported_as_the_run_itself_exports_it(
    folder: Path, lora: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    fit("--trainer.max_steps", "1", *(["--model.lora.r", "4"] if lora else []))
    export(["runs/task/checkpoints/last.ckpt", "runs/exported/policy"])
    expected, actual = weights("task"), weights("exported")
    assert all(torch.equal(expected[name], actual[name]) for name in expected)
    for checkpoint, target, said in (
        ("absent.ckpt", "other", "There is no checkpoint 'absent.ckpt'"),
        ("config.yaml", "other", "'config.yaml' is no checkpoint, or a damaged one"),
        ("runs/task/checkpoints/bset.ckpt", "target", "last.ckpt."),
        ("runs/task/checkpoints/last.ckpt", "runs/task/policy", "exists already; give a folder that is new"),
    ):
        with pytest.raises(SystemExit, match="2"):
            export([checkpoint, target])
        assert said in capsys.readouterr().err
    if lora:
        last, other = "runs/task/checkpoints/last.ckpt", another_policy(folder)
        for command in (
            lambda: export([last, "target", "--policy", other]),
            lambda: fit("--model.lora.r", "4", "--model.policy", other, "--ckpt_path", last, "--run.name", "other"),
        ):
            with pytest.raises(SystemExit, match="2"):
                command()
            assert "and the frozen weights of" in capsys.readouterr().err
        assert not Path("target").exists() and not Path("runs/other").exists()


def another_policy(folder: Path) -> str:
    """A policy of the same sizes with other weights."""
    save_policy(folder / "other", seed=1)
    return str(folder / "other")


def test_version(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["lit_grpo", "--version"])
    start()
    assert capsys.readouterr().out == f"lit_grpo {__version__}\n"


def test_validate_test_and_predict_run_on_an_exported_policy(folder: Path) -> None:
    fit("--trainer.max_steps", "1")
    data = ["--model.policy", "runs/task/policy", "--run.name", "later"]
    run(_evaluation("validate", data))
    run(_evaluation("test", [*data, "--data.test", "prompts.jsonl"]))
    run(_evaluation("predict", [*data, "--data.predict", "prompts.jsonl", "--model.eval_sampling", GREEDY]))
    rows = [json.loads(line) for line in Path("runs/later/completions.jsonl").read_text().splitlines()]
    assert [row["prompt_id"] for row in rows] == [f"predict/{n}" for n in range(24)]
    assert [row["columns"] for row in rows] == [*map(json.loads, Path("prompts.jsonl").read_text().splitlines())]
    assert all(row["finish_reason"] in ("stop", "length") and row["token_ids"] for row in rows)


def _evaluation(subcommand: str, arguments: list[str]) -> list[str]:
    """The config without what only fit knows."""
    config = json.loads(Path("config.yaml").read_text())
    del config["checkpoint"], config["rollout_timeline"]
    del config["trainer"]["max_steps"], config["trainer"]["val_check_interval"]
    Path("evaluation.yaml").write_text(json.dumps(config))
    return [subcommand, "--config", "evaluation.yaml", *arguments]


@pytest.mark.nightly
def test_a_wandb_run_is_the_same_one_after_resuming(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    import wandb

    with contextlib.chdir(tmp_path_factory.mktemp("elsewhere")):  # W&B's own process stays where it was started
        wandb.init(mode="offline").finish()
    for steps in ("1", "2"):
        resume = ["--ckpt_path", "runs/task/checkpoints/last.ckpt"] if steps == "2" else []
        fit("--trainer.max_steps", steps, "--run.wandb", "offline", *resume)
        wandb.finish()
    first, second = Path("runs/task/wandb").glob("offline-run-*/*.wandb")
    assert first.parent != second.parent and first.name == second.name
    fit("--trainer.max_steps", "1", "--run.wandb", "offline")  # another run in its place
    wandb.finish()
    (other,) = Path("runs/task/wandb").glob("offline-run-*/*.wandb")
    assert other.name != first.name


@pytest.mark.nightly
def test_a_timeline_is_drawn_and_the_recorded_trace_can_be_simulated(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit("--rollout_timeline.every_n_updates=2", "--rollout_timeline.record_trace=tokens", "--rollout.plan=lpt")
    pictures = sorted(path.name for path in Path("runs/task/timelines").iterdir())
    assert pictures == ["update-1.png", "update-2.png", "update-4.png"]
    kept = [json.loads(line) for line in Path("runs/task/timeline.jsonl").read_text().splitlines()]
    assert [f"update-{row['step']}.png" for row in kept] == pictures
    assert all(row["seconds"]["update"] > 0 and len(row["completions"]) == 12 for row in kept)
    assert sum(tokens for *_, tokens in kept[0]["prefills"]) > 0
    rows = [json.loads(line) for line in Path("runs/task/trace.jsonl").read_text().splitlines()]
    assert len(rows) == 4 * 3 * 4
    assert {row["sample_id"] for row in rows} == {0, 1, 2, 3} and all(1 <= row["tokens"] <= 16 for row in rows)
    assert all(len(row["token_ids"]) == row["tokens"] for row in rows)
    prompts = {(row["prompt_id"], row["visit"]): row["prompt_tokens"] for row in rows}
    told = {(row["prompt_id"], row["visit"]): row["prompt_token_ids"] for row in rows if "prompt_token_ids" in row}
    assert {name: len(token_ids) for name, token_ids in told.items()} == prompts
    last = metrics("task")[-1]
    assert float(last["rollout/steps_over_bound"]) >= 1 and "lengths/informative" in last
    capsys.readouterr()
    simulate(["--trace", "runs/task/trace.jsonl", "--slots", "4", "--plans", "fcfs", "lpt", "--drafts", "3"])
    said = capsys.readouterr().out
    assert "48 completions" in said and "steps with drafts" in said
    with Path("runs/task/timeline.jsonl").open("a") as file:
        file.write('{"step": 99}\n{"step": 1')  # as a run leaves it that was killed behind its last checkpoint
    fit("--trainer.max_steps=5", "--ckpt_path=runs/task/checkpoints/last.ckpt", "--rollout_timeline.every_n_updates=0")
    again = [json.loads(line) for line in Path("runs/task/timeline.jsonl").read_text().splitlines()]
    assert again == kept


CONFIGS = ROOT / "configs"
CONFIG_NAMES = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
GENERATOR_NAMES = sorted(path.stem for path in CONFIGS.glob("generators/*.yaml"))
PAIRS = [*((name, "") for name in CONFIG_NAMES), *(("gsm8k_qwen3_1.7b", name) for name in GENERATOR_NAMES)]


@pytest.mark.parametrize(("config", "generator"), PAIRS)
def test_every_config_parses_with_a_generator_behind_it(
    folder: Path, config: str, generator: str, capsys: pytest.CaptureFixture[str]
) -> None:
    behind = ["--config", str(CONFIGS / "generators" / f"{generator}.yaml")] if generator else []
    with pytest.raises(SystemExit) as exit_:
        run(["fit", "--config", str(CONFIGS / f"{config}.yaml"), *behind, "--print_config"])
    said = capsys.readouterr()
    assert exit_.value.code == 0
    assert all(line.startswith("Left out, because ") for line in said.err.splitlines())
    printed = yaml.safe_load(said.out)
    assert printed["model"]["num_generations"] >= 2
    if generator:
        named, expected = printed["model"]["generator"], yaml.safe_load(Path(behind[1]).read_text())
        assert named["class_path"] == GENERATORS[expected["model"]["generator"]["class_path"]]
        assert named["init_args"].items() >= expected["model"]["generator"]["init_args"].items()


CHAT = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.mark.nightly
def test_the_config_of_a_hybrid_runs_with_a_small_one_in_its_place(folder: Path) -> None:
    save_policy(Path("hybrid"), template=CHAT, hybrid=True)
    rows = "".join(json.dumps({"question": f"{n}+1=", "answer": f"#### {n + 1}"}) + "\n" for n in range(4))
    Path("questions.jsonl").write_text(rows)
    shipped = CONFIGS / "gsm8k_qwen3.5_0.8b.yaml"
    rewards = yaml.safe_load(shipped.read_text())["model"]["rewards"]
    rewards[1]["args"]["buffer"] = 6
    tokens = {"sampling": {"max_tokens": 8}, "eval_sampling": {"max_tokens": 8}}
    model = {"policy": "hybrid", "num_generations": 8, "rewards": rewards, **tokens}
    data = {"train": "questions.jsonl", "validation": "questions.jsonl", "system_prompt": "2", "batch_size": 2}
    trainer = {"accelerator": "cpu", "max_steps": 2, "val_check_interval": 2}
    Path("small.yaml").write_text(yaml.safe_dump({"trainer": trainer, "model": model, "data": data}))
    run(["fit", "--config", str(shipped), "--config", "small.yaml"])
    (update,) = [row for row in metrics("gsm8k-qwen3.5-0.8b") if row["reward"]]
    assert float(update["rewards/overlong/mean"]) < 0 < float(update["grad_norm"])
    assert weights("gsm8k-qwen3.5-0.8b")


def test_the_method_of_the_paper_runs_from_its_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = str(CONFIGS / "infinite_sampling.yaml")
    small = ["--trainer.val_check_interval", "2", "--data.validation.init_args.num_rows", "8"]
    run(["fit", "--config", path, "--trainer.max_steps", "2", *small])
    (first, second) = [row for row in metrics("infinite-sampling") if row["reward"]]
    for row in (first, second):
        assert float(row["rollout/steps"]) >= float(row["rollout/tokens"]) / 8
    assert set(second) >= {"lengths/within_at_8", "lengths/spearman_at_0", "rollout/probe_tokens"}


def test_help_shows_our_own_fields_first_and_the_trainers_where_asked(capsys: pytest.CaptureFixture[str]) -> None:
    shown = {}
    for option in ("--help", "--help-all"):
        with pytest.raises(SystemExit, match="0"):
            run(["fit", option])
        shown[option] = capsys.readouterr().out
    ours = shown["--help"].splitlines()
    fields = [line.split()[0] for line in ours if line.startswith("  --")]
    names = ("accelerator", "strategy", "devices", "precision", "max_steps", "val_check_interval")
    assert fields[0] == "--run.name"
    assert [name for name in fields if name.startswith("--trainer")] == [f"--trainer.{name}" for name in names]
    assert {"--model.num_generations", "--data.train", "--rollout.plan", "--checkpoint.folder"} <= set(fields)
    assert "--help-all NAME" in shown["--help"]
    assert "  --model.generator slots|vllm|vllm_server|CLASS = slots" in ours
    assert "--trainer.max_steps" in shown["--help-all"] and "--model.num_generations" in shown["--help-all"]
    with pytest.raises(SystemExit, match="0"):
        run(["fit", "--help-all", "model.lora"])
    whole = capsys.readouterr().out
    assert whole.startswith("  --model.lora ") and " ..." not in whole and "needs peft" in whole


BAD_INPUT = {
    "unknown field": (["--model.num_geneations", "1"], "did you mean --model.num_generations"),
    "field of another trainer": (["--model.learning_rate", "1e-6"], "did you mean --model.optimizer.lr?"),
    "field of a class": (
        ["--model.generator", "lit_grpo.rollout.slots.SlotGenerator", "--model.generator.num_slot", "3"],
        "There is no field model.generator.num_slot: lit_grpo.rollout.slots.SlotGenerator has no 'num_slot'; did you",
    ),
    "unknown class": (["--model.generator", "lit_grpo.Nope"], "Problem with given class_path 'lit_grpo.Nope'"),
    "wrong type": (["--model.num_generations", "many"], 'Parser key "model.num_generations"'),
    "no config file": (["--config", "absent.yaml"], "There is no config 'absent.yaml'; give a file, or one that"),
    "not JSON": (["--data.train", "broken.jsonl"], "line 2 of broken.jsonl is not JSON"),
    "beyond a micro-batch": (["--model.max_tokens_per_micro_batch", "12"], "the smallest that works is 16"),
    "a command as optimizer": (
        ["--config", "runs_code.yaml"],
        "model.optimizer names 'os.system', which is no Optimizer class",
    ),
    "reward import": (["--model.rewards", '[{"function": "broken.py:score"}]'], "cannot be imported"),
    "no device": (["--trainer.devices", "0"], "devices='0'"),
    "no policy": (["--model.policy", "./absent"], "There is no policy folder './absent'"),
    "no EOS": (["--model.policy", "no-eos"], "names no eos_token"),
    "run folder": (["--run.dir", "/proc/nowhere"], "is not writable"),
    "data": (["--data.train", "absent.jsonl"], "There is no file absent.jsonl"),
    "reward column": (["--model.rewards", '[{"function": "rewards.py:gold"}]'], "'solution'"),
    "no weights": (["--model.policy", "no-weights"], "no-weights"),
    "context": (["--model.sampling.max_tokens", "255"], "the model's context is 256"),
    "learning rate": (["--model.optimizer.lr", "-1"], "-1"),
    "shards": (
        ["--trainer.strategy", "fsdp2", "--model.max_tokens_per_micro_batch", "auto"],
        "model.max_tokens_per_micro_batch auto",
    ),
}


OF_OTHER_TESTS = ("not JSON", "shards")  # of test_sources and test_fsdp2


@pytest.mark.parametrize("case", table_rows(BAD_INPUT, [case for case in BAD_INPUT if case not in OF_OTHER_TESTS]))
def test_bad_input_gets_one_sentence_and_leaves_the_earlier_run_where_it_is(
    folder: Path, case: str, policy_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "empty.jsonl").write_text("")
    (folder / "broken.jsonl").write_text('{"prompt": "1+1="}\n{"prompt": \n')
    (folder / "broken.py").write_text("import no_such_module\n")
    optimizer = {"class_path": "os.system", "init_args": {"command": "touch has_run"}}
    (folder / "runs_code.yaml").write_text(json.dumps({"model": {"optimizer": optimizer}}))
    with (folder / "rewards.py").open("a") as file:
        file.write("def gold(completion, solution):\n    return 1\n")
    (earlier := folder / "runs" / "task").mkdir(parents=True)
    (earlier / "metrics.csv").write_text("step\n")
    for name, missing in (("no-weights", "model.safetensors"), ("no-eos", None)):
        (folder / name).mkdir()
        for path in policy_folder.iterdir():
            if missing is None or not path.name.startswith(missing):
                text = path.read_bytes()
                if path.name == "tokenizer_config.json":
                    text = json.dumps(json.loads(text) | {"eos_token": None}).encode()
                (folder / name / path.name).write_bytes(text)
    arguments, sentence = BAD_INPUT[case]
    with pytest.raises(SystemExit) as exit_:
        fit("--validate_first", "false", *arguments)
    assert exit_.value.code == 2
    said = capsys.readouterr().err.strip().splitlines()
    errors = [line for line in said if line.startswith("error: ")]
    assert len(errors) == 1, said
    assert sentence in errors[0], errors[0]
    assert not (folder / "has_run").exists()
    assert [path.name for path in earlier.parent.iterdir() if path.is_dir()] == ["task"]
    assert [path.name for path in earlier.iterdir()] == ["metrics.csv"]


SCORE, MATCH = {"function": "rewards.py:score", "weight": 1.0}, {"function": "exact_match", "weight": 2.0}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--model.rewards", "rewards.py:score"], [SCORE]),
        (["--model.rewards", "[rewards.py:score, {path: exact_match, weight: 2}]"], [SCORE, MATCH]),
        (["--model.rewards", "{path: rewards.py:score}"], [SCORE]),
        (
            ["--model.rewards", "rewards.py:score", "--model.rewards+", "{function: exact_match, weight: 2}"],
            [SCORE, MATCH],
        ),
        (["--config", "one.yaml"], [SCORE]),
        (["--config", "two.yaml"], [SCORE, MATCH]),
    ],
)
def test_rewards_may_be_given_by_their_names_alone(
    arguments: list[str], expected: list[Any], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "one.yaml").write_text("model:\n  rewards: rewards.py:score\n")
    (folder / "two.yaml").write_text("model:\n  rewards: [rewards.py:score, {path: exact_match, weight: 2}]\n")
    with pytest.raises(SystemExit):
        fit(*arguments, "--model.generator.class_path", "lit_grpo.rollout.SlotGenerator", "--print_config")
    printed = yaml.safe_load(capsys.readouterr().out)["model"]
    assert [{name: each[name] for name in ("function", "weight")} for each in printed["rewards"]] == expected
    assert printed["generator"]["class_path"] == "lit_grpo.rollout.SlotGenerator"


def test_a_row_that_lacks_a_column_of_a_reward_is_named_before_the_run(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (folder / "prompts.jsonl").open("a") as file:
        file.write('{"prompt": "1+1="}\n')
    with pytest.raises(SystemExit, match="2"):
        fit()
    assert "(rewards.py:score) needs the column 'answer', which row train/24 (rows" in capsys.readouterr().err
    assert not Path("runs/task").exists()
    fit("--model.on_reward_error", "none", "--trainer.max_steps", "1", "--validate_first", "false")


def test_a_resumed_run_without_updates_to_make_says_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit("--trainer.max_steps", "1")
    capsys.readouterr()
    fit("--trainer.max_steps", "1", "--ckpt_path", "runs/task/checkpoints/last.ckpt")
    said = " ".join(capsys.readouterr().out.split())
    assert "updates none, trainer.max_steps is 1, where the checkpoint is at 1; raise it to go on" in said


@pytest.mark.parametrize(
    ("told", "sentence"),
    [
        ("fti --config own_task", "There is no command 'fti'; did you mean sft or fit?"),
        ("train", "There is no command 'train'; take one of fit, validate, test, predict, sft, doctor,"),
        ("predict --model.policy tiny --data.predict absent.jsonl", "data.predict: There is no file absent.jsonl"),
        ("predict --model.policy ./absent --data.predict prompts.jsonl", "There is no policy folder './absent'"),
        ("validate --model.policy tiny --data.validation absent.jsonl", "data.validation: There is no file"),
        (
            "test --model.policy tiny --data.test prompts.jsonl --data.prompt_column p",
            "rows 1, 2, 3, 4 and 19",
        ),
    ],
)
def test_a_mistake_in_any_command_is_one_sentence(
    folder: Path, told: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(told.split())
    said = capsys.readouterr().err.strip().splitlines()
    assert sentence in said[0] and said[1:] in ([], ["(LIT_GRPO_TRACEBACK=1 shows where)"])
