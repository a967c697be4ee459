"""Agreement of a draft with its target, on the target's own answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from huggingface_hub import EvalResult
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from answers import answer_batch, batches_by_domain
from corpus import Batch, collate, encode_row, rows_by_domain
from distillation import target_states
from hf_specgen.targets.model_parts import output_logits

Predictor = Callable[[Batch], torch.Tensor]
"""Returns the logits `[positions, vocab]` at the predicting positions of a batch."""
K = 4
"""Draft length at which accepted tokens are counted."""


@dataclass
class Agreement:
    """Sums over the answers of one domain."""

    positions: int = 0
    same_top: int = 0  # positions at which the draft's most likely token is the target's
    steps: int = 0  # of speculative decoding with drafts of K tokens, replayed on the answers

    @property
    def top1(self) -> float:
        """Share of positions at which both have the same most likely token."""
        return self.same_top / self.positions

    @property
    def accepted(self) -> float:
        """Accepted tokens per step, with drafts of K tokens."""
        return (self.positions - self.steps) / self.steps


def replay_steps(hits: Sequence[bool], k: int = K) -> int:
    """Steps of speculative decoding for a text, if draft tokens are accepted exactly at `hits`.

    A step accepts draft tokens up to the first rejected one, at most k, and adds one token of the target.

    Example:
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
    """Generate the target's answers to held-out prompts, and compare target and drafts at every position.

    In sampled domains a draft token counts as accepted where target and draft sample the same token with the same
    noise, as with `verification="exact"`: argmax p/e = argmax q/e.

    Args:
        target: the target.
        tokenizer: of the target.
        predictors: drafts by name.
        prompts: file or dataset with rows {domain, prompt}.
        per_domain: number of prompts of each domain.
        generation: decoding settings by domain.
        max_new_tokens: per answer.

    Returns:
        By name of the draft, then by domain.
    """
    rows = rows_by_domain(prompts, per_domain)
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
    """Add a batch: logits `[positions, vocab]`, and the conversation `[positions]` of each position."""
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
    """The section of a model card: how it was measured, and a row per domain."""
    if not results:
        return "Nothing was measured, as the recipe was given no `evaluation` prompts."
    rows = [
        f"| {domain} | {result.top1:.1%} | {result.accepted:.2f} | {result.positions} |"
        for domain, result in results.items()
    ]
    return "\n".join(
        [
            f"On the target's own answers to held-out prompts (`{prompts}`), with the decoding settings of each "
            f"domain. *Accepted* are the tokens per step that speculative decoding with k={K} accepts, replayed on "
            "these answers; in sampled domains target and draft sample with the same noise, as hf_specgen does by "
            "default.\n",
            f"| domain | same top-1 token | accepted of {K} per step | tokens |",
            "|---|---|---|---|",
            *rows,
        ]
    )


def eval_results(prompts: str | None, results: Mapping[str, Agreement] | None) -> list[EvalResult]:
    """The same numbers for the metadata of a model card."""
    return [
        eval_result(prompts, domain, kind, value)
        for domain, result in (results or {}).items()
        for kind, value in (("same top-1 token", result.top1), (f"accepted tokens per step, k={K}", result.accepted))
    ]


def eval_result(prompts: str | None, domain: str, metric: str, value: float) -> EvalResult:
    """One measured value on the prompts of a domain."""
    return EvalResult(
        task_type="text-generation",
        dataset_type=str(prompts),
        dataset_name=str(prompts),
        dataset_config=domain,
        metric_type=metric,
        metric_value=round(value, 4),
    )
