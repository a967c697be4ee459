"""The target model in the decoding loop: prefill, forward passes over draft trees, rollback to the accepted path."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedModel

from hf_specgen import compat
from hf_specgen.targets.attention import grouped_attention, without_cudnn_attention
from hf_specgen.targets.cache import MAX_DRAFT_SLOTS, RaggedCache
from hf_specgen.targets.captured_passes import CapturedPasses, padded_pass
from hf_specgen.targets.encoder import EncoderStepInputs
from hf_specgen.targets.inputs import Prompt, RowLayout, StepInputs, step_tokens
from hf_specgen.targets.masks import StepMasks
from hf_specgen.targets.model_parts import has_special_layers, keeps_state, layer_windows, mask_name, text_config
from hf_specgen.targets.replay import MAX_UNCACHED, UncachedTokens
from hf_specgen.targets.state_cache import make_layers
from hf_specgen.targets.support import last_position, slot_limit
from hf_specgen.tree import DraftTree


class Target:
    """A causal language model with a per-row cache; arguments as prepared by `generate`, `input_ids` left-padded.

    `captured` are the captured passes of the model, None to run steps eagerly; the prefill is always eager.
    """

    reuses_drafter_states: bool = False
    """Whether a step starts from hidden states that drafting has computed for its tokens."""
    max_row_skew: float = float("inf")
    """How many tokens a row may be ahead of the slowest row."""
    captured_layers: tuple[int, ...] = ()
    """Hidden states that captured passes return, as indices into Transformers' `hidden_states`."""

    def __init__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        captured: CapturedPasses | None = None,
    ):
        self.model, self._captured = model, captured
        is_encoder_decoder = bool(model.config.is_encoder_decoder)
        self._config = model.config.get_text_config(decoder=True) if is_encoder_decoder else text_config(model)
        self.device = compat.input_device(model)
        make_inputs = EncoderStepInputs if "encoder_outputs" in model_kwargs else StepInputs
        self._inputs = make_inputs(model, input_ids, model_kwargs)
        past_key_values = self._inputs.text_cache(model_kwargs.get("past_key_values"))
        self._call_cache = CallCache(past_key_values, self._config, generation_config, keeps_all=captured is not None)
        self.cache = self._call_cache.cache
        self._past_key_values = self._inputs.past_key_values(self.cache)
        self._starts: tuple[int, ...] = ()
        self._uncached = UncachedTokens(len(input_ids)) if keeps_state(self._config) else None
        self.first_positions = self._inputs.first_positions
        """The position of each row's first generated token."""
        self.last_position = last_position(self._config, self.first_positions)
        self.slot_limit = slot_limit(model)
        self._layout = RowLayout(len(input_ids), self.last_position)
        self.prompt = Prompt(input_ids, generation_config, model_kwargs, self.last_position, mask_name(model))
        self._masks = StepMasks(model, self.prompt.padding, required=captured is not None)
        if captured is not None and self._inputs.accompanies_text:
            raise ValueError("captured passes work with prompts of text alone; leave compile= out")

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
        return self._uncached is not None or self._masks.chains_only

    @property
    def supports_prefill_drafts(self) -> bool:
        """Whether a draft can be verified together with the prompt."""
        plain = not self._inputs.accompanies_text and self._uncached is None
        return plain and self.prompt.takes_drafts(max(self.cache.lengths, default=0))

    def prefill(self, draft: DraftTree) -> torch.Tensor:
        """Run the model on the prompt, and on chains of draft tokens that were proposed from the prompt alone.

        Returns `[batch, 1 + nodes, vocab]` logits: after the last prompt token, then after each node.
        """
        before = self.cache.lengths or (0,) * self.batch
        logits = self.prompt.run(self.model, self._past_key_values, draft)[:, -1 - draft.nodes :]
        self._prompt_was_cached(before[0], draft.nodes)
        return logits

    def _prompt_was_cached(self, before: int, columns: int) -> None:
        """Record the prompt's slots in the cache, which held `before` slots; its last token counts as pending."""
        slots = [length - columns for length in self.cache.lengths]
        self.prompt.check_cached(slots[0] - before if slots else 0)
        self._layout.place_prompt(slots, self.first_positions)
        self._starts = tuple(slot - 1 for slot in slots)

    def forward(
        self, tree: DraftTree, pending: Sequence[int] | torch.Tensor, active: Sequence[bool] | None = None
    ) -> torch.Tensor:
        """Run the model on the pending tokens, which are not cached yet, and a draft.

        Returns `[batch, 1 + nodes, vocab]` logits. `active` are the rows of which `commit` may keep something; None:
        all.
        """
        if (uncached := self._recurrent) is not None:
            if max(map(len, uncached.tokens)) > MAX_UNCACHED:
                self._replay_uncached(uncached)
            tree, pending = uncached.prepend(tree, torch.as_tensor(pending).tolist(), active)
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
    def _recurrent(self) -> UncachedTokens | None:
        """The uncached tokens of a model with a recurrent state, which is known after the prefill."""
        return self._uncached if self._uncached is not None and self.cache.has_recurrent_state else None

    def _replay_uncached(self, uncached: UncachedTokens) -> None:
        """Run the model on all uncached tokens; one pass for each different number of them."""
        while any(uncached.tokens):
            tree, pending, kept = uncached.replay_pass()
            tokens = self._step_tokens(tree, pending)
            self._run(self.model, tree, {"input_ids": tokens}, [path is not None for path in kept])
            self.cache.keep_accepted(self._starts, self._layout.gather(kept))

    def grow(self, tree: DraftTree, new: int, active: Sequence[bool] | None = None) -> torch.Tensor:
        """Run the model on the last `new` nodes of a tree whose root and first nodes are cached: for draft models.

        The root is the last token in the cache before the first `grow` of a tree. Returns `[batch, new, vocab]` logits.
        """
        inputs = {"input_ids": tree.input_tokens(self.device)[:, tree.nodes - new :]}
        cached = 1 + tree.nodes - new
        self._starts = tuple(length - cached for length in self.cache.lengths)
        return self._layout.scatter(self._run(self.model, tree, inputs, active, cached).logits, tree.batch)

    def _of_draft(self, values: torch.Tensor, batch: int) -> torch.Tensor:
        """Results of a pass, `[present, …]`, as `[batch, 1 + nodes, …]` of the pending token and the draft."""
        values = self._layout.scatter(values, batch)
        return values if (uncached := self._recurrent) is None else uncached.align(values)

    def _run(
        self,
        module: Any,
        tree: DraftTree,
        inputs: dict[str, torch.Tensor],
        active: Sequence[bool] | None,
        cached: int = 0,
    ) -> Any:
        """One pass of a module over a tree but its first `cached` tokens, for the rows that are present."""
        tree, inputs = self._layout.select(tree, inputs)
        new = 1 + tree.nodes - cached
        if self._captured is not None:
            tree, inputs = padded_pass(tree, inputs, new)
        lengths = self.cache.lengths
        if cached:
            lengths = tuple(length - cached for length in lengths)
        positions = self._layout.positions(tree, lengths, active, cached).to(self.device)
        mask = self._masks.of_step(tree, lengths, cached, self.cache.first_visible)
        arguments = self._inputs.arguments(inputs, mask, positions, self._past_key_values)
        with without_cudnn_attention(self.device):
            if self._captured is not None:
                del arguments["past_key_values"]
                return self._captured.run(self.model, arguments, self.cache, new, self.captured_layers)
            with grouped_attention():
                return module(**{**arguments, "use_cache": True, "return_dict": True})

    def commit(self, paths: Sequence[Sequence[int] | None]) -> None:
        """Keep the pending token and the accepted nodes of each row, and nothing of a row whose path is None."""
        if self._uncached is not None and self._uncached.is_in_pass:
            paths = self._uncached.commit(paths)
        self.cache.keep_accepted(self._starts, self._layout.gather(paths))

    def rewind(self, kept: Sequence[int]) -> None:
        """Cut the cache of each row to the prompt and the first `kept` generated tokens."""
        lengths = [first + n for first, n in zip(self._layout.prompt_slots, self._layout.gather(kept), strict=True)]
        if (uncached := self._recurrent) is not None:
            if uncached.is_in_pass:
                self.commit([None] * self.batch)
            lengths = uncached.reachable(self.rows, self.cache.lengths, lengths)
        self.cache.set_lengths(lengths)

    def drop_rows(self, needed: Sequence[bool]) -> None:
        """Remove ended rows from the batch, with their part of the cache, once enough rows have ended."""
        indices = self._layout.rows_to_keep(needed)
        # Another number of rows would be captured anew.
        if indices is None or self._captured is not None or not self._inputs.divisible:
            return
        self._layout.keep_rows(indices)
        self._masks.select_rows(indices)
        self._inputs.select_rows(indices)
        self.cache.batch_select_indices(torch.tensor(indices))

    def finish(self) -> Any:
        """Return the cache with the generated tokens: the user's own object if one was given."""
        if (uncached := self._recurrent) is not None:
            self._replay_uncached(uncached)
        if self._captured is not None:
            self._captured.release(self.cache)
        written_back = self._call_cache.write_back()
        if written_back is not None:
            return written_back
        return self._inputs.returned_cache(self.cache, self._past_key_values)

    def abandon(self) -> None:
        """After an exception: restore a cache that the user gave."""
        if self._captured is not None and self.cache.lengths:
            self._captured.release(self.cache)
        self._call_cache.restore()

    @property
    def returns_cache(self) -> bool:
        """Whether the user can see the cache after the call even if only tokens are returned."""
        return self._call_cache.is_given


class CallCache:
    """The cache of a call, and the one that the caller of `generate` gave, if any.

    With `keeps_all` sliding-window layers keep the slots outside of their window, as captured passes need.
    """

    def __init__(self, given: Any, config: Any, generation_config: GenerationConfig, keeps_all: bool):
        self._given = given if compat.is_user_defined(given) else None
        length = generation_config.max_length
        slots = None if length is None else int(length) + MAX_DRAFT_SLOTS
        self.cache = _make_cache(given, self.is_given, config, slots, keeps_all)
        self._given_lengths = self.cache.lengths
        if self.cache is self._given:
            self.cache.protect()

    @property
    def is_given(self) -> bool:
        """Whether the caller of `generate` gave a cache, and so sees its contents after the call."""
        return self._given is not None

    def write_back(self) -> DynamicCache | None:
        """Copy the contents into the `DynamicCache` that the caller gave; returns it, or None for any other cache."""
        if not isinstance(self._given, DynamicCache):
            return None
        self.cache.to_dynamic(self._given)
        return self._given

    def restore(self) -> None:
        """After an exception: cut a cache that the caller gave to what it held before."""
        if self.cache is self._given:
            self.cache.set_lengths(self._given_lengths or (0,) * len(self.cache.lengths))


def _make_cache(given: Any, user_owned: bool, config: Any, slots: int | None, keeps_all: bool) -> RaggedCache:
    """The cache for a call that can fill so many slots; other arguments as for `CallCache`."""
    if keeps_all and user_owned and any(getattr(given, "is_sliding", ())):
        raise ValueError(
            f"the given {type(given).__name__} has dropped what is outside of sliding windows, and captured passes "
            "need all of it; leave past_key_values or compile= out"
        )
    if isinstance(given, RaggedCache):
        return given
    if given is not None and (type(given) is not DynamicCache or given.offloading):
        raise _unusable_cache(given, user_owned)
    special = has_special_layers(config)
    if user_owned and special:
        raise ValueError(
            "a DynamicCache cannot roll back the convolutions, recurrent states or indexed attention of this model; "
            "leave past_key_values out of the first call, and give later ones the cache that it returned"
        )
    if given is not None and user_owned:
        return RaggedCache.from_dynamic(given, slots)
    windows = [] if keeps_all else layer_windows(config)
    if keeps_all and slots is not None:
        slots += 128  # for the padding of captured passes
    return RaggedCache(windows, slots, layers=make_layers(config, slots) if special else None)


def _unusable_cache(given: Any, user_owned: bool) -> ValueError:
    """The reason why a call cannot speculate with a cache, and what to do."""
    kind = type(given).__name__
    if getattr(given, "offloading", False):
        kind = f"an offloaded {kind}"
    remedy = "leave past_key_values out" if user_owned else 'give cache_implementation="dynamic"'
    return ValueError(
        "candidate_generator= works with a DynamicCache that is not offloaded, or the cache of an earlier speculative "
        f"call, not with {kind}; {remedy}"
    )
