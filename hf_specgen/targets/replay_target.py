"""A target whose cache cannot be cut where the accepted tokens of each row end: it processes some of them again.

Such are models with recurrent states, and decoders that take no positions; see `hf_specgen.targets.replay_queue`.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from transformers import Cache, PreTrainedModel

from hf_specgen.call import Compile
from hf_specgen.device_tree import Frontier
from hf_specgen.targets.hooks import thread_hooks
from hf_specgen.targets.inputs import PreparedCall, takes_positions
from hf_specgen.targets.model_parts import decoder, decoder_config, may_have_recurrent_state
from hf_specgen.targets.passes import PassOutput
from hf_specgen.targets.replay_queue import MAX_ROW_SKEW, MAX_UNCACHED, ReplayQueue
from hf_specgen.targets.stepped_scan import scanning_layers, stepped
from hf_specgen.targets.target import Target
from hf_specgen.tree import DraftTree


class ReplayTarget(Target):
    """A `Target` whose passes begin with accepted tokens that the cache does not include yet."""

    def __init__(self, prepared: PreparedCall, graphs: Compile = False):
        super().__init__(prepared, graphs)
        self.verifies_chains_only = True
        common_start = places_tokens_by_slot(prepared.model, prepared.model_kwargs)
        if common_start:
            self.max_row_skew = MAX_ROW_SKEW
        self._numbering = _numbering_modules(self.model) if common_start else []
        self._queue = ReplayQueue(self.batch, common_start)
        self._scanning_layers = scanning_layers(self.model)
        self._has_pending = True
        """Whether the last pass began with the pending token, which is kept whatever is accepted."""

    def _eager_pass(self, *arguments: Any) -> PassOutput:
        with stepped(self._scanning_layers, self.cache):
            return super()._eager_pass(*arguments)

    def prefill(self) -> torch.Tensor:
        logits = super().prefill()
        self.has_recurrent_state = self.cache.has_recurrent_state
        self._queue.can_be_cut = not self.has_recurrent_state
        return logits

    def forward(self, tree: DraftTree, pending: Sequence[int], active: Sequence[bool] | None = None) -> torch.Tensor:
        if self.has_recurrent_state and max(self._queue.uncached) > MAX_UNCACHED:
            self._process_uncached()
        self._has_pending = True
        rows = zip(pending, tree.token_lists(), tree.parents, strict=True)
        # Each row's nodes without the padding after them.
        chains = [[token, *nodes[: len(parents)]] for token, nodes, parents in rows]
        return self._results(self._replay(chains, active), tree.batch, 1 + tree.nodes)

    def extend_tree(self, frontier: Frontier, active: Sequence[bool] | None = None) -> torch.Tensor:
        self._has_pending = False
        logits = self._replay(frontier.tokens.tolist(), active)
        return self._results(logits, frontier.batch, frontier.tokens.shape[1])

    def commit(self, paths: Sequence[Sequence[int] | None]) -> None:
        if not self._queue.is_in_pass:  # after the prefill
            super().commit(paths)
            return
        counts = [None if path is None else self._has_pending + len(path) for path in paths]
        self._queue.commit(counts)
        self._set_lengths(self._queue.cached)

    def rewind(self, kept: Sequence[int]) -> None:
        if self._queue.is_in_pass:
            self._undo_pass()
        for row in self.rows:
            self._queue.cut(row, kept[row])
        self._set_lengths(self._queue.cached)

    def finish(self) -> Cache:
        self._process_uncached()
        self._set_lengths(self._queue.cached)
        return super().finish()

    def _undo_pass(self) -> None:
        self.commit([None] * self.batch)

    def _results(self, values: torch.Tensor, batch: int, tokens: int) -> torch.Tensor:
        return self._queue.align(super()._results(values, batch, tokens), tokens)

    def _replay(
        self, new: Sequence[Sequence[int]], active: Sequence[bool] | None, limit: int | None = None
    ) -> torch.Tensor:
        """The logits of a pass over uncached tokens and `new` ones, `[present rows, tokens, vocab]`.

        At most `limit` tokens of a row are processed.
        """
        present = set(self.rows)
        takes_part = [row in present and (active is None or active[row]) for row in range(self.batch)]
        starts, texts = self._queue.next_pass(new, takes_part, limit)
        self._set_lengths(starts)
        # A row without tokens gets padding, which the next pass overwrites like the padding on the right.
        texts = [tokens or [0] for tokens in texts]
        chains = DraftTree.chains([tokens[1:] for tokens in texts])
        inputs = {"input_ids": chains.step_tokens([tokens[0] for tokens in texts], self.device)}
        # Padding tokens are not counted, so that those after them in the pass would get too low positions.
        padding_ids = {module.padding_idx for module in self._numbering}
        has_padding_ids = any(not padding_ids.isdisjoint(tokens[:-1]) for tokens in texts)
        with _one_by_one(self._numbering if has_padding_ids else ()):
            return self._run(self.model, chains, inputs, takes_part).logits

    def _process_uncached(self) -> None:
        """Run the model on all uncached tokens; a recurrent state takes a pass for each different number of them."""
        queue = self._queue
        while any(uncached := self._layout.gather(queue.uncached)):
            limit = None if queue.common_start else min(filter(None, uncached))
            takes_part = [queue.common_start or count > 0 for count in queue.uncached]
            self._replay([()] * self.batch, takes_part, limit)
            queue.commit([0 if takes else None for takes in takes_part])
            self._set_lengths(queue.cached)


def _numbering_modules(model: PreTrainedModel) -> list[Any]:
    """The modules of a decoder that number the tokens of a pass without counting padding tokens, as in M2M-100."""
    return [module for module in decoder(model).modules() if hasattr(module, "create_position_ids_from_input_ids")]


def _one_by_one(modules: Sequence[Any]) -> AbstractContextManager[None]:
    """In this context, these modules run on each token of a pass alone, as in plain decoding; in this thread only.

    The position of a token is then that of its slot, however many padding tokens are before it in the pass.
    """

    def number(module: Any, args: tuple[Any, ...], kwargs: Any, output: Any) -> torch.Tensor:
        named = {"cache_length": 0, **inspect.signature(module.forward).bind(*args, **kwargs).arguments}
        tokens = enumerate(named["input_ids"].split(1, dim=1), start=named["cache_length"])
        outputs = [module.forward(**{**named, "input_ids": ids, "cache_length": slot}) for slot, ids in tokens]
        return torch.cat(outputs, 1)

    return thread_hooks(modules, after=number)


def needs_replay(model: PreTrainedModel, model_kwargs: dict[str, Any]) -> bool:
    """Whether a call needs a `ReplayTarget`."""
    return places_tokens_by_slot(model, model_kwargs) or may_have_recurrent_state(decoder_config(model))


def places_tokens_by_slot(model: PreTrainedModel, model_kwargs: dict[str, Any]) -> bool:
    """Whether a decoder takes no positions and places each token by its slot in the cache."""
    return "encoder_outputs" in model_kwargs and not takes_positions(model)
