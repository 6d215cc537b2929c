from __future__ import annotations

import pytest

from agentgym.tokens import Renderer

NAMES = [
    "append_only_tool", "append_only_user", "append_only_thinking", "separator", "end_token", "bos",
    "default_system_prompt", "thinking", "call_ids", "tools", "characters",
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "notes"),
    [
        ("chatml", []),
        ("chatml_bare", []),
        ("llama3", []),
        ("mistral", ["call_ids"]),
        ("qwen3", ["append_only_thinking"]),
        ("thinker", ["append_only_tool", "append_only_user", "tools"]),
        ("plain", ["end_token", "tools"]),
    ],
)
def test_what_does_not_hold_is_named(name: str, notes: list[str], renderers: dict[str, Renderer]) -> None:
    findings = renderers[name].audit()
    assert [finding.name for finding in findings] == NAMES
    assert [finding.name for finding in findings if not finding.ok] == notes


def detail(renderer: Renderer, name: str) -> str:
    (found,) = [finding for finding in renderer.audit() if finding.name == name]
    return found.detail


def test_separators_ends_and_prefixes_are_shown(renderers: dict[str, Renderer]) -> None:
    assert "'\\n'" in detail(renderers["chatml"], "separator")
    assert "none" in detail(renderers["chatml_bare"], "separator")
    assert "'<|im_end|>'" in detail(renderers["chatml"], "end_token")
    assert "'<|eom_id|>'" in detail(renderers["llama3"], "end_token")
    assert "'<think>\\n'" in detail(renderers["thinker"], "thinking")
    assert "length 9" in detail(renderers["mistral"], "call_ids")


def test_habits_of_templates_are_named(renderers: dict[str, Renderer]) -> None:
    tokenizer = renderers["chatml"].tokenizer
    template = str(tokenizer.chat_template)
    try:
        tokenizer.chat_template = "<|im_start|>system\nYou are helpful.<|im_end|>\n" + template
        assert "You are helpful." in detail(Renderer(tokenizer), "default_system_prompt")
        tokenizer.chat_template = template.replace("tojson", "tojson(ensure_ascii=True)")
        assert "\\u00fc" in detail(Renderer(tokenizer), "characters")
        tokenizer.chat_template = template.replace("message.content", "message.content | escape")
        assert "&lt;" in detail(Renderer(tokenizer), "characters")
        tokenizer.chat_template = template + "{% if tools %}{{ raise_exception('no tools') }}{% endif %}"
        assert detail(Renderer(tokenizer), "append_only_tool") == "the template raises: no tools"
    finally:
        tokenizer.chat_template = template


def test_a_finding_reads_well(renderers: dict[str, Renderer]) -> None:
    lines = [str(finding) for finding in renderers["mistral"].audit()]
    assert lines[0] == "ok   append_only_tool: history stays as it is"
    assert lines[8].startswith("NOTE call_ids: the template raises: ")
