"""The target model in the decoding loop: prefill, forward passes over draft trees, rollback to the accepted path."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import nn
from torch.nn.functional import pad
from transformers import Cache, DynamicCache, EncoderDecoderCache

from hf_specgen import compat
from hf_specgen.call import Compile
from hf_specgen.device_tree import Frontier, PassTree
from hf_specgen.linear_layers import FastLinearLayers
from hf_specgen.targets.attention import without_cudnn_attention
from hf_specgen.targets.cache import padded_tokens
from hf_specgen.targets.graphs import CallGraphs, graphs_of_call, is_captured
from hf_specgen.targets.inputs import CallInputs, PreparedCall, call_cache
from hf_specgen.targets.masks import StepMasks, fixed_mask
from hf_specgen.targets.model_parts import compares_slots, decoder_config, keeps_state
from hf_specgen.targets.passes import (
    CapturablePass,
    CapturablePasses,
    CompactAcceptedPath,
    DraftModelPass,
    ModelPass,
    NewText,
    PassOutput,
    TreeInputs,
    TreePass,
)
from hf_specgen.targets.replay_queue import MAX_ROW_SKEW
from hf_specgen.targets.row_layout import RowLayout, scatter_rows
from hf_specgen.targets.support import last_position, pass_capacity, slot_limit
from hf_specgen.tree import DraftTree


class _PassInputs(NamedTuple):
    """A pass over a draft but its first `cached` tokens, of the rows in the cache; `active` as for `Target.forward`."""

    tree: PassTree
    inputs: dict[str, torch.Tensor]
    active: Sequence[bool] | None
    cached: int = 0


class Target:
    """A causal language model with a per-row cache; arguments as prepared by `generate`, `input_ids` left-padded.

    `graphs`: whether passes after the prefill are captured as CUDA graphs.
    """

    max_row_skew: float = float("inf")
    """How many tokens a row may be ahead of the slowest row."""
    shares_prompts: bool = True
    """Whether rows with equal prompts may be prefilled once."""
    has_recurrent_state: bool = False
    """Whether the model has a recurrent state; valid after the prefill."""

    def __init__(self, prepared: PreparedCall, graphs: Compile = False):
        model = prepared.model
        self.model = model
        self.device = compat.input_device(model)
        self.batch = len(prepared.input_ids)
        self._graphs = graphs_of_call(model, graphs) if graphs else None
        self._pass = ModelPass()
        self._linear_layers = FastLinearLayers(model)
        self._config = decoder_config(model)
        self._inputs = CallInputs(prepared)
        self.first_positions = self._inputs.first_positions
        """The position of each row's first generated token."""
        self.last_position = last_position(self._config, self.first_positions)
        self.slot_limit = slot_limit(model)
        self._pass_capacity = pass_capacity(model) - MAX_ROW_SKEW
        self._make_cache(prepared)
        self._layout = RowLayout(self.batch, self.last_position)
        self._masks = StepMasks(model, self._inputs.padding, required=bool(graphs))
        keeps_order = keeps_state(self._config) or compares_slots(self._config)
        self.verifies_chains_only = keeps_order or self._masks.chains_only
        """Whether a draft must be a chain: states cannot branch, attention takes no mask or compares slot indices."""
        # Captured passes receive the padding as an input.
        self._step_masks = StepMasks(model, None, required=True)
        self._starts: tuple[int, ...] = ()
        """The slot of each row at which the last pass, or the tree that grows, began."""

    def _make_cache(self, prepared: PreparedCall) -> None:
        """Make the cache of the call, which takes over the contents of the cache that `generate` passes on."""
        model_kwargs = prepared.model_kwargs
        passed: Any = model_kwargs.get(compat.CACHE)
        self.returns_cache = compat.is_user_defined(passed)
        """Whether the caller of `generate` gave a cache, and so sees its contents even if only tokens are returned."""
        self._passed_pair: EncoderDecoderCache | None = passed if isinstance(passed, EncoderDecoderCache) else None
        self._passed_cache = getattr(passed, "self_attention_cache", passed)
        self.cache = call_cache(self._passed_cache, self._config, prepared, keeps_all=bool(self._graphs))
        self._model_cache: Any = self.cache
        if "encoder_outputs" in model_kwargs or "encoder_hidden_states" in model_kwargs:
            # A decoder alone wraps a cache of Transformers so itself.
            of_encoder = getattr(passed, "cross_attention_cache", DynamicCache())
            self._model_cache = EncoderDecoderCache(self.cache, of_encoder)

    @property
    def rows(self) -> list[int]:
        """The rows of the call that are in the cache; the others have ended and were dropped."""
        return self._layout.rows

    @property
    def padding(self) -> tuple[int, ...]:
        """How many slots of each row of the cache, at its beginning, are padding."""
        return tuple(max(0, -offset) for offset in self._layout.offsets)

    @property
    def max_draft_tokens(self) -> float:
        """How many draft tokens of a row the next pass takes: limited by capacity of experts and compressed caches."""
        return min(self._pass_capacity, self.cache.max_pass_tokens) - 1

    @property
    def is_joinable(self) -> bool:
        """Whether a common target can process this one as a row, see `RowTarget`."""
        return False

    @property
    def _active_graphs(self) -> CallGraphs | None:
        """The captured functions of the model, unless there are none or capturing has failed."""
        return self._graphs if self._graphs is not None and self._graphs.is_active else None

    def prefill(self) -> torch.Tensor:
        """Run the model on the prompt; returns the logits after its last token, `[batch, 1, vocab]`."""
        with self._linear_layers.in_use():
            logits = self._inputs.prefill(self._model_cache, self.shares_prompts)
        self.cache.check_pass()
        slots = self.cache.lengths
        self._layout.place_prompt(slots, self.first_positions)
        self._starts = tuple(slot - 1 for slot in slots)  # the last token counts as pending
        return logits

    def forward(self, tree: DraftTree, pending: Sequence[int], active: Sequence[bool] | None = None) -> torch.Tensor:
        """Run the model on the pending tokens, which are not cached yet, and a draft.

        Returns `[batch, 1 + nodes, vocab]` logits. `active` are the rows of which `commit` may keep something; None:
        all.
        """
        self._starts = self.cache.lengths
        inputs = {"input_ids": tree.step_tokens(pending, self.device)}
        return self._results(self._run(self.model, tree, inputs, active).logits, tree.batch, 1 + tree.nodes)

    def forward_again(self, pending: Sequence[int], active: Sequence[bool] | None = None) -> torch.Tensor:
        """Repeat the last pass without its draft, whose states are not finite, and erase them: `[batch, 1, vocab]`."""
        self._undo_pass()
        self.cache.erase_rejected()
        return self.forward(DraftTree.empty(len(pending)), pending, active)

    def forward_without_commit(self, tree: DraftTree, pending: Sequence[int], active: Sequence[bool]) -> torch.Tensor:
        """As `forward`, but the cache keeps nothing: for passes that draft. They are not captured."""
        starts = self.cache.lengths
        present, inputs = self._layout.gather_inputs(tree, {"input_ids": tree.step_tokens(pending, self.device)})
        with without_cudnn_attention(self.device):
            logits = self._eager_pass(self.model, _PassInputs(present, inputs, active)).logits
        self.cache.set_lengths(starts)
        if bool(logits.isnan().any()):
            self.cache.erase_rejected()
        return self._results(logits, tree.batch, 1 + tree.nodes)

    def _undo_pass(self) -> None:
        """Return to where the last pass began."""
        self.cache.set_lengths(self._starts)

    def extend_tree(self, frontier: Frontier, active: Sequence[bool] | None = None) -> torch.Tensor:
        """Run the model on the frontier of trees whose root and other nodes are cached: for draft models.

        The root of a tree is the last token in the cache before it grows. Returns `[batch, new, vocab]` logits.
        """
        new = frontier.tokens.shape[1]
        cached = 1 + frontier.nodes - new
        self._starts = tuple(length - cached for length in self.cache.lengths)
        inputs = {"input_ids": frontier.tokens.to(self.device)}
        logits = self._run(self.model, frontier, inputs, active, cached).logits
        return self._results(logits, frontier.batch, new)

    def capturable_passes(self, levels: int, text: NewText | None = None) -> CapturablePasses | None:
        """What `extend_tree` over `levels` levels in one captured function needs; None if it cannot be captured.

        The function starts from a root that is cached, as `extend_tree` does, or from text that is not.
        """
        graphs = self._active_graphs
        if graphs is None or self.verifies_chains_only or not self._inputs.is_text():
            return None
        next_positions = map(sum, zip(self.cache.lengths, self._layout.offsets, strict=True))
        longest = levels + (0 if text is None else text.tokens.shape[1])
        if len(self.rows) < self.batch or max(next_positions) + longest > self.last_position:
            return None
        drafter_pass = DraftModelPass(self._pass, self._step_masks)
        offsets = torch.tensor(self._layout.offsets)[:, None]
        capturable = CapturablePasses(graphs, self.cache, drafter_pass, self._store_levels)
        return capturable._replace(padding_mask=self._masks.padding_mask, offsets=offsets, text=text)

    def pass_shape(self, tokens: int) -> tuple[int, int]:
        """How many rows, and tokens of each, a pass over `tokens` tokens of each row computes."""
        return len(self.rows), tokens if self._active_graphs is None else padded_tokens(tokens)

    def last_states(self, aux_layers: Sequence[int]) -> torch.Tensor:
        """The hidden states that chose the last tokens, see `HiddenStateTarget`."""
        raise ValueError(f"hidden states {list(aux_layers)} are not captured; name them in target_requirements()")

    def committed_states(self, aux_layers: Sequence[int]) -> list[torch.Tensor]:
        """The hidden states of the tokens that the last `commit` kept, see `HiddenStateTarget`."""
        raise ValueError(f"hidden states {list(aux_layers)} are not captured; name them in target_requirements()")

    def _store_levels(self, states: torch.Tensor | None, expanded: int) -> None:
        """Continue after passes that were made by a captured function; the root and the expanded nodes are cached."""
        self._starts = tuple(length - 1 - expanded for length in self.cache.lengths)

    def _results(self, values: torch.Tensor, batch: int, tokens: int) -> torch.Tensor:
        """Values of a pass, `[present rows, tokens of the pass, …]`, as `[batch, tokens, …]` of the call's rows."""
        return scatter_rows(values, self.rows, batch)

    def _set_lengths(self, generated: Sequence[int]) -> None:
        """Cut the cache of the rows to the prompt and `generated` tokens after it."""
        slots = zip(self._layout.prompt_slots, self._layout.gather(generated), strict=True)
        self.cache.set_lengths([slot + count for slot, count in slots])

    def _run(
        self,
        module: nn.Module,
        tree: PassTree,
        inputs: dict[str, torch.Tensor],
        active: Sequence[bool] | None,
        cached: int = 0,
    ) -> PassOutput:
        """One pass of a module over a tree but its first `cached` tokens, for the rows that are present."""
        step = _PassInputs(*self._layout.gather_inputs(tree, inputs), active, cached)
        graphs = self._active_graphs
        if graphs is None:
            with without_cudnn_attention(self.device):
                return self._eager_pass(module, step)
        # A captured pass has one of few widths; the padding is cut off from its outputs and the cache.
        new = 1 + step.tree.nodes - cached
        padding = padded_tokens(new) - new
        if padding:
            padded = {name: pad(values, (0, padding)) for name, values in step.inputs.items()}
            step = step._replace(tree=step.tree.padded(step.tree.nodes + padding), inputs=padded)
        with without_cudnn_attention(self.device):
            output = self._captured_pass(graphs, step)
        self.cache.set_lengths([length - padding for length in self.cache.lengths])
        return PassOutput(output.logits[:, :new], tuple(states[:, :new] for states in output.states))

    def _eager_pass(self, module: nn.Module, step: _PassInputs) -> PassOutput:
        """A pass on the cache of the call."""
        with self._linear_layers.in_use(len(self.rows) * (1 + step.tree.nodes - step.cached)):
            output = self._pass(module, self._arguments(step), self._model_cache)
        self.cache.check_pass()
        return output

    def _arguments(self, step: _PassInputs) -> dict[str, Any]:
        """The arguments of an eager pass but the cache."""
        tree, inputs, active, cached = step
        lengths = tuple(length - cached for length in self.cache.lengths)
        positions = self._layout.positions(tree, lengths, active, cached).to(self.device)
        mask = self._masks.of_step(tree, lengths, cached, self.cache.first_visible)
        return self._inputs.arguments(inputs, mask, positions)

    def _captured_pass(self, graphs: CallGraphs, step: _PassInputs) -> PassOutput:
        """A pass as a graph, once it was captured."""
        tokens = step.inputs["input_ids"]
        slots = tokens.shape[1]
        eager_pass = partial(self._eager_pass, self.model, step)
        capacity = graphs.move_to_static_buffers(self.cache, slots)
        if not capacity:
            return eager_pass()
        function: CapturablePass = self._pass
        if step.cached:
            # A growing tree: the inputs of `TreePass` have another shape in each level, so that each would need a
            # graph. With mask and positions as inputs, all levels share one.
            static_inputs: Any = self._arguments(step)
            static_inputs["attention_mask"] = fixed_mask(static_inputs["attention_mask"], len(tokens), capacity)
        else:
            function = TreePass(self._pass, self._step_masks)
            static_inputs = self._tree_inputs(step, capacity)
        output: PassOutput = graphs.run(function, static_inputs, self.cache, slots, eager_pass)
        return output

    def _tree_inputs(self, step: _PassInputs, capacity: int) -> TreeInputs:
        """The inputs of a captured pass over trees that begin with each row's last token."""
        tree = step.tree
        tokens = step.inputs["input_ids"]
        structure = None if tree.is_chain else tree.structure()
        offsets = self._layout.offsets_and_limits(tree, self.cache.lengths, step.active)
        padding_mask = self._masks.padding_mask
        if padding_mask is not None:
            padding_mask = pad(padding_mask, (0, capacity - padding_mask.shape[1]), value=True)
        others = self._inputs.others(tokens.shape[1])
        return TreeInputs(tokens, offsets, structure, padding_mask, self._inputs.axes, others)

    def copy(self) -> Self:
        """A target with the same cache, for passes that must not change the hidden states of the last step.

        Drafters read these of the original.
        """
        return copy.copy(self)

    def capture_now(self) -> None:
        """Capture further shapes when they are used first, if the model has been captured in some other shape."""
        if self._graphs is not None:
            self._graphs = replace(self._graphs, capture_now=is_captured(self.model))

    def commit(self, paths: Sequence[Sequence[int] | None]) -> None:
        """Keep the pending token and the accepted nodes of each row, and nothing of a row whose path is None."""
        move = None if self._active_graphs is None else self._move_captured
        self.cache.keep_accepted(self._starts, self._layout.gather(paths), move)

    def _move_captured(self, moves: torch.Tensor) -> None:
        """Copy the keys and values of accepted paths into place, as a graph once it was captured."""
        assert self._graphs is not None
        self._graphs.run(CompactAcceptedPath(), moves, self.cache, 0, partial(self.cache.move, moves))

    def rewind(self, kept: Sequence[int]) -> None:
        """Cut the cache of each row to the prompt and the first `kept` generated tokens."""
        self._set_lengths(kept)

    def keep_rows(self, kept: Sequence[int]) -> None:
        """Continue with these rows of the cache, in this order."""
        self._layout.keep_rows(kept)
        self._masks.keep_rows(kept)
        self.cache.batch_select_indices(torch.tensor(kept))
        self._layout.rows = list(range(len(kept)))

    def append_rows(self, *new: Target) -> None:
        """Add the rows of other such targets after the present ones; all are `is_joinable`."""
        for other in new:
            self._masks.append_rows(len(self._layout.offsets), other._masks, len(other.rows))
            self._layout.append_rows(other._layout)
            self.cache.append_rows(other.cache)

    def drop_rows(self, needed: Sequence[bool]) -> None:
        """Remove ended rows, with their part of the cache, once enough have ended; not where passes are captured."""
        indices = self._layout.rows_to_keep(needed)
        if indices is not None and self._graphs is None and self._inputs.rows_can_change(self.cache):
            rows = [self.rows[index] for index in indices]
            self.keep_rows(indices)
            self._layout.rows = rows  # by their number in the call

    def finish(self) -> Cache:
        """Return the cache of plain `generate`, which the contents move to: the caller's own object if it gave one."""
        cache = DynamicCache(config=self._config) if self._passed_cache is None else self._passed_cache
        self.cache.to_dynamic(cache)
        if self._graphs is not None:
            self._graphs.release(self.cache)
        if self._model_cache is not self.cache:
            self._model_cache.self_attention_cache = cache
            cache = self._model_cache
        if self._passed_pair is None:
            return cache
        # It holds the same two caches.
        self._passed_pair.is_updated = getattr(cache, "is_updated", self._passed_pair.is_updated)
        return self._passed_pair
