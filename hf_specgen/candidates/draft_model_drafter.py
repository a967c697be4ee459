"""The drafter with a draft model: a pass for each level, or one pass for all of them.

A parallel draft model (PARD) reads the new text and K - 1 mask tokens after it; the last K positions predict the next K
tokens, independently of each other. The mask tokens do not stay in its cache. PARD-2 adds to the embedding of each
token a projection of the target's hidden states at the token before it.

Source: An et al., "PARD: Accelerating LLM Inference with Low-Cost PARallel Draft Model Adaptation" (2025), and PARD-2.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from hf_specgen.call import Compile
from hf_specgen.candidates.base import vocabulary_size
from hf_specgen.candidates.cross_tokenizer import DraftText, SharedVocabulary
from hf_specgen.candidates.draft_batch import DraftBatch
from hf_specgen.candidates.draft_window import DraftWindow
from hf_specgen.candidates.encoder_draft import draft_prompt, embedding_size
from hf_specgen.candidates.parallel_draft import ParallelDraft, TargetFeatures
from hf_specgen.device_tree import Frontier
from hf_specgen.drafter import DepthLogits, Drafter
from hf_specgen.targets.model_parts import reads_encoder, text_config
from hf_specgen.targets.passes import MAX_CAPTURED, CapturablePasses, NewText
from hf_specgen.targets.requirements import TargetRequirements, make_target
from hf_specgen.targets.self_check import check_computation
from hf_specgen.targets.support import position_table
from hf_specgen.targets.target import Target
from hf_specgen.tree import DraftTree


@dataclass(frozen=True)
class LoadedDraft:
    """A draft model as a call uses it."""

    model: PreTrainedModel
    texts: Sequence[DraftText]  # the prompts in its tokens
    compile: Compile  # whether its passes are captured as CUDA graphs, as for `speculate`
    window: DraftWindow | None = None  # the part of the texts that it reads; None: all of it
    shared: SharedVocabulary | None = None  # the tokens that both vocabularies have, if it has another tokenizer
    parallel: ParallelDraft | None = None  # how it drafts in one pass; None: a pass for each level
    token_ids: torch.Tensor | None = None  # [draft vocab] the target's ids of a restricted draft vocabulary

    @property
    def reads_target(self) -> bool:
        """Whether it reads hidden states of the target (PARD-2)."""
        return self.parallel is not None and bool(self.parallel.aux_hidden_state_layers)

    @property
    def takes_window(self) -> bool:
        """Whether it can read a part of the texts: an encoder, and the target's states, are of the whole text."""
        return self.shared is None and not reads_encoder(self.model) and not self.reads_target


@dataclass
class _CachedRow:
    """How much of a row's text the draft model has processed: the first `cached` tokens.

    The prefill processes the first `prefilled` of them: the prompt, or after a restart the text without its last token.
    The window leaves out `skipped` of these: they have no cache slot.
    """

    text: DraftText
    prefilled: int
    skipped: int = 0
    cached: int = 0

    @classmethod
    def of_prompt(cls, text: DraftText) -> _CachedRow:
        """A row whose text has nothing but the prompt yet."""
        return cls(text, prefilled=len(text.tokens))

    @property
    def length(self) -> int:
        """Tokens in the cache, and those that are not computed yet."""
        return len(self.text.tokens) - self.skipped


class UncachedText(NamedTuple):
    """The tokens that a draft model has not processed, for one draft."""

    tokens: list[list[int]]  # of each row; one token of rows that do not draft
    depths: list[int]  # maximum depth of each row's draft
    tokens_per_pass: list[int]  # tokens, over all rows, of the passes that process them, masks included

    @property
    def masks(self) -> list[int]:
        """How many mask tokens follow those of each row, where all depths are drafted in one pass."""
        return [max(0, depth - 1) for depth in self.depths]

    @property
    def width(self) -> int:
        """Tokens of the longest row."""
        return max(map(len, self.tokens))


class DraftModelDrafter(Drafter[UncachedText]):
    """Drafts with a model: `runner` runs its passes, and has the cache, which holds the beginning of each row's text.

    A draft model with another tokenizer drafts the tokens that it shares with the target.
    """

    def __init__(self, batch: DraftBatch, draft: LoadedDraft, k: int):
        super().__init__()
        self._batch = batch
        self._draft = draft
        self._window = draft.window
        self._k = k
        self._shared = draft.shared
        self.token_ids = draft.token_ids
        self._features: TargetFeatures | None = None  # adds hidden states to the embeddings of tokens (PARD-2)
        self._mask = 0
        if draft.parallel is not None:
            self.is_one_pass = True
            self._mask = draft.parallel.mask_token
            if draft.parallel.aux_hidden_state_layers:
                self._features = TargetFeatures(batch, draft.model, draft.parallel)
        self._max_positions = position_table(text_config(draft.model))
        self._rows = list(map(_CachedRow.of_prompt, draft.texts))
        self._is_drafting = [True] * len(draft.texts)  # rows that take part in the current draft
        self._expanded = 0  # nodes of each row in the cache
        self._has_prompt = False
        self.runner = self._begin(self._rows)
        self.drafts_chains = self.runner.verifies_chains_only
        is_plain_text = all(type(text) is DraftText for text in draft.texts)
        self.rows_can_change = is_plain_text and not draft.reads_target and not self.drafts_chains

    def take_uncached(self, max_depths: Sequence[int]) -> UncachedText | None:
        """Return the unprocessed tokens; None if no row drafts. The first draft begins with the drafter's prefill."""
        if self._features is not None:
            self._features.begin()
        is_complete = self._update_texts()
        depths = self._depth_limits(max_depths, is_complete)
        if not any(depths):
            return None
        if not self._has_prompt:  # only now, so that a call that never drafts does not read its prompts
            features = self._features
            with nullcontext() if features is None else features.added(features.of_prompts()):
                self.runner.prefill()
            self._has_prompt = True
        return self._prepare_pass(depths)

    def forward_text(self, text: UncachedText) -> torch.Tensor:
        """`[batch, draft vocab]` logits after the last token of each row, from one pass over its uncached tokens."""
        logits = _last_of(self._extend(text), [len(tokens) for tokens in text.tokens])
        return logits if self._shared is None else self._shared.target_logits(logits)

    def forward_nodes(self, frontier: Frontier) -> torch.Tensor:
        """`[batch, new, draft vocab]` logits after the last nodes of a tree, which stay in the cache."""
        self._expanded = frontier.nodes
        if self._shared is not None:
            frontier = replace(frontier, tokens=self._shared.draft_tokens(frontier.tokens))
        logits = self.runner.extend_tree(frontier, self._is_drafting)
        return logits if self._shared is None else self._shared.target_logits(logits)

    def forward_depths(self, text: UncachedText, depth: int) -> DepthLogits:
        """One pass over the uncached tokens and mask tokens after them: logits at the last token and each mask.

        A row has one mask less than its depth, as positions end there. Its logits of further depths are not used.
        """
        features = self._features
        masks = text.masks
        rows = self.runner.rows
        with nullcontext() if features is None else features.added(features.of_text(self._is_drafting, rows, masks)):
            logits = self._extend(text, [[self._mask] * count for count in masks])
        counts = torch.tensor([len(tokens) for tokens in text.tokens], device=logits.device)
        slots = counts[:, None] - 1 + torch.arange(depth, device=logits.device)
        slots = slots.clamp(max=logits.shape[1] - 1)
        batch = torch.arange(len(counts), device=logits.device)[:, None]
        vocab = vocabulary_size(self._batch.model)
        return DepthLogits(logits[batch, slots][..., :vocab].float()[:, :, None])

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep accepted nodes in the cache; the next pass computes those that were not expanded."""
        if self._features is not None:
            self._features.queue.receive()
        if self._expanded:
            self._expanded = 0
            self.runner.commit(list(paths))
            self._count_cached(paths)

    def capturable_passes(self, text: UncachedText | None = None) -> CapturablePasses | None:
        """Passes over several levels, and over text before them; None if they cannot be captured."""
        if self._shared is not None:
            return None
        if text is None:
            capturable = self.runner.capturable_passes(self._k)
        elif all(self._is_drafting) and text.width <= MAX_CAPTURED and self.capturable_passes() is not None:
            capturable = self.runner.capturable_passes(self._k, NewText.of(text.tokens))
        else:
            return None
        if capturable is None:
            return None
        if text is not None:
            tokens = text.tokens
            capturable = capturable._replace(store_text=lambda _: self._count_cached(tokens))
        return capturable._replace(store_levels=partial(self._store_levels, capturable))

    def keep_rows(self, kept: Sequence[int]) -> None:
        """Continue with these rows of the call."""
        self._rows = [self._rows[row] for row in kept]
        self._is_drafting = [True] * len(self._rows)
        self._has_prompt = self._has_prompt and bool(kept)
        if self._has_prompt:
            self.runner.keep_rows(kept)
        elif kept:
            self.runner = self._begin(self._rows)

    def append_rows(self, new: int) -> None:
        """Add rows of the call, whose prompts are read now if those of the others were."""
        added = [_CachedRow.of_prompt(DraftText(prompt)) for prompt in self._batch.state.prompts[-new:]]
        self._rows += added
        self._is_drafting = [True] * len(self._rows)
        if not self._has_prompt:
            self.runner = self._begin(self._rows)
            return
        runner = self._begin(added)
        runner.prefill()
        self.runner.append_rows(runner)

    def _begin(self, rows: Sequence[_CachedRow], restarts: bool = False) -> Target:
        """A runner for these rows, before its prefill, after which their counts apply.

        On a restart the prefill processes the texts, but for their last tokens, which are left for the next pass. Every
        row is cut to the window on a restart, or if any prompt exceeds the window.
        """
        if restarts:
            for row in rows:
                row.prefilled = len(row.text.tokens) - 1
        # Rows that wait for the prefill may have generated tokens: also beyond the draft model's last position.
        texts = [row.text.tokens[: row.prefilled] for row in rows]
        window = self._window
        if window and not restarts and not window.is_exceeded_by(max(map(len, texts))):
            window = None
        prompts = [window.kept(tokens) if window else tokens for tokens in texts]
        for row, tokens, kept in zip(rows, texts, prompts, strict=True):
            row.cached = len(tokens)
            row.skipped = len(tokens) - len(kept)
        if (longest := max(map(len, prompts))) > self._max_positions:
            raise ValueError(
                f"the prompt has {longest} tokens, but the draft reads at most {self._max_positions}; use another draft"
            )
        model = self._draft.model
        prompt = draft_prompt(model, self._batch, list(map(self._without_unknown_ids, prompts)))
        try:
            check_computation(model, TargetRequirements(), *prompt)
        except ValueError as error:
            remedy = "give another draft, or load it without quantisation"
            raise ValueError(f"the draft model, not the target: {error}; or {remedy}") from error
        runner = make_target(TargetRequirements(), model, *prompt, compile=self._draft.compile)
        runner.shares_prompts = not self._draft.reads_target  # the target's features are added to all rows
        return runner

    def _without_unknown_ids(self, tokens: Sequence[int]) -> list[int]:
        """Token ids, with 0 for those that the draft model has no embedding of, as in place of images."""
        size = embedding_size(self._draft.model)
        return [token if 0 <= token < size else 0 for token in tokens]

    def _length_after_pass(self, row: _CachedRow) -> int:
        """Tokens of a row in the cache after the next pass."""
        window = self._window
        return 1 + sum(window) if window is not None and window.is_exceeded_by(row.length) else row.length

    def _update_texts(self) -> list[bool]:
        """Append the new tokens to the texts; returns which texts are complete."""
        generated = self._batch.state.generated
        return [row.text.extend(tokens) for row, tokens in zip(self._rows, generated, strict=True)]

    def _depth_limits(self, max_depths: Sequence[int], is_complete: Sequence[bool]) -> list[int]:
        """How deep each row can draft in its positions and slots, 0 if its text is incomplete."""
        if max(map(self._length_after_pass, self._rows)) + self._batch.call.drafting.max_slots > self.runner.slot_limit:
            return [0] * len(self._rows)
        limits = []
        for row, complete in zip(self._rows, is_complete, strict=True):
            # Nothing is known of the text after a prompt to which tokens without text were added.
            has_text = len(row.text.tokens) > row.prefilled
            limits.append(max(0, self._max_positions - self._length_after_pass(row)) if complete and has_text else 0)
        return [min(depth, limit) for depth, limit in zip(max_depths, limits, strict=True)]

    def _prepare_pass(self, depths: list[int]) -> UncachedText:
        """Prepare the cache for a pass over new text; returns that text, one token 0 for rows that do not draft.

        Where the texts exceed the window, their beginnings are computed again first, in a new cache.
        """
        window = self._window
        rows = self._rows
        self._is_drafting = [depth > 0 for depth in depths]
        self._expanded = 0
        passes = []
        # Where a row exceeds the window, all rows are computed again from what the window has of them.
        longest = max(row.length for row, is_drafting in zip(rows, self._is_drafting, strict=True) if is_drafting)
        if window and window.is_exceeded_by(longest):
            self.runner = self._begin(rows, restarts=True)
            self.runner.prefill()
            passes.append(sum(row.prefilled - row.skipped for row in rows))
        self.runner.drop_rows(self._batch.is_active())
        # At least the last token of each text is left for the pass, as its logits are needed.
        cached = [max(row.prefilled, min(row.cached, len(row.text.tokens) - 1)) for row in rows]
        if cached != [row.cached for row in rows]:
            self.runner.rewind([count - row.prefilled for row, count in zip(rows, cached, strict=True)])
            for row, count in zip(rows, cached, strict=True):
                row.cached = count
        tokens = [
            self._without_unknown_ids(row.text.tokens[row.cached :]) if is_drafting else [0]
            for row, is_drafting in zip(rows, self._is_drafting, strict=True)
        ]
        text = UncachedText(tokens, depths, passes)
        masks = text.masks if self.is_one_pass else [0] * len(rows)
        longest = max(len(new) + count for new, count in zip(tokens, masks, strict=True))
        return text._replace(tokens_per_pass=[*passes, sum(self._is_drafting) * longest])

    def _extend(self, text: UncachedText, masks: Sequence[Sequence[int]] | None = None) -> torch.Tensor:
        """`[batch, tokens, vocab]` logits of a pass over uncached tokens, which are kept, and masks after them."""
        masks = [()] * len(text.tokens) if masks is None else masks
        tree = DraftTree.chains([[*tokens[1:], *after] for tokens, after in zip(text.tokens, masks, strict=True)])
        logits = self.runner.forward(tree, [tokens[0] for tokens in text.tokens], self._is_drafting)
        kept = zip(text.tokens, self._is_drafting, strict=True)
        self.runner.commit([list(range(len(tokens) - 1)) if is_drafting else None for tokens, is_drafting in kept])
        self._count_cached(text.tokens)
        return logits

    def _count_cached(self, added: Sequence[Sequence[int]]) -> None:
        """Count tokens that were added to the cache, in the rows that draft."""
        for row, is_drafting, tokens in zip(self._rows, self._is_drafting, added, strict=True):
            row.cached += len(tokens) if is_drafting else 0

    def _store_levels(self, capturable: CapturablePasses, states: torch.Tensor | None, expanded: int) -> None:
        """Count nodes that a captured function has expanded."""
        self._expanded = expanded
        capturable.store_levels(states, expanded)


def _last_of(values: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """`[batch, tokens, …]` to `[batch, …]`: of row ``b`` those of token ``counts[b] - 1``; of token 0 where it is 0."""
    if len(set(counts)) == 1:
        return values[:, max(0, counts[0] - 1)]
    last = torch.tensor([max(0, count - 1) for count in counts], device=values.device)
    return values[torch.arange(len(counts), device=values.device), last]
