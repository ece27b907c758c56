"""Policies with a vision tower, small and at random, and their plain forward over a prompt with images."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast

from lit_grpo.policy.architecture.vision import Vision, give_vision, open_image
from lit_grpo.policy.loading import load_tokenizer, load_vision, mutual_of
from lit_grpo.types import Completion, Prompt

PLACEHOLDER = 300
"""The token of an image; families whose texts mark one otherwise have that in ``marks``."""
_ADDED = {300: "<|image_pad|>", 301: "<|video_pad|>", 302: "<|vision_start|>", 303: "<|vision_end|>"}
_ADDED |= {304: "<fake_token_around_image>", 305: "<end_of_utterance>", 306: "<global-img>", 307: "<image>"}
_ADDED |= {308: "<|im_start|>", 309: "<|im_end|>"}
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}{% if c['type'] == 'image' %}MARK{% else %}{{ c['text'] }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "initializer_range": 0.2,
    "eos_token_id": 309,
    "bos_token_id": None,
}
_QWEN_VISION = {"depth": 2, "hidden_size": 32, "num_heads": 4, "out_hidden_size": 64, "patch_size": 8}
_QWEN_VISION |= {"spatial_merge_size": 2, "temporal_patch_size": 2, "intermediate_size": 48, "initializer_range": 0.2}
_QWEN_TOKENS = {"video_token_id": 301, "vision_start_token_id": 302, "vision_end_token_id": 303}
_SIGLIP = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}


def _rope(section: list[int], **more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 1e4, "mrope_section": section, **more}


@dataclass(frozen=True)
class Family:
    """How a family's small model is made.

    Args:
        text: What its decoder has besides the common sizes.
        vision: Sizes of its tower.
        processor: Sizes of its image processor, ``preprocessor_config.json``.
        mark: An image in a text.
        more: Further fields of its configuration.

    A family whose image processor needs torchvision has none here: see :class:`ByHand`.
    """

    text: dict[str, Any]
    vision: dict[str, Any]
    processor: dict[str, Any]
    mark: str = "<|vision_start|><|image_pad|><|vision_end|>"
    more: dict[str, Any] | None = None


_QWEN_PROCESSOR = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 8, "merge_size": 2}
_QWEN_PROCESSOR |= {"temporal_patch_size": 2, "size": {"shortest_edge": 256, "longest_edge": 4096}}
_IDEFICS = {"image_processor_type": "Idefics3ImageProcessor", "size": {"longest_edge": 64}}
_IDEFICS |= {"max_image_size": {"longest_edge": 32}, "do_image_splitting": True}
FAMILIES = {
    "qwen2_5_vl": Family(
        {"rope_parameters": _rope([2, 3, 3])},
        {**_QWEN_VISION, "fullatt_block_indexes": [1], "window_size": 32},
        _QWEN_PROCESSOR,
        more=_QWEN_TOKENS,
    ),
    "qwen3_vl": Family(
        {"head_dim": 16, "rope_parameters": _rope([2, 3, 3], mrope_interleaved=True)},
        {**_QWEN_VISION, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
        _QWEN_PROCESSOR,
        more=_QWEN_TOKENS,
    ),
    "qwen3_5": Family(
        {
            "head_dim": 16,
            "num_hidden_layers": 4,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "rope_parameters": _rope([2, 1, 1], mrope_interleaved=True, partial_rotary_factor=0.5),
        },
        {**_QWEN_VISION, "num_position_embeddings": 64},
        _QWEN_PROCESSOR,
        more=_QWEN_TOKENS,
    ),
    "idefics3": Family(
        {"model_type": "llama"},
        {**_SIGLIP, "image_size": 32, "patch_size": 8, "initializer_range": 0.2},
        _IDEFICS,
        mark="<image>",
        more={"scale_factor": 2, "image_token_id": 307, "pad_token_id": 0},
    ),
    "lfm2_vl": Family(
        {"model_type": "lfm2", "num_hidden_layers": 4, "block_auto_adjust_ff_dim": False}
        | {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
        {**_SIGLIP, "model_type": "siglip2_vision_model", "num_patches": 16, "patch_size": 8},
        {},
        mark="<|image_pad|>",
        more={"downsample_factor": 2, "projector_hidden_size": 64},
    ),
    "gemma4": Family(
        {"head_dim": 16, "global_head_dim": 16, "num_hidden_layers": 3, "hidden_size_per_layer_input": 8}
        | {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "sliding_window": 16}
        | {"vocab_size_per_layer_input": 320, "num_kv_shared_layers": 0},
        {**_SIGLIP, "num_key_value_heads": 4, "head_dim": 8, "patch_size": 8}
        | {"pooling_kernel_size": 2, "position_embedding_size": 64},
        {},
        mark="<|image_pad|>",
        more={"audio_config": None, "video_token_id": 301},
    ),
    "gemma3": Family(
        {"head_dim": 16, "num_hidden_layers": 3, "sliding_window": 6}
        | {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
        {**_SIGLIP, "image_size": 32, "patch_size": 8, "initializer_range": 0.2, "vision_use_head": False},
        {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 32, "width": 32}},
        mark="<|vision_start|>",
        more={"mm_tokens_per_image": 4, "boi_token_index": 302, "eoi_token_index": 303, "image_token_index": 300},
    ),
}
FAMILIES["gemma4 both ways"] = replace(
    FAMILIES["gemma4"], text=FAMILIES["gemma4"].text | {"use_bidirectional_attention": "vision"}
)
_OF_PATCHES = {
    "lfm2_vl": lambda number: {
        "pixel_attention_mask": torch.ones(number, 16, dtype=torch.int64),
        "spatial_shapes": torch.tensor([[4, 4]] * number),
    },
    "gemma4": lambda number: {
        "image_position_ids": torch.cartesian_prod(torch.arange(4), torch.arange(4)).repeat(number, 1, 1)
    },
}


class ByHand:
    """Does what the processor of a family would, whose module needs torchvision: 16 patches and 4 tokens an image."""

    def __init__(self, name: str, tokenizer: Any) -> None:
        self.name, self.tokenizer, self.image_processor = name, tokenizer, self.pixels

    def pixels(self, images: Sequence[Any], **_: Any) -> dict[str, torch.Tensor]:
        patches = [np.asarray(image.resize((32, 32)), np.float32).reshape(4, 8, 4, 8, 3) for image in images]
        values = torch.tensor(np.stack([each.transpose(0, 2, 1, 3, 4).reshape(16, 192) for each in patches])) / 255
        return {"pixel_values": values, **_OF_PATCHES[self.name](len(images))}

    def __call__(self, text: Sequence[str], images: Any, **_: Any) -> dict[str, torch.Tensor]:
        flat = images[0] if isinstance(images[0], list) else images
        shown = text[0].replace("<|image_pad|>", "<|image_pad|>" * 4)
        ids_1P = torch.tensor([self.tokenizer(shown)["input_ids"]])
        types = {"mm_token_type_ids": (ids_1P == PLACEHOLDER).long()} if self.name == "gemma4" else {}
        return {"input_ids": ids_1P, **types, **self.pixels(flat)}


WIDE: dict[str, dict[str, Any]] = {
    "idefics3": {},
    "qwen2_5_vl": {"rope_parameters": _rope([4, 6, 6])},
    "qwen3_vl": {"head_dim": 32, "rope_parameters": _rope([4, 6, 6], mrope_interleaved=True)},
}
"""Changes of decoders with heads of 32 dimensions, which vLLM's kernels for CPUs ask for."""


def make_policy(name: str, folder: Path, wide: bool = False) -> str:
    """Save the small policy of a family with all that a policy's folder has; return the folder."""
    family = FAMILIES[name]
    wider = {"num_attention_heads": 2, "num_key_value_heads": 1, **WIDE[name]} if wide else {}
    more = {"image_token_id": PLACEHOLDER, "tie_word_embeddings": False, **(family.more or {})}
    config = AutoConfig.for_model(
        name.split()[0], text_config=_TEXT | family.text | wider, vision_config=family.vision, **more
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: Any = AutoModelForImageTextToText.from_config(config)
        for weight in model.parameters():
            if weight.dim() > 1:
                torch.nn.init.normal_(weight, 0, 0.2)
    model.generation_config.eos_token_id = 309
    model.save_pretrained(folder)
    alphabet = {character: number for number, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    added = [AddedToken(_ADDED.get(number, f"<{number}>"), special=True) for number in range(256, 310)]
    tokenizer.add_special_tokens(added)
    named = {"boi_token": "<|vision_start|>", "image_token": "<|image_pad|>", "eoi_token": "<|vision_end|>"}
    named = named if name == "gemma3" else {}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<256>", **named)
    fast.chat_template = _TEMPLATE.replace("MARK", family.mark)
    fast.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(family.processor))
    lengths = {"idefics3": "image_seq_len", "gemma3": "image_seq_length"}
    if name in lengths:  # tokens of an image of 32 x 32 pixels
        (folder / "processor_config.json").write_text(json.dumps({lengths[name]: 4}))
    return str(folder)


def load(folder: str, trained: bool = True) -> tuple[Any, Any, Vision]:
    """Return the model, which sees images, its tokenizer and its vision."""
    tokenizer = load_tokenizer(folder)
    model: Any = AutoModelForImageTextToText.from_pretrained(folder).eval()
    name = model.config.model_type
    if name in _OF_PATCHES:
        vision = Vision.__new__(Vision)
        vision._inner, vision._processor, vision.placeholder = model.model, ByHand(name, tokenizer), PLACEHOLDER
        vision.mutual, vision._token_types, vision.feature_token = mutual_of(model), "mm_token_type_ids", PLACEHOLDER
        vision._tokenizer, vision._known = tokenizer, {}
    else:
        vision = load_vision(folder, tokenizer)
    give_vision(model, vision, trained)
    return model, tokenizer, vision


def end_turns_soon(model: Any) -> None:
    """Make the token that ends a turn of a small Qwen3-VL likely."""
    with torch.no_grad():
        states_D = model.model.language_model(torch.arange(10, 200)[None]).last_hidden_state[0].mean(0)
        model.lm_head.weight[309] = states_D * (6 / states_D.pow(2).sum())


def png(width: int, height: int, seed: int) -> bytes:
    """Return the file of an image of noise."""
    from PIL import Image

    stream = io.BytesIO()
    pixels_HWC = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels_HWC).save(stream, "PNG")
    return stream.getvalue()


def read(vision: Vision, tokenizer: Any, name: str, text: str, images: Sequence[bytes]) -> Prompt:
    """Return a prompt of a text in which ``#`` stands for each image."""
    shown = text.replace("#", FAMILIES[name].mark)
    if not images:
        return Prompt(text, tuple(tokenizer(shown)["input_ids"]), shown)
    token_ids, pictures = vision.read(tokenizer(shown)["input_ids"], images)
    opened = [open_image(image) for image in images]
    assert vision._processor(text=[shown], images=[opened], return_tensors="pt")["input_ids"].tolist() == [token_ids]
    return Prompt(f"{text} {pictures.digest.hex()}", tuple(token_ids), shown, pictures=pictures)


def observation(vision: Vision, tokenizer: Any, name: str, text: str, images: Sequence[bytes]) -> Any:
    """Return the tokens and images of an observation; ``#`` stands for each image."""
    return vision.read(tokenizer(text.replace("#", FAMILIES[name].mark))["input_ids"], images)


def plain_logits(model: Any, vision: Vision, completion: Completion) -> torch.Tensor:
    """Return the logits (T, V) of a completion, by the model's own forward over what its processor gives."""
    prompt, token_ids_T = completion.request.prompt, completion.token_ids_T
    seen = [] if prompt.pictures is None else [prompt.pictures]
    seen += [each for _, each in completion.pictures]
    ids_1T = torch.tensor([[*prompt.token_ids, *token_ids_T.tolist()]])
    inputs: dict[str, Any] = {}
    if seen:
        opened = [open_image(image) for pictures in seen for image in pictures.images]
        mark = FAMILIES[model.config.model_type].mark
        inputs = dict(vision._processor(text=[mark * len(opened)], images=[opened], return_tensors="pt"))
        inputs["attention_mask"] = torch.ones_like(ids_1T)
        for kinds in inputs.keys() & {"mm_token_type_ids", "token_type_ids"}:
            inputs[kinds] = (ids_1T == PLACEHOLDER).int()
    logits_TV = model(**(inputs | {"input_ids": ids_1T})).logits[0, len(prompt.token_ids) - 1 : -1].clone()
    named = [vision.placeholder, *(getattr(model.config, f"{kind}_token_id", None) for kind in ("image", "video"))]
    logits_TV[:, [token for token in named if token is not None]] = -torch.inf
    return logits_TV
