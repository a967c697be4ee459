"""DSpark, DFlash2, Domino and layered MTP in the decoding loop: the numbers of the originals, and the same tokens."""

import copy
import dataclasses
import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_specgen import DFlashCandidates, MTPCandidates
from hf_specgen.candidates.growth import Growth
from hf_specgen.heads import path_head
from hf_specgen.heads import runner as runners
from hf_specgen.heads.head_formats import load_head
from hf_specgen.heads.layered_mtp import LayeredRunner
from hf_specgen.heads.mtp import load_mtp
from hf_specgen.heads.path_head import PathRunner
from hf_specgen.tree import DraftTree
from tests.helpers import SAMPLING, assert_same_tokens, prompts
from tests.helpers.head_fixtures import Comparison, Fixture, features_of, find_fixtures
from tests.helpers.head_runs import Rounds, captured_features
from tests.helpers.head_sessions import LayeredMTP, corrected

FIXTURES = {
    fixture.folder.name: fixture for fixture in find_fixtures(Path(__file__).parents[1] / "assets" / "fixtures")
}
HEADS = {name: fixture for name, fixture in FIXTURES.items() if fixture.family == "path"}
LAYERED = FIXTURES["mtp_transformers_glm4_moe_2layers"]
pytestmark = pytest.mark.filterwarnings("ignore")


def grow(first: torch.Tensor, logits_after: Any, widths: list[int]) -> list[tuple[list[int], torch.Tensor]]:
    """Every path of a tree of row 0 that grows by these widths, with the logits after it; all rows grow alike."""
    growth, found = Growth([9] * len(first), 3, torch.zeros(len(first), 1)), [([], first[0])]

    def add(logits: torch.Tensor) -> None:
        best = logits.softmax(dim=-1).topk(3, dim=-1)
        growth.add(best.indices, best.values.log(), torch.zeros_like(best.values))

    add(first[:, None])
    level: list[list[int]] = [[]]
    for width in widths:
        tree = growth.expand(width)
        logits = logits_after(tree)
        add(logits)
        above, tokens = tree.above[0].tolist(), tree.tokens[0].tolist()
        level = [[*level[parent], token] for parent, token in zip(above, tokens, strict=True)]
        found += zip(level, logits[0], strict=True)
    return found


@pytest.mark.parametrize(
    ("name", "limited"),
    [*((name, False) for name in HEADS), ("domino_specforge", True), ("speculators_dspark_rnn", True)],
)
@torch.no_grad()
def test_path_runner_tree_has_the_logits_of_every_path(
    name: str, limited: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both rounds of the fixture: each node of a tree against the correction along its path alone, teacher-forced."""
    monkeypatch.setattr(path_head, "MAX_CANDIDATES", 10)
    fixture = HEADS[name]
    bound = load_head(fixture.head_folder).bind(fixture.target)
    head: Any = bound.head
    blocks: list[torch.Tensor] = []
    head.register_forward_hook(lambda module, arguments, output: blocks.append(output.output))
    runner = PathRunner(bound, len(fixture.prompts), full_vocabulary=not limited)
    rounds = Rounds(fixture, fixture.prompts, bound, Comparison(fixture))
    for number in (1, 2):
        features, tokens = rounds.inputs(number)
        first = runner.first_logits(features, [row.tolist() for row in tokens], [True] * len(tokens))
        greedy = fixture.get(f"{fixture.prompts[0]}.round{number}.greedy.tokens")[0]
        assert first[0].argmax() == greedy[0]
        paths = grow(first, runner.next_logits, [2, 3, 3])
        assert limited or greedy[:2].tolist() in [path for path, _ in paths]
        for path, logits in paths:
            previous = torch.tensor([[int(tokens[0][-1]), *path]])
            expected = bound.to_target_vocabulary(corrected(bound, blocks[-1][:1], previous).logits[0, -1])
            kept = logits > -torch.inf
            if limited:
                assert kept.sum() == min(runner.max_candidates, 10)
            torch.testing.assert_close(logits[kept], expected[kept], atol=2e-5, rtol=1e-5)


@torch.no_grad()
def test_layered_runner_tree_has_the_logits_of_every_path() -> None:
    """All rounds of the fixture: each node against the layers over the whole text and its path."""
    bound = load_mtp(LAYERED.target, str(LAYERED.target_folder)).bind(LAYERED.target)
    prompts_of = LAYERED.prompts
    runner, known = LayeredRunner(bound, len(prompts_of)), [0] * len(prompts_of)
    for number in (1, 2, 3, 4):
        features, tokens, texts = [], [], []
        for row, prompt in enumerate(prompts_of):
            text = LAYERED.get(f"{prompt}.round{number}.input_ids")
            rows = text.shape[1] - 1
            states, _ = captured_features(LAYERED, {"output_hidden_states": True}, text[:, :-1], rows)
            texts.append((features_of(bound, states)[0], text[0, 1:]))
            features.append(texts[-1][0][known[row] :])
            tokens.append(text[0, 1 + known[row] :].tolist())
            known[row] = rows
        first = runner.first_logits(features, tokens, [True] * len(tokens))
        for row, prompt in enumerate(prompts_of):
            expected = LAYERED.get(f"{prompt}.round{number}.logits")[0]
            torch.testing.assert_close(first[row], expected[0], atol=2e-4, rtol=1e-4)
        for path, logits in grow(first, runner.next_logits, [3])[1:]:
            torch.testing.assert_close(logits, layered_logits(bound, *texts[0], path), atol=2e-4, rtol=1e-4)


def layered_logits(bound: Any, features: torch.Tensor, tokens: torch.Tensor, path: list[int]) -> torch.Tensor:
    """The reference: all layers over the whole text, with the tokens of a path in place of what they would draft."""
    session = LayeredMTP(bound, 1)
    real, chosen = bound.logits, iter(path)

    def forced(output: torch.Tensor) -> torch.Tensor:
        logits = real(output)
        token = next(chosen, None)
        if token is not None:
            logits = torch.nn.functional.one_hot(torch.tensor(token), logits.shape[-1]).float()
        return logits

    bound.logits = forced
    try:
        _, logits, _ = session.round([features], [tokens])
    finally:
        bound.logits = real
    return logits[0][len(path)]


@pytest.mark.parametrize("prefill_chunk", [4, 512])
@torch.no_grad()
def test_layered_runner_reads_long_prompts_in_chunks(monkeypatch: pytest.MonkeyPatch, prefill_chunk: int) -> None:
    monkeypatch.setattr(runners, "PREFILL_CHUNK", prefill_chunk)
    bound = load_mtp(LAYERED.target, str(LAYERED.target_folder)).bind(LAYERED.target)
    for prompt in LAYERED.prompts:
        text = LAYERED.get(f"{prompt}.round1.input_ids")
        states, _ = captured_features(LAYERED, {"output_hidden_states": True}, text[:, :-1], text.shape[1] - 1)
        runner = LayeredRunner(bound, 1)
        first = runner.first_logits([features_of(bound, states)[0]], [text[0, 1:].tolist()], [True])
        torch.testing.assert_close(first, LAYERED.get(f"{prompt}.round1.logits")[:, 0], atol=2e-4, rtol=1e-4)
        assert runner.lengths == [text.shape[1] - 2]


def strategy(fixture: Fixture, **settings: Any) -> Any:
    return (MTPCandidates if fixture is LAYERED else DFlashCandidates)(fixture.checkpoint_folder, **settings)


CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "chain": ({"k": 4}, SAMPLING["sampled"]),
    "tree": ({"k": 6, "tree": 12}, {}),
    "auto": ({}, SAMPLING["sampled"]),
}
ONE_OF_EACH = ("deepspec_dspark_qwen3_rnn", "dflash2_zlab", "domino_specforge", LAYERED.folder.name)


@pytest.mark.parametrize(("name", "kind"), list(product(ONE_OF_EACH, CALLS)))
def test_path_head_same_tokens(name: str, kind: str) -> None:
    settings, mode = CALLS[kind]
    assert_same_tokens(
        FIXTURES[name].target, prompts(3), strategy(FIXTURES[name], **settings), max_new_tokens=12, **mode
    )


def recorded_drafts(monkeypatch: pytest.MonkeyPatch, of: Any) -> list[DraftTree]:
    """The drafts of all later calls with strategies of a class."""
    begin, drafts = of.begin, list[DraftTree]()

    def recording(self: Any, *arguments: Any) -> Any:
        session = begin(self, *arguments)
        draft = session.draft
        session.draft = lambda depths: drafts.append(draft(depths)) or drafts[-1]
        return session

    monkeypatch.setattr(of, "begin", recording)
    return drafts


@pytest.mark.parametrize("tree", [None, 8])
@pytest.mark.parametrize("name", ["speculators_dspark_rnn", "dflash2_zlab", "domino_specforge", LAYERED.folder.name])
def test_path_head_rejection_gives_q_of_every_node(
    name: str, tree: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """q is the corrected distribution: of each node's own path, and zero where the head never proposes."""
    fixture = FIXTURES[name]
    drafts = recorded_drafts(monkeypatch, type(strategy(fixture)))
    candidates = strategy(fixture, k=4, tree=tree)
    sampling = {"do_sample": True, "verification": "rejection", "max_new_tokens": 8}
    fixture.target.generate(**prompts(2), candidate_generator=candidates, **sampling)
    assert any(tree.nodes for tree in drafts)
    for one in drafts:
        for row, parents in enumerate(one.parents if one.nodes else ()):
            q = one.q[row, : len(parents)]
            torch.testing.assert_close(q.sum(dim=-1), torch.ones(len(parents)))
            assert (q.gather(1, one.tokens[row, : len(parents), None]) > 0).all()
            if name == "dflash2_zlab":
                assert ((q > 0).sum(dim=-1) <= 6).all()


MODELOPT = {"markov_head.": "", "confidence_head.proj": "confidence_proj"}
LAYOUTS: list[tuple[str, dict[str, str], dict[str, Any], dict[str, Any], tuple[int, bool]]] = [
    ("deepspec_dspark_qwen3_vanilla", MODELOPT, {}, {"projector_type": "dspark", "shift_label": True}, (0, False)),
    ("deepspec_dspark_qwen3_vanilla", MODELOPT, {}, {"projector_type": "dspark", "shift_label": False}, (1, False)),
    (
        "deepspec_dspark_qwen3_rnn",
        {"markov_head.": "logit_head.markov_head."},
        {},
        {"projector_type": "dspark"},
        (0, True),
    ),
    ("deepspec_dspark_qwen3_rnn", {}, {}, {}, (0, False)),
    ("speculators_dspark_vanilla", {}, {"sample_from_anchor": None}, {}, (0, True)),
    ("speculators_dspark_gated_noanchor_sliding", {}, {"sample_from_anchor": None}, {}, (1, True)),
    ("speculators_dspark_vanilla", {}, {"sample_from_anchor": None, "dspark_bonus_anchor": True}, {}, (1, False)),
]


@pytest.mark.parametrize(("name", "renamed", "changes", "dflash", "layout"), LAYOUTS)
@torch.no_grad()
def test_dspark_in_the_layouts_of_other_programs(
    name: str,
    renamed: dict[str, str],
    changes: dict[str, Any],
    dflash: dict[str, Any],
    layout: tuple[int, bool],
    tmp_path: Path,
) -> None:
    """The tensors of a fixture under other names and another config: the same head, and which layout it has."""
    folder = FIXTURES[name].head_folder
    config = json.loads((folder / "config.json").read_text()) | changes
    if dflash:
        config |= {"architectures": ["DSparkDraftModel"], "dflash_config": dflash}
    tensors = load_file(folder / "model.safetensors")
    for before, after in renamed.items():
        tensors = {key.replace(before, after): tensor for key, tensor in tensors.items()}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    head: Any = load_head(tmp_path)
    assert (head.config.first_proposing_position, head.config.measures_layout) == layout
    original = load_head(folder).state_dict()
    assert all(torch.equal(tensor, original[key]) for key, tensor in head.state_dict().items())


@pytest.mark.parametrize("first", [0, 1])
def test_layout_that_the_file_leaves_open_is_measured(first: int) -> None:
    """The head proposes what follows only in one layout; whichever it is, the session finds it, and stays with it."""
    fixture = FIXTURES["speculators_dspark_vanilla"]
    head: Any = copy.deepcopy(load_head(fixture.head_folder))
    head.config = dataclasses.replace(head.config, first_proposing_position=1 - first, measures_layout=True)
    text = fixture.target.generate(**prompts(1), max_new_tokens=24, do_sample=False)
    sessions: list[Any] = []

    class Recording(DFlashCandidates):
        def begin(self, *arguments: Any) -> Any:
            sessions.append(super().begin(*arguments))
            bound, state = sessions[-1].runner.bound, sessions[-1].call.state

            def logits(output: torch.Tensor) -> torch.Tensor:
                """Position `first` of the block prefers the next token, the other positions token 0."""
                known = len(state.prompts[0]) + len(state.generated[0])
                preferred = torch.zeros(output.shape[:-1], dtype=torch.long)
                if output.dim() == 3:
                    preferred[:, first - sessions[-1].runner._first] = text[0, min(known, text.shape[1] - 1)]
                elif (calls.append(1) or len(calls) % 2) == 1 - first:
                    preferred[:] = text[0, min(known, text.shape[1] - 1)]
                return 99.0 * torch.nn.functional.one_hot(preferred, head.config.vocab_size)

            calls: list[int] = []
            bound.logits = logits
            return sessions[-1]

    for _ in range(2):
        assert_same_tokens(fixture.target, prompts(1), Recording(head, k=3), max_new_tokens=24)
        assert sessions[-1]._votes.first == first and sessions[-1]._votes.are_clear


def test_path_head_counts_one_pass_of_its_block_per_draft() -> None:
    fixture = HEADS["domino_specforge"]
    statistics = assert_same_tokens(fixture.target, prompts(2), strategy(fixture, k=5, tree=8), max_new_tokens=8)
    assert {tuple(step.passes) for step in statistics.passes if step.passes} <= {(8,), (16,)}


@pytest.mark.parametrize(("bias", "level"), [(-9.0, 0), (0.5, 2), (9.0, 3)])
def test_confidence_head_selects_the_calibration_of_a_node(bias: float, level: int) -> None:
    """Would catch: acceptance that is counted for another level of the confidence head than it was looked up in."""
    fixture, sessions = HEADS["speculators_dspark_vanilla"], list[Any]()
    head: Any = load_head(fixture.head_folder)
    head.confidence_head.proj.bias.fill_(bias)
    head.confidence_head.proj.weight.zero_()

    class Recording(DFlashCandidates):
        def begin(self, *arguments: Any) -> Any:
            sessions.append(super().begin(*arguments))
            return sessions[-1]

    candidates = Recording(head, k=3, tree=6)
    fixture.target.generate(**prompts(1), max_new_tokens=8, candidate_generator=candidates, memory=False)
    counts = [calibration.seen.sum() for calibration in sessions[0].calibrations]
    assert counts[level] > 0 and sum(counts) == counts[level]
