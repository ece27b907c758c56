"""Prompts with images for vLLM, whose own processor puts each image's tokens in the place of its mark."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

from lit_grpo.policy.architecture.vision import open_image, read_image, sees, vision_of
from lit_grpo.rollout.vllm.arguments import drafting

if TYPE_CHECKING:
    from lit_grpo.policy.spec import PolicySpec
    from lit_grpo.rollout.vllm.streams import EngineRequest

_OTHER_PIXELS = ("mm_processor_kwargs", "media_io_kwargs", "mm_device_do_normalize")


class Shown(NamedTuple):
    """A prompt with images, and its tokens so far, as vLLM takes them.

    Attributes:
        token_ids: Tokens with one for each image.
        images: Files of the images.
        names: A name of each image by which vLLM may keep what it has made of it: of its pixels, and of the weights.
    """

    token_ids: list[int]
    images: tuple[bytes, ...]
    names: list[str]

    def in_process(self) -> dict[str, Any]:
        """Return fields of vLLM's ``TokensPrompt``."""
        opened = [open_image(image) for image in self.images]
        return {
            "prompt_token_ids": self.token_ids,
            "multi_modal_data": {"image": opened},
            "multi_modal_uuids": {"image": self.names},
        }

    def in_request(self) -> dict[str, Any]:
        """Return fields of a request to a server, which is to tell the tokens that it has read."""
        pairs = zip(self.images, self.names, strict=True)
        parts = [{"type": "image_url", "url": _in_url(image), "uuid": name} for image, name in pairs]
        return {"token_ids": self.token_ids, "content_parts": parts, "return_token_ids": True}


@lru_cache(maxsize=32)
def _in_url(image: bytes) -> str:
    """Return an image as a URL that holds it, without what other readers see otherwise: rotation, transparency."""
    return "data:image/png;base64," + b64encode(read_image(open_image(image), "an image")).decode()


def shown(stream: EngineRequest) -> Shown | None:
    """Return what vLLM takes for a request whose prompt has images; None for texts.

    The salt is in an image's name because vLLM keeps what the tower has made of it, also when new weights arrive.
    """
    prompt = stream.request.prompt
    if prompt.pictures is None:
        return None
    images, digest = prompt.pictures.images, prompt.pictures.digest.hex()
    names = [f"{digest}-{number}-{stream.salt}" for number in range(len(images))]
    return Shown([*prompt.pictures.marked_ids, *stream.token_ids], images, names)


def other_tokens(prompt: Sequence[int], told: Any) -> str | None:
    """Return a predicate, whose subject is the engine, where it has read a prompt as other tokens; else None."""
    if told == prompt:
        return None
    read = told if isinstance(told, list) else []
    place = next(place for place, (own, its) in enumerate(zip_longest(prompt, read)) if own != its)
    return (
        f"reads a prompt with images as {len(read)} tokens, other ones than the policy's {len(prompt)} from number "
        f"{place} on: its image processor is not the policy's; give it the policy's files, or take "
        "lit_grpo.rollout.slots.SlotGenerator."
    )


def image_arguments(policy: PolicySpec, on_server: bool = False) -> dict[str, Any]:
    """Return vLLM's arguments for a policy that sees: its processor makes the pixels whole, and no video is expected.

    By default vLLM 0.32 normalizes the pixels of Qwen's families in its model, which loses the numbers for that in a
    start without weights.
    """
    if not sees(policy.module):
        return {}
    whole = {"no_mm_device_do_normalize": True} if on_server else {"mm_device_do_normalize": False}
    return {"limit_mm_per_prompt": {"video": 0}, **whole}


def check_sees(policy: PolicySpec, arguments: Mapping[str, Any]) -> None:
    """Raise a ValueError if vLLM with these arguments would not see a policy's images as the policy does."""
    if not sees(policy.module):
        return
    if vision_of(policy.module).mutual is not None:
        raise ValueError(
            f"In {type(policy.module).__name__} the tokens of an image see one another, and vLLM has not been compared "
            "there; take lit_grpo.rollout.slots.SlotGenerator."
        )
    if drafting(arguments) is not None:
        raise ValueError(
            "speculative_config is given, but vLLM verifies no drafts where some tokens are never sampled, as the "
            "placeholders of images (model.vision); leave speculative_config out."
        )
    for name in _OTHER_PIXELS:
        if arguments.get(name):
            raise ValueError(
                f"vLLM's argument {name} is {arguments[name]!r}, which shows vLLM other pixels than the policy is "
                "trained with; set them in the policy's preprocessor_config.json, and leave it out."
            )
