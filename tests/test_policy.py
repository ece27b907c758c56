from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers
from conftest import random_policy

from lit_grpo.policy.loading import (
    check_token_logits,
    context_length,
    eos_token_ids,
    hidden_states,
    load_policy,
    load_tokenizer,
    token_logits,
)

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 40,
}


def test_all_end_of_sequence_ids_count(policy_folder: Path) -> None:
    model, tokenizer = load_policy(str(policy_folder)), load_tokenizer(str(policy_folder))
    assert eos_token_ids(model, tokenizer) == (1,)
    cast(Any, model.generation_config).eos_token_id = [5, 3]
    assert eos_token_ids(model, tokenizer) == (1, 3, 5)
    assert context_length(model) == 256


def test_head_on_hidden_states_is_the_model(policy_folder: Path) -> None:
    model = load_policy(str(policy_folder))
    ids = torch.tensor([[3, 4, 5, 6]])
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        torch.testing.assert_close(token_logits(model, hidden_states(model, ids)), expected)


def test_capped_logits_are_computed_as_the_model_does() -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(**SIZES, head_dim=16, final_logit_softcapping=0.5)
    check_token_logits(Gemma2ForCausalLM(config).eval())


def test_model_that_scales_its_logits_in_its_own_way_is_refused() -> None:
    from transformers import CohereConfig, CohereForCausalLM

    config = CohereConfig(**SIZES, logit_scale=0.01, initializer_range=1.0)
    with pytest.raises(ValueError, match="CohereForCausalLM are not its output embedding"):
        check_token_logits(CohereForCausalLM(config).eval())


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("Qwen3", {"attention_dropout": 0.5}),
        ("GPT2", {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}),
        ("OPT", {"dropout": 0.5, "attention_dropout": 0.5, "layerdrop": 0.5, "word_embed_proj_dim": 32}),
        ("Falcon", {"hidden_dropout": 0.5, "attention_dropout": 0.5}),
        ("Bloom", {"hidden_dropout": 0.5, "attention_dropout": 0.5}),
    ],
)
def test_dropout_of_a_model_is_off(kind: str, settings: dict[str, Any], tmp_path: Path) -> None:
    config = getattr(transformers, f"{kind}Config")(**SIZES, bos_token_id=1, eos_token_id=1, **settings)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = load_policy(str(tmp_path)).train()
    check_token_logits(model)
    ids = torch.tensor([[3, 4, 5, 6]])
    torch.testing.assert_close(model(input_ids=ids).logits, model(input_ids=ids).logits, rtol=0, atol=0)


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    model = random_policy()
    cast(Any, model).config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="holds no usable model"):
        load_policy(str(tmp_path))
