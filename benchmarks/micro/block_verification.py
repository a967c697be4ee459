"""Expected tokens a step of rejection sampling with whole paths accepted jointly, over tokens accepted one by one.

Both are computed in every step from the same draft and the same probabilities, so that only the text is random. Token
verification accepts a draft token with probability min(1, p/q), if those before it were accepted.

Source: Sun et al., "Block Verification Accelerates Speculative Decoding" (2024), for the comparison.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from hf_specgen import DraftModelCandidates
from hf_specgen.call import Call
from hf_specgen.evaluation.workloads import BUNDLED_DRAFT, domain_prompts, encode, load
from hf_specgen.tree import DraftTree
from hf_specgen.verification.base import VerificationSession
from hf_specgen.verification.rejection import RejectionSession, RejectionVerifier, path_weights

TEMPERATURES, DEPTHS, NEW_TOKENS = (0.7, 1.0), (4, 8), 64


class ComparingVerifier(RejectionVerifier):
    """Rejection sampling of chains that sums the expected tokens of each step, with either way of accepting."""

    def __init__(self) -> None:
        self.steps, self.jointly, self.one_by_one = 0, 0.0, 0.0

    def start(self, call: Call) -> VerificationSession:
        return _ComparingSession(call, self)

    def count(self, p: torch.Tensor, q: torch.Tensor, tokens: torch.Tensor) -> None:
        """Add a step with the target's `[1 + k, vocab]` p, the draft's `[k, vocab]` q and the `[k]` draft tokens."""
        depth = len(tokens)
        ratios = p[:-1].gather(1, tokens[:, None]) / q.gather(1, tokens[:, None])
        accepted = ratios[:, 0].clamp(max=1).cumprod(0)
        parents, is_node = torch.arange(depth)[None], torch.ones(1, depth, dtype=torch.bool)
        weights = path_weights(p[None], q[None], tokens[None], parents, is_node)[0][0, 1:]
        # The deepest token that is accepted ends the path: P(at least i tokens) = 1 - P(all from i on are rejected).
        rejected_from = (1 - weights).flip(0).cumprod(0).flip(0)
        self.steps += 1
        self.one_by_one += 1 + float(accepted.sum())
        self.jointly += 1 + float((1 - rejected_from).sum())


class _ComparingSession(RejectionSession):
    def __init__(self, call: Call, totals: ComparingVerifier):
        super().__init__(call)
        self._totals = totals

    def choose(
        self,
        scores: torch.Tensor,
        token_indices: Sequence[Sequence[int]],
        tree: DraftTree,
        nodes: Sequence[Sequence[int]],
    ) -> torch.Tensor:
        if tree.nodes and tree.q is not None:
            p = scores[0].softmax(dim=-1)
            self._totals.count(p, tree.q[0, :, : p.shape[-1]], torch.tensor(tree.token_lists()[0]))
        return super().choose(scores, token_indices, tree, nodes)


def block_verification(repeats: int, quick: bool) -> list[dict[str, Any]]:
    """Expected tokens a step with the bundled draft model, by temperature and depth, with `repeats` seeds a prompt."""
    model, tokenizer = load(device="cpu")
    prompts = [prompt for domain in domain_prompts().values() for prompt in domain[:2]]
    rows = []
    for temperature in TEMPERATURES:
        for k in DEPTHS[:1] if quick else DEPTHS:
            verifier = ComparingVerifier()
            arguments = {"candidate_generator": DraftModelCandidates(BUNDLED_DRAFT, k=k), "verification": verifier}
            for seed in range(repeats):
                for inputs in encode(tokenizer, prompts[: 1 if quick else None], 1):
                    torch.manual_seed(seed)
                    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0}
                    cast(Any, model).generate(**inputs, **arguments, **sampling, max_new_tokens=NEW_TOKENS)
            row = {"temperature": temperature, "k": k, "steps": verifier.steps}
            jointly, one_by_one = verifier.jointly / verifier.steps, verifier.one_by_one / verifier.steps
            rows.append({**row, "one by one": one_by_one, "jointly": jointly, "ratio": jointly / one_by_one})
    return rows
