"""The strategy objects of a case."""

import copy
from random import Random
from typing import Any, NamedTuple

import torch
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from hf_specgen import (
    AdaptiveDepth,
    CombinedCandidates,
    DraftModelCandidates,
    FixedDepth,
    LayerSkipCandidates,
    MedusaCandidates,
    MovingWindow,
    NgramCandidates,
    NgramHistory,
    Policy,
    RecyclingCandidates,
    Schedule,
    UnoCandidates,
)
from hf_specgen.call import memory
from hf_specgen.candidates.base import vocabulary_size
from hf_specgen.depth import CostCurve, LatencyModel
from tests.fuzz.cases import Case
from tests.fuzz.heads import CLASSES, adapter_of, exit_adapter, head_candidates, medusa_heads, recycling_table
from tests.fuzz.models import KINDS, VOCAB, disturbed_copy, tiny_model, with_other_tokenizer
from tests.fuzz.scripted import FaultyLookup, Nodes, RandomDepths, Script, Scripted, spoil_scores
from tests.fuzz.situations import SCORE_FAULTS


class Known(NamedTuple):
    """What plain `generate` wrote."""

    ids: torch.Tensor
    """`[rows, prompt + generated]`"""
    mask: torch.Tensor
    """Of the same shape; 0 for padding of the prompt."""
    prompt_length: int

    def answers(self) -> list[list[int]]:
        return self.ids[:, self.prompt_length :].tolist()


Answers = list[list[int]]
"""By row, what plain `generate` wrote: what an oracle proposes. Its contents are replaced from turn to turn."""


def build(case: Case, model: Any, draft: Any, known: Known, answers: Answers) -> Any:
    """The strategy of a case; some are fitted to what plain `generate` wrote, and oracles propose the answers."""
    if case.strategy == "combined":
        members = [_simple(case, name, model, draft, known, answers) for name in case.members]
        return CombinedCandidates(members, policy=_policy(case))
    if case.strategy == "combined_default":
        return CombinedCandidates(policy=_policy(case))
    if case.strategy == "auto":
        return "auto"
    return _simple(case, case.strategy, model, draft, known, answers)


def draft_model(case: Case, model: Any) -> Any:
    """The draft model that a case needs, if any."""
    draft = _sound_draft_model(case, model)
    if draft is None or case.drafter_fault not in SCORE_FAULTS:
        return draft
    draft = copy.deepcopy(draft)
    draft.register_forward_hook(lambda _, args, output: spoil_scores(case.drafter_fault, output.logits))
    return draft


def _sound_draft_model(case: Case, model: Any) -> Any:
    if "draft_other" in case.strategies():
        other = ("gpt2", "llama", "gemma3_text", "opt")[case.seed % 4]
        return disturbed_copy(tiny_model(other, dtype=model.dtype), 0.0)
    if "draft" in case.strategies():
        return disturbed_copy(model, round((1 - case.accuracy) / 2, 2))
    if "draft_reencoded" in case.strategies():
        return with_other_tokenizer(model, KINDS[1 + case.seed % (len(KINDS) - 1)])
    return None


def call_policy(case: Case) -> Policy | None:
    """The `policy=` of the call, where the strategy has none of its own."""
    return _policy(case) if case.strategy in ("native", "auto") and case.policy != "fixed" else None


def _simple(case: Case, name: str, model: Any, draft: Any, known: Known, answers: Answers) -> Any:
    adaptive = case.policy in ("adaptive", "auto")
    policy = _policy(case)
    settings: dict[str, Any] = {"k": "auto" if adaptive else case.k, "policy": policy}
    tree: Any = None if adaptive else case.draft_tree
    if name in ("oracle", "oracle_tree", "random", "random_tree"):
        return Scripted(lambda: _script(name, case, answers), case.k, policy, case.drafter_fault)
    if name in ("ngram", "ngram_tree"):
        has_size = name == "ngram_tree" and not adaptive
        return NgramCandidates(**settings, tree=4 * case.branches if has_size else None)
    if name == "history":
        history = NgramHistory(max_tokens=200)
        for row in known.ids.tolist():
            history.add(row)
        return NgramCandidates(**settings, history=history)
    if name == "prediction":
        return NgramCandidates(**settings, tree=tree, prediction=_edited(case, known))
    if name == "native":
        lookup: dict[str, Any] = {"num_output_tokens": case.k, "max_matching_ngram_size": 2, "max_length": 512}
        fault = case.drafter_fault
        return FaultyLookup(fault, **lookup) if fault else PromptLookupCandidateGenerator(**lookup)
    if name == "recycling":
        if case.accuracy > 0:
            memory.store(model, ("recycling", vocabulary_size(model)), recycling_table(model, known.ids))
        return RecyclingCandidates(**settings, tree=tree)
    if name in CLASSES:
        heads_settings = {**settings, "tree": tree}
        return head_candidates(case, name, model, answers, heads_settings)
    if name in ("draft", "draft_other", "draft_reencoded"):
        return DraftModelCandidates(draft, **settings, tree=tree, confidence_threshold=case.threshold)
    if name in ("skip", "skip_adapter"):
        adapter = exit_adapter(model, case.exit_layer, known.ids, known.mask) if name == "skip_adapter" else None
        return LayerSkipCandidates(case.exit_layer, **settings, tree=tree, adapter=adapter)
    if name == "uno":
        return UnoCandidates(adapter_of(model), **{**settings, "k": "auto" if adaptive else min(case.k, 8)}, tree=tree)
    reads_path = name == "medusa_auto" and case.branches > 2
    heads = medusa_heads(model, known.ids, known.mask, reads_path=reads_path)
    for head in heads.lm_heads:
        spoil_scores(case.drafter_fault, head.weight.data.T)
    heads_tree: Any = "auto" if name == "medusa_auto" else (6 if case.branches > 2 else case.k)
    return MedusaCandidates(heads, tree=heads_tree, policy=policy)


def _edited(case: Case, known: Known) -> list[list[int]]:
    """The expected outputs: what plain `generate` wrote, with tokens replaced, left out and inserted."""
    random, rows = Random(case.seed), []
    for answer in known.answers():
        edited = (random.choices(([token], [], [token, 1], [2]), (16, 1, 1, 1))[0] for token in answer)
        rows.append([token for part in edited for token in part])
    return rows


def _policy(case: Case) -> Policy | None:
    """The policy of a strategy; None for the one that belongs to its k."""
    if case.policy == "fixed":
        return FixedDepth() if case.strategy.startswith("combined") else None
    if case.policy == "random":
        return RandomDepths(case.seed)
    if case.policy == "window":
        return MovingWindow(start=1)
    if case.policy == "schedule":
        return Schedule({1: case.k, 2: 2, 4: 1})
    return AdaptiveDepth(given_latency() if case.policy == "adaptive" else None)


def given_latency() -> LatencyModel:
    """Latencies with which drafting is sometimes faster than plain decoding, and sometimes not."""
    curve = CostCurve((1, 32), (0.010, 0.015), context=256, batch=1)
    return LatencyModel.from_curves(curve, draft_token=0.001)


def _script(name: str, case: Case, answers: Answers) -> Script:
    """The tokens that a scripted strategy proposes in one call."""
    random = Random(case.seed)

    def propose(row: int, generated: list[int], depth: int) -> Nodes:
        if name == "random":
            return [random.randrange(VOCAB) for _ in range(depth)], tuple(range(-1, depth - 1))
        if name == "random_tree":
            return _random_tree(random, depth, case.branches)
        truth = answers[row][len(generated) :][:depth]
        proposed = [token if random.random() < case.accuracy else random.randrange(VOCAB) for token in truth]
        if name == "oracle":
            return proposed, tuple(range(-1, len(proposed) - 1))
        return _hidden_path(random, proposed, case.branches)

    return propose


def _random_tree(random: Random, depth: int, branches: int) -> Nodes:
    """Random tokens on a random tree; siblings may be alike."""
    parents: list[int] = []
    depths: list[int] = []
    for _ in range(random.randint(1, depth * branches)):
        parent = random.choice([-1, *(node for node, d in enumerate(depths) if d < depth)])
        parents.append(parent)
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return [random.choice((5, 6, random.randrange(VOCAB))) for _ in parents], tuple(parents)


def _hidden_path(random: Random, path: list[int], branches: int) -> Nodes:
    """The path, with wrong siblings at a random place around each of its nodes, some of which go on."""
    tokens: list[int] = []
    parents: list[int] = []
    parent = -1
    for token in path:
        wrong = [(token + 1 + i) % VOCAB for i in range(random.randint(0, branches - 1))]
        place = random.randint(0, len(wrong))
        level = [*wrong[:place], token, *wrong[place:]]
        first = len(tokens)
        tokens += level
        parents += [parent] * len(level)
        parent = first + place
    return tokens, tuple(parents)
