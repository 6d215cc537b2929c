"""How the shipped model `tiny` is made: a tokenizer, then two supervised phases on what the oracle shows.

    python examples/make_tiny_model.py OUT_FOLDER        # about 4 minutes on 2 cores

Phase 1 shows the oracle on training problems that name their operations ("Multiply 24 by 31."): the model learns to
call the calculator and to copy numbers exactly. Phase 2 shows the oracle on the default mix, most of it word problems,
with the problems of a level drawn so that every plan is as frequent as any other, and stops at the first step after
which the model solves at least 42 % of the first 200 training tasks, greedily. So it can call tools, and has only begun
to read word problems. Nothing of the validation split is used.

The shipped weights are what this script wrote, with 2 threads. Another processor or number of threads rounds
differently, so that its weights are others.
"""

from __future__ import annotations

import argparse
import random
import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from agentgym.config import load_config
from agentgym.console import Console
from agentgym.envs.calculator_math import CalculatorMath
from agentgym.envs.calculator_math.problems import PLANS, STORY_SHARES, Problem, draw
from agentgym.evaluation import evaluate
from agentgym.evaluation_config import EvalConfig
from agentgym.tools.calculator import calculator, format_number
from agentgym.tools.calculator import evaluate as calculate
from agentgym.trainer.models import shipped_model

THRESHOLD = 0.42
PHASE_1_STEPS = 260
PHASE_2_STEPS = 60
THREADS = 2
BATCH = 32
SEED = 0
LEVELS = {1: 0.6, 2: 0.3, 3: 0.1}
"""Of phase 1; phase 2 uses the environment's own mix."""
MIX = {1: 0.8, 2: 0.15, 3: 0.05}
NO_STORIES = dict.fromkeys(STORY_SHARES, 0.0)

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TAGS = [
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<tools>",
    "</tools>",
    "<think>",
    "</think>",
]
# One token per digit; the head of a call and the schema of a tool are pieces of their own, so that they become few
# tokens.
PIECES = r'\{"type": "function"[^\n]*|\n|[0-9]|\{"[^\n0-9]*|"[}\]]+|#+ ?| ?\p{L}+| ?[^\s\p{L}0-9]| +|\s'
END = 2
"""Id of ``<|im_end|>``."""


def problems(count: int, levels: Mapping[int, float], stories: Mapping[int, float], name: str) -> list[Problem]:
    """Training problems; the environment's own tasks are drawn from other seeds."""
    return [draw(random.Random(f"tiny/{SEED}/{name}/{i}"), "train", levels, stories) for i in range(count)]


def evenly(drawn: Sequence[Problem], count: int) -> list[Problem]:
    """``count`` of the problems: the levels as often as they are drawn, the plans of a level all equally often."""
    level = {plan.name: plan.level for plan in PLANS}
    plans = Counter(problem.plan for problem in drawn)
    in_level = Counter(level[problem.plan] for problem in drawn)
    weights = [in_level[level[problem.plan]] / plans[problem.plan] for problem in drawn]
    return random.Random(f"tiny/{SEED}/evenly").choices(drawn, weights, k=count)


def conversation(problem: Problem, *, system: bool) -> list[dict[str, Any]]:
    """What the oracle shows: one call a turn, then the answer."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": CalculatorMath.system_prompt}] if system else []
    messages.append({"role": "user", "content": problem.text})
    for expression in problem.expressions:
        call = {"name": "calculator", "arguments": {"expression": expression}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]})
        messages.append({"role": "tool", "name": "calculator", "content": format_number(calculate(expression))})
    return [*messages, {"role": "assistant", "content": f"#### {problem.answer}"}]


def make_tokenizer(shown: Sequence[Problem]) -> PreTrainedTokenizerFast:
    """Byte-level BPE with 1,024 entries, trained on rendered conversations."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    folder = shipped_model("tiny")
    assert folder is not None
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>", clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = (folder / "chat_template.jinja").read_text()
    tags = "|".join(map(re.escape, SPECIAL + TAGS))
    texts = [
        part
        for problem in shown
        for part in re.split(tags, str(render(tokenizer, problem, system=True, tokenize=False)))
        if part
    ]
    added = [AddedToken(s, special=True, normalized=False) for s in SPECIAL]
    added += [AddedToken(s, special=False, normalized=False) for s in TAGS]
    core.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=1024,
            special_tokens=added,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
            max_token_length=400,
        ),
    )
    trained = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )
    trained.chat_template = tokenizer.chat_template
    return trained


def render(tokenizer: PreTrainedTokenizerFast, problem: Problem, *, system: bool, tokenize: bool) -> Any:
    """A conversation as text or ids; without the system message it has no tool schema either."""
    return tokenizer.apply_chat_template(
        conversation(problem, system=system),
        tools=[calculator.tool_schema] if system else None,
        tokenize=tokenize,
        return_dict=False,
    )


def batches(
    tokenizer: PreTrainedTokenizerFast, shown: Sequence[Problem], rng: random.Random
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(ids [B, L], mask [B, L] of what the assistant writes), for ever; half of the rows without the system message."""
    opening = tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False)
    while True:
        rows = [
            render(tokenizer, problem, system=rng.random() >= 0.5, tokenize=True)
            for problem in rng.sample(shown, BATCH)
        ]
        width = max(map(len, rows))
        ids, mask = torch.zeros(BATCH, width, dtype=torch.long), torch.zeros(BATCH, width, dtype=torch.bool)
        for i, row in enumerate(rows):
            ids[i, : len(row)] = torch.tensor(row)
            for start in range(len(row)):
                if row[start : start + len(opening)] == opening:
                    first = start + len(opening)
                    mask[i, first : row.index(END, first) + 1] = True
        yield ids, mask


def loss_of(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the assistant's tokens."""
    hidden = model.model(input_ids=ids).last_hidden_state[:, :-1]
    wanted = mask[:, 1:]
    return torch.nn.functional.cross_entropy(model.lm_head(hidden[wanted]), ids[:, 1:][wanted])


def save(model: Any, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the model in bfloat16, with its tokenizer."""
    copy = LlamaForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy.generation_config.eos_token_id = [END, 0]
    copy.generation_config.pad_token_id = 0
    copy.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def success(model: Any, tokenizer: PreTrainedTokenizerFast) -> float:
    """Greedy success of the weights as shipped, on the first 200 training tasks of the environment."""
    with tempfile.TemporaryDirectory() as folder:
        save(model, tokenizer, Path(folder))
        overrides = [
            "env=calculator-math",
            f"model={folder}",
            "split=train",
            "tasks=200",
            "rollout.max_response_length=192",
        ]
        config = load_config(EvalConfig, overrides=overrides)
        with open("/dev/null", "w") as quiet:
            report = evaluate(config, Console(file=quiet))
    assert report.mean is not None
    return report.mean


def main() -> None:
    """Make the model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    out: Path = parser.parse_args().out
    torch.set_num_threads(THREADS)
    torch.manual_seed(SEED)
    rng = random.Random(SEED)
    start = time.monotonic()
    mix = problems(10_000, MIX, STORY_SHARES, "mix")
    tokenizer = make_tokenizer(mix[:3_000])
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=128,
        intermediate_size=448,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config)
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    rest = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    muon = torch.optim.Muon(matrices, lr=6e-3, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    adam = torch.optim.AdamW(rest, lr=3e-3, weight_decay=0.0, betas=(0.9, 0.95))
    source = batches(tokenizer, problems(10_000, LEVELS, NO_STORIES, "expressions"), rng)
    for step in range(PHASE_1_STEPS):
        scale = min(1.0, (step + 1) / 20) * min(1.0, max(0.02, (PHASE_1_STEPS - step) / 120))
        muon.param_groups[0]["lr"], adam.param_groups[0]["lr"] = 6e-3 * scale, 3e-3 * scale
        loss = loss_of(model, *next(source))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in (muon, adam):
            optimizer.step()
            optimizer.zero_grad()
        if step % 20 == 0:
            print(f"phase 1  step {step:3d}  loss {loss.item():.4f}  {time.monotonic() - start:.0f}s", flush=True)
    source = batches(tokenizer, evenly(mix, 20_000), rng)
    gentle = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0, betas=(0.9, 0.95))
    for step in range(PHASE_2_STEPS):
        solved = success(model, tokenizer)
        print(f"phase 2  step {step:3d}  solved {solved:.3f}  {time.monotonic() - start:.0f}s", flush=True)
        if solved >= THRESHOLD:
            break
        loss_of(model, *next(source)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        gentle.step()
        gentle.zero_grad()
    save(model, tokenizer, out)
    print(f"saved {out}")


if __name__ == "__main__":
    main()
