"""The self-check: a model must compute with drafts and rollbacks what it computes in plain `generate`.

No interface guarantees that a model places tokens by `position_ids`, respects a 4-D mask, or keeps all its state in the
cache. So a short text, or the call's prompt if there is more than text, is decoded twice: token by token, and with a
draft and a rollback; a model that differs is refused. The two rows as a tree; where only chains can be verified the
draft is t1, t2 and the wrong token::

    row 0  . . a b c d │ t0 ─┬─ wrong              pending t0, nodes (wrong, t1, t2); t1 and t2 are accepted in row 0
    row 1  e f g h i j │ t0 ─┴─ t1 ── t2           and t1 alone in row 1, so that the next step is ragged

A result holds as long as `hf_specgen.targets.fingerprint.computation` of the model has the same value.
"""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedModel

from hf_specgen import compat
from hf_specgen.random_state import RandomOperations, global_generator
from hf_specgen.targets.early_exit import EarlyExitTarget, divisible_layers
from hf_specgen.targets.exact_arithmetic import HALF, ExactArithmetic
from hf_specgen.targets.fingerprint import computation
from hf_specgen.targets.hooks import WatchedHooks, treats_rows_alike
from hf_specgen.targets.inputs import accompanying_inputs, without_router_loss
from hf_specgen.targets.model_parts import is_causal_kernel, reads_encoder, text_config
from hf_specgen.targets.requirements import TargetRequirements, make_target
from hf_specgen.targets.support import is_rounding, largest_differences, last_position
from hf_specgen.targets.target import Target
from hf_specgen.tree import DraftTree, Parents, chain_parents

RANDOM = "its forward pass draws random numbers, as dropout does, so that two passes differ"
KEEPS_STATE = (
    "a hook or replaced forward of it changes its results and a variable of its own in every pass, and drafts take "
    "other passes than plain decoding"
)
CANNOT_RUN = "it cannot run in float32"
STEPS = 5
"""Generated tokens per row, of which the last one is not processed."""
MAX_RESULTS = 64
"""Results that are kept for a model, for the states in which it has been used."""

Prompt = tuple[torch.Tensor, GenerationConfig, dict[str, Any]]
"""What `generate` has prepared: input ids, config and arguments of the model."""


class Problem(NamedTuple):
    """How the two ways of decoding differ, and the exception of a trial that failed."""

    reason: str
    cause: Exception | None = None


class UndecidedError(Exception):
    """The logits of plain decoding are NaN, +inf or all -inf, so that nothing can be compared."""


class Results:
    """The results of the trials of one model; used by one thread at a time."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # a forward pass may call `generate` of the same model
        self._reasons: OrderedDict[tuple[Any, ...], str | None] = OrderedDict()
        self._changed_by_passes: set[int] = set()

    def find(
        self, model: PreTrainedModel, state: tuple[Any, ...], key: tuple[Any, ...], trial: Callable[[], str | None]
    ) -> str | None:
        """The reason that a trial has given; it runs if it has not yet run in this state, the model's `computation`."""
        if (*key, self._stable(state)) not in self._reasons:
            reason = trial()
            pairs = enumerate(zip(state, computation(model), strict=False))
            self._changed_by_passes |= {index for index, (before, after) in pairs if before != after}
            self._reasons[*key, self._stable(state)] = reason
            if len(self._reasons) > MAX_RESULTS:
                self._reasons.popitem(last=False)
        return self._reasons[*key, self._stable(state)]

    def _stable(self, state: tuple[Any, ...]) -> tuple[Any, ...]:
        """The values but those that passes themselves have changed, such as counters."""
        if not self._changed_by_passes:
            return state
        return tuple(value for index, value in enumerate(state) if index not in self._changed_by_passes)


_lock = threading.Lock()
_results: WeakKeyDictionary[PreTrainedModel, Results] = WeakKeyDictionary()


def check_computation(
    model: PreTrainedModel,
    requirements: TargetRequirements,
    input_ids: torch.Tensor,
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
) -> None:
    """Raise unless the model, run as `requirements` says, computes what plain `generate` computes.

    A result is kept for later calls with the same `computation` of the model; not that of a trial that failed, or in
    which plain decoding gave NaN, +inf or nothing but -inf, which `generate` itself reports.
    """
    if requirements.exit_layer is not None:
        divisible_layers(model, requirements.exit_layer)  # a layer that does not exist is no failure of the check
    with _lock:
        results = _results.setdefault(model, Results())
    with results.lock:
        check = SelfCheck(model, requirements.exit_layer, results)
        problem = check.problem(input_ids, config, model_kwargs)
    if problem is None:
        return
    inputs = () if reads_encoder(model) else sorted(accompanying_inputs(model_kwargs))
    what = "verify draft tokens" if requirements.exit_layer is None else "draft with its own first layers"
    what += f" with {', '.join(inputs)}" if inputs else ""
    remedy = check.remedy(problem)
    raise ValueError(f"{type(model).__name__} cannot {what}: {problem.reason}; {remedy}") from problem.cause


class SelfCheck:
    """The trials of one call, with the results of earlier ones."""

    def __init__(self, model: PreTrainedModel, exit_layer: int | None, results: Results):
        self._model = model
        self._exit_layer = exit_layer
        self._results = results
        self._key = (exit_layer, _precision(model), compat.input_device(model))
        self._state = computation(model)
        self._rows_differ = False

    def problem(
        self, input_ids: torch.Tensor, config: GenerationConfig, model_kwargs: dict[str, Any]
    ) -> Problem | None:
        """What the trials find that a call needs; None if the model passes them."""
        mask = model_kwargs.get("attention_mask")
        is_single = len(input_ids) == 1 and (mask is None or bool(mask.all()))
        reads = reads_encoder(self._model)
        rows = 2 if len(input_ids) <= 2 or treats_rows_alike(self._model) else len(input_ids)
        problem = None if reads else self._of_text(rows, is_single)
        inputs = tuple(sorted(accompanying_inputs(model_kwargs)))
        if problem is not None or not (inputs or reads):
            return problem
        masks = [name for name in ("attention_mask", "decoder_attention_mask") if name in model_kwargs]
        key = (inputs, len(input_ids) > 1, *masks) if reads else (inputs,)
        return self._trial(key, lambda: (input_ids, config, model_kwargs))

    def _of_text(self, rows: int, is_single: bool) -> Problem | None:
        """Of rows of different lengths; where they get other scores, of the single row that a call may have."""
        implementation = compat.attention_implementation(text_config(self._model))
        if is_causal_kernel(implementation):
            pair: Problem | None = Problem(f"{implementation} takes no mask, which rows of different lengths need")
        elif pair := self._trial((rows,), lambda: _text(self._model, rows)):
            pair = Problem(
                f"rows of different lengths get other scores than in plain decoding ({pair.reason})", pair.cause
            )
        if pair is None:
            return None
        problem = self._trial((1,), lambda: _text(self._model, 1))
        if problem is None and not is_single:
            self._rows_differ = True
            return pair
        return problem

    def _trial(self, key: tuple[Any, ...], prompt: Callable[[], Prompt]) -> Problem | None:
        """What `find_difference` finds for a prompt; None also where it cannot be decided."""
        try:
            with _positions_kept(self._model):
                reason = self._results.find(
                    self._model,
                    self._state,
                    (*self._key, *key),
                    lambda: find_difference(self._model, self._exit_layer, *prompt()),
                )
        except UndecidedError:
            return None
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            return Problem(f"a trial run failed ({type(error).__name__}: {error})", error)
        return None if reason is None else Problem(reason)

    def remedy(self, problem: Problem) -> str:
        """What the caller can do about a problem."""
        if self._exit_layer is not None:
            return "use another candidate generator"
        if self._model.training and RANDOM in problem.reason:
            return "call model.eval() before generate(), or leave candidate_generator= out"
        if self._rows_differ:
            return "give one prompt at a time, without padding, or leave candidate_generator= out"
        return "call generate() without candidate_generator="


def _text(model: PreTrainedModel, rows: int) -> Prompt:
    """Rows of text, of which the first is padded, or one row without padding."""
    input_ids = _prompt(model).repeat(-(-rows // 2), 1)[:rows]
    mask = torch.ones_like(input_ids)
    if rows > 1:
        mask[0, : min(2, input_ids.shape[1] - 1)] = 0
    saved = getattr(model.generation_config, "min_new_tokens", None)
    minimum = "min_length" if saved is None else "min_new_tokens"  # Transformers warns of both
    settings = {"max_new_tokens": STEPS, minimum: 0, "num_return_sequences": 1, "do_sample": False}
    settings |= {"use_cache": True, "pad_token_id": 0, **without_router_loss(model)}
    prepared = compat.prepared_call(model, input_ids=input_ids, attention_mask=mask, **settings)
    prepared[2].pop(compat.CACHE, None)
    return prepared


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


@contextmanager
def _positions_kept(model: PreTrainedModel) -> Iterator[None]:
    """Restore `rope_deltas`, which models with several axes of positions keep from the last `generate` call."""
    modules: list[Any] = [module for module in model.modules() if hasattr(module, "rope_deltas")]
    deltas = [module.rope_deltas for module in modules]
    try:
        yield
    finally:
        for module, value in zip(modules, deltas, strict=True):
            module.rope_deltas = value


def find_difference(
    model: PreTrainedModel,
    exit_layer: int | None,
    input_ids: torch.Tensor,
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
) -> str | None:
    """Decode a prompt, as prepared by `generate`, both ways: how they differ, if they do.

    What decides is the comparison in float32, where a wrong position or mask can be told from rounding. A model that
    cannot run so, and a quantized one that differs in it, is compared as it is. A float32 model is compared as it is
    first, and converted only if it differs: it may use autocast inside, or TF32.
    """
    precision = _precision(model)
    arguments = (model, exit_layer, input_ids, config, model_kwargs)
    given = model_kwargs.get(compat.CACHE)
    # New keys would be rounded to the dtype of cached ones; hooks that load weights would keep converted ones.
    is_convertible = (given is None or not given.get_seq_length()) and not compat.has_device_hooks(model)
    reason = None
    if precision in HALF and is_convertible:
        reason = _exact_difference(*arguments)
        if reason is None or (reason != CANNOT_RUN and not getattr(model, "is_quantized", False)):
            return reason
    reason = compare(*arguments, precision=precision)
    if reason is not None and precision not in HALF and is_convertible:
        exact_reason = _exact_difference(*arguments)
        return reason if exact_reason == CANNOT_RUN else exact_reason
    return reason


def _exact_difference(model: PreTrainedModel, *arguments: Any) -> str | None:
    """What `compare` finds in float32; `CANNOT_RUN` if the model cannot run in it."""
    try:
        with ExactArithmetic(compat.input_device(model)):
            return compare(model, *arguments, precision=torch.float32)
    except UndecidedError:
        raise
    except Exception:  # kernels for half precision alone, too little memory
        return CANNOT_RUN


@torch.no_grad()
def compare(
    model: PreTrainedModel,
    exit_layer: int | None,
    input_ids: torch.Tensor,
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
    *,
    precision: torch.dtype,
) -> str | None:
    """Decode both ways in the present arithmetic; differences that are rounding in `precision` are none."""
    given = model_kwargs.get(compat.CACHE)
    generator = global_generator(input_ids.device)
    random_state = generator.get_state()
    with WatchedHooks(model) as hooks:
        output = _decode_plainly(model, input_ids, config, model_kwargs)
    if hooks.keep_state:
        return KEEPS_STATE
    plain = output.logits
    tokens = output.sequences[:, -STEPS:].tolist()
    if not torch.equal(generator.get_state(), random_state):
        with RandomOperations(input_ids.device) as operations:  # other threads may have drawn
            _decode_plainly(model, input_ids, config, model_kwargs)
        if operations.found:
            generator.set_state(random_state)
            return f"in training mode {RANDOM}" if model.training else RANDOM
    requirements = TargetRequirements(exit_layer=exit_layer)
    target = make_target(requirements, model, input_ids, config, {**model_kwargs, compat.CACHE: copy.deepcopy(given)})
    drafted = [logits.to(plain[0]) for logits in _decode_drafts(target, tokens)]
    if not all(logits.amax(dim=-1).isfinite().all() for logits in plain):
        raise UndecidedError
    errors = largest_differences(torch.cat(plain), torch.cat(drafted))
    if is_rounding(errors, precision):
        return None
    return f"in a trial run its logits differed from those of plain decoding by {max(errors):.2g} standard deviations"


def _decode_plainly(
    model: PreTrainedModel, input_ids: torch.Tensor, config: GenerationConfig, model_kwargs: dict[str, Any]
) -> Any:
    """The output of plain decoding with a cache of its own."""
    given = model_kwargs.get(compat.CACHE)
    cache = DynamicCache(config=model.config.get_text_config()) if given is None else copy.deepcopy(given)
    return compat.decode_plainly(model, input_ids, config, STEPS, {**model_kwargs, compat.CACHE: cache})


def _precision(model: PreTrainedModel) -> torch.dtype:
    """The dtype of matrix products: the model's, unless `torch.autocast` casts their inputs."""
    device = compat.input_device(model).type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else model.dtype


def _decode_drafts(target: Target, tokens: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Logits `[batch, vocab]` of the same steps, from two verification steps."""
    logits = [target.prefill()[:, -1]]
    # Another token than t1 comes before it: one of the text if possible, since others may have no finite states.
    size = min(2, logits[0].shape[-1])
    nodes = [[next((one for one in row if one != row[1]), (row[1] + 1) % size), *row[1:3]] for row in tokens]
    parents = Parents((-1, -1, 1))
    first = 1
    if target.verifies_chains_only:
        nodes = [[*row[1:], row[0]] for row in nodes]
        parents = chain_parents(3)
        first = 0
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
