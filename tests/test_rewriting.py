"""What prompts are asked with: a plug-in of one's own rewrites them, and what is known of prompts leaves them out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import save_tokenizer

from lit_grpo.budgets.rewriting import TextWriter
from lit_grpo.data.module import PromptDataModule, asked_prompts
from lit_grpo.methods import make_plugins
from lit_grpo.plugins import Plugin
from lit_grpo.rollout.session import RolloutSession
from lit_grpo.types import Prompt

ROWS: Any = [{"prompt": f"{number}+{number}="} for number in range(4)]


@dataclass
class EveryOther(Plugin):
    """Puts a preface before every other prompt: at even visits before even rows, at odd visits before odd rows."""

    preface: str = "add "

    def rewrite(self, prompt: Prompt, writer: TextWriter, longest: bool = False) -> Prompt:
        if not longest and (int(prompt.prompt_id.rpartition("/")[2]) + prompt.visit) % 2:
            return prompt
        return replace(writer.put_before(prompt, self.preface), extra={"preface": 1.0})


@dataclass
class Unchanged(Plugin):
    def rewrite(self, prompt: Prompt, writer: TextWriter, longest: bool = False) -> Prompt:
        return prompt


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    template = "{% for m in messages %}{{ 'ab'[m.role == 'user'] }} {{ m.content }}#{% endfor %}"
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"), unk_token="?", chat_template=template)


def data_of(tokenizer: str, *specs: str, rows: Any = ROWS, **options: Any) -> PromptDataModule:
    data = PromptDataModule(tokenizer, train=rows, batch_size=1, shuffle=False, **options)
    data.setup("fit")
    session = RolloutSession(make_plugins([*specs]))
    data.plug_in(session.prompt_rule, session.rewriting, on_demand=False)
    return data


OWN = f"{__name__}.EveryOther"


def test_a_prompt_that_is_asked_with_something_else_is_marked(tokenizer: str) -> None:
    prompts = data_of(tokenizer, OWN).train_dataloader().draw(8)
    texts = ["add 0+0=", "1+1=", "add 2+2=", "3+3=", "0+0=", "add 1+1=", "2+2=", "add 3+3="]
    assert [prompt.text for prompt in prompts] == texts
    assert [prompt.altered for prompt in prompts] == [text.startswith("add") for text in texts]
    assert [bool(prompt.extra) for prompt in prompts] == [prompt.altered for prompt in prompts]
    assert [prompt.visit for prompt in prompts] == [0] * 4 + [1] * 4


def test_what_a_prompt_may_become_is_checked_with_the_prompts(tokenizer: str) -> None:
    trainer: Any = SimpleNamespace(datamodule=data_of(tokenizer, OWN))
    largest = asked_prompts(trainer)["train"][len(ROWS) :]
    assert [prompt.text for prompt in largest] == ["add 0+0=", "add 0+0="]


def test_what_stays_as_its_row_says_is_refused_at_once(tokenizer: str) -> None:
    with pytest.raises(ValueError, match=r"^rollout\.plugins: no row of the list given has a text for Unchanged that"):
        data_of(tokenizer, f"{__name__}.Unchanged")


def test_a_text_that_cannot_be_put_into_a_row_is_told_with_the_row(tokenizer: str) -> None:
    no_question: Any = [{"prompt": [{"role": "system", "content": "a"}]}]
    sentence = r"^rollout\.plugins: the text that EveryOther puts into row 0 of .* cannot be made, since the row has"
    with pytest.raises(ValueError, match=rf"{sentence} no user's turn to put a text in front of; mend the row"):
        data_of(tokenizer, OWN, rows=no_question)
    with pytest.raises(ValueError, match=rf"{sentence} a text with characters that the tokenizer does not know"):
        data_of(tokenizer, f"{OWN}:preface=ADD")
