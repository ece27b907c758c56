"""What GGUF files of finished runs cost: log-probs beside the policy's, agreement of the likeliest token, and size.

Three policies: that of a short run of the demo, SmolLM2-135M-Instruct (``python -m lit_grpo smollm2``), and that of a
short LoRA run of SmolLM2, merged. The runs are those of the commands ``fit`` and ``finish``. Each file is opened again
by transformers as float32 numbers, and both models read the same texts: the prompts and completions that the run has
kept, and for SmolLM2 alone solved word problems. What an engine computes with in place of float32, such as 8-bit
activations, comes on top.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.report import Claim, Options, Row, finish, need, note, parse_options
from benchmarks.teachers import solved
from lit_grpo.policy.loading import load_policy, load_tokenizer
from lit_grpo.policy.named import resolve_policy
from lit_grpo.tasks import WordProblemRows

KINDS = ("f32", "q8_0")
NUM_TEXTS, MAX_TOKENS = 16, 256
DEMO = ("arithmetic", "--trainer.val_check_interval", "100000", "--data.validation.init_args.num_rows", "8")
LORA = ("word_problems_lora", "--data.validation.init_args.num_rows", "8")


def main(options: Options) -> int:
    """Make the files and compare them."""
    need("gguf")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as place:
        for name, folder in policies(Path(place), options.quick):
            rows += compare(name, folder)
            note(f"{name}: {rows[-1]['mean_nats']:.2g} nats")
    exact, rounded = ([row for row in rows if row["file"] == kind] for kind in KINDS)
    claims = [
        Claim("largest difference of log-probs of f32, nats", max(float(row["max_nats"]) for row in exact), "<=", 1e-5),
        Claim("largest mean KL divergence of q8_0, nats", max(float(row["kl_nats"]) for row in rounded), "<=", 0.01),
        Claim("size of q8_0 by that of f32, at most", max(float(row["of_f32"]) for row in rounded), "<=", 0.3),
    ]
    settings: Row = {"texts": NUM_TEXTS, "tokens_per_text_at_most": MAX_TOKENS}
    return finish("gguf_logprobs", options, settings, rows, claims)


def policies(place: Path, quick: bool) -> Iterator[tuple[str, Path]]:
    """Yield the name and the folder of each policy, with its GGUF files in it."""
    yield "demo", run(place, *DEMO, "--trainer.max_steps", "1" if quick else "20")
    if quick:
        yield "demo, LoRA", run(place, *DEMO, "--trainer.max_steps", "1", "--model.lora.r", "4", "--run.name", "lora")
        return
    from lit_grpo.tools.finishing.gguf_writer import write_gguf

    folder, base = place / "smollm2", Path(resolve_policy("smollm2"))
    folder.mkdir()
    for path in base.iterdir():
        (folder / path.name).symlink_to(path)
    for kind in KINDS:
        write_gguf(folder, folder / f"smollm2-{kind}.gguf", kind, "SmolLM2-135M-Instruct", "apache-2.0")
    yield "SmolLM2", folder
    yield "SmolLM2, LoRA", run(place, *LORA, "--trainer.max_steps", "4", "--trainer.val_check_interval", "100000")


def run(place: Path, config: str, *arguments: str) -> Path:
    """Train and finish a run by the commands; return the finished folder."""
    name = arguments[arguments.index("--run.name") + 1] if "--run.name" in arguments else config
    fit = ("fit", "--config", config, *arguments, "--run.dir", str(place), "--sample_logger.every_n_updates", "1")
    for command in (fit, ("finish", str(place / name), "--gguf", *KINDS)):
        done = subprocess.run([sys.executable, "-m", "lit_grpo", *command], capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(command)}: {done.stderr}")
    return place / name / "finished"


def texts_of(folder: Path) -> list[str]:
    """Return the texts that both models read: those that the run has kept, or else solved word problems."""
    samples = folder.parent / "samples.jsonl"
    if samples.is_file():
        rows = [json.loads(line) for line in samples.read_text().splitlines()][-NUM_TEXTS:]
        return [f"{row['prompt']}{row['completion']}" for row in rows]
    tokenizer = load_tokenizer(str(folder))
    problems = [solved(row) for row in WordProblemRows(NUM_TEXTS, split="validation").rows()]
    return [
        f"{tokenizer.apply_chat_template(row['prompt'], tokenize=False, add_generation_prompt=True)}{row['solution']}"
        for row in problems
    ]


@torch.no_grad()
def compare(name: str, folder: Path) -> list[Row]:
    """Return a row for each GGUF file of a folder."""
    tokenizer, policy = load_tokenizer(str(folder)), load_policy(str(folder)).eval()
    texts = texts_of(folder)
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"][:MAX_TOKENS] for text in texts]
    whole = sum(path.stat().st_size for path in folder.glob("*-f32.gguf"))
    rows: list[Row] = []
    for kind in KINDS:
        (path,) = folder.glob(f"*-{kind}.gguf")
        again, splits = load_policy(str(path)).eval(), load_tokenizer(str(path))
        apart, kl, same = [], [], []
        for ids_T in map(torch.tensor, ids):
            ours_TV, theirs_TV = (
                model(input_ids=ids_T[None], use_cache=False).logits[0, :-1].double().log_softmax(-1)
                for model in (policy, again)
            )
            taken_T1 = ids_T[1:, None]
            apart.append((ours_TV.gather(-1, taken_T1) - theirs_TV.gather(-1, taken_T1)).abs()[:, 0])
            kl.append((ours_TV.exp() * (ours_TV - theirs_TV)).sum(-1))
            same.append((ours_TV.argmax(-1) == theirs_TV.argmax(-1)).double())
        split = [splits(text, add_special_tokens=False)["input_ids"][:MAX_TOKENS] for text in texts]
        rows.append(
            {
                "policy": name,
                "file": kind,
                "tokens": sum(map(len, apart)),
                "mean_nats": float(torch.cat(apart).mean()),
                "max_nats": float(torch.cat(apart).max()),
                "kl_nats": float(torch.cat(kl).mean()),
                "same_best_token": float(torch.cat(same).mean()),
                "texts_split_alike": sum(one == other for one, other in zip(split, ids, strict=True)) / len(ids),
                "megabytes": path.stat().st_size / 1e6,
                "of_f32": path.stat().st_size / whole,
            }
        )
    return rows


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main(parse_options(__doc__ or "")))
