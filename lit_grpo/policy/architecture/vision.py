"""Images in prompts: what the policy's vision tower takes, and where its features stand among the tokens."""

from __future__ import annotations

import io
import re
import shutil
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from inspect import signature
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from lit_grpo.memory import in_one_copy
from lit_grpo.policy.architecture.decoder import decoder_of, inner_model, never_sample
from lit_grpo.policy.hub import hub_or_cache, stored_file
from lit_grpo.process.inputs import read_json, typed
from lit_grpo.process.packages import require
from lit_grpo.process.terminal import first_line
from lit_grpo.types import MutualSpan, Pictures

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_VISION = "_lit_grpo_vision"
_SETTINGS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
_MOST_KNOWN = 64  # images of which the tokens are kept
_NEEDS_PILLOW = "A policy that sees images needs Pillow; run pip install pillow."


class Vision:
    """Turns texts with images into a policy's tokens, and images into the arguments of its tower.

    The family's own processor expands placeholders. A video processor, which needs torchvision, is never loaded.

    Args:
        model: The policy or an outline of it; for M-RoPE its positions are taken from it.
        tokenizer: Tokenizer of the policy, which encodes the expanded texts.
        place: Folder or hub id with the settings of its image processor.
        mutual: Whether the tokens of an image see one another in all layers, or only in those with a sliding window;
            None if they see only what comes before them.

    Raises:
        ValueError: The policy has no vision tower, or ``place`` has no settings of an image processor.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, place: str, mutual: bool | None = None
    ) -> None:
        require("PIL", _NEEDS_PILLOW)
        from transformers import AutoImageProcessor
        from transformers.models.auto import processing_auto

        self._inner, kind = inner_model(model), model.config.model_type
        arguments, self.mutual = signature(self._inner.forward).parameters, mutual
        self._token_types = "token_type_ids" if "token_type_ids" in arguments else "mm_token_type_ids"
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
        self.feature_token, self._tokenizer = int(model.config.image_token_id), tokenizer
        mark: Any = tokenizer.convert_tokens_to_ids(str(getattr(self._processor, "image_token", "")))
        self.placeholder: int = self.feature_token if mark in (None, tokenizer.unk_token_id) else mark
        self._known: dict[bytes, dict[str, Any]] = {}

    def save(self, folder: Path) -> None:
        """Copy the settings of the processor, so that others can load it from a policy's folder."""
        for name, path in self._files.items():
            if path is not None:
                shutil.copyfile(path, folder / name)

    @property
    def settings(self) -> str:
        """Settings by which it makes pixels, as JSON."""
        return self._processor.image_processor.to_json_string()

    def read(self, token_ids: Sequence[int], given: Sequence[Any]) -> tuple[list[int], Pictures]:
        """Return tokens in which each placeholder has become those of its image, and the images.

        Images are expanded one by one, so a text that spells what a processor looks for stays a text.

        Args:
            token_ids: Tokens of a text, with one placeholder for each image.
            given: The images, see :func:`read_image`.

        Raises:
            ValueError: There are not as many placeholders as images, or an image cannot be used.
        """
        images = [read_image(each, f"number {number}") for number, each in enumerate(given)]
        if (num_places := [*token_ids].count(self.placeholder)) != len(images):
            raise ValueError(f"its {len(images)} images do not fit its text, which has {num_places} places for images")
        shown = [self._shown(image) for image in images]
        rest, expanded, is_after = iter(shown), list[int](), False
        for token in token_ids:
            is_image = token == self.placeholder
            if is_image or is_after:
                expanded = self._seamless(expanded, next(rest)["ids"] if is_image else [token])
            else:
                expanded.append(token)
            is_after = is_image
        positions_3P, shift = None, 0
        if hasattr(self._inner, "get_rope_index"):
            ids_1P = torch.tensor([expanded])
            grids_N3 = torch.cat([each["grid"] for each in shown])
            found, shifts = cast(Any, self._inner).get_rope_index(
                ids_1P, image_grid_thw=grids_N3, mm_token_type_ids=(ids_1P == self.feature_token).int()
            )
            positions_3P, shift = found[:, 0], -int(shifts)
        digest = blake2b(b"".join(each["digest"] for each in shown), digest_size=16).digest()
        spans, end = list[MutualSpan](), 0
        for is_image, its in groupby(expanded, self.feature_token.__eq__):
            begin, end = end, end + len([*its])
            if is_image and self.mutual is not None:
                spans.append(MutualSpan(begin, end, self.mutual))
        more = len(expanded), tuple(spans), tuple(token_ids)
        return expanded, Pictures(tuple(images), digest, positions_3P, shift, *more)

    def token_types(self, input_ids_BT: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the argument of the model's own attention that says which tokens see one another, if any do."""
        types_BT = (input_ids_BT == self.feature_token).long()
        return {} if self.mutual is None else {self._token_types: types_BT}

    def is_like(self, other: Vision) -> bool:
        """Return whether another policy has the same tokens for images; those of two made-up ones are compared."""
        from PIL import Image

        made = [read_image(Image.new("RGB", size), "a made-up image") for size in ((640, 480), (56, 280))]
        return all(self._shown(image)["ids"] == other._shown(image)["ids"] for image in made)

    def _seamless(self, before: list[int], after: list[int]) -> list[int]:
        """Return tokens one after another; line breaks on both sides of the seam are one token, as in a whole text."""
        end, begin = len(before), 0
        while end and not str(self._tokenizer.decode(before[end - 1])).strip("\n"):
            end -= 1
        while begin < len(after) and not str(self._tokenizer.decode(after[begin])).strip("\n"):
            begin += 1
        if end == len(before) or not begin:
            return before + after
        breaks = self._tokenizer.decode([*before[end:], *after[:begin]])
        return [*before[:end], *self._tokenizer(breaks, add_special_tokens=False)["input_ids"], *after[begin:]]

    def _shown(self, image: bytes) -> dict[str, Any]:
        """Return the tokens of an image, a digest of its pixels, and its grid; of the last ones they are kept.

        A prompt that others begin with, as trajectories do, has each image read again.
        """
        shown = self._known.get(image)
        if shown is None:
            mark = str(self._tokenizer.convert_ids_to_tokens(self.placeholder))
            try:
                inputs = self._processor(
                    text=[mark], images=[[open_image(image)]], add_special_tokens=False, return_tensors="pt"
                )
            except (ValueError, IndexError, RuntimeError, TypeError, StopIteration) as error:
                raise ValueError(f"the processor takes no such image: {first_line(error)}") from error
            digest = blake2b(digest_size=16)
            for name in sorted(self._features(inputs)):
                digest.update(repr(inputs[name].shape).encode() + inputs[name].contiguous().numpy().tobytes())
            shown = {"ids": inputs["input_ids"][0].tolist(), "grid": inputs.get("image_grid_thw")}
            shown["digest"] = digest.digest()
            for oldest in list(self._known)[: 1 - _MOST_KNOWN]:
                self._known.pop(oldest, None)
            self._known[image] = shown
        return shown

    def tokens_of(self, image: bytes) -> list[int]:
        """Return the tokens of an image, with those that a processor sets around it."""
        return self._shown(image)["ids"]

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
    named = ("image_token_id", "video_token_id", "audio_token_id")
    ids = [vision.placeholder, *(getattr(model.config, name, None) for name in named)]
    num_tokens = len(cast(Any, model.get_output_embeddings()).weight)
    never_sample(model, [token for token in dict.fromkeys(ids) if token is not None and token < num_tokens])


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


class Placed(NamedTuple):
    """Images among the tokens of a row.

    Args:
        row: Number of the row.
        begin: Place of the first token of the prompt or observation that they are in.
        end: Place after the last token that follows it; None for the end of the row.
        pictures: The images of that prompt or observation.
    """

    row: int
    begin: int
    end: int | None
    pictures: Pictures


def with_images(positions_BT: torch.Tensor, seen: Sequence[Placed]) -> torch.Tensor:
    """Return the positions of rows in which some tokens are of images.

    Args:
        positions_BT: Position of each token if every token before it took one.
        seen: The images of all rows; where some follow others, after these.

    Returns:
        Shape (B, T), or (3, B, T) if the policy has positions in time, height and width.
    """
    if all(each.pictures.positions_3P is None for each in seen):
        return positions_BT
    positions_3BT = positions_BT.repeat(3, 1, 1)
    for row, begin, end, pictures in seen:
        if (own_3P := pictures.positions_3P) is not None:
            first_31 = positions_3BT[:, row, begin : begin + 1].clone()
            positions_3BT[:, row, begin:end] -= pictures.shift
            there_3P = positions_3BT[:, row, begin:end][:, : own_3P.shape[1]]  # the last token may not be in the row
            there_3P.copy_(first_31 + own_3P[:, : there_3P.shape[1]].to(there_3P.device))
    return positions_3BT


def first_seen(tokens_BT: torch.Tensor, seen: Sequence[Placed]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the first place from which each token is seen, where some are seen by tokens before them.

    Args:
        tokens_BT: Rows with the prompts or observations whole that have images.
        seen: The images of all rows.

    Returns:
        For layers with a sliding window and for those without, shape (B, T); None where tokens see none ahead.
    """
    spans = [(each, span) for each in seen for span in each.pictures.mutual]
    if not spans:
        return None, None
    first_BT = torch.arange(tokens_BT.shape[1], device=tokens_BT.device).repeat(len(tokens_BT), 1)
    for each, span in spans:
        first_BT[each.row, each.begin + span.begin : each.begin + span.end] = each.begin + span.begin
    return first_BT, first_BT if spans[0][1].everywhere else None


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
