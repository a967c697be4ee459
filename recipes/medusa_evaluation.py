"""Evaluation of Medusa heads: accuracy on the target's own answers, and tokens per step of real generations."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from huggingface_hub import EvalResult
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agreement import eval_result
from answers import answer_batch, batches_by_domain
from corpus import Batch, chat_prompt, collate, encode_row, rows_by_domain
from distillation import DistillationSettings, target_states
from draft_loss import later_pairs
from hf_specgen import FixedDepth, MedusaCandidates
from hf_specgen.evaluation.measure import Variant, measure_round
from hf_specgen.heads.medusa import MedusaHeads, MedusaRunner
from medusa_acceptance import measure_acceptance, save_acceptance
from medusa_loss import following_tokens

SHOWN_RANKS = 5
"""Draft tokens of each head, most likely first, that are compared with the answer."""
GENERATED_PER_DOMAIN, TUNED_PER_DOMAIN = 4, 8
"""Prompts of each domain for tokens per step and speedup, and for the acceptance that is stored with the heads."""
NEW_TOKENS = 128
"""Longest answer."""


@dataclass
class HeadScores:
    """Counts and times of one domain."""

    hits: torch.Tensor  # [heads, SHOWN_RANKS] how often the draft token of each rank was the answer's token
    seen: torch.Tensor  # [heads] number of predicted tokens
    tokens: int = 0
    steps: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: {"plain": 0.0, "Medusa": 0.0})

    def accuracy(self, ranks: int) -> list[float]:
        """Share of tokens that are among the first `ranks` draft tokens of each head."""
        return (self.hits[:, :ranks].sum(dim=1) / self.seen.clamp(min=1)).tolist()

    @property
    def tokens_per_step(self) -> float:
        """Mean of real generations."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def speedup(self) -> float:
        """Speedup of the same generations over plain `generate`, which generates the same tokens."""
        return self.seconds["plain"] / self.seconds["Medusa"] if self.steps else 0.0


class Evaluation:
    """Measures heads on held-out prompts, also during training.

    Args:
        settings: `evaluation`, `evaluation_per_domain` and `generation` are used.
        heads, lora: a copy of their current weights is measured.
        target: the model that they were trained for; it answers the prompts in each measurement.
        tokenizer: of the target.
    """

    def __init__(
        self,
        settings: DistillationSettings,
        heads: MedusaHeads,
        lora: Any,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
    ):
        self._settings, self._heads, self._lora = settings, heads, lora
        self._target, self._tokenizer = target, tokenizer
        assert settings.evaluation is not None
        self._rows = rows_by_domain(settings.evaluation, settings.evaluation_per_domain)

    def summary(self) -> dict[str, float]:
        """Mean accuracy of each head over the domains, and mean tokens per step."""
        scores = list(self.measure().values())
        names = [f"head {head} top-1" for head in range(len(scores[0].seen))]
        top = torch.tensor([score.accuracy(1) for score in scores]).mean(dim=0).tolist()
        mean = sum(score.tokens_per_step for score in scores) / len(scores)
        return dict(zip(names, top, strict=True)) | {"tokens per step": mean}

    @torch.no_grad()
    def measure(self) -> dict[str, HeadScores]:
        """Measure all domains; returns the scores by domain."""
        was_training = self._target.training
        self._target.eval()
        heads = cast(MedusaHeads, cast(Any, copy.deepcopy(self._heads)).to(self._target.dtype).eval())
        runner = MedusaRunner(heads, self._target, self._lora)
        candidates = MedusaCandidates(heads, lora=self._lora, policy=FixedDepth())  # drafts in every step
        count = heads.config.num_heads
        result = {}
        for seed, (domain, rows) in enumerate(self._rows.items()):
            scores = result[domain] = HeadScores(torch.zeros(count, SHOWN_RANKS), torch.zeros(count))
            for members in batches_by_domain(rows, 32):
                generation = self._settings.generation
                answers = list(answer_batch(self._target, self._tokenizer, members, generation, NEW_TOKENS, seed))
                for first in range(0, len(answers), 8):
                    encoded = [encode_row(self._tokenizer, row, 4096) for row in answers[first : first + 8]]
                    self._count(scores, runner, collate([r for r in encoded if r["length"] > r["answer_start"]]))
            for number, row in enumerate(rows[:GENERATED_PER_DOMAIN]):
                self._generate(scores, candidates, row, number)
        self._target.train(was_training)
        return result

    def _count(self, scores: HeadScores, runner: MedusaRunner, cpu_batch: Batch) -> None:
        batch = {name: tensor.to(self._target.device) for name, tensor in cpu_batch.items()}
        hidden = target_states(self._target, batch)[0]  # [positions, hidden]
        tokens = following_tokens(batch, runner.heads)
        following, rows = tokens[:, 0], batch["predicts"].nonzero()[:, 0]
        drafted = runner.logits(hidden, tokens).topk(SHOWN_RANKS, dim=-1).indices  # [positions, heads, SHOWN_RANKS]
        for head in range(drafted.shape[1]):
            sources, later = later_pairs(rows, head)
            correct = drafted[sources, head] == following[later, None]
            scores.hits[head] += correct.float().sum(dim=0).cpu()
            scores.seen[head] += len(later)

    def _generate(self, scores: HeadScores, candidates: MedusaCandidates, row: dict[str, Any], seed: int) -> None:
        ours = Variant("Medusa", lambda: {"candidate_generator": candidates})
        variants = [Variant("plain", dict), ours]
        call = self._call(row)
        inputs = {name: call.pop(name) for name in ("input_ids", "attention_mask")}
        samples = measure_round(self._target, inputs, variants, call, seed, first=seed)
        statistics = samples["Medusa"].speculation
        assert statistics is not None
        scores.steps += statistics.steps
        scores.tokens += sum(step.emitted for steps in statistics.rows for step in steps)
        for name, sample in samples.items():
            scores.seconds[name] += sample.seconds

    def _call(self, row: dict[str, Any]) -> dict[str, Any]:
        """The arguments of `generate` for a prompt."""
        special = not self._tokenizer.chat_template
        prompt = chat_prompt(self._tokenizer, row["prompt"])
        inputs = self._tokenizer(prompt, return_tensors="pt", add_special_tokens=special).to(self._target.device)
        generation = self._settings.generation
        return {
            "input_ids": inputs["input_ids"],
            "attention_mask": inputs["attention_mask"],
            "max_new_tokens": NEW_TOKENS,
            **generation.get(row["domain"], generation["default"]),
        }

    def tune(self) -> None:
        """Store acceptance by confidence and rank in the heads' config."""
        calls = [self._call(row) for rows in self._rows.values() for row in rows[-TUNED_PER_DOMAIN:]]
        counts = measure_acceptance(self._target, self._heads, calls, self._lora)
        save_acceptance(self._heads, counts)


def evaluation_section(prompts: str | None, results: dict[str, HeadScores]) -> str:
    """The section of a model card: how it was measured, and a row per domain."""
    if not results:
        return "Nothing was measured, as the recipe was given no `evaluation` prompts."
    heads = range(len(next(iter(results.values())).seen))
    lines = [
        f"On the target's own answers to held-out prompts (`{prompts}`), with the decoding settings of each domain: "
        f"how often the answer's token was the first draft token of each head, and among its first {SHOWN_RANKS}. "
        "*Tokens per step* (including the target's own token) and *speedup* over plain `generate` are those of "
        f"{GENERATED_PER_DOMAIN} real generations per domain with `MedusaCandidates`, on the machine of the "
        "training.\n",
        "| domain | " + " | ".join(f"head {head}" for head in heads) + " | tokens per step | speedup |",
        "|---" * (len(heads) + 3) + "|",
    ]
    for domain, scores in results.items():
        pairs = zip(scores.accuracy(1), scores.accuracy(SHOWN_RANKS), strict=True)
        cells = " | ".join(f"{first:.0%} / {several:.0%}" for first, several in pairs)
        lines.append(f"| {domain} | {cells} | {scores.tokens_per_step:.2f} | {scores.speedup:.2f}x |")
    return "\n".join(lines)


def eval_results(prompts: str | None, results: dict[str, HeadScores]) -> list[EvalResult]:
    """The same numbers for the metadata of a model card."""
    return [
        eval_result(prompts, domain, metric, value)
        for domain, scores in results.items()
        for metric, value in (
            *((f"top-1 accuracy of head {head}", value) for head, value in enumerate(scores.accuracy(1))),
            ("tokens per step", scores.tokens_per_step),
        )
    ]
