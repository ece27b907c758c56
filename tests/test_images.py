"""Prompts with images: samples, log-probs and gradients beside the model's own forward, and what is never shared."""

from __future__ import annotations

import io
import itertools
import re
import struct
import zlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import table_rows
from PIL import Image
from seeing import FAMILIES, load, make_policy, observation, plain_logits, png, read
from test_slots import decode
from tokenizers import Tokenizer, decoders, models
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast

import lit_grpo
from lit_grpo.budgets.memory import checksum
from lit_grpo.data import PromptDataModule
from lit_grpo.data.chat import UnusableRow
from lit_grpo.data.examples import render_example
from lit_grpo.data.loaders import row_digests
from lit_grpo.data.overlap import shared_validation
from lit_grpo.data.rendering import PromptRenderer
from lit_grpo.data.sources import GivenRows
from lit_grpo.data.writing import PromptWriter
from lit_grpo.methods.swarm import Swarm
from lit_grpo.plugins import RunFacts, fresh
from lit_grpo.policy.adapters import LoraSettings, add_adapters
from lit_grpo.policy.architecture.vision import Vision, open_image, tower_parameters
from lit_grpo.policy.loading import load_policy, load_tokenizer, load_vision, mutual_of
from lit_grpo.policy.named import TINY_SHAPES
from lit_grpo.policy.spec import PolicySpec
from lit_grpo.policy.weights import lora_layers
from lit_grpo.process.values import find_foreign
from lit_grpo.rollout.buffer import RolloutBuffer
from lit_grpo.rollout.rules import SYNCHRONOUS
from lit_grpo.rollout.sampling import request_key, sample_tokens, uniform
from lit_grpo.rollout.slots.generator import SlotGenerator
from lit_grpo.tasks import ShapesRows
from lit_grpo.tools.finishing.source import RunPolicy
from lit_grpo.types import Completion, Pictures, Prompt, Request, Rollout, SamplingParams
from lit_grpo.update.batches.layout import in_order
from lit_grpo.update.batches.microbatch import least_tokens, make_micro_batches
from lit_grpo.update.logprobs.forward import micro_batch_logprobs
from lit_grpo.update.prefix.sharing import shared_prefixes

SAMPLING = SamplingParams(max_tokens=8)


def _header_of(width: int, height: int) -> bytes:
    """Return the beginning of a file whose header names these sizes, as a decompression bomb's does."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    return b"\x89PNG\r\n\x1a\n" + chunk + struct.pack(">I", 0) + b"IDAT" + struct.pack(">I", zlib.crc32(b"IDAT"))


@pytest.mark.parametrize("name", table_rows(FAMILIES, ["qwen3_vl"]))
def test_samples_log_probs_and_gradients_are_those_of_the_models_own_forward(name: str, tmp_path: Path) -> None:
    """Two images in one prompt, none in another, and two prompts of equal tokens with other pixels.

    Then each goes on after two observations, with two images, one image and none, where some differ in pixels alone.
    """
    model, tokenizer, vision = load(make_policy(name, tmp_path))
    prompts = [
        read(vision, tokenizer, name, "one # and # two", [png(32, 48, 0), png(64, 32, 1)]),
        read(vision, tokenizer, name, "plain", []),
        read(vision, tokenizer, name, "#?", [png(48, 48, 2)]),
        read(vision, tokenizer, name, "#?", [png(48, 48, 3)]),
    ]
    assert prompts[2].token_ids == prompts[3].token_ids and prompts[2].digest != prompts[3].digest
    generator = SlotGenerator(3, prefill_tokens=40)
    generator.start(PolicySpec(model, tokenizer))
    generator.load_weights(model.named_parameters(), 0)
    requests = [Request(prompt, (sample,), SAMPLING) for prompt in prompts for sample in range(2)]
    first = [*decode(generator, requests).values()]
    _check(model, vision, generator, first, tokens=3)
    observed = partial(observation, vision, tokenizer, name)
    ids, one = observed("see #.", [png(32, 32, 4)])
    _, other = observed("see #.", [png(32, 32, 5)])
    more_ids, more = observed("#or # ok:", [png(48, 32, 6), png(32, 64, 7)])
    none_ids, sampling = tokenizer("nothing.")["input_ids"], replace(SAMPLING, max_tokens=6, max_observed=350)
    later: list[Request] = []
    for each in first:
        after, sample = each.until(min(each.num_tokens, 2)), each.request.path[0]
        after = after.followed_by(ids, pictures=other if sample else one)
        later += [replace(each.request, sampling=sampling, prefix=after)]
        after = after.followed_by([65, 66], [-1.0, -1.0], 0).followed_by(more_ids, pictures=more)
        later += [replace(each.request, path=(sample, 1), sampling=sampling, prefix=after)]
        later += [replace(each.request, path=(sample, 2), sampling=sampling, prefix=after.followed_by(none_ids))]
    _check(model, vision, generator, [*decode(generator, later).values()], tokens=-2)


def _check(model: Any, vision: Any, generator: SlotGenerator, completions: Sequence[Completion], tokens: int) -> None:
    """Compare samples, those of completions that go on after so many of their ``tokens``, and gradients."""
    for each in completions:
        keys, begin = np.array([request_key(each.request)], dtype=np.uint64), _begin(each)
        uniform_T = torch.from_numpy(uniform(keys[:, None], np.arange(each.num_tokens))[0])
        with torch.no_grad():
            logits_TV = plain_logits(model, vision, each)
        tokens_T, logprobs_T, _ = sample_tokens(logits_TV[begin:], SAMPLING, uniform_T[begin:])
        assert torch.equal(tokens_T, each.token_ids_T[begin:])
        assert torch.allclose(logprobs_T, each.logprobs_T[begin:], atol=5e-5)
    again: list[Request] = []
    for each in completions:
        stop = tokens if tokens > 0 else each.num_tokens + tokens
        if _begin(each) < stop < each.num_tokens:
            again.append(replace(each.request, prefix=each.until(stop)))
    assert again
    resumed = decode(generator, again)
    for each in completions:
        if (other := resumed.get(each.request.key)) is not None:
            assert torch.equal(other.token_ids_T, each.token_ids_T)
    expected = _gradient(model, partial(_plain_loss, model, vision, completions))
    rollouts = [Rollout(each.request.prompt, each, {}, 0.0) for each in completions]
    for shared, most_tokens in ((True, 5000), (True, least_tokens(rollouts, True)), (False, 5000)):
        with shared_prefixes(model) if shared else nullcontext():
            actual = _gradient(model, partial(_backward, model, rollouts, shared, most_tokens))
        assert actual.keys() == expected.keys()
        gap = sum(float((actual[each] - expected[each]).square().sum()) for each in expected)
        assert gap**0.5 < 1e-4 * sum(float(each.square().sum()) for each in expected.values()) ** 0.5
    assert any("vis" in each for each in expected)


def test_a_policy_whose_tokens_see_one_another_in_another_way_is_refused() -> None:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    config = AutoConfig.for_model("paligemma", text_config={"vocab_size": 16, **sizes}, vision_config=sizes)
    with torch.device("meta"):
        model: Any = AutoModelForImageTextToText.from_config(config)
    with pytest.raises(
        ValueError, match=r"PaliGemma\w+ see others in both directions in a way that is not supported; "
    ):
        mutual_of(model)


def test_line_breaks_on_both_sides_of_an_image_are_the_tokens_of_a_whole_text() -> None:
    """Gemma 3 puts two before and after each image, and its tokenizer has a token for several."""
    tokens = Tokenizer(models.BPE({"a": 0, "\n": 1, "\n\n": 2, "\n\n\n\n": 3}, [("\n", "\n"), ("\n\n", "\n\n")]))
    tokens.decoder = decoders.Fuse()
    vision = Vision.__new__(Vision)
    vision._tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens)
    for before, after in itertools.product(["", "a", "a\n", "a\n\n", "\n\n\n"], ["", "a", "\na", "\n\n", "\n\n\na\n"]):
        parts = [tokens.encode(each).ids for each in (before, after)]
        assert vision._seamless(*parts) == tokens.encode(before + after).ids


def _begin(completion: Completion) -> int:
    """Return the place after all that was observed."""
    return completion.num_tokens - completion.segments[-1].num_tokens


@pytest.mark.parametrize("name", table_rows(FAMILIES, []))
@pytest.mark.parametrize("trained", [True, False], ids=["trained", "frozen"])
def test_gradients_of_adapters_are_those_of_the_models_own_forward(trained: bool, name: str, tmp_path: Path) -> None:
    """Adapters of all linear layers: of the tower where it is trained, and of the language model alone where not."""
    model, tokenizer, vision = load(make_policy(name, tmp_path), trained)
    add_adapters(model, LoraSettings(r=2))
    with torch.no_grad():
        for weight in [each for each in model.parameters() if each.requires_grad]:
            weight.normal_(0, 0.2, generator=torch.Generator().manual_seed(weight.numel()))
    model.double()  # in float32 rounding alone comes to 4e-4
    prompts = [read(vision, tokenizer, name, "#?", [png(48, 48, seed)]) for seed in (1, 2)]
    prompts.append(read(vision, tokenizer, name, "plain", []))
    generator = SlotGenerator(3)
    generator.start(PolicySpec(model, tokenizer))
    generator.load_weights(generator.weights(), 0)
    completions = [*decode(generator, [Request(prompt, (0,), SAMPLING) for prompt in prompts]).values()]
    expected = _gradient(model, partial(_plain_loss, model, vision, completions))
    rollouts = [Rollout(each.request.prompt, each, {}, 0.0) for each in completions]
    with shared_prefixes(model):
        actual = _gradient(model, partial(_backward, model, rollouts, True, 5000))
    assert actual.keys() == expected.keys() and all("lora_" in each for each in expected)
    assert any("vis" in each for each in expected) == trained
    gap = sum(float((actual[each] - expected[each]).square().sum()) for each in expected)
    assert gap**0.5 < 1e-4 * sum(float(each.square().sum()) for each in expected.values()) ** 0.5
    adapted = {name.rpartition(".lora_A")[0] for name in expected if ".lora_A" in name}
    tower = {id(weight) for weight in tower_parameters(model)}
    layers = {name for name, each in lora_layers(model) if id(each.get_base_layer().weight) in tower}
    layers = {name for name in layers if ".head." not in name}  # LFM2-VL does not read what its tower pools
    assert layers <= adapted
    linear = {
        name.removesuffix(".base_layer")
        for name, each in model.named_modules()
        if type(each) is torch.nn.Linear and ".lora_" not in name and id(each.weight) in tower and ".head." not in name
    }
    assert layers == (linear if trained else set()), linear - layers


def _plain_loss(model: Any, vision: Any, completions: Sequence[Completion]) -> None:
    for each in completions:
        logprobs_TV = plain_logits(model, vision, each).log_softmax(-1)
        logprobs_T = logprobs_TV.gather(-1, each.token_ids_T[:, None]).squeeze(-1)
        (logprobs_T * torch.sin(each.token_ids_T.float()))[each.trained_T].sum().backward()


def _backward(model: Any, rollouts: Sequence[Rollout], shared: bool, most_tokens: int) -> None:
    rows = make_micro_batches(rollouts, most_tokens, shared)
    assert not shared or (len(rows) > 1) == (most_tokens < 5000)
    for row in in_order(rows):
        filled = row.filled(rollouts)
        logprobs_N, _ = micro_batch_logprobs(model, filled, 1.0)
        (logprobs_N * torch.sin(filled.columns["target_id"].float())).sum().backward()


def _gradient(model: Any, run: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    run()
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


# ---- rows -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def renderer() -> tuple[PromptRenderer, Any]:
    tokenizer = load_tokenizer(TINY_SHAPES)
    return PromptRenderer(image_column="image", vision=load_vision(TINY_SHAPES, tokenizer)), tokenizer


PICTURE = png(48, 48, 0)
PART, QUESTION = {"type": "image"}, {"type": "text", "text": "How many circles?"}
IN_FILE = {"bytes": PICTURE, "path": None}
FORMS: dict[str, dict[str, Any]] = {
    "bytes": {"prompt": [{"role": "user", "content": [PART, QUESTION]}], "image": PICTURE},
    "a list": {"prompt": [{"role": "user", "content": [PART, QUESTION]}], "image": [PICTURE]},
    "of Pillow": {"prompt": [{"role": "user", "content": [PART, QUESTION]}], "image": open_image(PICTURE)},
    "of datasets": {
        "prompt": [{"role": "user", "content": [PART, QUESTION]}],
        "image": {"bytes": PICTURE, "path": None},
    },
    "in its part": {"prompt": [{"role": "user", "content": [{**PART, "image": PICTURE}, QUESTION]}]},
    "before a text": {"prompt": "How many circles?", "image": PICTURE},
    "before a message": {"prompt": [{"role": "user", "content": "How many circles?"}], "image": PICTURE},
}


@pytest.mark.parametrize("form", FORMS)
def test_a_row_gives_its_images_in_any_of_these_forms(form: str, renderer: tuple[PromptRenderer, Any]) -> None:
    rendered = renderer[0].render(FORMS[form], renderer[1])
    assert rendered.pictures is not None and renderer[0].vision.placeholder in rendered.token_ids
    assert rendered.text == "<image>How many circles?:"
    assert rendered.messages == [{"role": "user", "content": [PART, QUESTION]}]  # what reward functions get
    assert open_image(rendered.pictures.images[0]).tobytes() == open_image(PICTURE).tobytes()


def test_images_of_a_column_take_the_places_of_messages_in_order(renderer: tuple[PromptRenderer, Any]) -> None:
    content = [PART, QUESTION, {**PART, "bytes": png(48, 48, 2)}, PART]
    row = {"prompt": [{"role": "user", "content": content}], "image": [png(48, 48, 1), png(48, 48, 3)]}
    rendered = renderer[0].render(row, renderer[1])
    assert rendered.pictures is not None
    assert rendered.pictures.images == tuple(png(48, 48, seed) for seed in (1, 2, 3))


def asked(*content: Any, **columns: Any) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": [*content, QUESTION]}], **columns}


FAULTY = {
    "no image": (asked(PART), "has 0 images in column 'image', and places for 1 in its messages"),
    "too many": (asked(PART, image=[PICTURE] * 2), "has 2 images in column 'image', and places for 1"),
    "both": (asked({**PART, "image": PICTURE}, image=PICTURE), "images in its messages and others in column 'image'"),
    "a URL": (asked(PART, image="https://example.org/a.png"), "number 0 is the URL 'https://example.org/a.png'"),
    "a URL in a part": (asked({**PART, "url": "https://example.org/a.png"}), "names an image by its URL"),
    "no file": (asked(PART, image="nowhere.png"), "number 0, the file 'nowhere.png', cannot be read"),
    "a directory": (asked(PART, image="/"), "number 0, the file '/', cannot be read"),
    "torn": (asked(PART, image=PICTURE[:200]), "number 0 cannot be decoded"),
    "no picture": (asked(PART, image=b"%PDF-1.7"), "number 0 cannot be decoded"),
    "a number": (asked(PART, image=7), "number 0 is of type int and no image"),
    "nothing in a list": (asked(PART, image=[None]), "number 0 is of type NoneType and no image"),
    "too large": (asked(PART, image=_header_of(9_000, 9_000)), "it has 9000 x 9000 pixels"),
    "a placeholder in words": (
        asked(PART, {"type": "text", "text": "<image>"}, image=PICTURE),
        "do not fit its text",
    ),
    "video": (asked({"type": "video"}, image=PICTURE), "a part of type 'video'"),
}


@pytest.mark.parametrize("fault", table_rows(FAULTY, ["no image", "a URL", "torn", "too large"]))
def test_an_image_that_cannot_be_used_is_named(fault: str, renderer: tuple[PromptRenderer, Any]) -> None:
    row, sentence = FAULTY[fault]
    with pytest.raises(UnusableRow, match=re.escape(sentence)):
        renderer[0].render(row, renderer[1])


def test_a_part_with_an_image_is_refused_without_the_setting(renderer: tuple[PromptRenderer, Any]) -> None:
    with pytest.raises(UnusableRow, match=re.escape("set data.image_column, or take it out")):
        PromptRenderer().render(FORMS["bytes"], renderer[1])


NOT_SEEING: dict[str, tuple[dict[str, Any], str]] = {
    "texts alone": ({}, "has images, but model.vision is none"),
    "no tower": ({"vision": "frozen", "policy": "tiny"}, "which sees no images; take another"),
    "no column": ({"vision": "frozen", "image_column": None}, "no prompt of data.train has an image; name the column"),
    "divided": ({"vision": "frozen", "sequence_parallel_size": 2}, "sequence_parallel_size"),
}


@pytest.mark.parametrize("name", table_rows(NOT_SEEING, ["texts alone"]))
def test_what_cannot_see_images_is_told_before_the_first_rollout(name: str, tmp_path: Path) -> None:
    changes, sentence = NOT_SEEING[name]
    options: dict[str, Any] = {"policy": TINY_SHAPES, "max_steps": 1, "num_generations": 2} | changes
    data: dict[str, Any] = {"image_column": options.pop("image_column", "image"), "batch_size": 2}
    policy, rows = options.pop("policy"), [*ShapesRows(4).rows()]
    if data["image_column"] is None:
        rows = [row | {"prompt": "How many circles?"} for row in rows]
    with pytest.raises((ValueError, SystemExit), match=sentence):
        lit_grpo.train(policy, rows, ["exact_match"], dir=str(tmp_path), data=data, **options)


def test_an_example_and_a_hint_follow_the_prompts_images(renderer: tuple[PromptRenderer, Any]) -> None:
    row, (its, tokenizer) = FORMS["before a text"], renderer
    plain = its.render(row, tokenizer)
    example = render_example(its, tokenizer, row, "2", "all", "row 0")
    assert example.prompt_ids == plain.token_ids and example.learned_T.all()
    assert example.pictures is not None and plain.pictures is not None
    assert example.pictures.digest == plain.pictures.digest
    assert tokenizer.decode(example.answer_ids_T[:-1]) == "2"
    prompt = Prompt("train/0", plain.token_ids, plain.text, pictures=plain.pictures)
    begun = PromptWriter(its, tokenizer, {"train/0": row}).put_after(prompt, "12", 0.5)
    assert begun.token_ids == (*plain.token_ids, *tokenizer("1")["input_ids"]) and begun.given == "1"
    later = {"prompt": [*FORMS["bytes"]["prompt"], {"role": "assistant", "content": "1"}, *FORMS["bytes"]["prompt"]]}
    later = {"prompt": [*later["prompt"], {"role": "assistant", "content": "2"}], "image": [PICTURE] * 2}
    with pytest.raises(UnusableRow, match="its 2 images do not fit its text, which has 1 places"):
        render_example(its, tokenizer, later, None, "all", "row 0")


# ---- prompts of equal tokens ------------------------------------------------------------------------


def shown(prompt_id: str, digest: bytes) -> Prompt:
    return Prompt(prompt_id, (1, 2, 3), "", pictures=Pictures((), digest))


PLACES: dict[str, Callable[[Prompt], Any]] = {
    "held-out prompts": lambda other: shared_validation({"train": [shown("a", b"one")], "validation": [other]}),
    "rows of ranks": lambda other: row_digests([other]) == row_digests([shown("a", b"one")]),
    "replayed completions": lambda other: checksum(other) == checksum(shown("a", b"one")),
    "prompts of the update": lambda other: other.digest == shown("a", b"one").digest,
}


@pytest.mark.parametrize("place", PLACES)
def test_prompts_of_equal_tokens_and_other_pixels_are_not_one(place: str) -> None:
    assert PLACES[place](shown("a", b"one")) and not PLACES[place](shown("a", b"two"))


def test_a_group_of_a_checkpoint_has_its_images_again() -> None:
    prompt = shown("train/0", b"one")
    buffer = RolloutBuffer(SYNCHRONOUS)
    buffer.open([Request(prompt, (0,), SAMPLING)])
    state = buffer.state_dict()
    assert find_foreign(state) is None
    resumed = RolloutBuffer(SYNCHRONOUS)
    resumed.load_state_dict(state)
    resumed.give_columns([prompt])
    (group,) = resumed._groups.values()
    assert group.prompt.pictures is prompt.pictures


def test_a_photo_is_turned_as_its_camera_says() -> None:
    stream, image = io.BytesIO(), Image.new("RGB", (8, 4))
    exif = image.getexif()
    exif[0x0112] = 6  # a quarter turn
    image.save(stream, "JPEG", exif=exif)
    assert open_image(stream.getvalue()).size == (4, 8)


def test_a_column_that_no_row_has_is_named() -> None:
    rows = GivenRows([{"prompt": "How many circles?"}] * 2)
    data = PromptDataModule(TINY_SHAPES, train=rows, image_column="imag", batch_size=1)
    with pytest.raises(ValueError, match=r"no row of .* has an image in column 'imag' or in its messages"):
        data.setup("fit")


def test_runs_of_a_swarm_exchange_no_images() -> None:
    data: Any = SimpleNamespace(writer=None, prompts={"train": [shown("train/0", b"one")]})
    with pytest.raises(ValueError, match="exchanges texts alone"):
        fresh(Swarm(folder="exchange")).check(RunFacts(2, 4, 6, 1, data=data))


def test_a_vision_tower_has_no_gguf_file() -> None:
    policy = load_policy(TINY_SHAPES, vision=True)
    with pytest.raises(ValueError, match="idefics3"):
        RunPolicy(policy, load_tokenizer(TINY_SHAPES), 0).gguf_bytes("q8_0")
