"""Makes the target that a strategy needs, and checks once per model that it computes what plain `generate` computes.

No interface guarantees that a model places tokens by `position_ids`, respects a 4-D mask, or keeps all its state in the
cache. So a short text, or the call's prompt if there is more than text, is decoded twice: token by token, and with a
draft and a rollback; a model that differs is refused. The two rows as a tree; where only chains can be verified the
draft is t1, t2 and the wrong token::

    row 0  . . a b c d │ t0 ─┬─ wrong              pending t0, nodes (wrong, t1, t2); t1 and t2 are accepted in row 0
    row 1  e f g h i j │ t0 ─┴─ t1 ── t2           and t1 alone in row 1, so that the next step is ragged
"""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import DynamicCache, GenerationConfig, PreTrainedModel

from hf_specgen import compat
from hf_specgen.call import Compile
from hf_specgen.targets.early_exit import EarlyExitTarget, divisible_layers
from hf_specgen.targets.graphs import GRAPH_DEVICES
from hf_specgen.targets.hidden_states import HiddenStateTarget
from hf_specgen.targets.inputs import accompanying_inputs
from hf_specgen.targets.model_parts import (
    has_special_layers,
    is_causal_kernel,
    layer_kinds,
    reads_encoder,
    text_config,
)
from hf_specgen.targets.support import first_problem, is_rounding, largest_differences, last_position
from hf_specgen.targets.target import Target
from hf_specgen.tree import DraftTree, Parents, chain_parents

logger = logging.getLogger("hf_specgen")
OUTPUT_STATE = -1
"""Stands for the input of the output matrix (after the final norm)."""
RANDOM = "its forward pass draws random numbers, as dropout does, so that two passes differ"
STEPS = 5
"""Generated tokens per row, of which the last one is not processed."""

Prompt = tuple[torch.Tensor, GenerationConfig, dict[str, Any]]
"""What `generate` has prepared: input ids, config and arguments of the model."""
Problem = tuple[str, Exception | None] | None
"""How the two ways of decoding differ, and the exception of a trial that failed; None if they agree."""

_lock = threading.Lock()
_checked: WeakKeyDictionary[PreTrainedModel, dict[tuple[Any, ...], str | None]] = WeakKeyDictionary()
_logged: WeakKeyDictionary[PreTrainedModel, set[str]] = WeakKeyDictionary()
"""Why passes of a model are not captured, as far as it was logged."""


@dataclass(frozen=True)
class TargetRequirements:
    """What a strategy needs from the target's forward passes: hidden states, or layers that run separately.

    Args:
        aux_hidden_state_layers: indices into Transformers' `hidden_states`, whose states are captured; `OUTPUT_STATE`
            for the input of the output matrix, which for a prompt may be the last position alone.
        exit_layer: number of first layers that run separately to draft; None if not needed.
        reads_cache: whether drafting attends to the target's own keys and values.
    """

    aux_hidden_state_layers: tuple[int, ...] = ()
    exit_layer: int | None = None
    reads_cache: bool = False

    def __or__(self, other: TargetRequirements) -> TargetRequirements:
        """Both requirements together; raises for two different exit layers, or an exit layer beside hidden states."""
        exits = {self.exit_layer, other.exit_layer} - {None}
        aux_layers = tuple(dict.fromkeys(self.aux_hidden_state_layers + other.aux_hidden_state_layers))
        if len(exits) > 1 or (exits and aux_layers):
            raise ValueError(
                "these strategies run the target in different ways (an early exit, hidden states); keep one of them"
            )
        return TargetRequirements(aux_layers, exits.pop() if exits else None, self.reads_cache or other.reads_cache)


def check_decoder_only(model: PreTrainedModel, strategy: str) -> None:
    """Raise if a strategy that reads hidden states or divides the layers is used with an encoder-decoder model."""
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"{strategy} does not work with {type(model).__name__}: it needs hidden states or an early exit, which are "
            "implemented for decoder-only models, whose layers read nothing beside the text; with an encoder-decoder "
            "use NgramCandidates, RecyclingCandidates or DraftModelCandidates"
        )


def make_target(
    requirements: TargetRequirements,
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
    compile: Compile = False,
) -> Target:
    """The target of one call, with captured passes as `compile` says; raises if it cannot be made."""
    is_possible = compile == "graphs" or (compile == "auto" and compat.input_device(model).type in GRAPH_DEVICES)
    graphs: Compile = compile if is_possible else False
    if graphs and (problem := _capture_problem(requirements, model, config, model_kwargs, graphs)) is not None:
        if graphs == "graphs":
            raise ValueError(f'{problem}; leave compile="graphs" out')
        if problem not in (logged := _logged.setdefault(model, set())):
            logger.info("no CUDA graphs: %s", problem)
            logged.add(problem)
        graphs = False
    call = model, input_ids, config, model_kwargs
    if "encoder_outputs" in model_kwargs and (requirements.aux_hidden_state_layers or requirements.exit_layer):
        check_decoder_only(model, "this strategy")
    if requirements.exit_layer is not None:
        return EarlyExitTarget(*call, requirements.exit_layer)
    if requirements.aux_hidden_state_layers:
        return HiddenStateTarget(*call, requirements.aux_hidden_state_layers, graphs)
    return Target(*call, graphs)


def _capture_problem(
    requirements: TargetRequirements,
    model: PreTrainedModel,
    generation: GenerationConfig,
    model_kwargs: dict[str, Any],
    mode: Compile,
) -> str | None:
    """Why passes of a model are not captured in a call, as far as is known before; None if they may be."""
    device, config = compat.input_device(model).type, text_config(model)
    implementation, given = compat.attention_implementation(config), model_kwargs.get(compat.CACHE)
    window = config.sliding_window if "sliding_attention" in layer_kinds(config) else 0
    is_long = generation.max_length is None or generation.max_length > 2 * window
    problems = {
        f"is on {device!r}, and CUDA graphs need a GPU": device not in GRAPH_DEVICES,
        "reads an encoder, and passes of decoder-only models are captured": "encoder_outputs" in model_kwargs,
        "runs a part of its layers (layer skip), and whole passes are captured": requirements.exit_layer is not None,
        "is compiled already, and a pass is captured of a model that is not": compat.has_compiled_parts(model),
        "has weights that are offloaded or on several devices, which are moved in every pass": (
            compat.has_device_hooks(model)
        ),
        f"uses {implementation!r} attention, and passes are captured with 'sdpa' or 'eager'": (
            implementation not in ("sdpa", "eager")
        ),
        "keeps convolutions, recurrent states or indices in its cache, which captured passes do not write": (
            has_special_layers(config)
        ),
        "runs under torch.autocast, which casts weights in every pass": torch.is_autocast_enabled(device),
        "gets inputs beside text, and passes over text are captured": bool(accompanying_inputs(model_kwargs)),
        "was given a cache without the slots outside of sliding windows, which captured passes need": (
            compat.is_user_defined(given) and any(getattr(given, "is_sliding", ()))
        ),
        "has sliding windows, whose layers would keep all of a long text": mode == "auto" and window > 0 and is_long,
    }
    return first_problem(model, problems)


class UndecidedError(Exception):
    """The logits of plain decoding are NaN, +inf or all -inf, so that nothing can be compared."""


def check_computation(
    model: PreTrainedModel,
    requirements: TargetRequirements,
    input_ids: torch.Tensor,
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
) -> None:
    """Raise unless the model, run as `requirements` says, computes what plain `generate` computes.

    The result is cached; not that of a check that failed, or in which plain decoding gave NaN, +inf or nothing but
    -inf, which `generate` itself reports.
    """
    exit_layer, implementation = requirements.exit_layer, compat.attention_implementation(text_config(model))
    if exit_layer is not None:
        divisible_layers(model, exit_layer)  # a layer that does not exist is no failure of the check
    dropout = tuple(module.p for module in model.modules() if isinstance(module, nn.Dropout)) if model.training else ()
    key = exit_layer, _precision(model), compat.input_device(model), implementation, model.training, dropout
    inputs, mask = tuple(sorted(accompanying_inputs(model_kwargs))), model_kwargs.get("attention_mask")
    check, reads, rows_differ = partial(_difference, model, exit_layer), reads_encoder(model), None
    problem: Problem = None
    if not reads:
        if is_causal_kernel(implementation):  # rows of a batch accept different numbers of tokens
            rows_differ = f"{implementation} takes no mask, which rows of different lengths need"
        elif check((*key, 2), partial(_text, model, 2)):
            rows_differ = "rows of different lengths get other scores than in plain decoding"
        if rows_differ is not None:
            problem = check((*key, 1), partial(_text, model, 1))
            if problem is None and (len(input_ids) > 1 or not (mask is None or bool(mask.all()))):
                problem = rows_differ, None
    if problem is None and (inputs or reads):  # the call's own prompt
        masks = [name for name in ("attention_mask", "decoder_attention_mask") if name in model_kwargs]
        key_of_prompt = *key, inputs, *([len(input_ids) > 1, *masks] if reads else [])
        problem = check(key_of_prompt, lambda: (input_ids, config, model_kwargs))
    if problem is None:
        return
    (reason, cause), what, remedy = problem, "verify draft tokens", "call generate() without candidate_generator="
    if exit_layer is not None:
        what, remedy = "draft with its own first layers", "use another candidate generator"
    elif model.training and RANDOM in reason:
        remedy = "call model.eval() before generate(), or leave candidate_generator= out"
    elif reason == rows_differ:
        remedy = "give one prompt at a time, without padding, or leave candidate_generator= out"
    given = f" with {', '.join(inputs)}" if inputs and not reads else ""
    raise ValueError(f"{type(model).__name__} cannot {what}{given}: {reason}; {remedy}") from cause


def _difference(
    model: PreTrainedModel, exit_layer: int | None, key: tuple[Any, ...], prompt: Callable[[], Prompt]
) -> Problem:
    """What `compare` finds for a prompt, which is kept under a key."""
    with _lock:
        results = _checked.setdefault(model, {})
        if key not in results:
            try:
                with _positions_kept(model), torch.random.fork_rng(devices=[]):
                    results[key] = compare(model, exit_layer, *prompt())
            except UndecidedError:
                return None
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                return f"a trial run failed ({type(error).__name__}: {error})", error
        return None if (reason := results[key]) is None else (reason, None)


def _text(model: PreTrainedModel, rows: int) -> Prompt:
    """Two rows of text, of which one is padded, or one row without padding."""
    input_ids = _prompt(model)[:rows]
    mask = torch.ones_like(input_ids)
    if rows > 1:
        mask[0, : min(2, input_ids.shape[1] - 1)] = 0
    settings = {"max_new_tokens": STEPS, "do_sample": False, "num_return_sequences": 1, "pad_token_id": 0}
    prepared = compat.prepared_call(model, input_ids=input_ids, attention_mask=mask, **settings)
    prepared[2].pop(compat.CACHE, None)
    return prepared


@contextmanager
def _positions_kept(model: PreTrainedModel) -> Iterator[None]:
    """Restore `rope_deltas`, which models with several axes of positions keep from the last `generate` call."""
    found: list[Any] = [module for module in model.modules() if hasattr(module, "rope_deltas")]
    remembered = [module.rope_deltas for module in found]
    try:
        yield
    finally:
        for module, deltas in zip(found, remembered, strict=True):
            module.rope_deltas = deltas


@torch.no_grad()
def compare(
    model: PreTrainedModel,
    exit_layer: int | None,
    input_ids: torch.Tensor,
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
) -> str | None:
    """Decode a prompt, as prepared by `generate`, both ways: how they differ, if they do."""
    given, requirements = model_kwargs.get(compat.CACHE), TargetRequirements(exit_layer=exit_layer)
    cache = DynamicCache(config=model.config.get_text_config()) if given is None else copy.deepcopy(given)
    random_state = _random_state(input_ids.device)
    output = compat.decode_plainly(model, input_ids, config, STEPS, {**model_kwargs, compat.CACHE: cache})
    plain, tokens = output.logits, output.sequences[:, -STEPS:].tolist()
    if not torch.equal(_random_state(input_ids.device), random_state):
        return f"in training mode {RANDOM}" if model.training else RANDOM
    target = make_target(requirements, model, input_ids, config, {**model_kwargs, compat.CACHE: copy.deepcopy(given)})
    drafted = [logits.to(plain[0]) for logits in _decode_drafts(target, tokens)]
    if not all(logits.amax(dim=-1).isfinite().all() for logits in plain):
        raise UndecidedError
    errors = largest_differences(torch.cat(plain), torch.cat(drafted))
    if is_rounding(errors, _precision(model)):
        return None
    return f"in a trial run its logits differed from those of plain decoding by {max(errors):.2g} standard deviations"


def _precision(model: PreTrainedModel) -> torch.dtype:
    """The dtype of matrix products: the model's, unless `torch.autocast` casts their inputs."""
    device = compat.input_device(model).type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else model.dtype


def _random_state(device: torch.device) -> torch.Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _decode_drafts(target: Target, tokens: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Logits `[batch, vocab]` of the same steps, from two verification steps."""
    logits = [target.prefill()[:, -1]]
    # Token 0 or 1, another one than t1, comes before it.
    nodes, parents, first = [[(row[1] + 1) % 2, *row[1:3]] for row in tokens], Parents((-1, -1, 1)), 1
    if target.verifies_chains_only:
        nodes, parents, first = [[*row[1:], row[0]] for row in nodes], chain_parents(3), 0
    tree = DraftTree(nodes, (parents,) * len(tokens))
    if isinstance(target, EarlyExitTarget):
        target.run_early(DraftTree.empty(len(tokens)), torch.tensor([row[:1] for row in tokens]))
        target.run_early(tree.first_nodes(2), tree.first_nodes(2).tokens)
    step = target.forward(tree, [row[0] for row in tokens])
    logits += [step[:, place] for place in (0, 1 + first, 2 + first)]
    # Even rows continue after t2, odd rows after t1: their next logits, after t2, repeat those of the last node.
    odd = [row % 2 for row in range(len(tokens))]
    target.commit([[first] if is_odd else [first, first + 1] for is_odd in odd])
    chains = DraftTree.chains([[row[3]] if is_odd else [] for row, is_odd in zip(tokens, odd, strict=True)])
    step = target.forward(chains, [row[2 if is_odd else 3] for row, is_odd in zip(tokens, odd, strict=True)])
    logits.append(torch.stack([step[row, is_odd] for row, is_odd in enumerate(odd)]))
    return logits


def _prompt(model: PreTrainedModel) -> torch.Tensor:
    """`[2, tokens]` ids spread over the vocabulary, without special tokens; at most six per row."""
    config = model.config.get_text_config()
    length = max(1, min(6, last_position(config, (0,)) + 1 - (STEPS - 1)))
    special = {
        value
        for part in (model.config, config)
        for name, value in part.to_dict().items()
        if name.endswith(("_token_id", "_token_index")) and isinstance(value, int)
    }
    usable = [token for token in range(config.vocab_size) if token not in special][: 2**14]
    stride = max(1, len(usable) // (2 * length + 1))
    ids = [usable[(1 + index) * stride % len(usable)] for index in range(2 * length)]
    return torch.tensor(ids, device=compat.input_device(model)).view(2, length)
