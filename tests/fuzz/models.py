"""Tiny random models of every decoder architecture in Transformers that can be built small."""

import copy
import math
import tempfile
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE, WordLevel
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from tests.helpers import models

# Tokenizers of the tiny models: one character a token, so that any text can be encoded again; others for drafts

VOCAB = 99
FIRST_CHARACTER = 0x4E00
UNKNOWN = "?"
CHARACTERS = [chr(FIRST_CHARACTER + place) for place in range(VOCAB)]
FOLDERS = tempfile.TemporaryDirectory(prefix="tiny-tokenizers-")
"""Of tokenizers and adapters; removed when the process ends."""
KINDS = ("characters", "reversed", "subset", "pairs", "bytes")
"""Of `tokenizer_folder`; the first is that of the targets."""


@lru_cache(maxsize=len(KINDS))
def tokenizer_folder(kind: str = "characters") -> Path:
    """A folder with a tokenizer.

    "characters": token i is the i-th character; "reversed": the same backwards; "subset": every third one is unknown;
    "pairs": SentencePiece's way of writing spaces, half of the characters, and pairs of them; "bytes": BPE of
    bytes, in which a third of the characters are tokens.
    """
    folder = Path(FOLDERS.name) / kind
    special = {"unk_token": UNKNOWN} if kind != "bytes" else {}
    PreTrainedTokenizerFast(tokenizer_object=_backend(kind), **special).save_pretrained(folder)
    return folder


def _backend(kind: str) -> Tokenizer:
    if kind == "pairs":
        return _pairs()
    if kind == "bytes":
        return _bytes()
    ids = range(VOCAB) if kind == "characters" else range(VOCAB - 1, -1, -1)
    vocabulary = dict(zip(CHARACTERS, ids, strict=True)) | {UNKNOWN: VOCAB}
    if kind == "subset":
        vocabulary = {text: token for text, token in vocabulary.items() if token == VOCAB or token % 3}
    return word_level(vocabulary, UNKNOWN)


def word_level(vocabulary: dict[str, int], unknown: str, length: int = 1) -> Tokenizer:
    """A tokenizer without merges, for pieces of a text of `length` characters each."""
    backend = Tokenizer(WordLevel(vocabulary, unk_token=unknown))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("." * length), "isolated")
    backend.decoder = decoders.Fuse()
    return backend


def _pairs() -> Tokenizer:
    known = CHARACTERS[::2]
    merges = [(known[i], known[j]) for i in range(4) for j in range(12)]
    texts = [UNKNOWN, "▁", *known, *("".join(pair) for pair in merges)]
    backend = Tokenizer(BPE({text: token for token, text in enumerate(texts)}, merges, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return backend


def _bytes() -> Tokenizer:
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pieces = [split.pre_tokenize_str(character)[0][0] for character in CHARACTERS]  # three letters, one for each byte
    alphabet = sorted({letter for piece in pieces for letter in piece})
    starts = sorted({piece[:2] for piece in pieces})
    whole = pieces[: VOCAB - len(alphabet) - len(starts)]
    merges = [(start[0], start[1]) for start in starts] + [(piece[:2], piece[2]) for piece in whole]
    vocabulary = {text: token for token, text in enumerate([*alphabet, *starts, *whole])}
    backend = Tokenizer(BPE(vocabulary, merges))
    backend.pre_tokenizer = split
    backend.decoder = decoders.ByteLevel()
    return backend


WIDTH = 64
WINDOW = 8
MAX_CACHED_MODELS = 256
"""More than `make test` draws: those of a long run are built one after another (`grouped` in `__main__.py`)."""

# Sizes under all the names that configurations use; each configuration is given those that it knows.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCAB),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embedding_size", "emb_dim", "dim_model"), WIDTH),
    **dict.fromkeys(("word_embed_proj_dim", "attention_hidden_size"), WIDTH),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "dff", "dim_ff", "decoder_ffn_dim"), 96),
    **dict.fromkeys(("intermediate_size_mlp", "encoder_ffn_dim"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 48),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "dim_head"), 16),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "linear_key_head_dim", "linear_value_head_dim"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "num_key_value_heads"), 2),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "rotary_dim", "hidden_size_per_layer_input"), 8),
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "is_decoder": True, "tie_word_embeddings": False},
    **dict.fromkeys(("dropout", "attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    **dict.fromkeys(("activation_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
    **dict.fromkeys(("residual_dropout", "layerdrop", "decoder_layerdrop", "embedding_dropout"), 0.0),
    "vision_config": {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
}
DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers")
WINDOWS = ("sliding_window", "attention_chunk_size")
POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx")
# Absent from a configuration by default, and then not to be given: None means that the model has no such part.
ONLY_IF_SET = {"num_local_experts", "num_experts", "sliding_window", "is_decoder", "attention_chunk_size", "n_inner"}

LAYER_KINDS = {kind[0]: f"{kind}_attention" for kind in ("full", "sliding", "chunked", "linear")} | {"v": "conv"}


class Architecture(NamedTuple):
    """How a tiny model of an architecture differs from the common sizes."""

    layers: str = ""
    """Kinds of attention of the layers, repeated as often as needed; letters of `LAYER_KINDS`."""
    settings: dict[str, Any] = {}


_WINDOW = "sf"
_MLA: dict[str, Any] = {"num_key_value_heads": 4}  # latent attention has as many key heads as query heads


def _architectures(names: str, layers: str = "", **settings: Any) -> dict[str, Architecture]:
    return {name: Architecture(layers, settings) for name in names.split()}


TESTED = {
    **_architectures("llama mistral qwen2 qwen3 gemma phi phi3 gpt2 gpt_neox opt mixtral qwen3_moe olmo2 granite"),
    **_architectures("smollm3 starcoder2 stablelm glm4 gptj ernie4_5 hunyuan_v1_dense apertus seed_oss glm4_moe"),
    **_architectures("gemma2 gemma3_text gemma4_text gpt_oss cohere2 exaone4 ministral", _WINDOW),
    **_architectures("llama4_text", "cf"),
    **_architectures("lfm2", "f"),
    **_architectures("deepseek_v3", **_MLA),
    **_architectures("falcon", alibi=False),
}
"""The architectures that every other test file tries too (`tests/assets/tiny_architectures.json`)."""

DENSE = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gpt2", "gptj", "opt", "olmo2", "starcoder2")
"""Architectures of `TESTED` that PEFT adapts and whose layers have no experts, which half precision would swap."""

UNTESTED = {
    **_architectures("arcee aria_text bart beam bert bert-generation bigbird_pegasus biogpt bitnet blenderbot"),
    **_architectures("blenderbot-small camembert codegen cohere cpmant ctrl cwm data2vec-text diffllama doge electra"),
    **_architectures("ernie ernie4_5_moe flex_olmo flint glm gpt-sw3 gpt_bigcode gpt_neox_japanese granite_swa"),
    **_architectures("granitemoe granitemoe_swa granitemoeshared helium hrm_text hunyuan_v1_moe hy_v3 hyperclovax"),
    **_architectures("internlm3 iquestcoder jais2 jetmoe laguna marian mbart megatron-bert mellum mimo_v2_flash"),
    **_architectures("minimax_m2 ministral3 modernbert-decoder moshi mvp nanochat nemotron olmo olmoe openai-gpt"),
    **_architectures("pegasus persimmon phimoe plbart qwen2_moe rembert roberta roberta-prelayernorm roformer"),
    **_architectures("solar_open trocr vaultgemma whisper xglm xlm xlm-roberta xlm-roberta-xl"),
    **_architectures("afmoe cohere2_moe exaone_moe kolibri1 olmo3 gemma4_unified_text", _WINDOW),
    **_architectures("gemma3n_text", _WINDOW, num_kv_shared_layers=0),
    **_architectures("axk1 deepseek_v2 glm4_moe_lite longcat_flash minicpm3 youtu", **_MLA),
    **_architectures("dots1", n_shared_experts=1),
    **_architectures("big_bird", attention_type="original_full"),  # which it would switch to in its first call
    **_architectures("gpt_neo", attention_types=[[["global"], 1]]),
}
"""Architectures that nobody chose for a test: each must end in identical tokens or in a refusal."""

REFUSED = {**_architectures("bloom mpt mamba rwkv"), **_architectures("minimax", "lf")}
"""Architectures whose state is kept outside of a cache, or whose positions cannot be given."""

STATEFUL = {name: Architecture() for name in models.STATEFUL if name not in TESTED}
"""Architectures with convolutions, recurrent states or indexed attention, in the sizes of `tests.helpers.models`."""

ARCHITECTURES = {**TESTED, **UNTESTED, **REFUSED, **STATEFUL}

_FOLDER = Path(__file__).parents[1] / "assets" / "fixtures"
FIXTURES = {
    "mtp_deepseek_v3": _FOLDER / "mtp_transformers_deepseek_v3" / "target",
    "mtp_glm4_moe": _FOLDER / "mtp_transformers_glm4_moe" / "target",
    "mtp_qwen3_5": _FOLDER / "mtp_qwen3_5_native" / "target",
    "mtp_qwen3_next": _FOLDER / "mtp_qwen3_next_native" / "target",
    "assistant_gemma4": _FOLDER / "targets" / "gemma4_text",
}
"""Checkpoints of targets for which there are heads of the original implementations; with 128 tokens, not `VOCAB`."""
ASSISTANT = _FOLDER / "gemma4_assistant" / "head"


@lru_cache(maxsize=MAX_CACHED_MODELS)
def tiny_model(
    architecture: str,
    layers: int = 2,
    attention: str = "sdpa",
    window: int = WINDOW,
    positions: int = 256,
    dtype: torch.dtype = torch.float32,
) -> Any:
    """A random model of `ARCHITECTURES`, or one of `FIXTURES` in its own sizes.

    Models without SDPA run eager; `window` is also the size of chunks, and weights are those of float32 in every dtype.
    """
    if window != WINDOW and not _has_window(architecture):  # one model, and one self-check, for all windows
        return tiny_model(architecture, layers, attention, WINDOW, positions, dtype)
    if architecture in FIXTURES:
        model = AutoModelForCausalLM.from_pretrained(FIXTURES[architecture], attn_implementation=attention)
    else:
        config = _config(architecture, layers, window, positions)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            try:
                model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
            except ValueError:
                model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
            randomize(model)
        model.name_or_path = str(tokenizer_folder())
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    if dtype == torch.float64:
        model.set_experts_implementation("eager")  # grouped matrix products exist for shorter types only
    return model.eval().to(device(), dtype)


@cache
def _has_window(architecture: str) -> bool:
    """Whether the configuration can have windows or chunks; a stateful one or a checkpoint's is given as it is."""
    if architecture in STATEFUL or architecture in FIXTURES:
        return False
    known = CONFIG_MAPPING[architecture]()
    return any(takes(known, name) for name in WINDOWS)


def _config(architecture: str, layers: int, window: int, positions: int) -> Any:
    config_class = CONFIG_MAPPING[architecture]
    if architecture in STATEFUL:
        return config_class(**models.STATEFUL[architecture])
    known = config_class()
    given = ARCHITECTURES.get(architecture, Architecture())
    sizes = {**SIZES, **dict.fromkeys(DEPTHS, layers), **dict.fromkeys(POSITIONS, positions)}
    sizes |= dict.fromkeys(WINDOWS, window)
    arguments = {name: value for name, value in sizes.items() if takes(known, name)}
    if given.layers:
        arguments["layer_types"] = [LAYER_KINDS[given.layers[i % len(given.layers)]] for i in range(layers)]
    settings = dict(given.settings)
    if "attention_types" in settings:
        settings["attention_types"] = [[["global"], layers]]
    return config_class(**{**arguments, **settings})


def takes(config: Any, name: str) -> bool:
    try:
        value = getattr(config, name)
    except Exception:  # attributes that a configuration has only for some of its layers
        return False
    return not (value is None and name in ONLY_IF_SET) and not _is_read_only(type(config), name)


def _is_read_only(config_class: type, name: str) -> bool:
    attribute = getattr(config_class, name, None)
    return isinstance(attribute, property) and attribute.fset is None


def randomize(model: nn.Module) -> None:
    """Weights with which the next token depends on the whole text: initial ones write one token again and again."""
    generator = torch.Generator().manual_seed(1)
    embeddings = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() < 2:
                parameter += 0.1 * noise
            elif id(parameter) in embeddings:
                parameter.copy_(0.3 * noise)
            else:
                parameter.copy_(1.5 * noise / math.sqrt(parameter.shape[-1]))


@lru_cache(maxsize=MAX_CACHED_MODELS)
def disturbed_copy(model: Any, noise: float) -> Any:
    """A copy of a model whose weights are off by a share `noise` of their size: a draft that is right sometimes."""
    draft = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in draft.parameters():
            disturbance = torch.randn(parameter.shape, generator=generator).to(parameter)
            parameter += noise * parameter.std() * disturbance if parameter.dim() > 1 else 0.0
    return draft


@lru_cache(maxsize=MAX_CACHED_MODELS)
def with_other_tokenizer(model: Any, kind: str) -> Any:
    """The same model behind a tokenizer of another kind: its tokens have the weights of their first character."""
    draft = copy.deepcopy(model)
    folder = tokenizer_folder(kind)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [tokenizer.decode([token]) for token in range(VOCAB)]
    first = [CHARACTERS.index(text[0]) if text[:1] in CHARACTERS else 0 for text in texts]
    order = torch.tensor(first, device=device())
    tables = {id(part.weight): part.weight for part in (draft.get_input_embeddings(), draft.get_output_embeddings())}
    with torch.no_grad():
        for weight in tables.values():
            weight[:VOCAB] = weight[order].clone()
    draft.name_or_path = str(folder)
    return draft


# The device that the models of all cases are on

_device = torch.device("cpu")


def device() -> torch.device:
    """Of models and prompts."""
    return _device


def use_device(name: str) -> None:
    """Put the models of all later cases on this device. Kernels that round to fewer bits are switched off."""
    global _device
    _device = torch.device(name)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def seed(number: int) -> None:
    """Seed the random generator that `generate` draws from; see `tests.helpers.comparison.seed`."""
    if _device.type == "cuda":
        torch.cuda.manual_seed(number)
    else:
        torch.default_generator.manual_seed(number)


def random_state() -> torch.Tensor:
    """The state of the random generator that `generate` draws from."""
    return torch.cuda.get_rng_state(_device) if _device.type == "cuda" else torch.get_rng_state()
