"""Scripts and config objects of TRL: what is read of them without running them is what TRL gets when they run."""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import table_rows

import lit_grpo
from lit_grpo.module import GRPOModule
from lit_grpo.optim import WarmupDecayLR
from lit_grpo.rollout.slots import SlotGenerator
from lit_grpo.tools.commands.from_trl import main as from_trl
from lit_grpo.tools.commands.from_trl import train_arguments
from lit_grpo.tools.dashboard import sections
from lit_grpo.tools.migration import TRAINER, convert_trl, plain_fields, read_script
from lit_grpo.tools.migration.metrics import METRICS
from lit_grpo.tools.migration.python import about_argument, as_argument
from lit_grpo.tools.migration.table import TRL

HEAD = """
import torch
from datasets import Dataset, load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward, think_format_reward, get_soft_overlong_punishment

def reward_len(completions, **kwargs):
    return [-abs(20 - len(text)) for text in completions]

class Game:
    def reset(self, **row): ...
"""
SCRIPTS: dict[str, str] = {
    "quick start": """
        dataset = load_dataset("trl-lib/DeepMath-103K", split="train")
        trainer = GRPOTrainer(model="Qwen/Qwen2-0.5B-Instruct", reward_funcs=accuracy_reward, train_dataset=dataset)
        """,
    "a config of its own": """
        MODEL, GROUP = "Qwen/Qwen3-0.6B", 8
        LENGTH = 2 * 256
        args = GRPOConfig(
            output_dir=f"runs/{MODEL}-grpo",
            learning_rate=1e-5,
            num_generations=8,
            per_device_train_batch_size=2 * 8,
            max_completion_length=LENGTH,
            beta=-(-0.04),
            loss_type="grpo",
            max_steps=20,
            bf16=False,
            optim="adamw_torch",
            lr_scheduler_type="cosine",
            warmup_steps=0.1,
            reward_weights=[1.0, 0.5],
        )
        args.epsilon_high = 0.28
        trainer = GRPOTrainer(
            "Qwen/Qwen3-0.6B", [accuracy_reward, think_format_reward], args,
            load_dataset("trl-lib/DeepMath-103K", split="train"),
        )
        """,
    "a game": """
        dataset = Dataset.from_dict({"prompt": ["a"] * 16})
        trainer = GRPOTrainer(
            model="Qwen/Qwen3-4B",
            train_dataset=dataset,
            reward_funcs=reward_len,
            args=GRPOConfig(
                chat_template_kwargs={"enable_thinking": False},
                logging_steps=1,
                log_completions=True,
                max_completion_length=2048,
                per_device_train_batch_size=4,
                gradient_accumulation_steps=2,
                max_steps=5,
            ),
            environment_factory=Game,
            peft_config=LoraConfig(),
        )
        """,
    "several steps a batch": """
        settings = dict(num_iterations=2, steps_per_generation=4, per_device_train_batch_size=8, max_steps=12)
        config = GRPOConfig("out", importance_sampling_level="sequence", epsilon=3e-4, epsilon_high=4e-4, **settings)
        trainer = GRPOTrainer(
            model="Qwen/Qwen3-0.6B",
            reward_funcs=[get_soft_overlong_punishment(max_completion_len=256, soft_punish_cache=64)],
            args=config,
            train_dataset=load_dataset("trl-lib/DeepMath-103K")["train"],
            peft_config=LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.1),
        )
        """,
}


def write(folder: Path, body: str, head: str = HEAD) -> Path:
    script = folder / "script.py"
    lines = textwrap.indent(textwrap.dedent(body).strip(), "    ")
    script.write_text(f'{head}\ndef main():\n{lines}\n    trainer.train()\n\nif __name__ == "__main__":\n    main()\n')
    return script


@pytest.mark.parametrize("name", table_rows(SCRIPTS, ["a config of its own"]))
def test_what_is_read_of_a_script_is_what_trl_gets_when_it_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trl = pytest.importorskip("trl")
    script = write(tmp_path, SCRIPTS[name])
    read = read_script(script)
    assert not read.unread
    got: dict[str, Any] = {}

    class Recorder:
        """Takes GRPOTrainer's arguments, and trains nothing."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            got.update(zip(("model", "reward_funcs", "args", "train_dataset"), args, strict=False))
            got.update(kwargs)

        def train(self) -> None: ...

    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        return trl_config(*args, **{"use_cpu": True, **kwargs})

    trl_config = trl.GRPOConfig
    monkeypatch.setitem(vars(trl), "GRPOTrainer", Recorder)  # its own import takes long, because of vLLM
    monkeypatch.setitem(vars(trl), "GRPOConfig", on_cpu)
    monkeypatch.setattr("datasets.load_dataset", lambda *args, **kwargs: {"train": (args, kwargs)})
    exec(compile(script.read_text(), str(script), "exec"), {"__name__": "__main__"})
    fields = {each.name for each in dataclasses.fields(trl_config)}
    typed = {key: value for key, value in read.fields.items() if key in fields}
    theirs = plain_fields(got.get("args") or on_cpu())
    theirs.pop("use_cpu")
    assert {key: theirs.get(key, TRL[key].default) for key in typed} == typed
    assert theirs.keys() <= typed.keys() | {"bf16", "output_dir"}  # bf16 is on unless a script turns it off
    assert read.fields["model_name_or_path"] == got["model"]
    if (peft := got.get("peft_config")) is not None:
        assert read.fields["lora_r"] == peft.r and read.fields["lora_alpha"] == peft.lora_alpha
        wanted = sorted(peft.target_modules) if peft.target_modules else None
        assert read.fields.get("lora_target_modules") == wanted
    others = {key: value for key, value in read.fields.items() if key not in fields}
    ours, same = (convert_trl(each, rows=64).config for each in (read.fields, {**theirs, **others}))
    for converted in (ours, same):
        converted.pop("run"), converted["trainer"].pop("precision")
    assert ours == same


def test_rewards_rows_games_and_tools_of_a_script_are_named_by_their_paths(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, SCRIPTS["a game"])
    from_trl(["script.py", "--output", "ours.yaml"])
    text = Path("ours.yaml").read_text()
    config = yaml.safe_load(text)
    assert config["model"]["rewards"] == [{"function": "script.py:reward_len", "weight": 1.0}]
    assert config["rollout"]["plugins"] == [{"environments": {"factory": "script.py:Game"}}]
    assert config["data"]["train"] == "train_dataset.jsonl"
    assert 'dataset.to_json("train_dataset.jsonl")' in text.replace("\n#  ", "")
    assert config["model"]["lora"]["r"] == 8 and config["model"]["lora"]["alpha"] == 8.0  # peft's defaults


PARSED = """
import torch
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer, ModelConfig, ScriptArguments, TrlParser, get_peft_config
from trl.rewards import accuracy_reward, think_format_reward

if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig))
    script_args, training_args, model_args = parser.parse_args_and_config()
    training_args.model_init_kwargs = dict(revision=model_args.model_revision, dtype=model_args.dtype)
    training_args.chat_template_kwargs = {"enable_thinking": False}
    train_dataset, eval_dataset = load_dataset("a/b", split=["train[:5%]", "test[:5%]"])
    train_dataset = train_dataset.map(lambda row: row)
    trainer = GRPOTrainer(
        model=model_args.model_name_or_path,
        args=training_args,
        reward_funcs=[think_format_reward, accuracy_reward],
        train_dataset=train_dataset,
        peft_config=get_peft_config(model_args),
    )
    trainer.train()
"""


def test_the_arguments_of_a_script_with_a_parser_stand_after_two_dashes(tmp_path: Path) -> None:
    script = tmp_path / "gspo.py"
    script.write_text(PARSED)
    flags = "--model_name_or_path a/b --learning_rate 1e-5 --use_peft --lora_target_modules q_proj v_proj --max_steps=3"
    from_trl([str(script), "--output", str(tmp_path / "ours.yaml"), "--", *flags.split()])
    read = read_script(script, flags.split())
    assert read.fields == {
        "model_name_or_path": "a/b",
        "learning_rate": 1e-5,
        "use_peft": True,
        "lora_target_modules": ["q_proj", "v_proj"],
        "max_steps": 3,
        "chat_template_kwargs": {"enable_thinking": False},
        "reward_funcs": ["think_format_reward", "accuracy_reward"],
        "dataset_name": "train_dataset.jsonl",
    }


ROWS = 'load_dataset("d", split="train")'


def called(fields: str, rewards: str = "reward_len", more: str = "", before: str = "") -> str:
    """A script's call of GRPOTrainer with these fields of GRPOConfig."""
    config = f"GRPOConfig({fields})"
    return (
        f'{before}trainer = GRPOTrainer(model="m", reward_funcs={rewards}, args={config}{more}, train_dataset={ROWS})'
    )


REFUSED: dict[str, tuple[str, str]] = {
    "no trainer": ("trainer = print", "calls neither GRPOTrainer nor GRPOConfig by name; give the script that does"),
    "no Python": ("trainer = (", "is no Python that can be parsed"),
    "two trainers": ("trainer = GRPOTrainer()\nother = GRPOTrainer()", r"makes 2 trainers of TRL \(lines"),
    "a config from elsewhere": (
        called("").replace("GRPOConfig()", "make_config()"),
        r"takes the config of its trainer from make_config\(\), which is known only when it runs; write GRPOConfig",
    ),
    "a value from elsewhere": (
        called("max_steps=int(x), learning_rate=rate"),
        r"max_steps is int\(x\) in script.py, line \d+, which is known only when the script runs: write its value",
    ),
    "mappings from elsewhere": (
        called("max_steps=1, **settings"),
        r"\*\*settings is settings in script.py, line \d+, which is known only when",
    ),
    "a name with two values": (called("max_steps=n", before="n = 1\nn = 2\n"), "max_steps is n in script.py"),
    "a lambda": (
        called("max_steps=1", "[lambda completions: 1]"),
        "name a function or class that the script defines or imports",
    ),
    "a reward model": (
        called("max_steps=1", '"org/judge"'),
        "reward_funcs has the reward model 'org/judge': leave it out here, and add the reward reward_model",
    ),
    "a rollout function": (
        called("max_steps=1", more=", rollout_func=play"),
        "rollout_func of the trainer is play, which is not converted: user-defined rollouts are not supported",
    ),
    "no field": (called("max_step=1", "accuracy_reward"), "TRL 1.16 has no field 'max_step' for GRPO"),
    "peft's others": (
        called("max_steps=1", "accuracy_reward", more=", peft_config=LoraConfig(lora_bias=True)"),
        "lora_bias of LoraConfig is True, which has no counterpart",
    ),
    "flags without a parser": (
        called("max_steps=1", "accuracy_reward"),
        "parses no arguments by TrlParser; leave out those after --",
    ),
    "a name that is changed": (called("max_steps=n", before="n = 1\nn += 1\n"), "max_steps is n in script.py"),
    "a name of a loop": (called("max_steps=n", before="for n in (1, 2): n\n"), "max_steps is n in script.py"),
    "an argument of a function": (
        called("max_steps=n", before="n = 1\ndef other(n): ...\n"),
        "max_steps is n in script.py",
    ),
    "a division by zero": (called("max_steps=1 // 0", "accuracy_reward"), "max_steps is 1 // 0 in script.py"),
    "a name that is itself": (
        called("max_steps=a", "accuracy_reward", before="a = b\nb = a\n"),
        "max_steps is a in script.py",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_of_a_script_is_refused_in_a_sentence(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body, sentence = REFUSED[name]
    script = write(tmp_path, body)
    flags = ["--", "--max_steps", "3"] if name.startswith("flags") else []
    with pytest.raises(SystemExit) as exit:
        from_trl([str(script), *flags])
    said = capsys.readouterr().err
    assert exit.value.code == 2 and "Traceback" not in said
    assert re.search(sentence, " ".join(said.split())), said


def test_a_reward_in_a_script_that_trains_when_imported_is_refused_and_the_rest_is_converted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    call = called("max_steps=1", "[accuracy_reward, reward_len]")
    script.write_text(f"{HEAD}\n{call}\ntrainer.train()\nopen('ran', 'w')\n")
    with pytest.raises(SystemExit):
        from_trl([str(script)])
    said = " ".join(capsys.readouterr().err.split())
    assert "reward_len is defined in script.py, which trains when it is imported: put the call of train" in said
    from_trl([str(script), "--drop"])
    assert "# - Left out: reward_len is defined in script.py" in capsys.readouterr().out
    assert not (tmp_path / "ran").exists() and not Path("ran").exists()


def test_a_config_object_becomes_the_arguments_of_train() -> None:
    trl = pytest.importorskip("trl")
    config = trl.GRPOConfig(
        "exp/one", max_steps=4, learning_rate=1e-4, beta=0.1, per_device_train_batch_size=16, warmup_steps=2,
        max_completion_length=32, use_cpu=True, bf16=False, save_steps=3, seed=5,
    )  # fmt: skip
    given = train_arguments(config, use_peft=True)
    assert {name: given[name] for name in ("name", "dir", "seed", "max_steps", "batch_size")} == {
        **{"name": "one", "dir": "exp", "seed": 5, "max_steps": 4, "batch_size": 2},
    }
    assert given["trainer"] == {"precision": "32-true", "accelerator": "cpu"}
    assert given["callbacks"] == {"checkpoint": {"every_n_updates": 3}}
    assert isinstance(given["generator"], SlotGenerator) and given["lora"]["r"] == 16
    optimizer = given["optimizer"]([torch.zeros(1, requires_grad=True)])
    assert isinstance(optimizer, torch.optim.AdamW) and optimizer.defaults["lr"] == 1e-4
    assert isinstance(given["lr_scheduler"](optimizer), WarmupDecayLR)
    own = {"policy", "train", "rewards", *inspect.signature(lit_grpo.train).parameters}
    assert given.keys() <= own | set(inspect.signature(GRPOModule).parameters)
    with pytest.raises(ValueError, match=r"report_to is \['wandb'\], but a run from Python takes loggers as trainer="):
        train_arguments(trl.GRPOConfig("a", max_steps=1, use_cpu=True, report_to="wandb"))
    with pytest.raises(ValueError, match=r"top_p is 0\.9, which cannot be had"):
        train_arguments(trl.GRPOConfig("a", max_steps=1, use_cpu=True, top_p=0.9))
    with pytest.raises(ValueError, match="config is of type dict; give a GRPOConfig or an SFTConfig"):
        train_arguments({"max_steps": 1})


def test_every_name_of_trl_has_an_answer_that_names_ours() -> None:
    """What a user of TRL types is an argument of ours, or a sentence says what to write."""
    known = {*inspect.signature(lit_grpo.train).parameters, *inspect.signature(GRPOModule).parameters}
    for name in (TRL.keys() | TRAINER.keys() | {"reward_weights"}) - known:
        said = about_argument(name, known)
        assert said.endswith(".") and ("leave it out" in said or "here" in said or "weight" in said), name
    for row in TRL.values():
        for field in row.fields:
            assert (as_argument(field).partition("=")[0]) in known, field
    for name, row in TRAINER.items():
        assert {*row.fields} <= known, name


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"reward_weights": [0.1]}, "'reward_weights'; each reward has its weight: rewards=[{\"function\": score"),
        ({"reward_funcs": len}, "'reward_funcs'; here it is rewards (functions, paths, or with a weight"),
        ({"max_completion_length": 8}, 'here sampling={"max_tokens": ...}.'),
        ({"beta": 0.1}, 'here objective={"kl": {"beta": ...}}.'),
        ({"learning_rate": 1e-5}, "here optimizer=functools.partial(torch.optim.AdamW, lr=1e-6"),
        ({"top_p": 0.9}, "TRL's top_p has no counterpart (log-probs of truncated sampling"),
        ({"num_generation": 4}, "'num_generation'; did you mean 'num_generations'"),
        ({"data": {"shufle": True}}, "data of lit_grpo.train has no setting 'shufle'; did you mean 'shuffle'?"),
        (
            {"trainer": {"save_steps": 1}},
            'TRL\'s save_steps is here callbacks={"checkpoint": {"every_n_updates": ...}}',
        ),
    ],
)
def test_an_argument_that_train_does_not_have_is_refused_with_our_name_of_it(given: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)):
        lit_grpo.train("tiny", [{"prompt": "1"}], len, max_steps=1, **given)


def test_trl_s_own_call_is_refused_before_missing_arguments_are() -> None:
    call: Any = lit_grpo.train
    with pytest.raises(ValueError, match="no argument 'model'; here it is policy"):
        call(model="tiny", reward_funcs=len, train_dataset=[])


def test_every_metric_that_trl_logs_is_on_the_page_and_ours_is_explained() -> None:
    trl = pytest.importorskip("trl")
    source = (Path(trl.__file__).parent / "trainer" / "grpo_trainer.py").read_text()
    logged = set(re.findall(r'self\._metrics\[(?:mode|"train")\]\[f?"([^"]+)"\]', source))
    named = {re.sub(r"\{\w+\}", "*", name) for name in logged}
    assert named | {"loss", "grad_norm", "learning_rate", "eval_*"} == set(METRICS) and len(named) > 30
    known = [metric.name for section in sections() for metric in section.metrics]
    for name, row in METRICS.items():
        assert not row.ours or row.ours in (*known, "val/*"), name
        assert row.ours or row.differs, name
