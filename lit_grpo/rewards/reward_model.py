"""A reward model: a frozen sequence classifier with one label."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lit_grpo.limits import Count, checks_arguments
from lit_grpo.process.terminal import first_line
from lit_grpo.rewards.function import StatefulReward

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

_NO_LIMIT = 10**9  # tokenizers without a limit of tokens name one above this


class RewardModel(StatefulReward):
    """The logit of a frozen sequence classifier with one label, for a prompt followed by a completion.

    The text is made with the classifier's own chat template and tokenizer; a prompt that is a text is then the user's
    message. Without a chat template the two texts are joined. Nothing is truncated: a text that is longer than the
    model's context is an error of its completion. Only safetensors are read, and no code of the model is run.

    The group's texts are sorted by length and padded in batches of at most ``max_tokens_per_batch``. One group is
    scored at a time; the wait of the others counts in ``model.reward_timeout_s``.

    Args:
        model: A folder made by ``save_pretrained``, or a hub id.
        sigmoid: Return the sigmoid of the logit, from 0 to 1.
        device: The device, such as ``cpu`` or ``cuda:1``; by default the policy's.
        dtype: The dtype of the weights.
        max_tokens_per_batch: Max number of tokens of a batch with its padding; a longer text is a batch by itself.
        max_length: Max number of tokens of a text; by default the model's context.
        offload: Keep the weights in host memory between calls.
    """

    @checks_arguments()
    def __init__(
        self,
        model: str,
        sigmoid: bool = False,
        device: str | None = None,
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        max_tokens_per_batch: Count = 16_384,
        max_length: Count | None = None,
        offload: bool = False,
    ) -> None:
        import torch
        from transformers import AutoConfig

        from lit_grpo.policy.hub import hub_or_cache
        from lit_grpo.policy.tokenizers import read_tokenizer

        self.name, self.sigmoid, self.dtype, self.offload = model, sigmoid, dtype, offload
        self.max_tokens_per_batch = max_tokens_per_batch
        try:
            self._device = None if device is None else torch.device(device)
        except RuntimeError as error:
            raise ValueError(f"device {device!r} is none of torch's; write cpu, cuda or cuda:1.") from error
        with hub_or_cache(model):
            try:
                config = AutoConfig.from_pretrained(model, trust_remote_code=False)
                self.tokenizer: Any = read_tokenizer(model, model)
            except (OSError, ValueError) as error:
                raise _unusable(model, error) from error
        if config.num_labels != 1:
            raise ValueError(
                f"model {model!r} has {config.num_labels} labels, and a reward model has one; give a sequence "
                "classifier that was trained with num_labels 1."
            )
        context = getattr(config.get_text_config(), "max_position_embeddings", None) or _NO_LIMIT
        self.max_length = min(max_length or _NO_LIMIT, context, self.tokenizer.model_max_length)
        self._model: PreTrainedModel | None = None
        self._lock = threading.Lock()

    def begin(self, device: torch.device, folder: Path) -> None:
        """Load the weights."""
        self._device = self._device or device
        if self._model is None:
            self._model = self._load()
        self._model.to("cpu" if self.offload else self._device)  # pyrefly: ignore[bad-argument-type]

    def __call__(self, prompts: list[Any], completions: list[Any]) -> list[float | Exception]:
        """Score a group; a completion whose text is too long has an error in place of its value."""
        import torch

        with self._lock, torch.inference_mode():
            if self._model is None:
                self.begin(torch.device("cpu"), Path())
            assert self._model is not None
            self._model.to(self._device)  # pyrefly: ignore[bad-argument-type]
            try:
                return self._score(self._model, self._tokens(prompts, completions))
            finally:
                if self.offload:
                    self._model.to("cpu")  # pyrefly: ignore[bad-argument-type]

    def _load(self) -> PreTrainedModel:
        from transformers import AutoModelForSequenceClassification
        from transformers.utils.logging import disable_progress_bar

        from lit_grpo.policy.hub import hub_or_cache

        disable_progress_bar()  # one progress bar: the trainer's
        with hub_or_cache(self.name):
            try:
                loaded: Any = AutoModelForSequenceClassification.from_pretrained(
                    self.name, dtype=self.dtype, use_safetensors=True, trust_remote_code=False, output_loading_info=True
                )
            except (OSError, ValueError, RuntimeError) as error:
                raise _unusable(self.name, error) from error
        model, report = loaded
        if missing := sorted(report["missing_keys"]):
            raise ValueError(
                f"the files of model {self.name!r} lack {len(missing)} of the classifier's weights, such as "
                f"{missing[0]}, which would be random; give a trained reward model."
            )
        model.config.get_text_config().use_cache = False  # nothing is decoded
        return model.eval().requires_grad_(False)

    def _tokens(self, prompts: Sequence[Any], completions: Sequence[Any]) -> list[list[int]]:
        """Return the token ids of each prompt with its completion."""
        if self.tokenizer.chat_template is None:
            if not all(isinstance(each, str) for each in (*prompts, *completions)):
                raise ValueError(
                    f"the prompt is a conversation, and model {self.name!r} has no chat template; save its tokenizer "
                    "with one, or take another model"
                )
            texts = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
            return self.tokenizer(texts)["input_ids"]
        conversations = [
            [*_messages("user", prompt), *_messages("assistant", completion)]
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        texts = [self.tokenizer.apply_chat_template(each, tokenize=False) for each in conversations]
        return self.tokenizer(texts, add_special_tokens=False)["input_ids"]

    def _score(self, model: PreTrainedModel, rows: list[list[int]]) -> list[float | Exception]:
        values: list[float | Exception] = [
            ValueError(
                f"prompt and completion have {len(row):,} tokens, and reward model {self.name!r} reads 1 to "
                f"{self.max_length:,}; lower model.sampling.max_tokens, or leave out the row"
            )
            for row in rows
        ]
        usable = [place for place, row in enumerate(rows) if 0 < len(row) <= self.max_length]
        for places in _batches(usable, [len(row) for row in rows], self.max_tokens_per_batch):
            logits_B = self._forward(model, [rows[place] for place in places])
            for place, value in zip(places, (logits_B.sigmoid() if self.sigmoid else logits_B).tolist(), strict=True):
                values[place] = value
        return values

    def _forward(self, model: PreTrainedModel, rows: list[list[int]]) -> torch.Tensor:
        """Return the logits (B) of rows that are padded on the right."""
        import torch

        config = model.config.get_text_config()
        pad, own = config.pad_token_id, config.pad_token_id
        if pad is None:  # the classifier takes the last token that is not the padding's: a token that no row holds
            seen = set().union(*rows)
            pad = next(token for token in range(len(seen) + 1) if token not in seen)
        longest = max(map(len, rows))
        ids_BT = torch.tensor([row + [pad] * (longest - len(row)) for row in rows], device=self._device)
        mask_BT = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows], device=self._device)
        config.pad_token_id = pad
        try:
            return model(input_ids=ids_BT, attention_mask=mask_BT).logits[:, 0].float()
        finally:
            config.pad_token_id = own


def _messages(role: str, said: Any) -> list[Any]:
    return [{"role": role, "content": said}] if isinstance(said, str) else said


def _batches(places: list[int], lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Yield batches of places in the order of their lengths, each of at most ``max_tokens`` with its padding.

    For lengths 3, 5, 4 and ``max_tokens`` 8: [0, 2], [1].
    """
    batch: list[int] = []
    for place in sorted(places, key=lengths.__getitem__):
        if batch and lengths[place] * (len(batch) + 1) > max_tokens:
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch


def _unusable(name: str, error: Exception) -> ValueError:
    if "trust_remote_code" in str(error):
        return ValueError(f"model {name!r} needs code of its own, which is never run; take another reward model.")
    return ValueError(
        f"model {name!r} cannot be loaded ({first_line(error)}); give a folder or hub id of a sequence classifier in "
        "safetensors."
    )
