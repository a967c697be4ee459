"""How good a draft is: how often it says what the target says, on the target's own text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from answers import answer_batch, batches_by_domain
from corpus import Batch, collate, encode_row, read_rows
from distillation import target_states
from hf_specgen.target.model_parts import output_logits

Predictor = Callable[[Batch], torch.Tensor]  # logits [positions, vocab] at the predicting positions of a batch
K = 4


@dataclass
class Agreement:
    """Sums over the answers of one domain."""

    positions: int = 0
    same_top: int = 0  # positions at which the draft's most likely token is the target's
    steps: int = 0  # of speculative decoding with K guesses a step, replayed on the answers

    @property
    def top1(self) -> float:
        """Share of positions with the same most likely token."""
        return self.same_top / self.positions

    @property
    def accepted(self) -> float:
        """Accepted tokens a step, of K guesses."""
        return (self.positions - self.steps) / self.steps


def replay_steps(hits: Sequence[bool], k: int = K) -> int:
    """Steps that speculative decoding needs for a text, if guesses are right exactly at `hits`.

    A step takes the right guesses up to the first wrong one, at most k, and then one token of the target's own.

    >>> replay_steps([True, True, False, True, False, False])
    3
    """
    steps = position = 0
    while position < len(hits):
        run = 0
        while run < k and position + run < len(hits) and hits[position + run]:
            run += 1
        position += run + 1
        steps += 1
    return steps


@torch.no_grad()
def measure_agreement(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    predictors: dict[str, Predictor],
    prompts: str,
    per_domain: int,
    generation: dict[str, Any],
    max_new_tokens: int = 128,
) -> dict[str, dict[str, Agreement]]:
    """Let the target answer held-out prompts with each domain's settings, and compare at every position.

    In sampled domains a guess is right when target and draft pick the same token with the same noise, as in
    `verification="coupled"`: argmax p/e = argmax q/e.

    Args:
        predictors: the drafts by name.
        prompts: rows {domain, prompt}, of which the first `per_domain` of each domain are used.

    Returns:
        by name of the draft and domain.
    """
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in read_rows(prompts):
        if len(rows.setdefault(row["domain"], [])) < per_domain:
            rows[row["domain"]].append(row)
    result: dict[str, dict[str, Agreement]] = {name: {domain: Agreement() for domain in rows} for name in predictors}
    for seed, members in enumerate(batches_by_domain([row for group in rows.values() for row in group], 32)):
        domain = members[0]["domain"]
        decoding = generation.get(domain, generation["default"])
        answers = list(answer_batch(target, tokenizer, members, generation, max_new_tokens, seed))
        for first in range(0, len(answers), 8):
            encoded = [encode_row(tokenizer, row, 4096) for row in answers[first : first + 8]]
            cpu_batch = collate([row for row in encoded if row["length"] > row["answer_start"]])
            batch = {name: tensor.to(target.device) for name, tensor in cpu_batch.items()}
            p = output_logits(target, target_states(target, batch)[0]).float()
            owner = batch["predicts"].nonzero()[:, 0]
            for name, predict in predictors.items():
                _compare(result[name][domain], p, predict(batch).float(), owner, decoding, seed)
    return result


def _compare(
    agreement: Agreement, p: torch.Tensor, q: torch.Tensor, owner: torch.Tensor, decoding: dict[str, Any], seed: int
) -> None:
    """Add a batch: logits `[positions, vocab]`, and which conversation each position is of."""
    width = min(p.shape[-1], q.shape[-1])
    p, q = p[:, :width], q[:, :width]
    same = p.argmax(-1) == q.argmax(-1)
    hits = same
    if decoding.get("do_sample"):
        generator = torch.Generator(p.device).manual_seed(seed)
        noise = torch.empty_like(p).exponential_(generator=generator).log()  # argmax p/e = argmax (log p - log e)
        temperature = decoding.get("temperature", 1.0)
        hits = (p / temperature - noise).argmax(-1) == (q / temperature - noise).argmax(-1)
    agreement.positions += len(same)
    agreement.same_top += int(same.sum())
    agreement.steps += sum(replay_steps(hits[owner == row].tolist()) for row in owner.unique())


def agreement_section(prompts: str | None, results: Mapping[str, Agreement] | None) -> str:
    """For a model card: how it was measured, and a row per domain."""
    if not results:
        return "Nothing was measured: the recipe was given no `evaluation` prompts."
    rows = [
        f"| {domain} | {result.top1:.1%} | {result.accepted:.2f} | {result.positions} |"
        for domain, result in results.items()
    ]
    return "\n".join(
        [
            f"On answers that the target itself gave to held-out prompts (`{prompts}`), with each domain's own "
            f"decoding settings. *Accepted* is what speculative decoding with k={K} keeps of each step's guesses, "
            "replayed on these answers; where the domain is sampled, target and draft pick with the same noise, as "
            "hf_specgen does by default.\n",
            f"| domain | same top-1 token | accepted of {K} a step | tokens |",
            "|---|---|---|---|",
            *rows,
        ]
    )
