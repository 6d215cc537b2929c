"""A reward model: a Hugging Face sequence classifier that turns texts into numbers. A worker like any other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentgym.errors import ConfigError, boundary


class RewardClassifier:
    """Scores pairs of prompt and answer.

    With one output the score is its value; with several, the probability of ``label``.

    Args:
        rank: of the workers of its group; each holds the whole model.
        path: model folder or hub id.
        max_length: tokens; longer texts lose their beginning.
        label: index of the output whose probability is the score; None: the last one.
        device: ``cpu``, ``cuda``, ...; None: a GPU where there is one.
    """

    def __init__(
        self, rank: int, path: str, max_length: int = 2048, label: int | None = None, device: str | None = None
    ) -> None:
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        self.rank = rank
        with boundary(f"loading reward model {path!r}"):
            self.tokenizer: Any = AutoTokenizer.from_pretrained(path)
            self.model: Any = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32)
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.model.to(self.device).eval()
        self.tokenizer.truncation_side = "left"  # the end of an answer matters most
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.model.config.pad_token_id = self.tokenizer.pad_token_id
        if label is not None and not 0 <= label < self.model.config.num_labels:
            raise ConfigError(f"reward.options.label={label}: {path} has {self.model.config.num_labels} outputs")
        self.max_length = max_length
        self.label = label

    def score(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        """One number for each (prompt, answer)."""
        import torch

        texts = [self._text(prompt, answer) for prompt, answer in pairs]
        inputs = self.tokenizer(
            texts, return_tensors="pt", padding=True, truncation=True, max_length=self.max_length
        ).to(self.device)
        with torch.no_grad():
            logits = self.model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits.float()
        if logits.shape[1] == 1:
            values = logits[:, 0]
        else:
            values = logits.softmax(-1)[:, self.label if self.label is not None else -1]
        return [float(value) for value in values]

    def _text(self, prompt: str, answer: str) -> str:
        if self.tokenizer.chat_template is None:
            return f"{prompt}\n{answer}"
        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        text: str = self.tokenizer.apply_chat_template(messages, tokenize=False)
        return text
