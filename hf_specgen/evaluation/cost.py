"""T(q): what one forward pass of the target costs, by the number of tokens that it reads at once.

Speculation lives on T(q) being nearly flat, which it is only where decoding waits for weights to be read. So it is
measured on the machine at hand, never assumed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedModel

from hf_specgen.evaluation.measure import wait
from hf_specgen.target.base import Target
from hf_specgen.tree import DraftTree

QUERIES = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class CostCurve:
    """Seconds of a forward pass over q tokens per row, measured at some q and interpolated between them.

    Args:
        queries: increasing numbers of tokens, from 1.
        seconds: of a pass over that many tokens in each row.
        context: cached tokens in each row.
        batch: rows.

    Raises:
        ValueError: if the two lists do not fit, `queries` does not begin with 1 or increase, or a time is not positive.

    Example:
        >>> curve = CostCurve((1, 4), (0.010, 0.016), context=256, batch=1)
        >>> round(curve(2), 4), round(curve(6), 4), round(curve.relative(4), 2)
        (0.012, 0.02, 1.6)
    """

    queries: tuple[int, ...]
    seconds: tuple[float, ...]
    context: int
    batch: int

    def __post_init__(self) -> None:
        if len(self.queries) != len(self.seconds):
            raise ValueError(f"{len(self.queries)} queries need as many seconds, got {len(self.seconds)}")
        _check_queries(self.queries)
        if min(self.seconds) <= 0:
            raise ValueError(f"seconds must be positive, got {min(self.seconds)}")

    def __call__(self, queries: float) -> float:
        """Seconds of a pass over `queries` tokens per row: linear between measurements, and on from the last two."""
        if queries > self.queries[-1] and len(self.queries) > 1:
            (q0, q1), (t0, t1) = self.queries[-2:], self.seconds[-2:]
            return t1 + max(0.0, t1 - t0) / (q1 - q0) * (queries - q1)
        return float(np.interp(queries, self.queries, self.seconds))

    def relative(self, queries: float) -> float:
        """T(q) / T(1)."""
        return self(queries) / self.seconds[0]

    def to_json(self) -> str:
        """A JSON text for `from_json`."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> CostCurve:
        """Read what `to_json` wrote.

        Raises:
            ValueError: if the text is something else.
        """
        try:
            fields = json.loads(text)
            return cls(tuple(fields["queries"]), tuple(fields["seconds"]), fields["context"], fields["batch"])
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"not a saved cost curve ({error!r}); measure one with measure_cost_curve") from None

    @classmethod
    def load(cls, path: str | Path) -> CostCurve:
        """Read a file that holds what `to_json` wrote."""
        return cls.from_json(Path(path).read_text(encoding="utf-8"))


def measure_cost_curve(
    model: PreTrainedModel,
    queries: Sequence[int] = QUERIES,
    context: int = 256,
    batch: int = 1,
    repeats: int = 7,
) -> CostCurve:
    """Time the target's forward pass as the decoding loop runs it: our cache, our masks, a chain of guesses.

    The numbers of tokens take turns within each repeat, so that a slow moment of the machine touches them all; the
    first turn warms up and is not counted; each time is the median over the repeats.

    Args:
        model: the target.
        queries: how many tokens per row to time, increasing from 1 (q guesses need T(q + 1)).
        context: cached tokens in each row.
        batch: rows.
        repeats: counted turns.

    Raises:
        ValueError: if a number is out of range, or the model's positions end before context + queries.

    Example:
        >>> # curve = measure_cost_curve(model); curve.relative(6)  # what verifying 5 guesses costs
    """
    _check_queries(queries)
    for name, value in (("context", context), ("batch", batch), ("repeats", repeats)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2**31
    if context + queries[-1] > limit:
        raise ValueError(f"context {context} and {queries[-1]} queries need more than the model's {limit} positions")
    tokens = torch.randint(
        model.config.get_text_config().vocab_size, (batch, context), generator=torch.Generator().manual_seed(0)
    )
    times: dict[int, list[float]] = {q: [] for q in queries}
    with torch.no_grad():
        target = _read(model, tokens)
        for turn in range(repeats + 1):
            for q in queries:
                seconds = _forward(target, tokens, q)
                if turn:
                    times[q].append(seconds)
    return CostCurve(tuple(queries), tuple(median(times[q]) for q in queries), context, batch)


def _read(model: PreTrainedModel, tokens: torch.Tensor) -> Target:
    tokens = tokens.to(model.device)
    positions = torch.arange(tokens.shape[1], device=model.device)[None].expand(len(tokens), -1)
    arguments = {"attention_mask": torch.ones_like(tokens), "position_ids": positions, "use_cache": True}
    target = Target(model, tokens, GenerationConfig(), arguments)
    target.prefill(DraftTree.empty(len(tokens)))
    return target


def _forward(target: Target, tokens: torch.Tensor, queries: int) -> float:
    """Seconds of one pass over the pending token and `queries - 1` guesses, of which nothing is kept."""
    tree = DraftTree.chains([row[: queries - 1] for row in tokens.repeat(1, 1 + queries // tokens.shape[1]).tolist()])
    pending = tokens[:, 0].to(target.device)
    wait(target.device)
    begin = perf_counter()
    target.forward(tree, pending)
    wait(target.device)
    seconds = perf_counter() - begin
    target.rewind([0] * len(tokens))
    return seconds


def _check_queries(queries: Sequence[int]) -> None:
    if not queries or queries[0] != 1 or any(b <= a for a, b in pairwise(queries)):
        raise ValueError(f"queries must increase from 1, got {list(queries)}")
