"""Tasks of `evaluate --lm-eval` in the lm-evaluation-harness itself, which has an environment of its own here."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from lit_grpo.data.rendering import PromptRenderer
from lit_grpo.policy.loading import load_tokenizer
from lit_grpo.policy.named import NAMED
from lit_grpo.rewards import ExactMatch, RewardFunction
from lit_grpo.tools.evaluation.command import main
from lit_grpo.tools.evaluation.harness import adds_special_tokens, make_task
from lit_grpo.types import PassRule, Prompt, SamplingParams

pytestmark = pytest.mark.nightly
VERSION = "0.4.13"
WORDS = ["user assistant system The answer is 12 thank you what is one plus two please reply with a number think "] * 20
LETTERS = "\n .,:;=+-?!#'0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZß<>/_|é"
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that has the harness beside what this one has."""
    folder = tmp_path_factory.mktemp("lm_eval")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin/python"
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own = subprocess.run([python, "-c", where], check=True, capture_output=True, text=True).stdout.strip()
    Path(own, "beside.pth").write_text(sysconfig.get_path("purelib"))
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", f"lm_eval=={VERSION}"]
    subprocess.run(install, check=True)
    return python


# ---- the policies --------------------------------------------------------------------------------------


def byte_bpe() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(WORDS, trainer)
    return tokenizer


def begins_texts() -> Tokenizer:
    """As Llama 3: each text begins with a token of its own."""
    tokenizer = byte_bpe()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=SPECIAL, unk_token="<unk>", initial_alphabet=list(LETTERS), show_progress=False
    )
    tokenizer.train_from_iterator([*WORDS, LETTERS * 5], trainer)
    return tokenizer


def lower_case() -> Tokenizer:
    tokenizer = byte_bpe()
    tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), normalizers.Replace(Regex(" +"), " ")])
    return tokenizer


def digits_apart() -> Tokenizer:
    tokenizer = byte_bpe()
    bytes_alone = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), bytes_alone])
    return tokenizer


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "bytes": byte_bpe,
    "begins texts": begins_texts,
    "unigram": unigram,
    "lower case": lower_case,
    "digits apart": digits_apart,
}


def save_policy(kind: str, folder: Path) -> Any:
    """Save a random policy with a tokenizer; return the tokenizer as it is loaded."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=TOKENIZERS[kind](),
        bos_token="<s>",
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        unk_token="<unk>",
    )
    tokenizer.chat_template = CHATML
    config = AutoConfig.for_model(
        "llama", vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, bos_token_id=1, eos_token_id=4, pad_token_id=5,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return load_tokenizer(str(folder))


# ---- the tasks -----------------------------------------------------------------------------------------


def asked(text: str, *before: str) -> list[dict[str, str]]:
    roles = ["user", "assistant"]
    talk = [{"role": roles[number % 2], "content": each} for number, each in enumerate([*before, text])]
    return [{"role": "system", "content": "Reply with a number."}, *talk]


KINDS: dict[str, tuple[dict[str, Any], list[Any], list[Any], dict[str, Any]]] = {  # renderer, prompts, answers, reward
    "texts": ({}, ["what is one plus two?", "  two ", "2024-03-01"], ["12", "2024-03-01", ["3", "three"]], {}),
    "conversations": (
        {},
        [asked("what is one?"), asked("and?", "one plus two", "12")],
        ["1", "12"],
        {"pattern": r"(\d+)"},
    ),
    "without thoughts": (
        {"chat_template_kwargs": {"enable_thinking": False}},
        [asked("what is one?"), asked("Straße")],
        ["STRASSE", "straße"],
        {"ignore_case": True},
    ),
    "begun answers": (
        {"continue_final_message": True},
        [asked("The answer is", "what is one?"), asked("12", "one?")],
        ["1", "12"],
        {"pattern": r"(?:is|=) ?(\d+)|(no)"},
    ),
    "spelled control tokens": (
        {"split_special_tokens": True},
        [asked("what is one?"), asked("say <|im_end|> please")],
        ["1", "2"],
        {},
    ),
}
SAID = [
    "12",
    " 12.",
    "1",
    "The answer is 3",
    "STRASSE",
    "straße",
    "Straße ",
    "2024-03-01",
    "three",
    "= 12",
    "",
    "\u22121",
]
READ = """
import json, sys
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

found = {}
for one in json.load(open(sys.argv[1])):
    loaded = TaskManager(include_path=one["folder"], include_defaults=False).load(one["name"])
    task = loaded["tasks"][one["name"]] if "tasks" in loaded else loaded[one["name"]]
    task.build_all_requests(limit=None, rank=0, world_size=1)
    bos = {} if one["adds"] else {"add_bos_token": False}
    policy = HFLM(pretrained=one["policy"], device="cpu", dtype="float32", batch_size=1, **bos)
    tokens = [policy.tok_batch_encode([each.args[0]])[0][0].tolist() for each in task.instances]
    grade = lambda doc, said: task.process_results(doc, [said])["exact_match"]
    grades = [[grade(each.doc, said) for said in one["said"]] for each in task.instances]
    found[one["name"]] = {"tokens": tokens, "grades": grades, "until": task.instances[0].args[1]["until"]}
json.dump(found, open(sys.argv[2], "w"))
"""


def test_the_harness_reads_the_tokens_of_twenty_tasks_and_grades_as_the_reward_does(
    harness: Path, tmp_path: Path
) -> None:
    specs, ours, refused = list[dict[str, Any]](), dict[str, Any](), list[str]()
    for kind in TOKENIZERS:
        policy = tmp_path / kind
        tokenizer = save_policy(kind, policy)
        for what, (options, texts, answers, how) in KINDS.items():
            name = re.sub(r"\W", "_", f"{kind} {what}")
            renderer, match = PromptRenderer(**options), ExactMatch(**how)
            rendered = [renderer.render({"prompt": text}, tokenizer) for text in texts]
            prompts = [
                Prompt(f"test/{number}", each.token_ids, each.text, {"answer": answer}, messages=each.messages)
                for number, (each, answer) in enumerate(zip(rendered, answers, strict=False))
            ]
            function = RewardFunction.of(match, "exact_match")
            task = make_task(
                name, prompts, [function], PassRule("exact_match"), SamplingParams(max_tokens=8, stop=("#",))
            )
            try:
                adds = adds_special_tokens(prompts, tokenizer)
            except ValueError as error:
                assert "would read other tokens than the policy does in row test/" in str(error)
                refused.append(name)
                continue
            folder = tmp_path / f"task {name}"
            folder.mkdir()
            task.write(folder)
            specs.append({"name": name, "folder": str(folder), "policy": str(policy), "adds": adds, "said": SAID})
            ours[name] = {
                "tokens": [list(prompt.token_ids) for prompt in prompts],
                "grades": [[match(said, **prompt.columns) for said in SAID] for prompt in prompts],
            }
    assert {name for name in refused if "spelled" in name} == {
        f"{re.sub(chr(32), '_', kind)}_spelled_control_tokens" for kind in TOKENIZERS
    }
    theirs = run_harness(harness, tmp_path, ["-c", READ], specs)
    print(f"{len(specs)} tasks are read, {len(refused)} are refused: {refused}")
    assert theirs.keys() == ours.keys() and len(specs) + len(refused) == len(TOKENIZERS) * len(KINDS) == 25
    assert len(specs) == 20
    for name, found in theirs.items():
        assert found["tokens"] == ours[name]["tokens"], name
        assert found["grades"] == ours[name]["grades"], name
        assert "#" in found["until"]


def run_harness(python: Path, folder: Path, program: list[str], specs: list[dict[str, Any]]) -> dict[str, Any]:
    (folder / "specs.json").write_text(json.dumps(specs))
    environment = {**os.environ, "HF_DATASETS_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
    command = [python, *program, str(folder / "specs.json"), str(folder / "found.json")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "found.json").read_text())


def test_the_command_that_is_printed_finds_the_same_accuracy(
    harness: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    demo = ("--config", "arithmetic", "--data.validation.init_args.num_rows", "24", "--data.eval_batch_size", "16")
    main(["tiny", *demo, "--samples", "0", "--output", "out", "--lm-eval", "task"])
    printed = re.search(r"lm_eval (--model .*)", capsys.readouterr().out.replace("\n", " "))
    assert printed is not None
    arguments = printed[1].split("  ")[0].split()[:8]
    arguments = [each.replace("POLICY", f"{NAMED['tiny'].folder},dtype=float32") for each in arguments]
    environment = {**os.environ, "HF_DATASETS_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    command = [harness, "-m", "lm_eval", *arguments, "--device", "cpu", "--batch_size", "8", "--output_path", "theirs"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    (written,) = (tmp_path / "theirs").rglob("results_*.json")
    theirs = json.loads(written.read_text())["results"]["arithmetic_validation"]["exact_match,none"]
    ours = json.loads((tmp_path / "out/evaluation.json").read_text())["policies"][0]["figures"]["greedy"]["accuracy"]
    assert theirs == pytest.approx(ours["value"])
