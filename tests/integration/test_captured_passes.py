"""Captured passes of targets and drafters, with a replay on a CPU in place of CUDA graphs, which tests/cuda has."""

import gc
import threading
import weakref
from functools import partial
from typing import Any

import pytest
import torch

from hf_specgen import (
    DraftModelCandidates,
    EagleCandidates,
    FixedDepth,
    LayerSkipCandidates,
    NgramCandidates,
    Schedule,
)
from hf_specgen.compat import CACHE
from hf_specgen.evaluation import workloads
from hf_specgen.heads.base import HeadOutput
from hf_specgen.heads.head_formats import load_head
from hf_specgen.targets.cache import RaggedCache
from hf_specgen.targets.cuda_graphs import Graph, GraphMemory
from hf_specgen.targets.graphs import EAGER_PASSES, MAX_GRAPHS, Capturable, graphs_of_call
from hf_specgen.targets.passes import TEXT_WIDTH
from hf_specgen.targets.static_buffers import CAPACITY_BLOCK
from tests.helpers import SAMPLING, assert_same_tokens, perturbed_copy, prompts
from tests.helpers.calls import with_sessions
from tests.helpers.captures import captured_passes, failing_captures, graphs_on_cpu, is_capturing
from tests.helpers.comparison import plain_output
from tests.helpers.head_fixtures import FIXTURES, small_eagle, steered
from tests.helpers.models import fresh_model, small_llama, stateful_model


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    return graphs_on_cpu(monkeypatch)


def small(architecture: str = "llama", layers: int = 1, **overrides: Any) -> Any:
    return fresh_model(architecture, num_hidden_layers=layers, **overrides)


same_tokens = partial(assert_same_tokens, compile="graphs", max_new_tokens=12)


@pytest.mark.parametrize(("architecture", "layers"), [("mistral", 1), ("gemma2", 2)])
def test_captured_target_with_sliding_windows_same_tokens(architecture: str, layers: int, captures: list[Any]) -> None:
    """Would catch: a cache that drops slots while a captured pass has fixed ones; masks of several kinds (Gemma 2)."""
    same_tokens(small(architecture, layers), prompts(1, length=16), NgramCandidates(k=3), max_new_tokens=16)
    assert captures


def test_captured_target_returns_cache_for_next_turn(captures: list[Any]) -> None:
    """Would catch: slots of padding in the cache that a caller receives."""
    model, inputs = small(), prompts(1)
    settings = {"candidate_generator": NgramCandidates(k=3), "compile": "graphs", "return_dict_in_generate": True}
    first = model.generate(**inputs, max_new_tokens=8, **settings)
    longer = torch.cat([first.sequences, torch.tensor([[5, 6]])], dim=1)
    second = model.generate(longer, **{CACHE: first[CACHE]}, max_new_tokens=8, **settings)
    assert torch.equal(second.sequences, model.generate(longer, max_new_tokens=8))


def test_captured_pass_with_other_logits_refused(captures: list[Any]) -> None:
    """Would catch: a graph with wrong results that is used all the same."""

    def other_if_captured(_: Any, __: Any, logits: torch.Tensor) -> torch.Tensor:
        return logits + is_capturing() * torch.linspace(0, 1, logits.shape[-1])

    model = small()
    model.lm_head.register_forward_hook(other_if_captured)
    with pytest.raises(ValueError, match=r'LlamaForCausalLM cannot .* differ .* leave compile="graphs" out'):
        model.generate(**prompts(1), max_new_tokens=4, candidate_generator=NgramCandidates(k=3), compile="graphs")


def already_compiled() -> Any:
    model = small()
    model.compile(backend="eager")
    return model


def offloaded() -> Any:
    accelerate = pytest.importorskip("accelerate")
    return accelerate.cpu_offload(small(), execution_device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (already_compiled, "is compiled already"),
        (offloaded, "weights that are offloaded"),
        (lambda: stateful_model("lfm2"), "convolutions, recurrent states"),
        (lambda: small(layers=2), "runs a part of its layers"),
        (small, "is on 'cpu', and CUDA graphs need a GPU"),
    ],
)
def test_model_that_cannot_be_captured_refused(make: Any, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch: an error from inside the capture, or a call that silently runs eagerly."""
    if "GPU" not in reason:
        graphs_on_cpu(monkeypatch)
    candidates = LayerSkipCandidates(1, k=2) if "layers" in reason else NgramCandidates(k=3)
    with pytest.raises(ValueError, match=f'{reason}.*; leave compile="graphs" out'):
        make().generate(**prompts(1), max_new_tokens=4, candidate_generator=candidates, compile="graphs")


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("sampling", ["greedy", "sampled"])
def test_captured_target_and_draft_same_tokens(captures: list[Any], batch: int, sampling: str) -> None:
    """Would catch: inputs, slots or masks of another step in a replayed pass."""
    model = small(layers=2)
    draft = DraftModelCandidates(perturbed_copy(model, 0.02), k=4, tree=8)
    for length in (9, 14):
        same_tokens(model, prompts(batch, length=length), draft, **SAMPLING[sampling])
        graphs = len(captures)
    assert len(captures) == graphs > 2


def test_captured_target_is_captured_anew_after_a_change(captures: list[Any]) -> None:
    """Would catch: the graph of another adapter, or of weights that have been freed."""
    model, counts = small(), []
    layer = model.model.layers[0]

    def replace_weight() -> None:
        layer.mlp.down_proj.weight = torch.nn.Parameter(torch.randn_like(layer.mlp.down_proj.weight))

    for change in (lambda: None, lambda: None, replace_weight, lambda: setattr(layer.self_attn, "scaling", 2.0)):
        change()
        same_tokens(model, prompts(1), NgramCandidates(k=3))
        counts.append(len(captures))
    assert counts[0] == counts[1] < counts[2] < counts[3]


def test_memory_of_a_failed_capture_is_not_used_again(captures: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch: an error without its reason and remedy, or graphs in a pool that is broken."""
    model, memories = small(), failing_captures(monkeypatch, lambda number: number == 1)
    call = {"max_new_tokens": 4, "candidate_generator": NgramCandidates(), "compile": "graphs"}
    with pytest.raises(ValueError, match=r'cannot be captured .*not permitted.*leave compile="graphs" out'):
        model.generate(**prompts(1), **call)
    model.model.layers[0].self_attn.scaling *= 1.5  # a changed model is captured anew
    model.generate(**prompts(1), **call)
    assert memories[0] is not memories[1]


@pytest.mark.parametrize("fails", [False, True], ids=["captured", "failing"])
def test_auto_captures_after_the_first_passes_or_goes_on_eagerly(
    captures: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fails: bool
) -> None:
    """Would catch: captures for a short call, and a call that ends with an error of CUDA."""
    model, tried = small(), failing_captures(monkeypatch, lambda _: fails)
    same_tokens(model, prompts(1), NgramCandidates(k=3), compile="auto", max_new_tokens=EAGER_PASSES)
    assert not tried
    for _ in range(3):
        same_tokens(model, prompts(1), NgramCandidates(k=3), compile="auto", max_new_tokens=40)
    assert len(tried) == 1 if fails else 1 <= len(tried) == len(captures) <= 2
    assert caplog.text.count("it runs eagerly") == fails


def test_auto_without_a_gpu_or_with_a_model_that_cannot_be_captured_runs_eagerly(monkeypatch: Any, caplog: Any) -> None:
    """Would catch: a default that fails or warns where there are no graphs, or whose reason is told in every call."""
    same_tokens(small(), prompts(1), NgramCandidates(k=3), compile="auto")
    assert "no CUDA graphs" not in caplog.text
    captures = graphs_on_cpu(monkeypatch)
    caplog.set_level("INFO", logger="hf_specgen")
    for _ in range(2):
        same_tokens(stateful_model("lfm2"), prompts(1), NgramCandidates(k=3), compile="auto")
    same_tokens(small(layers=2), prompts(1), LayerSkipCandidates(1, k=2), compile="auto")
    assert not captures
    assert caplog.text.count("no CUDA graphs: Lfm2ForCausalLM keeps convolutions") == 1
    assert "no CUDA graphs: LlamaForCausalLM runs a part of its layers" in caplog.text


def test_auto_captures_no_long_texts_of_models_with_sliding_windows(
    captures: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Would catch: layers with a window that keep the whole text, many times the memory of plain decoding."""
    caplog.set_level("INFO", logger="hf_specgen")
    model = small("mistral", sliding_window=16)
    same_tokens(model, prompts(1), NgramCandidates(k=3), compile="auto", max_new_tokens=40)
    assert not captures and "MistralForCausalLM has sliding windows" in caplog.text
    for _ in range(3):  # more passes of a shape than run eagerly
        same_tokens(model, prompts(1), NgramCandidates(k=3), compile="auto", max_new_tokens=10)
    assert captures


def test_auto_without_memory_for_buffers_goes_on_eagerly(captures: list[Any], monkeypatch: Any, caplog: Any) -> None:
    """Would catch: a call that ends because a set of buffers does not fit beside the model."""
    zeros = torch.zeros

    def full(*shape: Any, **options: Any) -> torch.Tensor:
        if CAPACITY_BLOCK in shape:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return zeros(*shape, **options)

    monkeypatch.setattr(torch, "zeros", full)
    model = small()
    same_tokens(model, prompts(2), NgramCandidates(k=3), compile="auto")
    assert not captures and caplog.text.count("it runs eagerly") == 1
    with pytest.raises(torch.OutOfMemoryError):
        same_tokens(small(), prompts(2), NgramCandidates(k=3), compile="graphs")


def test_functions_that_ran_without_a_graph_are_not_kept() -> None:
    """Would catch: memory that grows with each sampling setting and shape for as long as the model lives."""
    module, cache, kept = torch.nn.Linear(1, 1), RaggedCache(), []
    graphs = graphs_of_call(module, "auto")
    for _ in range(3 * MAX_GRAPHS):
        function = Capturable[Any, Any]()
        kept.append(weakref.ref(function))
        assert graphs.run(function, (), cache, 0, fallback=lambda: 5) == 5
    del function
    gc.collect()
    assert sum(one() is not None for one in kept) <= MAX_GRAPHS


class _Difference(Capturable[dict[str, torch.Tensor], torch.Tensor]):
    def __call__(self, module: Any, inputs: dict[str, torch.Tensor], cache: Any) -> torch.Tensor:
        return inputs.get("first", torch.zeros(1)) - inputs.get("second", torch.zeros(1))


def test_graph_is_not_replayed_with_an_argument_of_another_name(captures: list[Any]) -> None:
    """Would catch: a graph that takes another argument of the same shape for its own."""
    graphs, cache, function = graphs_of_call(torch.nn.Linear(1, 1), "graphs"), RaggedCache(), _Difference()
    cache.update(torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4), 0)
    assert graphs.move_to_static_buffers(cache, 1)
    found = [graphs.run(function, {name: torch.ones(1)}, cache, 0, lambda: None) for name in ("first", "second")]
    assert found == [1, -1] and len(captures) == 2


@pytest.mark.parametrize("mode", ["auto", "graphs"])
def test_hook_that_generates_with_its_own_model_same_tokens(mode: str, captures: list[Any]) -> None:
    """Would catch: a thread that waits for its own lock; buffers of the pass under way used by the inner call."""
    model, inner_inputs, outcomes = small(layers=2), prompts(2), list[Any]()
    call: Any = {"max_new_tokens": 8, "do_sample": False}
    expected, expected_inner = (model.generate(**one, **call) for one in (prompts(1), inner_inputs))
    busy = []

    def ask(*_: Any) -> None:
        if busy or is_capturing():
            return
        busy.append(True)
        try:
            output = model.generate(**inner_inputs, **call, candidate_generator=NgramCandidates(k=3), compile=mode)
            outcomes.append(torch.equal(output, expected_inner))
        except ValueError as error:
            outcomes.append(str(error))
        finally:
            busy.clear()

    def work() -> None:
        output = model.generate(**prompts(1), **call, candidate_generator=NgramCandidates(k=3), compile=mode)
        outcomes.append(torch.equal(output, expected))

    model.model.layers[0].mlp.register_forward_hook(ask)
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(timeout=120)
    assert not thread.is_alive() and outcomes[-1] is True
    found = set(outcomes)
    if mode == "auto":
        assert found == {True}
    else:
        refusal = (
            'LlamaForCausalLM is called by a hook in a pass of its own, and runs eagerly; leave compile="graphs" out'
        )
        assert found == {True, refusal} and captures


def test_warm_up_of_a_capture_leaves_the_shared_memory_to_other_threads(captures: list[Any]) -> None:
    """Would catch: a deadlock with a thread that holds the lock of a module that a hook of the warm-up calls."""
    memory = GraphMemory(None)
    are_free: list[bool] = []

    def try_lock() -> None:
        are_free.append(memory.lock.acquire(blocking=False))
        if are_free[-1]:
            memory.lock.release()

    def function(inputs: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=try_lock)
        thread.start()
        thread.join()
        return inputs + 1

    graph = Graph(function, torch.zeros(2), memory, function)
    assert graph.replay(torch.ones(2)).tolist() == [2.0, 2.0]
    assert are_free == [True, False, False], "of warm-up, capture and replay"


# EAGLE heads whose passes are captured as graphs draft what they draft otherwise

EAGLE1, EAGLE3 = FIXTURES["eagle1_original"], FIXTURES["eagle3_original"]
ENDS = {"eos_token_id": [*range(40, 48)], "pad_token_id": 0}
TREE = {"k": 3, "tree": 8}
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def head() -> Any:
    """One for all tests: what is captured of it is used again."""
    return load_head(EAGLE1.head_folder)


def steps(head: Any, inputs: Any, shape: Any, target: Any = None, **arguments: Any) -> Any:
    """The tokens and the steps of a call, some of whose draft tokens are accepted."""
    target = target or EAGLE1.target
    plain = {name: value for name, value in arguments.items() if name != "compile"}
    texts = plain_output(target, inputs, **plain)[0][:, inputs["input_ids"].shape[1] :].tolist()
    torch.manual_seed(11)
    candidates = steered(EagleCandidates(head, **shape), texts)
    output = target.generate(**inputs, candidate_generator=candidates, return_dict_in_generate=True, **arguments)
    return output.sequences.tolist(), output.speculation.rows


@pytest.mark.parametrize(("batch", "sampling"), [(1, "sampled"), (3, "greedy"), (3, "sampled")])
@pytest.mark.parametrize("shape", [{"k": 3}, {"k": 4, "tree": 9}], ids=["chain", "tree"])
def test_captured_head_same_drafts(shape: Any, batch: int, sampling: str, head: Any, captures: list[Any]) -> None:
    """Would catch: states, slots or masks of another pass; rows of which some end before the others."""
    arguments = {"max_new_tokens": 16, **ENDS, **SAMPLING[sampling]}
    for length in (9, 12):
        eager = steps(head, prompts(batch, length), shape, **arguments)
        before = len(captures)
        assert steps(head, prompts(batch, length), shape, compile="graphs", **arguments) == eager
        assert len(captures) > before


@pytest.mark.parametrize(
    ("drafter", "shape", "sampling"),
    [
        ("EAGLE-3", {"k": 5}, "sampled"),
        ("EAGLE-3", {"k": 6, "tree": 12}, "greedy"),
        ("EAGLE-3", {"k": 8, "tree": "auto", "policy": FixedDepth()}, "sampled"),
        ("draft model", {"k": 5}, "greedy"),
        ("draft model", {"k": 6, "tree": 12}, "sampled"),
        ("draft model", {"k": 8, "tree": "auto", "policy": FixedDepth()}, "greedy"),
        ("mistral", {"k": 5}, "sampled"),
        ("mistral", {"k": 6, "tree": 12}, "greedy"),
        ("gemma2", {"k": 5}, "greedy"),
        ("gemma2", {"k": 6, "tree": 12}, "sampled"),
    ],
    ids=str,
)
def test_captured_levels_same_drafts(
    drafter: str, shape: Any, sampling: str, captures: list[Any], request: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would catch: slots, masks, positions, states or noise of another level in a captured function over several."""
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)  # as on a GPU, a read by the host waits
    if drafter == "EAGLE-3":
        target, tokenizer = map(request.getfixturevalue, ("reference_model", "tokenizer"))
        inputs = tokenizer(["def add(a, b):", "The three of them went"], return_tensors="pt", padding=True)
    else:
        target, inputs = small({"draft model": "llama"}.get(drafter, drafter), 2), prompts(2, 9)
    runs = list[list[list[int]]]()

    def drafts(mode: Any) -> Any:
        if drafter == "EAGLE-3":
            head = load_head(workloads.BUNDLED_EAGLE)
            runs.append(captured_passes(head))
            candidates: Any = EagleCandidates(head, **shape)
        else:
            draft = perturbed_copy(target, 0.02)
            candidates = DraftModelCandidates(draft, **shape)
            runs.append(captured_passes(draft))
        torch.manual_seed(11)
        arguments = {"max_new_tokens": 20, "return_dict_in_generate": True, **SAMPLING[sampling]}
        output = target.generate(**inputs, candidate_generator=candidates, compile=mode, **arguments)
        return output.sequences.tolist(), output.speculation.rows

    eager = drafts(False)
    assert drafts("graphs") == eager and any(step.accepted for row in eager[1] for step in row)
    of_eager_call, of_several = runs[0], [passes for passes in runs[1] if len(passes) > 1]
    assert not of_eager_call and len(of_several) >= 4, "each function is captured once and replayed"
    assert any(passes[0] == TEXT_WIDTH for passes in of_several), "none began with new text"


def test_captured_chain_of_more_tokens_than_a_tree_same_drafts(captures: list[Any]) -> None:
    """Would catch: a captured chain that is cut to the maximum number of nodes of a tree."""
    target = small(max_position_embeddings=256)
    candidates = DraftModelCandidates(perturbed_copy(target, 0.0), k=70, policy=FixedDepth())
    drafts = []
    for mode in (False, "graphs"):
        target.generate(**prompts(1), candidate_generator=candidates, compile=mode, max_new_tokens=100)
        drafts.append(candidates.speculation.rows)
    assert drafts[0] == drafts[1] and max(step.drafted for step in drafts[0][0]) == 70


def test_levels_of_a_draft_with_fewer_tokens_than_children_same_drafts(captures: list[Any], monkeypatch: Any) -> None:
    """Would catch: as many candidates after a node of a captured tree as the target, and not the draft, has tokens."""
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)  # as on a GPU, a read by the host waits
    target, draft = small_llama(40, seed=0), small_llama(5, seed=1)
    target.name_or_path = draft.name_or_path = "org/one-tokenizer"
    inputs = {"input_ids": torch.tensor([[1, 2, 3, 4, 1, 2]]), "attention_mask": torch.ones(1, 6, dtype=torch.long)}
    drafts = []
    for mode in (False, "graphs"):
        candidates = DraftModelCandidates(draft, k=4, tree=12)
        same_tokens(target, inputs, candidates, compile=mode)
        drafts.append(candidates.speculation.rows)
    assert drafts[0] == drafts[1] and max(step.drafted for step in drafts[0][0]) > 4


def test_levels_of_greedy_typical_acceptance_are_captured(captures: list[Any], monkeypatch: Any) -> None:
    """Would catch: draft scores without noise of their own that run eagerly, or other drafts from a graph."""
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)  # as on a GPU, a read by the host waits
    target = small(layers=2)
    draft = perturbed_copy(target, 0.02)
    runs = captured_passes(draft)
    outputs = []
    for mode in (False, "graphs"):
        candidates = DraftModelCandidates(draft, k=4, tree=8)
        arguments = {"candidate_generator": candidates, "verification": "typical", "compile": mode}
        ids = target.generate(**prompts(2, 9), max_new_tokens=20, **arguments)
        outputs.append((ids.tolist(), candidates.speculation.rows))
    assert outputs[0] == outputs[1] and any(len(passes) > 1 for passes in runs)


def taken(runs: list[list[int]]) -> list[list[int]]:
    """The recorded runs, which are then forgotten."""
    found = list(runs)
    runs.clear()
    return found


def test_levels_that_cannot_be_captured_leave_captured_passes(captures: list[Any], monkeypatch: Any) -> None:
    """Would catch: a failed capture of several levels after which not even single passes are captured."""
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    head, failed = load_head(EAGLE1.head_folder), list[bool]()
    runs = captured_passes(head)
    failing_captures(monkeypatch, lambda _: failed.append(any(len(one) > 1 for one in taken(runs))) or failed[-1])
    candidates = EagleCandidates(head, **TREE)
    assert_same_tokens(EAGLE1.target, prompts(1), candidates, compile="graphs", max_new_tokens=16)
    assert any(failed)
    assert any(isinstance(one, HeadOutput) for one in captures)


def test_captured_levels_do_not_keep_a_head(captures: list[Any]) -> None:
    """Would catch: a head that stays in memory as long as its graphs are kept, and they as long as the head."""
    own = load_head(EAGLE1.head_folder)
    settings: Any = {"candidate_generator": EagleCandidates(own, **TREE), "compile": "graphs", "max_new_tokens": 9}
    EAGLE1.target.generate(**prompts(1), **settings)
    del settings
    held = weakref.ref(own)
    captures.clear()
    del own
    gc.collect()
    assert held() is None


def test_captured_head_of_another_format_same_drafts(captures: list[Any]) -> None:
    """Would catch: logits of a draft vocabulary taken for those of all tokens in a captured function."""
    arguments: Any = (load_head(EAGLE3.head_folder), prompts(1), {"k": 3, "tree": 6}, EAGLE3.target)
    eager = steps(*arguments, max_new_tokens=6)
    assert steps(*arguments, max_new_tokens=6, compile="graphs") == eager


def test_captured_text_leaves_the_states_of_an_eager_pass(captures: list[Any]) -> None:
    """Would catch: states for the next pass in place of those for the output matrix."""
    last: list[Any] = []

    def record(session: Any) -> None:
        draft = session.draft

        def recorded(max_depths: Any) -> Any:
            tree = draft(max_depths)
            last.append(session.drafter._last)
            return tree

        session.draft = recorded

    head = load_head(EAGLE3.head_folder)
    runs = captured_passes(head)
    for mode in (False, "graphs"):
        arguments = {"candidate_generator": with_sessions(EagleCandidates(head, k=3), record), "compile": mode}
        EAGLE3.target.generate(**prompts(1), max_new_tokens=12, **arguments)
    eager, captured = last[: len(last) // 2], last[len(last) // 2 :]
    assert any(passes[0] == TEXT_WIDTH for passes in runs) and all(not torch.equal(*one) for one in eager)
    torch.testing.assert_close(captured, eager)


@pytest.mark.parametrize("setting", [{"eta_cutoff": 0.01}, {"top_h": 0.4}], ids=str)
def test_processors_that_read_scores_keep_levels_from_being_captured(
    setting: Any, captures: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Would catch: a capture that fails in every call, as PyTorch's distributions check their arguments on the host."""
    caplog.set_level("INFO", logger="hf_specgen")
    target = small(layers=2)
    draft = perturbed_copy(target, 0.02)
    runs = captured_passes(draft)
    same_tokens(target, prompts(1), DraftModelCandidates(draft, k=3), **SAMPLING["sampled"], **setting)
    assert runs and all(len(passes) == 1 for passes in runs)
    assert "cannot be captured" not in caplog.text


@pytest.mark.parametrize("setting", [{"verification": "rejection"}, {"eta_cutoff": 0.01}], ids=str)
def test_levels_that_cannot_be_captured_end_at_the_maximum_depth(
    setting: Any, captures: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would catch: passes up to the depth of a captured function, and their padding, in drafts without one."""
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)  # as on a GPU, a read by the host waits
    target = small(layers=2)
    candidates: Any = DraftModelCandidates(perturbed_copy(target, 0.02), k=8, tree=8, policy=Schedule({1: 2}))
    levels = list[int]()

    def count(session: Any) -> None:
        draft = session.draft

        def counted(depths: Any) -> Any:
            tree = draft(depths)
            levels.append(len(session.tokens_per_pass))
            return tree

        session.draft = counted

    with_sessions(candidates, count)
    target.generate(
        **prompts(1),
        candidate_generator=candidates,
        compile="graphs",
        max_new_tokens=12,
        **SAMPLING["sampled"],
        **setting,
    )
    assert max(levels) == 2, levels


def test_captured_head_in_later_calls_uses_the_same_graphs(captures: list[Any]) -> None:
    """Would catch: graphs that are captured anew for every call or length, each of which keeps memory."""
    candidates, before = EagleCandidates(EAGLE1.head_folder, **TREE), 0
    for length in (12, 8, 30):
        arguments = {"max_new_tokens": 16, "candidate_generator": candidates, "compile": "graphs"}
        EAGLE1.target.generate(**prompts(1, length), **arguments)
        before = before or len(captures)
    assert 0 < len(captures) <= before + 2  # a width that the first call did not need


def test_captured_head_of_a_text_that_outgrows_its_buffers_same_drafts(captures: list[Any]) -> None:
    """Would catch: slots of the smaller buffers that a graph still reads, or text that is lost where they grow."""
    target, head = small_llama(40, 0, num_hidden_layers=8), small_eagle()
    inputs = {"input_ids": torch.randint(1, 40, (1, CAPACITY_BLOCK - 70), generator=torch.Generator().manual_seed(1))}
    eager = steps(head, inputs, TREE, target, max_new_tokens=90)
    before = len(captures)
    assert steps(head, inputs, TREE, target, max_new_tokens=90, compile="graphs") == eager
    assert len(captures) > before and len(eager[0][0]) > CAPACITY_BLOCK


def test_head_that_cannot_be_captured_runs_eagerly(
    captures: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Would catch: a call that ends with an error of CUDA because its drafter cannot be captured."""
    head = load_head(EAGLE1.head_folder)
    eager, runs = steps(head, prompts(2), TREE, max_new_tokens=40), captured_passes(head)
    failing_captures(monkeypatch, lambda _: bool(taken(runs)))  # where the function runs the head
    assert steps(head, prompts(2), TREE, max_new_tokens=40, compile="auto") == eager
    assert caplog.text.count("; it runs eagerly") == 1
    with pytest.raises(ValueError, match='leave compile="graphs" out'):
        steps(head, prompts(2), TREE, max_new_tokens=20, compile="graphs")


def test_captured_call_under_autocast_refused(head: Any, captures: list[Any]) -> None:
    """Would catch: graphs of passes under autocast that later calls without it replay."""
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="runs under torch"):
        steps(head, prompts(1), {"k": 3}, max_new_tokens=4, compile="graphs")
