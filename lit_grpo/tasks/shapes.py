"""Pictures of shapes in a grid, and how many of them are of a kind: a task for policies that see images."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from lit_grpo.process.packages import require
from lit_grpo.tasks.drawn import DrawnRows, Split, split_of

if TYPE_CHECKING:
    from PIL.Image import Image

KINDS = {"c": "circles", "s": "squares", "t": "triangles"}
"""Kinds of shapes by the letter that stands for them; a free cell is ``.``."""
SIDE, CELL = 3, 16
"""Cells in a row, and pixels in a cell's."""
_COLORS = ("#c0392b", "#2471a3", "#1e8449", "#b7950b", "#7d3c98")


class ShapesRows(DrawnRows):
    """Pictures of three by three cells: rows with ``prompt``, ``image``, ``answer`` and ``cells``.

    The prompt is a conversation of one message, the picture and ``How many circles?``. ``cells`` are the letters of the
    cells in reading order, such as ``c.s..tc.c``, of which the embedded policy ``tiny_shapes`` knows how to make use.

    Args:
        num_rows: Number of pictures to draw.
        split: Split of the pictures: ``train`` or ``validation``; no arrangement of cells is in both.
        seed: Seed of the draw of pictures from the split.

    Raises:
        ValueError: Pillow is not installed.
    """

    def __init__(self, num_rows: int = 2048, split: Split = "train", seed: int = 0) -> None:
        require("PIL", "The task of shapes draws its pictures with Pillow; run pip install pillow.")
        super().__init__(num_rows, split, seed)

    def key(self, row: dict[str, Any]) -> str:
        return f"{row['cells']} {row['prompt'][0]['content'][1]['text']}"

    def draw(self, rng: random.Random) -> dict[str, Any]:
        while True:
            cells = "".join(rng.choices("".join(KINDS) + ".", (3, 2, 2, 3), k=SIDE**2))
            if split_of(cells) == self.split:
                break
        kind = rng.choice(list(KINDS))
        content = [{"type": "image"}, {"type": "text", "text": f"How many {KINDS[kind]}?"}]
        return {
            "prompt": [{"role": "user", "content": content}],
            "image": draw_picture(cells, rng),
            "answer": str(cells.count(kind)),
            "cells": cells,
        }


def draw_picture(cells: str, rng: random.Random) -> Image:
    """Draw the picture of cells; sizes, places in a cell and colors are random."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (SIDE * CELL, SIDE * CELL), "white")
    draw = ImageDraw.Draw(image)
    for number, kind in enumerate(cells):
        size = rng.randint(8, 11)
        left = number % SIDE * CELL + rng.randint(1, CELL - size - 2)
        top = number // SIDE * CELL + rng.randint(1, CELL - size - 2)
        box, color = (left, top, left + size, top + size), rng.choice(_COLORS)
        if kind == "c":
            draw.ellipse(box, fill=color)
        elif kind == "s":
            draw.rectangle(box, fill=color)
        elif kind == "t":
            draw.polygon([(left, top + size), (left + size, top + size), (left + size // 2, top)], fill=color)
    return image
