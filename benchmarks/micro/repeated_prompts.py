"""A history where prompts come again, and where they do not: the published model, sides take turns prompt by prompt.

| part | before it | sides |
|---|---|---|
| greedy, again | every prompt answered once, then a few steps of a LoRA | plain, n-grams, history |
| groups of 8, again | a group sampled for every prompt, then a step at TRL's default learning rate | plain, history |
| never seen | 1,000 answers to other prompts in the history | n-grams, history |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from time import perf_counter
from typing import Any

import peft
import torch
from transformers import PreTrainedTokenizerBase

from hf_specgen import NgramCandidates, NgramHistory
from hf_specgen.evaluation.published import published
from hf_specgen.evaluation.workloads import ASSETS, BUNDLED_PROMPTS, GREEDY, encode, everyday_prompts, load, read_rows

TRL_LEARNING_RATE = 1e-6
LORA_LEARNING_RATE, LORA_STEPS = 2e-4, 6
GROUP = 8
NGRAMS: dict[str, Any] = {"candidate_generator": NgramCandidates()}
Encoded = dict[str, torch.Tensor]
Model = Any


@dataclass
class Side:
    """One way to generate, as arguments of `generate`, and what it has taken so far."""

    name: str
    arguments: dict[str, Any]
    seconds: list[float] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    row_steps: list[int] = field(default_factory=list)  # steps of all rows that took part in them
    passes: list[int] = field(default_factory=list)

    def answer(self, model: Model, prompt: Encoded, settings: dict[str, Any]) -> None:
        """Answer a prompt, and count the time, the tokens of each row and the steps."""
        began = perf_counter()
        ids = model.generate(**prompt, **settings, **self.arguments)
        self.seconds.append(perf_counter() - began)
        rows = ids[:, prompt["input_ids"].shape[1] :].tolist()
        self.tokens.extend(rows)
        candidates = self.arguments.get("candidate_generator")
        if candidates is None:
            self.passes.append(len(rows[0]))
            self.row_steps.append(sum(map(len, rows)))
        else:
            steps = candidates.speculation.batch_steps
            self.passes.append(len(steps))
            self.row_steps.append(sum(step.batch for step in steps))


def repeated_prompts(repeats: int, quick: bool) -> list[dict[str, Any]]:
    """Tokens a step and time with a history over plain and n-grams; the bundled model if no other can be had."""
    source = None if quick else published(print)
    model, tokenizer = load(source or "")
    texts = [text for prompts in everyday_prompts().values() for text in prompts]
    texts += [row["question"] for row in read_rows(ASSETS / "gsm8k.jsonl")[:230]]
    if quick:
        texts.sort(key=len)
    prompts = list(encode(tokenizer, texts, 1))
    few, new_tokens = (2, 8) if quick else (40, 64)
    rows = never_seen(model, tokenizer, prompts[few : few + (2 if quick else 30)], 20 if quick else 1000, new_tokens)
    rows += greedy_again(model, prompts[:few], new_tokens)
    return rows + groups_again(model, prompts[: 1 if quick else 3], 8 if quick else 48)


def never_seen(
    model: Model, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Encoded], answers: int, new_tokens: int
) -> list[dict[str, Any]]:
    """What a history of other answers costs."""
    history = NgramHistory()
    texts = [(row["prompt"], row["response"]) for row in read_rows(BUNDLED_PROMPTS)]
    texts += [(row["question"], row["answer"]) for row in read_rows(ASSETS / "gsm8k.jsonl")[230:]]
    for number in range(answers):
        question, answer = texts[number % len(texts)]
        start = tokenizer(question)["input_ids"]
        history.add([*start, number % 99, *tokenizer(answer)["input_ids"]], len(start) + 1)
    sides = [Side("n-grams", NGRAMS), Side("history", {**NGRAMS, "history": history})]
    in_turns(model, prompts, sides, {**GREEDY, "max_new_tokens": new_tokens})
    return compared("never seen", sides)


def greedy_again(model: Model, prompts: Sequence[Encoded], new_tokens: int) -> list[dict[str, Any]]:
    """The same prompts with slightly changed weights."""
    settings = {**GREEDY, "max_new_tokens": new_tokens}
    earlier = Side("history", {**NGRAMS, "history": NgramHistory()})
    in_turns(model, prompts, [earlier], settings)
    sides = [Side("plain", {}), Side("n-grams", NGRAMS), Side("history", earlier.arguments)]
    lora = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj", "down_proj"])
    adapted = peft.get_peft_model(model, lora)
    texts = zip(prompts, earlier.tokens, strict=True)
    batches = [torch.cat([prompt["input_ids"], torch.tensor([row])], dim=1) for prompt, row in texts]
    train(adapted, batches[:LORA_STEPS], LORA_LEARNING_RATE, lambda logits, ids: -log_probability(logits, ids).mean())
    changed = adapted.merge_and_unload()
    in_turns(changed, prompts, sides, settings)
    pairs = zip(earlier.tokens, sides[0].tokens, strict=True)
    equal = [SequenceMatcher(None, before, after, autojunk=False).ratio() for before, after in pairs]
    return [{**row, "tokens as before": sum(equal) / len(equal)} for row in compared("greedy, again", sides)]


def groups_again(model: Model, prompts: Sequence[Encoded], new_tokens: int) -> list[dict[str, Any]]:
    """Groups of samples at temperature 1 in the second epoch, by rejection sampling with the noise of the first."""
    settings = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": new_tokens}
    settings |= {"num_return_sequences": GROUP, "eos_token_id": -1, "pad_token_id": 0}
    earlier = Side("history", {**NGRAMS, "history": NgramHistory(), "verification": "rejection"})
    torch.manual_seed(0)
    in_turns(model, prompts, [earlier], settings)
    groups = [torch.tensor(earlier.tokens[first : first + GROUP]) for first in range(0, len(earlier.tokens), GROUP)]
    batches = [
        torch.cat([prompt["input_ids"].expand(GROUP, -1), group], dim=1)
        for prompt, group in zip(prompts, groups, strict=True)
    ]
    advantages = torch.linspace(-1.5, 1.5, GROUP)[:, None]

    def policy_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return -(advantages * log_probability(logits, ids)).mean()

    train(model.requires_grad_(), batches, TRL_LEARNING_RATE, policy_loss)
    sides = [Side("plain", {}), Side("history", earlier.arguments)]
    in_turns(model, prompts, sides, settings)
    return [{**row, "same tokens": "other samples"} for row in compared(f"groups of {GROUP}, again", sides)]


def in_turns(model: Model, prompts: Sequence[Encoded], sides: Sequence[Side], settings: dict[str, Any]) -> None:
    """Answer every prompt by each side, which takes turns in being first; a first short call is not counted."""
    model.generate(**prompts[0], candidate_generator=NgramCandidates(), **{**settings, "max_new_tokens": 16})
    for number, prompt in enumerate(prompts):
        for side in sides if number % 2 else reversed(sides):
            side.answer(model, prompt, settings)


def train(
    model: Any, batches: Sequence[torch.Tensor], rate: float, loss_of: Callable[[torch.Tensor, torch.Tensor], Any]
) -> None:
    """One step of AdamW a batch of token ids."""
    model.train()
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=rate)
    for ids in batches:
        loss_of(model(input_ids=ids).logits, ids).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


def log_probability(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """`[batch, tokens - 1]` of each token but the first, by logits `[batch, tokens, vocab]`."""
    return logits[:, :-1].log_softmax(dim=-1).gather(2, ids[:, 1:, None])[..., 0]


def compared(part: str, sides: Sequence[Side]) -> list[dict[str, Any]]:
    """A row of the table for each side."""
    first = sides[0]
    return [
        {
            "part": part,
            "variant": side.name,
            "tokens": sum(map(len, side.tokens)),
            "tokens a step of a row": sum(map(len, side.tokens)) / sum(side.row_steps),
            "passes": sum(side.passes),
            "seconds": sum(side.seconds),
            "time over the first": sum(side.seconds) / sum(first.seconds),
            "same tokens": side.tokens == first.tokens,
        }
        for side in sides
    ]
