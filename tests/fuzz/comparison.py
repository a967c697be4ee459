"""Both sides of a case, under the same seed: turn by turn, and what a fault in the middle leaves behind."""

import contextlib
import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList, QuantizedCache, StaticCache
from transformers.cache_utils import DynamicLayer, get_layer_types_and_kwargs

from hf_specgen import Statistics
from hf_specgen.compat import CACHE
from tests.fuzz import checks, settings, strategies
from tests.fuzz.cases import Case
from tests.fuzz.checks import Difference, Run
from tests.fuzz.interventions import Changed, changed, stages
from tests.fuzz.models import STATEFUL, device, random_state, seed, tiny_model
from tests.fuzz.settings import Ends, Fault, ForcedText, Interrupt, ValidPadding
from tests.fuzz.situations import HALF, LORA
from tests.fuzz.surroundings import (
    CACHE_USES,
    OF_KEYS,
    attached_to,
    broken_logits,
    drawing_thread,
    fault_in,
    in_threads,
    modes,
    speculation_arguments,
    time_limit,
)
from tests.helpers import StatefulReader

POSITIONS = 256
"""Size of the table of positions, unless a case wants it to end with the text."""

BY_ROUNDING = {"tokens", "random state", "stream", "scores", "logits", "cache", "statistics", "processor state"}
"""Differences that a near-tie of two tokens can make."""

Inputs = dict[str, torch.Tensor]
Caches = tuple[Any, Any]
"""What plain `generate` and what speculation continues from."""


@dataclass
class Outcome:
    """What came of a case."""

    case: Case
    differences: list[Difference] = field(default_factory=list)
    status: str = "same"
    """ "same", "raised" (both sides, the same error), "refused", "rounding" (gone in float64) or "different"."""
    reason: str = ""
    """Of a refusal."""
    drafted: int = 0
    accepted: int = 0
    fault_raised: bool = False


def run(case: Case) -> Outcome:
    """Compare speculation with plain `generate` in one case."""
    comparison = Comparison(case)
    outcome = comparison.run()
    if outcome.differences:
        explained = _is_rounding(comparison) or _is_rounding_of_kernels(comparison)
        outcome.status = "rounding" if explained else "different"
    return outcome


def _is_rounding(comparison: "Comparison") -> bool:
    """Whether the differences come from sums in another order: float64 has none, and writes the text of either side.

    Where both implementations of attention exist, by SDPA: eager masks overflow to infinity in float64, and rows of a
    prompt that see nothing are then NaN.
    """
    if not all(difference.kind in BY_ROUNDING for difference in comparison.outcome.differences):
        return False
    exact = Comparison(replace(comparison.case, attention="sdpa"), torch.float64)
    exact.run()
    if exact.outcome.status not in ("same", "refused") or exact.outcome.differences:
        return False
    if len(exact.texts) < len(comparison.texts):  # refused before the call that differs
        return False
    turns = zip(comparison.texts, exact.texts, strict=False)  # after a difference there are no more turns
    return all(any(torch.equal(exactly, text) for text in sides) for sides, (exactly, _) in turns)


def _is_rounding_of_kernels(comparison: "Comparison") -> bool:
    """Whether greedy tokens differ where kernels of recurrent layers, which have no float64, leave a near-tie."""
    case = comparison.case
    kinds = {difference.kind for difference in comparison.outcome.differences}
    if case.architecture not in STATEFUL or case.do_sample or not kinds <= BY_ROUNDING:
        return False
    again = Comparison(replace(case, return_dict=True, output_scores=True))
    again.run()
    if len(again.texts) != len(comparison.texts) or again.last is None:
        return False
    return not any(checks.compare_near_ties(*again.last, margin=checks.KERNEL_MARGIN))


class Comparison:
    """Runs both sides of a case."""

    def __init__(self, case: Case, dtype: torch.dtype = torch.float32):
        self.case, self.outcome = case, Outcome(case)
        tight = case.tight_positions and case.turns == 1
        positions = max(case.lengths) + case.max_new_tokens if tight else POSITIONS
        model = tiny_model(case.architecture, case.layers, case.attention, case.window, positions, dtype)
        self._vocab: int = model.config.get_text_config().vocab_size
        self.draft = strategies.draft_model(case, model)
        self.model = copy.deepcopy(model) if case.needs_new_model else model
        self._changed = Changed(self.model)
        self.refused: dict[int, str] = {}
        """Of each stage in which the speculative call was refused or plain, the reason."""
        self.answers: list[list[int]] = []
        """What plain `generate` wrote in this turn, by row: the same list in all turns."""
        self.candidates: Any = None
        self.texts: list[tuple[torch.Tensor, torch.Tensor]] = []
        """What plain `generate` and what speculation wrote, turn by turn, up to the first difference."""
        self.last: tuple[Run, Run, int] | None = None
        """Both sides of the last turn, and the columns of its prompt."""

    def run(self) -> Outcome:
        """All stages of the case."""
        case, inputs = self.case, settings.prompts(self.case)
        with modes(case, self.model, self.draft):
            for self._number, self._stage in enumerate(stages(case)):
                with changed(case, self.model, self._stage, inputs["input_ids"]) as self._changed:
                    self._run_turns(inputs)
                if self.outcome.differences:
                    break
        self._differ(self._lasting_refusals())
        return self.outcome

    def _run_turns(self, inputs: Inputs) -> None:
        """Calls that continue one text."""
        case, ends = self.case, self._find_ends(inputs)
        caches = (self._new_cache(), self._new_cache())
        for turn in range(case.turns):
            # In the last turn a fault comes first: whatever cache there is must serve afterwards.
            fault = case.fault if turn == case.turns - 1 else ""
            plain, ours = self._turn(inputs, ends, caches, fault)
            if ours is None or plain.ids is None or ours.ids is None:
                break
            self.texts.append((plain.ids, ours.ids))
            self.last = plain, ours, inputs["input_ids"].shape[1]
            if self.outcome.differences or not torch.equal(plain.ids, ours.ids):
                break  # the texts of a lossy mode part, and their caches with them
            inputs = settings.next_prompts(inputs, plain.ids, case.seed + turn)
            used = self._used_caches(plain.cache, ours.cache)
            caches = (used[1], used[0]) if case.swap_caches else used

    def _used_caches(self, plain: Any, ours: Any) -> Caches:
        """The caches after they were saved, copied or taken apart, if plain `generate`'s can be."""
        name = self.case.cache_use
        if (
            not name
            or plain is None
            or (name in OF_KEYS and any(type(layer) is not DynamicLayer for layer in plain.layers))
        ):
            return plain, ours
        try:
            return CACHE_USES[name](plain), CACHE_USES[name](ours)
        except Exception as error:
            self._differ([Difference("cache", f"{name}: {checks.describe(error)}")])
            return plain, ours

    def _lasting_refusals(self) -> Iterator[Difference]:
        """Stages that are refused although nothing is changed in them, and although the usual call is not."""
        case = self.case
        unchanged = [number for number, stage in enumerate(stages(case)) if stage == 0 and number in self.refused]
        is_refused_before = case.intervention != "" and 0 in unchanged
        if unchanged and case.needs_new_model and not is_refused_before and not self._is_refused_as_usual():
            yield Difference("lasting refusal", self.refused[unchanged[0]])

    def _is_refused_as_usual(self) -> bool:
        """Whether the call is refused with a sound drafter, a model that nobody changes, and in one thread as well."""
        usual = Comparison(replace(self.case, intervention="", threads=1, other_thread=False, drafter_fault=""))
        usual.run()
        return bool(usual.refused)

    def _turn(self, inputs: Inputs, ends: Ends, caches: Caches, fault: str) -> tuple[Run, Run | None]:
        copied = copy.deepcopy(caches[0])
        plain = self._generate(inputs, ends, caches[0])
        # After an error in plain `generate` PEFT leaves its hooks on the model, which the package removes.
        if (plain.error is not None and self.case.intervention in LORA) or not self._prepare(plain, inputs):
            return plain, None
        ours: list[Run] = []
        if fault and plain.error is None:
            ours = self._raise_fault(plain, inputs, ends, caches[1])
            if not checks.equal(self._generate(inputs, ends, copied), plain):
                self._differ([Difference("plain generate after a fault", "is not what it was before")])
        if not ours:
            ours = self._speculate(inputs, ends, caches[1])
        for run in ours:
            self._compare(plain, run, inputs, ends, copied)
        return plain, ours[0]

    def _compare(self, plain: Run, ours: Run, inputs: Inputs, ends: Ends, cache: Any) -> None:
        """Compare a plain and a speculative call; `cache` is what both continued from."""
        case, statistics = self.case, self._statistics(ours)
        if plain.error is None and ours.error is None:
            if self._stage and case.intervention in HALF:
                self._differ(checks.compare_near_ties(plain, ours, inputs["input_ids"].shape[1]))
            else:
                self._differ(checks.compare(case, plain, ours, inputs, self._vocab))
        elif ours.error is None and (again := self._with_valid_padding(inputs, ends, cache, ours)) is not None:
            texts = (replace(run, output=None, cache=None) for run in (again, ours))
            self._differ(checks.compare(case, *texts, inputs, self._vocab))
        elif ours.error is None and not (case.broken_logits or checks.has_same_text(case)):
            self._differ(self._impossible_tokens(inputs, ends, cache, ours))
        elif case.drafter_fault and ours.error is not None and plain.error is None:
            if problems := list(checks.names_strategy(self.candidates, ours)):
                self._differ([] if ours.is_refusal and self._is_refused_as_usual() else problems)
            self.outcome.status, self.outcome.reason = "refused", str(ours.error)
        else:
            self._differ(checks.compare_errors(case, plain, ours))
            self._differ(checks.refusal_form(ours) if ours.is_refusal else ())
            self.outcome.status = "refused" if ours.is_refusal else "raised"
            self.outcome.reason = str(ours.error)
        if plain.error is None and (ours.is_refusal or statistics is None):
            self.refused.setdefault(self._number, str(ours.error or "a plain call"))
        if ours.error is None and statistics is not None:
            self.outcome.drafted += statistics.drafted
            self.outcome.accepted += statistics.accepted

    def _with_valid_padding(self, inputs: Inputs, ends: Ends, cache: Any, ours: Run) -> Run | None:
        """Plain `generate` again, with valid scores where it samples padding of ended rows; None if it still raises."""
        if self._statistics(ours) is None:
            return None
        padding = ValidPadding(self._row_ends(inputs, ours))
        again = self._generate(inputs, ends, copy.deepcopy(cache), padding=padding)
        return again if again.error is None else None

    def _impossible_tokens(self, inputs: Inputs, ends: Ends, cache: Any, ours: Run) -> Iterator[Difference]:
        """Where plain `generate`, which has raised after a text of its own, cannot write that of speculation either."""
        columns = settings.prompt_columns(self.case, inputs)
        text = ours.ids[:, inputs["input_ids"].shape[1] - columns :]
        forced = ForcedText(text, self._row_ends(inputs, ours) or [text.shape[1]] * len(text))
        again = self._generate(inputs, ends, copy.deepcopy(cache), padding=forced)
        if again.error is not None:
            yield Difference("no error", f"plain generate raises {checks.describe(again.error)} after the same text")
        elif forced.impossible:
            row, column = forced.impossible[0]
            token = int(text[row, column])
            yield Difference("impossible token", f"row {row}, column {column - columns}: {token}")

    def _row_ends(self, inputs: Inputs, ours: Run) -> list[int]:
        """The column behind each row's last token; empty if the call was plain."""
        statistics = self._statistics(ours)
        columns = settings.prompt_columns(self.case, inputs)
        return [] if statistics is None else [columns + length for length in statistics.lengths]

    def _find_ends(self, inputs: Inputs) -> Ends:
        """End tokens and stop strings are taken from a text that is written without them, as far as they need it.

        A stop string needs the token behind its column; an option may change the last token of the text.
        """
        case = self.case
        if not case.eos_columns and case.stop_string_column is None:
            return Ends(case.eos_ids, None)
        columns = max((*case.eos_columns, case.stop_string_column or 0)) + 3
        beginning = replace(case, max_new_tokens=min(case.max_new_tokens, columns), min_new_tokens=0)
        run = self._generate(inputs, Ends((), None), self._new_cache(), case=beginning)
        if run.ids is None:
            return Ends(case.eos_ids, None)
        return settings.find_ends(case, run.ids[:, inputs["input_ids"].shape[1] :].tolist())

    def _prepare(self, plain: Run, inputs: Inputs) -> bool:
        """Make the strategy, and tell oracles what plain `generate` wrote; False if the package refuses."""
        ids = plain.ids
        if ids is None:
            ids = inputs["input_ids"].repeat_interleave(self.case.num_return_sequences, dim=0)
        mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))
        mask = mask.repeat_interleave(len(ids) // len(mask), dim=0)
        mask = torch.cat([mask, mask.new_ones(len(ids), ids.shape[1] - mask.shape[1])], dim=1)
        known = strategies.Known(ids, mask, inputs["input_ids"].shape[1])
        self.answers[:] = known.answers() if plain.ids is not None else [[]] * len(ids)
        if self.candidates is None:
            with torch.random.fork_rng():
                try:
                    self.candidates = strategies.build(self.case, self.model, self.draft, known, self.answers)
                except checks.REFUSALS as error:
                    self.outcome.status, self.outcome.reason = "refused", str(error)
                    return False
                if self.case.broken_logits:
                    self._check_whole_model()
        return True

    def _check_whole_model(self, rows: int = 1) -> None:
        """A first call, in which the package finds out what the model can do: not while it is broken on purpose."""
        prompts = torch.tensor([[5, 6]] * rows, device=device())
        with contextlib.suppress(*checks.REFUSALS):
            self.model.generate(prompts, max_new_tokens=1, candidate_generator=self.candidates)

    def _new_cache(self) -> Any:
        config = self.model.config.get_text_config(decoder=True)
        if self.case.cache == "static":
            return StaticCache(config, max_cache_len=POSITIONS)
        kinds = {*get_layer_types_and_kwargs(config)[0]}
        # Under autocast float8 numbers cannot be joined.
        if self.case.cache == "float8" and kinds == {"full_attention"} and self.case.intervention not in HALF:
            return QuantizedCache("fp8", config)
        return None if self.case.cache in ("none", "static_setting") else DynamicCache(config=config)

    def _generate(
        self,
        inputs: Inputs,
        ends: Ends,
        cache: Any,
        fault: Fault | Interrupt | None = None,
        speculation: bool = False,
        padding: LogitsProcessor | None = None,
        case: Case | None = None,
    ) -> Run:
        """One plain or speculative call of the case, or of another one; what it raises is part of the result."""
        case = case or self.case
        arguments = settings.arguments(case, ends, settings.prompt_columns(case, inputs), fault)
        streamer = arguments.get("streamer")
        entered: Any = contextlib.nullcontext()
        if speculation and case.entry == "attach":
            entered = attached_to(case, self.model, self.candidates)
        elif speculation:
            arguments |= speculation_arguments(case, self.candidates, streamer)
            if case.entry == "custom_streamer":
                arguments.pop("streamer", None)
        if cache is not None:
            arguments[CACHE] = cache
        if padding is not None:
            arguments["logits_processor"] = LogitsProcessorList([*arguments.get("logits_processor", ()), padding])
        given = settings.given_prompts(case, self.model, inputs)
        copies = {name: tensor.clone() for name, tensor in given.items()}
        seed(case.seed)
        error, output, saved = None, None, self.model.generation_config
        if case.saved_settings:
            self.model.generation_config = settings.saved_config(case, ends, saved)
        before = self.model.generation_config.to_dict()
        arguments |= self._changed.arguments
        mode = torch.inference_mode() if case.inference_mode else contextlib.nullcontext()
        try:
            with time_limit(), mode, broken_logits(self.model, case.broken_logits), entered:
                output = self._changed.caller.generate(**given, **arguments)
        except (Exception, Interrupt) as raised:
            error = raised
        if self.model.generation_config.to_dict() != before:
            self._differ([Difference("generation config changed", "it is not what it was before the call")])
        self.model.generation_config = saved
        if any(not torch.equal(tensor, copies[name]) for name, tensor in given.items()):
            self._differ([Difference("inputs changed", "the caller's tensors are not what they were")])
        is_tensor = isinstance(output, torch.Tensor)
        ids = output if is_tensor else getattr(output, "sequences", None)
        if ids is not None and case.embeddings == "alone":  # with the prompt in front, as in all other cases
            ids = torch.cat(
                [inputs["input_ids"].repeat_interleave(len(ids) // len(inputs["input_ids"]), dim=0), ids], 1
            )
        return Run(
            error=error,
            ids=ids,
            output=None if is_tensor else output,
            cache=cache if cache is not None else getattr(output, CACHE, None),
            streamed=streamer.chunks if streamer else [],
            stream_ended=streamer.ended if streamer else 0,
            random_state=random_state(),
            processed=[one.seen for one in arguments.get("logits_processor", ()) if isinstance(one, StatefulReader)],
        )

    def _speculate(self, inputs: Inputs, ends: Ends, cache: Any, fault: Any = None) -> list[Run]:
        """A speculative call, or one in each thread, after which both models must be what they were."""
        models = {"model": self.model, "draft": self.draft}
        before = {name: checks.fingerprint(model) for name, model in models.items()}
        random_states = checks.other_random_states()
        with drawing_thread(self.case.other_thread):
            if self.case.threads > 1:
                call = lambda: self._generate(inputs, ends, copy.deepcopy(cache), speculation=True)  # noqa: E731
                ours = in_threads(self.case.threads, call)
            else:
                ours = [self._generate(inputs, ends, cache, fault, speculation=True)]
        if checks.other_random_states() != random_states:
            self._differ([Difference("random state", "the random numbers of Python or NumPy are not where they were")])
        for name, model in models.items():
            self._differ(checks.changes(before[name], checks.fingerprint(model), name))
        return ours

    def _raise_fault(self, plain: Run, inputs: Inputs, ends: Ends, cache: Any) -> list[Run]:
        """Raise an exception inside a call and look at what it leaves behind; the call, if it did not raise it."""
        case = self.case
        fault = (Interrupt if case.interrupt else Fault)("on purpose")
        held = checks.slots(cache)
        rows = len(inputs["input_ids"]) * case.num_return_sequences  # a model with hooks is checked with as many rows
        with fault_in(case, fault, self.model, self.candidates, lambda: self._check_whole_model(rows)):
            ours = self._speculate(inputs, ends, cache, fault)[0]
        if ours.error is not fault:
            if ours.error is not None and not ours.is_refusal:
                detail = f"{checks.describe(ours.error)} where {type(fault).__name__} was raised"
                self._differ([Difference("other error", detail)])
            return [ours] if ours.error is None else []
        self.outcome.fault_raised = True
        if checks.slots(cache) != held:
            detail = f"the caller's cache holds {checks.slots(cache)} slots, {held} before"
            self._differ([Difference("cache after a fault", detail)])
        if case.verification != "exact" or plain.ids is None:
            return []
        if plain.streamed[: len(ours.streamed)] != ours.streamed:
            self._differ([Difference("stream", f"{ours.streamed} before a fault, plain: {plain.streamed}")])
        states = checks.states_between_columns(case, len(plain.ids), self._vocab)
        if not any(torch.equal(ours.random_state, state) for state in states):
            self._differ([Difference("random state after a fault", "is none that plain generate passes")])
        return []

    def _statistics(self, ours: Run) -> Statistics | None:
        holder = self.candidates if ours.output is None else ours.output
        return getattr(holder, "speculation", None)

    def _differ(self, differences: Iterable[Difference]) -> None:
        self.outcome.differences += differences
