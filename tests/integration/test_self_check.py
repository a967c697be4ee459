"""A model that does not compute what plain generate computes is refused with the true reason, before anything runs."""

import copy
import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import MethodType
from typing import Any

import accelerate
import peft
import pytest
import torch
from transformers import HiggsAudioV2Config, HiggsAudioV2ForConditionalGeneration, LlamaForCausalLM

from hf_specgen import (
    DraftModelCandidates,
    FixedDepth,
    LayerSkipCandidates,
    MedusaCandidates,
    NgramCandidates,
    RecyclingCandidates,
    attached,
    compat,
)
from hf_specgen.targets.requirements import TargetRequirements
from tests.checkpoints.cases import build
from tests.checkpoints.inputs import text, with_media
from tests.checkpoints.table import CHECKPOINTS
from tests.fuzz.__main__ import run_safely
from tests.fuzz.cases import Case
from tests.fuzz.models import tiny_model
from tests.helpers import assert_same_tokens, fresh_model, perturbed_copy, prompts
from tests.helpers.medusa import random_heads
from tests.helpers.models import small_llama, stateful_model
from tests.helpers.processors import RecordingStreamer


def identical(model: Any, candidates: Any, batch: int = 2, new: int = 24) -> bool:
    ids = torch.randint(3, 99, (batch, 8), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    settings = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": new, "do_sample": False}
    return torch.equal(model.generate(**settings), model.generate(**settings, candidate_generator=candidates))


@pytest.mark.parametrize("kind", ["biogpt", "ctrl", "gpt_bigcode", "gpt2", "nanochat", "xglm", "gpt_neo", "opt"])
def test_layer_skip_where_positions_or_scales_come_before_the_layers(kind: str) -> None:
    """Would catch: positions or scales that are added to the kept states a second time; states of dropped rows."""
    assert identical(tiny_model(kind, layers=4), LayerSkipCandidates(2, k=2), batch=3, new=12)


@pytest.mark.parametrize("name", ["Gemma 4 E2B, E4B", "Gemma 4 31B"])
def test_layer_skip_in_the_class_for_images_and_text_same_tokens(name: str) -> None:
    """Would catch: inputs by layer that the outer class makes of the ids, missing where a part of the layers runs."""
    (checkpoint,) = [one for one in CHECKPOINTS if one.name == name]
    model = build(checkpoint)
    assert type(model).__name__ == "Gemma4ForConditionalGeneration"
    for inputs in (text(model, 3), with_media(checkpoint, model, 1)):
        strategy = LayerSkipCandidates(1, k=2, policy=FixedDepth())
        assert assert_same_tokens(model, inputs, strategy, max_new_tokens=12).drafted > 0


CANNOT_BE_DIVIDED = "cannot (draft with its own first layers|verify)|takes no position_ids"
VERIFIES_OTHERWISE = "cannot verify draft tokens|applies its sliding window in the cache"


class ReadsStates(NgramCandidates):
    """Needs hidden states as a draft head does."""

    def target_requirements(self, model: Any) -> TargetRequirements:
        return TargetRequirements(aux_hidden_state_layers=(0, 1, 2))


def with_shared_keys() -> Any:
    kinds = ["sliding_attention", "full_attention"] * 2
    return fresh_model("gemma4_text", num_hidden_layers=4, layer_types=kinds, num_kv_shared_layers=1)


def with_own_decoding() -> Any:
    sizes = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16}
    tokens = {"audio_token_id": 98, "audio_bos_token_id": 97, "audio_delay_token_id": 96, "pad_token_id": 0}
    books = {"codebook_size": 32, "audio_stream_bos_id": 30, "audio_stream_eos_id": 31, "eos_token_id": 95}
    config = HiggsAudioV2Config(**sizes, **tokens, **books, num_key_value_heads=2, intermediate_size=32)
    return HiggsAudioV2ForConditionalGeneration(config).eval()


def with_checkpointing() -> Any:
    model = llama().train()
    model.activation_checkpointing_enable()
    return model


REFUSED: dict[str, tuple[Callable[[], Any], Any, str]] = {
    "openai-gpt": (lambda: tiny_model("openai-gpt", layers=4), LayerSkipCandidates(2, k=2), CANNOT_BE_DIVIDED),
    # Several vectors a token: an index out of bounds, after which a process cannot use its GPU; an error of torch.cat.
    "gemma3n_text": (lambda: tiny_model("gemma3n_text"), LayerSkipCandidates(1, k=2), "pass on a state of shape"),
    "gemma3n_text, head": (lambda: tiny_model("gemma3n_text"), ReadsStates(k=2), r"not \[batch, positions, hidden\]"),
    # Other tokens than plain `generate` in padded batches, and behind the window.
    "git": (lambda: tiny_model("git", layers=4), NgramCandidates(k=3), VERIFIES_OTHERWISE),
    "moshi": (lambda: tiny_model("moshi", layers=4), NgramCandidates(k=3), VERIFIES_OTHERWISE),
    # Keys and values of a layer that is left out; an internal error.
    "shared keys": (with_shared_keys, LayerSkipCandidates(2, k=2), "set exit_layer to at most 1"),
    # Its own loop makes several codebooks in a step; an internal error, or no audio.
    "own decoding": (with_own_decoding, NgramCandidates(k=3), "decodes by a loop of its own"),
    # A sentence about prefix tuning, which has nothing to do with it.
    "gradient checkpointing": (with_checkpointing, NgramCandidates(k=3), "gradient checkpointing"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_model_that_would_give_other_tokens_is_refused(kind: str) -> None:
    """See the comments in `REFUSED`."""
    make, candidates, words = REFUSED[kind]
    with pytest.raises(ValueError, match=words):
        identical(make(), candidates)


def test_saved_beams_are_not_those_of_the_self_check() -> None:
    """Would catch: two rows in the equivalence test of one row, which a model that takes one row alone cannot have."""
    (checkpoint,) = [one for one in CHECKPOINTS if one.name == "DeepSeek-V4"]
    model = build(checkpoint)
    call = {"input_ids": torch.tensor([[5, 6, 7, 5, 6]]), "max_new_tokens": 6, "do_sample": False, "num_beams": 1}
    expected = model.generate(**call)
    model.generation_config.num_beams = 2
    assert torch.equal(model.generate(**call, candidate_generator=NgramCandidates(k=3)), expected)


@pytest.mark.parametrize("name", ["num_return_sequences", "stop_strings", "token_healing"])
def test_generation_config_of_the_model_is_not_that_of_the_self_check(name: str) -> None:
    """Would catch: a model refused because its config asks for sampling or a tokenizer, which the check has not."""
    model, settings = llama().eval(), {"num_return_sequences": 2, "stop_strings": ["a"], "token_healing": True}
    model.generation_config.do_sample = True
    setattr(model.generation_config, name, settings[name])
    call = {"top_k": 1, "max_new_tokens": 6, "stop_strings": None, "token_healing": False}
    assert_same_tokens(model, {"input_ids": torch.tensor([[5, 6, 7]])}, NgramCandidates(), **call)


def test_first_call_on_a_model_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Would catch: a warning of Transformers about arguments of the self-check, which the user did not give."""
    fresh_model("llama").generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, candidate_generator=NgramCandidates())
    assert not caplog.records


class CountsPasses(LlamaForCausalLM):
    """Counts the passes of all its objects."""

    passes = 0

    def forward(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        images: Any = None,
        **kwargs: Any,
    ) -> Any:
        CountsPasses.passes += 1
        return super().forward(input_ids, attention_mask, position_ids, **kwargs)


def test_another_object_of_the_same_weights_is_not_tried_again() -> None:
    """Would catch: an equivalence test for each copy of a model; a result used for other weights of the class."""
    model = CountsPasses(llama().config).eval()
    counts = []
    changed = copy.deepcopy(model)
    with torch.no_grad():
        changed.model.layers[1].mlp.up_proj.weight.mul_(0.5)
    for one in (model, copy.deepcopy(model), changed):
        CountsPasses.passes = 0
        strategy = NgramCandidates(k=3, policy=FixedDepth())
        one.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=1, do_sample=False, candidate_generator=strategy)
        counts.append(CountsPasses.passes)
    assert counts == [9, 1, 9]  # a class of a user is tried in a pass as long as a draft too


class WithImages(LlamaForCausalLM):
    """Reads an input beside the text, and with several rows of it computes something else for drafts."""

    def forward(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        images: Any = None,
        **kwargs: Any,
    ) -> Any:
        output = super().forward(input_ids, attention_mask, position_ids, **kwargs)
        is_draft = 1 < input_ids.shape[1] < kwargs[compat.CACHE].get_seq_length()
        if is_draft and images is not None and len(images) > 1:
            output.logits = output.logits.roll(1, dims=-1)
        return output

    def prepare_inputs_for_generation(self, *args: Any, images: Any = None, **kwargs: Any) -> Any:
        return {**super().prepare_inputs_for_generation(*args, **kwargs), "images": images}


@pytest.mark.parametrize("is_padded", [False, True])
def test_images_in_several_rows_are_tried_after_images_in_one(is_padded: bool) -> None:
    """Would catch: the result of images in one row used for several rows, of which it shows nothing."""
    model = WithImages(llama(initializer_range=0.2).config).eval()
    assert_same_tokens(model, {**prompts(1), "images": torch.zeros(1, 3)}, NgramCandidates(k=3), max_new_tokens=6)
    inputs = prompts(4)
    if not is_padded:
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    with pytest.raises(ValueError, match="cannot verify draft tokens with images"):
        model.generate(**inputs, images=torch.zeros(4, 3), max_new_tokens=6, candidate_generator=NgramCandidates(k=3))


def test_padded_images_are_tried_after_images_without_padding() -> None:
    """Would catch: the result of an unpadded row used for a padded one."""
    tried = CountsPasses(llama().config).eval()
    counts = []
    kinds = [(1, 0), (1, 2), (3, 0), (3, 2)]
    for rows, padding in [*kinds, *kinds]:
        ids = torch.randint(5, 90, (rows, 8))
        mask = torch.ones_like(ids)
        mask[0, :padding] = 0
        CountsPasses.passes = 0
        strategy = NgramCandidates(k=3, policy=FixedDepth())
        call = {"input_ids": ids, "attention_mask": mask, "images": torch.zeros(rows, 3), "max_new_tokens": 1}
        tried.generate(**call, do_sample=False, candidate_generator=strategy)
        counts.append(CountsPasses.passes)
    assert min(counts[:4]) > 1 and counts[4:] == [1] * 4, "each combination is tried once"


def test_autocast_is_rounded_as_half_precision_and_refuses_no_later_call() -> None:
    """Would catch: rounding to bfloat16 taken for an error of a float32 model, and that result kept for later calls."""
    model = stateful_model("falcon_h1")
    arguments = {"max_new_tokens": 4, "candidate_generator": NgramCandidates()}
    for is_enabled in (True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_enabled):
            assert model.generate(torch.tensor([[5, 6, 7]]), **arguments).shape == (1, 7)
    assert_same_tokens(model, {"input_ids": torch.tensor([[5, 6, 7]])}, NgramCandidates(), max_new_tokens=12)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_not_finite_for_a_while_refuse_no_later_call(value: float) -> None:
    """Would catch: a model that is refused for ever because one call had faulty logits."""
    model = llama(initializer_range=0.2).eval()
    handle = model.lm_head.register_forward_hook(lambda *given: torch.full_like(given[2], value))
    with pytest.raises(RuntimeError, match="probability tensor"):
        model.generate(torch.tensor([[5, 6, 7]] * 2), do_sample=True, candidate_generator=NgramCandidates(k=3))
    handle.remove()
    assert identical(model, NgramCandidates(k=3))


def test_layers_that_cannot_be_left_out_are_refused_where_logits_are_not_finite() -> None:
    """Would catch: an error of the model in place of a refusal, since such logits cannot be compared."""
    assert run_safely(Case(architecture="hy_v4", strategy="skip_adapter", broken_logits="nan")).status == "refused"


def test_model_whose_text_of_the_check_is_not_finite_is_checked_on_the_prompt_of_the_call() -> None:
    """Would catch: rows of a model that reads columns for positions, unchecked as the embeddings of others are inf."""
    case = Case(seed=266207, architecture="inkling_text", lengths=(8, 6), intervention="inf_tokens", changed_first=True)
    assert run_safely(case).status == "refused"
    outcome = run_safely(replace(case, architecture="llama"))
    assert outcome.status == "same" and outcome.accepted


def llama(**settings: Any) -> Any:
    return fresh_model("llama", **{"num_hidden_layers": 3, **settings})


def test_training_mode_with_dropout_is_refused() -> None:
    """Would catch: tokens and random state that differ from plain generate because dropout is drawn twice."""
    model, state = llama(attention_dropout=0.1).train(), torch.get_rng_state()
    with pytest.raises(ValueError, match=r"its .* draws random numbers, as dropout.*; call model.eval"):
        model.generate(**prompts(1), max_new_tokens=4, candidate_generator=NgramCandidates(k=3))
    assert torch.equal(state, torch.get_rng_state()), "an attached model continues plainly"
    assert identical(llama().train(), NgramCandidates(k=3))
    model = fresh_model("gptj").train()  # has dropout modules, here of probability 0
    assert identical(model, NgramCandidates(k=3))
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.2
    with pytest.raises(ValueError, match="draws random numbers"):  # not what was found before the change
        identical(model, NgramCandidates(k=3))


@pytest.mark.parametrize("strategy", [NgramCandidates(), LayerSkipCandidates(1)], ids=["ngram", "skip"])
def test_part_in_training_mode_is_refused_with_the_remedy(strategy: Any) -> None:
    """Would catch: dropout of a new adapter, which `model.training` does not show, or a remedy that changes nothing."""
    model = llama()
    model.model.layers[0].mlp.act_fn = torch.nn.Sequential(model.model.layers[0].mlp.act_fn, torch.nn.Dropout(0.5))
    assert not model.training
    with pytest.raises(ValueError, match=r"in training mode its .*; call model.eval\(\) before generate\(\)"):
        model.generate(**prompts(1), max_new_tokens=4, candidate_generator=strategy)
    model.eval().generate(**prompts(1), max_new_tokens=4, candidate_generator=strategy)


def test_training_mode_that_draws_random_numbers_is_refused() -> None:
    """Would catch: a router of experts that draws noise in training mode, so that tokens differ."""
    model = llama()
    noise = lambda module, args, output: output + torch.rand_like(output) * 1e-9 if module.training else output  # noqa: E731
    model.model.layers[0].mlp.register_forward_hook(noise)
    assert identical(model.eval(), NgramCandidates(k=3))
    with pytest.raises(ValueError, match="draws random numbers"):
        identical(model.train(), NgramCandidates(k=3))


def test_layer_skip_beside_other_threads_leaves_the_model_as_it_is() -> None:
    """Would catch: layers that are replaced in the model itself, which other threads run, save or copy meanwhile."""
    model = llama(initializer_range=0.2).eval()
    settings = {"input_ids": torch.tensor([[5, 6, 7, 8]]), "max_new_tokens": 40, "do_sample": False}
    expected = model.generate(**settings)
    outcomes: list[str] = []

    def work(candidates: Any) -> None:
        for _ in range(4):
            output = model.generate(**settings, candidate_generator=candidates)
            outcomes.append("right" if torch.equal(output, expected) else "wrong")

    layers = [*model.model.layers]

    def look(has_ended: threading.Event) -> None:
        while not has_ended.wait(1e-4):
            outcomes.append("right" if [*model.model.layers] == layers else "replaced")

    strategies = [LayerSkipCandidates(2, k=3), LayerSkipCandidates(2, k=3), NgramCandidates(k=3), None]
    with ThreadPoolExecutor(5) as threads:
        has_ended = threading.Event()
        looking = threads.submit(look, has_ended)
        try:
            list(threads.map(work, strategies))
        finally:
            has_ended.set()
        looking.result()
    assert set(outcomes) == {"right"}


@pytest.mark.parametrize("kind", ["method", "accelerate", "function", "mixed precision"])
def test_layer_skip_with_a_replaced_forward_same_tokens_or_refused(kind: str) -> None:
    """Would catch: a `forward` bound to the whole model, whose layers all run where the last ones are left out."""
    model = llama(initializer_range=0.2).eval()
    forward = model.forward
    if kind == "method":
        whole = type(model).forward
        replaced = functools.wraps(whole)(lambda self, *given, **named: whole(self, *given, **named))
        model.forward = MethodType(replaced, model)
    elif kind == "accelerate":
        accelerate.hooks.add_hook_to_module(model, accelerate.hooks.ModelHook())
        accelerate.hooks.add_hook_to_module(model.model, accelerate.hooks.ModelHook())
    elif kind == "mixed precision":
        replaced = accelerate.utils.convert_outputs_to_fp32(type(model).forward)
        model.forward = MethodType(replaced, model)
    else:
        model.forward = functools.wraps(forward)(lambda *given, **named: forward(*given, **named))
    refused = pytest.raises(ValueError, match="forward of this LlamaForCausalLM was replaced by")
    with refused if kind == "function" else nullcontext():
        assert identical(model, LayerSkipCandidates(2, k=3))


def test_layer_skip_adapter_of_another_layer_is_refused(tmp_path: Any) -> None:
    """Would catch: an adapter that runs behind another layer than it was trained for."""
    (tmp_path / "exit_config.json").write_text('{"exit_layer": 3}')
    with pytest.raises(ValueError, match="trained for exit_layer=3, not 2"):
        identical(llama().eval(), LayerSkipCandidates(2, k=2, adapter=str(tmp_path)))


# Models whose weights are offloaded, compiled or wrapped: the tokens of plain `generate`, or the true reason


def offloaded(kind: str, folder: Path) -> Any:
    """A model whose weights are moved to where they are used, layer by layer."""
    model = fresh_model("llama")
    if kind == "cpu":
        return accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    if kind == "disk":
        accelerate.disk_offload(model, offload_dir=str(folder), execution_device=torch.device("cpu"))
        return model
    on_device = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    layers = {f"model.layers.{index}": "cpu" if index < 1 else "disk" for index in range(2)}
    return accelerate.dispatch_model(model, {**on_device, **layers}, main_device="cpu", offload_dir=str(folder))


STRATEGIES: dict[str, Callable[[], Any]] = {
    "n-grams": lambda: NgramCandidates(k=3, tree=6),
    "draft": lambda: DraftModelCandidates(fresh_model("llama"), k=3),
    "layer skip": lambda: LayerSkipCandidates(1, k=3),
    "Medusa": lambda: MedusaCandidates(random_heads(fresh_model("llama")), policy=FixedDepth()),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_target_of_compiled_layers_same_tokens(strategy: str) -> None:
    """Would catch: a layer or an output matrix inside of a wrapper, which has no attributes of a module of its own."""
    model = fresh_model("llama")  # as `compile_regions` of accelerate returns it
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = torch.compile(layer, backend="eager")
    model.lm_head = torch.compile(model.lm_head, backend="eager")
    assert_same_tokens(model, prompts(2), STRATEGIES[strategy](), max_new_tokens=6)


@pytest.mark.parametrize("strategy", ["n-grams", "draft", "layer skip", "recycling"])
def test_target_with_several_output_modules_same_tokens(strategy: str) -> None:
    """Would catch: the size of the vocabulary read from the one matrix that such a target does not have."""
    model = fresh_model("llama")
    model.lm_head = torch.nn.Sequential(model.lm_head, torch.nn.Tanh())
    candidates = RecyclingCandidates() if strategy == "recycling" else STRATEGIES[strategy]()
    assert_same_tokens(model, prompts(2), candidates, max_new_tokens=6)


@pytest.mark.parametrize("strategy", ["auto", NgramCandidates(k=3), RecyclingCandidates()], ids=str)
def test_prompt_of_tokens_that_the_target_cannot_choose_same_tokens(strategy: Any) -> None:
    """Would catch: drafts of such tokens, or a row looked up for them in a table of those that can be chosen."""
    model, inputs = fresh_model("llama"), prompts(2)
    model.lm_head = torch.nn.Linear(64, 60, bias=False)
    inputs["input_ids"][:, -1] = 85
    assert_same_tokens(model, inputs, strategy, max_new_tokens=12)


@pytest.mark.parametrize("strategy", ["auto", "n-grams", "draft", "history"])
def test_prompt_with_negative_ids_beside_embeddings_same_tokens(strategy: str) -> None:
    """Placeholders of images, as in LLaVA's own code: would catch: -200 as a draft token, or looked up in a table."""
    model = fresh_model("llama")
    ids = torch.tensor([[1, -200, -200, -200, 5, 6, 5, 6]])
    with torch.no_grad():
        embeddings = model.get_input_embeddings()(ids.clamp(min=0))
    call = {"input_ids": ids, "inputs_embeds": embeddings, "max_new_tokens": 12, "do_sample": False}
    drafts: Any = {"auto": "auto", "n-grams": NgramCandidates(k=4), "history": NgramCandidates(k=4)}
    candidates = drafts.get(strategy) or DraftModelCandidates(perturbed_copy(model), k=3)
    more = {"history": True} if strategy == "history" else {}
    expected = model.generate(**call)
    for _ in range(2):
        assert torch.equal(model.generate(**call, candidate_generator=candidates, **more), expected)


@pytest.mark.parametrize("strategy", ["auto", "n-grams", "draft", "layer skip"])
def test_target_with_more_outputs_than_embeddings_is_refused_and_works_once_resized(strategy: str) -> None:
    """Would catch: an IndexError in the middle of the text, from a draft token without an embedding."""
    model, inputs = fresh_model("llama"), prompts(2)
    model.lm_head = torch.nn.Linear(64, 120, bias=False)
    torch.nn.init.zeros_(model.lm_head.weight[99:])
    candidates = "auto" if strategy == "auto" else STRATEGIES[strategy]()
    with pytest.raises(ValueError, match=r"120 outputs and embeddings of 99 tokens.*resize_token_embeddings\(120\)"):
        model.generate(**inputs, max_new_tokens=12, candidate_generator=candidates)
    if strategy != "draft":  # which has the old vocabulary
        model.resize_token_embeddings(120)
        assert_same_tokens(model, inputs, candidates, max_new_tokens=12)


def test_target_with_fewer_outputs_than_its_config_says_is_refused_before_the_first_token() -> None:
    """Would catch: a refusal in the middle of the text, once the first such token is drafted."""
    model, inputs = fresh_model("llama"), {"input_ids": torch.tensor([[5, 95, 96, 97] * 5 + [5]])}
    model.lm_head = torch.nn.Sequential(torch.nn.Linear(64, 60, bias=False))
    words = r"60 outputs, but its config a vocab_size of 99; set model.config.vocab_size = 60"
    streamer = RecordingStreamer()
    with pytest.raises(ValueError, match=words):
        model.generate(**inputs, max_new_tokens=12, candidate_generator=NgramCandidates(k=3), streamer=streamer)
    assert len(streamer.chunks) <= 1, "tokens after the prompt"
    with attached(model, NgramCandidates(k=3)), pytest.warns(UserWarning, match=words):
        output = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert torch.equal(output, model.generate(**inputs, max_new_tokens=12, do_sample=False))
    model.config.vocab_size = 60
    assert_same_tokens(model, inputs, NgramCandidates(k=3), max_new_tokens=12)


@pytest.mark.parametrize("kind", ["cpu", "disk", "device_map"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_offloaded_target_same_tokens_or_refused(kind: str, strategy: str, tmp_path: Path) -> None:
    """Would catch: inputs and masks made on the "meta" device, heads that read weights which are not there."""
    is_refused = strategy == "Medusa" and kind != "device_map"
    with pytest.raises(ValueError, match="output matrix offloaded") if is_refused else nullcontext():
        assert_same_tokens(offloaded(kind, tmp_path), prompts(2), STRATEGIES[strategy](), max_new_tokens=6)


def test_offloaded_draft_model_same_tokens() -> None:
    """Would catch: a draft whose inputs are made on the "meta" device."""
    candidates = DraftModelCandidates(offloaded("cpu", Path()), k=3)
    assert assert_same_tokens(fresh_model("llama"), prompts(2), candidates, max_new_tokens=8).accepted > 0


@pytest.mark.parametrize("strategy", ["n-grams", "Medusa"])
def test_compiled_target_same_tokens(strategy: str) -> None:
    """Would catch: hooks that a compiled forward cannot trace, and a compilation in every step."""
    model, candidates = fresh_model("llama"), STRATEGIES[strategy]()
    model.compile(backend=lambda graph, inputs: pytest.fail("a pass was compiled"))
    plain = fresh_model("llama").generate(**prompts(2), max_new_tokens=8)
    assert torch.equal(plain, model.generate(**prompts(2), max_new_tokens=8, candidate_generator=candidates))


def with_lora(model: Any) -> Any:
    torch.manual_seed(1)
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config).eval()


def test_draft_model_with_lora_drafts_as_its_wrapper_does() -> None:
    """Would catch: a refusal for the wrapper's signature, or a draft without its adapter."""
    model = fresh_model("llama")
    draft = with_lora(perturbed_copy(model, noise=0.1))
    statistics = assert_same_tokens(model, prompts(2), DraftModelCandidates(draft, k=3), max_new_tokens=8)
    merged = DraftModelCandidates(draft.merge_and_unload(), k=3)
    assert assert_same_tokens(model, prompts(2), merged, max_new_tokens=8).accepted == statistics.accepted


def with_prefix() -> Any:
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    return peft.get_peft_model(fresh_model("llama"), config).eval()


def test_prefix_tuning_is_refused() -> None:
    """Would catch: a crash inside the loop, or a draft that silently lacks its prefix."""
    with pytest.raises(ValueError, match="prefix or prompt tuning"):
        with_prefix().generate(**prompts(1), max_new_tokens=4, candidate_generator=NgramCandidates(k=3))
    with pytest.raises(ValueError, match="PREFIX_TUNING"):
        DraftModelCandidates(with_prefix(), k=3)


def test_vocabulary_of_one_token_same_tokens() -> None:
    """Would catch: an equivalence test with token 1, or a standard deviation of one logit, which is NaN."""
    model = small_llama(1, seed=0)
    for candidates in (NgramCandidates(k=3), DraftModelCandidates(small_llama(1, seed=1), k=3, tree=4)):
        inputs = {"input_ids": torch.zeros(2, 4, dtype=torch.long), "attention_mask": torch.ones(2, 4).long()}
        statistics = assert_same_tokens(model, inputs, candidates, max_new_tokens=12)
        assert statistics.accepted == statistics.drafted > 0


def test_draft_that_the_check_refuses_is_not_taken_for_the_target() -> None:
    """Would catch: advice about the target where the draft cannot be used, as with some kinds of quantisation."""
    draft = perturbed_copy(fresh_model("llama"))
    draft.lm_head.register_forward_hook(lambda module, inputs, output: output * torch.rand(99) * output.shape[1])
    with pytest.raises(ValueError, match=r"the draft model, not the target: .*load it without quantisation"):
        fresh_model("llama").generate(**prompts(1), max_new_tokens=4, candidate_generator=DraftModelCandidates(draft))


class OneTokenAPass(LlamaForCausalLM):
    """Takes one token a pass after the prompt, as ProphetNet does."""

    def forward(self, input_ids: Any = None, position_ids: Any = None, **kwargs: Any) -> Any:
        if input_ids.shape[1] > 1 and kwargs[compat.CACHE].get_seq_length():
            raise NotImplementedError("one token a pass")
        return super().forward(input_ids=input_ids, position_ids=position_ids, **kwargs)


class WithoutCache(LlamaForCausalLM):
    """Writes nothing into the cache, as OpenAI GPT does."""

    def forward(self, position_ids: Any = None, **kwargs: Any) -> Any:
        return super().forward(position_ids=position_ids, **{**kwargs, "use_cache": False, compat.CACHE: None})


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (OneTokenAPass, r"its forward pass takes no draft tokens \(NotImplementedError: one token a pass\)"),
        (WithoutCache, "the model writes no keys and values of its text into the cache"),
    ],
)
def test_reason_names_what_the_model_does(kind: Any, reason: str) -> None:
    """Would catch: a refusal whose only reason is that a pass of the self-check failed."""
    model = kind(fresh_model("llama").config).eval()
    with pytest.raises(ValueError, match=f"cannot verify draft tokens: {reason}"):
        model.generate(**prompts(1), max_new_tokens=8, candidate_generator=NgramCandidates())


class MarksLongPasses(LlamaForCausalLM):
    """Computes as a Llama until it has had a pass over several tokens after the prompt: its next pass differs."""

    has_had_one = False

    def forward(self, input_ids: Any = None, position_ids: Any = None, **kwargs: Any) -> Any:
        is_prompt = not kwargs[compat.CACHE].get_seq_length()
        output = super().forward(input_ids=input_ids, position_ids=position_ids, **kwargs)
        if self.has_had_one and not is_prompt:
            output.logits = output.logits.roll(1, dims=-1)
        self.has_had_one = input_ids.shape[1] > 1 and not is_prompt
        return output


def test_model_that_differs_after_a_rollback_alone_is_refused() -> None:
    """Would catch: a check that ends with the pass over the draft."""
    model = MarksLongPasses(fresh_model("llama").config).eval()
    with pytest.raises(ValueError, match="in the self-check its logits differed"):
        model.generate(**prompts(1), max_new_tokens=8, candidate_generator=NgramCandidates())
