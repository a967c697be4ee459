"""Runs the cases of a checkpoint: speculation and plain `generate()` with the same inputs and seed."""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import transformers
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from transformers.models.auto import modeling_auto

from hf_specgen import DraftModelCandidates, NgramCandidates
from hf_specgen.compat import CACHE, has_own_decoding
from hf_specgen.targets.model_parts import keeps_state
from tests.checkpoints import inputs
from tests.checkpoints.configs import FIRST_SPECIAL, tiny_config
from tests.checkpoints.table import Checkpoint
from tests.fuzz.checks import HALF_MARGIN, describe, is_refusal
from tests.fuzz.models import randomize
from tests.helpers.comparison import SAMPLING, seed
from tests.helpers.models import VOCAB, perturbed_copy, tiny_model
from tests.helpers.oracle import Oracle

TABLES = ("IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "SPEECH_SEQ_2_SEQ", "SEQ_TO_SEQ_CAUSAL_LM", "CAUSAL_LM")
"""Mapping tables of Transformers, those of whole classes first."""
SAME, REFUSED, DIFFERENT, CRASH, PLAIN_FAILS = "same", "refused", "different", "crash", "plain fails"
TOKENS = 14
Answers = torch.Tensor


class Case(NamedTuple):
    """One call."""

    name: str
    strategy: Callable[[Any, Answers], Any]
    """Given the target and the `[batch, generated]` tokens of plain `generate`."""
    batch: int
    sampling: str = "greedy"
    eager: bool = False
    dtype: torch.dtype = torch.float32
    turns: int = 1


def _oracle(accuracy: float, branching: bool = False) -> Callable[[Any, Answers], Any]:
    return lambda _, answers: Oracle(answers, accuracy, k=3, branching=branching)


def _draft(model: Any, _: Answers) -> Any:
    """A model of the same class; a text model where layers have a state, or the class reads no text alone (BLIP)."""
    has_state = keeps_state(model.config.get_text_config(decoder=True))
    of_images = model.main_input_name == "pixel_values" and not model.config.is_encoder_decoder
    draft = tiny_model("llama") if has_state or of_images else perturbed_copy(model, noise=0.1)
    return DraftModelCandidates(draft, k=3)


SIBLINGS = "oracle with wrong siblings"
CASES = [
    Case("n-grams", lambda *_: NgramCandidates(k=3), 1),
    Case("n-gram trees, sampled", lambda *_: NgramCandidates(k=3, tree=6), 3, "sampled"),
    Case("auto", lambda *_: "auto", 3),
    Case("draft model", _draft, 3),
    Case("oracle", _oracle(0.7), 1),
    Case("oracle, sampled", _oracle(0.7), 3, "sampled"),
    Case(SIBLINGS, _oracle(0.7, branching=True), 1),
    Case(f"{SIBLINGS}, batch", _oracle(0.7, branching=True), 3),
    Case("two turns", _oracle(0.7), 1, turns=2),
    Case("eager", _oracle(0.7, branching=True), 3, eager=True),
    Case("bfloat16", _oracle(0.7), 1, dtype=torch.bfloat16),
    Case("bfloat16, batch", _oracle(0.7), 3, dtype=torch.bfloat16),
]


class Outcome(NamedTuple):
    """What came of a case."""

    status: str
    detail: str = ""
    """The sentence of a refusal, or the first difference."""
    accepted: int = 0


# Models


def class_name(checkpoint: Checkpoint) -> str:
    """The class that the published config names."""
    tables = [getattr(modeling_auto, f"MODEL_FOR_{table}_MAPPING_NAMES") for table in TABLES]
    return checkpoint.architecture or next(table[checkpoint.kind] for table in tables if checkpoint.kind in table)


def build(checkpoint: Checkpoint, eager: bool = False, dtype: torch.dtype = torch.float32) -> Any:
    """A random model of the checkpoint's class, with SDPA where there is one."""
    model_class = getattr(transformers, class_name(checkpoint))
    config = tiny_config(checkpoint.kind, **checkpoint.settings)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        try:
            model = model_class._from_config(config, attn_implementation="eager" if eager else "sdpa")
        except ValueError:
            model = model_class._from_config(config, attn_implementation="eager")
    _spread(model)
    settings = model.generation_config
    settings.pad_token_id, settings.eos_token_id, settings.bos_token_id = 0, None, 1
    settings.decoder_start_token_id, settings.num_beams = 3, 1
    settings.forced_bos_token_id, settings.forced_eos_token_id = None, None
    if not has_own_decoding(model):  # whose tokens may be those of codebooks
        settings.suppress_tokens = list(range(FIRST_SPECIAL, VOCAB))  # a placeholder without its image is no text
    return model.eval().to(dtype)


def _spread(model: Any) -> None:
    """Weights with which texts vary; initial ones times 3 where steps of a state would leave their range."""
    if not keeps_state(model.config.get_text_config(decoder=True)):
        randomize(model)
        return
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter *= 3


@contextmanager
def llama4_repaired() -> Iterator[None]:
    """Without it every published Llama 4 fails in plain `generate` of Transformers 5.24, which reads this attribute."""
    is_missing = not hasattr(MoeCausalLMOutputWithPast, "image_outputs")
    if is_missing:
        MoeCausalLMOutputWithPast.image_outputs = None
    try:
        yield
    finally:
        if is_missing:
            del MoeCausalLMOutputWithPast.image_outputs


# Comparison


def run_all(checkpoint: Checkpoint, cases: list[Case] = CASES) -> dict[str, Outcome]:
    """The outcome of every case, by its name, text before images or audio."""
    prompts: dict[str, Any] = {}
    if not checkpoint.media.startswith("encoder_"):
        prompts["text"] = inputs.text
    if checkpoint.media:
        prompts[checkpoint.media] = lambda model, batch: inputs.with_media(checkpoint, model, batch)
    outcomes = {}
    with llama4_repaired():
        try:
            models = {key: build(checkpoint, *key) for key in {(case.eager, case.dtype) for case in cases}}
        except ImportError as error:  # of a library that only this class needs
            return {f"text: {case.name}": Outcome(PLAIN_FAILS, describe(error)) for case in cases}
        for kind, prompt in prompts.items():
            for case in cases:
                if case.turns > 1 and kind.startswith("encoder_"):  # the next input is another one for the encoder
                    continue
                outcomes[f"{kind}: {case.name}"] = run(models[case.eager, case.dtype], prompt, case)
    return outcomes


def run(model: Any, prompt: Callable[[Any, int], Any], case: Case) -> Outcome:
    """Compare speculation with plain `generate` in one case."""
    prepared = {
        name: tensor.to(case.dtype) if tensor.is_floating_point() else tensor
        for name, tensor in prompt(model, case.batch).items()
    }
    try:
        plain, after_plain = _generate(model, prepared, case, None)
    except Exception as error:
        return Outcome(PLAIN_FAILS, describe(error))
    try:
        strategy = case.strategy(model, _answers(plain[0]))
        ours, after_ours = _generate(model, prepared, case, strategy)
    except Exception as error:
        return Outcome(REFUSED, str(error)) if is_refusal(error) else Outcome(CRASH, describe(error))
    outcome = _compared(plain, ours, torch.equal(after_plain, after_ours), case)
    statistics = getattr(strategy, "speculation", None)
    return outcome._replace(accepted=statistics.accepted if statistics else 0)


def _generate(model: Any, prompt: inputs.Inputs, case: Case, strategy: Any) -> tuple[list[Any], torch.Tensor]:
    """The outputs of all turns, and the random numbers that follow."""
    arguments = {"max_new_tokens": TOKENS, "return_dict_in_generate": True, "output_scores": True}
    arguments |= SAMPLING[case.sampling] or {"do_sample": False}
    if strategy is not None:
        arguments["candidate_generator"] = strategy
    outputs = list[Any]()
    seed(11)
    for _ in range(case.turns):
        if outputs:
            prompt = _next_turn(prompt, outputs[-1])
        outputs.append(model.generate(**prompt, **arguments))
    return outputs, torch.rand(3)


def _next_turn(prompt: inputs.Inputs, output: Any) -> dict[str, Any]:
    """The whole text, three more tokens, and the cache that was returned; images were read in the first turn."""
    ids = torch.cat([output.sequences, torch.tensor([[5, 6, 7]])], dim=1)
    following: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids), CACHE: output[CACHE]}
    for name in ("mm_token_type_ids", "token_type_ids"):
        if name in prompt:
            new = ids.shape[1] - prompt[name].shape[1]
            following[name] = torch.nn.functional.pad(prompt[name], (0, new))
    return following


def _answers(output: Any) -> Answers:
    """What plain `generate` wrote: the last columns, without the token with which a decoder begins."""
    return output.sequences[:, -len(output.scores) :]


def _compared(plain: list[Any], ours: list[Any], same_state: bool, case: Case) -> Outcome:
    """The tokens of every turn are the same; in half precision they may differ where two are nearly tied."""
    for turn, (expected, got) in enumerate(zip(plain, ours, strict=True)):
        if torch.equal(expected.sequences, got.sequences):
            continue
        margin = _largest_margin(expected, got)
        if case.dtype == torch.bfloat16 and margin <= HALF_MARGIN:
            return Outcome(SAME, f"but for near-ties of {margin:.3f} standard deviations")
        return Outcome(DIFFERENT, f"turn {turn + 1}: tokens whose scores are {margin:.5f} standard deviations apart")
    return Outcome(SAME if same_state else DIFFERENT, "" if same_state else "random state")


def _largest_margin(plain: Any, ours: Any) -> float:
    """Of the scores of both tokens where a row first differs; infinite if the lengths do."""
    if plain.sequences.shape != ours.sequences.shape:
        return float("inf")
    first = plain.sequences.shape[1] - len(plain.scores)
    margins = [0.0]
    for row, differs in enumerate(plain.sequences != ours.sequences):
        if differs.any():
            column = int(differs.nonzero()[0])
            scores = plain.scores[column - first][row].float()
            one, other = plain.sequences[row, column], ours.sequences[row, column]
            margins.append(float((scores[one] - scores[other]) / scores[scores.isfinite()].std()))
    return max(margins)


# Verdicts


class Verdict(NamedTuple):
    """What came of all cases with text, or with an image or a recording."""

    status: str
    """One of the constants, or "partly refused"."""
    reason: str = ""


def verdict(outcomes: list[Outcome]) -> Verdict:
    """The worst status; refusals that are not of all cases make it a partial one."""
    counts = Counter(outcome.status for outcome in outcomes)
    for status in (CRASH, DIFFERENT):
        if counts[status]:
            return Verdict(status, next(outcome.detail for outcome in outcomes if outcome.status == status))
    if counts[PLAIN_FAILS] and not counts[SAME] and not counts[REFUSED]:
        return Verdict(PLAIN_FAILS, outcomes[0].detail)
    reason = without_model(next((outcome.detail for outcome in outcomes if outcome.status == REFUSED), ""))
    if counts[REFUSED] and counts[SAME]:
        return Verdict("partly refused", reason)
    return Verdict(REFUSED if counts[REFUSED] else SAME, reason)


def without_model(sentence: str) -> str:
    """A refusal without the name of the class and its general remedy."""
    return re.sub(r"^\w+ ", "", sentence).removesuffix("; use plain generate(candidate_generator=None)")
