"""Sessions of draft models with the target's tokenizer: a pass for each token, or one pass for all of them.

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
from hf_specgen.candidates.draft_window import DraftWindow
from hf_specgen.candidates.encoder_draft import embedding_size, known_tokens
from hf_specgen.candidates.head_sessions import FeatureQueue, IndependentHeadsSession
from hf_specgen.grown_tree import GrownTree
from hf_specgen.heads.checkpoint import Fields, Source, read_tensors, tensor_infos
from hf_specgen.targets.cache import MAX_DRAFT_SLOTS
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

    Args:
        read: makes a target of the draft model for the beginning of each row's text.
        window: the part of long texts that is read; None for all of it.

    Attributes:
        drafts: the rows that take part in the current draft.
        passes: tokens, over all rows, of the passes of `uncached` and `extend` for the current draft.
    """

    def __init__(
        self,
        call: DraftCall,
        draft: PreTrainedModel,
        read: Callable[[list[list[int]]], Target],
        window: DraftWindow | None,
    ):
        self._state, self._read, self._window, self._embedded = call.state, read, window, embedding_size(draft)
        self._max_positions = position_table(text_config(draft))
        self._is_prefilled = False
        prompts = call.state.prompts
        exceeds = window is not None and window.is_exceeded_by(max(map(len, prompts)))
        self._begin([self._kept(prompt) if exceeds else known_tokens(prompt, self._embedded) for prompt in prompts])
        self._cached = [0] * call.state.batch  # generated tokens of each row in the cache, or before the window
        self.drafts, self.passes = [True] * call.state.batch, list[int]()

    def _kept(self, tokens: list[int]) -> list[int]:
        """What the draft model reads of a row's text when it starts on it."""
        return known_tokens(tokens if self._window is None else self._window.kept(tokens), self._embedded)

    def _begin(self, prompts: list[list[int]]) -> None:
        """Read from these tokens on."""
        self.reader, self._lengths = self._read(prompts), list(map(len, prompts))

    def _length(self, row: int) -> int:
        """Tokens of a row that are in the cache, or will be after the next pass."""
        tokens = self._lengths[row] + len(self._state.generated[row]) - self._cached[row]
        return 1 + sum(self._window) if self._window is not None and self._window.is_exceeded_by(tokens) else tokens

    def max_draft_tokens(self, row: int) -> int:
        """How many positions the draft model has left; none where its cache slots may run out."""
        if max(map(self._length, range(self._state.batch))) + MAX_DRAFT_SLOTS > self.reader.slot_limit:
            return 0
        return max(0, self._max_positions - self._length(row))

    def prefill(self) -> torch.Tensor | None:
        """Before the first draft, so that a call that never drafts has none: `[batch, vocab]` logits; then None."""
        if self._is_prefilled:
            return None
        self._is_prefilled = True
        return self.reader.prefill(DraftTree.empty(self._state.batch))[:, -1]

    def uncached(self, max_depths: Sequence[int]) -> list[list[int]]:
        """The tokens of each row that the draft model has not read, in the rows that draft; otherwise the last one."""
        state, rows = self._state, range(self._state.batch)
        self.passes.clear()
        self.drafts = [max_depths[row] > 0 and self.max_draft_tokens(row) > 0 for row in rows]
        if self._window is not None:
            self._restart(self._window)
        self.reader.drop_rows([not state.has_ended(row) for row in rows])
        texts = zip(state.generated, self._cached, self.drafts, strict=True)
        return [known_tokens(text[read:] if drafts else text[-1:], self._embedded) for text, read, drafts in texts]

    def _restart(self, window: DraftWindow) -> None:
        """Read the window of all rows anew if one of them exceeds it."""
        generated = self._state.generated
        counts = zip(self._lengths, generated, self._cached, strict=True)
        tokens = [length + len(text) - cached for length, text, cached in counts]
        if not any(window.is_exceeded_by(count) for count, drafts in zip(tokens, self.drafts, strict=True) if drafts):
            return
        texts = zip(self._state.prompts, generated, strict=True)
        self._begin([self._kept([*prompt, *text][:-1]) for prompt, text in texts])
        self._cached = [max(0, len(text) - 1) for text in generated]
        self.reader.prefill(DraftTree.empty(self._state.batch))
        self.passes.append(sum(self._lengths))

    def extend(self, uncached: Sequence[list[int]], masks: Sequence[int] = ()) -> torch.Tensor:
        """`[batch, tokens, vocab]` logits of a pass over uncached tokens, which are kept, and masks after them."""
        tree = DraftTree.chains([[*tokens[1:], *masks] for tokens in uncached])
        logits = self.reader.forward(tree, [tokens[0] for tokens in uncached], self.drafts)
        kept = zip(uncached, self.drafts, strict=True)
        self.reader.commit([list(range(len(tokens) - 1)) if drafts else None for tokens, drafts in kept])
        self._count([len(tokens) for tokens in uncached])
        self.passes.append(sum(self.drafts) * logits.shape[1])
        return logits

    def _count(self, new: Sequence[int]) -> None:
        """Count tokens that were added to the cache, in the rows that draft."""
        for row, count in enumerate(new):
            if self.drafts[row]:
                self._cached[row] += count
                self._lengths[row] += count

    def grow(self, tree: GrownTree, new: int) -> torch.Tensor:
        """`[batch, new, vocab]` logits after the last `new` nodes of a tree."""
        return self.reader.grow(tree, new, self.drafts)

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep accepted nodes in the cache; the next pass computes those that were not expanded."""
        self.reader.commit(list(paths))
        self._count(list(map(len, paths)))


class DraftModelSession(AutoregressiveSession):
    """Drafts for one call with a model that predicts one token at a time."""

    def __init__(
        self,
        call: DraftCall,
        draft: PreTrainedModel,
        runner: DraftRunner,
        k: int,
        tree: Tree,
        confidence_threshold: float,
    ):
        tree = None if runner.reader.verifies_chains_only else tree
        super().__init__(call, k, tree, confidence_threshold, vocabulary_size(call.model or draft))
        self._runner = runner

    def max_draft_tokens(self, row: int) -> int:
        return self._runner.max_draft_tokens(row)

    def first_scores(self) -> torch.Tensor:
        """Run the model on what was generated since the last draft, in the rows that draft now."""
        after_prompt = self._runner.prefill()
        if after_prompt is not None and not any(self.call.state.generated):
            return after_prompt
        uncached = self._runner.uncached(self.max_depths)
        logits = self._runner.extend(uncached)
        self.passes += self._runner.passes
        return last_of(logits, [len(tokens) for tokens in uncached])

    def next_scores(self, tree: GrownTree, new: int) -> torch.Tensor:
        return self._runner.grow(tree, new)

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        self._runner.commit(paths)


@dataclass(frozen=True)
class ParallelDraft:
    """How a draft model drafts in one pass, from its config.

    Args:
        mask_token: the token at positions that are not known yet.
        layers: indices into `hidden_states` of the target (negative ones from the end) that PARD-2 reads; none: PARD.
        features: their width together.
        scale: factor of their projection.
        has_bias: whether the projection has a bias.
    """

    mask_token: int
    layers: tuple[int, ...] = ()
    features: int = 0
    scale: float = 0.0
    has_bias: bool = False

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
        width, scale = config.integer("pard2_target_dim"), config.number("pard2_scale")
        return cls(mask, tuple(layers), width, scale, config.flag("pard2_proj_bias"))

    def layers_of(self, target: PreTrainedModel) -> tuple[int, ...]:
        """Indices from 0 on; `ValueError` for a target with other layers or another width."""
        config = target.config.get_text_config()
        count = config.num_hidden_layers
        if self.features != len(self.layers) * config.hidden_size or not all(
            -count - 1 <= layer <= count for layer in self.layers
        ):
            raise ValueError(
                f"the draft reads layers {list(self.layers)} of its target, {self.features} numbers in all, but this "
                f"target has {count} layers of {config.hidden_size}; use the draft that belongs to it"
            )
        return tuple(layer if layer >= 0 else count + 1 + layer for layer in self.layers)

    def projection(self, model: PreTrainedModel) -> nn.Linear:
        """The projection of a PARD-2 checkpoint, on the model's device."""
        size = int(model.config.get_text_config().hidden_size)
        path = Source(str(model.name_or_path)).required_file(PROJECTION_FILE, "PARD-2 needs it; download it again")
        shapes: dict[str, tuple[int, ...]] = {"target_proj.weight": (size, self.features)}
        shapes |= {"target_proj.bias": (size,)} if self.has_bias else {}
        found = {name: tuple(info.shape) for name, info in tensor_infos(path).items()}
        if found != shapes:
            raise ValueError(f"{path} has the tensors {found}, but config.json needs {shapes}; download it again")
        like: Any = model.get_input_embeddings()
        with torch.device("meta"):
            linear = nn.Linear(self.features, size, bias=self.has_bias)
        tensors = {name.removeprefix("target_proj."): tensor for name, tensor in read_tensors(path).items()}
        linear.load_state_dict(tensors, assign=True)
        return linear.to(like.weight).requires_grad_(False)


class ParallelDraftSession(IndependentHeadsSession):
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
        self.passes: list[int] = []
        self._max_depths: list[int] = []

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
        added, batch = self._added, len(self._max_depths)
        with nullcontext() if added is None else added.in_prompt():
            self._runner.prefill()
        uncached = self._runner.uncached(self._max_depths)
        counts = [len(tokens) for tokens in uncached]
        with nullcontext() if added is None else added.in_pass(counts, self._runner, depth - 1):
            logits = self._runner.extend(uncached, [self._mask] * (depth - 1))
        self.passes = list(self._runner.passes)
        slots = torch.tensor(counts, device=logits.device)[:, None] - 1 + torch.arange(depth, device=logits.device)
        rows = torch.arange(batch, device=logits.device)[:, None]
        return logits[rows, slots][..., : self._vocab].float()


class TargetFeatures:
    """Adds projected hidden states of the target to the embeddings of a draft model (PARD-2).

    Of each token those of the token before it; of the first token zeros, of mask tokens those of the last known token.
    """

    def __init__(self, call: DraftCall, target: HiddenStateTarget, draft: PreTrainedModel, settings: ParallelDraft):
        assert call.model is not None
        self._state, self._scale = call.state, settings.scale
        self._queue = FeatureQueue(call, target, settings.layers_of(call.model))
        self._projection, self._embeddings = settings.projection(draft), draft.get_input_embeddings()
        like = self._projection.weight
        self._rows = [like.new_zeros(0, len(like)) for _ in call.state.prompts]  # of tokens that were not processed
        self._is_first = True

    def receive(self) -> None:
        """Receive the hidden states of the tokens that were accepted."""
        if not self._queue.is_empty or any(self._state.generated):
            self._queue.receive()

    def _take(self) -> None:
        if self._queue.is_empty:
            self._queue.receive()
        weight = self._projection.weight
        for row, new in enumerate(self._queue.take()[0]):
            new = new.to(weight)
            if self._is_first:  # the first token, and those that a given cache held
                known = len(self._state.prompts[row]) + len(self._state.generated[row])
                new = torch.cat([new.new_zeros(known - len(new), new.shape[1]), new])
            self._rows[row] = torch.cat([self._rows[row], self._scale * self._projection(new)])

    @contextmanager
    def in_prompt(self) -> Iterator[None]:
        """Inside, the features of the prompt are added, once; prompts are padded on the left."""
        self._take()
        if not self._is_first:
            yield
            return
        self._is_first = False
        lengths = [len(prompt) for prompt in self._state.prompts]
        parts = [row[:length].flip(0) for row, length in zip(self._rows, lengths, strict=True)]
        self._rows = [row[length:] for row, length in zip(self._rows, lengths, strict=True)]
        with _adding(self._embeddings, pad_sequence(parts, batch_first=True).flip(1)):
            yield

    @contextmanager
    def in_pass(self, counts: Sequence[int], runner: DraftRunner, masks: int) -> Iterator[None]:
        """Inside, those of the next `counts` tokens of each row that drafts are added, and of the masks after them."""
        parts = []
        for row in runner.reader.rows:
            own = self._rows[row][: counts[row]]
            parts.append(torch.cat([own, own[-1:].expand(masks, -1)]))
            if runner.drafts[row]:
                self._rows[row] = self._rows[row][counts[row] :]
        with _adding(self._embeddings, pad_sequence(parts, batch_first=True)):
            yield


@contextmanager
def _adding(embeddings: nn.Module, values: torch.Tensor) -> Iterator[None]:
    """Inside, and in this thread, `values` `[rows, tokens, hidden]` are added to what an embedding returns."""
    thread, begin = threading.get_ident(), 0

    def add(_: nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor | None:
        nonlocal begin
        if threading.get_ident() != thread:
            return None
        begin, end = begin + output.shape[1], begin + output.shape[1]
        return output + values[:, end - output.shape[1] : end].to(output)

    handle = embeddings.register_forward_hook(add)
    try:
        yield
    finally:
        handle.remove()
