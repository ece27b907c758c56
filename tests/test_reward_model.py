"""The reward model, held against transformers' own forward of one text at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import random_policy, save_tokenizer
from test_reward_runner import make_group, rewards_of, values_of
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    Qwen3Config,
    Qwen3ForSequenceClassification,
)

from lit_grpo.rewards import RewardFunction, RewardModel, RewardRunner, RewardSpec
from lit_grpo.rewards.reward_model import _batches

TEMPLATE = "{% for message in messages %}{{ message['role'][0] }}={{ message['content'] }}+{% endfor %}"
SIZES = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXTS = ("1", "12+34=46", "7" * 40, "0" * 17, "1-2", "9+9=18", "8")


def save_classifier(folder: Path, kind: str, **changes: Any) -> str:
    """Save a random classifier with one label and weights large enough to tell texts apart."""
    kinds: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "decoder": (Qwen3Config, Qwen3ForSequenceClassification, {"num_key_value_heads": 2, "head_dim": 16}),
        "encoder": (BertConfig, BertForSequenceClassification, {}),
    }
    config_class, model_class, own = kinds[kind]
    settings = SIZES | own | {"pad_token_id": 0, "max_position_embeddings": 64, "num_labels": 1} | changes
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model_class(config_class(**settings, initializer_range=0.3)).save_pretrained(folder)
    return save_tokenizer(folder)


@pytest.fixture(params=["decoder", "decoder without padding", "encoder"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    kind = request.param.split()[0]
    yield save_classifier(tmp_path, kind, **({"pad_token_id": None} if "without" in request.param else {}))


def own_logits(folder: str, texts: list[str]) -> list[float]:
    """What transformers' own classes say of each text by itself."""
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        return [float(model(**tokenizer(text, return_tensors="pt")).logits[0, 0]) for text in texts]


@pytest.mark.parametrize("max_tokens", [1, 50, 10_000])
def test_values_are_the_logits_of_each_text_alone(folder: str, max_tokens: int) -> None:
    expected = own_logits(folder, ["2+2=" + text for text in TEXTS])
    assert max(expected) - min(expected) > 0.1
    model = RewardModel(folder, max_tokens_per_batch=max_tokens)
    assert model(["2+2="] * len(TEXTS), list(TEXTS)) == pytest.approx(expected, abs=1e-5)
    squashed = RewardModel(folder, sigmoid=True, max_tokens_per_batch=max_tokens)
    values = torch.tensor(expected, dtype=torch.float64).sigmoid().tolist()
    assert squashed(["2+2="] * len(TEXTS), list(TEXTS)) == pytest.approx(values, abs=1e-5)


def test_the_classifiers_own_template_makes_the_text(tmp_path: Path) -> None:
    folder = save_classifier(tmp_path, "decoder")
    save_tokenizer(tmp_path, chat_template=TEMPLATE)
    model, prompt = RewardModel(folder), [{"role": "user", "content": "2+2"}]
    said = [[{"role": "assistant", "content": text}] for text in ("4", "5 = 5")]
    expected = own_logits(folder, ["u=2+2+a=4+", "u=2+2+a=5 = 5+"])
    assert model([prompt] * 2, said) == pytest.approx(expected, abs=1e-5)
    assert model(["2+2"] * 2, ["4", "5 = 5"]) == pytest.approx(expected, abs=1e-5)


def test_a_conversation_needs_a_template(tmp_path: Path) -> None:
    model = RewardModel(save_classifier(tmp_path, "decoder"))
    with pytest.raises(ValueError, match=r"the prompt is a conversation, and model .* has no chat template"):
        model([[{"role": "user", "content": "2"}]], [[{"role": "assistant", "content": "2"}]])


def test_a_text_that_is_too_long_is_an_error_of_its_completion_alone(tmp_path: Path) -> None:
    folder = save_classifier(tmp_path, "decoder")
    runner = RewardRunner([RewardFunction.load(RewardSpec("reward_model", args={"model": folder}))], "none")
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    begun = len(tokenizer("What is it?")["input_ids"])
    group = make_group("1", "2" * (64 - begun), "2" * (65 - begun))  # of 64 tokens that the model reads
    runner.score(group)
    assert [value is None for value in values_of(group, "reward_model")] == [False, False, True]
    runner.close()
    raises = RewardRunner([RewardFunction.of(RewardModel(folder, max_length=begun + 9), "rm")])
    with pytest.raises(RuntimeError) as caught:
        raises.score(make_group("1", "2" * 10))
    raises.close()
    assert str(caught.value) == (
        "reward 'rm' (rm) failed on prompt 'train/17', sample 1: ValueError: prompt and completion have "
        f"{begun + 10} tokens, and reward model {folder!r} reads 1 to {begun + 9}; lower model.sampling.max_tokens, or "
        "leave out the row."
    )


def test_groups_that_are_scored_from_many_threads_have_the_same_values(tmp_path: Path) -> None:
    folder = save_classifier(tmp_path, "decoder", pad_token_id=None)
    model = RewardModel(folder, offload=True)
    expected = own_logits(folder, list(TEXTS))
    found: list[Any] = [None] * 8

    def score(number: int) -> None:
        found[number] = model([""] * len(TEXTS), list(TEXTS))

    threads = [threading.Thread(target=score, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(values == pytest.approx(expected, abs=1e-5) for values in found)


def test_a_run_scores_by_it(tmp_path: Path) -> None:
    folder = save_classifier(tmp_path, "decoder")
    model = RewardModel(folder)
    model.begin(torch.device("cpu"), tmp_path)
    assert not any(weight.requires_grad for weight in model._model.parameters())  # pyrefly: ignore[missing-attribute]
    runner, group = RewardRunner([RewardFunction.of(model, "rm")]), make_group("1", "22")
    runner.score(group)
    runner.close()
    expected = own_logits(folder, ["What is it?1", "What is it?22"])
    assert rewards_of(group) == pytest.approx(expected, abs=1e-5)


def test_what_is_no_reward_model_is_refused(tmp_path: Path) -> None:
    two = save_classifier(tmp_path / "two", "decoder", num_labels=2)
    with pytest.raises(ValueError, match="has 2 labels, and a reward model has one"):
        RewardModel(two)
    with pytest.raises(ValueError, match=r"model '/no/such' cannot be loaded \(.*\); give a folder or hub id of a"):
        RewardModel("/no/such")
    with pytest.raises(ValueError, match="device 'gpu' is none of torch's; write cpu, cuda or cuda:1"):
        RewardModel(two, device="gpu")
    random_policy(num_labels=1).save_pretrained(tmp_path / "policy")
    headless = RewardModel(save_tokenizer(tmp_path / "policy"))
    with pytest.raises(ValueError, match=r"lack 1 of the classifier's weights, such as score\.weight, which"):
        headless.begin(torch.device("cpu"), tmp_path)
    pickled = save_classifier(tmp_path / "pickled", "decoder")
    weights = AutoModelForSequenceClassification.from_pretrained(pickled).state_dict()
    (tmp_path / "pickled" / "model.safetensors").unlink()
    torch.save(weights, tmp_path / "pickled" / "pytorch_model.bin")
    with pytest.raises(ValueError, match="give a folder or hub id of a sequence classifier in safetensors"):
        RewardModel(pickled).begin(torch.device("cpu"), tmp_path)


def test_batches_lose_nothing_and_keep_to_their_tokens() -> None:
    assert list(_batches([0, 1, 2], [3, 5, 4], 8)) == [[0, 2], [1]]
    generator = torch.Generator().manual_seed(0)
    for max_tokens in (1, 30, 100):
        lengths = torch.randint(1, 40, (50,), generator=generator).tolist()
        batches = list(_batches(list(range(50)), lengths, max_tokens))
        assert sorted(place for batch in batches for place in batch) == list(range(50))
        for batch in batches:
            assert len(batch) == 1 or len(batch) * max(lengths[place] for place in batch) <= max_tokens
