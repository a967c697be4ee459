"""Models that users change: hooks, adapters and arguments by row or step, tokens without finite states, capacities.

The tokens are those of plain `generate`, or the call is refused with the true reason.
"""

import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import peft
import pytest
import torch
from transformers import LlamaForCausalLM
from transformers.generation.streamers import BaseStreamer

from hf_specgen import NgramCandidates, RecyclingCandidates, attach, attached, generate_many
from tests.fuzz.scripted import Nodes, Scripted
from tests.helpers import SAMPLING, VOCAB, Oracle, assert_same_tokens, fresh_model, plain_and_speculative, prompts
from tests.helpers.encoder_decoder import encoder_inputs, fresh_encoder_decoder

BAD = 77
NAMES = ["one", "two", "__base__"]
NEW = 16


class WithBadToken(Scripted):
    """Drafts two tokens of plain `generate`, a sibling of the first one and a child of the second that are `BAD`."""

    def __init__(self, answers: torch.Tensor):
        super().__init__(lambda: self._propose, 4, None)
        self.answers = answers.tolist()

    def _propose(self, row: int, generated: list[int], depth: int) -> Nodes:
        answer = self.answers[row][len(generated) :][: min(2, depth)]
        return ([BAD, *answer, BAD], (-1, -1, 1, 2)) if depth > 2 and len(generated) % 3 != row % 3 else ([], ())


def with_bad_token(value: float, kernel: str) -> Any:
    model = fresh_model("llama")
    model.set_attn_implementation(kernel)
    with torch.no_grad():
        model.get_input_embeddings().weight[BAD] = value
    return model


@pytest.mark.parametrize("settings", [*SAMPLING.values(), {"repetition_penalty": 1.1}], ids=[*SAMPLING, "by prefix"])
@pytest.mark.parametrize(("value", "kernel"), [(float("nan"), "sdpa"), (float("inf"), "eager")])
def test_draft_token_without_finite_states_same_tokens(value: float, kernel: str, settings: dict[str, Any]) -> None:
    """Would catch: NaN scores, as a rejected token has the weight 0, and slots that it leaves to shorter rows."""
    model, arguments = with_bad_token(value, kernel), {"max_new_tokens": NEW, "suppress_tokens": [BAD], **settings}
    answers, _ = plain_and_speculative(model, prompts(3), NgramCandidates(k=1), **arguments)
    statistics = assert_same_tokens(model, prompts(3), WithBadToken(answers[:, -NEW:]), **arguments)
    assert statistics.drafted > statistics.accepted


def test_draft_token_without_finite_states_of_a_common_pass_same_tokens() -> None:
    """Would catch: a common pass of `generate_many` that is not repeated for all of its rows."""
    model = with_bad_token(float("nan"), "sdpa")
    with torch.no_grad():  # so that it is one of the most likely tokens before it is suppressed
        model.lm_head.weight[BAD] *= 3
    arguments = {"max_new_tokens": NEW, "suppress_tokens": [BAD], "do_sample": False}
    texts = [[5, 7, 5, 6, 5, 7, 5], [9, 8, 9, 4], [3, 3, 6, 3]]
    for one in generate_many(model, texts, RecyclingCandidates(k=4, tree=16), **arguments):
        assert one.tokens == model.generate(torch.tensor([texts[one.index]]), **arguments)[0, -NEW:].tolist()


def with_adapters(model: Any = None) -> Any:
    torch.manual_seed(1)
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(model or fresh_model("llama"), config, adapter_name="one")
    model.add_adapter("two", config)
    return model.eval()


def end_of_first_row(model: Any, **arguments: Any) -> int:
    """A token that ends the first row long before the others."""
    return int(model.generate(**prompts(3), max_new_tokens=NEW, do_sample=False, **arguments)[0, -NEW + 3])


def hooks(model: Any) -> int:
    return sum(len(module._forward_pre_hooks) for module in model.modules())


@pytest.mark.parametrize("sampling", [{"do_sample": False}, {"do_sample": True}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("is_attached", [False, True], ids=["keyword", "attached"])
def test_adapter_of_each_row_same_tokens(is_attached: bool, sampling: dict[str, Any]) -> None:
    """Would catch: rows that leave the batch, or an equivalence test of two rows, while three have an adapter each."""
    model, arguments = with_adapters(), {**prompts(3), "max_new_tokens": NEW, "adapter_names": NAMES, **sampling}
    arguments["eos_token_id"] = end_of_first_row(model, adapter_names=NAMES)
    torch.manual_seed(0)
    plain = model.generate(**arguments)
    torch.manual_seed(0)
    candidates = None if is_attached else {"candidate_generator": NgramCandidates(k=3)}
    attach(model, NgramCandidates(k=3), strict=True) if is_attached else None
    assert torch.equal(model.generate(**arguments, **(candidates or {})), plain)


def test_adapter_of_a_padded_row_same_tokens() -> None:
    """Would catch: an equivalence test of two rows for a padded prompt, while PEFT has an adapter for a single row."""
    model = with_adapters()
    inputs = {"input_ids": torch.tensor([[0, 0, 5, 6, 7]]), "attention_mask": torch.tensor([[0, 0, 1, 1, 1]])}
    arguments = {**inputs, "max_new_tokens": NEW, "adapter_names": ["two"], "do_sample": False}
    plain = model.generate(**arguments)
    assert torch.equal(model.generate(**arguments, candidate_generator=NgramCandidates(k=3)), plain)


def test_refusal_beside_an_adapter_of_each_row_has_the_true_reason() -> None:
    """Would catch: PEFT's error in an equivalence test of a single row in place of what is wrong with the call."""
    model = with_adapters()
    layer = model.get_base_model().model.layers[0].mlp
    layer.register_forward_hook(lambda _, args, output: output + VECTORS[0] if output.shape[1] == 1 else output)
    with pytest.raises(ValueError, match=r"rows of different lengths get other scores .*its logits differed"):
        model.generate(**prompts(3), adapter_names=NAMES, candidate_generator=NgramCandidates(k=3))


@pytest.mark.parametrize("rows, names", [(3, NAMES[:2]), (1, NAMES[:2]), (2, NAMES)], ids=["few", "single", "many"])
def test_wrong_number_of_adapters_is_named(rows: int, names: list[str]) -> None:
    """Would catch: a failed equivalence test as the reason, with the remedy "give one prompt at a time"."""
    model = with_adapters()
    with pytest.raises(ValueError, match=rf"^adapter_names has length {len(names)}, but the batch {rows}; give one"):
        model.generate(**prompts(rows), adapter_names=names, candidate_generator=NgramCandidates())
    assert hooks(model) == 0


@pytest.mark.parametrize(
    ("needs_rows", "remedy"), [(True, "give one prompt at a time"), (False, "use plain generate(")]
)
def test_failed_equivalence_test_of_rows_is_no_difference_of_scores(needs_rows: bool, remedy: str) -> None:
    """Would catch: a comparison of scores that was not made; one prompt as a remedy, with which it fails too."""

    def fail(_: Any, __: Any, output: torch.Tensor) -> None:
        if output.shape[1] > 1 and (len(output) > 1 or not needs_rows):
            raise RuntimeError("out of memory")

    model = fresh_model("llama")
    model.model.layers[0].mlp.register_forward_hook(fail)
    words = f"with rows of different lengths a pass of the self-check failed (RuntimeError: out of memory); {remedy}"
    with pytest.raises(ValueError, match=re.escape(words)):
        model.generate(**prompts(2), candidate_generator=NgramCandidates())


def test_refusal_leaves_no_hooks_of_adapters() -> None:
    """Would catch: hooks that PEFT leaves after an exception, so that the next plain call raises."""
    model = with_adapters()
    for arguments in ({"num_beams": 2}, {"verification": "any"}):
        with pytest.raises(ValueError, match=min(arguments)):
            model.generate(**prompts(3), adapter_names=NAMES, candidate_generator=NgramCandidates(), **arguments)
        assert hooks(model) == 0
    model.generate(**prompts(2), max_new_tokens=1)


@pytest.mark.parametrize("is_attached", [False, True], ids=["keyword", "attached"])
def test_ctrl_c_leaves_no_hooks_of_adapters(is_attached: bool) -> None:
    """Would catch: hooks that PEFT leaves after Ctrl-C, which a program that goes on has in its next plain call."""
    model, interrupted = with_adapters(), InterruptedStreamer()
    more = {} if is_attached else {"candidate_generator": NgramCandidates(k=3)}
    with attached(model, NgramCandidates(k=3)) if is_attached else nullcontext(), pytest.raises(KeyboardInterrupt):
        model.generate(**prompts(3), adapter_names=NAMES, max_new_tokens=NEW, streamer=interrupted, **more)
    assert hooks(model) == 0


class InterruptedStreamer(BaseStreamer):
    """Ctrl-C at the second token."""

    puts = 0

    def put(self, value: torch.Tensor) -> None:
        self.puts += 1
        if self.puts == 3:
            raise KeyboardInterrupt

    def end(self) -> None:
        raise AssertionError


@pytest.mark.parametrize("text", [[5, 9, 23, 40, 41, 42, 5], [5, 9, 23, 5, 9]], ids=["invoked", "not invoked"])
def test_activated_lora_is_refused(text: list[int]) -> None:
    """Would catch: an adapter that acts on the last tokens of each pass, in the first call and in later ones."""
    base, arguments = fresh_model("llama"), {"max_new_tokens": 4, "candidate_generator": NgramCandidates(k=3)}
    base.generate(torch.tensor([text]), **arguments)
    config = peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", alora_invocation_tokens=[40, 41, 42])
    model = peft.get_peft_model(base, config).eval()
    with pytest.raises(ValueError, match="activated LoRA"):
        model.generate(input_ids=torch.tensor([text]), **arguments)
    with model.disable_adapter():
        model.get_base_model().generate(torch.tensor([text]), **arguments)


VECTORS = torch.randn(3, 1, 64, generator=torch.Generator().manual_seed(1))


def by_row(states: torch.Tensor) -> torch.Tensor:
    return states + VECTORS[: len(states)]


class ByRow(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return by_row(self.inner(states))


def with_hook(model: Any) -> None:
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: by_row(output))


def with_pre_hook(model: Any) -> None:
    model.model.layers[1].mlp.register_forward_pre_hook(lambda module, args: (by_row(args[0]),))


def with_replaced_forward(model: Any) -> None:
    forward = model.model.norm.forward
    model.model.norm.forward = lambda states: by_row(forward(states))


def with_module(model: Any) -> None:
    model.model.layers[0].mlp = ByRow(model.model.layers[0].mlp)


@pytest.mark.parametrize("change", [with_hook, with_pre_hook, with_replaced_forward, with_module])
def test_something_for_each_row_same_tokens(change: Callable[[Any], None]) -> None:
    """Would catch: rows that move up when another one has ended, or is processed together with other prompts."""
    model = fresh_model("llama")
    change(model)
    arguments = {"max_new_tokens": NEW, "eos_token_id": end_of_first_row(model)}
    answers, _ = plain_and_speculative(model, prompts(3), NgramCandidates(k=1), **arguments)
    assert_same_tokens(model, prompts(3), Oracle(answers[:, -NEW:], accuracy=0.6), **arguments)
    texts = [[5, 9, 23, 5, 9], [7, 8, 7, 8]]
    for one in generate_many(model, texts, NgramCandidates(k=3), max_new_tokens=6, do_sample=False):
        plain = model.generate(torch.tensor([texts[one.index]]), max_new_tokens=6, do_sample=False)
        assert one.tokens == plain[0, -6:].tolist()


class Changing(LlamaForCausalLM):
    """Takes a number, a list for each row, and the name of a mode."""

    def forward(  # type: ignore[override]
        self, input_ids=None, attention_mask=None, position_ids=None, cache=None, step=0, biases=None, mode="", **others
    ):
        named = {"attention_mask": attention_mask, "position_ids": position_ids, "cache": cache}
        output = super().forward(input_ids=input_ids, **named, **others)
        output.logits[..., step % VOCAB] += 5
        if biases is not None:
            output.logits += torch.tensor(biases)[:, None, None] * torch.linspace(0, 1, VOCAB)
        output.logits[..., 3::5] += len(mode)
        return output


class Counts(Changing):
    def _update_model_kwargs_for_generation(self, outputs: Any, model_kwargs: Any, **others: Any) -> Any:
        updated = super()._update_model_kwargs_for_generation(outputs, model_kwargs, **others)
        return {**updated, "step": updated.get("step", 0) + 1}


class Prepares(Changing):
    """Adds an argument, by default the same in each step."""

    def added(self, tokens: int) -> dict[str, Any]:
        return {"mode": "any"}

    def prepare_inputs_for_generation(self, input_ids: Any, attention_mask: Any = None, **others: Any) -> Any:
        inputs = super().prepare_inputs_for_generation(input_ids, attention_mask=attention_mask, **others)
        return {**inputs, **self.added(input_ids.shape[1])}


class PreparesSteps(Prepares):
    def added(self, tokens: int) -> dict[str, Any]:
        return {"step": tokens}


class PreparesLater(Prepares):
    def added(self, tokens: int) -> dict[str, Any]:
        return {"mode": "late"} if tokens > 20 else {}


class Samples(Changing):
    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        return super()._sample(*args, **kwargs)


def changing(kind: Any) -> Any:
    model = fresh_model("llama")
    model.__class__ = kind
    return model


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        (Counts, "_update_model_kwargs_for_generation"),
        (PreparesSteps, "prepare_inputs_for_generation"),
        (PreparesLater, "prepare_inputs_for_generation"),
        (Samples, "_sample"),
    ],
)
def test_method_that_may_change_arguments_by_step_is_refused(kind: Any, method: str) -> None:
    """Would catch: a number that a user's class counts up, which all passes of a call then receive unchanged."""
    with pytest.raises(ValueError, match=f"the class {kind.__name__} has a {method} of its own"):
        changing(kind).generate(**prompts(1), max_new_tokens=4, candidate_generator=NgramCandidates())


@pytest.mark.parametrize("given", [{}, {"step": 3}, {"mode": "late"}, {"biases": [1.0, 5.0, 9.0]}], ids=str)
def test_constant_arguments_of_users_class_same_tokens(given: dict[str, Any]) -> None:
    """Would catch: a refusal of harmless methods, and a list with a value for each row when rows leave."""
    model = changing(Prepares if not given else Changing)
    arguments = {"max_new_tokens": NEW, "eos_token_id": end_of_first_row(model, **given), **given}
    assert_same_tokens(model, prompts(3), NgramCandidates(k=3), **arguments)


CAPACITIES = [
    ("switch_transformers", {"expert_capacity": 4}, False),
    ("switch_transformers", {"expert_capacity": 16}, True),
    ("nllb-moe", {"moe_eval_capacity_token_fraction": 0.5}, False),
    ("nllb-moe", {"moe_eval_capacity_token_fraction": -1.0, "expert_capacity": 2}, False),
]


@pytest.mark.parametrize(("kind", "settings", "is_possible"), CAPACITIES)
def test_capacity_of_experts_is_kept_or_refused(kind: str, settings: dict[str, Any], is_possible: bool) -> None:
    """Would catch: draft tokens that experts drop, since there are more of them in a pass than in plain decoding."""
    model = fresh_encoder_decoder(kind, **settings)
    inputs, arguments = encoder_inputs(kind, 2), {"max_new_tokens": 40, "num_beams": 1}
    if is_possible:
        answers = model.generate(**inputs, **arguments)[:, -40:]
        assert_same_tokens(model, inputs, Oracle(answers, accuracy=0.97, k=30), **arguments)
        return
    with pytest.raises(ValueError, match=re.escape("experts that drop tokens where a pass has more than")):
        model.generate(**inputs, **arguments, candidate_generator=NgramCandidates())


ROUTED = {"output_router_logits": True, "num_local_experts": 4}


@pytest.mark.parametrize("batch", [1, 2])
def test_router_loss_of_the_config_same_tokens(batch: int) -> None:
    """Would catch: a loss that reads the mask of a pass, for which such models were refused with sizes of tensors."""
    model = fresh_model("mixtral", **ROUTED)
    unpadded = {"input_ids": prompts(batch)["input_ids"].clamp(min=1)}
    assert_same_tokens(model, unpadded, NgramCandidates(k=3), max_new_tokens=8)
    assert_same_tokens(model, prompts(2), NgramCandidates(k=3), max_new_tokens=8, output_router_logits=False)
    with pytest.raises(ValueError, match="output_router_logits=True fails for padded prompts"):
        model.generate(**prompts(2), max_new_tokens=8, candidate_generator=NgramCandidates(k=3))
