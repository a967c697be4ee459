"""The random tester: 96 cases from a fixed seed, and proof that it can fail."""

import itertools
import json
import threading
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from hf_specgen import decoding
from hf_specgen.call import GenerationState
from hf_specgen.candidates.tree_builder import TreeBuilder
from hf_specgen.device_tree import NO_NODE
from hf_specgen.targets import self_check
from hf_specgen.targets.cache import RaggedCache
from hf_specgen.targets.cache_layer import RaggedLayer
from hf_specgen.targets.early_exit import EarlyExitTarget
from hf_specgen.targets.row_layout import RowLayout
from hf_specgen.verification import base as verification
from hf_specgen.verification.exact import NoiseBuffer
from hf_specgen.verification.processors import LogitsPipeline
from tests.fuzz import models
from tests.fuzz.__main__ import Report, main, minimal, run_safely, shrink
from tests.fuzz.cases import COMBINED, ENTRIES, STRATEGIES, Case, draw
from tests.fuzz.checks import Difference
from tests.fuzz.comparison import Outcome
from tests.fuzz.situations import CACHE_USES, DRAFTER_FAULTS, INTERVENTIONS, single_situation

# Faults in the package itself that the random tester must find: `MUTATIONS`

accepted_path = vars(verification)["accepted_path"]
along = vars(verification)["values_along_paths"]
positions = RowLayout.positions
noise_at = NoiseBuffer.at
values_of = TreeBuilder._values_of_candidates
keep_accepted = RaggedCache.keep_accepted
from_dynamic = RaggedCache.from_dynamic
prefix = GenerationState.prefix
append = GenerationState.append
run_early = EarlyExitTarget.run_early
scores_at = LogitsPipeline.scores_at
of_call = GenerationState.of_call.__func__  # type: ignore[attr-defined]


def _accept_one_too_many(tokens: Any, parents: Any, chosen: Any) -> tuple[list[int], list[int]]:
    """The path goes on to a token that the target did not choose."""
    path, emitted = accepted_path(tokens, parents, chosen)
    end = path[-1] if path else -1
    rejected = next((node for node, parent in enumerate(parents) if parent == end), None)
    if rejected is None:
        return path, emitted
    return [*path, rejected], [*emitted[:-1], tokens[rejected], chosen[rejected + 1]]


def _positions_off_by_one(self: Any, *given: Any, **named: Any) -> torch.Tensor:
    """The nodes of drafts of one or two tokens, which the self-check has none of, stand one position too far."""
    found: torch.Tensor = positions(self, *given, **named)
    return found + (torch.arange(found.shape[1], device=found.device) > 0).long() if found.shape[1] <= 3 else found


def _noise_of_the_next_step(self: Any, steps: Any) -> torch.Tensor:
    return noise_at(self, [[step + 1 for step in row] for row in steps])


def _noise_of_the_first_row(self: Any, steps: Any) -> torch.Tensor:
    return noise_at(self, [steps[0]] * len(steps))[:1].expand(len(steps), -1, -1)


def _keep_rejected_tokens(self: Any, starts: Any, paths: Any, *move: Any) -> None:
    """One rejected node of each row stays in the cache."""
    filled = self.lengths
    keep_accepted(self, starts, paths, *move)
    self.set_lengths([min(kept + 1, full) for kept, full in zip(self.lengths, filled, strict=True)])


def _prefix_one_column_short(self: Any, columns: int) -> torch.Tensor:
    return torch.cat([prefix(self, columns)[:, 1:], prefix(self, columns)[:, -1:]], dim=1)


def _without_end_tokens(cls: Any, *args: Any) -> GenerationState:
    state: GenerationState = of_call(cls, *args)
    state.stop_ids = frozenset()
    return state


def _scores_of_the_last_token(values: torch.Tensor, paths: Any) -> list[list[torch.Tensor]]:
    """The scores of every emitted token are those of the row's last one."""
    return [[row[-1]] * len(row) if row else row for row in along(values, paths)]


def _layers_stay_replaced(self: Any, *given: Any, **named: Any) -> Any:
    """Layers are left out in the model itself, and stay so if an exception is raised."""
    layers = self._layers._modules
    originals = dict(layers)
    left_out = self._early.left_out
    layers.update(zip([*layers][-len(left_out) :], left_out, strict=True))
    outputs = run_early(self, *given, **named)
    layers.update(originals)
    return outputs


def _keep_the_first_result(self: Any, *arguments: Any) -> Any:
    """A refusal stays after its cause is gone."""
    if "first" not in vars(self):
        *_, run_test = arguments
        vars(self)["first"] = run_test()
    return vars(self)["first"]


_last_thread = [0]


def _token_of_another_thread(self: Any, row: int, tokens: Any) -> int:
    """A state that all calls share: after a call of another thread, each token is increased by one."""
    before, _last_thread[0] = _last_thread[0], threading.get_ident()
    if before not in (0, _last_thread[0]):
        tokens = [(token + 1) % models.VOCAB for token in tokens]
    return append(self, row, tokens)


def _empty_the_given_cache(cls: Any, cache: Any, *more: Any) -> Any:
    taken = from_dynamic(cache, *more)
    cache.reset()
    return taken


def _values_with_nan(self: Any, ids: Any) -> torch.Tensor:
    """Candidates whose drafter gave NaN stay nodes."""
    values = values_of(self, ids)
    return values.masked_fill(values == NO_NODE, torch.nan)


def _finite_scores(self: Any, *arguments: Any) -> torch.Tensor:
    return scores_at(self, *arguments).clamp(min=-1e4)


_PLACES: dict[str, tuple[Any, str, Any]] = {
    "accept one token too many": (verification, "accepted_path", _accept_one_too_many),
    "position off by one": (RowLayout, "positions", _positions_off_by_one),
    "noise of the next step": (NoiseBuffer, "at", _noise_of_the_next_step),
    "noise of the first row": (NoiseBuffer, "at", _noise_of_the_first_row),
    "noise not given back": (NoiseBuffer, "rewind", lambda self, step: None),
    "rejected tokens stay in the cache": (RaggedCache, "keep_accepted", _keep_rejected_tokens),
    "accepted nodes not moved": (RaggedLayer, "move", lambda self, rows, source, destination: None),
    "processors see a prefix off by one": (GenerationState, "prefix", _prefix_one_column_short),
    "suppressed tokens are possible": (LogitsPipeline, "scores_at", _finite_scores),
    "end tokens are passed over": (GenerationState, "of_call", classmethod(_without_end_tokens)),
    "scores of another token": (verification, "values_along_paths", _scores_of_the_last_token),
    "model not restored after an exception": (EarlyExitTarget, "run_early", _layers_stay_replaced),
    "given cache not restored after an exception": (
        RaggedCache,
        "from_dynamic",
        classmethod(_empty_the_given_cache),
    ),
    "changed model not checked again": (self_check, "computation", lambda model: ()),
    "refusal stays": (self_check.Results, "find", _keep_the_first_result),
    "wrong positions in half precision": (RowLayout, "positions", _positions_off_by_one),
    "state shared by threads": (GenerationState, "append", _token_of_another_thread),
    "ids of drafts not checked": (decoding, "checked_draft", lambda draft, *_: draft),
    "scores of drafts not checked": (TreeBuilder, "_values_of_candidates", _values_with_nan),
}
MUTATIONS = {name: lambda place=place: mock.patch.object(*place) for name, place in _PLACES.items()}
"""Each makes a context in which the package has that fault."""

SEED = "tests"
CASES_PER_CHUNK, CHUNKS = 16, 6
# Few, so that models are built once: attention full, in windows and in chunks, positions in a table or rotary, experts.
ARCHITECTURES = ("llama", "mistral", "gemma2", "gpt2", "gptj", "qwen3_moe", "llama4_text", "deepseek_v3")
MAX_CASES_PER_MUTATION = 60

SAMPLED: dict[str, Any] = {"do_sample": True, "top_k": 0}
USUAL: dict[str, Any] = {
    **{"intervention": "", "drafter_fault": "", "threads": 1, "other_thread": False},
    **{"saved_settings": False, "cache_use": "", "embeddings": ""},
}
STEERED: dict[str, Any] = {
    **{"architecture": "llama", "strategy": "oracle", "accuracy": 0.9, "do_sample": False, "turns": 1, "fault": ""},
    **{"broken_logits": "", "return_dict": True, "num_return_sequences": 1, "verification": "exact"},
    **{"criteria": (), "processors": (), "options": ()},
}
# What a mutation needs to show, where cases drawn at random seldom have it.
NEEDED: dict[str, dict[str, Any]] = {
    "accept one token too many": {"strategy": "oracle", "verification": "exact", "accuracy": 0.5},
    "suppressed tokens are possible": SAMPLED
    | {"verification": "rejection", "options": ("suppress", "allowed_tokens")},
    "noise of the next step": SAMPLED | {"verification": "exact"},
    "position off by one": {"architecture": "llama", "strategy": "oracle", "accuracy": 0.9},
    "noise of the first row": SAMPLED | {"verification": "exact", "lengths": (3, 5)},
    "model not restored after an exception": {"architecture": "llama", "strategy": "skip", "fault": "model"},
    "noise not given back": SAMPLED | {"strategy": "oracle", "k": 9, "eos_columns": (6,), "max_new_tokens": 14},
    "accepted nodes not moved": {"strategy": "oracle_tree", "branches": 4},
    "scores of another token": {"strategy": "oracle_tree", "return_dict": True, "output_logits": True},
    "given cache not restored after an exception": {"return_dict": True, "turns": 2, "fault": "drafter"},
    "changed model not checked again": STEERED | {"intervention": "hook decoding"},
    "refusal stays": STEERED | {"intervention": "pre_hook last", "changed_first": True},
    "wrong positions in half precision": STEERED | {"intervention": "autocast", "output_scores": True},
    "state shared by threads": STEERED | {"threads": 3},
    "ids of drafts not checked": STEERED | {"drafter_fault": "large_id"},
    "scores of drafts not checked": STEERED | {"strategy": "draft", "drafter_fault": "nan"},
}

REFUSED = {"position off by one", "wrong positions in half precision"}
"""Mutations for which the self-check refuses a model, unless a call without them has passed it before."""


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_cases_equal_plain_generate(chunk: int) -> None:
    """Would catch: anything that a caller can see of a speculative call and that differs from plain `generate`."""
    report = Report()
    for number in range(chunk * CASES_PER_CHUNK, (chunk + 1) * CASES_PER_CHUNK):
        outcome = run_safely(draw(f"{SEED}:{number}", ARCHITECTURES))
        status = report.add(outcome)
        assert status != "different", f"{outcome.differences}\npython -m tests.fuzz --case '{outcome.case.to_json()}'"
    total = report.total
    assert total["drafting"] >= CASES_PER_CHUNK // 3, "it tests too little"
    assert min(total["accepted"], total["rejected"]) >= CASES_PER_CHUNK, "it tests too little: a token in each case"
    assert total["same"] >= 0.7 * CASES_PER_CHUNK, f"too few comparisons: {report.markdown()}"


@pytest.fixture
def forgotten_models() -> None:
    """Drops the cached models: under a mutation the self-check may have refused one, which it remembers."""
    for build in (models.tiny_model, models.disturbed_copy, models.with_other_tokenizer):
        build.cache_clear()


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_random_cases_with_a_mutation_fail(mutation: str) -> None:
    """Would catch: a comparison that cannot fail."""
    for number in range(MAX_CASES_PER_MUTATION):
        case = replace(draw(f"mutations:{number}", ARCHITECTURES), **(USUAL | NEEDED.get(mutation, {})))
        if mutation in REFUSED:
            run_safely(case)
        with MUTATIONS[mutation]():
            outcome = run_safely(case)
        if outcome.status == "different":
            return
    pytest.fail(f"{MAX_CASES_PER_MUTATION} cases do not show it: {mutation}")


WITHOUT_A_TOKEN = Case(
    **{"seed": 674917, "architecture": "gemma", "lengths": (9,), "pad_in_prompt": True, "do_sample": True},
    **{"temperature": 0.3, "verification": "rejection", "options": ("suppress", "allowed_tokens")},
)
"""Plain `generate` writes a text after which all allowed tokens are suppressed, and speculation another one."""


def test_run_sample_after_which_a_token_is_possible_is_no_difference() -> None:
    """Would catch: an error of plain `generate` that is expected after another sample, where no token is missing."""
    outcome = run_safely(WITHOUT_A_TOKEN)
    assert outcome.status == "same", outcome.differences


def test_run_sample_with_an_impossible_token_is_a_difference() -> None:
    """Would catch: a text with suppressed tokens that is accepted, since it is no text of plain `generate`."""
    with MUTATIONS["suppressed tokens are possible"]():
        outcome = run_safely(replace(WITHOUT_A_TOKEN, max_new_tokens=20))
    assert [difference.kind for difference in outcome.differences] == ["impossible token"]


@pytest.mark.parametrize("where", ["later", "all"])
def test_draw_prompt_of_one_token_begins_a_text(where: str) -> None:
    """Would catch: a hook that counts the passes of all calls, so that plain `generate` does not repeat its scores."""
    case = single_situation(Case(lengths=(1, 3), prefill_chunk_size=1, intervention=f"forward {where}"))
    assert (case.lengths, case.prefill_chunk_size) == (((2, 3), None) if where == "later" else ((1, 3), 1))


def test_draw_has_every_strategy_entry_point_and_situation() -> None:
    """Would catch: a strategy that is never drawn, so that nothing is known of it."""
    cases = [draw(seed) for seed in range(4000)]
    assert {case.strategy for case in cases} == set(STRATEGIES)
    assert {member for case in cases for member in case.members} == set(COMBINED)
    assert {case.entry for case in cases} == set(ENTRIES)
    assert {case.intervention for case in cases} == {"", *itertools.chain(*INTERVENTIONS.values())}
    assert {case.drafter_fault for case in cases} == {"", *DRAFTER_FAULTS}
    assert {case.cache_use for case in cases} == {"", *CACHE_USES}
    assert {case.embeddings for case in cases} == {"", "beside", "alone"}
    assert {"threads", "another thread", "saved settings", "prompt of padding"} <= {case.situation for case in cases}


@pytest.mark.parametrize("seed", range(20))
def test_case_in_json_is_the_case_again(seed: int) -> None:
    """Would catch: a failing case that cannot be repeated from what is printed."""
    case = draw(seed)
    assert Case.from_json(case.to_json()) == case


def test_shrink_keeps_only_what_the_failure_needs() -> None:
    """Would catch: a field that is never simplified, or a simplification that loses the failure."""

    def fails(case: Case) -> bool:
        return case.do_sample and len(case.lengths) > 1 and max(case.lengths) >= 4

    case = next(case for case in map(draw, range(1000)) if fails(case) and len(case.lengths) > 2)
    smallest = shrink(case, fails)
    assert fails(smallest) and len(smallest.lengths) == 2
    assert smallest == Case(seed=case.seed, do_sample=True, lengths=smallest.lengths)


def test_minimal_outcome_that_does_not_come_again_is_kept() -> None:
    """Would catch: a failure of threads that is printed as "same", without what was different."""
    outcome = Outcome(Case(max_new_tokens=1), [Difference("tokens", "by chance")], "different")
    assert minimal(outcome) is outcome


@pytest.mark.usefixtures("forgotten_models")
def test_main_counts_cases_and_repeats_failures(tmp_path: Any, capsys: Any, monkeypatch: Any) -> None:
    """Would catch: failures that are not printed, or do not change the exit code; records that are not summed up."""
    monkeypatch.setattr("tests.fuzz.__main__.SHRUNK_FAILURES", 0)
    record = tmp_path / "record.json"
    arguments = ["--cases", "4", "--seed", "1", "--architectures", "llama", "--strategies", "random"]
    assert main([*arguments, "--record", str(record)]) == 0
    assert json.loads(record.read_text())["total"]["cases"] == 4
    assert main(["--merge", str(record), str(record)]) == 0
    assert "| random | 8 |" in capsys.readouterr().out
    assert main(["--case", Case(strategy="oracle", max_new_tokens=6).to_json()]) == 0
    with MUTATIONS["accept one token too many"]():
        assert main(arguments) == 1
        assert main(["--case", Case(accuracy=0.0).to_json()]) == 1
    printed = capsys.readouterr().out
    assert "python -m tests.fuzz --case '{" in printed and "tokens: row 0" in printed
