"""Sessions of draft models: a pass for each token, or one pass for all of them.

A parallel draft model (PARD) reads the new text and K - 1 mask tokens after it; the last K positions predict the next K
tokens, independently of each other. The mask tokens do not stay in its cache. PARD-2 adds to the embedding of each
token a projection of the target's hidden states at the token before it.

Source: An et al., "PARD: Accelerating LLM Inference with Low-Cost PARallel Draft Model Adaptation" (2025), and PARD-2.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from hf_specgen.candidates.autoregressive import AutoregressiveSession, last_of
from hf_specgen.candidates.base import DraftCall, Tree, vocabulary_size
from hf_specgen.candidates.cross_tokenizer import DraftText, SharedVocabulary
from hf_specgen.candidates.draft_window import DraftWindow
from hf_specgen.candidates.encoder_draft import embedding_size, known_tokens
from hf_specgen.candidates.head_sessions import FeatureQueue
from hf_specgen.candidates.one_pass import OnePassSession
from hf_specgen.grown_tree import GrownTree
from hf_specgen.heads.checkpoint import Fields, Source, read_linear
from hf_specgen.targets.cache import MAX_DRAFT_SLOTS
from hf_specgen.targets.graphs import MAX_CAPTURED, LevelPasses, NewText
from hf_specgen.targets.hidden_states import HiddenStateTarget
from hf_specgen.targets.model_parts import text_config
from hf_specgen.targets.support import position_table
from hf_specgen.targets.target import Target
from hf_specgen.tree import DraftTree
from hf_specgen.verification import VerificationResult

PROJECTION_FILE = "warp_model.bin"
"""Where a PARD-2 checkpoint holds the projection of the target's hidden states."""


class DraftRunner:
    """Runs a draft model over the texts of a call; its cache holds the beginning of each row's text.

    `read` makes a target of the draft model for the beginning of each row's text. `drafts` are the rows that take part
    in the current draft, `passes` the tokens, over all rows, of the passes that it has taken over the texts.
    """

    def __init__(
        self,
        call: DraftCall,
        draft: PreTrainedModel,
        texts: Sequence[DraftText],
        read: Callable[[list[list[int]]], Target],
        window: DraftWindow | None,
    ):
        self._state, self._texts, self._read, self._window = call.state, texts, read, window
        self._embedded, self._max_positions = embedding_size(draft), position_table(text_config(draft))
        self._begin([text.tokens for text in texts])
        self._has_prompt = False
        self.rows_can_change = not self.reader.verifies_chains_only and all(type(one) is DraftText for one in texts)
        self.drafts, self.passes = [True] * call.state.batch, list[int]()

    def _begin(self, prompts: list[list[int]], restarts: bool = False) -> None:
        """Read from these tokens on, or from those of them within the window."""
        exceeds = self._window is not None and self._window.is_exceeded_by(max(map(len, prompts)))
        window = self._window if restarts or exceeds else None
        self._num_cached = list(map(len, prompts))  # tokens of each text that are cached, or before the window
        prompts = [known_tokens(window.kept(tokens) if window else tokens, self._embedded) for tokens in prompts]
        self.reader, self._prompt_lengths = self._read(prompts), list(map(len, prompts))
        self._num_extended = [0] * len(prompts)  # tokens of each row in the cache that follow those

    def keep_rows(self, kept: Sequence[int], new: int) -> None:
        """Continue with these rows of the call and `new` ones after them, whose prompts are read now."""
        prompts = self._state.prompts[len(kept) :]
        self._texts = [*(self._texts[row] for row in kept), *map(DraftText, prompts)]
        self.drafts = [True] * len(self._texts)
        if not self._has_prompt or not kept:
            self._has_prompt = False
            self._begin([text.tokens for text in self._texts])
            return
        reader, *counts = self.reader, self._prompt_lengths, self._num_cached, self._num_extended
        kept_counts = [[count[row] for row in kept] for count in counts]
        if prompts:
            self._begin(prompts)
            self.reader.prefill()
            kept_counts[0] += self._prompt_lengths
            kept_counts[1] += self._num_cached
            kept_counts[2] += self._num_extended
        reader.replace_rows(kept, *[self.reader] if prompts else [])
        self.reader, (self._prompt_lengths, self._num_cached, self._num_extended) = reader, kept_counts

    def _cache_length(self, row: int) -> int:
        """Tokens of a row that are in the cache, and those that are not read yet."""
        return (
            self._prompt_lengths[row] + self._num_extended[row] + len(self._texts[row].tokens) - self._num_cached[row]
        )

    def _length(self, row: int) -> int:
        """Tokens of a row in the cache after the next pass."""
        window, tokens = self._window, self._cache_length(row)
        return 1 + sum(window) if window is not None and window.is_exceeded_by(tokens) else tokens

    def max_draft_tokens(self, row: int) -> int:
        """How many positions the draft model has left; none where its cache slots may run out."""
        generated = self._state.generated[row]
        is_complete = self._texts[row].extend(generated)
        # Nothing is known of the text after a prompt to which tokens without text were added.
        has_text = len(self._texts[row].tokens) > self._num_cached[row] - self._num_extended[row]
        slots = max(map(self._length, range(len(self._texts)))) + MAX_DRAFT_SLOTS
        if not is_complete or not has_text or slots > self.reader.slot_limit:
            return 0
        return max(0, self._max_positions - self._length(row))

    def prefill(self) -> None:
        """Read the prompts, before the first draft, so that a call that never drafts does not."""
        if not self._has_prompt:
            self.reader.prefill()
            self._has_prompt = True

    def after_text(self, uncached: Sequence[list[int]]) -> None:
        """Count tokens that a captured function has processed."""
        for row, tokens in enumerate(uncached):
            self._count(row, len(tokens))
        self.passes.append(len(uncached) * max(map(len, uncached)))

    def uncached(self, max_depths: Sequence[int]) -> list[list[int]]:
        """The tokens of each row that the draft model has not read, in the rows that draft; otherwise one token."""
        state, rows = self._state, range(len(self._texts))
        self.passes.clear()
        self.drafts = [max_depths[row] > 0 and self.max_draft_tokens(row) > 0 for row in rows]
        self._restart()
        self.reader.drop_rows([not state.has_ended(row) for row in rows])
        self._drop_last()
        texts = zip(self._texts, self._num_cached, self.drafts, strict=True)
        return [known_tokens(text.tokens[read:], self._embedded) if drafts else [0] for text, read, drafts in texts]

    def _restart(self) -> None:
        """Read the window of all rows anew if one of them exceeds it."""
        window, rows = self._window, range(len(self._texts))
        if window and any(self.drafts[row] and window.is_exceeded_by(self._cache_length(row)) for row in rows):
            self._begin([text.tokens[:-1] for text in self._texts], restarts=True)
            self.reader.prefill()
            self.passes.append(sum(self._prompt_lengths))

    def _drop_last(self) -> None:
        """Drop the last token of a text from the cache, which is computed anew."""
        before = list(self._num_extended)
        for row, text in enumerate(self._texts):
            surplus = self._num_cached[row] - (len(text.tokens) - 1)
            surplus = max(0, min(surplus, self._num_extended[row]))
            self._num_cached[row] -= surplus
            self._num_extended[row] -= surplus
        if self._num_extended != before:
            self.reader.rewind(self._num_extended)

    def extend(self, uncached: Sequence[list[int]], masks: Sequence[int] = ()) -> torch.Tensor:
        """`[batch, tokens, vocab]` logits of a pass over uncached tokens, which are kept, and masks after them."""
        tree = DraftTree.chains([[*tokens[1:], *masks] for tokens in uncached])
        logits = self.reader.forward(tree, [tokens[0] for tokens in uncached], self.drafts)
        kept = zip(uncached, self.drafts, strict=True)
        self.reader.commit([list(range(len(tokens) - 1)) if drafts else None for tokens, drafts in kept])
        for row, tokens in enumerate(uncached):
            self._count(row, len(tokens))
        self.passes.append(sum(self.drafts) * logits.shape[1])
        return logits

    def _count(self, row: int, tokens: int) -> None:
        """Count tokens that were added to the cache, in a row that drafts."""
        if self.drafts[row]:
            self._num_cached[row] += tokens
            self._num_extended[row] += tokens

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep accepted nodes in the cache; the next pass computes those that were not expanded."""
        self.reader.commit(list(paths))
        for row, path in enumerate(paths):
            self._count(row, len(path))


class DraftModelSession(AutoregressiveSession):
    """Drafts for one call with a model that predicts one token at a time.

    A draft model with another tokenizer drafts the tokens that it shares with the target.
    """

    def __init__(
        self,
        call: DraftCall,
        runner: DraftRunner,
        vocabulary: int,
        shared: SharedVocabulary | None,
        k: int,
        tree: Tree,
        confidence_threshold: float,
    ):
        tree = None if runner.reader.verifies_chains_only else tree
        super().__init__(call, k, tree, vocabulary, confidence_threshold)
        self._runner, self._shared, self.rows_can_change = runner, shared, runner.rows_can_change

    def keep_rows(self, kept: Sequence[int], new: int) -> None:
        self._runner.keep_rows(kept, new)

    def max_draft_tokens(self, row: int) -> int:
        return self._runner.max_draft_tokens(row)

    def first_scores(self) -> torch.Tensor:
        """Run the model on what was generated since the last draft, in the rows that draft now."""
        logits = last_of(self._runner.extend(self._uncached), [len(tokens) for tokens in self._uncached])
        self.passes += self._runner.passes
        return logits if self._shared is None else self._shared.target_logits(logits)

    def first_levels(self) -> LevelPasses | None:
        self._runner.prefill()
        self._uncached = self._runner.uncached(self.max_depths)
        if self.level_passes() is None or not all(self._runner.drafts) or max(map(len, self._uncached)) > MAX_CAPTURED:
            return None
        return self.level_passes(NewText.of(self._uncached))

    def after_text(self, *_: Any) -> None:
        self._runner.after_text(self._uncached)
        self.passes += self._runner.passes

    def next_scores(self, tree: GrownTree) -> torch.Tensor:
        if self._shared is not None:
            tree = tree.replace(tokens=self._shared.draft_tokens(tree.tokens))
        logits = self._runner.reader.grow(tree, tree.tokens.shape[1], self._runner.drafts)
        return logits if self._shared is None else self._shared.target_logits(logits)

    def level_passes(self, text: NewText | None = None) -> LevelPasses | None:
        return None if self._shared is not None else self._runner.reader.level_passes(self._k, text)

    def after_levels(self, states: torch.Tensor | None, expanded: int) -> None:
        self._runner.reader.after_levels(1 + expanded)

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        self._runner.commit(paths)


@dataclass(frozen=True)
class ParallelDraft:
    """How a draft model drafts in one pass, from its config."""

    mask_token: int
    layers: tuple[int, ...] = ()
    """Indices into `hidden_states` of the target (negative ones from the end) that PARD-2 reads; none for PARD."""
    scale: float = 0.0
    """Factor of their projection."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> ParallelDraft | None:
        """None for a model that predicts one token at a time."""
        config = Fields(vars(model.config))
        mask = config.optional_integer("pard_token") or config.optional_integer("ptd_token_id")
        if mask is None:
            return None
        if mask >= embedding_size(model):
            raise ValueError(f"config.json has pard_token {mask}, but the model has {embedding_size(model)} embeddings")
        if not config.flag("pard2"):
            return cls(mask)
        layers = config.get("pard2_target_layers")
        if not isinstance(layers, list) or not layers or not all(isinstance(layer, int) for layer in layers):
            raise ValueError(f"pard2_target_layers must be a list of layers, got {layers!r:.80}")
        return cls(mask, tuple(layers), config.number("pard2_scale"))

    def layers_of(self, target: PreTrainedModel) -> tuple[int, ...]:
        """Indices from 0 on; `ValueError` for a target that does not have them."""
        count = target.config.get_text_config().num_hidden_layers
        if not all(-count - 1 <= layer <= count for layer in self.layers):
            raise ValueError(
                f"the draft reads layers {list(self.layers)} of its target, but this target has {count} layers; use "
                "the draft that belongs to it"
            )
        return tuple(layer if layer >= 0 else count + 1 + layer for layer in self.layers)

    def projection(self, model: PreTrainedModel, target: PreTrainedModel) -> nn.Linear:
        """The projection of a PARD-2 checkpoint, on the model's device."""
        sizes = [int(one.config.get_text_config().hidden_size) for one in (model, target)]
        shape = sizes[0], sizes[1] * len(self.layers)
        path = Source(str(model.name_or_path)).required_file(PROJECTION_FILE, "PARD-2 needs it; download it again")
        like: Any = model.get_input_embeddings()
        return read_linear(path, "target_proj.", shape).to(like.weight).requires_grad_(False)


class ParallelDraftSession(OnePassSession):
    """Drafts for one call with a model that predicts all tokens in one pass."""

    def __init__(
        self, call: DraftCall, draft: PreTrainedModel, runner: DraftRunner, settings: ParallelDraft, k: int, tree: Tree
    ):
        self._vocab = vocabulary_size(call.model or draft)
        super().__init__(call, k, tree, self._vocab)
        self._runner, self._mask = runner, settings.mask_token
        self._added = None
        if settings.layers and isinstance(call.target, HiddenStateTarget):
            self._added = TargetFeatures(call, call.target, draft, settings)
        self.rows_can_change = self._added is None and runner.rows_can_change
        self.passes: list[int] = []
        self._max_depths: list[int] = []

    def keep_rows(self, kept: Sequence[int], new: int) -> None:
        self._runner.keep_rows(kept, new)

    @torch.no_grad()
    def draft(self, max_depths: Sequence[int]) -> DraftTree:
        limits = [self._runner.max_draft_tokens(row) for row in range(len(max_depths))]
        self._max_depths, self.passes = list(map(min, max_depths, limits)), []
        return super().draft(self._max_depths)

    def observe(self, result: VerificationResult) -> None:
        super().observe(result)
        if self._added is not None:
            self._added.receive()

    def depth_logits(self, depth: int) -> torch.Tensor:
        """One pass over what was generated since the last draft, and over `depth - 1` mask tokens."""
        runner, features, masks = self._runner, self._added, depth - 1
        lengths = list(map(len, self.call.state.prompts))
        with nullcontext() if features is None or features.has_prompt else features.added(lengths, side="left"):
            runner.prefill()
        uncached = runner.uncached(self._max_depths)
        counts = [len(tokens) for tokens in uncached]
        known = [count * drafts for count, drafts in zip(counts, runner.drafts, strict=True)]
        with nullcontext() if features is None else features.added(known, runner.reader.rows, masks):
            logits = runner.extend(uncached, [self._mask] * masks)
        self.passes = list(runner.passes)
        slots = torch.tensor(counts, device=logits.device)[:, None] - 1 + torch.arange(depth, device=logits.device)
        rows = torch.arange(len(counts), device=logits.device)[:, None]
        return logits[rows, slots][..., : self._vocab].float()


class TargetFeatures:
    """Adds projected hidden states of the target to the embeddings of a draft model (PARD-2).

    Of each token those of the token before it; of the first token zeros, of mask tokens those of the last known token.
    """

    def __init__(self, call: DraftCall, target: HiddenStateTarget, draft: PreTrainedModel, settings: ParallelDraft):
        assert call.model is not None
        self._state, self._scale = call.state, settings.scale
        self._queue = FeatureQueue(call, target, settings.layers_of(call.model))
        self._projection, self._embeddings = settings.projection(draft, call.model), draft.get_input_embeddings()
        self._rows: list[torch.Tensor] = []  # of tokens that the draft model has not processed

    @property
    def has_prompt(self) -> bool:
        """Whether those of the prompt were taken from the target."""
        return bool(self._rows)

    def receive(self) -> None:
        """Receive the hidden states of the tokens that were accepted."""
        if not self._queue.is_empty or any(self._state.generated):
            self._queue.receive()

    def _take(self) -> None:
        if self._queue.is_empty:
            self._queue.receive()
        weight = self._projection.weight
        new = [features.to(weight) for features in self._queue.take()[0]]
        if not self._rows:
            self._rows = [weight.new_zeros(0, len(weight)) for _ in new]
            texts = zip(self._state.prompts, self._state.generated, new, strict=True)
            # Zeros for the first token, and for those that a given cache held.
            missing = [len(prompt) + len(text) - len(features) for prompt, text, features in texts]
            new = [nn.functional.pad(row, (0, 0, count, 0)) for row, count in zip(new, missing, strict=True)]
        for row, features in enumerate(new):
            self._rows[row] = torch.cat([self._rows[row], self._scale * self._projection(features)])

    @contextmanager
    def added(
        self, counts: Sequence[int], rows: Sequence[int] = (), masks: int = 0, side: str = "right"
    ) -> Iterator[None]:
        """Inside, and in this thread, those of the next tokens of each row are added to what the embedding returns.

        `counts` tokens follow in each row of the call, and `masks` mask tokens after them. The pass computes these
        `rows`, or all if there are none, and pads shorter ones on a `side`.
        """
        self._take()
        parts, thread, begin = [], threading.get_ident(), 0
        for row in rows or range(len(counts)):
            known, self._rows[row] = self._rows[row].tensor_split([counts[row]])
            parts.append(torch.cat([known, known[-1:].repeat(masks, 1)]))
        values = pad_sequence(parts, batch_first=True, padding_side=side)

        def add(_: nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor | None:
            nonlocal begin
            if threading.get_ident() != thread:
                return None
            begin, end = begin + output.shape[1], begin + output.shape[1]
            return output + values[:, end - output.shape[1] : end].to(output)

        handle = self._embeddings.register_forward_hook(add)
        try:
            yield
        finally:
            handle.remove()
