"""``python -m lit_grpo serve``: starts a vLLM server for VLLMServerGenerator."""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


_DESCRIPTION = """Start a vLLM server for a policy, by default on loopback, and keep it running until Ctrl-C or SIGTERM.
The server begins without weights and takes those that a run sends. It answers only requests with its token: that in
the environment variable LIT_GRPO_SERVER_TOKEN, or a new one, which is written to a private file. Other options are
handed to vLLM, for example --tensor-parallel-size 2 or --kv-cache-memory-bytes 1000000000."""
_STOPS = (signal.SIGTERM, signal.SIGINT)
_START_S = 600.0
_MIN_TOKEN = 16


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the arguments, start the server and wait for its end."""
    parser = argparse.ArgumentParser("python -m lit_grpo serve", description=_DESCRIPTION)
    parser.add_argument("--policy", default="tiny", help="tiny, a folder made by save_pretrained, or a hub id")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on; the token is sent unencrypted")
    parser.add_argument("--num-slots", type=int, default=64, help="completions decoded at a time")
    parser.add_argument("--dtype", default="auto", help="the dtype of computations; auto is the policy's own")
    parser.add_argument("--max-lora-rank", type=int, help="take LoRA adapters without base weights, up to this rank")
    parser.add_argument(
        "--vision", action="store_true", help="serve the policy's vision tower, for prompts with images"
    )
    options, others = parser.parse_known_args(arguments)
    for number in _STOPS:  # a shell without a terminal starts background processes with SIGINT ignored
        signal.signal(number, lambda *_: sys.exit(0))
    from lit_grpo.cli.parsing.sentences import exit_with

    try:
        exit_with(_serve(options, others), code=1)  # the code of an engine's end by itself may be 0
    except ValueError as error:
        exit_with(str(error))


def _serve(options: argparse.Namespace, others: list[str]) -> str:
    """Start a server and wait for its end, which nobody has asked for; return why it came."""
    import torch

    from lit_grpo.policy import load_policy, load_tokenizer
    from lit_grpo.policy.architecture.vision import give_vision
    from lit_grpo.policy.loading import load_vision
    from lit_grpo.policy.spec import PolicySpec
    from lit_grpo.process.files import PrivateFolder
    from lit_grpo.rollout.vllm.arguments import lora_arguments, require_vllm
    from lit_grpo.rollout.vllm.fleet import wait_for
    from lit_grpo.rollout.vllm.guard import TOKEN_VARIABLE
    from lit_grpo.rollout.vllm.process import ServerPlan

    require_vllm()
    token, is_users = _token(os.environ.get(TOKEN_VARIABLE, ""))
    given: dict[str, Any] = {} if options.dtype == "auto" else {"dtype": options.dtype}
    if options.max_lora_rank is not None:
        given |= lora_arguments(options.max_lora_rank)
    if on_gpu := torch.cuda.is_available():
        given |= {"weight_transfer_config": {"backend": "nccl"}}
    model, tokenizer = load_policy(options.policy, vision=options.vision), load_tokenizer(options.policy)
    if options.vision:
        give_vision(model, load_vision(options.policy, tokenizer))
    policy = PolicySpec(model, tokenizer)
    plan = ServerPlan(policy, options.num_slots, given, on_gpu, flags=others)
    folder = PrivateFolder("lit_grpo_vllm_")
    policy.save_skeleton(folder.path)
    server = plan.start(folder.path, token, host=options.host, port=options.port)
    try:
        print(f"Starting; the log is {server.log}", flush=True)
        wait_for(server, time.monotonic() + _START_S)
        if not is_users:
            file = folder.path / "token"
            file.touch(mode=0o600)
            file.write_text(token)
            print(f'Token: export {TOKEN_VARIABLE}="$(cat {file})"', flush=True)
        print(f"Ready: --model.generator.init_args.urls '[\"{server.url}\"]'", flush=True)
        server.process.wait()
        return server.failure()
    finally:
        for number in _STOPS:
            signal.signal(number, signal.SIG_IGN)  # the server is being stopped already
        server.stop()


def _token(given: str) -> tuple[str, bool]:
    """Return the server's token, and whether the user has set it, who may have set one that is easy to guess."""
    if given and (len(given) < _MIN_TOKEN or not given.isascii() or not given.isprintable() or " " in given):
        raise ValueError(
            f"LIT_GRPO_SERVER_TOKEN must be at least {_MIN_TOKEN} ASCII characters without spaces; take that of "
            "openssl rand -hex 32, or unset it, and serve makes one."
        )
    return given or secrets.token_hex(32), bool(given)
