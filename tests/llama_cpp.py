"""llama.cpp itself, in a process of its own: its server answers about GGUF files.

The server comes with the package xllamacpp, which another Python may have: the environment variable
``LIT_GRPO_LLAMA_CPP`` names that Python, and this file runs in it as a script.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

VARIABLE = "LIT_GRPO_LLAMA_CPP"
MISSING = f"llama.cpp is not here: install the package xllamacpp, or name a Python that has it in {VARIABLE}"


def python() -> str | None:
    """The Python that has llama.cpp; None if there is none."""
    here = sys.executable if importlib.util.find_spec("xllamacpp") else None
    return os.environ.get(VARIABLE) or here


def ask(path: Path, questions: Sequence[tuple[str, dict[str, Any]]], adapter: Path | None = None) -> list[Any]:
    """Open a GGUF file with llama.cpp, and return the answers of its server.

    Args:
        path: The file.
        questions: Paths of the server with their bodies, such as ``("/tokenize", {"content": "a"})``.
        adapter: The file of a LoRA adapter, which is added to the model.

    Raises:
        ValueError: llama.cpp cannot load the file, or cannot answer.
    """
    given = json.dumps({"path": str(path), "questions": questions, "adapter": adapter and str(adapter)})
    ran = subprocess.run([str(python()), __file__], input=given, capture_output=True, text=True, timeout=120)
    if ran.returncode:
        raise ValueError(f"llama.cpp failed on {path.name}: {ran.stderr[-2000:]}")
    return json.loads(ran.stdout.splitlines()[-1])


def logprobs(path: Path, ids: Sequence[int], num_rows: int, adapter: Path | None = None) -> list[list[float]]:
    """Return the log-probs of all tokens after each beginning of a text, shape (tokens, vocabulary).

    Args:
        path: The GGUF file of a model.
        ids: The text's tokens; the first is neither an end token nor a part of a character.
        num_rows: The number of tokens of the vocabulary.
        adapter: As in :func:`ask`.
    """
    wanted = {"n_predict": 1, "n_probs": num_rows, "logit_bias": [[ids[0], 1e9]]}  # the log-probs are without the bias
    begun = [("/completion", {"prompt": list(ids[: end + 1]), **wanted}) for end in range(len(ids))]
    found = []
    for answer in ask(path, begun, adapter):
        (token,) = answer["completion_probabilities"]
        of_token = {each["id"]: each["logprob"] for each in token["top_logprobs"]}
        found.append([of_token[row] for row in range(num_rows)])
    return found


def main() -> None:
    """Answer the questions of standard input."""
    import xllamacpp  # pyrefly: ignore[missing-import]

    told = json.load(sys.stdin)
    options = xllamacpp.CommonParams()
    options.model.path, options.n_ctx, options.n_parallel, options.warmup = told["path"], 256, 1, False
    options.cache_type_k = options.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32  # attention rounds else to 16 bits
    options.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    if told["adapter"]:
        adapter = xllamacpp.CommonAdapterLoraInfo()
        adapter.path, adapter.scale = told["adapter"], 1.0
        options.lora_adapters = [adapter]
    options.cpuparams.n_threads, options.n_threads_http, options.port = 1, 1, 0
    server = xllamacpp.Server(options)
    found = []
    for path, body in told["questions"]:
        request = urllib.request.Request(
            server.listening_address + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            found.append(json.load(answer))
    sys.stdout.flush()
    print("\n" + json.dumps(found), flush=True)
    os._exit(0)  # the server's threads do not end by themselves


if __name__ == "__main__":
    main()
