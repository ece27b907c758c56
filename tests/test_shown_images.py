"""The images of prompts where people see samples: the terminal, files, W&B, the report, and the check-up."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import table_rows
from made_runs import make_run
from PIL import Image
from seeing import png
from test_sample_logger import Heard, log

from lit_grpo.callbacks import SampleLogger
from lit_grpo.data.rendering import PromptRenderer
from lit_grpo.display.pictures import SIDE, from_data_url, last_turn, strip
from lit_grpo.policy.architecture.vision import read_image
from lit_grpo.policy.loading import load_tokenizer, load_vision
from lit_grpo.policy.named import TINY_SHAPES
from lit_grpo.tools.dashboard.report import read_folder, write_report
from lit_grpo.types import Pictures, Prompt


def saved(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def turned(tag: Any) -> bytes:
    image = Image.new("RGB", (200, 100), "red")
    exif = image.getexif()
    exif[0x0112] = tag
    return saved(image, "JPEG", exif=exif)


RED = Image.new("RGB", (200, 100), "red")
KINDS: dict[str, tuple[Callable[[], bytes], tuple[int, int]]] = {
    "photo on its side": (lambda: turned(6), (48, 96)),
    "photo turned in no known way": (lambda: turned(77), (96, 48)),
    "half transparent": (lambda: saved(Image.new("RGBA", (200, 100), (255, 0, 0, 128))), (96, 48)),
    "palette": (lambda: saved(RED.quantize(4)), (96, 48)),
    "palette with a transparent color": (lambda: saved(RED.quantize(4), transparency=0), (96, 48)),
    "gray of 16 bits": (lambda: saved(Image.fromarray(np.full((100, 200), 40_000, np.uint16))), (96, 48)),
    "two colors": (lambda: saved(Image.new("1", (200, 100), 1)), (96, 48)),
    "inks of print": (lambda: saved(RED.convert("CMYK"), "JPEG"), (96, 48)),
    "animated": (lambda: saved(RED, "GIF", save_all=True, append_images=[Image.new("RGB", (200, 100))]), (96, 48)),
    "broken EXIF": (lambda: saved(RED, "JPEG", exif=b"Exif\0\0MM\0*\0\0\0\x08\xff\xff\x01\x12"), (96, 48)),
    "one pixel": (lambda: saved(Image.new("RGB", (1, 1))), (1, 1)),
    "a line": (lambda: saved(Image.new("RGB", (20_000, 1))), (96, 1)),
    "huge": (lambda: saved(Image.new("RGB", (8192, 8192))), (96, 96)),
}


@pytest.mark.parametrize("kind", table_rows(KINDS, ["photo on its side", "half transparent"]))
def test_any_image_is_shown_in_small_as_the_policy_gets_it(kind: str) -> None:
    make, size = KINDS[kind]
    data = read_image(make(), "it")
    shown = from_data_url(strip(Pictures((data,), b"")))
    assert shown.size == size and len(strip(Pictures((data,), b""))) < 60_000
    if kind in ("palette", "animated", "broken EXIF", "photo on its side"):
        assert np.abs(np.asarray(shown, int) - (255, 0, 0)).max() < 4


def test_images_of_a_prompt_stand_beside_each_other() -> None:
    shown = from_data_url(strip(Pictures(tuple(png(300, 200, seed) for seed in range(6)), b"")))
    assert shown.size == (4 * SIDE + 3 * 4, 64)
    gap_HW3 = np.asarray(shown)[:, SIDE : SIDE + 4]
    assert gap_HW3.min() > 240


HOSTILE = "<script>alert(1)</script>\x1b[2J"


@pytest.fixture(scope="module")
def prompt() -> Prompt:
    tokenizer = load_tokenizer(TINY_SHAPES)
    renderer = PromptRenderer(image_column="image", vision=load_vision(TINY_SHAPES, tokenizer))
    part, text = {"type": "image"}, {"type": "text", "text": "How many circles?"}
    first = {"role": "user", "content": [{**part, "bytes": png(40, 30, 2)}, text]}
    content = [part, text, {**part, "image": Image.open(io.BytesIO(png(64, 48, 1)))}]
    row: dict[str, Any] = {
        "prompt": [first, {"role": "assistant", "content": "=2"}, {"role": "user", "content": content}],
        "image": png(48, 48, 0),
        "answer": "2",
        "caption": HOSTILE,
    }
    rendered = renderer.render(row, tokenizer)
    return Prompt("train/0", rendered.token_ids, rendered.text, row, messages=rendered.messages,
                  pictures=rendered.pictures)  # fmt: skip


def test_a_terminal_names_the_images_of_the_last_turn_by_their_sizes(
    prompt: Prompt, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert last_turn(prompt) == "[image 48x48] How many circles?[image 64x48] "
    log(SampleLogger(num_samples=1), prompt, 1, tmp_path)
    assert "[image 48x48] How many circles?[image 64x48]" in capsys.readouterr().out


def test_files_and_wandb_have_small_pictures_and_no_bytes_of_the_data(prompt: Prompt, tmp_path: Path) -> None:
    import wandb

    logger = Heard()
    log(SampleLogger(num_samples=1), prompt, 7, tmp_path, [logger])
    log(SampleLogger(num_samples=1), Prompt("train/1", (3,), "1", {"answer": "2"}), 8, tmp_path, [logger])
    lines = (tmp_path / "samples.jsonl").read_text().splitlines()
    row, of_text = map(json.loads, lines)
    assert from_data_url(row["prompt_images"]).size == (40 + 4 + 48 + 4 + 64, 48)
    assert row["columns/image"] == "[image]" and r"\x89PNG" not in lines[0] and "PIL" not in lines[0]
    assert "prompt_images" not in of_text
    with_images, without = (said["samples"] for said in logger.said)
    place = with_images.columns.index("prompt_images")
    assert isinstance(with_images.data[0][place], wandb.Image) and "prompt_images" not in without.columns


def test_a_report_shows_the_pictures_and_refuses_what_is_none(prompt: Prompt, tmp_path: Path) -> None:
    assert prompt.pictures is not None
    run, url = make_run(tmp_path / "seeing", 2), strip(prompt.pictures)
    row = {"step": 1, "prompt_id": "train/0", "prompt": HOSTILE, "completion": "=2", "reward": 1.0}
    bad = ["javascript:alert(1)", "data:text/html;base64,PGI+", url + '" onload="alert(1)', url * 100]
    rows = [{**row, "prompt_images": url}, *({**row, "step": 2, "prompt_images": each} for each in bad)]
    for table in ("samples", "val_samples"):
        (run / f"{table}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    page = tmp_path / "page.html"
    write_report(run, page)
    text = page.read_text()
    assert url in text and "<script>alert(1)" not in text and not re.search(r"onload=.{0,2}alert", text)
    records = read_folder(run)
    for rows in (records.samples, records.validated):
        assert [row.get("prompt_images") for row in rows] == [url]
