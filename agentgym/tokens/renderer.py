"""`Renderer`: messages to ids. History is never encoded again: a turn adds only what is new after the sampled ids."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentgym.errors import ConfigError
from agentgym.tokens.cutter import Cutter
from agentgym.tokens.encoding import Encoder
from agentgym.tokens.parsers.base import END_THINK, THINK
from agentgym.tokens.template import ChatTemplate, Prepared
from agentgym.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from agentgym.tokens.audit import Finding

Tools = Sequence[Mapping[str, Any]]

PROBE = "qzprobe"
"""A word that no template contains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Increment:
    """What new messages add after the sampled ids of a turn.

    Example:
        ChatML, the engine sampled ``[7, E]`` and a tool answered ``[8]``: ``appended_end=[]`` and
        ``ids=[N, S, tool, N, 8, E, N, S, assistant, N]``. Had it sampled ``[7]`` only: ``appended_end=[E]``.
    """

    ids: list[int]
    """The turn separator, the new messages and the generation prompt; mask 0."""
    appended_end: list[int]
    """End-of-turn ids before ``ids`` that the engine did not sample; mask 0."""
    new_prompt: list[int] | None = None
    """Set instead of the others where the template renders the history differently from now on: the prompt of a new
    segment."""
    reason: str = ""
    """Why there is a new prompt."""


class Renderer:
    """Renders conversations for one tokenizer and its chat template.

    Args:
        tokenizer: a fast Hugging Face tokenizer with a chat template.
        template_kwargs: passed to the template at every render, e.g. ``{"enable_thinking": False}``.
        eos_token_ids: end tokens beyond those of the tokenizer, of the template and of a ``generation_config.json``
            beside the tokenizer's files.

    Raises `ConfigError` for a tokenizer that is not fast or has no chat template, for messages that the template
    refuses, and for parts that are not text.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        template_kwargs: Mapping[str, Any] | None = None,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        self.tokenizer = tokenizer
        self._encoder = Encoder(tokenizer)
        self.template = ChatTemplate(tokenizer, self._encoder, template_kwargs or {})
        self.closing = self._probe_closing({"role": "assistant", "content": PROBE}, PROBE)
        """What the template writes after the text of a turn."""
        self.closing_of_call = self._probe_closing_of_call()
        self.stop_tokens = self._template_ends()
        """Texts and ids of the special tokens that end a turn."""
        self._stop_ids = {*self.stop_tokens.values(), *eos_token_ids, *self._eos()}
        self.stop_tokens.update({text: i for text, i in self._encoder.added.items() if i in self._stop_ids})
        self.template.trust_assistant([*self.stop_tokens, *self._turn_tokens()])
        self._prompts = _Prompts()
        self._head = lru_cache(maxsize=64)(self._encoder.encode)
        self.cutter = Cutter(self._encoder)
        """Cuts tool text to a number of tokens."""

    # ---- messages to ids ----

    def prompt(self, messages: Sequence[Message], tools: Tools | None) -> list[int]:
        """The ids of a conversation up to where the model writes, BOS (if the template has one) included."""
        prepared = self.template.prepare(messages, tools)
        text = self.template.render(prepared, generation_prompt=True)
        self._prompts.put(prepared, text)
        return self._encode_prompt(text, prepared.mark)

    def extend(
        self,
        messages_before: Sequence[Message],
        assistant_message: Message,
        new_messages: Sequence[Message],
        tools: Tools | None,
        sampled_ids: Sequence[int],
    ) -> Increment:
        """What ``new_messages`` add after ``sampled_ids``.

        Args:
            messages_before: the conversation that the turn answered.
            assistant_message: the turn, with the real ids and names of its calls.
            new_messages: what came back: tool results, a user's answer.
            tools: the same schemas as in the first prompt.
            sampled_ids: of the turn, as the engine returned them.
        """
        turn = len(messages_before)
        prepared = self.template.prepare([*messages_before, assistant_message, *new_messages], tools)
        full = self.template.render(prepared, generation_prompt=True)
        end, cut, reason = self._continuation(prepared, turn, full)
        self._prompts.put(prepared, full)
        if reason:
            prompt = self._encode_prompt(full, prepared.mark)
            return Increment(ids=[], appended_end=[], new_prompt=prompt, reason=reason)
        ended = bool(sampled_ids) and sampled_ids[-1] in self._stop_ids
        return Increment(
            ids=self._encoder.encode(full[cut:], prepared.mark, after=end),
            appended_end=[self.stop_tokens[end]] if end is not None and not ended else [],
        )

    def encode(self, text: str) -> list[int]:
        """The ids of a turn's text as a model would sample them: tags become their tokens. For scripted turns."""
        return self._encoder.encode_inner(text)

    # ---- ids to text ----

    @cached_property
    def stop_token_ids(self) -> list[int]:
        """Every id that ends a turn: of the tokenizer, the generation config and the template. Sorted."""
        return sorted(self._stop_ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a sampled turn: without the end-of-turn tokens at its end, with all other special tokens, since
        some of them are the tags of tool calls."""
        stop = len(ids)
        while stop and ids[stop - 1] in self._stop_ids:
            stop -= 1
        return self._encoder.decode(ids[:stop])

    @cached_property
    def thinking_prefix(self) -> str:
        """What the generation prompt opens and does not close (``"<think>\\n"``), else ``""``. Parse
        ``thinking_prefix + text``, or a draft inside of the thinking looks like a call."""
        prepared = self.template.prepare([{"role": "user", "content": PROBE}], None)
        text = self.template.render(prepared, generation_prompt=True)
        opened = text.rfind(THINK)
        return text[opened:] if opened > text.rfind(END_THINK) and opened > text.rfind(PROBE) else ""

    def audit(self) -> list[Finding]:
        """Probe the template; what does not hold has ``ok=False``. Takes some milliseconds."""
        from agentgym.tokens.audit import audit

        return audit(self)

    def _encode_prompt(self, text: str, mark: str) -> list[int]:
        """The ids of a prompt. Its first message, mostly the system message with the tools, is encoded once for all."""
        found = self._first_end(text, 0)
        if found is None:
            return self._encoder.encode(text, mark)
        at, end = found
        cut = at + len(end)
        return [*self._head(text[:cut], mark), *self._encoder.encode(text[cut:], mark, after=end)]

    # ---- where a turn ends ----

    def _continuation(self, prepared: Prepared, turn: int, full: str) -> tuple[str | None, int, str]:
        """Where in ``full`` the new part begins: the token that ends the turn (None: the template writes none), the
        position after it, and, if ``full`` does not continue the turn's prompt and text, why."""
        history = self._prompts.get(prepared, turn)
        if history is None or not full.startswith(history):  # it may hold yesterday's date
            history = self.template.render(prepared, turn, generation_prompt=True)
        if not full.startswith(history):
            return None, 0, "the template renders what came before the turn in another way once messages follow it"
        message = prepared.messages[turn]
        if self._is_ended("tool_calls" in message):
            found = self._first_end(full, len(history))
            if found is not None:
                at, end = found
                said = full[len(history) - len(self.thinking_prefix) : at]
                if all(message[key].strip() in said for key in ("content", "reasoning_content") if key in message):
                    return end, at + len(end), ""
        answered = self.template.render(prepared, turn + 1, generation_prompt=False)
        last, cut = self._end_of_turn(answered, len(history), called="tool_calls" in message)
        if full.startswith(answered[:cut]):
            return last, cut, ""
        return None, 0, "the template leaves out a part of the turn once messages follow it"

    def _first_end(self, text: str, start: int) -> tuple[int, str] | None:
        """Where the first token that ends a turn stands in ``text`` from ``start`` on, and the token."""
        found = [(at, token) for token in self.stop_tokens if (at := text.find(token, start)) >= 0]
        return min(found) if found else None

    def _end_of_turn(self, answered: str, start: int, *, called: bool) -> tuple[str | None, int]:
        """The token that ends the last turn of ``answered`` (it begins at about ``start``), and the position after it.

        Without such a token: None, and the position of the separator after the turn's text.
        """
        if self._is_ended(called):
            cut, end = max((answered.rfind(token) + len(token), token) for token in self.stop_tokens)
            if cut > start:  # else it ended an earlier turn
                return end, cut
        if not called and answered.endswith(self.closing):
            return None, len(answered) - len(self.closing)
        return None, len(answered.rstrip())

    def _is_ended(self, called: bool) -> bool:
        """True if the template ends turns (with calls or without) with a token."""
        closing = self.closing_of_call if called else self.closing
        return any(token in closing for token in self.stop_tokens)

    def _probe_closing(self, assistant: Message, last: str) -> str:
        """What the template writes after the last word of a turn."""
        prepared = self.template.prepare([{"role": "user", "content": "?"}, assistant], None)
        text = self.template.render(prepared, generation_prompt=False)
        return text[text.rfind(last) + len(last) :] if last in text else ""

    def _probe_closing_of_call(self) -> str:
        call = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": {"x": PROBE}}}
        try:
            return self._probe_closing({"role": "assistant", "content": "", "tool_calls": [call]}, PROBE)
        except ConfigError:  # the template knows no calls; the audit says so
            return self.closing

    def _eos(self) -> list[int]:
        """The end tokens that the tokenizer and the generation config name."""
        eos = self.tokenizer.eos_token_id
        named = [eos] if isinstance(eos, int) else list(eos or ())
        return named + _generation_config_eos(self.tokenizer.name_or_path)

    def _template_ends(self) -> dict[str, int]:
        """The end tokens that the template writes."""
        added = self._encoder.added
        plain = _tokens_in(self.closing, added)
        ends = set(plain[:1])
        # Behind a call stand the tags of the call first and the end of the turn last.
        of_call = _tokens_in(self.closing_of_call, added)
        if not ends.intersection(of_call):
            ends.update(of_call[-1:])
        return {token: added[token] for token in ends}

    def _turn_tokens(self) -> list[str]:
        """The tokens that the template writes around plain messages."""
        prepared = self.template.prepare(
            [
                {"role": "user", "content": PROBE},
                {"role": "assistant", "content": PROBE},
                {"role": "user", "content": PROBE},
            ],
            None,
        )
        text = self.template.render(prepared, generation_prompt=False)
        return [token for token in _tokens_in(text, self._encoder.added) if token not in (THINK, END_THINK)]


class _Prompts:
    """The last rendered prompts: the prompt of a turn was the full render of the turn before."""

    def __init__(self, limit: int = 32_000_000) -> None:
        self._limit = limit
        """In characters of the prompts together."""
        self._size = 0
        self._entries: OrderedDict[_Key, tuple[list[dict[str, Any]], list[Any] | None, str]] = OrderedDict()
        self._lock = threading.Lock()

    def put(self, prepared: Prepared, text: str) -> None:
        """Keep the render of all messages."""
        key = _key(prepared.messages)
        with self._lock:
            known = self._entries.pop(key, None)
            self._entries[key] = (prepared.messages, prepared.tools, text)
            self._size += len(text) - (len(known[2]) if known is not None else 0)
            while self._size > self._limit:
                _, (_, _, oldest) = self._entries.popitem(last=False)
                self._size -= len(oldest)

    def get(self, prepared: Prepared, stop: int) -> str | None:
        """The render of the first ``stop`` messages, if it was kept."""
        messages = prepared.messages[:stop]
        with self._lock:
            entry = self._entries.get(_key(messages))
        return entry[2] if entry is not None and entry[0] == messages and entry[1] == prepared.tools else None


_Key = tuple[str, ...]


def _key(messages: Sequence[Mapping[str, Any]]) -> _Key:
    return tuple(message["content"] for message in messages)


def _tokens_in(text: str, added: Mapping[str, int]) -> list[str]:
    """The added tokens that occur in ``text``, in the order of their first occurrence."""
    found = [(text.index(token), -len(token), token) for token in added if not token.isspace() and token in text]
    return [token for _, _, token in sorted(found)]


def _generation_config_eos(folder: str) -> list[int]:
    path = Path(folder or ".") / "generation_config.json"
    if not folder or not path.is_file():
        return []
    eos = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    return [eos] if isinstance(eos, int) else list(eos or ())
