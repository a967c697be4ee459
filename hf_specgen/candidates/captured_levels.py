"""Several levels of a draft tree as one captured function: expansion, passes of the drafter, and their proposals.

Nothing in it is decided by the host, so that a CUDA graph can repeat it. A chain needs it once; a tree once for every
`LEVELS_PER_SYNC` levels: the first levels follow a pass over new text, further ones a host synchronization. At its end
the best nodes are selected, of which the host then takes as many as are to be verified.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import nn
from torch.nn.functional import pad

from hf_specgen.candidates.acceptance import confidence_by_rank, finite
from hf_specgen.candidates.level_tensors import LevelTensors
from hf_specgen.candidates.tree_builder import ShapeConstants, TreeBuilder
from hf_specgen.device_tree import NodeSelection
from hf_specgen.targets.graphs import Capturable
from hf_specgen.targets.masks import StepLayout
from hf_specgen.targets.passes import CapturablePasses, DrafterInputs, DrafterPass, DrafterPassOutput, NewText
from hf_specgen.top_k import top_k
from hf_specgen.tree import TreeStructure
from hf_specgen.verification.base import perturbed
from hf_specgen.verification.processors import ScoreProcessors


class LevelCandidates(NamedTuple):
    """Candidates after the nodes of a pass, each `[batch, nodes, children]`; see `TreeBuilder.add`."""

    tokens: torch.Tensor  # ids of the target
    log_acceptance: torch.Tensor
    may_expand: torch.Tensor | None
    q: torch.Tensor | None  # [batch, nodes, vocab] what the tokens were drawn from; None unless it is wanted


@dataclass(frozen=True)
class CandidateProposer:
    """Proposes the most likely tokens after nodes by a drafter's logits; objects that are equal can share a graph."""

    children: int  # how many tokens
    vocab: int  # the size of the target's vocabulary; the drafter's may be padded to another size
    threshold: float  # nodes whose token has a lower probability are not expanded
    processors: ScoreProcessors  # applied to the logits
    # [draft vocab] the target's ids of a drafter with a vocabulary of its own; they belong to the module, as graphs do.
    token_ids: torch.Tensor | None = field(default=None, compare=False)
    wants_q: bool = False  # whether to return what the tokens were drawn from, for rejection sampling

    def scores(self, logits: torch.Tensor) -> torch.Tensor:
        """`[batch, nodes, draft vocab]` the processed scores of a pass."""
        scores = logits[..., : self.vocab].float()
        if self.wants_q or self.processors.reads_on_host:  # neither takes NaN or infinity
            scores = finite(scores)
        return self.processors(scores, all_tokens=self.token_ids is None)

    def __call__(self, scores: torch.Tensor, draft_scores: torch.Tensor) -> LevelCandidates:
        """Propose `children` tokens after each node.

        Both scores are `[batch, nodes, draft vocab]`; `draft_scores` are `scores` after
        `VerificationSession.draft_scores`, which adds noise if tokens are sampled.
        """
        # Drawn from q where the scores have noise, else the most likely tokens.
        log_acceptance, index = top_k(draft_scores.log_softmax(dim=-1), self.children)
        may_expand = None
        q = None
        # The threshold, and rejection sampling, use probabilities without noise.
        if self.threshold or self.wants_q:
            probabilities = scores.softmax(dim=-1)
            confidence = probabilities.gather(-1, index)
            if self.wants_q:  # which nodes are in a tree may depend on their ranks alone, not on their tokens
                by_rank = confidence_by_rank(probabilities.amax(dim=-1), self.children)
                log_acceptance = by_rank.log()
                q = self._to_target_vocabulary(probabilities)
                # A sibling drawn later may be expanded only if those drawn before it may. A chain has no siblings.
                confidence = confidence if self.children == 1 else by_rank
            if self.threshold:
                may_expand = confidence >= self.threshold
        if self.wants_q:  # siblings stay in the order in which they were drawn, equal ones too
            log_acceptance = log_acceptance - 1e-4 * torch.arange(self.children, device=index.device)
        tokens = index if self.token_ids is None else self.token_ids[index]
        return LevelCandidates(tokens, log_acceptance, may_expand, q)

    def _to_target_vocabulary(self, probabilities: torch.Tensor) -> torch.Tensor:
        """`[…, draft vocab]` to `[…, vocab]`: 0 for tokens that the drafter does not have."""
        if self.token_ids is None:
            return pad(probabilities, (0, self.vocab - probabilities.shape[-1]))
        zeros = probabilities.new_zeros(*probabilities.shape[:-1], self.vocab)
        return zeros.index_copy(-1, self.token_ids, probabilities)


class LevelInputs(NamedTuple):
    """The tensors that the passes read besides the drafter's cache."""

    text: NewText | None
    last_tokens: torch.Tensor  # [batch, 1] of the rows
    max_depths: torch.Tensor | None  # [batch, 1] of the trees; None if no level exceeds them
    tree_so_far: tuple[LevelTensors, ...]
    states: torch.Tensor | None  # of the drafter's last pass `[batch, nodes, hidden]`
    padding_mask: torch.Tensor | None  # [batch, capacity], False for padding
    offsets: torch.Tensor | None  # [batch, 1] position minus slot
    noise: torch.Tensor | None  # [batch, passes, vocab], if tokens are sampled; one more for new text


class CapturedLevelsOutput(NamedTuple):
    """What `CapturedLevels` returns: the levels that it added, the best nodes of the tree, the drafter's states."""

    levels: LevelTensors
    selection: NodeSelection
    states: Any  # `[batch, nodes, …]` of the nodes of the last pass
    text_outputs: Any = None  # for `store_text`: outputs of the pass over new text but logits, of each row's last token


@dataclass(frozen=True)
class CapturedLevels(Capturable[LevelInputs, CapturedLevelsOutput]):
    """Makes `num_passes` passes of the drafter, each over `width` nodes of every row; equal objects share a graph.

    A pass over new text comes first if the inputs have text. At most `nodes` nodes are selected at the end.
    """

    failure_is_local: ClassVar[bool] = True

    num_passes: int
    width: int
    nodes: int
    proposer: CandidateProposer
    drafter_pass: DrafterPass
    # Of the tree after the passes, by the widths in the inputs; held here, so that they live as long as the graph.
    constants: ShapeConstants = field(compare=False)

    def __call__(self, module: nn.Module, inputs: LevelInputs, cache: Any) -> CapturedLevelsOutput:
        """Rebuild the tree so far, add a level with each pass, and select the best nodes."""
        builder = TreeBuilder.from_level_tensors(
            inputs.tree_so_far, self.proposer.children, inputs.last_tokens, inputs.max_depths, self.constants
        )
        states = inputs.states
        text_outputs = None
        noise_by_pass: Iterator[torch.Tensor | None] = repeat(None)
        if inputs.noise is not None:
            noise_by_pass = iter(inputs.noise.unbind(dim=1))
        # Level 1 comes from the pass over new text; without new text the tree so far has it.
        if inputs.text is not None:
            output = self._forward_text(module, inputs.text, inputs, cache)
            states = output.states
            text_outputs = output[1:]  # without the logits
            self._add_level(builder, output.logits, next(noise_by_pass))
        # In the cache, the expanded nodes follow each row's last token.
        layer = cache.layers[0]
        last_token_slots = layer.next_slots - 1 - builder.num_expanded
        attended_slots = layer.get_mask_sizes(0)[0]  # all slots of the static buffers
        # Each pass runs on the nodes that it expands, with the states of their parents, and adds a level.
        for _ in range(self.num_passes):
            frontier = builder.select_frontier(self.width)
            layout = StepLayout(last_token_slots, attended_slots, *builder.frontier_structure(), inputs.padding_mask)
            parent_states = None if states is None else frontier.gather_parents(states)
            pass_inputs = DrafterInputs(frontier.tokens, layout, parent_states, inputs.offsets)
            logits, states, *_ = self.drafter_pass(module, pass_inputs, cache)
            self._add_level(builder, logits, next(noise_by_pass))
        return CapturedLevelsOutput(
            builder.pack_levels()[-1], builder.padded_selection(self.nodes), states, text_outputs
        )

    def _forward_text(self, module: nn.Module, text: NewText, inputs: LevelInputs, cache: Any) -> DrafterPassOutput:
        """Run on new text; returns the values of each row's last token alone, `[batch, 1, …]`.

        The text is padded on the right. Later passes overwrite the padding in the cache.
        """
        batch, width = text.tokens.shape
        layer = cache.layers[0]
        chain = TreeStructure.of_captured_chains(batch, width - 1, text.tokens.device)
        layout = StepLayout(layer.next_slots, layer.get_mask_sizes(0)[0], *chain, inputs.padding_mask)
        pass_inputs = DrafterInputs(text.tokens, layout, text.features, inputs.offsets, is_text=True)
        output = self.drafter_pass(module, pass_inputs, cache)
        # The next pass writes to the slots after each row's last token, which are those of the padding.
        padding = width - text.counts[:, None]
        slots = layer.slots - padding
        for cache_layer in cache.layers:
            cache_layer.slots = slots
        last = (text.counts - 1)[:, None, None]
        of_last_tokens = (
            None if values is None else values.gather(1, last.expand(-1, -1, values.shape[-1])) for values in output
        )
        return DrafterPassOutput(*cast(Any, of_last_tokens))

    def _add_level(self, builder: TreeBuilder, logits: torch.Tensor, noise: torch.Tensor | None) -> None:
        """Add the candidates after the nodes of a pass, by its logits, to the tree."""
        scores = self.proposer.scores(logits)
        draft_scores = scores if noise is None else perturbed(scores, noise[:, None])
        tokens, log_acceptance, may_expand, _ = self.proposer(scores, draft_scores)
        builder.add(tokens, log_acceptance, may_expand)  # q is not needed: rejection sampling is not captured


def add_captured_levels(
    builder: TreeBuilder,
    num_passes: int,
    width: int,
    nodes: int,
    capturable: CapturablePasses,
    proposer: CandidateProposer,
    noise: torch.Tensor | None,
) -> CapturedLevelsOutput | None:
    """Add the levels of `num_passes` passes over nodes, and of new text before them also level 1, by one graph.

    The passes also add the nodes and the text to the drafter's cache. `noise` is that of
    `LevelInputs`. None if there is no graph: then nothing was added, and the caller makes the passes.
    """
    if noise is not None and proposer.token_ids is not None:
        noise = noise[..., proposer.token_ids]  # of the draft vocabulary
    lengths = capturable.cache.lengths  # of the rows before
    text = capturable.text
    text_counts = [0] * len(lengths)
    states = capturable.states
    new_slots = num_passes * width  # that the function writes after each row
    if text is not None:
        text_counts = text.counts.tolist()
        states = None  # the pass over the text returns them
        new_slots += text.tokens.shape[1]  # padding included
    capacity = capturable.graphs.move_to_static_buffers(capturable.cache, new_slots)
    if not capacity:
        return None
    padding_mask = capturable.padding_mask
    if padding_mask is not None:  # the mask has every slot of the buffers
        padding_mask = pad(padding_mask, (0, capacity - padding_mask.shape[1]), value=True)
    inputs = LevelInputs(
        text,
        builder.last_tokens,
        builder.max_depths_on_device,
        builder.pack_levels(),
        states,
        padding_mask,
        capturable.offsets,
        noise,
    )
    constants = builder.constants_after(num_passes, width)
    function = CapturedLevels(num_passes, width, nodes, proposer, capturable.drafter_pass, constants)
    output = capturable.graphs.run(function, inputs, capturable.cache, new_slots, fallback=lambda: None)
    if output is None:
        return None
    builder.add_packed_levels(output.levels, output.selection)
    # Of new text the cache keeps the tokens, and not the padding.
    rows = zip(lengths, text_counts, strict=True)
    capturable.cache.set_lengths([length + count + num_passes * width for length, count in rows])
    return output
