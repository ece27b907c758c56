"""The embedded policy: made once, kept, reproducible, and loadable as any other."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from lit_grpo.policy.exercises import ALPHABET, Remainder, working
from lit_grpo.policy.tiny import EOS, TinyRecipe, default_cache_dir, make_tokenizer, tiny_policy, warm_start

SHORT = TinyRecipe(
    hidden_size=32, intermediate_size=64, num_heads=2, num_kv_heads=1, num_steps=6, crowd_steps=2, batch_tokens=256
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_policy(seed=7, cache_dir=tmp_path_factory.mktemp("cache"), recipe=SHORT)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_the_default_recipe_is_a_policy_of_about_a_million_parameters() -> None:
    from lit_grpo.policy.tiny import new_model

    model = new_model(TinyRecipe(), seed=0, tokenizer=make_tokenizer())
    assert 600_000 < sum(weight.numel() for weight in model.parameters()) < 1_300_000


def test_the_tokenizer_has_one_token_a_character_and_gives_the_text_back(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    exercise = Remainder(312, 47)
    text = exercise.prompt + working(exercise)
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text
    assert len({tokenizer.pad_token_id, tokenizer.eos_token_id, *tokenizer.encode(ALPHABET)}) == len(ALPHABET) + 2
    assert tokenizer.eos_token == EOS


def test_the_tokenizer_marks_what_it_does_not_know(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.encode("1 \n2") == [
        tokenizer.vocab["1"],
        tokenizer.unk_token_id,
        tokenizer.unk_token_id,
        tokenizer.vocab["2"],
    ]


def test_the_folder_loads_as_any_other_policy_and_names_its_end_token(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, use_safetensors=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.config.vocab_size == len(tokenizer)


def test_the_warm_start_learns() -> None:
    from lit_grpo.policy.tiny import new_model

    recipe = TinyRecipe(hidden_size=64, intermediate_size=128, num_heads=2, num_kv_heads=1, num_steps=40, crowd_steps=0)
    tokenizer = make_tokenizer()
    model = new_model(recipe, seed=0, tokenizer=tokenizer)
    exercise = Remainder(312, 29)
    ids_BT = torch.tensor([tokenizer.encode(exercise.prompt + working(exercise))])
    before = model(input_ids=ids_BT, labels=ids_BT).loss.item()
    warm_start(model, tokenizer, recipe, seed=0)
    assert model(input_ids=ids_BT, labels=ids_BT).loss.item() < 0.7 * before


def test_the_same_seed_gives_the_same_weights_bit_for_bit_and_another_seed_others(folder: Path, tmp_path: Path) -> None:
    again = weights(tiny_policy(seed=7, cache_dir=tmp_path, recipe=SHORT))
    other = weights(tiny_policy(seed=8, cache_dir=tmp_path, recipe=SHORT))
    first = weights(folder)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_making_it_leaves_the_global_random_state_and_the_threads_alone(tmp_path: Path) -> None:
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    tiny_policy(seed=1, cache_dir=tmp_path, recipe=SHORT)
    assert torch.equal(state, torch.get_rng_state())
    assert torch.get_num_threads() == threads


def test_it_can_be_made_where_no_gradients_are_taken(folder: Path, tmp_path: Path) -> None:
    with torch.inference_mode():
        made = tiny_policy(seed=7, cache_dir=tmp_path, recipe=SHORT)
    assert all(torch.equal(weights(made)[name], weight) for name, weight in weights(folder).items())


def test_it_is_made_once_and_then_read_from_the_cache(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = (folder / "model.safetensors").stat().st_mtime_ns
    assert tiny_policy(seed=7, cache_dir=folder.parent, recipe=SHORT) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == made
    assert capsys.readouterr().err == ""


def test_making_it_says_so_on_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_policy(seed=1, cache_dir=tmp_path, recipe=SHORT)
    written = capsys.readouterr()
    assert "warm-starting the embedded policy (once" in written.err
    assert written.out == ""


def test_nothing_but_the_policy_and_its_lock_stays_in_the_cache(folder: Path) -> None:
    assert {path.name for path in folder.parent.iterdir()} <= {folder.name, f"{folder.name}.lock"}


def test_a_cache_folder_that_cannot_be_written_is_named_with_its_remedy(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with pytest.raises(ValueError, match=f"{re.escape(str(blocked))}.*LIT_GRPO_CACHE"):
        tiny_policy(cache_dir=blocked / "cache", recipe=SHORT)


def test_the_environment_names_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LIT_GRPO_CACHE", str(tmp_path / "own"))
    assert default_cache_dir() == tmp_path / "own"
    monkeypatch.delenv("LIT_GRPO_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_cache_dir() == tmp_path / "xdg" / "lit_grpo"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / ".cache" / "lit_grpo"


@pytest.mark.integration
def test_two_processes_at_once_make_one_intact_folder(folder: Path, tmp_path: Path) -> None:
    code = (
        "from lit_grpo.policy.tiny import *; import sys; from pathlib import Path\n"
        f"print(tiny_policy(seed=7, cache_dir={str(tmp_path)!r}, recipe={SHORT!r}))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    both = [
        subprocess.Popen(
            [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert {out.strip() for out, _ in outputs} == {str(tmp_path / folder.name)}
    assert sum("warm-starting" in err for _, err in outputs) == 1
    assert weights(tmp_path / folder.name).keys() == weights(folder).keys()
