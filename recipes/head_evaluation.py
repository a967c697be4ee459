"""Evaluation of EAGLE and block heads: agreement with the target by depth, on its own answers to held-out prompts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from huggingface_hub import EvalResult
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agreement import eval_result
from answers import answer_batch, batches_by_domain
from corpus import Batch, collate, encode_row, rows_by_domain
from draft_loss import later_pairs
from head_training import DraftPass, HeadSettings, read_target
from hf_specgen.heads.base import BoundHead
from hf_specgen.targets.model_parts import output_logits

NEW_TOKENS = 96
"""Longest answer."""
BATCH_SIZE = 8
"""Answers in a forward pass."""


@dataclass
class DepthScores:
    """Counts of one domain.

    Args:
        hits: `[depths]` how often head and target have the same most likely token, the true tokens before it given.
        seen: `[depths]` of how many.
        chains: `[depths]` how often this and all depths before it were hits, of `seen`.
    """

    hits: torch.Tensor
    seen: torch.Tensor
    chains: torch.Tensor

    @property
    def agreement(self) -> list[float]:
        """Share of hits at each depth."""
        return (self.hits / self.seen.clamp(min=1)).tolist()

    @property
    def tokens_per_step(self) -> float:
        """Of greedy chains: one plus the expected number of accepted draft tokens."""
        return 1 + float((self.chains / self.seen.clamp(min=1)).sum())


class HeadEvaluation:
    """Measures a head on held-out prompts, also during training.

    Args:
        settings: `evaluation`, `evaluation_per_domain` and `generation` are used.
        attached: the head with its current weights, on its target.
        draft: its training pass.
        target: answers the prompts, once.
        tokenizer: of the target.
    """

    def __init__(
        self,
        settings: HeadSettings,
        attached: BoundHead,
        draft: DraftPass,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
    ):
        self._settings, self._attached, self._draft = settings, attached, draft
        self._target, self._tokenizer = target, tokenizer
        self._batches: dict[str, list[Batch]] = {}

    def summary(self) -> dict[str, float]:
        """Mean agreement at each depth over the domains, and tokens per step of greedy chains."""
        scores = list(self.measure().values())
        agreement = torch.tensor([score.agreement for score in scores]).mean(dim=0).tolist()
        values = {f"depth {depth}": value for depth, value in enumerate(agreement, start=1)}
        return values | {"tokens per step": sum(score.tokens_per_step for score in scores) / len(scores)}

    @torch.no_grad()
    def measure(self) -> dict[str, DepthScores]:
        """Measure all domains; returns the scores by domain. The random state is left unchanged."""
        self._batches = self._batches or self._answered()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return {domain: self._score(members) for domain, members in self._batches.items()}

    def _answered(self) -> dict[str, list[Batch]]:
        """The target's own answers to the held-out prompts, in batches by domain."""
        assert self._settings.evaluation is not None
        rows = rows_by_domain(self._settings.evaluation, self._settings.evaluation_per_domain)
        result: dict[str, list[Batch]] = {}
        with torch.random.fork_rng():
            for seed, members in enumerate(batches_by_domain([row for group in rows.values() for row in group], 32)):
                generation = self._settings.generation
                answers = answer_batch(self._target, self._tokenizer, members, generation, NEW_TOKENS, seed)
                encoded = [encode_row(self._tokenizer, row, self._settings.max_length) for row in answers]
                encoded = [row for row in encoded if row["length"] > row["answer_start"]]
                for first in range(0, len(encoded), BATCH_SIZE):
                    batch = collate(encoded[first : first + BATCH_SIZE])
                    moved = {name: tensor.to(self._target.device) for name, tensor in batch.items()}
                    result.setdefault(members[0]["domain"], []).append(moved)
        return result

    def _score(self, members: list[Batch]) -> DepthScores:
        depths = self._settings.depth
        scores = DepthScores(*(torch.zeros(depths) for _ in range(3)))
        for batch in members:
            states = read_target(self._target, self._attached, batch)
            drafts = self._draft(self._attached, batch, states.features)
            rows = batch["predicts"].nonzero()[:, 0]
            chosen = output_logits(self._target, states.hidden).argmax(dim=-1)
            good = torch.ones(len(drafts.states[0]), dtype=torch.bool, device=rows.device)
            for depth, state in enumerate(drafts.states[:depths]):
                index, learns = later_pairs(rows, depth, drafts.anchors)
                drafted = self._attached.target_ids(self._attached.logits(state[index]).argmax(dim=-1))
                hits = torch.zeros_like(good)
                hits[index] = drafted == chosen[learns]
                good &= hits
                scores.hits[depth] += int(hits.sum())
                scores.chains[depth] += int(good.sum())
                scores.seen[depth] += len(index)
        return scores


def evaluation_section(prompts: str | None, results: dict[str, DepthScores]) -> str:
    """The section of a model card: how it was measured, and a row per domain."""
    if not results:
        return "Nothing was measured, as the recipe was given no `evaluation` prompts."
    depths = range(1, 1 + len(next(iter(results.values())).seen))
    lines = [
        f"On the target's own answers to held-out prompts (`{prompts}`), with the decoding settings of each domain: "
        "how often head and target have the same most likely token at each depth of a draft, the true tokens before it "
        "given, and the *tokens per step* of greedy chains of that depth (including the target's own token).\n",
        "| domain | " + " | ".join(f"depth {depth}" for depth in depths) + " | tokens per step |",
        "|---" * (len(depths) + 2) + "|",
    ]
    for domain, scores in results.items():
        cells = " | ".join(f"{value:.0%}" for value in scores.agreement)
        lines.append(f"| {domain} | {cells} | {scores.tokens_per_step:.2f} |")
    return "\n".join(lines)


def eval_results(prompts: str | None, results: dict[str, DepthScores]) -> list[EvalResult]:
    """The same numbers for the metadata of a model card."""
    return [
        eval_result(prompts, domain, metric, value)
        for domain, scores in results.items()
        for metric, value in (
            *((f"top-1 agreement at depth {depth}", value) for depth, value in enumerate(scores.agreement, start=1)),
            ("tokens per step of greedy chains", scores.tokens_per_step),
        )
    ]
