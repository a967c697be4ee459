"""Uno: the target drafts over noise with a LoRA adapter, its own tokens stay those of plain `generate`."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from hf_specgen import (
    CombinedCandidates,
    DraftModelCandidates,
    FixedDepth,
    NgramCandidates,
    UnoCandidates,
    generate_many,
)
from tests.helpers import SAMPLING, assert_same_tokens, prompts, shared_draft, tiny_model
from tests.helpers.calls import with_sessions
from tests.helpers.lora import write_lora
from tests.helpers.models import fresh_model
from tests.helpers.strategies import llama

pytestmark = pytest.mark.filterwarnings("ignore")


@torch.no_grad()
def test_predictions_are_those_of_peft_over_the_cache_of_the_target(tmp_path: Path) -> None:
    """The reference: PEFT's model reads the noise, on a cache that the target alone has made.

    Would catch: the adapter applied to the last token too, another scale, noise that is read at other positions.
    """
    model = fresh_model("llama")
    write_lora(model, tmp_path)
    drafts: list[Any] = []

    def record(session: Any) -> None:
        read = session.drafter.forward_depths

        def recorded(text: Any, depth: int) -> Any:
            noise = session.drafter._noise.clone_state()
            predicted = read(text, depth)
            state = session.batch.state
            known = [prompt + new for prompt, new in zip(state.prompts, state.generated, strict=True)]
            tokens = torch.randint(model.config.vocab_size, (2, depth - 1), generator=noise)
            drafts.append((known, tokens, predicted.logits[:, :, 0]))
            return predicted

        session.drafter.forward_depths = recorded

    candidates = with_sessions(UnoCandidates(tmp_path, k=4), record)
    model.generate(**prompts(2), max_new_tokens=8, candidate_generator=candidates, do_sample=False)
    reference: Any = PeftModel.from_pretrained(fresh_model("llama"), tmp_path)
    assert len(drafts) > 1
    for known, noise, logits in drafts:
        for row, text in enumerate(known):
            with reference.disable_adapter():
                output = reference(torch.tensor([text]), use_cache=True)
            torch.testing.assert_close(logits[row, 0], output.logits[0, -1], atol=1e-4, rtol=1e-4)
            if noise.shape[1]:
                drafted = reference(noise[row : row + 1], past_key_values=output.past_key_values).logits[0]
                torch.testing.assert_close(logits[row, 1:], drafted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "deepseek_v3", "qwen3_moe"])
@pytest.mark.parametrize("sampling", SAMPLING)
def test_targets_with_windows_latents_and_experts_same_tokens(kind: str, sampling: str, tmp_path: Path) -> None:
    """Would catch: cache entries of noise that stay, or a window that they move on."""
    model = tiny_model(kind)
    names = ("kv_a_proj_with_mqa", "o_proj") if kind == "deepseek_v3" else ("k_proj", "o_proj")
    candidates = UnoCandidates(write_lora(model, tmp_path, names), k=4, tree=8)
    statistics = assert_same_tokens(model, prompts(3), candidates, max_new_tokens=24, **SAMPLING[sampling])
    assert statistics.accepted >= statistics.drafts > 0, "the first draft token is the target's own"


@pytest.mark.parametrize(("kind", "modules"), [("opt", ("fc1", "fc2")), ("deepseek_v3", ("shared_experts.up_proj",))])
def test_layers_that_read_the_rows_one_after_the_other_same_tokens(
    kind: str, modules: tuple[str, ...], tmp_path: Path
) -> None:
    """Would catch: a refusal in the middle of a call, where a layer reads `[rows * tokens, hidden]`."""
    model = tiny_model(kind)
    candidates = UnoCandidates(write_lora(model, tmp_path, modules), k=4)
    assert assert_same_tokens(model, prompts(3), candidates, max_new_tokens=12).accepted > 0


def test_noise_of_which_a_token_gives_nan_leaves_other_rows_as_they_are(tmp_path: Path) -> None:
    """Would catch: NaN of noise in slots that are masked for shorter rows: a weight of 0 times NaN is NaN."""
    model = fresh_model("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight[20:40] = torch.nan
    call: dict[str, Any] = {"max_new_tokens": 12, "suppress_tokens": list(range(20, 40)), "do_sample": False}
    candidates = UnoCandidates(write_lora(model, tmp_path), k=5, policy=FixedDepth())
    inputs = {"input_ids": torch.tensor([[0, 0, 0, 5, 6], [7, 8, 9, 10, 11]])}
    inputs["attention_mask"] = torch.tensor([[0, 0, 0, 1, 1], [1, 1, 1, 1, 1]])
    assert assert_same_tokens(model, inputs, candidates, **call).drafted > 0


def test_beside_other_strategies_and_in_rejection_sampling(tmp_path: Path) -> None:
    """Would catch: noise left in the cache that another strategy of the same step reads; q of other rows."""
    model = llama()
    uno = UnoCandidates(write_lora(model, tmp_path), k=4)
    both = CombinedCandidates([uno, NgramCandidates(k=4), DraftModelCandidates(shared_draft(model), k=3)])
    assert_same_tokens(model, prompts(3), both, max_new_tokens=16)
    sampled = {"do_sample": True, "verification": "rejection", "max_new_tokens": 12}
    model.generate(**prompts(2), candidate_generator=uno, **sampled)
    assert uno.speculation is not None and uno.speculation.accepted >= uno.speculation.drafts


def test_generate_many_same_tokens(tmp_path: Path) -> None:
    """Would catch: a row whose noise is read on the cache that rows share."""
    model = llama()
    texts = [[5, 6, 7, 8], [9, 10], [11, 12, 13]]
    settings: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    candidates = UnoCandidates(write_lora(model, tmp_path), k=3)
    for completion in generate_many(model, texts, candidates, **settings):
        ids = torch.tensor([texts[completion.index]])
        assert completion.tokens == model.generate(ids, **settings)[0, ids.shape[1] :].tolist()


def test_other_thread_beside_it_computes_without_the_adapter(tmp_path: Path) -> None:
    """Would catch: hooks of one call that change what another call, or plain `generate`, computes."""
    model = llama()
    candidates = UnoCandidates(write_lora(model, tmp_path), k=4, policy=FixedDepth())
    expected = model.generate(**prompts(1), max_new_tokens=24, do_sample=False).tolist()
    found: list[Any] = []

    def run(strategy: Any) -> None:
        for _ in range(3):
            found.append(model.generate(**prompts(1), max_new_tokens=24, do_sample=False, **strategy).tolist())

    strategies: list[dict[str, Any]] = [{"candidate_generator": candidates}, {}]
    threads = [threading.Thread(target=run, args=(strategy,)) for strategy in strategies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 6


NAMES = ["one", "two", "__base__"]


def with_adapters_of_peft(model: Any) -> Any:
    torch.manual_seed(1)
    config = LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted = get_peft_model(model, config, adapter_name=NAMES[0])
    adapted.add_adapter(NAMES[1], config)
    return adapted.eval()


@pytest.mark.parametrize("rows", [1, 3])
def test_beside_an_adapter_of_each_row_same_tokens(rows: int, tmp_path: Path) -> None:
    """Would catch: a check of the layers with a single row, while PEFT has an adapter for each of three."""
    model = fresh_model("llama")
    candidates = UnoCandidates(write_lora(model, tmp_path, ("k_proj", "o_proj")), k=4)
    adapted = with_adapters_of_peft(model)
    arguments = {**prompts(rows), "max_new_tokens": 12, "do_sample": False, "adapter_names": NAMES[:rows]}
    plain = adapted.generate(**arguments)
    assert torch.equal(adapted.generate(**arguments, candidate_generator=candidates), plain)
    assert candidates.speculation is not None and candidates.speculation.accepted > 0


@pytest.mark.parametrize("is_first", [True, False])
def test_layers_beside_an_adapter_of_each_row_are_refused_with_the_true_reason(is_first: bool, tmp_path: Path) -> None:
    """Would catch: PEFT's error in a check of a single row, not the true reason; a refusal in the middle of a call."""
    adapted = with_adapters_of_peft(fresh_model("llama"))
    candidates = UnoCandidates(write_lora(adapted.get_base_model(), tmp_path, ("lora_A.one",)), k=4)
    call: dict[str, Any] = {**prompts(3), "max_new_tokens": 8, "candidate_generator": candidates}
    if not is_first:
        adapted.generate(**call)
    with pytest.raises(ValueError, match=r"lora_A\.one, which reads other tokens than those of a pass; use another"):
        adapted.generate(**call, adapter_names=NAMES)


def test_something_for_each_row_same_tokens(tmp_path: Path) -> None:
    """Would catch: a check with a single row, which a vector for each of three makes three tokens of a pass."""
    model = fresh_model("llama")
    candidates = UnoCandidates(write_lora(model, tmp_path), k=4)
    vectors = torch.randn(3, 1, 64, generator=torch.Generator().manual_seed(1))
    model.model.layers[0].register_forward_hook(lambda _, args, output: output + vectors)
    assert assert_same_tokens(model, prompts(3), candidates, max_new_tokens=12).accepted > 0


def test_refusal_in_training_mode_leaves_the_random_state(tmp_path: Path) -> None:
    """Would catch: dropout in the check of the layers, after which an attached model samples another text."""
    model = fresh_model("llama", attention_dropout=0.5).train()
    candidates = UnoCandidates(write_lora(model, tmp_path), k=4)
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="training mode"):
        model.generate(**prompts(1), max_new_tokens=4, candidate_generator=candidates)
    assert torch.equal(torch.get_rng_state(), before)


REFUSED: list[tuple[str, tuple[str, ...], dict[str, Any], str]] = [
    ("llama", ("q_proj",), {"use_dora": True}, "use_dora=True is not supported"),
    ("llama", ("q_proj",), {"r": 3}, "does not fit adapter_config.json and the target"),
    ("llama", ("conv",), {}, "adapts no linear layer of a LlamaForCausalLM"),
    ("qwen3_moe", ("gate_proj",), {}, "adapts no linear layer of a"),
    ("llama4_text", ("router",), {}, "router, a Llama4Router, which returns more than a linear layer does"),
    ("deepseek_v3", ("kv_b_proj",), {}, "kv_b_proj, which reads other tokens than those of a pass"),
    ("qwen3_next", ("q_proj",), {}, "would read the noise of UnoCandidates"),
]


@pytest.mark.parametrize(("kind", "modules", "changes", "reason"), REFUSED)
def test_adapter_or_target_that_cannot_draft_raises(
    kind: str, modules: tuple[str, ...], changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    """Would catch: an adapter of which a part is left out, and noise in recurrent states."""
    model = tiny_model(kind)
    candidates = UnoCandidates(write_lora(model, tmp_path, modules, **changes), k=4)
    with pytest.raises(ValueError, match=reason):
        model.generate(**prompts(1), max_new_tokens=4, candidate_generator=candidates)


def test_adapter_that_is_no_name_raises() -> None:
    """Would catch: a module or None that is taken for a path, and fails in the middle of a call."""
    with pytest.raises(TypeError, match="takes a folder or a Hub id of an adapter, got None"):
        UnoCandidates(None)  # type: ignore[arg-type]
