"""What vLLM is told of images, without an engine: what it would see otherwise is refused before one starts."""

from __future__ import annotations

import base64
import io
import json
import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from seeing import png
from test_images import shown as prompt_of

from lit_grpo.policy.adapters import LoraSettings, add_adapters
from lit_grpo.policy.architecture.decoder import NEVER, logit_map
from lit_grpo.policy.architecture.vision import give_vision, open_image, vision_of
from lit_grpo.policy.loading import load_policy, load_tokenizer, load_vision
from lit_grpo.policy.named import TINY_SHAPES
from lit_grpo.policy.spec import PolicySpec
from lit_grpo.rollout.proof import given_logprobs
from lit_grpo.rollout.vllm import VLLMGenerator
from lit_grpo.rollout.vllm.arguments import adapter_arguments, check_packages, sampling_fields
from lit_grpo.rollout.vllm.images import Shown, check_sees, shown
from lit_grpo.rollout.vllm.worker.extension import WorkerExtension
from lit_grpo.types import Prompt, Request, SamplingParams


@pytest.fixture(scope="module")
def spec() -> PolicySpec:
    tokenizer, policy = load_tokenizer(TINY_SHAPES), load_policy(TINY_SHAPES, vision=True)
    give_vision(policy, load_vision(TINY_SHAPES, tokenizer), trained=True)
    return PolicySpec(policy, tokenizer)


def test_an_image_is_named_by_its_pixels_and_the_weights_that_see_it() -> None:
    """What vLLM keeps by that name, processed pixels and the tower's features, never serves another image or tower."""

    def named(digest: bytes, salt: str) -> list[str]:
        prompt = prompt_of("a", digest)
        pictures = SimpleNamespace(images=(png(8, 8, 0), png(8, 8, 1)), digest=digest, marked_ids=(19, 19, 8))
        prompt = Prompt(prompt.prompt_id, prompt.token_ids, "<image><image>:", pictures=pictures)  # pyrefly: ignore
        stream: Any = SimpleNamespace(request=SimpleNamespace(prompt=prompt), salt=salt, token_ids=[5, 6])
        found = shown(stream)
        assert found is not None and found.token_ids == [19, 19, 8, 5, 6]  # one mark for each image
        return found.names

    names = [*named(b"one", "x"), *named(b"two", "x"), *named(b"one", "y")]
    assert len(set(names)) == 6 and named(b"one", "x") == names[:2]


def photo() -> bytes:
    """A JPEG that its camera has turned."""
    stream, image = io.BytesIO(), Image.effect_noise((16, 8), 90).convert("RGB")
    exif = image.getexif()
    exif[0x0112] = 6
    image.save(stream, "JPEG", exif=exif)
    return stream.getvalue()


def see_through() -> bytes:
    stream = io.BytesIO()
    Image.new("RGBA", (8, 8), (200, 10, 10, 30)).save(stream, "PNG")
    return stream.getvalue()


@pytest.mark.parametrize("image", [photo(), see_through(), png(8, 8, 0)], ids=["turned", "see-through", "plain"])
def test_a_server_gets_the_pixels_that_the_policy_is_trained_with(image: bytes) -> None:
    fields = Shown([19, 8], (image,), ["name"]).in_request()
    (part,) = fields["content_parts"]
    sent = Image.open(io.BytesIO(base64.b64decode(part["url"].removeprefix("data:image/png;base64,"))))
    assert (sent.mode, sent.format, not sent.getexif()) == ("RGB", "PNG", True)
    assert sent.tobytes() == open_image(image).tobytes()


def test_placeholders_are_never_sampled(spec: PolicySpec) -> None:
    request = Request(Prompt("a", (2, 3), ""), (0,), SamplingParams(max_tokens=4))
    plain = sampling_fields(request, 0, [1], True)
    assert "logit_bias" not in plain
    fields = sampling_fields(request, 0, [1], True, logit_map(spec.module).never)
    assert fields == plain | {"logit_bias": {19: NEVER}}


def test_given_tokens_are_scored_under_all_of_the_vocabulary_as_engines_do(spec: PolicySpec) -> None:
    given = [[8, 19, 3, 4]]
    with torch.no_grad():
        logits_TV = spec.module(input_ids=torch.tensor(given)).logits[0, :-1]
    expected_T = logits_TV.log_softmax(-1).gather(-1, torch.tensor(given[0][1:])[:, None]).squeeze(-1)
    torch.testing.assert_close(given_logprobs(spec.module, given), expected_T, atol=1e-5, rtol=0)
    assert logit_map(spec.module).never == (19,)


def test_an_engine_gets_the_processor_and_reads_whether_the_head_is_tied(spec: PolicySpec, tmp_path: Path) -> None:
    spec.save_skeleton(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "idefics3" and config["text_config"]["tie_word_embeddings"] is True
    names = {path.name for path in tmp_path.iterdir()}
    assert {"preprocessor_config.json", "processor_config.json", "tokenizer.json", "tokenizer"} <= names


def test_an_engine_of_texts_is_not_kept_for_images(spec: PolicySpec) -> None:
    other = PolicySpec(load_policy(TINY_SHAPES, vision=True), spec.tokenizer)
    assert other.config.to_json_string() == spec.config.to_json_string() and other.signature != spec.signature


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "drafts": (
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
        "leave speculative_config out",
    ),
    "other sizes": (
        {"mm_processor_kwargs": {"max_pixels": 99}},
        "mm_processor_kwargs is .*other pixels than the policy",
    ),
    "their norm": ({"mm_device_do_normalize": True}, "mm_device_do_normalize is True.*other pixels"),
    "another reader": ({"media_io_kwargs": {"image": {"image_mode": "L"}}}, "media_io_kwargs is .*other pixels"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_show_vllm_other_images_is_refused_before_an_engine_starts(name: str, spec: PolicySpec) -> None:
    arguments, sentence = REFUSED[name]
    with pytest.raises(ValueError, match=sentence):
        VLLMGenerator(2, engine_args=arguments).start(spec)
    texts = PolicySpec(load_policy("tiny"), load_tokenizer("tiny"))
    check_sees(texts, arguments)  # of texts


def test_a_family_whose_processor_needs_torchvision_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lit_grpo.rollout.vllm.arguments.util.find_spec", lambda name: None)
    check_packages("idefics3", sees=True)
    check_packages("qwen3_vl")
    with pytest.raises(ValueError, match=re.escape("vLLM's model of qwen3_vl imports torchvision, which is not inst")):
        check_packages("qwen3_vl", sees=True)


def test_adapters_of_the_tower_do_not_travel_alone(spec: PolicySpec) -> None:
    policy = load_policy(TINY_SHAPES, vision=True)
    give_vision(policy, load_vision(TINY_SHAPES, spec.tokenizer), trained=True)
    add_adapters(policy, LoraSettings(r=2, target_modules=["q_proj"]))
    adapters = PolicySpec(policy, spec.tokenizer).adapters
    with pytest.raises(ValueError, match=r"trains 'model\.vision_model.*of the decoder's linear layers only"):
        adapter_arguments(adapters, {})


def test_an_image_that_changes_on_the_disk_is_another_image(spec: PolicySpec, tmp_path: Path) -> None:
    """A prompt keeps the file that was read with its row; a row that is read again has a name of its own."""
    file, vision = tmp_path / "a.png", vision_of(spec.module)
    file.write_bytes(png(8, 8, 0))
    _, before = vision.read([19, 8], [str(file)])
    file.write_bytes(png(8, 8, 1))
    _, after = vision.read([19, 8], [str(file)])
    assert before.images == (png(8, 8, 0),) and after.images == (png(8, 8, 1),)
    assert before.digest != after.digest


@pytest.mark.parametrize("serves", [True, False])
def test_a_server_of_texts_is_told_from_one_that_sees(serves: bool) -> None:
    model_config = SimpleNamespace(hf_text_config=SimpleNamespace(vocab_size=26), is_multimodal_model=serves)
    worker: Any = SimpleNamespace(vllm_config=SimpleNamespace(model_config=model_config))
    WorkerExtension.check_model(worker, {"vocab_size": 26})
    refusal = nullcontext() if serves else pytest.raises(ValueError, match="start the server with --vision")
    with refusal:
        WorkerExtension.check_model(worker, {"vocab_size": 26}, sees=True)
