"""The self-check: a model must compute with drafts and rollbacks what it computes in plain `generate`.

No interface guarantees that a model places tokens by `position_ids`, respects a 4-D mask, or keeps all its state in the
cache. So before a model is used, equivalence tests decode a prompt twice: token by token, and with a draft and a
rollback. A model that differs is refused. A model that reads an encoder, or inputs beside text, is tested on the prompt
of the call:

| equivalence test | prompt | runs |
|---|---|---|
| single row | a short text in one row | if the call has one row without padding; also if rows differ, to find out why |
| rows | the text in rows of different lengths | if the call has several rows or padding |
| prompt of the call | its rows as they are | with inputs beside text, an encoder, or embeddings that are not finite |

The prompt of the call is tested once with one row and once with several, and so with padding and without.

A result holds as long as `hf_specgen.targets.fingerprint.computation` of the model has the same value, and for another
object of the same class and weights with that value; in later processes too, if `HF_SPECGEN_CACHE` names a folder.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from transformers import GenerationConfig, PreTrainedModel

from hf_specgen import compat, random_state, saved_results
from hf_specgen.call import UnsupportedModelError
from hf_specgen.targets.decoding_comparison import IN_TRAINING, STEPS, UndecidedError, find_difference
from hf_specgen.targets.early_exit import divisible_layers
from hf_specgen.targets.fingerprint import computation, matmul_precision, weights_sample
from hf_specgen.targets.hooks import Place, changes, treats_rows_alike, without_places
from hf_specgen.targets.inputs import PreparedCall, accompanying_inputs, without_router_loss
from hf_specgen.targets.model_parts import reads_encoder, takes_no_mask, text_config
from hf_specgen.targets.requirements import TargetRequirements
from hf_specgen.targets.support import last_position

SAVED = "self-check"
"""The kind of `saved_results` of models without hooks and classes of a user; refusals are found anew."""
PASSED = "passed"
WITHOUT_DRAFTS = "use plain generate(candidate_generator=None)"
WITH_ONE_ROW = "give one prompt at a time, without padding, or use plain generate(candidate_generator=None)"
MAX_RESULTS = 64
"""Results that are kept for a model, for the states in which it has been used."""


class EquivalenceTest(NamedTuple):
    """A comparison of plain decoding with decoding by drafts."""

    key: tuple[Any, ...]  # what distinguishes the test from others of the model
    call: Callable[[], PreparedCall]  # makes the prompt that is decoded
    texts: str = ""  # what is decoded, where it is not what the model generally decodes
    remedy: str = WITHOUT_DRAFTS

    def reason(self, difference: str, has_run: bool) -> str:
        """How the two ways differ, or why a test that has not run to its end has failed."""
        if not self.texts:
            return difference
        if not has_run:
            return f"with {self.texts} {difference}"
        verb = "gets" if self.texts.startswith("a ") else "get"
        return f"{self.texts} {verb} other scores than in plain decoding ({difference})"


class Problem(NamedTuple):
    """How a model differs, what the caller can do about it, and the exception of a test that could not run."""

    reason: str
    remedy: str
    cause: Exception | None = None


class Results:
    """The results of the equivalence tests of one model; used by one thread at a time.

    A result holds for the state in which its test ran, whatever the plain values that the test itself has changed,
    such as counters. These are left out for this result alone: in another state the same place has another meaning.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()  # a forward pass may call `generate` of the same model
        self._reasons: OrderedDict[tuple[Any, ...], str | None] = OrderedDict()
        """By the key of a test, the places that are left out, and the other values of the state."""

    def find(
        self, model: PreTrainedModel, state: tuple[Any, ...], key: tuple[Any, ...], run_test: Callable[[], str | None]
    ) -> str | None:
        """The result of an equivalence test, run now if it has none for this `state`, the model's `computation`.

        None if the model passes, otherwise how decoding differs.
        """
        # A result of this object, in a state that differs at most in the places that are left out.
        all_places = {places for _, places, _ in self._reasons}
        for places in all_places:
            result_key = (key, places, without_places(state, places))
            if result_key in self._reasons:
                return self._reasons[result_key]
        # A result of another object, or of an earlier process; else run the test.
        shared_key = (*key, state, weights_sample(model))
        with _lock:
            is_shared = shared_key in _shared
            reason = _shared.get(shared_key)
        can_be_saved = not is_shared and treats_rows_alike(model)
        is_saved = can_be_saved and saved_results.load(SAVED, shared_key) == PASSED
        changed = frozenset[Place]()
        if not is_shared and not is_saved:
            reason = run_test()
            after = computation(model)
            changed = frozenset(change.place for change in changes(state, after) if change.is_plain)
            if after == state:
                with _lock:
                    _keep(_shared, shared_key, reason)
                if reason is None and can_be_saved:
                    saved_results.save(SAVED, shared_key, PASSED)
        _keep(self._reasons, (key, changed, without_places(state, changed)), reason)
        return reason


def _keep(results: OrderedDict[tuple[Any, ...], str | None], key: tuple[Any, ...], reason: str | None) -> None:
    """Add a result, and remove the oldest one where there are too many."""
    results[key] = reason
    if len(results) > MAX_RESULTS:
        results.popitem(last=False)


_lock = threading.Lock()
_shared: OrderedDict[tuple[Any, ...], str | None] = OrderedDict()
"""Results for every object of the same class and weights."""
_results: WeakKeyDictionary[PreTrainedModel, Results] = WeakKeyDictionary()


def check_computation(
    model: PreTrainedModel,
    requirements: TargetRequirements,
    input_ids: torch.Tensor,
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
) -> None:
    """Raise unless the model, run by these `requirements`, computes what plain `generate` computes.

    A result is kept for later calls with the same `computation` of the model; not that of a test that failed, or in
    which plain decoding gave NaN, +inf or nothing but -inf, which `generate` itself reports.
    """
    if requirements.exit_layer is not None:
        divisible_layers(model, requirements.exit_layer)  # a layer that does not exist is no failure of the check
    with _lock:
        results = _results.setdefault(model, Results())
    with results.lock:
        call = PreparedCall(model, input_ids, config, model_kwargs)
        problem = SelfCheck(model, requirements.exit_layer, results).problem(call)
    if problem is None:
        return
    inputs = () if reads_encoder(model) else sorted(accompanying_inputs(model_kwargs))
    task = "verify draft tokens" if requirements.exit_layer is None else "draft with its own first layers"
    task += f" with {', '.join(inputs)}" if inputs else ""
    raise ValueError(f"{type(model).__name__} cannot {task}: {problem.reason}; {problem.remedy}") from problem.cause


class SelfCheck:
    """The equivalence tests of one call, see the table at the top; `results` are those of earlier tests."""

    def __init__(self, model: PreTrainedModel, exit_layer: int | None, results: Results):
        self._model = model
        self._exit_layer = exit_layer
        self._results = results
        self._key = (exit_layer, matmul_precision(model), compat.input_device(model))
        self._state = computation(model)

    def problem(self, call: PreparedCall) -> Problem | None:
        """Run the equivalence tests that a call needs; returns the problem to report, None if the model passes."""
        rows = len(call.input_ids)
        inputs = tuple(sorted(accompanying_inputs(call.model_kwargs)))
        alike = treats_rows_alike(self._model)
        prompt_of_call = EquivalenceTest((inputs, rows > 1 if alike else rows, *_masks(call)), lambda: call)
        self._prompt_of_call = prompt_of_call
        if reads_encoder(self._model):
            return self._run(prompt_of_call)
        mask = call.model_kwargs.get("attention_mask")
        is_single = rows == 1 and (mask is None or bool(mask.all()))
        problem = None if is_single else self._problem_of_rows(2 if alike else rows)
        if is_single or problem is not None:
            # Where rows differ: does the model itself fail, or only rows of different lengths? A model that
            # has something for each of several rows, such as adapters, may fail because there is a single row.
            alone = self._run(EquivalenceTest((1,), lambda: self._short_text(1, is_padded=False)))
            if alone is not None:
                could_run = alone.cause is None or isinstance(alone.cause, UnsupportedModelError)
                if rows == 1 or alike or could_run:
                    problem = alone
                elif problem is not None and problem.remedy == WITH_ONE_ROW:
                    problem = problem._replace(remedy=WITHOUT_DRAFTS)
        if problem is None and inputs:
            problem = self._run(prompt_of_call)
        return problem

    def _short_text(self, rows: int, is_padded: bool) -> PreparedCall:
        """A call with the prompt of `short_text`."""
        return PreparedCall(self._model, *short_text(self._model, rows, is_padded))

    def _problem_of_rows(self, rows: int) -> Problem | None:
        """The problem with padding in `rows` rows, if any; where a kernel takes no mask, it is known without a test."""
        test = EquivalenceTest(
            ("padded", rows),
            lambda: self._short_text(rows, is_padded=True),
            "a padded prompt" if rows == 1 else "rows of different lengths",
            WITH_ONE_ROW,
        )
        if part := takes_no_mask(text_config(self._model)):
            reason = f"{part} takes no mask, which rows of different lengths need"
            return Problem(reason, self._remedy(test, reason))
        return self._run(test)

    def _run(self, test: EquivalenceTest) -> Problem | None:
        """The problem that a test finds, now or in an earlier call; None also where it cannot be decided."""
        cause: Exception | None = None
        try:
            with _positions_kept(self._model):
                difference = self._results.find(
                    self._model,
                    self._state,
                    (*self._key, *test.key),
                    lambda: self._difference(test),
                )
        except UndecidedError:
            # Embeddings of the short text may not be finite; those of the prompt of the call are, if `generate` works.
            return None if test is self._prompt_of_call else self._run(self._prompt_of_call)
        except torch.OutOfMemoryError:
            raise
        except UnsupportedModelError as error:
            difference = str(error)
            cause = error
        except Exception as error:
            difference = f"a pass of the self-check failed ({type(error).__name__}: {error})"
            cause = error
        if difference is None:
            return None
        return Problem(test.reason(difference, cause is None), self._remedy(test, difference), cause)

    def _difference(self, test: EquivalenceTest) -> str | None:
        """Run a test; returns how decoding differs, None if it does not. The random generators keep their state."""
        with random_state.kept(compat.input_device(self._model)):
            return find_difference(test.call(), self._exit_layer)

    def _remedy(self, test: EquivalenceTest, reason: str) -> str:
        """What the caller can do: the remedy of the test, unless something else is simpler."""
        if IN_TRAINING in reason:
            return "call model.eval() before generate(), or use plain generate(candidate_generator=None)"
        if self._exit_layer is not None:
            return "use another candidate generator"
        return test.remedy


def _masks(call: PreparedCall) -> list[tuple[str, bool]]:
    """The names of a call's masks, each with whether it leaves something out."""
    masks = [(name, call.model_kwargs.get(name)) for name in ("attention_mask", "decoder_attention_mask")]
    return [(name, not bool(mask.all())) for name, mask in masks if isinstance(mask, torch.Tensor)]


def short_text(
    model: PreTrainedModel, rows: int, is_padded: bool
) -> tuple[torch.Tensor, GenerationConfig, dict[str, Any]]:
    """Rows of text, of which the first may be padded, as prepared by `generate`."""
    input_ids = _prompt(model).repeat(-(-rows // 2), 1)[:rows]
    input_ids = input_ids if is_padded else input_ids[:, :2]
    mask = torch.ones_like(input_ids)
    if is_padded:
        mask[0, : min(2, input_ids.shape[1] - 1)] = 0
    saved = getattr(model.generation_config, "min_new_tokens", None)
    minimum = "min_length" if saved is None else "min_new_tokens"  # Transformers warns of both
    settings = {"max_new_tokens": STEPS, minimum: 0, "num_return_sequences": 1, "do_sample": False}
    settings |= {"num_beams": 1, "use_cache": True, "pad_token_id": 0, **without_router_loss(model)}
    prepared = compat.prepared_call(model, input_ids=input_ids, attention_mask=mask, **settings)
    prepared[2].pop(compat.CACHE, None)
    return prepared


def _prompt(model: PreTrainedModel) -> torch.Tensor:
    """`[2, tokens]` ids spread over the vocabulary, without special tokens; at most three per row."""
    config = model.config.get_text_config()
    length = max(1, min(3, last_position(config, (0,)) + 1 - STEPS))
    special = {
        value
        for any_config in (model.config, config)
        for name, value in any_config.to_dict().items()
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
