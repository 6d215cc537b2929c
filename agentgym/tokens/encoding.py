"""Text to ids without surprises: added tokens are recognised where the template wrote them, nowhere else."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from agentgym.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SURROGATE = re.compile("[\ud800-\udfff]")


class Encoder:
    """A tokenizer's own fast backend, with the two things the renderer needs beyond it.

    * Text is *marked* where an added token must stay plain text: the mark stands inside of the token, `encode` splits
      there, and neither half is the token any more. The rest of the text is encoded as a whole.
    * Text that follows other text is encoded behind an *anchor*, the special token it follows (or any other), so that
      tokenizers that treat the start of a text differently do not.

    Raises `ConfigError` for a tokenizer without a fast backend.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ConfigError(
                f"tokenizer {type(tokenizer).__name__} has no fast backend; agentgym needs a tokenizer.json. "
                f"Convert it: AutoTokenizer.from_pretrained(PATH, use_fast=True).save_pretrained(PATH)"
            )
        # An own copy: others may switch truncation or padding on, and a backend must not be changed while it is used.
        self._backend = copy.deepcopy(backend)
        self._backend.no_truncation()
        self._backend.no_padding()
        added: Mapping[int, Any] = self._backend.get_added_tokens_decoder()
        self.added: dict[str, int] = {token.content: index for index, token in added.items()}
        """All added tokens, special or not."""
        # White space and single characters cannot open or close anything, and splitting them would only harm.
        self._tokens = [text for text in self.added if len(text) > 1 and not text.isspace()]
        self._normalizer = self._backend.normalizer if any(token.normalized for token in added.values()) else None
        self._anchor = next((token.content for token in added.values() if self._is_anchor(token)), None)

    def pattern(self, tokens: Iterable[str] | None = None) -> re.Pattern[str] | None:
        """A pattern that finds ``tokens`` (default: every added token that could do harm); None if there are none."""
        words = [text for text in (self._tokens if tokens is None else tokens) if len(text) > 1]
        return re.compile(_alternatives(words)) if words else None

    def mark(self, text: str, pattern: re.Pattern[str] | None, mark: str) -> str:
        """``text`` with ``mark`` after the first character of everything that ``pattern`` finds, overlaps included."""
        if pattern is None:
            return text
        if self._normalizer is not None and not pattern.search(text):
            # What only becomes a token when the tokenizer normalises it, e.g. in full-width characters.
            normalized = self._normalizer.normalize_str(_whole(text))
            if normalized == text or not pattern.search(normalized):
                return text
            text = normalized
        cuts = [0]
        while (match := pattern.search(text, cuts[-1])) is not None:
            cuts.append(match.start() + 1)
        return mark.join(text[a:b] for a, b in itertools.pairwise([*cuts, len(text)])) if len(cuts) > 1 else text

    def encode(self, text: str, mark: str | None = None, after: str | None = None) -> list[int]:
        """The ids of ``text``, split at ``mark``. ``after``: the special token before it; None: it starts the text."""
        first, *rest = text.split(mark) if mark is not None else [text]
        ids = self._encode(first, after)
        for piece in rest:
            ids += self._encode(piece, self._anchor)
        return ids

    def encode_inner(self, text: str) -> list[int]:
        """The ids of ``text`` (added tokens recognised) as they are behind other text."""
        return self._encode(text, self._anchor)

    def offsets(self, text: str) -> list[tuple[int, int]]:
        """Where the tokens of ``text`` begin and end, in characters."""
        return list(self._backend.encode(_whole(text), add_special_tokens=False).offsets)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``, special tokens included, spaces as they are."""
        return str(self._backend.decode(list(ids), skip_special_tokens=False))

    def _encode(self, text: str, after: str | None) -> list[int]:
        if not text:
            return []
        text = _whole(text)
        if after is not None:
            ids: list[int] = self._backend.encode(after + text, add_special_tokens=False).ids
            if ids and ids[0] == self.added[after]:
                return ids[1:]
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def _is_anchor(self, token: Any) -> bool:
        if not token.special or token.lstrip or token.rstrip or token.single_word:
            return False
        ids = self._backend.encode(token.content + "a", add_special_tokens=False).ids
        return len(ids) > 1 and ids[0] == self.added[token.content]


def unused_mark(*texts: str) -> str:
    """A mark that occurs in none of ``texts``."""
    for i in itertools.count():  # noncharacters: hardly any text has them
        mark = f"\ufdd0{i}\ufdd1"
        if not any(mark in text for text in texts):
            break
    return mark


def _whole(text: str) -> str:
    """``text`` without halves of characters, which tools can return and no tokenizer encodes."""
    return text if text.isascii() else _SURROGATE.sub("\ufffd", text)


def _alternatives(words: Iterable[str]) -> str:
    """A regular expression for any of ``words`` as a prefix tree: its cost does not grow with their number. A word that
    begins with another one is left to it."""
    tree: dict[str, list[str]] = {}
    for word in words:
        tree.setdefault(word[0], []).append(word[1:])
    branches = [re.escape(first) + ("" if "" in rest else _alternatives(rest)) for first, rest in sorted(tree.items())]
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"
