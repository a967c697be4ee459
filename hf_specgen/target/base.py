"""The target model in the decoding loop: prefill, forward passes over draft trees, rollback to the accepted path."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import DynamicCache, GenerationConfig, PreTrainedModel

from hf_specgen import compat
from hf_specgen.target.attention import grouped_attention
from hf_specgen.target.compiled import CompiledPasses, padded_width
from hf_specgen.target.encoder import EncoderStepInputs
from hf_specgen.target.model_parts import mask_name, text_config
from hf_specgen.target.own_cache import max_slots, own_cache
from hf_specgen.target.prompt import Prompt
from hf_specgen.target.state_layers import keeps_state
from hf_specgen.target.step_inputs import StepInputs
from hf_specgen.target.step_masks import StepMasks
from hf_specgen.target.support import last_position, slot_limit
from hf_specgen.target.unread import MAX_UNREAD, UnreadTokens
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
    max_lead: float = float("inf")
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
        self._given_cache = given if compat.is_user_defined(given) else None
        slots = max_slots(generation_config)
        self.cache = own_cache(given, self._given_cache is not None, self._config, slots, compiled is not None)
        self._past_key_values = self._inputs.past_key_values(self.cache)
        self._given_lengths = self.cache.lengths
        if self.cache is self._given_cache:
            self.cache.protect()
        self._is_exact = True
        self._offsets: tuple[int, ...] = ()
        self._prompt_slots: tuple[int, ...] = ()
        self._starts: tuple[int, ...] = ()
        self._present = list(range(len(input_ids)))
        self._unread = UnreadTokens(len(input_ids)) if keeps_state(self._config) else None
        self.first_positions = self._inputs.first_positions
        """The position of each row's first generated token."""
        self.last_position = last_position(self._config, self.first_positions)
        self.slot_limit = slot_limit(model)
        self.prompt = Prompt(input_ids, generation_config, model_kwargs, self.last_position, mask_name(model))
        self._masks = StepMasks(model, self.prompt.padding, required=compiled is not None)
        if compiled is not None and self._inputs.accompanies_text:
            raise ValueError("compile=True works with prompts of text alone; leave it out")

    @property
    def rows(self) -> list[int]:
        """The rows of the call that are in the cache; the others have ended and were dropped."""
        return self._present

    @property
    def padding(self) -> tuple[int, ...]:
        """How many slots of each row of the cache, at its beginning, are padding."""
        return tuple(max(0, -offset) for offset in self._offsets)

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
        read = self.cache.lengths[0] - columns - before if self.cache.lengths else 0
        tokens = self.prompt.input_ids.shape[1]
        if not 0 < read <= tokens:
            raise ValueError(
                f"the model cached {read} positions for a prompt of {tokens} tokens; models that add "
                "positions of their own (prefix or prompt tuning) do not work with candidate_generator="
            )
        self._prompt_slots = tuple(length - columns for length in self.cache.lengths)
        self._starts = tuple(length - 1 for length in self._prompt_slots)
        places = zip(self.first_positions, self._prompt_slots, strict=True)
        self._offsets = tuple(position - length for position, length in places)

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
        if self.has_recurrent_state and self._unread is not None:
            if max(map(len, self._unread.tokens)) > MAX_UNREAD:
                self._read_unread()
            tree, pending = self._unread.put_first(tree, torch.as_tensor(pending).tolist(), active)
        logits = self._run(self.model, tree, {"input_ids": self._step_tokens(tree, pending)}, active).logits
        return self._of_draft(logits, tree.batch)

    def _step_tokens(self, tree: DraftTree, pending: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """`[batch, 1 + nodes]` input tokens of a step; also records the slots at which it begins."""
        self._starts = self.cache.lengths
        first = torch.as_tensor(pending, device=self.device)[:, None]
        return torch.cat([first, tree.tokens.to(self.device)], dim=1) if tree.nodes else first

    @property
    def has_recurrent_state(self) -> bool:
        """Whether the model has a recurrent state, which is known after the prefill."""
        return self._unread is not None and self.cache.has_recurrent_state

    def _read_unread(self) -> None:
        """Run the model on all unread tokens; one pass for each different number of them."""
        assert self._unread is not None
        while any(self._unread.tokens):
            rows = self._unread.to_read()
            count = max(len(tokens or ()) for tokens in rows)
            chains = DraftTree.chains([(tokens or [0] * count)[1:] for tokens in rows])
            tokens = self._step_tokens(chains, [(tokens or [0])[0] for tokens in rows])
            self._run(self.model, chains, {"input_ids": tokens}, [row is not None for row in rows])
            kept = [None if tokens is None else list(range(count - 1)) for tokens in rows]
            self.cache.keep_accepted(self._starts, [kept[row] for row in self._present])

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
        return self._for_all_rows(self._run(self.model, tree, inputs, active, cached).logits, tree.batch)

    def _of_draft(self, values: torch.Tensor, batch: int) -> torch.Tensor:
        """Results of a pass, `[present, …]`, as `[batch, 1 + nodes, …]` of the pending token and the draft."""
        values = self._for_all_rows(values, batch)
        return self._unread.align(values) if self.has_recurrent_state and self._unread is not None else values

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
            module: the model or the part to run.
            tree, inputs, active: of all rows; dropped rows take no part.
            cached: how many of the pending token and the first nodes are in the cache already; `inputs` has the others.

        Returns:
            the module's output for the rows that are present.
        """
        if len(self._present) < tree.batch:
            tree = tree.select(self._present)
            inputs = {name: tensor[self._present] for name, tensor in inputs.items()}
        new = 1 + tree.nodes - cached
        if self._compiled is not None:
            padding = padded_width(new) - new
            tree = DraftTree(pad(tree.tokens, (0, padding)), tree.parents)
            inputs = {name: _padded(tokens, new + padding) for name, tokens in inputs.items()}
        depth = torch.tensor([tree.depths(row) for row in range(tree.batch)], device=self.device)
        lengths = tuple(length - cached for length in self.cache.lengths)
        bases = [length + offset for length, offset in zip(lengths, self._offsets, strict=True)]
        if active is not None:
            # The positions of an ended row may exceed the model's position table, where a model would raise.
            kept = [active[row] for row in self._present]
            bases = [base if keeps else min(base, self.last_position) for base, keeps in zip(bases, kept, strict=True)]
        positions = torch.tensor(bases, device=self.device)[:, None] + depth[:, cached:]
        if cached:  # padding nodes may exceed the position table; their results are ignored
            ends = [self.last_position if base <= self.last_position else 2**31 for base in bases]
            positions = positions.minimum(torch.tensor(ends, device=self.device)[:, None])
        mask = self._masks.of_step(tree, depth, lengths, cached, self.cache.first_visible)
        arguments = self._inputs.arguments(inputs, mask, positions, self._past_key_values)
        if self._compiled is not None:
            del arguments["past_key_values"]
            return self._compiled.run(self.model, arguments, self.cache, new, self.compiled_taps)
        with grouped_attention():
            return module(**{**arguments, "use_cache": True, "return_dict": True})

    def commit(self, paths: Sequence[Sequence[int] | None]) -> None:
        """Keep the pending token and the accepted nodes of each row, and nothing of a row whose path is None."""
        if self._unread is not None and self._unread.is_in_pass:
            paths = self._unread.keep(paths)
        self.cache.keep_accepted(self._starts, [paths[row] for row in self._present])

    def rewind(self, read: Sequence[int]) -> None:
        """Cut the cache of each row to the prompt and the first `read` generated tokens."""
        kept = [read[row] for row in self._present]
        lengths = [first + n for first, n in zip(self._prompt_slots, kept, strict=True)]
        self.cache.set_lengths(self._reachable(lengths) if self.has_recurrent_state else lengths)

    def _reachable(self, lengths: Sequence[int]) -> list[int]:
        """The largest lengths up to these that a recurrent state can return to; the tokens between become unread."""
        assert self._unread is not None
        if self._unread.is_in_pass:
            self.commit([None] * self.batch)
        reachable = []
        for row, now, wanted in zip(self._present, self.cache.lengths, lengths, strict=True):
            removed = self._unread.remove(row, now + len(self._unread.tokens[row]) - wanted)
            self._is_exact = self._is_exact and removed is not None
            reachable.append(now - (removed or 0))
        return reachable

    def drop_rows(self, needed: Sequence[bool]) -> None:
        """Remove ended rows from the batch, with their part of the cache, once enough rows have ended.

        That is a quarter of them, or half of the last four: in float32 on two cores three rows take longer than four.
        """
        places = [place for place, row in enumerate(self._present) if needed[row]]
        rows, ended = len(self._present), len(self._present) - len(places)
        if not places or ended < (rows / 4 if rows > 4 else rows / 2) or not self._inputs.divisible:
            return
        if self._compiled is not None:  # another number of rows would be compiled anew
            return
        self._present = [self._present[place] for place in places]
        self._offsets = tuple(self._offsets[place] for place in places)
        self._prompt_slots = tuple(self._prompt_slots[place] for place in places)
        self._masks.select_rows(places)
        self._inputs.select_rows(places)
        self.cache.batch_select_indices(torch.tensor(places))

    def finish(self) -> Any:
        """Return the cache with the generated tokens: the user's own object if one was given.

        None where a recurrent state contains tokens beyond the output, because a stopping criterion cut off tokens
        that were accepted in an earlier step.
        """
        if self.has_recurrent_state:
            self._read_unread()
        if not self._is_exact:
            return None
        if self._compiled is not None:
            self._compiled.release(self.cache)
        if isinstance(self._given_cache, DynamicCache):
            self.cache.to_dynamic(self._given_cache)
            return self._given_cache
        return self._inputs.returned_cache(self.cache, self._past_key_values)

    def abandon(self) -> None:
        """After an exception: restore a cache that the user gave."""
        if self.cache is self._given_cache:
            self.cache.set_lengths(self._given_lengths or (0,) * len(self.cache.lengths))

    @property
    def returns_cache(self) -> bool:
        """Whether the user can see the cache after the call even if only tokens are returned."""
        return self._given_cache is not None


def _padded(tokens: torch.Tensor, width: int) -> torch.Tensor:
    """`[batch, width]` tokens with zeros behind them, in memory of their own: compiled passes also fix strides."""
    padded = tokens.new_zeros(len(tokens), width)
    padded[:, : tokens.shape[1]] = tokens
    return padded
