"""The embedded policy of the harder task: what is shipped, and the script that has made it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_tiny import configs, weights

from benchmarks.make_tiny import TinyRecipe, exact_match, make_tokenizer, new_model
from lit_grpo.policy import load_policy
from lit_grpo.policy.named import NAMED, TINY_KNIGHTS
from scripts.make_knights import KNIGHTS, RECIPE, main

SHORT = TinyRecipe(
    hidden_size=32, intermediate_size=64, num_heads=2, num_kv_heads=1, num_steps=4, crowd_steps=2, batch_tokens=256
)


def test_the_script_makes_what_is_shipped_up_to_the_numbers_in_its_weights(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(KNIGHTS.alphabet)
    new_model(RECIPE, seed=0, tokenizer=tokenizer).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert configs(tmp_path) == configs(NAMED[TINY_KNIGHTS].folder)
    made, shipped = weights(tmp_path), weights(NAMED[TINY_KNIGHTS].folder)
    assert {name: weight.shape for name, weight in made.items()} == {
        name: weight.shape for name, weight in shipped.items()
    }


@pytest.mark.nightly
def test_what_is_shipped_solves_some_puzzles_and_has_room_to_learn() -> None:
    assert 0.1 < exact_match(NAMED[TINY_KNIGHTS].folder, 32, KNIGHTS) < 0.6


def test_the_script_warm_starts_a_policy_and_says_how_good_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scripts.make_knights.RECIPE", SHORT)
    measured: list[Any] = []
    monkeypatch.setattr("scripts.make_knights.exact_match", lambda *args, **rest: measured.append((args, rest)) or 0)
    main([str(tmp_path / "made")])
    assert "0.0% of the held-out puzzles are solved" in capsys.readouterr().out
    assert measured == [((tmp_path / "made",), {"task": KNIGHTS})]
    assert load_policy(str(tmp_path / "made")).config.hidden_size == 32
