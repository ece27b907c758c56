"""Servers whose owner, front end or engine ends in every way: nothing of them is left 10 seconds later.

Owners are a program with a server of its own, ``serve``, and a program with a server in an actor of Ray.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hand_made import save_policy_for_vllm
from test_serve import Serving, free_port  # pyright: ignore[reportMissingImports]

from lit_grpo.process.files import PrivateFolder
from lit_grpo.rollout.weights.files import WEIGHTS_PREFIX

ROOT = Path(__file__).parents[2]
SOON_S = 10.0
OWNER = """
import json, sys, warnings
from hand_made import SERVER_ARGUMENTS
from lit_grpo.policy.loading import load_policy, load_tokenizer
from lit_grpo.policy.spec import PolicySpec
from lit_grpo.rollout.loop import RolloutLoop
from lit_grpo.rollout.vllm.server import VLLMServerGenerator
from lit_grpo.types import Prompt, SamplingParams

folder, options = sys.argv[1], json.loads(sys.argv[2])
policy = PolicySpec(load_policy(folder).eval(), load_tokenizer(folder))
generator = VLLMServerGenerator(2, server_args=SERVER_ARGUMENTS, weights_folder=folder, **options)
print("starts", flush=True)
generator.start(policy)
print("begins", flush=True)
generator.load_weights(generator.weights(), 0)
while True:  # with open streams at nearly any time
    groups, _ = RolloutLoop(generator).collect([Prompt("a", (2, 3), "")], 8, SamplingParams(max_tokens=100), seed=0)
    print("samples", flush=True)
"""
