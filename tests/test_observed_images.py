"""Environments on prompts with images, and images in what they show: beside the model's own forward, and misuse."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import table_rows
from PIL import Image
from seeing import PLACEHOLDER, end_turns_soon, load, make_policy, plain_logits, png

from lit_grpo.data.rendering import PromptRenderer
from lit_grpo.environments import Environments
from lit_grpo.environments.contract import EnvironmentFailed
from lit_grpo.environments.live import NotShown, content_of
from lit_grpo.methods.gigpo import states
from lit_grpo.plugins import fresh
from lit_grpo.policy.spec import PolicySpec
from lit_grpo.process.values import find_foreign, from_written, to_written
from lit_grpo.rollout.buffer import RolloutBuffer
from lit_grpo.rollout.loop import RolloutLoop
from lit_grpo.rollout.rules import SYNCHRONOUS
from lit_grpo.rollout.sampling import request_key, sample_tokens, uniform
from lit_grpo.rollout.slots.generator import SlotGenerator
from lit_grpo.types import (
    OBSERVED,
    Completion,
    MutualSpan,
    Pictures,
    Prompt,
    Request,
    Rollout,
    SamplingParams,
    Trajectory,
)
from lit_grpo.update.batches.microbatch import make_micro_batches
from lit_grpo.update.logprobs.measurements import measure
from lit_grpo.update.logprobs.reference import ReferenceSettings, make_reference
from lit_grpo.update.logprobs.teacher import TeacherSettings, make_teacher

SAMPLING = SamplingParams(max_tokens=40, max_observed=350)


class Camera:
    """Shows pictures on one canvas, which it goes on painting."""

    def reset(self, seed: int) -> list[dict[str, Any]]:
        """Begin with a view."""
        self.canvas, self.seed, self.num = Image.new("RGB", (32, 32)), seed, 0
        return self._view("Look: ")

    def respond(self, text: str) -> list[dict[str, Any]] | str | None:
        self.num += 1
        return None if self.num > 3 else "go <|image_pad|> on" if self.num == 2 else self._view("then ")

    def _view(self, text: str) -> list[dict[str, Any]]:
        self.canvas.paste((40 * self.seed, 60 * self.num, 90), (4, 4, 20, 20))
        return [{"type": "text", "text": text}, {"type": "image", "image": self.canvas}]


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Any]:
    """A small random Qwen3-VL that ends its turns soon."""
    model, tokenizer, vision = load(make_policy("qwen3_vl", tmp_path_factory.mktemp("seeing")))
    end_turns_soon(model)
    return model, tokenizer, vision


def played(seeing: Sequence[Any], settings: dict[str, Any], rows: Sequence[dict[str, Any]]) -> list[Completion]:
    """Return the completions of one rollout, two of each row."""
    model, tokenizer, vision = seeing
    worker = fresh(Environments(**settings))
    worker.setup()
    worker.prepare(tokenizer, {}, False, vision)
    renderer = PromptRenderer(image_column="image", vision=vision, conversing=worker)
    prompts = list[Prompt]()
    for row in rows:
        token_ids, text, messages, pictures = renderer.render(row, tokenizer)
        prompts.append(Prompt(f"train/{len(prompts)}", token_ids, text, row, messages=messages, pictures=pictures))
    generator = SlotGenerator(3)
    generator.start(PolicySpec(model, tokenizer))
    generator.load_weights(model.named_parameters(), 0)
    try:
        groups, _ = RolloutLoop(generator, listeners=[worker]).collect(prompts, 2, SAMPLING, seed=0)[:2]
    finally:
        worker.close()
    return [rollout.completion for group in groups for rollout in group.rollouts]


ROWS = [
    {"prompt": "What is it?", "image": png(32, 48, 1), "seed": 1},
    {"prompt": "What is it?", "image": png(32, 48, 2), "seed": 2},
    {"prompt": "And now?", "seed": 3},
]


@pytest.fixture(scope="module")
def filmed(seeing: tuple[Any, Any, Any]) -> list[Completion]:
    return played(seeing, {"factory": Camera}, ROWS)


def test_turns_are_sampled_after_all_images(seeing: tuple[Any, Any, Any], filmed: list[Completion]) -> None:
    (model, _, vision), completions = seeing, filmed
    assert max(len(each.turns) for each in completions) == 4
    for each in completions:
        episode, ids = each.episode, each.token_ids_T
        assert episode is not None
        shown = [image for _, pictures in each.pictures for image in pictures.images]
        said = [episode.said, *(message["content"] for message in episode.messages)]
        assert shown == [part["image"] for content in said if isinstance(content, list) for part in content[1:]]
        assert len({*shown}) == len(shown)  # not the canvas as it was in the end
        asked = Rollout(each.request.prompt, each).asked_messages
        assert asked is not None and asked[-1]["content"][-2:] == episode.said
        sampled_T = each.versions_T != OBSERVED
        keys = np.array([request_key(each.request)], dtype=np.uint64)
        uniform_T = torch.from_numpy(uniform(keys[:, None], np.arange(each.num_tokens))[0])
        with torch.no_grad():
            tokens_T, logprobs_T, _ = sample_tokens(plain_logits(model, vision, each), SAMPLING, uniform_T)
        assert torch.equal(tokens_T[sampled_T], ids[sampled_T])
        assert torch.allclose(logprobs_T[sampled_T], each.logprobs_T[sampled_T], atol=5e-5)
        assert not (ids[each.trained_T] == PLACEHOLDER).any()


@pytest.mark.nightly
def test_prompts_with_images_keep_them_where_the_conversation_is_rendered_again(seeing: tuple[Any, Any, Any]) -> None:
    completions = played(seeing, {"factory": Teller, "history": "rerendered"}, ROWS[:2])
    assert max(len(each.contexts) for each in completions) == 4
    assert all(each.request.prompt.pictures is not None for each in completions)
    with pytest.raises(ValueError, match="Camera shows images, and history rerendered"):
        played(seeing, {"factory": Camera, "history": "rerendered"}, ROWS[:1])


@pytest.mark.nightly
@pytest.mark.parametrize("who", ["model.teacher", "model.objective.kl"])
def test_other_models_see_the_images_too(
    who: str, seeing: tuple[Any, Any, Any], filmed: list[Completion], tmp_path: Path
) -> None:
    policy, tokenizer, _ = seeing
    other, _, vision = load(make_policy("qwen3_vl", tmp_path / "other"))
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(7)
        for weight in other.parameters():
            weight += 0.05 * torch.randn_like(weight)
    other.save_pretrained(tmp_path / "other")
    device, rollouts = torch.device("cpu"), [Rollout(each.request.prompt, each, {}, 0.0) for each in filmed]

    def measured(rollouts: Sequence[Rollout], what: Any, lend: Any) -> list[torch.Tensor]:
        rows = make_micro_batches(rollouts, 500)
        with lend() as model:
            return measure(what, [row.filled(rollouts) for row in rows], model, 1.0, device)

    place = str(tmp_path / "other")
    if who == "model.teacher":
        teacher = make_teacher(TeacherSettings(place), policy, place, "float32", tokenizer, device, "full")
        keyed = lambda *given: dict(zip([each.request.key for each in filmed], measured(*given), strict=True))  # noqa: E731
        scores = teacher.score(keyed, rollouts, lambda value: [value])
        found = [scores[each.request.key].logprobs_T for each in filmed]
    else:
        reference = make_reference(policy, place, "float32", device, ReferenceSettings(), "full")
        found = measured(rollouts, "logprobs", reference.lend)
    for each, logprobs_T in zip(filmed, found, strict=True):
        with torch.no_grad():
            expected_TV = plain_logits(other, vision, each).log_softmax(-1)
        expected_T = expected_TV.gather(-1, each.token_ids_T[:, None]).squeeze(-1)[each.trained_T]
        assert torch.allclose(logprobs_T.float(), expected_T, atol=5e-5)
        assert not torch.allclose(expected_T, each.logprobs_T[each.trained_T], atol=1e-2)


@pytest.mark.nightly
def test_a_teacher_that_reads_images_as_other_tokens_is_refused(seeing: tuple[Any, Any, Any], tmp_path: Path) -> None:
    policy, tokenizer, _ = seeing
    place = make_policy("qwen3_vl", tmp_path)
    settings = tmp_path / "preprocessor_config.json"
    settings.write_text(settings.read_text().replace("4096", "1024"))
    with pytest.raises(ValueError, match="reads an image as other tokens than the policy does"):
        make_teacher(TeacherSettings(place), policy, place, "float32", tokenizer, torch.device("cpu"), "full")


class Teller(Camera):
    """Answers in words."""

    def _view(self, text: str) -> Any:
        return text


def trajectory(seed: int, vision_digest: bytes = b"") -> Trajectory:
    pictures = Pictures(
        (png(16, 16, seed),), vision_digest or bytes([seed]), torch.zeros(3, 4, dtype=torch.int64), 2, 4,
        (MutualSpan(1, 2, everywhere=True),),
    )  # fmt: skip
    return Trajectory([7, 8], [-1.0, -1.0], [0, 0]).followed_by([302, 300, 303, 65], pictures=pictures)


def test_trajectories_of_equal_tokens_and_other_images_are_told_apart() -> None:
    one, same, other = (trajectory(1).followed_by([9], [-1.0], 0) for _ in range(1)), trajectory(1), trajectory(2)
    (whole,) = one
    assert (whole.contents[:6] == same.contents).all() and (whole.contents[2:6] < 0).all()
    assert (same.contents[:2] == other.contents[:2]).all() and (same.contents[2:] != other.contents[2:]).all()
    assert whole.until(6).pictures == whole.pictures and whole.until(2).pictures == ()
    with pytest.raises(ValueError, match="cut after 4 tokens, within an observation with images"):
        whole.until(4)
    request = Request(Prompt("train/0", (1,), ""), (0,), SAMPLING)
    states_of = [states(request.after(each.followed_by([9], [-1.0], 0)).ended("stop")) for each in (same, other)]
    assert len({state[-1] for state in states_of}) == 2


def test_an_unfinished_trajectory_of_a_checkpoint_has_its_images_again() -> None:
    request = Request(Prompt("train/0", (1,), ""), (0,), SAMPLING, prefix=trajectory(1))
    buffer = RolloutBuffer(SYNCHRONOUS)
    buffer.open([request])
    state = from_written(to_written(buffer.state_dict()))
    assert find_foreign(buffer.state_dict()) is None
    resumed = RolloutBuffer(SYNCHRONOUS)
    resumed.load_state_dict(state)
    (entry,) = (entry for group in resumed.ledger.groups.values() for entry in group.values())
    ((place, found),), ((_, had),) = entry.request.prefix.pictures, request.prefix.pictures
    assert found.positions_3P is not None and had.positions_3P is not None
    assert place == 2 and found.images == had.images and found.positions_3P.tolist() == had.positions_3P.tolist()
    assert found.mutual == had.mutual and found.mutual[0].everywhere
    assert (entry.request.prefix.contents == request.prefix.contents).all()


# ---- what tools return --------------------------------------------------------------------------------


def pillow(mode: str = "RGB", size: tuple[int, int] = (8, 4)) -> Any:
    return Image.new(mode, size)


def parts(*images: Any) -> list[dict[str, Any]]:
    return [{"type": "text", "text": "a"}, *({"type": "image", "image": image} for image in images)]


def file_of(image: Any, form: str = "PNG") -> bytes:
    image.save(stream := io.BytesIO(), form)
    return stream.getvalue()


RIGHT: dict[str, Any] = {
    "of Pillow": parts(pillow()),
    "with transparency": parts(pillow("RGBA")),
    "of a palette": parts(pillow("P")),
    "bytes": parts(file_of(pillow())),
    "a JPEG": parts(file_of(pillow(), "JPEG")),
    "of datasets": parts({"bytes": file_of(pillow()), "path": None}),
}


@pytest.mark.parametrize("name", table_rows(RIGHT, ["of Pillow"]))
def test_an_image_in_a_part_becomes_a_file(name: str) -> None:
    content = content_of(RIGHT[name], "the tool look", sees=True)
    assert isinstance(content, list) and content[0] == {"type": "text", "text": "a"}
    assert Image.open(io.BytesIO(content[1]["image"])).size == (8, 4)


def test_parts_of_text_alone_are_a_text() -> None:
    assert content_of([*parts(), *parts()], "the tool look", sees=False) == "aa"


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "an image by itself": (pillow(), NotShown, "returns an image by itself; return parts"),
    "in a list": ([pillow()], NotShown, "returns an image by itself"),
    "without a type": ({"image": pillow()}, NotShown, "returns an image by itself"),
    "without an image": ([{"type": "image"}], NotShown, "a part of type image without one"),
    "a URL": ([{"type": "image_url", "image_url": "https://a.b/c.png"}], NotShown, "neither text nor an image"),
    "a URL as its image": (parts("https://a.b/c.png"), EnvironmentFailed, "nothing is downloaded"),
    "a video": ([{"type": "video", "video": b""}], NotShown, "neither text nor an image"),
    "damaged": (parts(file_of(pillow())[:40]), EnvironmentFailed, "cannot be decoded"),
    "no image": (parts(b"%PDF-1.7"), EnvironmentFailed, "cannot be decoded"),
    "a number": (parts(7), EnvironmentFailed, "of type int and no image"),
    "an array": (parts(np.zeros((4, 4, 3))), EnvironmentFailed, "of type ndarray and no image"),
    "huge": (parts(file_of(pillow("1", (9000, 9000)))), EnvironmentFailed, "has 9000 x 9000 pixels"),
    "a text without one": ([{"type": "text"}], NotShown, "a content block without a text"),
}


@pytest.mark.parametrize("name", table_rows(WRONG, ["without a type", "damaged"]))
def test_what_is_no_image_is_told(name: str) -> None:
    returned, kind, sentence = WRONG[name]
    with pytest.raises(kind, match=re.escape(sentence)):
        content_of(returned, "the tool look", sees=True)


def test_a_policy_of_texts_is_shown_no_image() -> None:
    with pytest.raises(NotShown, match=r"the policy sees none in observations; .* model.vision"):
        content_of(parts(pillow()), "the tool look", sees=False)


class Hidden(Camera):
    """Shows an image that takes more tokens than a trajectory may observe."""

    def respond(self, text: str) -> Any:
        return [{"type": "image", "image": pillow(size=(64, 64))}] * 40


@pytest.mark.nightly
def test_a_trajectory_ends_before_what_is_too_large_to_observe(seeing: tuple[Any, Any, Any]) -> None:
    completions = played(seeing, {"factory": Hidden}, [ROWS[2]])
    assert all(each.finish_reason == "length" and len(each.pictures) == 1 for each in completions)


@pytest.mark.nightly
def test_a_template_that_leaves_images_out_is_named(seeing: tuple[Any, Any, Any]) -> None:
    tokenizer = seeing[1]
    was = tokenizer.chat_template
    tokenizer.chat_template = was.replace("<|vision_start|><|image_pad|><|vision_end|>", "")
    try:
        with pytest.raises(ValueError, match="What Camera shows has images that cannot be shown: its 1 images do not"):
            played(seeing, {"factory": Camera}, [ROWS[2]])
    finally:
        tokenizer.chat_template = was
