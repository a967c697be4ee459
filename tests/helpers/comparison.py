"""Comparison with plain `generate`: the same tokens, and the random generator in the same state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import LogitsProcessorList

from hf_specgen import Candidates, SpeculativeOutput, Statistics

SEED = 11
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 0.8, "top_k": 20},
}
END: dict[str, Any] = {"eos_token_id": list(range(30, 40)), "pad_token_id": 0}


def plain_and_speculative(
    model: Any,
    inputs: dict[str, torch.Tensor],
    candidates: Candidates | Callable[[torch.Tensor], Candidates],
    *,
    make_processors: Callable[[], LogitsProcessorList] | None = None,
    **arguments: Any,
) -> tuple[torch.Tensor, SpeculativeOutput]:
    """Generate twice from one seed.

    Args:
        model, inputs: the target and its prompts.
        candidates: the strategy, or what builds one from the `[batch, generated]` tokens of plain `generate`.
        make_processors: builds the logits processors of one call, for processors that keep a state.
        arguments: of `generate`, for both calls.

    Returns:
        The ids of plain `generate`, and the speculative output with its statistics.
    """

    def run(**more: Any) -> Any:
        processors = {} if make_processors is None else {"logits_processor": make_processors()}
        torch.manual_seed(SEED)
        return model.generate(**inputs, **arguments, **processors, **more)

    plain = run()
    after_plain = torch.rand(3)
    strategy = candidates if isinstance(candidates, Candidates) else candidates(plain[:, prompt_length(inputs) :])
    output = run(candidate_generator=strategy, return_dict_in_generate=True)
    assert torch.equal(torch.rand(3), after_plain), "the random generator is not where plain generate left it"
    return plain, output


def assert_same_tokens(
    model: Any,
    inputs: dict[str, torch.Tensor],
    candidates: Candidates | Callable[[torch.Tensor], Candidates],
    **arguments: Any,
) -> Statistics:
    """Assert that `plain_and_speculative` gives the same tokens twice; returns the statistics."""
    plain, output = plain_and_speculative(model, inputs, candidates, **arguments)
    assert plain.tolist() == output.sequences.tolist()
    assert output.speculation is not None
    return output.speculation


def prompt_length(inputs: dict[str, torch.Tensor]) -> int:
    """Columns of the prompt."""
    return inputs["input_ids"].shape[1]
