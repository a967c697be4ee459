"""Sessions of draft models: a pass for each token, or one pass for all of them.

A parallel draft model (PARD) reads the new text and K - 1 mask tokens after it; the last K positions predict the next K
tokens, independently of each other. The mask tokens do not stay in its cache. PARD-2 adds to the embedding of each
token a projection of the target's hidden states at the token before it.

Source: An et al., "PARD: Accelerating LLM Inference with Low-Cost PARallel Draft Model Adaptation" (2025), and PARD-2.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from hf_specgen.call import Compile
from hf_specgen.candidates.autoregressive import AutoregressiveSession, last_of
from hf_specgen.candidates.base import DraftCall, Tree, vocabulary_size
from hf_specgen.candidates.cross_tokenizer import DraftText, SharedVocabulary
from hf_specgen.candidates.draft_window import DraftWindow
from hf_specgen.candidates.encoder_draft import draft_prompt, embedding_size
from hf_specgen.candidates.head_sessions import FeatureQueue
from hf_specgen.candidates.one_pass import OnePassSession
from hf_specgen.device_tree import Frontier
from hf_specgen.heads.checkpoint import Fields, read_linear
from hf_specgen.heads.source import Source
from hf_specgen.targets.cache import MAX_DRAFT_SLOTS
from hf_specgen.targets.hidden_states import HiddenStateTarget
from hf_specgen.targets.model_parts import text_config
from hf_specgen.targets.passes import MAX_CAPTURED, LevelPasses, NewText
from hf_specgen.targets.requirements import TargetRequirements, make_target
from hf_specgen.targets.self_check import check_computation
from hf_specgen.targets.support import position_table
from hf_specgen.targets.target import Target
from hf_specgen.tree import DraftTree
from hf_specgen.verification import VerificationResult

PROJECTION_FILE = "warp_model.bin"
"""Where a PARD-2 checkpoint holds the projection of the target's hidden states."""


@dataclass
class _Row:
    """How much of a row's text is in the cache of the draft model: the first `cached` tokens.

    The first pass has processed the first `begin` of them, but the `skipped` ones in the middle of its window.
    """

    text: DraftText
    begin: int = 0
    skipped: int = 0
    cached: int = 0

    @property
    def length(self) -> int:
        """Tokens in the cache, and those that are not read yet."""
        return len(self.text.tokens) - self.skipped


class DraftRunner:
    """Runs a draft model over the texts of a call; its cache holds the beginning of each row's text.

    `drafts` are the rows that take part in the current draft, `passes` the tokens, over all rows, of the passes that it
    has taken over the texts. `share_encoder` and `compile` are settings of `DraftModelCandidates`.
    """

    def __init__(
        self,
        call: DraftCall,
        draft: PreTrainedModel,
        texts: Sequence[DraftText],
        window: DraftWindow | None,
        share_encoder: bool | None,
        compile: Compile,
    ):
        self._call, self._draft, self._window = call, draft, window
        self._share_encoder, self._compile = share_encoder, compile
        self._max_positions = position_table(text_config(draft))
        self._rows = [_Row(text) for text in texts]
        self.drafts, self.passes, self._has_prompt = [True] * len(texts), list[int](), False
        self.reader = self._begin(self._rows)
        self.rows_can_change = not self.reader.verifies_chains_only and all(type(one) is DraftText for one in texts)

    def _begin(self, rows: Sequence[_Row], restarts: bool = False) -> Target:
        """A target that processes these texts, those that restart without the last token, or what is in the window."""
        texts = [row.text.tokens[:-1] if restarts else row.text.tokens for row in rows]
        window = self._window
        if window and not restarts and not window.is_exceeded_by(max(map(len, texts))):
            window = None
        prompts = [window.kept(tokens) if window else tokens for tokens in texts]
        for row, tokens, kept in zip(rows, texts, prompts, strict=True):
            row.begin = row.cached = len(tokens)
            row.skipped = len(tokens) - len(kept)
        if (longest := max(map(len, prompts))) > self._max_positions:
            raise ValueError(
                f"the prompt has {longest} tokens, but the draft reads at most {self._max_positions}; use another draft"
            )
        known = [self._known(tokens) for tokens in prompts]
        prompt = draft_prompt(self._draft, self._call, known, self._share_encoder)
        try:
            check_computation(self._draft, TargetRequirements(), *prompt)
        except ValueError as error:
            remedy = "give another draft, or load it without quantisation"
            raise ValueError(f"the draft model, not the target: {error}; or {remedy}") from error
        return make_target(TargetRequirements(), self._draft, *prompt, compile=self._compile)

    def _known(self, tokens: Sequence[int]) -> list[int]:
        """Token ids, with 0 in place of those without an embedding: a target may have a larger, padded table."""
        size = embedding_size(self._draft)
        return [token if token < size else 0 for token in tokens]

    def keep_rows(self, kept: Sequence[int], new: int) -> None:
        """Continue with these rows of the call and `new` ones after them, whose prompts are read now."""
        added = [_Row(DraftText(prompt)) for prompt in self._call.state.prompts[len(kept) :]]
        self._rows = [*(self._rows[row] for row in kept), *added]
        self.drafts = [True] * len(self._rows)
        self._has_prompt = self._has_prompt and bool(kept)
        if not self._has_prompt:
            self.reader = self._begin(self._rows)
            return
        readers = [self._begin(added)] if added else []
        for reader in readers:
            reader.prefill()
        self.reader.replace_rows(kept, *readers)

    def _length(self, row: _Row) -> int:
        """Tokens of a row in the cache after the next pass."""
        window = self._window
        return 1 + sum(window) if window is not None and window.is_exceeded_by(row.length) else row.length

    def max_draft_tokens(self, index: int) -> int:
        """How many positions the draft model has left in a row; none where its cache slots may run out."""
        row = self._rows[index]
        is_complete = row.text.extend(self._call.state.generated[index])
        # Nothing is known of the text after a prompt to which tokens without text were added.
        has_text = len(row.text.tokens) > row.begin
        slots = max(map(self._length, self._rows)) + MAX_DRAFT_SLOTS
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
        self._count(uncached)
        self.passes.append(len(uncached) * max(map(len, uncached)))

    def uncached(self, max_depths: Sequence[int]) -> list[list[int]]:
        """The tokens of each row that the draft model has not read, in the rows that draft; otherwise one token."""
        state, window, rows = self._call.state, self._window, self._rows
        self.passes.clear()
        self.drafts = [depth > 0 and self.max_draft_tokens(row) > 0 for row, depth in enumerate(max_depths)]
        pairs = list(zip(rows, self.drafts, strict=True))
        if window and any(drafts and window.is_exceeded_by(row.length) for row, drafts in pairs):
            self.reader = self._begin(rows, restarts=True)
            self.reader.prefill()
            self.passes.append(sum(row.begin - row.skipped for row in rows))
        self.reader.drop_rows([not state.has_ended(row) for row in range(len(rows))])
        # The last token of a text is computed anew.
        kept = [max(row.begin, min(row.cached, len(row.text.tokens) - 1)) for row in rows]
        if kept != [row.cached for row in rows]:
            self.reader.rewind([count - row.begin for row, count in zip(rows, kept, strict=True)])
            for row, count in zip(rows, kept, strict=True):
                row.cached = count
        return [self._known(row.text.tokens[row.cached :]) if drafts else [0] for row, drafts in pairs]

    def extend(self, uncached: Sequence[list[int]], masks: Sequence[int] = ()) -> torch.Tensor:
        """`[batch, tokens, vocab]` logits of a pass over uncached tokens, which are kept, and masks after them."""
        tree = DraftTree.chains([[*tokens[1:], *masks] for tokens in uncached])
        logits = self.reader.forward(tree, [tokens[0] for tokens in uncached], self.drafts)
        kept = zip(uncached, self.drafts, strict=True)
        self.reader.commit([list(range(len(tokens) - 1)) if drafts else None for tokens, drafts in kept])
        self._count(uncached)
        self.passes.append(sum(self.drafts) * logits.shape[1])
        return logits

    def _count(self, added: Sequence[Sequence[int]]) -> None:
        """Count tokens that were added to the cache, in the rows that draft."""
        for row, drafts, tokens in zip(self._rows, self.drafts, added, strict=True):
            row.cached += drafts * len(tokens)

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep accepted nodes in the cache; the next pass computes those that were not expanded."""
        self.reader.commit(list(paths))
        self._count(paths)


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

    def next_scores(self, frontier: Frontier) -> torch.Tensor:
        if self._shared is not None:
            frontier = replace(frontier, tokens=self._shared.draft_tokens(frontier.tokens))
        logits = self._runner.reader.grow(frontier, self._runner.drafts)
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
        if self._added is not None and self._added.queue.is_empty:
            self._added.queue.receive()
        limits = [self._runner.max_draft_tokens(row) for row in range(len(max_depths))]
        self._max_depths, self.passes = list(map(min, max_depths, limits)), []
        return super().draft(self._max_depths)

    def observe(self, result: VerificationResult) -> None:
        super().observe(result)
        if self._added is not None:
            self._added.queue.receive()

    def depth_logits(self, depth: int) -> torch.Tensor:
        """One pass over what was generated since the last draft, and over `depth - 1` mask tokens."""
        runner, features, masks = self._runner, self._added, depth - 1
        is_first = features is not None and not features.queue.was_taken
        with nullcontext() if features is None or not is_first else features.added(features.of_prompts()):
            runner.prefill()
        uncached = runner.uncached(self._max_depths)
        counts, present = list(map(len, uncached)), runner.reader.rows
        with nullcontext() if features is None else features.added(features.of_text(runner.drafts, present, masks)):
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
        self.queue = FeatureQueue(call, target, settings.layers_of(call.model))
        self._projection, self._embeddings = settings.projection(draft, call.model), draft.get_input_embeddings()

    def _projected(self, features: Sequence[torch.Tensor], side: str) -> torch.Tensor:
        """`[batch, longest, hidden]` what is added to embeddings; with a bias also where there are no features."""
        padded = pad_sequence(list(features), batch_first=True, padding_side=side)
        return self._scale * self._projection(padded.to(self._projection.weight))

    def of_prompts(self) -> torch.Tensor:
        """`[batch, longest prompt, hidden]`; without features: tokens in a given cache, and padding on the left."""
        later = enumerate(self._state.generated)
        features, _ = self.queue.take([self.queue.available(row) - len(tokens) for row, tokens in later])
        longest = max(map(len, self._state.prompts))
        features[0] = nn.functional.pad(features[0], (0, 0, longest - len(features[0]), 0))
        return self._projected(features, "left")

    def of_text(self, drafts: Sequence[bool], rows: Sequence[int], masks: int) -> torch.Tensor:
        """`[rows, tokens, hidden]` of all further tokens in the rows that draft, and of `masks` mask tokens."""
        known, _ = self.queue.take([inf if row_drafts else 0 for row_drafts in drafts])
        return self._projected([torch.cat([known[row], known[row][-1:].repeat(masks, 1)]) for row in rows], "right")

    @contextmanager
    def added(self, values: torch.Tensor) -> Iterator[None]:
        """Inside, and in this thread, `values` are added to what the embedding returns for the next tokens."""
        thread, begin = threading.get_ident(), 0

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
