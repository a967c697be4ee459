"""Checks once per model that verification computes what plain `generate` computes, and refuses the model otherwise.

No interface guarantees that a model places tokens by `position_ids`, respects a 4-D mask, keeps all its state in the
key/value cache, or can be divided at a layer. So a short padded batch is decoded twice: token by token with
Transformers' own cache, and as a draft tree with a rollback that leaves rows of different lengths.

    row 0  . . a b c d │ t0 ─┬─ decoy              pending t0, nodes (decoy, t1, t2); t1 and t2 are accepted in row 0
    row 1  e f g h i j │ t0 ─┴─ t1 ── t2           and t1 alone in row 1, so that the next step is ragged
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedModel

from hf_specgen import compat
from hf_specgen.target.base import Target
from hf_specgen.target.early_exit import EarlyExitTarget
from hf_specgen.target.requirements import TargetRequirements, make_target
from hf_specgen.tree import DraftTree

PROMPT, PADDING, STEPS = 6, 2, 5
MAX_ERROR = {torch.float32: 1e-3, torch.float64: 1e-3}
"""Largest difference between two logits that counts as rounding, in standard deviations of the logits. A token at a
wrong position or a wrong mask was off by 0.03 and more on random models of 189 types."""
MAX_MEDIAN_ERROR = 0.1
"""The same in half precision, for the median over positions: single positions may differ where a router of experts has
a near-tie."""

_lock = threading.Lock()
_checked: WeakKeyDictionary[PreTrainedModel, dict[tuple[Any, ...], str | None]] = WeakKeyDictionary()


class _DifferenceError(Exception):
    """The two ways of decoding differ; the message says how."""


class _UndecidedError(Exception):
    """The logits of plain decoding are NaN, +inf or all -inf, so that nothing can be compared."""


def check_computation(model: PreTrainedModel, requirements: TargetRequirements) -> None:
    """Raise unless the model, run as `requirements` says, computes what plain `generate` computes.

    The result is remembered per model, dtype, attention implementation and exit layer; but not that of a trial that
    failed, or in which plain decoding gave NaN, +inf or nothing but -inf: `generate` itself reports those.

    Raises:
        ValueError: if it computes something else, or fails.
    """
    config = model.config.get_text_config()
    key = (requirements.exit_layer, model.dtype, model.device, compat.attention_implementation(config))
    with _lock:
        known = _checked.setdefault(model, {})
        if key not in known:
            try:
                known[key] = _difference(model, TargetRequirements(exit_layer=requirements.exit_layer))
            except _UndecidedError:
                return
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                raise _refusal(model, requirements, f"a trial run failed ({type(error).__name__}: {error})") from error
        difference = known[key]
    if difference is not None:
        raise _refusal(model, requirements, difference)


def _refusal(model: PreTrainedModel, requirements: TargetRequirements, reason: str) -> ValueError:
    what, remedy = "verify draft tokens", "call generate() without candidate_generator="
    if requirements.exit_layer:
        what, remedy = "draft with its own first layers", "use another candidate generator"
    return ValueError(f"{type(model).__name__} cannot {what}: {reason}; {remedy}")


def _difference(model: PreTrainedModel, requirements: TargetRequirements) -> str | None:
    """What differs between the two ways of decoding; None if nothing does."""
    input_ids = _prompt(model)
    mask = torch.ones_like(input_ids)
    mask[0, :PADDING] = 0
    config = GenerationConfig(max_new_tokens=STEPS, do_sample=False, pad_token_id=0)
    arguments: dict[str, Any] = {"input_ids": input_ids, "attention_mask": mask, "generation_config": config}
    try:
        with torch.random.fork_rng(devices=[]):
            compat.plain_generate(model)(model, **arguments, custom_generate=partial(_compare, requirements))
    except _DifferenceError as difference:
        return str(difference)
    return None


def _compare(
    requirements: TargetRequirements,
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    *,
    generation_config: GenerationConfig,
    logits_processor: Any = None,
    stopping_criteria: Any = None,
    **model_kwargs: Any,
) -> torch.Tensor:
    """A decoding method for `generate` that decodes both ways and raises if they differ."""
    model_kwargs.pop("past_key_values", None)
    arguments = (model, input_ids, generation_config)
    if requirements.exit_layer is not None and not _division_agrees(requirements, *arguments, model_kwargs):
        raise _DifferenceError("running its layers in two parts gives other scores than running them at once")
    plain, tokens = _decode_plainly(*arguments, model_kwargs)
    if not all(logits.amax(dim=-1).isfinite().all() for logits in plain):
        raise _UndecidedError
    ours = _verify_tree(make_target(requirements, *arguments, dict(model_kwargs)), tokens)
    pairs = zip(plain, ours, strict=True)
    errors = [_error(*rows) for pair in pairs for rows in zip(*pair, strict=True)]
    worst, median = max(errors), sorted(errors)[len(errors) // 2]
    limit = MAX_ERROR.get(model.dtype)
    if not (median <= MAX_MEDIAN_ERROR if limit is None else worst <= limit):
        raise _DifferenceError(
            f"in a trial run its logits differed from those of plain decoding by {worst:.2g} standard deviations"
        )
    return input_ids


def _division_agrees(
    requirements: TargetRequirements,
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    config: GenerationConfig,
    kwargs: Any,
) -> bool:
    """Whether a prefill that stops at the exit layer and goes on from there equals one in a single pass."""
    whole = make_target(TargetRequirements(), model, input_ids, config, dict(kwargs)).prefill(DraftTree.empty(2))
    divided = make_target(requirements, model, input_ids, config, dict(kwargs))
    assert isinstance(divided, EarlyExitTarget)
    divided.prefill_early()
    logits = divided.prefill(DraftTree.empty(2))
    return torch.equal(whole, logits)  # the same operations on the same shapes: equal to the last bit


def _decode_plainly(
    model: PreTrainedModel, input_ids: torch.Tensor, config: GenerationConfig, model_kwargs: dict[str, Any]
) -> tuple[list[torch.Tensor], list[list[int]]]:
    """Logits `[batch, vocab]` of each step of greedy decoding, one token at a time, and the tokens by row."""
    cache = DynamicCache(config=model.config.get_text_config())
    outputs = compat.prefill(model, input_ids, config, {**model_kwargs, "past_key_values": cache})
    logits, tokens = [outputs.logits[:, -1].float()], []
    mask, positions = model_kwargs["attention_mask"], model_kwargs["position_ids"][..., -1:]
    for _ in range(STEPS - 1):
        tokens.append(logits[-1].argmax(dim=-1, keepdim=True))
        mask, positions = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1), positions + 1
        inputs = cast(Any, model).prepare_inputs_for_generation(
            tokens[-1],
            **{**model_kwargs, "past_key_values": cache, "attention_mask": mask, "position_ids": positions},
        )
        logits.append(cast(Any, model)(**inputs, return_dict=True).logits[:, -1].float())
    tokens.append(logits[-1].argmax(dim=-1, keepdim=True))
    return logits, torch.cat(tokens, dim=1).tolist()


def _verify_tree(target: Target, tokens: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Logits `[batch, vocab]` of the same steps, from two verification steps."""
    logits = [target.prefill(DraftTree.empty(2))[:, -1]]
    rows = [([(row[1] + 1) % 2, *row[1:3]], (-1, -1, 1)) for row in tokens]
    tree = DraftTree.from_nodes(rows)
    if isinstance(target, EarlyExitTarget):
        target.run_early(torch.tensor([row[0] for row in tokens]))
        target.grow_early(DraftTree.from_nodes([(nodes[:2], parents[:2]) for nodes, parents in rows]), 2)
    step = target.forward(tree, [row[0] for row in tokens])
    logits += [step[:, node] for node in (0, 2, 3)]
    target.commit([[1, 2], [1]])
    # Row 0 goes on behind t2, row 1 behind t1: its next logits, after t2, repeat those of the last node.
    step = target.forward(DraftTree.chains([[], [tokens[1][3]]]), [tokens[0][3], tokens[1][2]])
    logits.append(torch.stack([step[0, 0], step[1, 1]]))
    return [values.float() for values in logits]


def _error(reference: torch.Tensor, logits: torch.Tensor) -> float:
    """The largest difference, in standard deviations of the reference; entries that are not finite in both agree."""
    finite = reference.isfinite()
    if not torch.equal(reference.nan_to_num()[~finite], logits.nan_to_num()[~finite]):
        return math.inf
    if not bool(logits[finite].isfinite().all()):
        return math.inf
    if not bool(finite.any()):
        return 0.0
    deviation = reference[finite].std().clamp(min=1e-6)
    return float(((reference - logits)[finite].abs().amax() / deviation).item())


def _prompt(model: PreTrainedModel) -> torch.Tensor:
    """`[2, PROMPT]` ids spread over the vocabulary, without the special tokens that the config names."""
    config = model.config.get_text_config()
    special = {
        value
        for part in (model.config, config)
        for name, value in part.to_dict().items()
        if name.endswith(("_token_id", "_token_index")) and isinstance(value, int)
    }
    usable = [token for token in range(config.vocab_size) if token not in special][: 2**14]
    stride = max(1, len(usable) // (2 * PROMPT + 1))
    ids = [usable[(1 + place) * stride % len(usable)] for place in range(2 * PROMPT)]
    return torch.tensor(ids, device=compat.input_device(model)).view(2, PROMPT)
