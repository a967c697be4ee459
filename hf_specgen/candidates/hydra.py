"""The session of Medusa heads that read the path before their token (Hydra): trees that grow by a head per level.

Source: Ankner et al., "Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding" (2024), section 3.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_specgen.candidates.autoregressive import AutoregressiveSession
from hf_specgen.candidates.base import DraftCall
from hf_specgen.candidates.marginals import DEFAULT_NODES
from hf_specgen.heads.medusa_runner import MedusaRunner
from hf_specgen.targets.hidden_states import HiddenStateTarget
from hf_specgen.targets.requirements import OUTPUT_STATE
from hf_specgen.tree import DraftTree


class HydraSession(AutoregressiveSession):
    """The state of one call.

    Args:
        call: the call.
        target: keeps the states that the heads read.
        reader: the heads on their target.
        tree: number of nodes, or "auto".
    """

    def __init__(self, call: DraftCall, target: HiddenStateTarget, reader: MedusaRunner, tree: str | int):
        config = reader.heads.config
        has_latency = call.depth is not None and call.depth.latency is not None
        size = DEFAULT_NODES if tree == "auto" and not has_latency else tree  # as that of other Medusa heads
        super().__init__(call, config.num_heads, size, 0.0, config.vocab_size)
        self._target, self._reader, self._heads = target, reader, config.num_heads

    def draft_at_prefill(self, max_depths: Sequence[int]) -> DraftTree:
        """Nothing: the target has not computed any hidden states yet."""
        return self.not_drafted(len(max_depths))

    def first_scores(self) -> torch.Tensor:
        """The logits of head 0; it reads each row's last token. The overhead of a draft is the latency of this pass."""
        last = torch.tensor([[text[-1]] for text in self.call.state.generated])
        return self._reader.head_logits(0, self._target.states_of((OUTPUT_STATE,)), last)

    def next_scores(self, tree: DraftTree, new: int) -> torch.Tensor:
        """The logits after each of the last nodes, by the head of its depth."""
        states, texts = self._target.states_of((OUTPUT_STATE,)), self.call.state.generated
        nodes = range(tree.nodes - new, tree.nodes)
        paths = [[text[-1], *tree.path(row, node)] for row, text in enumerate(texts) for node in nodes]
        # A node that only fills up its row may be as deep as the last head predicts.
        read = torch.tensor([min(len(path), self._heads) for path in paths])
        rows = torch.arange(len(texts)).repeat_interleave(new)
        logits = states.new_empty(len(paths), self._vocab)
        for count in sorted(set(read.tolist())):
            chosen = (read == count).nonzero()[:, 0]
            tokens = torch.tensor([paths[index][:count] for index in chosen.tolist()])
            logits[chosen] = self._reader.head_logits(count - 1, states[rows[chosen]], tokens).to(logits)
        return logits.view(len(texts), new, -1)
