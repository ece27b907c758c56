"""Two ranks that were given different rows, settings, rewards or policies refuse by name: real processes and gloo.

This file is also the script that the ranks run: ``python test_differing_ranks.py POLICY OUTPUT``; OUTPUT holds the
names of the cases, ``cases.json``, and what each rank said, ``rank-R.json``.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forks
import lightning.pytorch as pl
import pytest
import torch
from conftest import random_policy, table_rows
from safetensors.torch import save_file
from transformers import AutoTokenizer

import lit_grpo
from lit_grpo.data import PromptDataModule
from lit_grpo.module import GRPOModule
from lit_grpo.process import origins
from lit_grpo.training import TRAINER_DEFAULTS, default_callbacks

TESTS = Path(__file__).parent.parent
ROWS = [{"prompt": f"{number}+1=", "answer": str(number + 1), "level": {number}} for number in range(6)]


EXAMPLES = [{"prompt": f"{number}+2=", "answer": str(number + 2)} for number in range(40)]  # more than settings show


def imitating(rows: list[dict[str, str]]) -> dict[str, Any]:
    return {"rollout": {"plugins": [{"sft": {"data": rows, "column": "answer"}}]}}


def first(completion: str) -> float:
    return float("1" in completion)


def second(completion: str) -> float:
    return float("2" in completion)


def sgd(lr: float) -> Any:
    return lambda parameters: torch.optim.SGD(parameters, lr=lr)


def rows_with(place: int, **columns: Any) -> list[dict[str, Any]]:
    return [row | columns if number == place else row for number, row in enumerate(ROWS)]


def other_policy(policy: str, output: Path, change: Callable[[Path], None]) -> str:
    folder = output / f"policy-{len([*output.iterdir()])}"
    shutil.copytree(policy, folder)
    change(folder)
    return str(folder)


def new_weights(folder: Path) -> None:
    save_file(random_policy(seed=1).state_dict(), folder / "model.safetensors", {"format": "pt"})


def new_template(folder: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{{ messages[0].content }}"
    tokenizer.save_pretrained(folder)


def new_config(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))


def own_code(output: Path, text: str) -> str:
    """A file of the same name in a folder of the rank, with other content."""
    folder = output / text
    folder.mkdir()
    (folder / "mine.py").write_text(f"def score(completion):\n    return {text}\n")
    return str(folder)


Case = tuple[Callable[[str, Path], dict[str, Any]], str]
"""What rank 1 is given otherwise, from the policy's folder and one of its own; and how the refusal begins."""
NOT_THE_SAME = "The ranks of this run were not given the same: "
OTHER_ROWS = "The ranks of this run have read different rows: "
CASES: dict[str, Case] = {
    "rows in another order": (
        lambda *_: {"train": [*ROWS[:2], *ROWS[:1:-1]]},
        OTHER_ROWS + r"data\.train has the same 6 rows in another order on rank 1 than on rank 0, from row 2 on\. Each",
    ),
    "rows of a generator in another order": (
        lambda *_: {"train": reversed(ROWS)},
        OTHER_ROWS + r"data\.train has the same 6 rows in another order on rank 1 than on rank 0, from row 0 on\.",
    ),
    "another answer": (
        lambda *_: {"train": rows_with(3, answer="5")},
        OTHER_ROWS + r"data\.train has other rows on rank 1 than on rank 0 \(1 of 6, from row 3 on\)\.",
    ),
    "another value that JSON does not know": (
        lambda *_: {"train": rows_with(3, level={"?"})},
        OTHER_ROWS + r"data\.train has other rows on rank 1 than on rank 0 \(1 of 6, from row 3 on\)\.",
    ),
    "fewer rows": (
        lambda *_: {"train": ROWS[:5]},
        OTHER_ROWS + r"data\.train has 6 rows on rank 0 and 5 on rank 1\.",
    ),
    "fewer rows than a batch": (
        lambda *_: {"train": ROWS[:1]},
        OTHER_ROWS + r"data\.train has 6 rows on rank 0 and 1 on rank 1\.",
    ),
    "other validation rows": (
        lambda *_: {"validation": ROWS[1:3]},
        OTHER_ROWS + r"data\.validation has other rows on rank 1 than on rank 0 \(2 of 2, from row 0 on\)\.",
    ),
    "no validation": (
        lambda *_: {"validation": None},
        NOT_THE_SAME + r"the stage is .*; data\.validation is 'set' on rank 0 and None on rank 1",
    ),
    "rows that cannot be used": (
        lambda *_: {"train": rows_with(3, prompt="")},
        r"(On rank 1: )?data\.train: 1 of the 6 rows of the list given is unusable .* row 3 has an empty prompt",
    ),
    "order of rewards": (
        lambda *_: {"rewards": [second, first]},
        NOT_THE_SAME + r".*model\.rewards is \['first', 'second'\] on rank 0 and \['second', 'first'\] on rank 1",
    ),
    "another reward": (
        lambda *_: {"rewards": [first]},
        NOT_THE_SAME + r".*model\.rewards is \['first', 'second'\] on r",
    ),
    "weight of a reward": (
        lambda *_: {"rewards": [first, {"function": f"{__file__}:second", "weight": 0.5}]},
        NOT_THE_SAME + r".*weight of reward 'second' is 1\.0 on rank 0 and 0\.5 on rank 1",
    ),
    "code of a reward": (
        lambda _, output: {"rewards": [f"{own_code(output, '1.0')}/mine.py:score"]},
        NOT_THE_SAME + r".*the code of reward 'score' is '\w{12}' on rank 0 and '\w{12}' on rank 1",
    ),
    "number of completions": (
        lambda *_: {"num_generations": 4},
        NOT_THE_SAME + r"model\.num_generations is 2 on rank 0 and 4 on rank 1; give every rank the same settings",
    ),
    "sampling": (
        lambda *_: {"sampling": {"max_tokens": 5, "temperature": 0.5}},
        NOT_THE_SAME + r"model\.sampling\.temperature is 1\.0 on rank 0 and 0\.5 on rank 1; .*max_tokens is 4 on",
    ),
    "objective": (
        lambda *_: {"objective": {"kl": {"beta": 0.1}}},
        NOT_THE_SAME + r"model\.objective\.kl\.beta is 0\.0 on rank 0 and 0\.1 on rank 1",
    ),
    "seed": (
        lambda *_: {"seed": 1},
        NOT_THE_SAME + r"data\.seed is 0 on rank 0 and 1 on rank 1; .*model\.sampling_seed is 0 on rank 0 and 1 on",
    ),
    "prompts of a batch": (
        lambda *_: {"batch_size": 2},
        NOT_THE_SAME + r"data\.batch_size is 1 on rank 0 and 2 on rank 1",
    ),
    "steps": (lambda *_: {"max_steps": 2}, NOT_THE_SAME + r"trainer\.max_steps is 1 on rank 0 and 2 on rank 1"),
    "plug-in": (
        lambda *_: {"callbacks": {"rollout": {"plugins": [{"april": {"max_staleness": 2}}]}}},
        NOT_THE_SAME + r".*rollout\.plugins is \[\] on rank 0 and \[\{'april': \{'max_staleness': 2\}\}\] on rank 1",
    ),
    "examples of a plug-in": (
        lambda *_: {"callbacks": imitating(EXAMPLES[::-1])},
        OTHER_ROWS + r"data set 0 of rollout\.plugins has the same 40 rows in another order on rank 1 than on rank 0",
    ),
    "plan": (
        lambda *_: {"callbacks": {"rollout": {"plan": "lpt"}}},
        NOT_THE_SAME + r"rollout\.plan is not set on rank 0 and 'lpt' on rank 1",
    ),
    "learning rate": (
        lambda *_: {"optimizer": sgd(0.2)},
        NOT_THE_SAME + r"model\.optimizer\.lr is 0\.1 on rank 0 and 0\.2 on rank 1",
    ),
    "weights of the policy": (
        lambda policy, output: {"policy": other_policy(policy, output, new_weights)},
        NOT_THE_SAME + r"the weights of model\.policy is '\w+' on rank 0 and '\w+' on rank 1",
    ),
    "config of the policy": (
        lambda policy, output: {"policy": other_policy(policy, output, new_config)},
        NOT_THE_SAME + r"the config of model\.policy is",
    ),
    "chat template": (
        lambda policy, output: {"policy": other_policy(policy, output, new_template)},
        NOT_THE_SAME + r"the chat template of model\.policy is",
    ),
    "loaded model": (
        lambda policy, _: {"policy": (random_policy(seed=1), AutoTokenizer.from_pretrained(policy))},
        NOT_THE_SAME + r".*the weights of model\.policy is",
    ),
    "version of a package": (
        lambda *_: {"version": "0.1"},
        NOT_THE_SAME + r"the version of transformers is '[\d.]+' on rank 0 and '0\.1' on rank 1",
    ),
    "rows of a Trainer of one's own": (
        lambda *_: {"train": ROWS[::-1]},
        OTHER_ROWS + r"data\.train has the same 6 rows in another order on rank 1 than on rank 0, from row 0 on\.",
    ),
    "settings of a Trainer of one's own": (
        lambda *_: {"num_generations": 4},
        NOT_THE_SAME + r"model\.num_generations is 2 on rank 0 and 4 on rank 1",
    ),
    "nothing": (lambda *_: {}, "trained"),
    "where the policy lies": (
        lambda policy, output: {"policy": other_policy(policy, output, lambda folder: None)},
        "trained",
    ),
}
QUICK = (
    *("rows in another order", "another answer", "no validation", "rows that cannot be used", "order of rewards"),
    *("number of completions", "plug-in", "weights of the policy", "settings of a Trainer of one's own", "nothing"),
)


def train_with_own_trainer(given: dict[str, Any], folder: Path, options: dict[str, Any]) -> None:
    keys = ("policy", "rewards", "num_generations", "sampling", "optimizer")
    module = GRPOModule(**{key: given[key] for key in keys})
    data = PromptDataModule(given["policy"], train=given["train"], batch_size=given["batch_size"])
    settings: dict[str, Any] = {**TRAINER_DEFAULTS, **options, "max_steps": given["max_steps"], "logger": False}
    pl.Trainer(callbacks=default_callbacks(), default_root_dir=str(folder), **settings).fit(module, data)


def go(policy: str, output: Path, name: str, rank: int) -> str:
    """Train, and return what is said if that is refused."""
    folder = output / name.replace(" ", "-") / f"of-rank-{rank}"
    folder.mkdir(parents=True)
    given: dict[str, Any] = {
        "policy": policy,
        "train": ROWS,
        "validation": ROWS[:2],
        "rewards": [first, second],
        "max_steps": 1,
        "batch_size": 1,
        "num_generations": 2,
        "sampling": {"max_tokens": 4},
        "optimizer": sgd(0.1),
    }
    if name == "code of a reward":
        given["rewards"] = [f"{own_code(folder, '2.0')}/mine.py:score"]
    if name == "examples of a plug-in":
        given["callbacks"] = imitating(EXAMPLES)
    given |= CASES[name][0](policy, folder) if rank else {}
    own_version, version = given.pop("version", None), origins.version
    origins.version = lambda distribution_name: (
        own_version if own_version and distribution_name == "transformers" else version(distribution_name)
    )
    options = {"accelerator": "cpu", "devices": 2, "strategy": "ddp", "enable_progress_bar": False}
    try:
        if name.endswith("of one's own"):
            train_with_own_trainer(given, folder, options)
        else:
            lit_grpo.train(**given, dir=str(folder.parent), trainer=options)
    except ValueError as error:
        return str(error)
    finally:
        origins.version = version
    return "trained"


def main(policy: str, output: str) -> None:
    """Be one of two ranks."""
    torch.set_num_threads(1)
    rank = int(os.environ.get("LOCAL_RANK", 0))
    said = {}
    for name in json.loads(Path(output, "cases.json").read_text()):
        said[name] = go(policy, Path(output), name, rank)
        print(f"rank {rank}: {name}: {said[name]}", flush=True)
    Path(output, f"rank-{rank}.json").write_text(json.dumps(said))


@pytest.fixture(scope="module")
def said(
    policy_folder: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> list[dict[str, str]]:
    """What each rank said in the selected cases, which run in one pair of processes."""
    output = tmp_path_factory.mktemp("differing_ranks")
    items = [item for item in request.session.items if item.path == request.path]
    names = [item.callspec.params["name"] for item in items if "said" in item.fixturenames]  # pyrefly: ignore[missing-attribute]
    (output / "cases.json").write_text(json.dumps(names))
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS / "integration"), str(TESTS.parent)]),
        "OMP_NUM_THREADS": "1",
    }
    process = forks.run([sys.executable, __file__, str(policy_folder), str(output)], 400, env=environment, cwd=output)
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-4000:]
    return [json.loads((output / f"rank-{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("name", table_rows(CASES, QUICK))
def test_ranks_that_were_given_something_else_say_what(name: str, said: list[dict[str, str]]) -> None:
    expected = CASES[name][1]
    for of_rank in said:
        assert re.match(expected, of_rank[name]), of_rank[name]
        assert "\n" not in of_rank[name]


COMMANDS: dict[str, tuple[tuple[str, ...], str]] = {
    "plan": (("--rollout.plan", "lpt"), r"rollout\.plan is 'short_last' on rank 0 and 'lpt' on rank 1"),
    "generator": (
        ("--model.generator.num_slots", "3"),
        r"model\.generator\S*num_slots is \S+ on rank 0 and 3 on rank 1",
    ),
    "rewards": (
        ("--model.rewards", '[{"function": "mine.py:score", "name": "other"}]'),
        r"model\.rewards is \['score'\] on rank 0 and \['other'\] on rank 1",
    ),
    "rows in the folder of the machine": (
        (),
        r"data\.train has the same 6 rows in another order on rank 1 than on ran",
    ),
    "code in the folder of the machine": ((), r"the code of reward 'score' is '\w+' on rank 0 and '\w+' on rank 1"),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", COMMANDS)
def test_machines_whose_commands_or_folders_differ_end_with_one_sentence(
    name: str, policy_folder: Path, tmp_path: Path
) -> None:
    arguments, expected = COMMANDS[name]
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = str(listening.getsockname()[1])
    machines: list[forks.Forked] = []
    for rank in range(2):
        folder = tmp_path / f"machine-{rank}"
        folder.mkdir()
        rows = [{"prompt": row["prompt"], "answer": row["answer"]} for row in ROWS]
        rows = rows[::-1] if rank and name.startswith("rows in") else rows
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        value = "2.0" if rank and name.startswith("code in") else "1.0"
        (folder / "mine.py").write_text(f"def score(completion):\n    return {value}\n")
        of_torchrun = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "RANK": str(rank)}
        of_torchrun |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "x"}
        command = [sys.executable, "-m", "lit_grpo", "fit", "--model.policy", str(policy_folder), *OF_ALL]
        command += arguments if rank else ()
        environment = os.environ | of_torchrun | {"PYTHONPATH": str(TESTS.parent), "OMP_NUM_THREADS": "1"}
        machines.append(forks.Forked(command, cwd=folder, env=environment, text=True, stdout=-1, stderr=-1))
    said = [machine.communicate(timeout=200)[1] for machine in machines]
    assert [machine.returncode for machine in machines] == [2, 2], said[0][-2000:] + said[1][-2000:]
    assert all(re.search(expected, each) for each in said), said


OF_ALL = (
    *("--data.train", "rows.jsonl", "--data.batch_size", "1", "--model.num_generations", "2"),
    *("--model.rewards", '[{"function": "mine.py:score"}]', "--model.sampling.max_tokens", "4"),
    *(
        "--trainer.accelerator",
        "cpu",
        "--trainer.devices",
        "2",
        "--trainer.strategy",
        "ddp",
        "--trainer.max_steps",
        "1",
    ),
)


if __name__ == "__main__":
    main(*sys.argv[1:])
