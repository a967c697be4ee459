"""Token Recycling: drafts from the tokens that the target itself considered likely in earlier steps.

Verification computes the target's logits after every node of a draft, also after those that are rejected. The most
likely tokens after each token are kept in a table, one row for each token of the vocabulary. Following the table from
the last token on gives a tree; nothing is trained, and drafting needs no forward pass.

Source: Luo et al., "Turning Trash into Treasure: Accelerating Inference of Large Language Models with Token Recycling"
(2024). There the tree is a fixed template; here it grows best-first by measured acceptance.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel

from hf_specgen.candidates.acceptance import EDGES, RANKS, Calibration
from hf_specgen.candidates.base import Candidates, Depth, DraftCall, DraftSession, Tree, vocabulary_size
from hf_specgen.candidates.best_first import SearchLimits, SearchTree, best_first
from hf_specgen.candidates.saved_state import SavedState
from hf_specgen.candidates.tree_search import SearchSession
from hf_specgen.depth import Policy
from hf_specgen.memory import memory
from hf_specgen.verification.result import VerificationResult, verified_nodes
from hf_specgen.verification.top_tokens import TopTokens

SUCCESSORS = 8
"""Tokens kept after each token, as in the paper: the eighth is accepted in about 1% of the cases."""
MAX_VOCAB = 2**21
"""Maximum vocabulary size, also of a file: 84 MB."""
MAX_DEPTH = 8
"""Maximum depth of k="auto": the template of the paper has 6 levels."""
RECYCLED_FRACTION = 0.45
"""Acceptance of a token over the probability that the target last gave it after the same token, as measured with the
embedded model; assumed before acceptance was observed. With 1 the projected speed of n-grams and Token Recycling with
the latencies of a 300M target on two cores is 1.21x of plain decoding, with 0.25, 0.35 and 0.45 1.37x to 1.39x."""

Node = tuple[int, int, int]
"""A token, its rank among the successors of the token before, and the bin of its confidence."""


class RecyclingTable(SavedState):
    """The `SUCCESSORS` most likely tokens after each token, and how probable they were. May be shared by threads.

    Takes 40 bytes for each token of the vocabulary: 5 MB at 128,000.

    Args:
        vocab_size: of the model.

    Raises:
        ValueError: if it is not positive.

    Example:
        >>> table = RecyclingTable(vocab_size=100)
        >>> table.update(TopTokens(np.array([5]), np.array([[7, 9]]), np.array([[0.6, 0.3]])))
        >>> table.row(5)[0], table.row(7)
        ([7, 9], ([], []))
    """

    NAME = "table of Token Recycling"
    FORMAT = "hf_specgen token recycling 1"

    def __init__(self, vocab_size: int):
        if not 1 <= vocab_size <= MAX_VOCAB:
            raise ValueError(f"vocab_size must be 1 to {MAX_VOCAB}, got {vocab_size}")
        self._successors: NDArray[np.int32] = np.full((vocab_size, SUCCESSORS), -1, dtype=np.int32)
        self._bins: NDArray[np.uint8] = np.zeros((vocab_size, SUCCESSORS), dtype=np.uint8)
        super().__init__()

    @property
    def vocab_size(self) -> int:
        """Tokens of the target."""
        return len(self._successors)

    @property
    def nbytes(self) -> int:
        """Memory in bytes."""
        return self._successors.nbytes + self._bins.nbytes

    def update(self, top: TopTokens) -> None:
        """Overwrite the successors of every input token of a step; of a token that occurs twice the last ones stay.

        There may be fewer than `SUCCESSORS` of each token, as in a smaller vocabulary.
        """
        count = top.successors.shape[1]
        bins = np.searchsorted(EDGES, top.probabilities)
        with self._lock:
            self._successors[top.tokens, :count] = top.successors
            self._successors[top.tokens, count:] = -1
            self._bins[top.tokens, :count] = bins

    def row(self, token: int) -> tuple[list[int], list[int]]:
        """The successors of a token, most likely first, and the confidence bin of each; nothing if it is unknown."""
        with self._lock:
            successors, bins = self._successors[token].tolist(), self._bins[token].tolist()
        count = successors.index(-1) if successors[-1] < 0 else SUCCESSORS
        return successors[:count], bins[:count]

    def __repr__(self) -> str:
        return f"RecyclingTable(vocab_size={self.vocab_size})"

    def _contents(self) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
        return {"successors": self._successors.copy(), "bins": self._bins.copy()}, {}

    @classmethod
    def _from_file(cls, file: Any, metadata: Mapping[str, str]) -> RecyclingTable:
        shapes: Sequence[Any] = [tuple(file.get_slice(name).get_shape()) for name in ("successors", "bins")]
        vocab_size = shapes[0][0] if shapes[0] else 0
        if shapes != [(vocab_size, SUCCESSORS)] * 2 or not 1 <= vocab_size <= MAX_VOCAB:
            raise ValueError(f"its tensors have the shapes {shapes}")
        successors, bins = file.get_tensor("successors"), file.get_tensor("bins")
        if successors.dtype != np.int32 or bins.dtype != np.uint8:
            raise ValueError(f"its tensors have the types {successors.dtype} and {bins.dtype}")
        if successors.min() < -1 or successors.max() >= vocab_size or bins.max() > len(EDGES):
            raise ValueError("it has tokens outside its vocabulary")
        if (np.diff(successors < 0, axis=1) & (successors[:, 1:] >= 0)).any():
            raise ValueError("it has successors after the last one of a token")
        table = cls(vocab_size)
        table._successors[:], table._bins[:] = successors, bins
        return table


class RecyclingCandidates(Candidates):
    """Drafts with Token Recycling. Needs nothing; what it has learnt about a target is kept from call to call.

    Args:
        k: maximum depth of a draft, in tokens; "auto" for as many as are expected to be faster.
        tree: how many draft tokens are verified: "auto" builds in each step the tree with the highest expected tokens
            per second; a number is the size of every tree. Left out, it is "auto" with k="auto", and with a number for
            k the draft is a chain of k tokens.
        table: what to start from, such as `RecyclingTable.load("table.safetensors")`; it is updated by every call. Left
            out, there is an empty one for each target.
        policy: how much of k is used, step by step; see `hf_specgen.depth`.

    Raises:
        ValueError: if a number is out of range; at the first call, if the table belongs to another vocabulary.

    Example:
        >>> RecyclingCandidates(k=6, tree=32)
        RecyclingCandidates(k=6, tree=32)
    """

    negligible_draft_cost = True

    def __init__(
        self,
        k: Depth = "auto",
        *,
        tree: Tree = None,
        table: RecyclingTable | None = None,
        policy: Policy | None = None,
    ):
        super().__init__(k, policy, max_k=MAX_DEPTH)
        self._set_tree(tree, k)
        self._given = table
        self._tables: WeakKeyDictionary[PreTrainedModel, RecyclingTable] = WeakKeyDictionary()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_tables": None}  # they belong to targets of this process

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._tables = WeakKeyDictionary()

    def table(self, model: PreTrainedModel) -> RecyclingTable:
        """The table that calls with this target use and update, for example to save it.

        Raises:
            ValueError: if the table that was given belongs to another vocabulary.
        """
        vocab_size = vocabulary_size(model)
        if self._given is None:
            return self._tables.setdefault(model, RecyclingTable(vocab_size))
        if self._given.vocab_size != vocab_size:
            raise ValueError(
                f"the table is for a vocabulary of {self._given.vocab_size} tokens, the target has {vocab_size}; "
                "give the table of this target, or none"
            )
        return self._given

    def start(self, call: DraftCall) -> DraftSession:
        if call.model is None:
            raise ValueError("RecyclingCandidates works with generate(candidate_generator=…) only")
        samples_draft = call.verification is not None and call.verification.wants_q
        if samples_draft or (self._given is None and not call.remembers):
            # In rejection sampling the text depends on the draft: it must not depend on earlier calls too.
            return RecyclingSession(self, call, RecyclingTable(vocabulary_size(call.model)))
        return RecyclingSession(self, call, self.table(call.model))

    def profile_key(self) -> tuple[str | int | float | bool, ...]:
        return ("recycling", self.k, str(self.tree))

    def __repr__(self) -> str:
        return f"RecyclingCandidates(k={self.k}{self._show(tree=self.tree, table=self._given)})"


class RecyclingSession(SearchSession[Node]):
    """The state of one call; its table is drafted from, and updated."""

    top_tokens = SUCCESSORS

    def __init__(self, settings: RecyclingCandidates, call: DraftCall, table: RecyclingTable):
        super().__init__(call, settings.k, settings.tree)
        self._table = table
        self._key = ("acceptance", settings.profile_key(), call.do_sample, round(call.temperature, 2))
        self._calibration = memory.recall(call.model if self.remembers else None, self._key, Calibration)

    def search(self, row: int, depth: int, limits: SearchLimits) -> SearchTree[Node]:
        """The most probable continuations of the row's last token."""
        acceptance = self._calibration.by_bin(RECYCLED_FRACTION).tolist()
        return recycled_tree(self._table, self.call.state.last_token(row), acceptance, depth, limits)

    def candidate_tokens(self, token: int) -> list[tuple[int, float, tuple[int, int]]]:
        """Likely next tokens after a token, the probability that each is accepted, and a key for `count`."""
        acceptance = self._calibration.by_bin(RECYCLED_FRACTION)
        tokens, bins = self._table.row(token)
        keys = [(min(rank, RANKS - 1), index) for rank, index in enumerate(bins)]
        return [(candidate, float(acceptance[key]), key) for candidate, key in zip(tokens, keys, strict=True)]

    def count(self, key: tuple[int, int], weight: float, accepted: bool) -> None:
        """Count the outcome of one of `candidate_tokens`, to which others left so much probability."""
        self._calibration.count(*key, accepted, weight)

    def observe(self, result: VerificationResult) -> None:
        """Count acceptance by rank and confidence, and learn the successors of every input token of the step."""
        for tree, emitted in zip(self._trees, result.tokens, strict=False):
            for node, accepted in verified_nodes(tree.tokens, tree.parents, emitted):
                _, rank, place = tree.tags[node]
                self._calibration.count(min(rank, RANKS - 1), place, accepted)
        self._trees = []
        if result.top_tokens is not None:
            self._table.update(result.top_tokens)

    def end(self) -> None:
        if self.remembers:
            memory.store(self.call.model, self._key, self._calibration)


def recycled_tree(
    table: RecyclingTable, token: int, acceptance: Sequence[Sequence[float]], depth: int, limits: SearchLimits
) -> SearchTree[Node]:
    """The most probable continuations of a token by the table.

    Args:
        acceptance: `[ranks][bins]` probability that a successor is accepted, given that its parent is.
    """

    def children(node: Node, depth: int) -> Iterator[tuple[int, float, Node]]:
        for rank, (successor, place) in enumerate(zip(*table.row(node[0]), strict=True)):
            probability = acceptance[min(rank, RANKS - 1)][place]
            yield successor, probability, (successor, rank, place)

    return best_first((token, 0, 0), children, depth, limits)
