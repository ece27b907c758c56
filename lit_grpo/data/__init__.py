"""Prompts: rows of any source, rendered, tokenized and put into batches."""

from lit_grpo.data.mixture import Mixture, MixtureWeights
from lit_grpo.data.module import PromptDataModule
from lit_grpo.data.sources import FileRows, HubRows, RowSource

__all__ = ["FileRows", "HubRows", "Mixture", "MixtureWeights", "PromptDataModule", "RowSource"]
