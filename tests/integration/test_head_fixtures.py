"""Drafts of every head format against what its original implementation computed, and heads' caches.

`pytest tests --fixtures DIR` runs other fixtures of the same kind; each folder with an `expected.json` is one.
"""

import copy
import json
import shutil
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from hf_specgen import (
    AutoCandidates,
    Call,
    Candidates,
    CombinedCandidates,
    DraftBatch,
    FixedDepth,
    MedusaCandidates,
    MTPCandidates,
)
from hf_specgen.candidates.encoder_draft import decoder_prompt
from hf_specgen.heads.drafter import PREFILL_CHUNK
from hf_specgen.heads.eagle_drafter import EagleDrafter
from hf_specgen.heads.head_formats import load_head
from hf_specgen.heads.head_text import HeadText
from hf_specgen.targets.requirements import make_target
from hf_specgen.tree import DraftTree
from hf_specgen.verification import ExactVerifier, VerificationResult, VerificationSession
from tests.helpers import SAMPLING, assert_same_tokens, prompts
from tests.helpers.calls import make_call, make_state, with_sessions
from tests.helpers.comparison import answers, plain_output
from tests.helpers.head_fixtures import FIXTURES, Fixture, features_of, reread, steered
from tests.helpers.medusa import fitted_heads, random_heads
from tests.helpers.models import SHARED
from tests.helpers.policies import AfterPlainSteps

pytestmark = pytest.mark.filterwarnings("ignore")


class Rounds:
    """A strategy's session beside the target, in recorded steps.

    `logits` `[batch, depths, vocab]` are those of the last draft.
    """

    logits: torch.Tensor

    def __init__(self, fixture: Fixture, prompts: list[str], candidates: Candidates, target: Any = None):
        self.target_model = target or fixture.target
        self._texts = {number: [fixture.text(prompt, number) for prompt in prompts] for number in fixture.rounds}
        texts = [text[:-1] for text in self._texts[1]]
        call = make_call(make_state(texts), candidates=candidates, model=self.target_model)
        requirements = candidates.target_requirements(self.target_model)
        prompt = decoder_prompt(self.target_model, texts, call.max_new_tokens)
        self._target = make_target(requirements, self.target_model, *prompt)
        verification: Any = ExactVerifier().start(call)
        self._state = call.state
        batch = DraftBatch(call, self._target, verification, FixedDepth().start(call))
        self._session: Any = candidates.start(batch)
        self._scores: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        """What the session has asked `draft_scores` for: scores, and the tokens that they are of."""
        draft_scores = verification.draft_scores

        def recorded(scores: torch.Tensor, token_indices: Any, tokens: torch.Tensor | None = None) -> torch.Tensor:
            self._scores.append((scores, tokens))
            return draft_scores(scores, token_indices, tokens)

        verification.draft_scores = recorded

    def draft(self, number: int, depth: int) -> DraftTree:
        """The draft of a round, once the target has emitted the tokens that the text got since the one before."""
        state = self._state
        batch = state.batch
        if number == 1:
            self._target.prefill()
            self._target.commit([[]] * batch)
            for row, text in enumerate(self._texts[1]):
                state.append(row, text[-1:])
        else:
            known = [len(text) for text in self._texts[number - 1]]
            new = [text[length:] for text, length in zip(self._texts[number], known, strict=True)]
            paths: list[list[int] | None] = [list(range(len(tokens) - 1)) for tokens in new]
            self._target.forward(DraftTree.chains([tokens[:-1] for tokens in new]), state.pending())
            self._target.commit(paths)
            for row, tokens in enumerate(new):
                state.append(row, tokens)
            self._session.observe(VerificationResult(paths, new, [len(tokens) - 1 for tokens in new]))
        self._scores.clear()
        tree = self._session.draft([depth] * batch)
        vocab = self.target_model.get_output_embeddings().weight.shape[0]
        self.logits = torch.cat([_along(tree, *one, vocab) for one in self._scores], dim=1)
        return tree


def _along(chains: DraftTree, scores: torch.Tensor, tokens: torch.Tensor | None, vocab: int) -> torch.Tensor:
    """`[batch, depths, vocab]` logits along chains; `scores` may be those after each likely token of the depth before.

    They are `[batch, depths, draft vocab]` or `[batch, depths, previous, draft vocab]`.
    """
    if scores.dim() == 4 and tokens is None:
        scores = scores[:, :, 0]
    elif scores.dim() == 4 and tokens is not None:
        previous = (tokens == chains.tokens[..., None]).int().argmax(dim=2).roll(1, dims=1)
        previous[:, 0] = 0
        scores = scores[torch.arange(chains.batch)[:, None], torch.arange(chains.nodes), previous]
    scores = scores.masked_fill(scores < -1e19, -torch.inf)  # which sessions make finite
    if tokens is None:
        return scores
    full = torch.full((*scores.shape[:2], vocab), -torch.inf)
    return full.scatter(2, tokens.expand_as(scores), scores)


@pytest.mark.parametrize("rows", ["alone", "batch"])
@torch.no_grad()
def test_head_drafts_with_the_logits_of_its_original(head_fixture: Fixture, rows: str) -> None:
    """In all rounds of the fixture, of which later ones follow accepted and rejected draft tokens.

    Of the first prompt alone, and of all prompts as the rows of a batch.

    Would catch: hidden states of another layer, token or row, a layout of tensors read wrongly, a cache that keeps
    rejected tokens, a correction left out, logits of another vocabulary.
    """
    check_rounds(head_fixture, head_fixture.prompts[:1] if rows == "alone" else head_fixture.prompts)


def check_rounds(fixture: Fixture, names: list[str], target: Any = None, folder: Path | None = None) -> None:
    """Compares all rounds with these prompts, with a target and a head in other forms than in the fixture."""
    tolerance = {name: fixture.expected["tolerance"][name] for name in ("atol", "rtol")}
    depth = len(fixture.drafted(names[0], 1).logits)
    candidates = AutoCandidates.from_pretrained(folder or fixture.checkpoint_folder, k=depth)
    steps = Rounds(fixture, names, candidates, target)
    for number in fixture.rounds:
        tree = steps.draft(number, depth)
        for row, prompt in enumerate(names):
            drafted = fixture.drafted(prompt, number)
            ours = steps.logits[row]
            ours = ours if drafted.candidates is None else ours.gather(-1, drafted.candidates)
            ours = ours.softmax(dim=-1) if drafted.is_normalised else ours
            torch.testing.assert_close(ours, drafted.logits, **tolerance)
            assert tree.tokens[row].tolist() == drafted.tokens


# What heads read and keep in the decoding loop: each accepted token once, with the target's own hidden states

ONE_OF_EACH = ["eagle1_original", "eagle3_original", "mtp_transformers_glm4_moe", "mtp_transformers_glm4_moe_2layers"]
ONE_OF_EACH += ["dflash_zlab", "speculators_peagle_llama", "speculators_dspark_rnn", "lilicorr", "eagle3_mla"]
LIKE_EAGLE3 = ("eagle1_original", "eagle3_mla")
"""Heads with the drafter of `eagle3_original`, which takes chunks of a prompt."""
EAGLE = FIXTURES["eagle1_original"]


def partly_right(name: str, inputs: Any, new: int, target: Any = None, sampling: Any = None, **settings: Any) -> Any:
    """A strategy for a fixture, some of whose draft tokens are accepted after these prompts."""
    fixture = FIXTURES[name]
    target = target or fixture.target
    plain, _ = plain_output(target, inputs, max_new_tokens=new, **sampling or {})
    texts = answers(target, inputs, plain)
    return steered(AutoCandidates.from_pretrained(fixture.checkpoint_folder, **settings), texts.tolist())


@pytest.mark.parametrize(
    ("name", "case", "tree"),
    [
        (name, *case)
        for name in ONE_OF_EACH
        for case in (("drafts", None), ("drafts", 8), ("plain steps first", None), ("chunks", 8))
        if case[0] != "chunks" or name not in LIKE_EAGLE3
    ],
)
def test_committed_cache_equals_reading_from_scratch(name: str, case: str, tree: Any) -> None:
    """Would catch: features of rejected nodes or of the head itself, a shift by one, states of plain steps left out."""
    target, inputs, arguments = FIXTURES[name].target, prompts(3), {"max_new_tokens": 16}
    settings: dict[str, Any] = {"policy": AfterPlainSteps(3) if case == "plain steps first" else FixedDepth()}
    if case == "chunks":  # a prompt that the head reads in two, and the target in three passes
        target, inputs = with_positions(target, 1024), prompts(2, PREFILL_CHUNK + 9)
        arguments["prefill_chunk_size"] = 200
        settings |= {} if name.startswith("mtp") else {"draft_window": None}
    new = arguments.pop("max_new_tokens")
    candidates = partly_right(name, inputs, new, target, arguments, k=3, tree=tree, **settings)
    statistics = assert_same_tokens(target, inputs, candidates, max_new_tokens=new, **arguments)
    assert 0 < statistics.accepted < statistics.drafted
    session = candidates.session
    drafter = session.drafter
    for place, (row, length) in enumerate(zip(drafter.rows, drafter.lengths, strict=True)):
        assert length > len(session.batch.state.prompts[row])
        scratch = reread(session, row, length + getattr(drafter, "layers", 1) - 1)  # some layers read positions again
        for ours, theirs in zip(drafter.cache.layers, scratch.cache.layers, strict=True):
            for mine, expected in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
                torch.testing.assert_close(mine[place, :, :length], expected[0, :, :length], atol=1e-4, rtol=1e-4)


@cache
def with_positions(target: Any, positions: int) -> Any:
    """A copy of a target with `positions` positions, shared by the heads of this target: never change it."""
    longer = copy.deepcopy(target)
    longer.config.max_position_embeddings = positions
    SHARED.add(longer)
    return longer


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_ended_rows_leave_the_batch(name: str) -> None:
    """The first row ends at once: would catch its hidden states taken for something to read."""
    target, inputs = FIXTURES[name].target, prompts(3)
    candidates = partly_right(name, inputs, 20, k=3, tree=6)
    end = int(plain_output(target, inputs, max_new_tokens=20)[0][0, 12])
    assert_same_tokens(target, inputs, candidates, max_new_tokens=20, eos_token_id=end, pad_token_id=0)
    assert len(candidates.session.drafter.rows) < 3


class WaitingRows(ExactVerifier):
    """Lets no row be more than two tokens ahead."""

    def start(self, call: Call) -> VerificationSession:
        session: Any = super().start(call)
        session.max_row_skew = lambda: 2
        return session


@pytest.mark.parametrize("name", ["dflash_zlab", "speculators_peagle_llama"])
def test_row_that_waits_for_slower_rows_same_tokens(name: str) -> None:
    """Would catch: a draft behind a text that has not grown since the last one, whose features are read already."""
    sampling, fixture = SAMPLING["sampled"], FIXTURES[name]
    texts = plain_output(fixture.target, prompts(2), max_new_tokens=24, **sampling)[0][:, 12:].tolist()
    candidates = steered(AutoCandidates.from_pretrained(fixture.head_folder, k=4), [texts[0], []])
    drafts: list[tuple[int, int]] = []  # of the first row: its length, and how deep it drafts

    def record(session: Any) -> None:
        draft = session.draft

        def recorded(max_depths: Sequence[int]) -> Any:
            drafts.append((len(session.batch.state.generated[0]), max_depths[0]))
            return draft(max_depths)

        session.draft = recorded

    arguments = {"max_new_tokens": 24, "verification": WaitingRows(), **sampling}
    assert_same_tokens(fixture.target, prompts(2), with_sessions(candidates, record), **arguments)
    waited = [length == before for (before, _), (length, depth) in pairwise(drafts) if depth]
    assert any(waited), "the row drafts again after a step in which it waited"


@pytest.mark.parametrize("sampling", SAMPLING)
def test_eagle_beside_medusa_same_tokens(sampling: str) -> None:
    """Would catch: heads that read different hidden states of one target, each given the states of both."""
    target = FIXTURES["eagle3_original"].target
    medusa = MedusaCandidates(fitted_heads(target, prompts(3), **SAMPLING[sampling]), tree=6)
    eagle = partly_right("eagle3_original", prompts(3), 20, sampling=SAMPLING[sampling], k=3)
    candidates = CombinedCandidates([eagle, medusa], policy=FixedDepth(4))
    assert assert_same_tokens(target, prompts(3), candidates, max_new_tokens=20, **SAMPLING[sampling]).accepted > 0


def test_eagle_beside_heads_that_are_never_right_loses_few_steps() -> None:
    """Would catch: confident wrong tokens that displace right ones for longer than their acceptance takes to count."""
    steps = []
    for others in ([], [MedusaCandidates(random_heads(EAGLE.target), tree=6)]):
        eagle = partly_right("eagle1_original", prompts(1), 40, k=3)
        candidates = CombinedCandidates([eagle, *others], policy=FixedDepth(4))
        steps.append(assert_same_tokens(EAGLE.target, prompts(1), candidates, max_new_tokens=40).steps)
    assert steps[0] < 25 and steps[1] <= steps[0] + 2


def test_eagle_prompt_and_accepted_tokens_are_read_once_and_plain_steps_run_no_head() -> None:
    """Would catch: the text read again in every draft, or logits of the whole prompt."""
    candidates = partly_right("eagle1_original", prompts(1), 20, k=3)
    widths, logits = list[int](), list[int]()
    candidates._on(EAGLE.target).head.register_forward_hook(lambda m, a, output: widths.append(output.output.shape[1]))
    handle = EAGLE.target.lm_head.register_forward_hook(lambda m, a, output: logits.append(output.shape[1]))
    EAGLE.target.generate(**prompts(1), max_new_tokens=1, candidate_generator=candidates)  # the self-check of the hook
    widths.clear()
    logits.clear()
    EAGLE.target.generate(**prompts(1), max_new_tokens=20, candidate_generator=candidates)
    handle.remove()
    assert widths[0] == 12 and max(widths[1:]) <= 4
    assert max(logits) <= 4
    widths.clear()
    EAGLE.target.generate(**prompts(1), max_new_tokens=8, candidate_generator=candidates, policy=FixedDepth(0))
    assert not widths


def test_mtp_without_a_checkpoint_uses_where_the_target_was_loaded_from() -> None:
    """Would catch: a target that has the head's weights beside its own, and a strategy that asks for their folder."""
    fixture = FIXTURES["mtp_transformers_glm4_moe"]
    fixture.target.config.name_or_path = str(fixture.target_folder)
    assert_same_tokens(fixture.target, prompts(1), MTPCandidates(k=1), max_new_tokens=4)


@pytest.mark.parametrize("name", [name for name, fixture in FIXTURES.items() if fixture.family.startswith("mtp")])
def test_mtp_rotary_frequencies_of_a_half_precision_target_are_its_own(name: str) -> None:
    """Would catch: frequencies rounded to bfloat16 with the head, which are too coarse for late positions."""
    fixture = FIXTURES[name]
    model: Any = type(fixture.target).from_pretrained(fixture.target_folder, dtype=torch.bfloat16)
    head: Any = MTPCandidates(str(fixture.checkpoint_folder))._on(model).head
    assert next(head.parameters()).dtype == torch.bfloat16
    position_ids, like = torch.tensor([[5000, 100_001]]), torch.zeros(1, dtype=torch.float32)
    own = model.get_decoder().rotary_emb(like, position_ids)
    assert all(torch.equal(*pair) for pair in zip(head.rotary(like, position_ids), own, strict=True))


@torch.no_grad()
def test_mtp_layers_inside_a_class_for_images_and_text_are_those_of_the_text_class() -> None:
    """Would catch: layers looked for in the whole model in place of its decoder, positions of several axes."""
    fixture = FIXTURES["mtp_qwen3_5_native_wrapper"]
    model: Any = AutoModelForImageTextToText.from_pretrained(fixture.target_folder, dtype=torch.float32).eval()
    for names in (["a"], ["b"], fixture.prompts):
        check_rounds(fixture, names, model)
    candidates = MTPCandidates(fixture.target_folder, k=3)
    assert assert_same_tokens(model, prompts(2), candidates, max_new_tokens=8).drafted > 0


@torch.no_grad()
def test_mtp_layers_in_several_files_are_found_by_the_index(tmp_path: Path) -> None:
    """Would catch: scales in another file than their weights that are not found."""
    fixture = FIXTURES["mtp_transformers_deepseek_v3_fp8"]
    shutil.copytree(fixture.target_folder, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    files = {name: f"model-0000{1 + name.endswith('_scale_inv')}-of-00002.safetensors" for name in tensors}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in tensors if files[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    target = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    check_rounds(fixture, fixture.prompts, target, tmp_path)


class GivenFeatures:
    """Stands for the queue of a drafter's features: those of the prompts of new rows."""

    def __init__(self, features: torch.Tensor, tokens: list[int]):
        self._features, self._tokens = features, tokens

    def pop_prompts(self, first: int) -> HeadText:
        return HeadText([self._features], [self._tokens], [True])

    def keep_rows(self, kept: Any) -> None:
        """Nothing is kept."""

    def append_rows(self, new: int) -> None:
        """Its features are given."""


@torch.no_grad()
def test_eagle_row_that_joins_continues_its_own_prompt() -> None:
    """Would catch: a row without further text that drafts from the output of the row before it."""
    bound: Any = load_head(EAGLE.head_folder).bind(EAGLE.target)
    text = torch.arange(3, 9)[None]
    features = features_of(bound, EAGLE.target(text, output_hidden_states=True).hidden_states)[0]
    first, second = (features[:4], [4, 5, 6, 7]), (features[4:5], [8])
    alone = EagleDrafter(bound, None, 1).forward_text(HeadText([second[0]], [second[1]], [True]))
    drafter = EagleDrafter(bound, GivenFeatures(*second), 1)
    drafter.forward_text(HeadText([first[0]], [first[1]], [True]))
    drafter.keep_rows([0])
    drafter.append_rows(1)
    nothing = features[:0]
    logits = drafter.forward_text(HeadText([features[4:5], nothing], [[8], []], [True, True]))
    torch.testing.assert_close(logits[1], alone[0], atol=1e-4, rtol=1e-4)
