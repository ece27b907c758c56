"""Makes ``tiny_shapes``, an embedded policy that sees images: ``python -m scripts.make_shapes [FOLDER]``.

As :mod:`scripts.make_tiny`: first answers that go through the cells of a picture (``c.s..tc.c=4``), then a crowd most
of whom guess (``=2``). What comes out mostly guesses, and counts right if it goes through the cells. It is an Idefics 3
of half a million parameters: a cell is one token of its image, and questions and letters are tokens too.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import Idefics3Config, Idefics3ForConditionalGeneration

from lit_grpo.policy.loading import load_tokenizer, load_vision
from lit_grpo.policy.named import NAMED, TINY_SHAPES
from lit_grpo.tasks.shapes import CELL, KINDS, SIDE, ShapesRows
from scripts.make_calculator import make_tokenizer
from scripts.make_tiny import EOS_ID, PAD_ID, read_folder

IMAGE, AROUND, WHOLE, END = "<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"
PIECES = (IMAGE, AROUND, WHOLE, END, *(f"How many {name}?" for name in KINDS.values()))
CHARACTERS = "".join(KINDS) + ".=:0123456789"
TEMPLATE = (
    "{% for message in messages %}{{ ':' if message.role == 'assistant' }}"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}{% endif %}"
    "{{ '<eos>' if message.role == 'assistant' }}{% endfor %}{{ ':' if add_generation_prompt }}"
)
PROCESSOR = {
    "image_processor_type": "Idefics3ImageProcessor",
    "size": {"longest_edge": SIDE * CELL},
    "max_image_size": {"longest_edge": SIDE * CELL},
    "do_image_splitting": False,
}
NUM_STEPS, CROWD_STEPS, BATCH, HASTY = 260, 50, 48, 0.75
LEARNING_RATE, MATRIX_LEARNING_RATE = 3e-3, 0.01


def new_model(vocab_size: int, image_token_id: int) -> Any:
    """Make the model with random weights."""
    text = {"model_type": "llama", "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": vocab_size}
    text |= {"max_position_embeddings": 128, "bos_token_id": None, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    tower = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
    tower |= {"image_size": SIDE * CELL, "patch_size": CELL // 2}
    more: dict[str, Any] = {"image_token_id": image_token_id, "scale_factor": 2, "pad_token_id": PAD_ID}
    config = Idefics3Config(text_config=text, vision_config=tower, tie_word_embeddings=True, **more)
    torch.manual_seed(0)
    model: Any = Idefics3ForConditionalGeneration(config)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = EOS_ID, PAD_ID
    return model


def lessons() -> Iterator[list[tuple[dict[str, Any], str]]]:
    """Yield the rows of each step with their answers."""
    rng, task = random.Random(0), ShapesRows()
    for step in range(NUM_STEPS):
        rows = [task.draw(rng) for _ in range(BATCH)]
        whole = step < NUM_STEPS - CROWD_STEPS
        yield [(row, demonstration(row, rng, 0.0 if whole else HASTY)) for row in rows]


def demonstration(row: dict[str, Any], rng: random.Random, hasty: float) -> str:
    """Return an answer: a guess, or the cells and their number."""
    if rng.random() < hasty:
        return f"={rng.choices(range(7), (1, 3, 4, 3, 2, 1, 1))[0]}"
    return f"{row['cells']}={row['answer']}"


def warm_start(model: Any, folder: Path) -> None:
    """Train the model in place, the loss on answers only."""
    tokenizer = load_tokenizer(str(folder))
    vision = load_vision(str(folder), tokenizer)
    matrices = [weight for name, weight in model.named_parameters() if weight.dim() == 2 and "embed" not in name]
    others = [weight for name, weight in model.named_parameters() if weight.dim() != 2 or "embed" in name]
    optimizers = {
        torch.optim.Muon(matrices, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"): MATRIX_LEARNING_RATE,
        torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0): LEARNING_RATE,
    }
    for step, rows in enumerate(lessons()):
        texts = [IMAGE + row["prompt"][0]["content"][1]["text"] + ":" for row, _ in rows]
        inputs = dict(vision._processor(text=texts, images=[[row["image"]] for row, _ in rows], return_tensors="pt"))
        answers = [[*tokenizer(answer)["input_ids"], EOS_ID] for _, answer in rows]
        longest, prompts_BP = max(map(len, answers)), inputs.pop("input_ids")
        targets_BT = torch.tensor([[*ids, *[-100] * (longest - len(ids))] for ids in answers])
        ids_BT = torch.cat([prompts_BP, targets_BT.clamp(min=0)], 1)
        inputs["attention_mask"] = torch.ones_like(ids_BT)
        logits_BTV = model(input_ids=ids_BT, **inputs).logits[:, prompts_BP.shape[1] - 1 : -1]
        loss = torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        share = min(1.0, (step + 1) / 30) * (1.02 - step / NUM_STEPS)
        for optimizer, peak in optimizers.items():
            optimizer.param_groups[0]["lr"] = peak * share
            optimizer.step()
        if step % 50 == 49:
            print(f"step {step + 1}: loss {float(loss.detach()):.3f}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Make it on one thread."""
    folder: Path = read_folder("make_shapes", NAMED[TINY_SHAPES].folder, arguments)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(CHARACTERS, PIECES, TEMPLATE)
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE, AROUND, WHOLE, END]})
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR, indent=1))
    (folder / "processor_config.json").write_text('{"image_seq_len": 9}\n')
    model = new_model(len(tokenizer), tokenizer.get_vocab()[IMAGE])
    model.save_pretrained(folder)
    warm_start(model, folder)
    model.save_pretrained(folder)
    print(f"{folder}: made, {model.num_parameters():,} parameters; configs/shapes.yaml trains it.")


if __name__ == "__main__":
    main()
