"""`hf-specgen serve`: the server of `transformers serve`, whose models speculate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from transformers import GenerationMixin

from hf_specgen.attachment import Attachment
from hf_specgen.candidates import Candidates
from hf_specgen.evaluation.workloads import chosen_strategy
from hf_specgen.generate import Settings
from hf_specgen.patch import ATTACHMENT, install

BATCHING = "--continuous-batching"


def serve(model: str, draft: Sequence[str], heads: Sequence[str], adapter: str, options: Sequence[str]) -> None:
    """Run the server; `options` are those of `transformers serve`.

    Requests are batched continuously, unless the options say otherwise, or an adapter is given, which only speculates
    in `generate`: then they are answered one after the other.
    """
    from transformers.cli.transformers import app

    batches = not (adapter or any(BATCHING[2:] in option for option in options))
    with speculating(chosen_strategy(draft, heads, adapter)):
        app(["serve", model, *([BATCHING] if batches else []), *options], standalone_mode=False)


@contextmanager
def speculating(candidates: Candidates) -> Iterator[Attachment]:
    """Attach a strategy to every model of the process that has none of its own."""
    install()
    attachment, before = Attachment(Settings(candidates)), getattr(GenerationMixin, ATTACHMENT, None)
    setattr(GenerationMixin, ATTACHMENT, attachment)
    try:
        yield attachment
    finally:
        if before is None:
            delattr(GenerationMixin, ATTACHMENT)
        else:
            setattr(GenerationMixin, ATTACHMENT, before)
