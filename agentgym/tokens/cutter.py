"""Cutting text to a number of tokens, with a marker that says how much was dropped."""

from __future__ import annotations

from agentgym.errors import ConfigError
from agentgym.tokens.encoding import Encoder, unused_mark

SIDES = ("left", "right", "middle")
_MARKERS = ("[... {} tokens cut ...]", "[{} cut]", "")


class Cutter:
    """Cuts text so that it, marker included, has at most a given number of tokens. Deterministic."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self._foreign = encoder.pattern()

    def count(self, text: str) -> int:
        """Tokens of ``text`` where a message holds it: control tokens in it count as the plain text they become."""
        return len(self._tokenize(text)[1])

    def cut(self, text: str, limit: int, side: str = "middle") -> str:
        """``text``, or what fits of it.

        Args:
            text: any text.
            limit: the most tokens that the result may have.
            side: where text is dropped: ``left`` keeps the end, ``right`` the beginning, ``middle`` both.

        The marker names the number of dropped tokens; it gets shorter, and at last is left out, where the limit leaves
        no room for it. Raises `ConfigError` for another side.
        """
        if side not in SIDES:
            raise ConfigError(f"truncate side {side!r}: expected one of {', '.join(SIDES)}")
        text, offsets = self._tokenize(text)
        if len(offsets) <= limit:
            return text
        for marker in _MARKERS:
            keep = limit - self.count(marker.format(len(offsets)))
            # A cut inside a character or a word can cost a token more than it saved.
            while keep > 0:
                result = _keep(text, offsets, keep, side, marker)
                excess = self.count(result) - limit
                if excess <= 0:
                    return result
                keep -= excess
        return ""

    def _tokenize(self, text: str) -> tuple[str, list[tuple[int, int]]]:
        """The text and where its tokens begin and end in characters. The text differs only where a token would appear
        by normalising it."""
        mark = unused_mark(text)
        pieces = self._encoder.mark(text, self._foreign, mark).split(mark)
        offsets: list[tuple[int, int]] = []
        start = 0
        for piece in pieces:
            offsets += [(start + a, start + b) for a, b in self._encoder.offsets(piece)]
            start += len(piece)
        return "".join(pieces), offsets


def _keep(text: str, offsets: list[tuple[int, int]], keep: int, side: str, marker: str) -> str:
    """``text`` with ``keep`` of its tokens; both sides of the cut lie between characters."""
    head = {"left": 0, "right": keep, "middle": (keep + 1) // 2}[side]
    tail = keep - head
    end = offsets[head - 1][1] if head else 0
    begin = max(end, offsets[len(offsets) - tail][0]) if tail else len(text)
    return text[:end] + marker.format(len(offsets) - keep) + text[begin:]
