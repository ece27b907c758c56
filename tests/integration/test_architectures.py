"""One family of each kind through all that a run does, beside plain Hugging Face forwards."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import table_rows

from benchmarks import architectures_vllm
from benchmarks.architectures import judge

DECODED = (
    *("cohere2", "gpt2", "granite", "minicpm3"),  # scaled logits, learned positions, and latent attention
    *("gemma2", "gpt_oss", "granite_swa"),  # capped scores, sinks, windows
    *("gemma4_text", "gemma3n_text", "llama4_text"),  # heads that differ by layer, shared keys and values, chunks
    *("qwen2_moe", "hrm_text", "diffllama", "got_ocr2"),  # experts, layers that run or attend twice, pictures
)
HYBRIDS = (
    *("falcon_mamba", "lfm2", "qwen3_5_text"),  # recurrent states of two kinds, and convolution states alone
    *("falcon_h1", "jamba", "zamba"),  # attention and a state in one layer, experts, one attention for several layers
)
UPDATED = ("bart", "bloom", "inkling_text", "nemotron", "recurrent_gemma", "rwkv")
SLACK = 5.0
"""The benchmark's limits are for one processor; a test runs on any. What is really wrong is off by 1e-3 or more."""
IN_VLLM_REFUSED = ("cohere2", "deepseek_v3", "gpt_oss")
IN_VLLM = ("exaone_moe", "falcon", "gemma4_text", "glm", "llama4_text", "minicpm3", "qwen3_moe", *IN_VLLM_REFUSED)
REFUSED = ("bert", "bert-generation", "prophetnet", "xlnet")


@pytest.mark.parametrize("family", table_rows(DECODED, ("cohere2", "gpt_oss", "hrm_text")))
def test_a_family_that_the_slots_decode_is_exact(family: str, tmp_path: Path) -> None:
    row = judge(family, tmp_path, SLACK)
    assert (row["outcome"], row["slots"]) == ("exact", "decode"), row


@pytest.mark.parametrize("family", table_rows(HYBRIDS, ("falcon_mamba", "qwen3_5_text")))
def test_a_family_with_states_is_exact_and_shares_its_prompts(family: str, tmp_path: Path) -> None:
    row = judge(family, tmp_path, SLACK)
    assert (row["outcome"], row["slots"], row["prefix"]) == ("exact", "decode", "shared"), row


@pytest.mark.parametrize("family", table_rows(UPDATED, ("bloom",)))
def test_a_family_that_they_do_not_is_trained_on_exactly(family: str, tmp_path: Path) -> None:
    row = judge(family, tmp_path, SLACK)
    assert row["outcome"] == "exact" and "let vLLM decode it" in str(row["slots"]), row


@pytest.mark.parametrize("family", table_rows(REFUSED, ("bert", "xlnet")))
def test_what_is_no_policy_is_refused_in_a_sentence(family: str, tmp_path: Path) -> None:
    row = judge(family, tmp_path, SLACK)
    assert row["outcome"] == "refused" and str(row["detail"]).endswith("."), row


@pytest.mark.parametrize("family", table_rows(IN_VLLM, ()))
def test_a_family_is_exact_in_vllm_after_its_weights_have_changed(family: str, tmp_path: Path) -> None:
    row = architectures_vllm.judge(family, tmp_path / "log", SLACK)
    if family in IN_VLLM_REFUSED:
        not_started = ["not run here"] if family == "deepseek_v3" else []  # on some CPUs
        assert row["outcome"] in ("refused", *not_started) and str(row["detail"]).endswith("."), row
    else:
        assert row["outcome"] == "exact", (row, (tmp_path / "log").read_text()[-2000:])
