"""Draft models and layer skip: same tokens, number of steps, unchanged models; every architecture is in tests/slow."""

import copy
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, TorchAoConfig

from hf_specgen import AdaptiveDepth, DraftModelCandidates, FixedDepth, LayerSkipCandidates, MedusaCandidates
from hf_specgen.depth import CostCurve, LatencyModel
from hf_specgen.evaluation.workloads import BUNDLED_ADAPTER
from hf_specgen.heads import ExitHead
from hf_specgen.heads.exit_head import exit_layer_of, save_exit_head
from tests.helpers import SAMPLING, assert_same_tokens, fresh_model, perturbed_copy, prompts, shared_draft, tiny_model
from tests.helpers.calls import with_sessions
from tests.helpers.comparison import plain_output
from tests.helpers.goodness_of_fit import fit_of_two_tokens
from tests.helpers.medusa import random_heads
from tests.helpers.models import recorded_inputs, small_llama, width
from tests.helpers.paths import DRAFT_LM, REFERENCE_LM
from tests.helpers.policies import AfterPlainSteps

KINDS = ["draft", "skip"]


def llama() -> Any:
    """Three layers, so that a layer skip has several early ones."""
    return tiny_model("llama", num_hidden_layers=3)


def strategy(kind: str, k: int = 4) -> Any:
    """A draft model or layer skip for tiny llama, of which some draft tokens are accepted."""
    return DraftModelCandidates(shared_draft(llama()), k=k) if kind == "draft" else LayerSkipCandidates(2, k)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("length", [6, 11, 16, 20])
def test_draft_model_equal_to_target_all_tokens_accepted(batch: int, sampling: str, length: int) -> None:
    """Every step after the prefill yields k + 1 tokens: with common random numbers also when sampling."""
    model, k = llama(), 4
    candidates = DraftModelCandidates(model, k=k)
    statistics = assert_same_tokens(model, prompts(batch), candidates, max_new_tokens=length, **SAMPLING[sampling])
    assert statistics.accepted == statistics.drafted
    assert all(len(steps) == -(-(length - 1) // (k + 1)) for steps in statistics.rows)


def test_draft_tokens_that_end_a_row_count_as_accepted() -> None:
    """Would catch: an accepted end token taken for the target's own, so that a draft that was right lowers the rate."""
    model, inputs = llama(), prompts(1)
    end = int(plain_output(model, inputs, max_new_tokens=4)[0][0, -1])
    ends = {"eos_token_id": end, "pad_token_id": 0}
    statistics = assert_same_tokens(model, inputs, DraftModelCandidates(model, k=6), max_new_tokens=20, **ends)
    assert (statistics.accepted, statistics.lengths) == (3, [4])


def check(model: Any, candidates: Any, *read: list[Any]) -> None:
    """Run the self-check of models that have hooks now, and forget what it has read."""
    for rows in (1, 4):
        model.generate(**prompts(rows), max_new_tokens=2, candidate_generator=candidates)
    for one in read:
        one.clear()


def test_layer_skip_runs_each_layer_once_per_token() -> None:
    """Would catch: the first layers computed again in verification."""
    model = llama()
    candidates, (first, _, last) = LayerSkipCandidates(2, k=4), model.model.layers
    with recorded_inputs(first, width) as by_first, recorded_inputs(last, width) as by_last:
        check(model, LayerSkipCandidates(2), by_first, by_last)
        model.generate(**prompts(1), max_new_tokens=30, candidate_generator=candidates)
    assert sum(by_first) == sum(by_last) == 12 + candidates.speculation.drafted + candidates.speculation.steps


def test_draft_model_does_not_read_rows_that_have_ended() -> None:
    """Would catch: the text that a row generated in plain steps before its end, read again in every draft."""
    model = llama()
    draft, inputs = perturbed_copy(model), prompts(4)
    plain = model.generate(**inputs, max_new_tokens=28, pad_token_id=0)
    ends = [int(plain[row, 12 + column]) for row, column in ((0, 6), (2, 21))]
    candidates = DraftModelCandidates(draft, k=4, policy=AfterPlainSteps(12))
    settings: dict[str, Any] = {"max_new_tokens": 40, "eos_token_id": ends, "pad_token_id": 0}
    with recorded_inputs(draft, lambda ids: ids.shape) as read:
        check(model, DraftModelCandidates(draft), read)
        steps = list(map(len, assert_same_tokens(model, inputs, candidates, **settings).rows))
    assert min(steps) < max(steps), "some rows must end before others"
    prompt, catching_up, *others = read
    assert prompt == (4, 12) and catching_up[1] > 2
    assert max(width for _, width in others) <= 2 and min(rows for rows, _ in others) <= 2


@pytest.mark.parametrize("larger", ["draft", "target"])
@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("verification", ["exact", "rejection"])
def test_draft_model_vocabulary_padded_to_another_size_runs(larger: str, sampling: str, verification: str) -> None:
    """As with Qwen: 151,936 and 152,064 entries for one tokenizer. Exact verification gives the same tokens."""
    model = llama()
    settings = model.config.to_dict() | {"num_hidden_layers": 1, "vocab_size": 112}
    torch.manual_seed(0)
    padded = LlamaForCausalLM(LlamaConfig(**settings)).eval()
    draft, target = map(copy.deepcopy, (padded, model) if larger == "draft" else (model, padded))
    for network in (draft, target):
        network.config.name_or_path = network.name_or_path = "the-same"
    candidates = DraftModelCandidates(draft, k=3)
    arguments = {"max_new_tokens": 12, "pad_token_id": 0, **SAMPLING[sampling]}
    if verification == "exact":
        assert_same_tokens(target, prompts(2), candidates, **arguments)
    else:
        ids = target.generate(**prompts(2), **arguments, candidate_generator=candidates, verification=verification)
        assert int(ids[:, 12:].max()) < target.config.vocab_size and candidates.speculation.drafted > 0
        if sampling == "greedy":
            assert torch.equal(ids, target.generate(**prompts(2), **arguments))


@pytest.mark.parametrize("tree", [None, 12])
def test_draft_model_confidence_threshold_shortens_drafts_row_by_row(tree: int | None) -> None:
    """Would catch: a threshold that chains follow and trees do not."""
    model = llama()
    candidates = DraftModelCandidates(shared_draft(model), k=6, tree=tree, confidence_threshold=0.014)
    statistics = assert_same_tokens(model, prompts(3), candidates, max_new_tokens=28)
    depths = {step.depth for row in statistics.rows for step in row if step.drafted}
    assert len(depths) > 1, "some drafts must be shortened and some not"


@pytest.mark.parametrize("tree", [None, 8])
def test_draft_below_the_confidence_threshold_ends_without_further_passes(tree: int | None) -> None:
    """Would catch: passes over tokens that are not expanded, up to the maximum depth of a chain."""
    model, draft = llama(), shared_draft(llama())
    passes = []
    for threshold in (0.0, 0.999):
        candidates = DraftModelCandidates(draft, k=6, tree=tree, confidence_threshold=threshold)
        with recorded_inputs(draft) as by_draft:
            assert_same_tokens(model, prompts(1), candidates, max_new_tokens=20)
        passes.append(len(by_draft) / candidates.speculation.steps)
    assert passes[1] < 1.3 < passes[0], passes


@pytest.mark.parametrize("kind", KINDS)
def test_network_plain_steps_cost_one_forward_pass_each(kind: str) -> None:
    """At depth 0 the draft is never run, not even on the prompt, and the target runs once per token."""
    model = llama()
    draft = perturbed_copy(model)
    candidates = DraftModelCandidates(draft, k=4) if kind == "draft" else LayerSkipCandidates(2, k=4)
    with recorded_inputs(model.model.layers[0]) as by_target, recorded_inputs(draft) as by_draft:
        check(model, candidates, by_target, by_draft)
        model.generate(**prompts(1), max_new_tokens=20, candidate_generator=candidates, policy=FixedDepth(0))
    assert (len(by_target), len(by_draft)) == (20, 0)


@pytest.fixture
def int8() -> Any:
    """How torchao quantises weights to eight bits."""
    return pytest.importorskip("torchao.quantization").Int8WeightOnlyConfig()


def test_draft_model_or_target_loaded_in_int8_same_tokens(reference_model: Any, tokenizer: Any, int8: Any) -> None:
    """Would catch: a drafter that reads the target's quantised weights as ordinary ones."""
    inputs = tokenizer(["def add(x, y):", "The quick"], return_tensors="pt", padding=True)
    config: dict[str, Any] = {"quantization_config": TorchAoConfig(int8)}
    draft = DraftModelCandidates(str(DRAFT_LM), k=3, dtype="bfloat16", **config)
    assert assert_same_tokens(reference_model, inputs, draft, max_new_tokens=30).accepted > 0
    target = AutoModelForCausalLM.from_pretrained(REFERENCE_LM, dtype=torch.float32, **config)
    heads = MedusaCandidates(random_heads(target), k=3)
    for candidates in (DraftModelCandidates(str(DRAFT_LM), k=3), LayerSkipCandidates(4, k=3), heads):
        assert assert_same_tokens(target, inputs, candidates, max_new_tokens=12).drafted > 0


def test_quantised_copy_of_the_target_drafts_for_it_and_shares_its_other_weights(
    reference_model: Any, int8: Any
) -> None:
    """Would catch: a target that is quantised itself, embeddings that take memory twice."""
    before = {name: weight.data_ptr() for name, weight in reference_model.named_parameters()}
    candidates = DraftModelCandidates("self", k=4, quantization_config=int8)
    inputs = {"input_ids": torch.randint(5, 500, (2, 12), generator=torch.Generator().manual_seed(3))}
    assert assert_same_tokens(reference_model, inputs, candidates, max_new_tokens=16).acceptance_rate > 0.8
    assert {name: weight.data_ptr() for name, weight in reference_model.named_parameters()} == before
    copied = candidates._load(reference_model)
    shared = [name for name, weight in copied.named_parameters() if weight.data_ptr() == before.get(name, 0)]
    assert any("embed" in name for name in shared) and any("norm" in name for name in shared)
    layers = [layer for layer in copied.modules() if isinstance(layer, torch.nn.Linear)]
    assert all(re.search("quantized|int8", type(layer.weight).__name__, re.I) for layer in layers)
    with pytest.raises(ValueError, match="takes quantization_config="):
        DraftModelCandidates("self")


def test_layer_skip_adapter_given_as_a_path_is_the_folder_of_that_name(reference_model: Any, tokenizer: Any) -> None:
    """Would catch: a `Path` taken for a module and called."""
    inputs, layers = tokenizer("def add(x, y):", return_tensors="pt"), exit_layer_of(BUNDLED_ADAPTER)
    by_path, by_name = (LayerSkipCandidates(layers, k=3, adapter=kind(BUNDLED_ADAPTER)) for kind in (Path, str))
    assert repr(by_path) == repr(by_name) and by_path.profile_key() == by_name.profile_key()
    assert assert_same_tokens(reference_model, inputs, by_path, max_new_tokens=13).accepted > 0


# Draft trees of draft models: what they gain, and their distribution under rejection sampling

LATENCY = LatencyModel.from_curves(CostCurve((1, 65), (1.0, 1.1), 256, 1), draft_token=0.05)


@pytest.mark.parametrize("kind", ["draft model", "parallel heads"])
@pytest.mark.parametrize("tree", [2, "auto"])
def test_chain_for_a_target_without_trees_has_the_size_of_the_tree(tree: Any, kind: str) -> None:
    """Would catch: `tree=2` that is ignored, or "auto" that drafts to the full depth, where states cannot branch.

    With this latency a second draft token would have to be accepted with probability 0.6.
    """
    model = tiny_model("qwen3_next")
    latency = LatencyModel.from_curves(CostCurve((1, 2, 64), (1.0, 1.1, 70.0), 64, 1), draft_token=0.001)
    settings: Any = {"k": 8, "tree": tree, "policy": FixedDepth() if tree == 2 else AdaptiveDepth(latency)}
    if kind == "draft model":
        strategy: Any = DraftModelCandidates(tiny_model("llama"), **settings)
    else:
        strategy = MedusaCandidates(random_heads(model, num_heads=4), **settings)
    statistics = assert_same_tokens(model, prompts(1), strategy, max_new_tokens=30)
    drafted = [step.drafted for step in statistics.rows[0][:-3]]
    assert max(drafted) <= 2 and (tree == "auto" or min(drafted) == 2)


def test_trees_accept_more_tokens_per_step_than_a_chain_of_the_same_depth() -> None:
    """Would catch: a tree whose further branches are never accepted, which would be verified for nothing."""
    draft, tokens_per_step = shared_draft(llama(), noise=0.3), []
    for tree in (None, 24):
        candidates = DraftModelCandidates(draft, k=5, tree=tree)
        llama().generate(**prompts(4), max_new_tokens=40, candidate_generator=candidates)
        tokens_per_step.append(candidates.speculation.tokens_per_step)
    assert 1.2 < tokens_per_step[0] < tokens_per_step[1] / 1.1


@pytest.mark.parametrize("tree", [6, "auto"])
def test_trees_rejection_sampling_has_the_distribution_of_the_target(tree: Any) -> None:
    """Would catch: siblings that count as independent, a wrong q, nodes left out because of their tokens."""
    target, draft = small_llama(6, 0), small_llama(6, 3)
    candidates = DraftModelCandidates(draft, k=2, tree=tree, policy=AdaptiveDepth(LATENCY) if tree == "auto" else None)
    assert fit_of_two_tokens(target, torch.tensor([[2, 3, 4]]), candidates, calls=5) > 1e-3


def test_trees_rejection_sampling_keeps_draws_in_order_and_expanded_nodes() -> None:
    """Would catch: siblings in another order than they were drawn in, nodes left out because of what follows them."""
    drafts, draft = list[tuple[Any, list[int]]](), small_llama(6, 3)

    def record(session: Any) -> None:
        make = session.draft

        def recorded(max_depths: Any) -> Any:
            read.clear()
            drafts.append((make(max_depths), [token for tokens in read[1:] for token in tokens]))
            return drafts[-1][0]

        session.draft = recorded

    steep = LatencyModel.from_curves(CostCurve((1, 65), (1.0, 9.0), 256, 1), draft_token=0.01)
    candidates = DraftModelCandidates(draft, k=4, tree="auto", policy=AdaptiveDepth(steep))
    arguments = {"max_new_tokens": 60, "do_sample": True, "verification": "rejection"}
    with recorded_inputs(draft, lambda ids: ids[0].tolist()) as read:
        strategy = with_sessions(candidates, record)
        small_llama(6, 0).generate(torch.tensor([[2, 3, 4]]), candidate_generator=strategy, **arguments)
    assert max(tree.nodes for tree, _ in drafts) > 2
    orders = []
    for tree, expanded in drafts[1:]:  # before the first one the prompt is read too
        tokens, parents = (tree.token_lists()[0], tree.parents[0]) if tree.nodes else ([], ())
        assert not Counter(expanded) - Counter(tokens), "a node that was expanded is verified"
        for parent in set(parents):
            siblings = [node for node, above in enumerate(parents) if above == parent]
            assert all(tree.probability[0][one] > tree.probability[0][other] for one, other in pairwise(siblings))
            q = [float(tree.q[0, node, tokens[node]]) for node in siblings]
            orders.append(q == sorted(q, reverse=True))
    assert not all(orders), "samples are not in the order of their probabilities"


# One strategy object on several models, and several objects of one kind on one model


@pytest.fixture
def adapter(tmp_path: Path) -> str:
    """A folder with an exit adapter for layer 2 of tiny llama."""
    model = tiny_model("llama", num_hidden_layers=3)
    head: Any = ExitHead.from_target(model, 2)
    torch.manual_seed(1)
    save_exit_head(get_peft_model(head, LoraConfig(target_modules=["head"], r=2)), tmp_path, model, "tiny")
    return str(tmp_path)


def accepted_steps(candidates: Any, model: Any) -> list[int]:
    """How many draft tokens each step of a call accepts."""
    statistics = assert_same_tokens(model, prompts(1), candidates, max_new_tokens=30)
    return [step.accepted for step in statistics.rows[0]]


def other_model() -> Any:
    """Tiny llama with another output matrix."""
    model = fresh_model("llama", num_hidden_layers=3)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight[torch.randperm(99, generator=torch.Generator().manual_seed(3))])
    return model


def test_layer_skip_adapter_on_a_second_model_uses_its_output_matrix(adapter: str) -> None:
    """Would catch: the output matrix of the first model kept for all later ones."""
    first, second = tiny_model("llama", num_hidden_layers=3), other_model()
    candidates = LayerSkipCandidates(2, k=3, adapter=adapter)
    accepted_steps(candidates, first)
    fresh = LayerSkipCandidates(2, k=3, adapter=adapter)
    assert accepted_steps(candidates, second) == accepted_steps(fresh, second)
    assert sum(accepted_steps(candidates, second)) > 0


def test_layer_skip_adapter_after_the_model_changed_dtype_drafts_as_a_new_one(adapter: str) -> None:
    """Would catch: an adapter that stays in the dtype of the first call."""
    model, kept = fresh_model("llama", num_hidden_layers=3), LayerSkipCandidates(2, k=3, adapter=adapter)
    accepted_steps(kept, model)
    model.to(torch.bfloat16)
    found = []
    for candidates in (kept, LayerSkipCandidates(2, k=3, adapter=adapter)):
        model.generate(**prompts(1), max_new_tokens=20, candidate_generator=candidates)
        found.append(candidates.speculation.rows)
    assert found[0] == found[1] and kept.speculation.accepted > 0


class Copies(TorchFunctionMode):
    """Records whether tensors are copied while their memory may be freed."""

    def __init__(self) -> None:
        super().__init__()
        self.unsafe = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.unsafe += bool((kwargs or {}).get("non_blocking"))
        return function(*args, **(kwargs or {}))


def test_tensors_are_copied_without_waiting_on_cuda_alone() -> None:
    """Would catch: copies from temporary tensors, whose memory MPS reads after it was freed."""
    model = llama()
    for candidates in (strategy("draft"), MedusaCandidates(random_heads(model), tree=6)):
        with Copies() as copies:
            assert_same_tokens(model, prompts(2), candidates, max_new_tokens=12)
        assert not copies.unsafe


def test_numpy_that_raises_for_underflow_same_tokens() -> None:
    """Would catch: `FloatingPointError` for the probability 0 of rows that draft less deep than others."""
    with np.errstate(all="raise"):
        for candidates in (strategy("draft"), DraftModelCandidates(shared_draft(llama()), k=4, tree=8), "auto"):
            assert_same_tokens(llama(), prompts(3), candidates, max_new_tokens=20, eos_token_id=[5, 6], pad_token_id=0)
