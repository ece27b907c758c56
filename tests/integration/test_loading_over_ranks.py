"""A policy that one of two ranks reads, and both have a shard of: what it is, and what it takes on the way.

This file is also the script that the ranks run: ``python test_loading_over_ranks.py FOLDER RANK``.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from transformers import Qwen3Config, Qwen3ForCausalLM

from lit_grpo.policy.loading import load_policy
from lit_grpo.policy.sharding import gather, shard
from tests.task_folders import write_task

ROOT = Path(__file__).parents[2]
STATUS = Path("/proc/self/status")


def memory(name: str) -> int:
    """Bytes of this process by the name that Linux gives them."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def load(folder: str, rank: str) -> None:
    """Load and shard as one of two ranks, and tell the most memory that it took and whether all is there."""
    store = distributed.FileStore(f"{folder}/store", 2)
    distributed.init_process_group("gloo", store=store, rank=int(rank), world_size=2, timeout=timedelta(seconds=60))
    mesh = init_device_mesh("cpu", (2,))
    load_policy(f"{folder}/small", outline=True)  # what is imported on the way is not the policy's
    before = memory("VmRSS")
    policy: Any = load_policy(f"{folder}/policy", outline=rank != "0")
    if rank != "0":
        assert {weight.device.type for weight in policy.parameters()} == {"meta"}
    shard(policy, mesh)
    told = {"taken": memory("VmHWM") - before, "held": memory("VmRSS") - before}
    gather(policy)
    expected = load_policy(f"{folder}/policy")
    pairs = zip((*expected.parameters(), *expected.buffers()), (*policy.parameters(), *policy.buffers()), strict=True)
    told["same"] = all(torch.equal(one, other) for one, other in pairs)
    told["tied"] = policy.get_output_embeddings().weight is policy.get_input_embeddings().weight
    told["dropout"] = policy.config.attention_dropout
    print(json.dumps(told))


def save_policy(folder: Path, num_layers: int, hidden: int) -> None:
    torch.manual_seed(0)
    shape = {"num_hidden_layers": num_layers, "hidden_size": hidden, "intermediate_size": 4 * hidden, "head_dim": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "attention_dropout": 0.1}
    config = Qwen3Config(**shape, **heads, vocab_size=512, tie_word_embeddings=True)
    Qwen3ForCausalLM(config).save_pretrained(folder)


@pytest.mark.nightly
@pytest.mark.skipif(not STATUS.exists(), reason="There is no /proc here to read memory from.")
def test_a_rank_that_does_not_read_the_policy_never_holds_it_whole(tmp_path: Path) -> None:
    save_policy(tmp_path / "small", 1, 32)
    save_policy(tmp_path / "policy", 12, 512)
    whole = (tmp_path / "policy" / "model.safetensors").stat().st_size
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, __file__, str(tmp_path)]
    ranks = [subprocess.Popen([*command, rank], env=environment, text=True, stdout=-1, stderr=-1) for rank in "01"]
    said = [rank.communicate(timeout=120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    told: list[dict[str, Any]] = [json.loads(out.splitlines()[-1]) for out, _ in said]
    assert all(each["same"] and each["tied"] and each["dropout"] == 0.0 for each in told)
    assert told[0]["taken"] > 0.95 * whole
    assert told[1]["taken"] < 0.75 * whole, (told, whole)  # half of it, a layer, and what torch itself takes
    assert max(each["held"] for each in told) < 0.75 * whole, (told, whole)


@pytest.mark.nightly
@pytest.mark.parametrize("broken", ["weights", "folder"])
def test_what_one_rank_finds_wrong_ends_both_with_one_sentence(
    broken: str, tmp_path: Path, policy_folder: Path
) -> None:
    shutil.copytree(policy_folder, policy := tmp_path / "policy")
    weights = load_file(policy / "model.safetensors")
    next(iter(weights.values())).view(-1)[0] = torch.nan
    save_file(weights, policy / "model.safetensors", {"format": "pt"})
    write_task(
        tmp_path,
        policy if broken == "weights" else tmp_path / "absent",
        "def score(completion):\n    return float(len(completion))\n",
        trainer={"devices": 2, "strategy": "fsdp2", "max_steps": 1, "logger": None},
        data={"batch_size": 1},
    )
    command = [sys.executable, "-m", "lit_grpo", "fit", "--config", "config.yaml"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 2, run.stdout + run.stderr
    sentence = "holds NaN or infinity" if broken == "weights" else "There is no policy folder"
    errors = [line for line in run.stderr.splitlines() if "error:" in line.lower()]
    assert len(errors) == 1 and sentence in errors[0], run.stderr
    assert "Traceback" not in run.stderr, run.stderr


if __name__ == "__main__":
    load(*sys.argv[1:])
