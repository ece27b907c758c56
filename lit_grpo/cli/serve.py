"""``python -m lit_grpo serve``: a vLLM server that VLLMServerGenerator can be pointed at."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


_DESCRIPTION = """Start a vLLM server for a policy, on loopback unless told otherwise, and keep it up until Ctrl-C.
It begins with no weights and takes those that a run sends it. What is not known here is handed to vLLM, for example
--tensor-parallel-size 2 or --kv-cache-memory-bytes 1000000000."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse, start and wait."""
    parser = argparse.ArgumentParser("python -m lit_grpo serve", description=_DESCRIPTION)
    parser.add_argument("--policy", default="tiny", help="tiny, a folder made by save_pretrained, or a hub id")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--host", default="127.0.0.1", help="the routes that load weights have no password")
    parser.add_argument("--num-slots", type=int, default=64, help="completions decoded at a time")
    parser.add_argument("--dtype", default="auto", help="what it computes in; auto is the policy's own")
    parser.add_argument("--max-lora-rank", type=int, help="take LoRA adapters alone, up to this rank")
    options, others = parser.parse_known_args(arguments)
    try:
        sys.exit(_serve(options, others))
    except ValueError as error:
        from lit_grpo.cli.errors import exit_with

        exit_with(str(error))


def _serve(options: argparse.Namespace, others: list[str]) -> int:
    from lit_grpo.policy import load_policy, load_tokenizer
    from lit_grpo.policy.spec import PolicySpec
    from lit_grpo.rollout.vllm.arguments import lora_arguments, require_vllm, server_arguments, server_environment
    from lit_grpo.rollout.vllm.process import ServerProcess

    require_vllm()
    with tempfile.TemporaryDirectory(prefix="lit_grpo_vllm_") as name:
        folder = Path(name)
        policy = load_policy(options.policy)
        PolicySpec(policy, load_tokenizer(options.policy)).save_skeleton(folder)
        dtype = str(policy.dtype).removeprefix("torch.") if options.dtype == "auto" else options.dtype
        arguments = server_arguments(dtype, options.num_slots)
        if options.max_lora_rank is not None:
            arguments |= lora_arguments(options.max_lora_rank)
        server = ServerProcess(
            folder, arguments, server_environment(), folder / "server.log", options.host, options.port, others
        )
        signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
        try:
            server.wait(time.monotonic() + 600.0)
            print(f"Ready: --model.generator.init_args.urls '[\"{server.url}\"]'", flush=True)
            return server.process.wait()
        except KeyboardInterrupt:
            return 0
        finally:
            server.stop()
