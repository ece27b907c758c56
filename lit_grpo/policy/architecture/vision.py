"""Images in prompts: what the policy's vision tower takes, and where its features stand among the tokens."""

from __future__ import annotations

import io
import re
import shutil
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from lit_grpo.memory import in_one_copy
from lit_grpo.policy.architecture.decoder import decoder_of, inner_model, never_sample
from lit_grpo.policy.hub import hub_or_cache, stored_file
from lit_grpo.process.inputs import read_json, typed
from lit_grpo.process.packages import require
from lit_grpo.process.terminal import first_line
from lit_grpo.types import Pictures

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_VISION = "_lit_grpo_vision"
_SETTINGS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
_NEEDS_PILLOW = "A policy that sees images needs Pillow; run pip install pillow."


class Vision:
    """Turns texts with images into a policy's tokens, and images into the arguments of its tower.

    The family's own processor expands placeholders. A video processor, which needs torchvision, is never loaded.

    Args:
        model: The policy or an outline of it; for M-RoPE its positions are taken from it.
        tokenizer: Tokenizer of the policy, which encodes the expanded texts.
        place: Folder or hub id with the settings of its image processor.

    Raises:
        ValueError: The policy has no vision tower or its images attend in both directions, or ``place`` has no settings
            of an image processor.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, place: str) -> None:
        require("PIL", _NEEDS_PILLOW)
        from transformers import AutoImageProcessor
        from transformers.models.auto import processing_auto

        self._inner, kind = inner_model(model), model.config.model_type
        if getattr(model.config.get_text_config(), "use_bidirectional_attention", None) not in (None, False):
            raise ValueError(
                f"The image tokens of {type(model).__name__} see one another in both directions, which is not "
                "supported; take another policy, or train on texts alone."
            )
        name = processing_auto.PROCESSOR_MAPPING_NAMES.get(kind)
        try:
            processor_class: Any = None if name is None else processing_auto.processor_class_from_name(name)
        except ImportError as error:
            raise ValueError(f"{name} cannot be used ({first_line(error)}); run pip install torchvision.") from error
        if processor_class is None:
            raise ValueError(f"transformers has no processor for {kind}, so its prompts cannot have images.")
        with hub_or_cache(place):
            try:
                images = AutoImageProcessor.from_pretrained(place, trust_remote_code=False)
            except (OSError, ValueError, ImportError) as error:
                raise ValueError(
                    f"The image processor of policy {place!r} cannot be loaded ({first_line(error)}); add its "
                    "preprocessor_config.json to the policy's files."
                ) from error
            self._files = {name: stored_file(place, name) for name in _SETTINGS}
            path = self._files["processor_config.json"]
        parts: dict[str, Any] = {"image_processor": images, "tokenizer": tokenizer}
        parts = {name: parts.get(name) for name in processor_class.get_attributes()}
        fields = {} if path is None else typed(read_json(Path(path)), dict[str, Any], str(path), "save it again")
        fields = {name: value for name, value in fields.items() if name != "audio_tokenizer"}
        unchecked = type(processor_class.__name__, (processor_class,), {"check_argument_for_proper_class": _any})
        try:
            self._processor: Any = cast(Any, unchecked).from_args_and_dict(list(parts.values()), fields)
        except (ImportError, TypeError, ValueError) as error:
            raise ValueError(f"{processor_class.__name__} cannot be used: {first_line(error)}") from error
        self.placeholder = int(model.config.image_token_id)

    def save(self, folder: Path) -> None:
        """Copy the settings of the processor, so that others can load it from a policy's folder."""
        for name, path in self._files.items():
            if path is not None:
                shutil.copyfile(path, folder / name)

    def read(self, text: str, given: Sequence[Any]) -> tuple[list[int], Pictures]:
        """Return the token ids of a text with its placeholders expanded, and its images.

        Raises:
            ValueError: The text has not as many placeholders as there are images, or an image cannot be used.
        """
        images = [read_image(each, f"number {number}") for number, each in enumerate(given)]
        opened = [open_image(image) for image in images]
        try:
            inputs = self._processor(text=[text], images=opened, add_special_tokens=False, return_tensors="pt")
        except (ValueError, IndexError, RuntimeError, TypeError, StopIteration) as error:
            raise ValueError(f"its {len(images)} images do not fit its text: {first_line(error)}") from error
        ids_1P = inputs["input_ids"]
        digest = blake2b(digest_size=16)
        for name in sorted(self._features(inputs)):
            digest.update(repr(inputs[name].shape).encode() + inputs[name].contiguous().numpy().tobytes())
        positions_3P, shift = None, 0
        if hasattr(self._inner, "get_rope_index"):
            grids = {name: inputs[name] for name in ("image_grid_thw", "mm_token_type_ids") if name in inputs}
            found, shifts = cast(Any, self._inner).get_rope_index(ids_1P, **grids)
            positions_3P, shift = found[:, 0], -int(shifts)
        return ids_1P[0].tolist(), Pictures(tuple(images), digest.digest(), positions_3P, shift)

    def tokens_of(self, image: bytes) -> list[int]:
        """Return the tokens of an image, with those that a processor sets around it."""
        return self.read(self._processor.image_token, [image])[0]

    def pixels(self, pictures: Pictures) -> dict[str, torch.Tensor]:
        """Return the arguments of the tower for the images of a prompt, on the host."""
        return self._features(
            self._processor.image_processor([open_image(i) for i in pictures.images], return_tensors="pt")
        )

    @staticmethod
    def _features(inputs: Any) -> dict[str, torch.Tensor]:
        """Leave out what is of the text."""
        own = ("pixel_values", "image_grid_thw", "pixel_attention_mask", "spatial_shapes", "image_position_ids")
        return {name: inputs[name] for name in own if name in inputs}


def _any(*_: object) -> None:
    """Take each part of a processor, also none for videos."""


def has_tower(folder: Path) -> bool:
    """Return whether a policy's folder is that of one that sees images."""
    return (folder / _SETTINGS[0]).exists()


def sees(model: torch.nn.Module) -> bool:
    """Return whether a policy can have images in its prompts."""
    return _VISION in vars(model)


def vision_of(model: torch.nn.Module) -> Vision:
    return vars(model)[_VISION]


def give_vision(model: PreTrainedModel, vision: Vision, trained: bool = False) -> None:
    """Let a policy see images; it never samples their placeholders. Its tower is frozen unless ``trained``."""
    object.__setattr__(model, _VISION, vision)
    for weight in tower_parameters(model):
        weight.requires_grad_(trained)
    ids = (getattr(model.config, f"{kind}_token_id", None) for kind in ("image", "video", "audio"))
    num_tokens = len(cast(Any, model.get_output_embeddings()).weight)
    never_sample(model, [token for token in ids if token is not None and token < num_tokens])


def tower_parameters(model: PreTrainedModel) -> Iterator[torch.nn.Parameter]:
    """Yield the parameters of the vision tower and of what projects its features."""
    inner, decoder = inner_model(model), decoder_of(model)
    for child in inner.children():
        if child is not decoder:
            yield from child.parameters()


def frozen_layers(model: PreTrainedModel) -> list[str]:
    """Return the names of the linear layers of a vision tower that is not trained; none of a policy of texts."""
    if not sees(model):
        return []
    frozen = {id(weight) for weight in tower_parameters(model) if not weight.requires_grad}
    layers = ((name, each) for name, each in model.named_modules() if isinstance(each, torch.nn.Linear))
    return [name for name, layer in layers if id(layer.weight) in frozen]


def image_features(model: PreTrainedModel, pictures: Sequence[Pictures]) -> dict[str, Any]:
    """Return the tower's features of all these prompts' images as an argument of :func:`inner_model`.

    They have a gradient where the tower is trained.
    """
    trains = torch.is_grad_enabled() and any(each.requires_grad for each in tower_parameters(model))
    outputs, vision = list[Any](), vision_of(model)
    with torch.set_grad_enabled(trains):
        for each in pictures:
            pixels = in_one_copy(vision.pixels(each), model.device)
            outputs.append(cast(Any, inner_model(model)).get_image_features(**pixels, return_dict=True))
    return {"mm_encoder_outputs": {"image": _joined(outputs)}}


def with_images(positions_BT: torch.Tensor, seen: Sequence[tuple[int, Pictures]]) -> torch.Tensor:
    """Return the positions of rows that begin with a prompt each, some of which have images.

    Args:
        positions_BT: Place of each token in its row.
        seen: Numbers of rows, and the images of each.

    Returns:
        Shape (B, T), or (3, B, T) if the policy has positions in time, height and width.
    """
    if all(each.positions_3P is None for _, each in seen):
        return positions_BT
    positions_3BT = positions_BT.repeat(3, 1, 1)
    for row, each in seen:
        if each.positions_3P is not None:
            prompt = each.positions_3P.shape[1]
            positions_3BT[:, row, :prompt] = each.positions_3P.to(positions_BT.device)
            positions_3BT[:, row, prompt:] -= each.shift
    return positions_3BT


def _joined(outputs: Sequence[Any]) -> Any:
    """Join what a tower makes of several prompts: of each image one tensor, or of all of them one."""
    first = outputs[0]
    for later in outputs[1:]:
        if isinstance(first.pooler_output, torch.Tensor):
            first.pooler_output = torch.cat([first.pooler_output, later.pooler_output])
        else:
            first.pooler_output = [*first.pooler_output, *later.pooler_output]
        if getattr(first, "deepstack_features", None) is not None:  # of each of some layers, by image
            pairs = zip(first.deepstack_features, later.deepstack_features, strict=True)
            first.deepstack_features = [[*before, *after] for before, after in pairs]
    return first


_MOST_PIXELS = 2**26


def read_image(image: Any, what: str) -> bytes:
    """Return the file of an image that a row gives: a path, bytes, an image of Pillow, or a dict of one of these.

    Raises:
        ValueError: It is none of these, or no image; see :func:`open_image`. ``what`` names it there.
    """
    if isinstance(image, dict):  # of datasets.Image(decode=False)
        image = image["bytes"] if image.get("bytes") is not None else image.get("path")
    if isinstance(image, str | Path):
        if re.match(r"\w+://", str(image)):
            raise ValueError(f"{what} is the URL {str(image)[:80]!r}, and nothing is downloaded; give a file or bytes")
        try:
            image = Path(image).expanduser().read_bytes()
        except (OSError, ValueError) as error:
            raise ValueError(f"{what}, the file {str(image)[:200]!r}, cannot be read ({first_line(error)})") from None
    elif hasattr(image, "save") and hasattr(image, "mode"):
        stream = io.BytesIO()
        image.convert("RGB").save(stream, "PNG")
        image = stream.getvalue()
    if not isinstance(image, bytes):
        kind = type(image).__name__
        raise ValueError(f"{what} is of type {kind} and no image; give a path, bytes or an image of Pillow")
    try:
        open_image(image)
    except ValueError as error:
        raise ValueError(f"{what} cannot be decoded ({error})") from None
    return image


def small_image() -> bytes:
    """Return the file of a white image, with which a tower is tried."""
    from PIL import Image

    stream = io.BytesIO()
    Image.new("RGB", (64, 64), "white").save(stream, "PNG")
    return stream.getvalue()


def open_image(data: bytes) -> Any:
    """Return an image of the bytes of a file, in RGB, turned as its camera says.

    Raises:
        ValueError: They are no image, a truncated one, or one of more than 2**26 pixels.
    """
    from PIL import Image, ImageOps

    try:
        image = Image.open(io.BytesIO(data))
        if image.width * image.height > _MOST_PIXELS:
            raise ValueError(f"it has {image.width} x {image.height} pixels, and at most {_MOST_PIXELS} are read")
        return ImageOps.exif_transpose(image).convert("RGB")
    except Exception as error:  # decoders of damaged files raise many kinds
        raise ValueError(first_line(error)) from error
