"""Decodes a prompt both ways, in plain steps and by drafts with a rollback, and compares the logits.

The two rows as a tree; where only chains can be verified the draft is t1, t2 and the wrong token. With an early exit
there are more wrong tokens, since hooks may treat passes over several tokens differently::

    row 0  . . a │ t0 ─┬─ wrong       pending t0, nodes (wrong, t1, t2); t1 is accepted in row 0 and nothing in row 1,
    row 1  e f g │ t0 ─┴─ t1 ── t2    so that the next step is ragged: t2 in row 0, t1 with the draft t2 in row 1

The logits after the prompt, t0 and t1 must be those of plain decoding. After t2 they must be the same as a node of the
tree and after the rollback, which spares a plain step.
"""

from __future__ import annotations

import copy
import math
import traceback
from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache, EncoderDecoderCache, GenerationConfig

from hf_specgen import compat
from hf_specgen.call import UnsupportedModelError
from hf_specgen.random_state import RandomOperations, global_generator
from hf_specgen.targets.cache import MAX_DRAFT_SLOTS
from hf_specgen.targets.early_exit import EarlyExitTarget
from hf_specgen.targets.exact_arithmetic import HALF, ExactArithmetic
from hf_specgen.targets.fingerprint import matmul_precision
from hf_specgen.targets.hooks import may_keep_results, package_of, treats_rows_alike
from hf_specgen.targets.inputs import PreparedCall
from hf_specgen.targets.model_parts import cached_tokens
from hf_specgen.targets.requirements import TargetRequirements, make_target
from hf_specgen.targets.support import is_rounding, largest_differences
from hf_specgen.targets.target import Target
from hf_specgen.targets.watched_hooks import WatchedHooks
from hf_specgen.tree import DraftTree, Parents, chain_parents

IN_TRAINING = "in training mode"
RANDOM = "its forward pass draws random numbers, as dropout does, so that two passes differ"
KEEPS_STATE = (
    "a hook or replaced forward of it changes its results and a variable of its own in every pass, and drafts take "
    "other passes than plain decoding"
)
CANNOT_RUN = "it cannot run in float32"
STEPS = 3
"""Tokens per row that plain decoding generates. The last one is processed in drafts alone."""


class UndecidedError(Exception):
    """The logits of plain decoding are NaN, +inf or all -inf, so that nothing can be compared."""


def find_difference(call: PreparedCall, exit_layer: int | None) -> str | None:
    """Decode the prompt of a call both ways; returns how the logits differ, None if they do not.

    The comparison in float32 decides: it distinguishes a wrong position or mask from rounding. A model that
    cannot run so, and a quantized one that differs in it, is compared as it is. A float32 model is compared as it is
    first, and converted only if it differs: it may use autocast inside, or TF32.
    """
    precision = matmul_precision(call.model)
    cache = call.model_kwargs.get(compat.CACHE)
    # New keys would be rounded to the dtype of cached ones; hooks that load weights would keep converted ones.
    is_convertible = not _is_begun(cache) and not compat.has_device_hooks(call.model)
    # What the model keeps from its first pass for later ones must be computed in its precision, not in float32.
    if may_keep_results(call.model, any_class=precision in HALF):
        _decode_plainly(call, 1)
    if precision in HALF:
        if is_convertible:
            exact_reason = _exact_difference(call, exit_layer)
            is_quantized = getattr(call.model, "is_quantized", False)
            if exact_reason is None or (exact_reason != CANNOT_RUN and not is_quantized):
                return exact_reason
        return compare(call, exit_layer, precision)
    reason = compare(call, exit_layer, precision)
    if reason is None or not is_convertible:
        return reason
    exact_reason = _exact_difference(call, exit_layer)
    return reason if exact_reason == CANNOT_RUN else exact_reason


def _exact_difference(call: PreparedCall, exit_layer: int | None) -> str | None:
    """The result of `compare` in float32; `CANNOT_RUN` if the model cannot run in it."""
    try:
        with ExactArithmetic(compat.input_device(call.model)):
            return compare(call, exit_layer, torch.float32)
    except UndecidedError:
        raise
    except Exception:  # kernels for half precision alone, too little memory
        return CANNOT_RUN


@torch.no_grad()
def compare(call: PreparedCall, exit_layer: int | None, precision: torch.dtype) -> str | None:
    """Decode both ways in the present arithmetic; returns how the logits differ, None if by rounding in `precision`."""
    model, input_ids, config, model_kwargs = call
    generator = global_generator(input_ids.device)
    random_state = generator.get_state()
    with WatchedHooks(model) as hooks:
        output = _decode_plainly(call)
    if hooks.has_stateful_hook:
        return KEEPS_STATE
    plain = output.logits
    tokens = output.sequences[:, -STEPS:].tolist()
    if not torch.equal(generator.get_state(), random_state):
        with RandomOperations(input_ids.device) as operations:  # other threads may have drawn
            _decode_plainly(call)
        if operations.found:
            generator.set_state(random_state)
            is_training = any(module.training for module in model.modules())  # a new adapter is, also after eval()
            return f"{IN_TRAINING} {RANDOM}" if is_training else RANDOM
    requirements = TargetRequirements(exit_layer=exit_layer)

    def new_target() -> Target:
        kwargs = {**model_kwargs, compat.CACHE: _copied_cache(model_kwargs)}
        return make_target(requirements, model, input_ids, config, kwargs)

    try:
        *drafted, in_tree, after_rollback = (logits.to(plain[0]) for logits in _decode_drafts(new_target(), tokens))
        if not _is_decided(in_tree, config):  # do they differ from plain decoding, or does the model have such logits?
            in_tree = _decode_plainly(call, STEPS + 1).logits[-1]
        pairs = [*zip(plain, drafted, strict=True), (in_tree, after_rollback)]
        if not treats_rows_alike(model):
            pairs.append((plain[-1], _after_long_draft(new_target(), tokens, plain[-1])))
    except (AssertionError, AttributeError, IndexError, NotImplementedError, TypeError) as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        if package_of(frame.f_globals.get("__name__", "")) == package_of(__name__):
            raise  # no fault of the model
        reason = f"its forward pass takes no draft tokens ({type(error).__name__}: {error})"
        raise UnsupportedModelError(reason) from error
    if not _is_decided(torch.cat([*plain, in_tree]), config):
        raise UndecidedError
    expected, found = (_of_allowed_tokens(torch.cat(logits), config) for logits in zip(*pairs, strict=True))
    errors = largest_differences(expected, found)
    if is_rounding(errors, precision):
        return None
    return (
        f"in the self-check its logits differed from those of plain decoding by {max(errors):.2g} standard deviations"
    )


def _is_decided(logits: torch.Tensor, config: GenerationConfig) -> bool:
    """Whether each row has a largest logit, without which there is nothing to compare."""
    return bool(_of_allowed_tokens(logits, config).amax(dim=-1).isfinite().all())


def _of_allowed_tokens(logits: torch.Tensor, config: GenerationConfig) -> torch.Tensor:
    """Logits in which tokens that a call suppresses, whose embeddings may not be finite, are improbable."""
    suppressed = [token for token in config.suppress_tokens or () if token < logits.shape[-1]]
    return logits.index_fill(-1, torch.tensor(suppressed, dtype=torch.long, device=logits.device), -math.inf)


def _decode_plainly(call: PreparedCall, steps: int = STEPS) -> Any:
    """The output of plain decoding with a separate cache."""
    model, input_ids, config, model_kwargs = call
    copied = _copied_cache(model_kwargs)
    cache = DynamicCache(config=model.config.get_text_config()) if copied is None else copied
    return compat.decode_plainly(model, input_ids, config, steps, {**model_kwargs, compat.CACHE: cache})


def _copied_cache(model_kwargs: dict[str, Any]) -> Any:
    """A copy of the cache that a call continues; None if it is empty, so that a new cache is equivalent."""
    cache = model_kwargs.get(compat.CACHE)
    is_continued = isinstance(cache, EncoderDecoderCache) or _is_begun(cache)
    return copy.deepcopy(cache) if is_continued else None


def _is_begun(cache: Any) -> bool:
    """Whether a cache holds tokens, or states of them."""
    layers = getattr(cache, "layers", ())
    return cached_tokens(cache) > 0 or any(any(getattr(layer, "has_previous_state", {}).values()) for layer in layers)


def _decode_drafts(target: Target, tokens: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Logits `[batch, vocab]` after the prompt, t0, t1 and t2, and those after t2 once more, after a rollback."""
    logits = [target.prefill()[:, -1]]
    # A wrong token beside t1: a token of the text if possible, since others may have no finite states.
    size = min(2, logits[0].shape[-1])
    wrong = [next((token for token in row if token != row[1]), (row[1] + 1) % size) for row in tokens]
    exits_early = isinstance(target, EarlyExitTarget)
    if target.verifies_chains_only:
        # The wrong token needs one more position than plain decoding.
        length = max(2, min(3, target.last_position - max(target.first_positions)))
        nodes = [[row[1], row[2], token][:length] for row, token in zip(tokens, wrong, strict=True)]
        parents = chain_parents(length)
        first, second = 0, 1  # the nodes of t1 and t2
    elif exits_early:
        # The first layers run over the first two nodes while they draft, and over the others in the verification.
        nodes = [[token, token, row[1], token, row[2]] for row, token in zip(tokens, wrong, strict=True)]
        first, second = 2, 4
        parents = Parents((-1, -1, -1, -1, first))
    else:
        nodes = [[token, row[1], row[2]] for row, token in zip(tokens, wrong, strict=True)]
        first, second = 1, 2
        parents = Parents((-1, -1, first))
    tree = DraftTree(nodes, (parents,) * len(tokens))
    if isinstance(target, EarlyExitTarget):
        target.run_early(DraftTree.empty(len(tokens)), torch.tensor([row[:1] for row in tokens]))
        early = tree.first_nodes(1 if target.verifies_chains_only else 2)
        target.run_early(early, early.tokens)
    step = target.forward(tree, [row[0] for row in tokens])
    logits += [step[:, query] for query in (0, 1 + first, 1 + second)]
    # Even rows continue after t1, odd rows after t0.
    odd = [row % 2 for row in range(len(tokens))]
    target.commit([[] if is_odd else [first] for is_odd in odd])
    chains = DraftTree.chains([[row[2]] if is_odd else [] for row, is_odd in zip(tokens, odd, strict=True)])
    step = target.forward(chains, [row[1 if is_odd else 2] for row, is_odd in zip(tokens, odd, strict=True)])
    logits.append(torch.stack([step[row, is_odd] for row, is_odd in enumerate(odd)]))
    return logits


def _after_long_draft(target: Target, tokens: Sequence[Sequence[int]], plain: torch.Tensor) -> torch.Tensor:
    """Logits `[batch, vocab]` after t1 in a pass as long as a draft's, where a hook of a user may do something else.

    The draft is t1 many times; of a tree the copy that differs most from the `plain` logits after t1 counts, of a chain
    the first one.
    """
    target.prefill()
    first = max(target.first_positions)
    is_chain = target.verifies_chains_only
    max_tokens = min(MAX_DRAFT_SLOTS - 1, target.max_draft_tokens)
    if is_chain:  # each node of a chain has a further position
        max_tokens = min(max_tokens, target.last_position - first)
    if first + 2 * MAX_DRAFT_SLOTS > target.slot_limit:
        max_tokens = 1
    nodes = max(1, int(max_tokens))
    parents = chain_parents(nodes) if is_chain else Parents((-1,) * nodes)
    tree = DraftTree([[row[1]] * nodes for row in tokens], (parents,) * len(tokens))
    if isinstance(target, EarlyExitTarget):
        target.run_early(DraftTree.empty(len(tokens)), torch.tensor([row[:1] for row in tokens]))
        early = tree.first_nodes(1)
        target.run_early(early, early.tokens)
    copies = target.forward(tree, [row[0] for row in tokens])[:, 1 : 2 if is_chain else None].to(plain)
    farthest = (copies - plain[:, None]).abs().amax(dim=-1).argmax(dim=1)
    return copies[torch.arange(len(copies)), farthest]
