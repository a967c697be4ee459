"""The target model in the decoding loop: prefill, forward passes over draft trees, rollback to the accepted path."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from hf_specgen import compat
from hf_specgen.targets.compiled import CompiledPasses
from hf_specgen.targets.encoder import EncoderStepInputs
from hf_specgen.targets.model_parts import mask_name, text_config
from hf_specgen.targets.model_pass import ModelPass
from hf_specgen.targets.own_cache import CallCache
from hf_specgen.targets.prompt import Prompt
from hf_specgen.targets.row_layout import RowLayout
from hf_specgen.targets.state_layers import keeps_state
from hf_specgen.targets.step_inputs import StepInputs, step_tokens
from hf_specgen.targets.step_masks import StepMasks
from hf_specgen.targets.support import last_position, slot_limit
from hf_specgen.targets.unread import MAX_UNREAD, UnreadTokens
from hf_specgen.tree import DraftTree


class Target:
    """A causal language model with a per-row cache.

    Args:
        model: the target.
        input_ids: `[batch, prompt]`, left-padded.
        generation_config: as prepared by `generate`.
        model_kwargs: as prepared by `generate`: attention mask, positions, cache and whatever else forward takes.
        compiled: the compiled passes of the model; None to run steps eagerly. The prompt is always read eagerly.

    Raises:
        ValueError: for a cache or inputs that speculative decoding, or a compiled pass, does not support.
    """

    reuses_drafter_states: bool = False
    """Whether a step starts from hidden states that drafting has computed for its tokens."""
    max_row_skew: float = float("inf")
    """How many tokens a row may be ahead of the slowest row."""
    compiled_taps: tuple[int, ...] = ()
    """Hidden states that compiled passes return, as indices into Transformers' `hidden_states`."""

    def __init__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        compiled: CompiledPasses | None = None,
    ):
        self.model, self._compiled = model, compiled
        is_encoder_decoder = bool(model.config.is_encoder_decoder)
        self._config = model.config.get_text_config(decoder=True) if is_encoder_decoder else text_config(model)
        self.device = compat.input_device(model)
        make_inputs = EncoderStepInputs if "encoder_outputs" in model_kwargs else StepInputs
        self._inputs = make_inputs(model, input_ids, model_kwargs)
        given = self._inputs.text_cache(model_kwargs.get("past_key_values"))
        self._call_cache = CallCache(given, self._config, generation_config, keeps_all=compiled is not None)
        self.cache = self._call_cache.cache
        self._past_key_values = self._inputs.past_key_values(self.cache)
        self._starts: tuple[int, ...] = ()
        self._unread = UnreadTokens(len(input_ids)) if keeps_state(self._config) else None
        self.first_positions = self._inputs.first_positions
        """The position of each row's first generated token."""
        self.last_position = last_position(self._config, self.first_positions)
        self.slot_limit = slot_limit(model)
        self._layout = RowLayout(len(input_ids), self.last_position)
        self.prompt = Prompt(input_ids, generation_config, model_kwargs, self.last_position, mask_name(model))
        self._masks = StepMasks(model, self.prompt.padding, required=compiled is not None)
        if compiled is not None and self._inputs.accompanies_text:
            raise ValueError("compiled passes work with prompts of text alone; leave compile= out")
        self._pass = ModelPass(
            model, self._inputs, self._masks, self._layout, self.cache, self._past_key_values, compiled
        )

    @property
    def rows(self) -> list[int]:
        """The rows of the call that are in the cache; the others have ended and were dropped."""
        return self._layout.rows

    @property
    def padding(self) -> tuple[int, ...]:
        """How many slots of each row of the cache, at its beginning, are padding."""
        return tuple(max(0, -offset) for offset in self._layout.offsets)

    @property
    def batch(self) -> int:
        """Rows of the prompt."""
        return len(self.prompt.input_ids)

    @property
    def verifies_chains_only(self) -> bool:
        """Whether a draft must be a chain: recurrent states cannot branch, FlashAttention takes no mask."""
        return self._unread is not None or self._masks.chains_only

    @property
    def supports_prefill_drafts(self) -> bool:
        """Whether a draft can be verified together with the prompt."""
        plain = not self._inputs.accompanies_text and self._unread is None
        return plain and self.prompt.takes_drafts(max(self.cache.lengths, default=0))

    def prefill(self, draft: DraftTree) -> torch.Tensor:
        """Run the model on the prompt, and on draft tokens that were proposed from the prompt alone.

        Args:
            draft: chains of draft tokens for the first positions, or an empty tree.

        Returns:
            `[batch, 1 + nodes, vocab]` logits: after the last prompt token, then after each node.
        """
        before = self.cache.lengths or (0,) * self.batch
        logits = self.prompt.read(self.model, self._past_key_values, draft)[:, -1 - draft.nodes :]
        self._prompt_was_read(before[0], draft.nodes)
        return logits

    def _prompt_was_read(self, before: int, columns: int) -> None:
        """Record the prompt's slots in the cache, which held `before` slots; its last token counts as pending."""
        slots = [length - columns for length in self.cache.lengths]
        self.prompt.check_read(slots[0] - before if slots else 0)
        self._layout.place_prompt(slots, self.first_positions)
        self._starts = tuple(slot - 1 for slot in slots)

    def forward(
        self, tree: DraftTree, pending: Sequence[int] | torch.Tensor, active: Sequence[bool] | None = None
    ) -> torch.Tensor:
        """Run the model on the pending tokens and a draft.

        Args:
            tree: the draft.
            pending: the last token of each row, which is not in the cache yet.
            active: the rows of which `commit` may keep something; all if left out.

        Returns:
            `[batch, 1 + nodes, vocab]` logits: after the pending token, then after each node.
        """
        if (unread := self._recurrent) is not None:
            if max(map(len, unread.tokens)) > MAX_UNREAD:
                self._read_unread(unread)
            tree, pending = unread.put_first(tree, torch.as_tensor(pending).tolist(), active)
        logits = self._run(self.model, tree, {"input_ids": self._step_tokens(tree, pending)}, active).logits
        return self._of_draft(logits, tree.batch)

    def _step_tokens(self, tree: DraftTree, pending: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """`[batch, 1 + nodes]` input tokens of a step; also records the slots at which it begins."""
        self._starts = self.cache.lengths
        return step_tokens(tree, pending, self.device)

    @property
    def has_recurrent_state(self) -> bool:
        """Whether the model has a recurrent state, which is known after the prefill."""
        return self._recurrent is not None

    @property
    def _recurrent(self) -> UnreadTokens | None:
        """The unread tokens of a model with a recurrent state, which is known after the prefill."""
        return self._unread if self._unread is not None and self.cache.has_recurrent_state else None

    def _read_unread(self, unread: UnreadTokens) -> None:
        """Run the model on all unread tokens; one pass for each different number of them."""
        while any(unread.tokens):
            tree, pending, kept = unread.to_read()
            tokens = self._step_tokens(tree, pending)
            self._run(self.model, tree, {"input_ids": tokens}, [path is not None for path in kept])
            self.cache.keep_accepted(self._starts, self._layout.of(kept))

    def grow(self, tree: DraftTree, new: int, active: Sequence[bool] | None = None) -> torch.Tensor:
        """Run the model on further nodes of a tree whose root and first nodes are cached: for draft models.

        The root is the last token in the cache before the first `grow` of a tree. `commit` then keeps a path.

        Args:
            tree: all nodes so far.
            new: number of new nodes, the last ones of the tree; the same in every row.
            active: the rows of which `commit` may keep something; all if left out.

        Returns:
            `[batch, new, vocab]` logits after each of them.
        """
        inputs = {"input_ids": tree.tokens[:, tree.nodes - new :].to(self.device)}
        cached = 1 + tree.nodes - new
        self._starts = tuple(length - cached for length in self.cache.lengths)
        return self._layout.spread(self._run(self.model, tree, inputs, active, cached).logits, tree.batch)

    def _of_draft(self, values: torch.Tensor, batch: int) -> torch.Tensor:
        """Results of a pass, `[present, …]`, as `[batch, 1 + nodes, …]` of the pending token and the draft."""
        values = self._layout.spread(values, batch)
        return values if (unread := self._recurrent) is None else unread.align(values)

    def _run(
        self,
        module: Any,
        tree: DraftTree,
        inputs: dict[str, torch.Tensor],
        active: Sequence[bool] | None,
        cached: int = 0,
    ) -> Any:
        """One pass of the model, or of a part of it; see `ModelPass`."""
        return self._pass.run(module, tree, inputs, active, cached, self.compiled_taps)

    def commit(self, paths: Sequence[Sequence[int] | None]) -> None:
        """Keep the pending token and the accepted nodes of each row, and nothing of a row whose path is None."""
        if self._unread is not None and self._unread.is_in_pass:
            paths = self._unread.keep(paths)
        self.cache.keep_accepted(self._starts, self._layout.of(paths))

    def rewind(self, read: Sequence[int]) -> None:
        """Cut the cache of each row to the prompt and the first `read` generated tokens."""
        lengths = [first + n for first, n in zip(self._layout.prompt_slots, self._layout.of(read), strict=True)]
        if (unread := self._recurrent) is not None:
            if unread.is_in_pass:
                self.commit([None] * self.batch)
            lengths = unread.reachable(self.rows, self.cache.lengths, lengths)
        self.cache.set_lengths(lengths)

    def drop_rows(self, needed: Sequence[bool]) -> None:
        """Remove ended rows from the batch, with their part of the cache, once enough rows have ended."""
        places = self._layout.to_keep(needed)
        # Another number of rows would be compiled anew.
        if places is None or self._compiled is not None or not self._inputs.divisible:
            return
        self._layout.keep(places)
        self._masks.select_rows(places)
        self._inputs.select_rows(places)
        self.cache.batch_select_indices(torch.tensor(places))

    def finish(self) -> Any:
        """Return the cache with the generated tokens: the user's own object if one was given."""
        if (unread := self._recurrent) is not None:
            self._read_unread(unread)
        if self._compiled is not None:
            self._compiled.release(self.cache)
        written_back = self._call_cache.write_back()
        if written_back is not None:
            return written_back
        return self._inputs.returned_cache(self.cache, self._past_key_values)

    def abandon(self) -> None:
        """After an exception: restore a cache that the user gave."""
        if self._compiled is not None and self.cache.lengths:
            self._compiled.release(self.cache)
        self._call_cache.restore()

    @property
    def returns_cache(self) -> bool:
        """Whether the user can see the cache after the call even if only tokens are returned."""
        return self._call_cache.is_given
