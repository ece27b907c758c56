"""A finished run: its folder, its card, the license of its base, and a hub that it is sent to."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import forks
import numpy as np
import pytest
import torch
import yaml
from conftest import save_policy, table_rows
from huggingface_hub import ModelCard, constants
from made_runs import make_run
from markdown_it import MarkdownIt
from matplotlib.figure import Figure
from safetensors.torch import load_file
from tokenizers import normalizers
from transformers import AutoModelForCausalLM

from lit_grpo.policy.loading import load_policy, load_tokenizer
from lit_grpo.process.terminal import markdown, one_line, visible
from lit_grpo.tools.dashboard.report.folder import read_folder
from lit_grpo.tools.finishing import command, record
from lit_grpo.tools.finishing.command import main
from lit_grpo.tools.finishing.origin import find_origin
from tests.doubles.draft_layers import add_tensors
from tests.doubles.hub_server import TOKEN, USER, Answer, HubServer, card_errors, hub_server

pytest.importorskip("gguf", reason="gguf is not installed (the extra smollm2)")
METRICS = ["reward", "val/pass@1", "frac_reward_zero_std", "advantages/max_abs", "num_tokens", "time/total_s"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run of 40 updates without checkpoints, of a policy whose license is not known."""
    save_policy(tmp_path / "base")
    folder = make_run(tmp_path / "runs" / "made", names=METRICS)
    shutil.copytree(tmp_path / "base", folder / "policy")
    told = yaml.safe_load((folder / "config.yaml").read_text())
    told["model"]["policy"] = str(tmp_path / "base")
    told["data"] = {
        "train": str(tmp_path / "rows.jsonl"),
        "validation": {"class_path": "Rows", "init_args": {"num_rows": 500}},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(told))
    return folder


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The card has no picture, as where matplotlib is not installed: to draw it is most of what finishing takes."""
    monkeypatch.setattr("lit_grpo.tools.finishing.picture.find_spec", lambda name: None)


def curve(folder: Path, **columns: list[float | None]) -> None:
    """Replace the metrics of a run."""
    rows = zip(*columns.values(), strict=True)
    lines = [",".join(["step", *(name.replace("__", "/").replace("_at_", "@") for name in columns)])]
    lines += [",".join([str(step), *("" if one is None else str(one) for one in row)]) for step, row in enumerate(rows)]
    (folder / "metrics.csv").write_text("\n".join(lines) + "\n")


def card_of(run: Path, *arguments: str) -> str:
    """The card of a run that is finished without GGUF files."""
    main([str(run), "--gguf", "none", *arguments])
    return (run / "finished" / "README.md").read_text()


def refused(*arguments: str | Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What the command says of a mistake."""
    with pytest.raises(SystemExit, match="2"):
        main([str(each) for each in arguments])
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1
    return said


def test_the_folder_is_the_policy_with_a_card(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(run), "--gguf", "f32", "q8_0"])
    said, folder = capsys.readouterr().out, run / "finished"
    assert said.startswith(f"The finished model is in {folder}.\n") and "made-q8_0.gguf: its log-probs differ" in said
    assert {path.name for path in folder.iterdir()} == {
        *("Modelfile", "README.md", "config.json", "curves.png", "generation_config.json"),
        *("made-f32.gguf", "made-q8_0.gguf"),
        *("model.safetensors", "tokenizer.json", "tokenizer_config.json"),
    }
    assert [path.name for path in run.iterdir() if path.name.startswith(".")] == []
    policy: Any = AutoModelForCausalLM.from_pretrained(folder)
    of_gguf = load_policy(str(folder / "made-f32.gguf"))
    for name, weight in load_policy(str(tmp_path / "base")).state_dict().items():
        assert torch.equal(weight, policy.state_dict()[name]) and torch.equal(weight, of_gguf.state_dict()[name])
    assert load_tokenizer(str(folder / "made-f32.gguf")).eos_token == "<eos>"
    for path in folder.iterdir():  # nothing tells of places on this machine
        assert str(tmp_path).encode() not in path.read_bytes(), path


def test_layers_that_draft_are_in_the_folder_and_not_in_gguf_files(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("mtp.fc.weight", "model.layers.2.input_layernorm.weight")
    heads = add_tensors(run / "policy", {name: torch.ones(3, 2) for name in names}, num_nextn_predict_layers=1)
    main([str(run), "--gguf", "f32"])
    sentence = (
        "2 tensors of multi-token prediction are the base's: they were not trained, so speculative decoding accepts "
        "fewer of their drafts than before; the GGUF files are without them."
    )
    assert f"  {sentence}\n" in capsys.readouterr().out
    assert f"- {sentence}" in (run / "finished" / "README.md").read_text()
    assert heads.keys() <= load_file(run / "finished" / "model.safetensors").keys()
    of_gguf = load_policy(str(run / "finished" / "made-f32.gguf"))
    assert of_gguf.config.num_hidden_layers == 2
    for name, weight in load_policy(str(tmp_path / "base")).state_dict().items():
        assert torch.equal(weight, of_gguf.state_dict()[name])


def test_the_card_is_one_of_the_hubs(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = card_of(run, "--name", "My model", "--license", "apache-2.0")
    card = ModelCard(text)
    assert card.data.to_dict() == {
        **{"license": "apache-2.0", "library_name": "transformers", "pipeline_tag": "text-generation"},
        "tags": ["lit_grpo", "grpo", "reinforcement-learning"],
    }
    assert card_errors(text) == [] and card.text.startswith("\n# My model\n")
    assert "Pass@1 on held-out prompts was" in text and "![Curves of the run](curves.png)" in text
    assert "The license is apache-2.0 (as given with --license)." in text
    assert "| Training prompts | rows.jsonl |" in text and "| Reward right | exact_match, weight 1 |" in text
    assert "gguf" not in text


def test_a_card_shows_hostile_samples_and_does_not_obey_them(run: Path) -> None:
    rows = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    for row in rows:
        row["completion"] = "```\n# Not a heading\n````\n<script>alert(1)</script>\x1b[2J"
    (run / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = ModelCard(card_of(run)).text
    blocks = re.findall(r"^(`{3,})text\n(.*?)\n\1$", text, re.DOTALL | re.MULTILINE)
    assert any("# Not a heading" in block for _, block in blocks)
    outside = re.sub(r"^(`{3,})\w+\n.*?\n\1$", "", text, flags=re.DOTALL | re.MULTILINE)
    assert "Not a heading" not in outside and "<script" not in outside and "\x1b" not in text


HOSTILE = [
    *("<img src=x onerror=alert(1)>", "[x](javascript:y)", "`a` *b* _c_ | $d$ & #", "x;touch PWNED", r"a$\frac$b"),
    *("\x1b[2J\x07a", "\u202eabc\u2066", "a\n# b\n\n<img src=x>", "```\n# c", "$(touch PWNED)", "https://a.b @owner"),
]


@pytest.mark.parametrize("text", table_rows(HOSTILE, [HOSTILE[0], HOSTILE[2], HOSTILE[5]]))
def test_a_card_shows_texts_of_others_as_they_stand(
    text: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "base").rename(base := tmp_path / text.replace("/", ""))
    (base / "README.md").write_text(
        yaml.safe_dump({"license": "other", "license_name": text}, explicit_start=True) + "---\n"
    )
    told = yaml.safe_load((run / "config.yaml").read_text())
    told["model"] |= {"policy": str(base), "dtype": text, "rewards": [{"function": text, "name": text}]}
    (run / "config.yaml").write_text(yaml.safe_dump(told))
    text_of_card = ModelCard(card_of(run)).text
    page = MarkdownIt("gfm-like", {"html": True, "linkify": False}).render(text_of_card)
    shown = html.unescape(re.sub(r"<[^>]*>", "", page))
    assert shown.count(one_line(text)) >= 3, shown  # the dtype, the reward's name and function, the license
    assert visible(text_of_card) == text_of_card
    assert re.findall(r"<(?:img src=x|a|em)\b", page.replace('<img src="curves.png"', "")) == []


def test_a_folders_name_that_is_no_models_name_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run.rename(odd := run.with_name("x;touch y"))
    said = refused(odd, capsys=capsys)
    assert "The model's name would be 'x;touch y'; give one of letters" in said and not (odd / "finished").exists()
    main([str(odd), "--gguf", "f32", "--name", "My model"])
    assert "llama-completion -m My-model-f32.gguf -no-cnv" in (odd / "finished" / "README.md").read_text()


@pytest.mark.parametrize(
    ("template", "offered"),
    table_rows(
        [
            (None, "llama-completion -m made-f32.gguf -no-cnv"),
            ("{{ messages[0].content }}", "llama-cli -m made-f32.gguf\n"),
            ({"default": "{{ messages[0].content }}", "rag": "a"}, "llama-cli -m made-f32.gguf\n"),
            ({"rag": "{{ messages[0].content }}"}, "llama-completion -m made-f32.gguf -no-cnv"),
        ],
        [({"rag": "{{ messages[0].content }}"}, "llama-completion -m made-f32.gguf -no-cnv")],
    ),
)
def test_a_card_offers_a_conversation_if_the_file_has_a_template_for_it(
    template: Any, offered: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = load_tokenizer(str(run / "policy"))
    tokenizer.chat_template = template
    tokenizer.save_pretrained(run / "policy")
    main([str(run), "--gguf", "f32"])
    card, said = (run / "finished" / "README.md").read_text(), capsys.readouterr().out
    (given,) = re.findall("llama-.*\n", card)
    assert given.startswith(offered)
    if template == {"rag": "{{ messages[0].content }}"}:
        sentence = "None of the chat templates (rag) is named default, so readers of the file render no conversation"
        assert f"\n  {sentence}" in said and f"\n- GGUF: {markdown(sentence)}" in card


def test_a_tokenizer_that_readers_would_not_follow_is_refused_before_anything_is_written(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer: Any = load_tokenizer(str(run / "policy"))
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.save_pretrained(run / "policy")
    said = refused(run, "--gguf", "f32", capsys=capsys)
    assert "normalizer Lowercase) is not written as GGUF; leave GGUF out with --gguf none" in said
    assert "makes llama.cpp expect" in refused(run, "--gguf", "f32", "--name", "My Phi-3", capsys=capsys)
    assert not (run / "finished").exists()


def test_files_can_be_read_by_those_who_can_read_the_folder(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(run)])
    for path in (run / "finished").iterdir():
        assert path.stat().st_mode & 0o777 == (run / "finished").stat().st_mode & 0o666, path


def test_a_picture_that_cannot_be_drawn_is_left_out(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("a font is missing")

    monkeypatch.setattr(Figure, "savefig", fail)
    with pytest.warns(UserWarning, match=r"curves\.png could not be made \(.*\); the run's metrics\.csv has"):
        assert "curves.png" not in card_of(run)
    assert not (run / "finished" / "curves.png").exists()


def test_rewards_that_are_too_large_to_be_computed_with_are_left_out_and_told(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    curve(run, reward=[0.0, 1e308, -1e308, 1e308, -1e308])
    main([str(run), "--gguf", "none"])
    said = capsys.readouterr().out
    assert (
        f"Line 3 of {run / 'metrics.csv'} is not read as a whole: reward is 1e+308. Neither are 3 more lines." in said
    )
    assert (run / "finished" / "curves.png").exists()


def test_samples_are_of_the_first_update_and_the_last(run: Path) -> None:
    found = record.sampled(read_folder(run), 40)
    assert [step for step, _ in found] == [1, 39]
    assert [[row.get("reward") for row in rows] for _, rows in found] == [[1.0, 0.25], [1.0, 0.25]]
    assert [step for step, _ in record.sampled(read_folder(run), 20)] == [1, 19]  # an earlier policy


def validate(run: Path, *steps: int) -> None:
    """Let a run have completions of validations, whose rewards rise with the number of the prompt."""
    rows = [
        {"step": step, "prompt_id": f"validation/{number}", "prompt": f"{number}?", "tokens": 3, "finish": "stop"}
        | {"completion": f"written at {step} to {number}", "reward": float(number)}
        for step in steps
        for number in range(4)
    ]
    (run / "val_samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_card_shows_what_was_written_in_the_last_validation(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    validate(run, 0, 20, 40, 60)
    found = record.validated(read_folder(run), 40)
    assert [(step, [row.get("prompt_id") for row in rows]) for step, rows in found] == [
        (0, ["validation/3", "validation/0"]),
        (40, ["validation/3", "validation/0"]),
    ]
    text = card_of(run)
    samples = text.split("## Samples")[1].split("## Files")[0]
    assert "written at 0 to 3" in samples and "written at 40 to 0" in samples and "It is" not in samples
    assert "held-out prompts" in samples and "last validation" in samples
    validate(run, 30)
    assert [step for step, _ in record.validated(read_folder(run), 40)] == [30]
    assert record.validated(read_folder(run), 20) == []  # an earlier policy


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    ("passed", "rises", "said"),
    [
        (
            [0.5, None, None, 0.8],
            True,
            "Pass@1 on held-out prompts was 50.0% (95% interval 45.6 to 54.4) at update 0 and 80.0% (95% interval 76.3 "
            "to 83.3) at update 3.",
        ),
        ([0.5, None, 0.8, 0.4], False, "**The run has learned nothing that this metric shows:** pass@1 on held-out"),
        ([0.5, None, None, 0.5], False, "**The run has learned nothing"),
        ([0.5, None, None, 0.53], False, "**The run may have learned nothing:** pass@1 on held-out prompts was 50.0%"),
    ],
)
def test_a_run_that_learned_nothing_is_said_to(
    passed: list[float | None], rises: bool, said: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    curve(run, reward=[0.2, 0.21, 0.2, 0.21], val__pass_at_1=passed)
    found = record.progress(read_folder(run), 3)
    assert found is not None and found.has_improved == rises and str(found).startswith(said)
    assert said in card_of(run)
    assert ("learned nothing" in capsys.readouterr().out) != rises


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    ("model", "data", "said"),
    [
        (
            {"eval_sampling": {"temperature": 0.0}},
            {"init_args": {"num_rows": 500}},
            "Measured on: 500 held-out rows, 1 completion each, decoded greedily. Intervals are Wilson's, over rows.",
        ),
        (
            {"sampling": {"temperature": 0.7}, "eval_num_generations": 4},
            {"init_args": {"num_rows": 500}},
            "Measured on: 500 held-out rows, 4 completions each, decoded at temperature 0.7.\n",
        ),
        (
            {},
            "somewhere",
            "held-out prompts, whose number the run's config does not say, 1 completion each, decoded at a",
        ),
    ],
)
def test_the_card_says_rows_decoding_and_interval_of_its_figure(
    model: dict[str, Any], data: Any, said: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = yaml.safe_load((run / "config.yaml").read_text())
    told["model"] |= model
    told["data"]["validation"] = data
    (run / "config.yaml").write_text(yaml.safe_dump(told))
    assert said in card_of(run)


def test_without_held_out_prompts_the_rewards_of_batches_count(run: Path) -> None:
    up = [0.1 + 0.02 * step + 0.01 * (-1) ** step for step in range(40)]
    flat = [0.5 + 0.1 * (-1) ** step + 0.0001 * step for step in range(40)]
    for rewards, rises in ((up, True), (flat, False), (up[::-1], False)):
        curve(run, reward=rewards)
        found = record.progress(read_folder(run), 39)
        assert found is not None and found.metric == "mean reward of training batches" and found.has_improved == rises
    curve(run, reward=up[:3])
    assert record.progress(read_folder(run), 3) is None
    curve(run, ce__loss=[2.0, 1.0, 0.5], val__sft__loss=[2.1, None, 0.9])
    found = record.progress(read_folder(run), 2)
    assert found is not None and found.has_improved and found.falls and found.metric == "loss of held-out examples"


def test_noise_is_seldom_taken_for_learning(run: Path) -> None:
    """Held-out pass@1 of 500 rows that stays at 50%, in 400 runs."""
    records, drawn, taken = read_folder(run), np.random.default_rng(0), 0
    for before, after in drawn.binomial(500, 0.5, (400, 2)) / 500:
        columns = {"reward": np.full(4, 0.5), "val/pass@1": np.array([before, np.nan, np.nan, after])}
        found = record.progress(replace(records, steps=np.arange(4), columns=columns), 3)
        taken += found is not None and found.has_improved
    assert taken <= 20  # 2.3% of them are above two standard errors


# ---- licenses -----------------------------------------------------------------------------------------


def test_a_license_that_is_not_known_is_said_to_be_so(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = card_of(run)
    assert ModelCard(text).data.get("license") == "unknown" and card_errors(text) == []
    assert "**The license of the base model is not known**" in text
    assert "The card says that the license of the base is not known" in capsys.readouterr().out


def test_the_license_is_found_where_the_base_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_origin("tiny").license == {"license": "mit"}
    smollm2 = find_origin("smollm2")
    assert (smollm2.hub_id, smollm2.license) == ("HuggingFaceTB/SmolLM2-135M-Instruct", {"license": "apache-2.0"})
    base = tmp_path / "base"
    base.mkdir()
    assert find_origin(str(base)).license == {}
    (base / "README.md").write_text("---\nlicense: other\nlicense_name: own\nbase_model: a/b\n---\n")
    found = find_origin(str(base))
    assert (found.name, found.hub_id, found.license) == ("base", "a/b", {"license": "other", "license_name": "own"})
    (base / "README.md").write_text("---\nlicense: [: broken\n---\n")
    assert find_origin(str(base)).license == {}


def test_the_license_of_a_policy_of_an_earlier_run_is_that_of_its_base(run: Path) -> None:
    (run.parents[1] / "base" / "README.md").write_text("---\nlicense: mit\n---\n")
    assert find_origin(str(run / "policy")).license == {"license": "mit"}
    (run / "config.yaml").write_text(yaml.safe_dump({"model": {"policy": str(run / "policy")}}))  # a circle
    assert find_origin(str(run / "policy")).license == {}


def test_a_gguf_file_tells_its_license(run: Path) -> None:
    from lit_grpo.tools.finishing.gguf_writer import write_gguf

    write_gguf(run / "policy", run / "a.gguf", "f32", "a", "mit")
    assert find_origin(str(run / "a.gguf")).license == {"license": "mit"}


def test_texts_of_the_license_are_passed_on(run: Path) -> None:
    base = run.parents[1] / "base"
    (base / "README.md").write_text("---\nlicense: mit\n---\n")
    (base / "LICENSE.txt").write_text("MIT")
    (base / "secret.txt").write_text("no")
    main([str(run), "--gguf", "none"])
    assert (run / "finished" / "LICENSE.txt").read_text() == "MIT" and not (run / "finished" / "secret.txt").exists()


# ---- mistakes -----------------------------------------------------------------------------------------


def test_each_mistake_is_a_sentence_and_nothing_is_written(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(run.rglob("*"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no_token"))
    for arguments, said in (
        (["nowhere"], "There is no run folder 'nowhere'"),
        ([run, "--checkpoint", "best"], "has no checkpoint"),
        ([run, "--gguf", "q9"], "invalid choice: 'q9'"),
        ([run, "--gguf", "none", "f32"], "--gguf has none and other kinds"),
        ([run, "--name", "../a"], "The model's name would be '../a'; give one of letters"),
        ([run, "--public"], "--public is about a repository that --push creates"),
        ([run, "--push", "a/b"], "The license of the base model base is not known, so"),
        ([run, "--push", "a/b/c", "--license", "mit"], "--push is 'a/b/c', which names no repository"),
        ([run, "--push", "alone", "--license", "mit"], "--push is 'alone', which names no owner; give OWNER/alone"),
        ([run, "--push", "a/b", "--license", "mit"], "--push needs your token, and there is none; log in with"),
        ([run, "--output", tmp_path / "base"], "exists already; remove it, or choose another --output"),
    ):
        assert said in refused(*arguments, capsys=capsys)
    monkeypatch.setattr(command.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 10**6))
    assert re.search(r"needs 0\.07 GB, and the disk has 0\.00 GB left; make room", refused(run, capsys=capsys))
    assert sorted(run.rglob("*")) == before


def test_a_family_that_gguf_has_no_writer_for_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(run / "policy")
    save_policy(run / "policy", hybrid=True)
    said = refused(run, capsys=capsys)
    assert "The policy is of the family qwen3_5_text, which is not written as GGUF" in said
    assert not (run / "finished").exists()
    main([str(run), "--gguf", "none"])
    assert (run / "finished" / "model.safetensors").exists()


def test_what_breaks_off_leaves_no_folder(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lit_grpo.tools.finishing.gguf_writer.gguf.GGUFWriter.write_tensor_data", full)
    assert "could not be written (No space left on device), and nothing is left of it" in refused(run, capsys=capsys)
    assert not any("finished" in path.name for path in run.iterdir())


@pytest.mark.parametrize("number", table_rows([signal.SIGTERM, signal.SIGHUP, signal.SIGKILL], [signal.SIGTERM]))
def test_what_is_stopped_leaves_no_folder(number: signal.Signals, run: Path) -> None:
    """After a kill that cannot be caught the next call removes what is left, and makes the folder."""
    stops = (
        "import os, sys\n"
        "from lit_grpo.tools.finishing import command, gguf_writer\n"
        f"gguf_writer.gguf.GGUFWriter.write_tensor_data = lambda *_: os.kill(os.getpid(), {int(number)})\n"
        "command.main(sys.argv[1:])\n"
    )
    code = forks.run([sys.executable, "-c", stops, str(run)], timeout=120).returncode
    left = [path for path in run.iterdir() if "finished" in path.name]
    if number == signal.SIGKILL:
        assert code == -number and len(left) == 1
        main([str(run), "--gguf", "none"])
        left = [path for path in run.iterdir() if path.name.startswith(".")]
        assert (run / "finished" / "README.md").exists()
    else:
        assert code == 128 + number
    assert left == []


def test_a_file_that_is_not_the_policy_is_refused(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "lit_grpo.tools.finishing.gguf_writer.gguf.quantize", lambda weight, kind: np.flip(weight).copy()
    )
    said = refused(run, "--gguf", "f32", capsys=capsys)
    assert "The GGUF file made-f32.gguf was opened again, and its log-probs differ from the policy's by" in said
    assert not (run / "finished").exists()


# ---- the hub ------------------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, undrawn: None) -> Iterator[HubServer]:
    """A hub on loopback, the user's token, and no Xet."""
    from huggingface_hub.utils import close_session

    with hub_server() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield server
    close_session()


PUSH = ("--push", f"{USER}/a-model", "--license", "mit")


def test_the_finished_folder_and_nothing_else_is_sent(
    run: Path, hub: HubServer, capsys: pytest.CaptureFixture[str]
) -> None:
    main([str(run), *PUSH])
    name, folder = f"{USER}/a-model", run / "finished"
    assert hub.repositories == {name: {path.name: path.read_bytes() for path in folder.iterdir()}}
    assert f'AutoModelForCausalLM.from_pretrained("{name}")'.encode() in hub.repositories[name]["README.md"]
    assert hub.private == {name: True} and hub.tokens <= {TOKEN, None}
    assert capsys.readouterr().out.endswith(f"{hub.url}/{name}\n")
    shutil.rmtree(folder)
    main([str(run), *PUSH, "--public"])  # a repository that is there stays as it is
    assert hub.private == {name: True}
    main([str(run), "--push", f"{USER}/other", "--license", "mit", "--public", "--output", str(run / "again")])
    assert hub.private[f"{USER}/other"] is False


def test_without_push_nobody_is_asked(run: Path, hub: HubServer) -> None:
    main([str(run)])
    assert hub.seen == []


def test_a_token_that_the_hub_does_not_know_is_named_before_anything_is_written(
    run: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_of_another")
    said = refused(run, *PUSH, capsys=capsys)
    assert f"The hub {hub.url} did not accept your token (" in said and "hf_of_another" not in said
    assert not (run / "finished").exists() and hub.repositories == {}


@pytest.mark.parametrize(
    "answer",
    [
        Answer(500, b"oops"),
        Answer(200, b"<html>captive portal</html>"),
        Answer(200, b'["no object"]'),
        Answer(200, b"{}"),
        Answer(200, b'{"name": \x00}'),
        Answer(hangs_up=True),
    ],
)
def test_hostile_answers_to_the_token_are_a_sentence(
    answer: Answer, run: Path, hub: HubServer, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.faults["/api/whoami-v2"] = answer
    assert f"The hub {hub.url} did not accept your token (" in refused(run, *PUSH, capsys=capsys)
    assert not (run / "finished").exists()


HOSTILE_ANSWERS = [
    ("/api/validate-yaml", Answer(400, b'"license" must be one of [a]'), "did not accept the model card ("),
    ("/api/validate-yaml", Answer(hangs_up=True), "did not accept the model card ("),
    ("/api/repos/create", Answer(403, b'{"error": "\x1b[2Jforbidden"}'), "(403 Forbidden"),
    ("/api/repos/create", Answer(200, b"[]"), "could not be created on"),
    ("/api/models", Answer(404, b"nothing"), "could not be sent to"),
    ("/api/models", Answer(200, b'{"files": 3}'), "could not be sent to"),
]


@pytest.mark.parametrize(
    ("path", "answer", "said"), table_rows(HOSTILE_ANSWERS, HOSTILE_ANSWERS[1:4] + HOSTILE_ANSWERS[5:])
)
def test_hostile_answers_to_the_folder_are_a_sentence(
    path: str, answer: Answer, said: str, run: Path, hub: HubServer, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.faults[path] = answer
    told = refused(run, *PUSH, "--gguf", "none", capsys=capsys)
    assert said in told and f"hf upload {USER}/a-model {run / 'finished'} sends it too" in told and "\x1b" not in told
    assert (run / "finished" / "README.md").exists()


def test_a_refusal_is_told_whatever_the_hub_answers_next(
    run: Path, hub: HubServer, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.faults |= {"/api/repos/create": Answer(403, b"{}"), "/api/models": Answer(200, b"{}")}
    assert "could not be created on" in (told := refused(run, *PUSH, "--gguf", "none", capsys=capsys))
    assert "(403 Forbidden" in told and "KeyError" not in told


def test_a_dead_hub_is_a_sentence_at_once(
    run: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "The hub http://127.0.0.1:9 does not answer" in refused(run, *PUSH, capsys=capsys)
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr("lit_grpo.tools.finishing.push.PATIENCE_S", 0.2)
    hub.faults["/api/whoami-v2"] = Answer(delay_s=1.0)
    assert "did not accept your token (" in refused(run, *PUSH, capsys=capsys)
    assert not (run / "finished").exists()


# ---- checkpoints --------------------------------------------------------------------------------------


def odd(completion: str) -> float:
    return len(completion) + sum(map(int, filter(str.isdigit, completion))) % 7


def test_a_lora_run_is_finished_from_its_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The adapter is merged into the policy, and is also there alone, for its base by name."""
    import peft

    import lit_grpo
    from lit_grpo.tasks import ArithmeticRows

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    made = lit_grpo.train(
        "tiny",
        ArithmeticRows(64, "train"),
        odd,
        max_steps=2,
        batch_size=2,
        validation=ArithmeticRows(8, "validation"),
        name="lora",
        lora={"r": 2},
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        num_generations=4,
        sampling={"max_tokens": 24},
        eval_sampling={"max_tokens": 24, "temperature": 0.0},
        trainer={"accelerator": "cpu", "val_check_interval": 1, "enable_progress_bar": False},
        callbacks={"checkpoint": {"every_n_updates": 1}},
    )
    run = Path("runs/lora")
    (run / "policy").rename(tmp_path / "policy")  # what is finished is the checkpoint
    main([str(run), "--gguf", "f32"])
    ids = torch.arange(3, 13)[None]
    with torch.no_grad():
        trained: Any = made.module.policy.eval()(ids).logits
        base: Any = load_policy("tiny").eval()
        assert (base(ids).logits - trained).abs().max() > 1e-4
        for folder in (run / "finished", run / "finished" / "lora-f32.gguf"):
            torch.testing.assert_close(load_policy(str(folder)).eval()(ids).logits, trained, rtol=0, atol=1e-4)
        adapter = run / "finished" / "adapter"
        told = json.loads((adapter / "adapter_config.json").read_text())
        assert told["base_model_name_or_path"] == "tiny"
        alone: Any = peft.PeftModel.from_pretrained(base, str(adapter))
        torch.testing.assert_close(alone(ids).logits, trained, rtol=0, atol=1e-4)
    assert (adapter / "lora-adapter.gguf").stat().st_size > (adapter / "adapter_model.safetensors").stat().st_size / 2
    asked = '\nTEMPLATE """{{ .Prompt }}"""\nPARAMETER stop "<eos>"\n'
    assert (run / "finished" / "Modelfile").read_text() == f"FROM ./lora-f32.gguf{asked}"
    assert (adapter / "Modelfile").read_text().endswith(f"\nFROM ./tiny.gguf\nADAPTER ./lora-adapter.gguf{asked}")
    card = (run / "finished" / "README.md").read_text()
    assert (
        "`tiny` trained with LoRA, merged into the base's weights here, by GRPO" in card and str(tmp_path) not in card
    )
    assert "for 2 updates" in card and "| `adapter/` | the LoRA adapter alone, for peft and llama.cpp |" in card
    main([str(run), "--gguf", "none", "--checkpoint", "best", "--output", "best"])
    card = Path("best/README.md").read_text()
    assert "The checkpoint was chosen by this held-out score, so the score is optimistic." in card


@pytest.mark.nightly
def test_the_command_finds_hub_and_token_in_the_environment(run: Path, hub: HubServer) -> None:
    places = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"} | places
    command = [sys.executable, "-m", "lit_grpo", "finish", str(run), *PUSH, "--gguf", "none"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"{hub.url}/{USER}/a-model\n") and TOKEN not in done.stdout + done.stderr
    assert set(hub.repositories[f"{USER}/a-model"]) == {path.name for path in (run / "finished").iterdir()}
