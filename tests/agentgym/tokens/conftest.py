"""Small real tokenizers, and chat templates in the styles of the field."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from agentgym.tokens import Renderer

CORPUS = [
    "system user assistant tool function calculator the result of the expression is forty two and the answer",
    '{"name": "calculator", "arguments": {"expression": "6*7"}} {"type": "function", "parameters": {}}',
    "You are a helpful assistant. Call tools when you need them.\n\nZürich 東京 <b> & \n\n\n  x = 1\n",
]

TOOLS_BLOCK = """\
{%- if tools %}<tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}

</tools>
{%- endif %}"""

CALLS = """\
{%- for call in message.tool_calls %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}"""

CHATML = (
    "{%- if tools %}<|im_start|>system\n"
    + TOOLS_BLOCK
    + "<|im_end|>\n{% endif %}"
    + "{%- for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    + "{%- if message.tool_calls %}"
    + CALLS
    + "{% endif %}<|im_end|>{{ SEPARATOR }}{% endfor %}"
    + "{%- if add_generation_prompt %}<|im_start|>assistant\n{{ '' }}{% endif %}"
)

# Like Qwen3: thinking of turns before the last user message is dropped, tool results are user messages, and without
# thinking the prompt holds an empty block that later renders do not repeat.
QWEN3 = r"""
{%- if tools %}{{- '<|im_start|>system\n# Tools\n\n<tools>' }}
{%- for tool in tools %}{{- '\n' + (tool | tojson) }}{%- endfor %}
{{- '\n</tools><|im_end|>\n' }}{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
    {%- set content = message.content %}{%- set thought = '' %}
    {%- if '</think>' in content %}
        {%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
        {%- set content = content.split('</think>')[-1].lstrip('\n') %}
    {%- endif %}
    {{- '<|im_start|>assistant\n' }}
    {%- if loop.index0 > ns.last and (loop.last or thought) %}
        {{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}
    {%- endif %}
    {{- content }}
    {%- for call in message.tool_calls or [] %}
        {%- if (loop.first and content) or not loop.first %}{{- '\n' }}{%- endif %}
        {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments | tojson }}{{- '}\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- elif message.role == 'tool' %}
    {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
    {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
    {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
{%- else %}
    {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}"""

# Like R1 and the thinking-only models: the generation prompt opens the block.
THINKER = r"""
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>\n' }}{%- endif %}"""

LLAMA3 = r"""
{{- bos_token }}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}{{- raise_exception('one call at a time') }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n<|python_tag|>' }}
        {{- '{"name": "' + call.name + '", "parameters": ' }}{{- call.arguments | tojson }}{{- '}<|eom_id|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\n\n' }}{{- message.content | tojson }}{{- '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"""

MISTRAL = r"""
{{- bos_token }}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools and loop.index0 == ns.last %}{{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + message.content + '[/INST]' }}
    {%- elif message.tool_calls %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {%- if call.id is not defined or call.id | length != 9 %}
                {{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
            {%- endif %}
            {{- {'name': call.function.name, 'arguments': call.function.arguments, 'id': call.id} | tojson }}
            {%- if not loop.last %}{{- ', ' }}{%- endif %}
        {%- endfor %}
        {{- ']' + eos_token }}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content + eos_token }}
    {%- elif message.role == 'tool' %}
        {%- if message.tool_call_id is not defined or message.tool_call_id | length != 9 %}
            {{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
        {%- endif %}
        {{- '[TOOL_RESULTS] ' + ({'content': message.content, 'call_id': message.tool_call_id} | tojson) }}
        {{- '[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception('Only user, assistant and tool roles are supported, not ' + message.role) }}
    {%- endif %}
{%- endfor %}"""

PLAIN = r"""
{%- for message in messages %}{{- '### ' + message.role + '\n' + message.content + '\n\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '### assistant\n' }}{%- endif %}"""

CHATML_TOKENS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")

# How the tokenizers of Llama 3 and Qwen split text; newlines stay together, whatever follows them.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

MakeTokenizer = Callable[..., PreTrainedTokenizerFast]


def _bpe() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


@pytest.fixture(scope="session")
def make_tokenizer() -> MakeTokenizer:
    """Build a byte-level tokenizer with a chat template."""
    trained = _bpe().to_str()

    def make(
        template: str | None,
        special: Sequence[str],
        plain: Sequence[str] = (),
        *,
        eos: str | None = None,
        bos: str | None = None,
        normalizer: normalizers.Normalizer | None = None,
        **kwargs: Any,
    ) -> PreTrainedTokenizerFast:
        tokenizer = Tokenizer.from_str(trained)
        if normalizer is not None:
            tokenizer.normalizer = normalizer
        tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
        tokenizer.add_tokens([AddedToken(text, special=False, normalized=normalizer is not None) for text in plain])
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos, bos_token=bos, **kwargs)
        fast.chat_template = template
        return fast

    return make


@pytest.fixture(scope="session")
def tokenizers(make_tokenizer: MakeTokenizer) -> dict[str, PreTrainedTokenizerFast]:
    """One tokenizer for each style of template."""
    headers = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>")
    mistral = ("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]")
    return {
        "chatml": make_tokenizer(
            CHATML.replace("{{ SEPARATOR }}", r"{{ '\n' }}"), CHATML_TOKENS, TAGS, eos="<|im_end|>"
        ),
        "chatml_bare": make_tokenizer(CHATML.replace("{{ SEPARATOR }}", ""), CHATML_TOKENS, TAGS, eos="<|im_end|>"),
        "qwen3": make_tokenizer(QWEN3, CHATML_TOKENS, TAGS, eos="<|im_end|>"),
        "thinker": make_tokenizer(THINKER, CHATML_TOKENS, TAGS, eos="<|im_end|>"),
        "llama3": make_tokenizer(LLAMA3, ("<|begin_of_text|>", *headers), bos="<|begin_of_text|>", eos="<|eot_id|>"),
        "mistral": make_tokenizer(MISTRAL, ("<s>", "</s>", *mistral, "[/TOOL_RESULTS]"), bos="<s>", eos="</s>"),
        "plain": make_tokenizer(PLAIN, ("</s>",), eos="</s>"),
    }


@pytest.fixture(scope="session")
def renderers(tokenizers: dict[str, PreTrainedTokenizerFast]) -> dict[str, Renderer]:
    """One renderer for each style of template."""
    return {name: Renderer(tokenizer) for name, tokenizer in tokenizers.items()}
