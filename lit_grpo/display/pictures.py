"""The images of prompts in small, as people see them in samples."""

from __future__ import annotations

import io
from base64 import b64decode, b64encode
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from lit_grpo.policy.architecture.vision import open_image
from lit_grpo.types import Pictures, Prompt

if TYPE_CHECKING:
    from PIL.Image import Image

SIDE, MOST, COLORS, GAP = 96, 4, 128, 4
"""Of a strip: pixels of an image's longer side, images, colors, and pixels between two images."""
PNG = "data:image/png;base64,"


@lru_cache(64)
def strip(pictures: Pictures) -> str:
    """Return the first images of a prompt beside each other, in small and as the policy gets them, as a data URL."""
    from PIL import Image

    shown = [open_image(each) for each in pictures.images[:MOST]]
    for each in shown:
        each.thumbnail((SIDE, SIDE))
    width = sum(each.width + GAP for each in shown) - GAP
    whole, left = Image.new("RGB", (width, max(each.height for each in shown)), "white"), 0
    for each in shown:
        whole.paste(each, (left, 0))
        left += each.width + GAP
    return data_url(whole.quantize(COLORS))


def data_url(image: Image) -> str:
    stream = io.BytesIO()
    image.save(stream, "PNG", optimize=True)
    return PNG + b64encode(stream.getvalue()).decode()


def from_data_url(url: str) -> Image:
    return open_image(b64decode(url.removeprefix(PNG)))


def last_turn(prompt: Prompt) -> str:
    """Return the last user message of a prompt with images; each stands in it as ``[image 640x480]``."""
    assert prompt.pictures is not None
    opened = (open_image(each) for each in prompt.pictures.images)
    sizes, said = (f"[image {each.width}x{each.height}] " for each in opened), ""
    for message in prompt.messages or ():
        content = message["content"] or ""
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        texts = [next(sizes, "[image] ") if part["type"] == "image" else part["text"] for part in parts]
        said = "".join(texts) if message["role"] == "user" else said
    return said


def without_images(value: Any) -> Any:
    """Return a value of a row with a word in place of each image or file that it holds, at any depth."""
    if isinstance(value, Mapping):
        return {name: without_images(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [without_images(each) for each in value]
    return "[image]" if isinstance(value, bytes) or type(value).__module__.startswith("PIL.") else value
