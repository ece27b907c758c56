"""The check-up: it finds faults that are planted in a run, and passes the runs that come with the package."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from conftest import ALPHABET, random_policy, save_policy, table_rows
from test_readme import block

from lit_grpo.module import GRPOModule
from lit_grpo.policy.spec import PolicySpec
from lit_grpo.policy.weights import PolicyWeights, digest
from lit_grpo.rollout.proof import given_logprobs
from lit_grpo.rollout.slots.generator import SlotGenerator
from lit_grpo.rollout.weights.tensors import SyncReport
from lit_grpo.tools.commands.doctor import main
from lit_grpo.types import Completion, Request, StepEvents
from tests.task_folders import write_task

REWARDS = """
def digits(completion):
    return sum(c.isdigit() for c in completion) / max(len(completion), 1)

def raises(completion):
    raise KeyError("\\x1b[2J no such answer")

def says_right(completion, answer):
    return float(completion == answer)

"""
ASKS_NOTHING = "{% for message in messages %}{{ message.content }}{% endfor %}"


class CopyGenerator(SlotGenerator):
    """Decodes on a copy of the policy, which weights travel to."""

    abilities = SlotGenerator.abilities | {"scores"}

    def start(self, policy: PolicySpec) -> None:
        self._theirs = policy.module
        super().start(PolicySpec(copy.deepcopy(policy.module).eval(), policy.tokenizer))

    def weights(self) -> PolicyWeights:
        return PolicyWeights(self._theirs, merged=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> SyncReport:
        own = dict(self.policy.named_parameters())
        digests = {}
        for name, tensor in weights:
            with torch.no_grad():
                own[name].copy_(self.arrived(name, tensor))
            digests[name] = self.told(name, tensor, own[name])
        super().load_weights(own.items(), version)
        return SyncReport(digests)

    @property
    def longest_sequence(self) -> int:
        return 64

    def score(self, sequences: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
        return {"the copy": given_logprobs(self.policy, sequences)}

    def arrived(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """What becomes of a tensor on the way."""
        return tensor

    def told(self, name: str, sent: torch.Tensor, held: torch.Tensor) -> str:
        """What the generator says of it."""
        return digest(held)


class StaleGenerator(CopyGenerator):
    """One tensor stays as it was first, whatever is said of it."""

    first: torch.Tensor | None = None

    def arrived(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if "layers.1.mlp.down_proj" not in name:
            return tensor
        if self.first is None:
            self.first = tensor.clone()
        return self.first

    def told(self, name: str, sent: torch.Tensor, held: torch.Tensor) -> str:
        return digest(sent)


class HotGenerator(CopyGenerator):
    """It samples at a temperature of its own."""

    def submit(self, requests: Sequence[Request], expected: Sequence[float] | None = None) -> None:
        own = [replace(one, sampling=replace(one.sampling, temperature=1.0)) for one in requests]
        super().submit(own, expected)


class Fault(NamedTuple):
    """What is planted, what finds it with which verdict, and what it says."""

    plant: Callable[[Path, pytest.MonkeyPatch], Sequence[str]]
    name: str
    said: str
    verdict: str = "fail"


def options(*arguments: str) -> Callable[[Path, pytest.MonkeyPatch], Sequence[str]]:
    """Of the command line."""
    return lambda folder, monkeypatch: arguments


def reward(name: str) -> Callable[[Path, pytest.MonkeyPatch], Sequence[str]]:
    """Another reward function."""
    return options("--model.rewards", json.dumps([{"function": f"rewards.py:{name}"}]))


def generator(kind: type, *others: str) -> Callable[[Path, pytest.MonkeyPatch], Sequence[str]]:
    """Another generator."""
    return options("--model.generator", f"{__name__}.{kind.__name__}", *others)


def template(text: str, **tokens: str) -> Callable[[Path, pytest.MonkeyPatch], Sequence[str]]:
    """A chat template, and prompts that are conversations."""

    def plant(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Sequence[str]:
        change_tokenizer(folder, chat_template=text, **tokens)
        return ["--data.chat_template", "true"]

    return plant


def change_tokenizer(folder: Path, **changes: str) -> None:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder / "policy")
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    tokenizer.save_pretrained(folder / "policy")


def masked_by_pad(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Sequence[str]:
    """Padding has the id of <eos>, and somebody masks by comparing with it."""
    change_tokenizer(folder, pad_token="<eos>")
    finish = SlotGenerator._finish

    def masked(generator: SlotGenerator, step: Any, tokens: Any, events: StepEvents) -> None:
        finish(generator, step, tokens, events)
        events.finished = [
            Completion(
                one.request,
                one.token_ids_T,
                one.logprobs_T,
                one.versions_T,
                one.finish_reason,
                one.text,
                trained_T=one.token_ids_T != 1,
            )
            for one in events.finished
        ]

    monkeypatch.setattr(SlotGenerator, "_finish", masked)
    return []


def with_dropout(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Sequence[str]:
    """The policy has dropout that loading does not know of."""

    def drop(module: GRPOModule, make: Callable[[GRPOModule], None] = GRPOModule.configure_model) -> None:
        make(module)
        mlp: Any = module.policy.get_submodule("model.layers.0.mlp")
        if not hasattr(mlp, "dropped"):
            mlp.dropped = mlp.register_forward_hook(
                lambda module, inputs, output: torch.nn.functional.dropout(output, 0.1, module.training)
            )

    monkeypatch.setattr(GRPOModule, "configure_model", drop)
    return []


def frozen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Sequence[str]:
    """No weight may be trained."""

    def freeze(module: GRPOModule, make: Callable[[GRPOModule], Any] = GRPOModule.configure_optimizers) -> Any:
        module.policy.requires_grad_(False)
        return make(module)

    monkeypatch.setattr(GRPOModule, "configure_optimizers", freeze)
    return []


def no_gradient(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Sequence[str]:
    """The loss does not depend on any weight."""
    add = GRPOModule.add_gradient
    monkeypatch.setattr(
        GRPOModule, "add_gradient", lambda module, loss, exchange: add(module, lambda: 0.0 * loss(), exchange)
    )
    return []


def tiny_and_short(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Sequence[str]:
    """The policy has no room to come to an end."""
    (folder / "prompts.jsonl").write_text('{"prompt": "075%32="}\n' * 4)
    return ["--model.policy", "tiny", "--model.sampling.max_tokens", "2"]


def moved_by_others(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Sequence[str]:
    """Something else writes to a weight whenever a step is taken."""

    def write(module: GRPOModule, make: Callable[[GRPOModule], Any] = GRPOModule.configure_optimizers) -> Any:
        optimizer = make(module)
        optimizer.register_step_post_hook(
            lambda optimizer, *_: optimizer.param_groups[0]["params"][0].data.mul_(1.0001)
        )
        return optimizer

    monkeypatch.setattr(GRPOModule, "configure_optimizers", write)
    return []


def smaller_policy(vocab_size: int) -> Callable[[Path, pytest.MonkeyPatch], Sequence[str]]:
    """The tokenizer has more tokens than the policy has embeddings."""

    def plant(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Sequence[str]:
        random_policy(vocab_size=vocab_size).save_pretrained(folder / "policy")
        return []

    return plant


def little_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Sequence[str]:
    """There is a little memory left."""
    monkeypatch.setattr("lit_grpo.tools.doctor.largest_step.free_bytes", lambda device: 2**19)
    return []


def little_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Sequence[str]:
    """There is a little disk left."""
    monkeypatch.setattr(
        "lit_grpo.tools.doctor.checkpoint.shutil.disk_usage", lambda path: type("Usage", (), {"free": 2**18})
    )
    return []


def broken_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Sequence[str]:
    """What is written is not what is read."""
    save = torch.save

    def wrong(saved: dict[str, Any], *arguments: Any) -> None:
        name, tensor = next(iter(saved["state_dict"].items()))
        save(saved | {"state_dict": saved["state_dict"] | {name: tensor + 2**-20}}, *arguments)

    monkeypatch.setattr("lit_grpo.checkpoints.files.torch.save", wrong)
    return []


def not_merged(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Sequence[str]:
    """An export lacks the adapters."""
    monkeypatch.setattr("lit_grpo.policy.weights.active_adapters", lambda layer: [])
    return ["--model.lora.r", "4"]


FAULTS = {
    "template without a question": Fault(template(ASKS_NOTHING), "chat template", "adds nothing to ask for an answer"),
    "larger tokenizer": Fault(smaller_policy(20), "tokenizer", "35 tokens for 20 rows of embeddings"),
    "pad masked": Fault(masked_by_pad, "end tokens", "samples are not trained on"),
    "all cut": Fault(tiny_and_short, "samples", " 0% ended"),
    "reward raises": Fault(reward("raises"), "reward raises", r"\\x1b\[2J no such answer"),
    "reward out of reach": Fault(reward("says_right"), "reward says_right", "out of the policy's reach", "warn"),
    "another reward alone": Fault(
        options(
            "--model.rewards", json.dumps([{"function": f"rewards.py:{name}"} for name in ("says_right", "digits")])
        ),
        "what is learned",
        "only digits of these samples, for says_right, which decides pass@1, gives all of them the same",
        "warn",
    ),
    "temperature": Fault(
        generator(HotGenerator, "--model.sampling.temperature", "0.6"), "log-prob gap", "as if at temperature 1.0"
    ),
    "dropout": Fault(with_dropout, "dropout", "two passes in training mode differ"),
    "stale tensor": Fault(generator(StaleGenerator), "weight sync", "its weights are not the policy"),
    "memory": Fault(little_memory, "memory", "GiB are free"),
    "writer beside": Fault(moved_by_others, "rate 0", "a step with learning rate 0 changes"),
    "no gradient": Fault(no_gradient, "gradient", "the policy is frozen"),
    "learning rate": Fault(
        options("--model.optimizer.lr", "0.1"), "step", "lower model.optimizer.lr, which reaches 0.1"
    ),
    "rate of all weights": Fault(
        options("--model.lora.r", "2", "--model.optimizer.lr", "2e-6"),
        "learning rate",
        "2e-06 is low for LoRA adapters: set model.optimizer.lr to about ten times",
        "warn",
    ),
    "disk full": Fault(little_disk, "disk", "0.25 MiB free"),
    "adapters not merged": Fault(not_merged, "export", "is not what was trained: its log-probs differ"),
    "disk broken": Fault(broken_disk, "checkpoint", "differs from what was written"),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a run in which all is well."""
    monkeypatch.chdir(tmp_path)
    save_policy(tmp_path / "policy")
    rows = [{"prompt": f"{n}+{n + 1}=", "answer": str(2 * n + 1)} for n in range(24)]
    model = {"rewards": [{"function": "rewards.py:digits"}], "sampling": {"max_tokens": 96}}
    return write_task(
        tmp_path, "policy", REWARDS, rows, lr=1e-3, trainer={"max_steps": 4}, model=model, data={"batch_size": 3}
    )


class Outcome(NamedTuple):
    """The exit code, and what was said by verdict and name."""

    code: int
    said: dict[tuple[str, str], str]
    text: str


def examine(capsys: pytest.CaptureFixture[str], *arguments: str) -> Outcome:
    """Run the check-up and read what it prints."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    text = capsys.readouterr().out
    said: dict[tuple[str, str], str] = {}
    last = ("", "")
    for line in text.splitlines():
        assert len(line) <= 80 and "\x1b" not in line
        if re.match("(pass|warn|fail|skip) ", line):
            last = line[:4], line[5:24].strip()
            said[last] = line[24:].strip()
        elif said and line.startswith(" " * 24):
            said[last] += " " + line.strip()
    assert isinstance(ended.value.code, int)
    return Outcome(ended.value.code, said, text)


def names(outcome: Outcome, verdict: str) -> list[str]:
    return [name for given, name in outcome.said if given == verdict]


def test_a_run_in_which_all_is_well_has_no_fault(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(folder.rglob("*"))
    outcome = examine(capsys, "--config", "config.yaml")
    assert (outcome.code, names(outcome, "fail"), names(outcome, "skip")) == (0, [], []), outcome.text
    assert '"0+1="' in outcome.text
    shown = re.search(
        r'^     train/(\d+) is completed: ".*\n       its answer: (\d+)\n       its reward digits: ', outcome.text, re.M
    )
    assert shown and int(shown[2]) == 2 * int(shown[1]) + 1
    assert sorted(path for path in folder.rglob("*") if "__pycache__" not in path.parts) == before


def test_all_mistakes_in_the_settings_are_found_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wandb = pytest.importorskip("wandb", reason="wandb is not installed (the extra wandb)")
    monkeypatch.setattr(wandb, "login", lambda **_: False)
    told = ["--run.wandb", "online", "--trainer.gradient_clip_val", "1.0"]
    told += ["--model.lora.r", "2", "--model.lora.target_modules", "[nope]"]
    (folder / "prompts.jsonl").write_text('{"answer": "1"}\n')
    outcome = examine(capsys, "--config", "config.yaml", *told)
    assert outcome.code == 1 and "W&B knows no API key" in outcome.said["fail", "W&B"]
    said = " ".join(outcome.text.split())
    assert outcome.text.count("fail settings ") == 3, outcome.text
    assert "gradient_clip_val" in said and "names 'nope', which no layer" in said and "prompts.jsonl" in said
    outcome = examine(capsys, "--config", "config.yaml", "--model.policy", "./nowhere")
    assert outcome.text.count("There is no policy folder") == 1 and outcome.text.endswith("1 fail\n"), outcome.text


def test_parts_that_cannot_be_made_are_all_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = ["--model.rewards", "nowhere.py:score", "--rollout.plan", "lp", "--data.template", "{"]
    outcome = examine(capsys, "--config", "config.yaml", *told)
    assert outcome.code == 1 and outcome.text.count("fail settings ") == 3, outcome.text
    assert all(one in outcome.text for one in ("nowhere.py", "plan", "template"))


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fault = FAULTS[name]
    outcome = examine(capsys, "--config", "config.yaml", *fault.plant(folder, monkeypatch))
    assert outcome.code == (fault.verdict == "fail"), outcome.text
    assert (fault.verdict, fault.name) in outcome.said, outcome.text
    assert re.search(fault.said, outcome.said[fault.verdict, fault.name]), outcome.text
    others = {"rewards"} if fault.name.startswith("reward") else set()
    assert set(names(outcome, "fail")) <= {fault.name} | others, outcome.text


def test_padding_with_the_end_tokens_id_is_no_fault(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change_tokenizer(folder, pad_token="<eos>")
    outcome = examine(capsys, "--config", "config.yaml")
    assert outcome.code == 0
    assert "padding has the same id" in outcome.said["pass", "end tokens"]


def test_a_tokenizer_that_is_another_models_shows_in_the_likelihood(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The policy learns to foretell the prompts; then the ids of the vocabulary are dealt anew."""
    texts = ["can a bee be jam?", "no ape can dance", "a nice mango pie", "bake a ham and go"]
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    learn_by_heart(folder / "policy", texts)
    outcome = examine(capsys, "--config", "config.yaml")
    assert ("pass", "likelihood") in outcome.said, outcome.text
    path = folder / "policy" / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {token: n if n < 2 else 2 + (n + 9) % 33 for token, n in vocabulary.items()}
    path.write_text(json.dumps(tokenizer))
    outcome = examine(capsys, "--config", "config.yaml")
    assert "the tokenizer is another model's" in outcome.said["warn", "likelihood"], outcome.text


def learn_by_heart(folder: Path, texts: Sequence[str]) -> None:
    policy: Any = random_policy().train()
    ids_BT = torch.tensor([[ALPHABET.index(letter) + 2 for letter in text.ljust(17)] for text in texts])
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
    for _ in range(40):
        policy(input_ids=ids_BT, labels=ids_BT).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    policy.save_pretrained(folder)


CONFIGS: dict[str, list[str]] = {
    "arithmetic": [],
    "budget": [],
    "calculator": [],
    "catch": [],
    "infinite_sampling": [],
    "knights": ["--model.max_tokens_per_micro_batch", "700"],
    "own_task": [],
    "generators/slots": ["--config", "arithmetic"],
    "generators/vllm": ["--config", "arithmetic", "--model.generator.kv_memory", "64MiB"],
}
"""Those of small policies; ``test_real_model.py`` examines the others."""


@pytest.mark.parametrize("name", table_rows(CONFIGS, ["own_task", "generators/slots"]))
def test_what_comes_with_the_package_has_no_fault(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for file in ("my_prompts.jsonl", "my_rewards.py"):
        (tmp_path / file).write_text(block(file))
    overlay = CONFIGS[name][:2] if name.startswith("generators") else []
    rest = ["--model.max_tokens_per_micro_batch", "512", *CONFIGS[name][len(overlay) :]]
    outcome = examine(capsys, *overlay, "--config", name, *rest)
    assert (outcome.code, names(outcome, "fail"), names(outcome, "skip")) == (0, [], []), outcome.text
