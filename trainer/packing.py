"""Micro-batches under a strict token cap, with shared prompts counted (and computed) once.

A *piece* is a prompt with some of the responses that follow it. Pieces never exceed the cap; first-fit-decreasing puts
them into micro-batches; every rank gets the same number of micro-batches (an empty one runs a dummy forward and
backward, so that collectives match).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from agentgym.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Piece:
    """A prompt and the rows (indices into the batch) whose responses follow it."""

    rows: tuple[int, ...]
    tokens: int
    """Prompt once, plus every row's response."""


@dataclass(slots=True)
class MicroBatch:
    """What one forward pass computes. ``rows`` of one piece stand together."""

    pieces: list[Piece] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(piece.tokens for piece in self.pieces)

    @property
    def rows(self) -> list[int]:
        return [row for piece in self.pieces for row in piece.rows]


def split_pieces(
    rows: Sequence[int],
    prompt_lengths: Sequence[int],
    response_lengths: Sequence[int],
    prompt_groups: Sequence[int],
    cap: int,
) -> list[Piece]:
    """Cut the rows of each prompt into pieces of at most ``cap`` tokens.

    Args:
        rows: indices into the three per-row sequences.
        prompt_lengths, response_lengths: tokens.
        prompt_groups: rows with equal values have identical prompts.
        cap: tokens per micro-batch.

    Raises:
        ConfigError: a single row is longer than the cap.
    """
    by_prompt: dict[int, list[int]] = {}
    for row in rows:
        by_prompt.setdefault(prompt_groups[row], []).append(row)
    pieces = []
    for members in by_prompt.values():
        prompt = prompt_lengths[members[0]]
        current: list[int] = []
        tokens = prompt
        for row in members:
            length = response_lengths[row]
            if prompt + length > cap:
                raise ConfigError(
                    f"trainer.max_tokens_per_micro_batch={cap} is less than one sequence of {prompt + length} tokens; "
                    f"set it to at least rollout.max_prompt_length + rollout.max_response_length"
                )
            if current and tokens + length > cap:
                pieces.append(Piece(tuple(current), tokens))
                current, tokens = [], prompt
            current.append(row)
            tokens += length
        pieces.append(Piece(tuple(current), tokens))
    return pieces


def plan(
    rows: Sequence[int],
    prompt_lengths: Sequence[int],
    response_lengths: Sequence[int],
    prompt_groups: Sequence[int],
    *,
    cap: int,
    ranks: int = 1,
) -> list[list[MicroBatch]]:
    """Micro-batches per rank: ``plan(...)[rank][i]``; the same number on every rank.

    The cap is lowered to what an even load needs, so that no rank computes one full micro-batch while another idles.
    """
    pieces = split_pieces(rows, prompt_lengths, response_lengths, prompt_groups, cap)
    total = sum(piece.tokens for piece in pieces)
    wanted = max(1, -(-total // (cap * ranks))) * ranks
    longest = max((prompt_lengths[row] + response_lengths[row] for row in rows), default=0)
    # Cutting a prompt's rows apart repeats the prompt, so the even load is searched for from below, in steps of a
    # tenth.
    even = max(longest, -(-total // wanted))
    while even < cap:
        bins = first_fit_decreasing(split_pieces(rows, prompt_lengths, response_lengths, prompt_groups, even), even)
        if len(bins) <= wanted:
            return spread(bins, ranks)
        even += even // 10 + 1
    return spread(first_fit_decreasing(pieces, cap), ranks)


def first_fit_decreasing(pieces: Sequence[Piece], cap: int) -> list[MicroBatch]:
    """Pack pieces into as few micro-batches as first-fit-decreasing finds; none exceeds the cap."""
    bins: list[MicroBatch] = []
    loads: list[int] = []
    for piece in sorted(pieces, key=lambda p: (-p.tokens, p.rows)):
        for i, load in enumerate(loads):
            if load + piece.tokens <= cap:
                bins[i].pieces.append(piece)
                loads[i] += piece.tokens
                break
        else:
            bins.append(MicroBatch([piece]))
            loads.append(piece.tokens)
    return bins


def spread(bins: Sequence[MicroBatch], ranks: int) -> list[list[MicroBatch]]:
    """Give each rank the same number of micro-batches (padding with empty ones), the heaviest to the lightest rank."""
    per_rank = max(1, -(-len(bins) // ranks))
    result: list[list[MicroBatch]] = [[] for _ in range(ranks)]
    for micro in sorted(bins, key=lambda b: -b.tokens):
        open_ranks = [r for r in range(ranks) if len(result[r]) < per_rank]
        target = min(open_ranks, key=lambda r: (sum(m.tokens for m in result[r]), r))
        result[target].append(micro)
    for micros in result:
        micros.extend(MicroBatch() for _ in range(per_rank - len(micros)))
    return result
