"""Cases of the random tester that are chosen: each way in which a call may end, be processed, be broken or go on.

`tests/fuzz` compares tokens, scores, logits, caches, streams, exceptions and the state of the random generator with
those of plain `generate`, and model and inputs with what they were before.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.fuzz.__main__ import run_safely
from tests.fuzz.cases import BROKEN_LOGITS, ENTRIES, FAULTS, OPTIONS, PROCESSORS, Case
from tests.helpers.models import SPEC

PARTLY = Case(accuracy=0.7, k=4, lengths=(12, 8, 4), max_new_tokens=16, seed=7)
TREES = replace(PARTLY, strategy="oracle_tree")
OUTPUTS = replace(TREES, return_dict=True, output_scores=True, output_logits=True)
SAMPLED = replace(PARTLY, do_sample=True)
TIGHT = replace(PARTLY, tight_positions=True, eos_ids=tuple(range(3, 13)))
RECURRENT: dict[str, Any] = {"architecture": "qwen3_5_text"}
BATCHES = ((12,), (12, 8, 4))
END = tuple(range(3, 23))
WINDOWS = ("llama4_text", "gemma4_text", "mistral", "gemma2")
STATE_STRATEGIES, STATE_TARGETS = ("ngram_tree", "draft_other", "medusa_auto"), ("lfm2_moe", "qwen3_next")
LATER_NODE = Case(
    **{"seed": 4600, "architecture": "smollm3", "window": 4, "lengths": (9,), "repetitive": True, "draft_tree": 8},
    **{"strategy": "draft_reencoded", "k": 4, "accuracy": 0.0, "policy": "random", "do_sample": True, "top_p": 0.5},
    **{"temperature": 0.7, "min_p": 0.1, "max_new_tokens": 10, "eos_ids": (3, 4, 5), "broken_logits": "nan"},
    **{"criteria": ("any_row", "max_time"), "entry": "custom", "return_dict": True, "output_scores": True},
    cache="dynamic",
)
"""Tokens before a stop where a later node has invalid scores, which plain `generate` never samples."""


def every(case: Case, **values: Sequence[Any]) -> list[Case]:
    """One case for each combination of values of some fields."""
    return [replace(case, **dict(zip(values, chosen, strict=True))) for chosen in itertools.product(*values.values())]


def every_pair(case: Case, **values: Sequence[Any]) -> list[Case]:
    """Half of the combinations, in which each value of a field occurs with each value of each other one.

    At least three fields: those combinations are left whose places in the lists have an even sum.
    """
    chosen = itertools.product(*(enumerate(given) for given in values.values()))
    even = [one for one in chosen if sum(place for place, _ in one) % 2 == 0]
    return [replace(case, **dict(zip(values, (value for _, value in one), strict=True))) for one in even]


CASES: dict[str, list[Case]] = {
    # Tokens after EOS inside an accepted draft; wrong padding after it; ended rows that change places.
    "end token": [
        *every_pair(PARTLY, eos_columns=[(1,), (5,), (10,), (15,)], lengths=BATCHES, repetition_penalty=[1.0, 1.2]),
        *every(SAMPLED, eos_columns=[(1,), (7,)], lengths=BATCHES),
        *every(replace(TREES, eos_ids=END, max_new_tokens=30), do_sample=[False, True], lengths=[(3, 9, 5, 2, 7, 4)]),
        *every(replace(PARTLY, eos_ids=END), min_new_tokens=[5], strategy=["oracle", "skip", "draft"]),
    ],
    # A criterion, or a time limit, that is evaluated per draft instead of per column. Without EOS rows are not padded.
    "stopping criterion": [
        *every(replace(OUTPUTS, accuracy=1.0), criteria=[("after",), ("any_row",), ("scores",)], eos_ids=[(), (98,)]),
        *every(replace(PARTLY, accuracy=1.0), criteria=[("after",), ("any_row",)]),
        *every(replace(PARTLY, accuracy=1.0, max_new_tokens=24), stop_string_column=[0, 9], lengths=BATCHES),
        *every(replace(PARTLY, **RECURRENT), criteria=[("after",), ("any_row",)], eos_ids=[(), (98,)]),
    ],
    # A criterion that receives other scores of ended rows than those of their padding, which cost a pass of their own.
    "stop by all scores": [
        *every(
            replace(OUTPUTS, eos_ids=END, max_new_tokens=30, criteria=("all_scores",)),
            strategy=["oracle_tree", "draft", "skip", "medusa", "eagle1"],
            seed=[1, 2],
            lengths=BATCHES[1:],
        ),
        *every(
            replace(OUTPUTS, eos_ids=END, strategy="oracle", criteria=("all_scores",)),
            architecture=["lfm2", "gemma2", "gpt_neo"],
            seed=[1, 2],
            lengths=BATCHES[1:],
        ),
    ],
    "time limit": [
        *every(replace(OUTPUTS, accuracy=1.0, criteria=("max_time",)), eos_ids=[(), (98,)]),
        replace(PARTLY, accuracy=1.0, criteria=("max_time",)),
    ],
    # Columns behind the stop, several columns in one chunk, a stream without its prompt or end.
    "streamer": every(replace(PARTLY, streamer=True, eos_ids=END), entry=ENTRIES, lengths=BATCHES, return_dict=[True]),
    # A processor that receives another prefix than in plain `generate`, or that is put into the wrong class.
    "processor": [
        *every(replace(PARTLY, eos_ids=END), options=[(name,) for name in OPTIONS], do_sample=[False, True]),
        *every_pair(TREES, processors=[(name,) for name in PROCESSORS], do_sample=[False, True], lengths=BATCHES),
        *every(PARTLY, processors=[(), ("prefix",), ("stateful",)], accuracy=[0.0, 1.0], repetition_penalty=[1.3]),
        *every(PARTLY, bad_words=[((5,), (6, 7), (8, 9, 10))], no_repeat_ngram_size=[2], lengths=BATCHES),
        *every(SAMPLED, temperature=[0.7], top_k=[20], top_p=[0.9], strategy=["oracle", "oracle_tree"]),
        *every(SAMPLED, min_p=[0.1], typical_p=[0.8], no_repeat_ngram_size=[0, 2], lengths=BATCHES),
    ],
    # Scores, logits and the returned cache of ended rows; their padding.
    "outputs": [
        *every(replace(OUTPUTS, eos_ids=END, criteria=("all_scores",), **RECURRENT), seed=[1, 2], lengths=BATCHES[1:]),
        *every_pair(
            replace(OUTPUTS, eos_ids=END), do_sample=[False, True], processors=[(), ("row_wise",)], lengths=BATCHES
        ),
        *every(replace(OUTPUTS, do_sample=True, num_return_sequences=2), strategy=["oracle", "draft"]),
        *every(replace(OUTPUTS, eos_ids=END), strategy=["oracle_tree", "skip"], repetition_penalty=[1.0, 1.3]),
        *every(replace(OUTPUTS, options=("guidance",)), criteria=[(), ("any_row",)], lengths=BATCHES),
        *every(replace(OUTPUTS, eos_ids=END, window=4), architecture=["mistral", "gemma2", "llama4_text"]),
        # A recurrent state that cannot return to where a criterion cuts a row that is ahead.
        *every(replace(OUTPUTS, strategy="oracle", **RECURRENT), criteria=[("after",)], eos_ids=[(), (98,)]),
    ],
    # A cache that a call leaves for the next turn, its own or the caller's, used by either side.
    "next turn": every_pair(
        replace(OUTPUTS, turns=3),
        cache=["none", "dynamic"],
        swap_caches=[False, True],
        architecture=["llama", "gemma2", "mistral", "llama4_text"],
    )
    + every(replace(OUTPUTS, turns=3), cache=["none", "dynamic"], lengths=BATCHES[:1], architecture=["gemma2"])
    + every(replace(OUTPUTS, strategy="oracle", turns=2), lengths=BATCHES, architecture=["lfm2", "falcon_h1"]),
    # A window that is counted in cache slots instead of positions: siblings of a tree share one. Chunks whose slots are
    # dropped although a later token attends to them.
    "window": [
        *every(replace(TREES, max_new_tokens=24, window=4, policy="random"), architecture=WINDOWS, lengths=BATCHES),
        replace(TREES, accuracy=0.9, max_new_tokens=200, window=4, architecture="llama4_text"),
    ],
    # Nodes behind the end of a table of positions, in rows that have ended or can draft no further.
    "position table": [
        *every(replace(TIGHT, strategy="draft"), architecture=["gpt2", "opt", "gptj", "llama"], lengths=BATCHES),
        *every_pair(replace(TIGHT, strategy="skip"), architecture=["gptj", "llama"], lengths=BATCHES, layers=[2, 3]),
    ],
    # Token 0 generated to the end, an error for scores of a token that plain `generate` never samples.
    "broken logits": [
        *every_pair(SAMPLED, broken_logits=BROKEN_LOGITS, processors=[(), ("row_wise",), ("prefix",)], lengths=BATCHES),
        # A step that is repeated although its draft is not the reason: a processor receives a column twice.
        *every(SAMPLED, broken_logits=BROKEN_LOGITS, processors=[("stateful", "row_wise")]),
        *every_pair(
            SAMPLED, broken_logits=BROKEN_LOGITS, verification=["rejection", "typical"], processors=[(), ("prefix",)]
        ),
        *every(
            replace(SAMPLED, eos_ids=END), broken_logits=["nan"], return_dict=[False, True], repetition_penalty=[1, 1.2]
        ),
        *every(replace(TREES, strategy="ngram_tree"), broken_logits=BROKEN_LOGITS, lengths=BATCHES),
        LATER_NODE,
        # A criterion that ends the text before a column with invalid scores.
        *every_pair(
            replace(SAMPLED, accuracy=1.0, k=8, broken_logits="nan", criteria=("after",)),
            processors=[(), ("row_wise",), ("prefix",)],
            seed=[1, 2, 3],
            lengths=BATCHES,
        ),
    ],
    # Draft tokens whose embeddings are NaN, and a processor that replaces the NaN scores behind them by numbers.
    "tokens without numbers": every(
        replace(SAMPLED, seed=481602, strategy="combined", members=("dflash", "recycling", "medusa"), typical_p=0.8),
        max_new_tokens=[14],
        options=[("remove_invalid",), ()],
        intervention=["nan_tokens"],
    ),
    # The same beside an ended row, whose padding in the returned cache attends to slots of such tokens with weight 0.
    "tokens without numbers, padding": every(
        replace(SAMPLED, strategy="eagle1", intervention="nan_tokens", lengths=(9, 9), pad_id=7, top_k=5, min_p=0.1),
        seed=[250131],
        architecture=["cohere2"],
        accuracy=[0.7],
        policy=["adaptive"],
        max_new_tokens=[10],
        min_new_tokens=[5],
        eos_columns=[(0, 5)],
        stop_string_column=[9, None],
        return_dict=[True],
    ),
    # A self-check whose text is longer than the table, so that a model that works is refused.
    "position table, short": every(
        replace(TIGHT, strategy="ngram", lengths=(2, 2), eos_ids=()),
        architecture=["gpt2", "opt", "gptj", "llama"],
        max_new_tokens=[3, 4, 6, 8, 10],
    ),
    # Padding beside a longer row that takes more slots than the layers' causal mask has.
    "position table, mask": every(
        Case(seed=99309, architecture="gpt_neo", tight_positions=True, max_new_tokens=7, return_dict=True),
        lengths=[(2, 9)],
        eos_ids=[END],
        output_scores=[False, True],
    ),
    # Trees for a state that follows one path, states of heads at a wrong token; an indexer that sees siblings.
    "state": [
        *every(replace(TREES, policy="random"), architecture=SPEC["indexed"], lengths=BATCHES),
        *every(replace(PARTLY, eos_ids=END, draft_tree=8), strategy=STATE_STRATEGIES, architecture=STATE_TARGETS),
        *every(replace(PARTLY, strategy="combined", members=("ngram_tree", "draft_other")), architecture=STATE_TARGETS),
    ],
    # A prompt whose end counts as padding; chunks that begin at the first token of a row of padding.
    "masked end": [
        Case(seed=180860, architecture="olmo2", lengths=(6, 5), pad_id=7, give_mask=False, strategy="skip_adapter"),
        Case(seed=873608, architecture="llama4_text", lengths=(1, 2), pad_in_prompt=True, give_mask=False),
    ],
    # Plain steps in between that a drafter does not learn of.
    "plain steps": every(replace(PARTLY, policy="random", seed=8), strategy=["native", "skip"], lengths=BATCHES[:1]),
    # Noise drawn ahead that is not given back, a cache of the caller or a model that is left changed.
    "fault": [
        *every(
            replace(SAMPLED, return_dict=True, streamer=True, turns=2), fault=FAULTS, fault_call=[3], lengths=BATCHES
        ),
        *every(replace(SAMPLED, return_dict=True, streamer=True), fault=FAULTS, fault_call=[1], lengths=BATCHES[1:]),
        *every(SAMPLED, fault=["drafter", "model"], strategy=["skip", "draft", "eagle3"], interrupt=[True]),
    ],
}
"""By what they show; the comment names the bugs that they would catch."""
NEVER_DRAFT = ("fault", "time limit", "broken logits", "position table", "outputs")
"""Where some case ends before a draft."""


@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, cases in CASES.items() for case in cases])
def test_case_equals_plain_generate(case: Case, request: pytest.FixtureRequest) -> None:
    """See the comments in `CASES`."""
    outcome = run_safely(case)
    assert outcome.status in ("same", "raised" if case.broken_logits else "same"), (outcome, case.to_json())
    assert not case.fault or outcome.fault_raised
    assert outcome.drafted > 0 or any(request.node.callspec.id.startswith(name) for name in NEVER_DRAFT)
