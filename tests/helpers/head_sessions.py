"""Slow, readable reference for drafting with heads: a list of rows for each tensor, no shared state.

A session holds a head's cache for a batch of rows of different lengths. It reads accepted positions with the target's
features, drafts, and drops what it drafted, as a drafter inside the decoding loop has to.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from hf_specgen.heads.base import BoundHead, HeadOutput
from hf_specgen.targets.cache import RaggedCache


class Corrected(NamedTuple):
    """Logits along given paths.

    Args:
        base: `[paths, positions, draft_vocab]` without the correction.
        logits: of the same shape, corrected.
        confidence: `[paths, positions]` logits of the confidence head; None for heads without one.
    """

    base: torch.Tensor
    logits: torch.Tensor
    confidence: torch.Tensor | None


def corrected(bound: BoundHead, hidden: torch.Tensor, tokens: torch.Tensor) -> Corrected:
    """Logits of a block head with a correction along given paths (teacher forcing), with gradients.

    `hidden` are the outputs `[paths, block, hidden]` of the whole block; `tokens` `[paths, length]` the anchor and the
    tokens after it, the i-th of which is the one before what the i-th proposing position predicts.
    """
    head: Any = bound.head
    first, keys = head.config.first_proposing_position, head.keys()
    state = head.first_state(hidden, tokens[:, 0], bound.embed)
    proposing = hidden[:, first : first + tokens.shape[1]]
    queries = []
    for depth in range(proposing.shape[1]):
        query, state = head.step(proposing[:, depth], tokens[:, depth], state, depth, bound.embed)
        queries.append(query)
    base = bound.logits(proposing)
    logits = base + torch.stack(queries, dim=1) @ keys.T
    if head.max_candidates is not None:
        kept = base.topk(min(head.max_candidates, base.shape[-1]), dim=-1).indices
        logits = torch.full_like(logits, -torch.inf).scatter(-1, kept, logits.gather(-1, kept))
    return Corrected(base, logits, head.confidence_logits(proposing, tokens[:, : proposing.shape[1]]))


def causal_mask(lengths: Sequence[int], queries: int) -> torch.Tensor:
    """`[batch, 1, queries, max(lengths) + queries]` bool: a causal mask after cached tokens of each row."""
    slots = torch.arange(max(lengths) + queries)
    own = torch.tensor(lengths)[:, None] + torch.arange(queries)
    return (slots <= own[..., None])[:, None]


def padded(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Rows `[length_b, ...]` to one tensor `[batch, longest, ...]`, with zeros on the right."""
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


@dataclass
class Chain:
    """A drafted chain of one row: tokens in the target's ids, and what was computed for each step."""

    tokens: torch.Tensor
    draft_logits: torch.Tensor
    hidden: torch.Tensor


class Autoregressive:
    """EAGLE heads: read accepted positions, then draft a chain or a tree.

    `step` is called with the number of the draft step, for heads whose layers take turns (MTP).
    """

    def __init__(self, bound: BoundHead, batch: int) -> None:
        self.bound, self.cache = bound, RaggedCache()
        self.lengths = [0] * batch
        self.last: list[HeadOutput] = []

    def read(self, features: Sequence[torch.Tensor], next_tokens: Sequence[torch.Tensor]) -> list[HeadOutput]:
        """Read new accepted positions of every row.

        Args:
            features: for each row `[new, width]`.
            next_tokens: for each row `[new]`, the token after each of these positions.

        Returns:
            for each row the head's output at its new positions.
        """
        new = [len(row) for row in features]
        hidden = self.bound.head.combine(padded(features))
        output = self.run(hidden, padded(next_tokens), self.lengths, causal_mask(self.lengths, max(new)))
        self.lengths = [length + count for length, count in zip(self.lengths, new, strict=True)]
        self.cache.set_lengths(self.lengths)
        rows = [HeadOutput(*(part[row, :count] for part in output)) for row, count in enumerate(new)]
        self.last = [HeadOutput(*(part[-1] for part in row)) for row in rows]
        return rows

    def run(
        self, hidden: torch.Tensor, tokens: torch.Tensor, first: Sequence[int], mask: torch.Tensor, same: bool = False
    ) -> HeadOutput:
        """One pass; positions count up from `first`, or are all `first` if `same`."""
        steps = torch.zeros(tokens.shape[1]) if same else torch.arange(tokens.shape[1])
        positions = torch.tensor(first)[:, None] + steps.long()
        return self.bound.head(self.bound.embed(tokens), hidden, positions, mask, self.cache)

    def chain(self, steps: int) -> list[Chain]:
        """Draft greedily, then remove the drafted positions from the cache."""
        chains: list[list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]] = [[] for _ in self.lengths]
        output = HeadOutput(*(torch.stack(parts)[:, None] for parts in zip(*self.last, strict=True)))
        for step in range(steps):
            logits = self.bound.logits(output.output)[:, 0]
            tokens = self.bound.target_ids(logits.argmax(-1))
            for row, chain in enumerate(chains):
                chain.append((tokens[row], logits[row], output.hidden[row, 0]))
            if step + 1 < steps:
                lengths = [length + step for length in self.lengths]
                output = self.run(output.hidden, tokens[:, None], lengths, causal_mask(lengths, 1))
        if steps > 1:
            self.cache.set_lengths(self.lengths)
        return [Chain(*map(torch.stack, zip(*chain, strict=True))) for chain in chains]

    def keys_values(self, layer: int, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What the cache holds of a row, each `[1, kv_heads, length, head_dim]`."""
        held = self.cache.layers[layer]
        return tuple(states[row : row + 1, :, : self.lengths[row]] for states in (held.keys, held.values))


class Parallel(Autoregressive):
    """P-EAGLE heads: the accepted positions and some masked ones after them, all in one pass."""

    def read_and_draft(
        self, features: Sequence[torch.Tensor], next_tokens: Sequence[torch.Tensor], count: int
    ) -> list[HeadOutput]:
        """For each row the output at its last accepted position and the `count - 1` masked ones after it."""
        head = self.bound.head
        masks = head.mask_hidden[0].expand(count - 1, -1)
        mask_tokens = torch.full((count - 1,), head.config.mask_token_id)
        new = [len(row) for row in features]
        hidden = head.combine(padded([torch.cat((row, masks)) for row in features]))
        tokens = padded([torch.cat((row, mask_tokens)) for row in next_tokens])
        output = self.run(hidden, tokens, self.lengths, causal_mask(self.lengths, tokens.shape[1]))
        self.lengths = [length + count for length, count in zip(self.lengths, new, strict=True)]
        self.cache.set_lengths(self.lengths)
        return [
            HeadOutput(*(part[row, start - 1 : start - 1 + count] for part in output)) for row, start in enumerate(new)
        ]


class Block:
    """DFlash and JetSpec heads: extend the context with accepted positions, then draft a block."""

    def __init__(self, bound: BoundHead, batch: int) -> None:
        self.bound, self.cache, self.lengths = bound, RaggedCache(), [0] * batch

    def read(self, features: Sequence[torch.Tensor]) -> None:
        """Add new accepted positions of every row to the context."""
        new = [len(row) for row in features]
        positions = torch.tensor(self.lengths)[:, None] + torch.arange(max(new))
        self.bound.head.extend(padded(features), positions, self.cache)
        self.lengths = [length + count for length, count in zip(self.lengths, new, strict=True)]
        self.cache.set_lengths(self.lengths)

    def draft(self, blocks: torch.Tensor) -> HeadOutput:
        """The output for `[batch, block]` tokens, which are then removed from the cache."""
        positions = torch.tensor(self.lengths)[:, None] + torch.arange(blocks.shape[1])
        output = self.bound.head(self.bound.embed(blocks), positions, self.cache, self.lengths)
        self.cache.set_lengths(self.lengths)
        return output


class LayeredMTP:
    """Several MTP layers with one draft token each; layer k reads the output of layer k - 1.

    Layer k needs the token k + 1 places after its position, so the last k entries of its cache are computed from
    drafted tokens. All layers therefore read the last `layers - 1` positions again in the next round.
    """

    def __init__(self, bound: BoundHead, batch: int) -> None:
        self.bound, self.cache, self.lengths = bound, RaggedCache(), [0] * batch
        width = bound.head.config.hidden_size
        self.features = [torch.zeros(0, width) for _ in range(batch)]  # of the positions that are read again
        self.tokens = [torch.zeros(0, dtype=torch.long) for _ in range(batch)]

    def round(
        self, features: Sequence[torch.Tensor], next_tokens: Sequence[torch.Tensor]
    ) -> tuple[list[list[torch.Tensor]], list[torch.Tensor], list[torch.Tensor]]:
        """Read new accepted positions, and draft.

        Args:
            features: for each row `[new, hidden]`.
            next_tokens: for each row `[new]`, the token after each of these positions.

        Returns:
            for each layer and row the output at the positions that were read, and for each row logits and tokens.
        """
        head, bound = self.bound.head, self.bound
        features = [torch.cat(parts) for parts in zip(self.features, features, strict=True)]
        tokens = [torch.cat(parts) for parts in zip(self.tokens, next_tokens, strict=True)]
        read = [len(row) for row in features]
        hidden, outputs, logits = padded(features), [], []
        ahead = list(tokens)
        positions = torch.tensor(self.lengths)[:, None] + torch.arange(max(read))
        mask = causal_mask(self.lengths, max(read))
        for layer in range(head.config.num_layers):
            output = head(bound.embed(padded(ahead)), hidden, positions, mask, self.cache, step=layer)
            outputs.append([output.output[row, :count] for row, count in enumerate(read)])
            logits.append(torch.stack([bound.logits(row[-1]) for row in outputs[-1]]))
            drafted = logits[-1].argmax(-1)
            ahead = [torch.cat((row[1:], drafted[index : index + 1])) for index, row in enumerate(ahead)]
            hidden = output.hidden
        again = head.config.num_layers - 1
        self.lengths = [length + count - again for length, count in zip(self.lengths, read, strict=True)]
        self.cache.set_lengths(self.lengths)
        self.features = [row[len(row) - again :] for row in features]
        self.tokens = [row[len(row) - again :] for row in tokens]
        by_row = torch.stack(logits, dim=1)
        return outputs, list(by_row), list(by_row.argmax(-1))


class Assistant:
    """A Gemma 4 assistant: no cache, one position for all draft tokens of a round."""

    def __init__(self, bound: BoundHead) -> None:
        self.bound = bound

    def chain(
        self,
        states: Sequence[torch.Tensor],
        keys_values: Sequence[dict[str, tuple[torch.Tensor, torch.Tensor]]],
        last: Sequence[int],
        steps: int,
    ) -> list[Chain]:
        """Draft greedily from each row's last state `[hidden]`, its keys and values, and its last known token."""
        lengths = [next(iter(row.values()))[0].shape[2] for row in keys_values]
        shared = {
            kind: tuple(
                padded([row[kind][part][0].transpose(0, 1) for row in keys_values]).transpose(1, 2) for part in (0, 1)
            )
            for kind in keys_values[0]
        }
        hidden, tokens = torch.stack(list(states))[:, None], torch.tensor(last)[:, None]
        positions, counts = torch.tensor(lengths)[:, None], torch.tensor(lengths)
        chains: list[list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]] = [[] for _ in last]
        for _ in range(steps):
            arguments = positions, shared, counts, torch.zeros_like(counts), dict.fromkeys(shared, 0)
            output = self.bound.head(self.bound.embed(tokens), hidden, *arguments)
            logits = self.bound.logits(output.output)[:, 0]
            tokens, hidden = self.bound.target_ids(logits.argmax(-1))[:, None], output.hidden
            for row, chain in enumerate(chains):
                chain.append((tokens[row, 0], logits[row], hidden[row, 0]))
        return [Chain(*map(torch.stack, zip(*chain, strict=True))) for chain in chains]
