"""The target model as the decoding loop sees it: read the prompt, score a draft tree, keep what was accepted."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, cast

import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedModel

from hf_specgen import compat
from hf_specgen.target import masks
from hf_specgen.target.attention import grouped_attention
from hf_specgen.target.cache import RaggedCache
from hf_specgen.target.step_masks import StepMasks
from hf_specgen.target.support import last_position
from hf_specgen.tree import DraftTree

MAX_DRAFT_SLOTS = 64
"""Slots for draft tokens beyond the maximum length of the text."""
OWN_ARGUMENTS = {"attention_mask", "position_ids", "past_key_values", "logits_to_keep", "use_cache"}


class Target:
    """A causal language model with a per-row cache.

    Args:
        model: the model whose text is generated.
        input_ids: `[batch, prompt]`, left-padded.
        generation_config: as prepared by `generate`.
        model_kwargs: as prepared by `generate`: attention mask, positions, cache and whatever else forward takes.

    Raises:
        ValueError: for a cache or inputs that speculative decoding cannot work with.
    """

    reuses_drafter_states: bool = False
    """Whether a step goes on from what drafting has computed for its tokens."""

    def __init__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
    ):
        self.model, self._input_ids = model, input_ids
        self._generation_config = generation_config
        self._kwargs = model_kwargs
        self._config = model.config.get_text_config()
        self.device = model.device
        self._extra = _extra_arguments(model_kwargs)
        given = model_kwargs.get("past_key_values")
        self._given_cache = given if compat.is_user_defined(given) else None
        self._masks = StepMasks(model, _padding(model_kwargs.get("attention_mask")))
        self.cache = _own_cache(given, self._given_cache is not None, self._config, _max_slots(generation_config))
        self._given_lengths = self.cache.lengths
        if self.cache is self._given_cache:
            self.cache.protect()
        self._offsets: tuple[int, ...] = ()
        self._prompt_slots: tuple[int, ...] = ()
        self._starts: tuple[int, ...] = ()
        self._present = list(range(len(input_ids)))
        last = model_kwargs["position_ids"][..., -1].expand(len(input_ids)).tolist()
        self.first_positions = tuple(position + 1 for position in last)
        """The position of each row's first generated token."""
        self.last_position = last_position(self._config, self.first_positions)

    @property
    def supports_prefill_drafts(self) -> bool:
        """Whether a draft can be verified together with the prompt."""
        mask = self._kwargs.get("attention_mask")
        width = compat.mask_length(self._generation_config) if mask is None else mask.shape[1]
        nothing_unread = width == self._input_ids.shape[1] <= max(self.cache.lengths, default=0)
        return self._generation_config.prefill_chunk_size is None and not nothing_unread

    def prefill(self, draft: DraftTree) -> torch.Tensor:
        """Read the prompt, and a draft that was made before it was read.

        Args:
            draft: chains of draft tokens for the first positions, or an empty tree.

        Returns:
            `[batch, 1 + nodes, vocab]` logits: after the last prompt token, then after each node.
        """
        before = self.cache.lengths or (0,) * len(self._input_ids)
        logits = self._read_prompt(draft)[:, -1 - draft.nodes :]
        self._prompt_was_read(before[0], draft.nodes)
        return logits

    def _read_prompt(self, draft: DraftTree) -> torch.Tensor:
        """The logits of a pass over the prompt and the columns of draft tokens behind it."""
        kwargs = {**self._kwargs, "past_key_values": self.cache, **self._longer(draft.nodes)}
        input_ids = torch.cat([self._input_ids, draft.tokens.to(self._input_ids)], dim=1)
        config: Any = copy.copy(self._generation_config)
        if kwargs.get("attention_mask") is None and draft.nodes:
            # By this length `generate` decides whether the prompt begins in the cache.
            compat.set_mask_length(config, compat.mask_length(config) + draft.nodes)
        outputs = compat.prefill(self.model, input_ids, config, kwargs)
        return cast(torch.Tensor, outputs.logits)

    def _longer(self, columns: int) -> dict[str, Any]:
        """What goes with the prompt, with columns added."""
        longer: dict[str, Any] = {}
        if columns == 0:
            return longer
        mask, positions = self._kwargs.get("attention_mask"), self._kwargs["position_ids"]
        more = positions[..., -1:] + torch.arange(1, columns + 1, device=positions.device)
        within_table = positions[..., -1:] <= self.last_position
        more = torch.where(within_table, more.clamp(max=self.last_position), more)
        longer["position_ids"] = torch.cat([positions, more], dim=-1)
        if mask is not None:
            longer["attention_mask"] = torch.cat([mask, mask.new_ones(len(mask), columns)], dim=1)
        if "logits_to_keep" in self._kwargs:
            longer["logits_to_keep"] = 1 + columns
        return longer

    def _prompt_was_read(self, before: int, columns: int) -> None:
        """Note where the prompt lies in the cache, which held `before` slots; its last token counts as pending."""
        read = self.cache.lengths[0] - columns - before if self.cache.lengths else 0
        if not 0 < read <= self._input_ids.shape[1]:
            raise ValueError(
                f"the model cached {read} positions for a prompt of {self._input_ids.shape[1]} tokens; models that add "
                "positions of their own (prefix or prompt tuning) do not work with candidate_generator="
            )
        self._prompt_slots = tuple(length - columns for length in self.cache.lengths)
        self._starts = tuple(length - 1 for length in self._prompt_slots)
        places = zip(self.first_positions, self._prompt_slots, strict=True)
        self._offsets = tuple(position - length for position, length in places)

    def forward(
        self, tree: DraftTree, pending: Sequence[int] | torch.Tensor, active: Sequence[bool] | None = None
    ) -> torch.Tensor:
        """Score a draft.

        Args:
            tree: the draft.
            pending: the last token of each row, which the target has not read yet.
            active: the rows of which something may be kept; all if left out.

        Returns:
            `[batch, 1 + nodes, vocab]` logits: after the pending token, then after each node.
        """
        device = self.device
        first = torch.as_tensor(pending, device=device)[:, None]
        input_ids = torch.cat([first, tree.tokens.to(device)], dim=1) if tree.nodes else first
        self._starts = self.cache.lengths
        return self._for_all_rows(self._run(self.model, tree, {"input_ids": input_ids}, active).logits, tree.batch)

    def grow(self, tree: DraftTree, new: int, active: Sequence[bool] | None = None) -> torch.Tensor:
        """Score further nodes of a tree whose root and first nodes have been read: for drafters that expand a tree.

        The root is the last token in the cache before the first `grow` of a tree. `commit` then keeps a path.

        Args:
            tree: all nodes so far.
            new: how many of them, at the end, are to be read; the same number in every row.
            active: the rows of which something may be kept; all if left out.

        Returns:
            `[batch, new, vocab]` logits after each of them.
        """
        inputs = {"input_ids": tree.tokens[:, tree.nodes - new :].to(self.device)}
        cached = 1 + tree.nodes - new
        self._starts = tuple(length - cached for length in self.cache.lengths)
        return self._for_all_rows(self._run(self.model, tree, inputs, active, cached).logits, tree.batch)

    def _for_all_rows(self, values: torch.Tensor, batch: int) -> torch.Tensor:
        """`[present, …]` to `[batch, …]`, with zeros for rows that have been dropped."""
        if len(values) == batch:
            return values
        spread = values.new_zeros(batch, *values.shape[1:])
        spread[self._present] = values
        return spread

    def _run(
        self,
        module: Any,
        tree: DraftTree,
        inputs: dict[str, torch.Tensor],
        active: Sequence[bool] | None,
        cached: int = 0,
    ) -> Any:
        """One pass of the model, or of a part of it, over the pending token and the nodes of a tree.

        Args:
            module: what is run.
            tree, inputs, active: of all rows; only those that are present take part.
            cached: how many of the pending token and the first nodes are in the cache already; inputs are the others.

        Returns:
            the module's output for the rows that are present.
        """
        if len(self._present) < tree.batch:
            tree = tree.select(self._present)
            inputs = {name: tensor[self._present] for name, tensor in inputs.items()}
        depth = torch.tensor([tree.depths(row) for row in range(tree.batch)], device=self.device)
        lengths = tuple(length - cached for length in self.cache.lengths)
        bases = [length + offset for length, offset in zip(lengths, self._offsets, strict=True)]
        if active is not None:
            # A row that has come to its end may stand behind a table of positions, where a model would raise.
            kept = [active[row] for row in self._present]
            bases = [base if keeps else min(base, self.last_position) for base, keeps in zip(bases, kept, strict=True)]
        positions = torch.tensor(bases, device=self.device)[:, None] + depth[:, cached:]
        if cached:  # nodes that fill up a row may stand behind a table of positions; their results are ignored
            ends = [self.last_position if base <= self.last_position else 2**31 for base in bases]
            positions = positions.minimum(torch.tensor(ends, device=self.device)[:, None])
        with grouped_attention():
            return module(
                **inputs,
                attention_mask=self._masks.of_step(tree, depth, lengths, cached, self.cache.first_visible),
                position_ids=positions,
                past_key_values=self.cache,
                use_cache=True,
                return_dict=True,
                **self._extra,
            )

    def commit(self, paths: Sequence[Sequence[int] | None]) -> None:
        """Keep the pending token and the accepted nodes of each row, and nothing of a row whose path is None."""
        self.cache.keep_accepted(self._starts, [paths[row] for row in self._present])

    def rewind(self, read: Sequence[int]) -> None:
        """Keep of each row the prompt and the first `read` generated tokens."""
        kept = [read[row] for row in self._present]
        self.cache.set_lengths([first + n for first, n in zip(self._prompt_slots, kept, strict=True)])

    def drop_rows(self, needed: Sequence[bool]) -> None:
        """Remove rows that have ended from the batch, once enough of them have.

        That is a quarter of them, or half of the last four: in float32 on two cores three rows take longer than four.
        Their part of the cache is lost.
        """
        places = [place for place, row in enumerate(self._present) if needed[row]]
        rows, ended = len(self._present), len(self._present) - len(places)
        if not places or ended < (rows / 4 if rows > 4 else rows / 2):
            return
        self._present = [self._present[place] for place in places]
        self._offsets = tuple(self._offsets[place] for place in places)
        self._prompt_slots = tuple(self._prompt_slots[place] for place in places)
        self._masks.select_rows(places)
        self.cache.batch_select_indices(torch.tensor(places))

    def finish(self) -> Any:
        """Hand the cache back: the user's own object if one was given, with the new text in it."""
        if isinstance(self._given_cache, DynamicCache):
            self.cache.to_dynamic(self._given_cache)
            return self._given_cache
        return self.cache

    def abandon(self) -> None:
        """After an exception: leave a cache that the user gave as it was."""
        if self.cache is self._given_cache:
            self.cache.set_lengths(self._given_lengths or (0,) * len(self.cache.lengths))

    @property
    def returns_cache(self) -> bool:
        """Whether the user can see the cache after the call even if only tokens are returned."""
        return self._given_cache is not None


def _own_cache(given: Any, user_owned: bool, config: Any, max_slots: int | None) -> RaggedCache:
    if isinstance(given, RaggedCache):
        return given
    if given is None or (type(given) is DynamicCache and not given.offloading):
        if given is not None and user_owned:
            return RaggedCache.from_dynamic(given, max_slots)
        return RaggedCache(masks.layer_windows(config), max_slots)
    raise ValueError(
        f"candidate_generator= works with a DynamicCache or the cache of an earlier speculative call, "
        f"not with {type(given).__name__}; leave past_key_values and cache_implementation unset"
    )


def _max_slots(config: GenerationConfig) -> int | None:
    """The number of cache slots that a call can fill: its maximum length and a draft behind it."""
    return None if config.max_length is None else int(config.max_length) + MAX_DRAFT_SLOTS


def _padding(attention_mask: torch.Tensor | None) -> torch.Tensor | None:
    if attention_mask is None or bool((attention_mask != 0).all()):
        return None
    return attention_mask != 0


def _extra_arguments(model_kwargs: dict[str, Any]) -> dict[str, Any]:
    extra = {name: value for name, value in model_kwargs.items() if name not in OWN_ARGUMENTS and value is not None}
    for name, value in extra.items():
        if isinstance(value, torch.Tensor):
            raise ValueError(f"candidate_generator= works with text-only inputs; leave out {name}")
    return extra
