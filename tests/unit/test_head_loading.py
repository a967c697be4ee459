"""Loading draft heads: formats are recognised, and damaged or hostile files are refused with one clear sentence."""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
)

from hf_specgen import AutoCandidates
from hf_specgen.heads import checkpoint
from hf_specgen.heads.eagle import Eagle3Head, EagleConfig
from hf_specgen.heads.export import export_head, save_head
from hf_specgen.heads.head_formats import FORMATS, load_head
from hf_specgen.heads.layers import LayerConfig
from hf_specgen.heads.mtp import load_mtp
from tests.helpers.head_fixtures import FIXTURES, target_of
from tests.helpers.paths import HEAD_FIXTURES

LAYER = LayerConfig(hidden_size=16, intermediate_size=24, num_attention_heads=2, num_key_value_heads=1, head_dim=8)
SIZES: dict[str, Any] = {"hidden_size": 16, "vocab_size": 40, "target_hidden_size": 16, "num_aux_hidden_states": 3}
HUGE = 10**9
GEMMA_ASSISTANT = HEAD_FIXTURES / "gemma4_assistant" / "head"
MTP = FIXTURES["mtp_transformers_deepseek_v3"]
Tensors = dict[str, torch.Tensor]
Damage = Callable[[Path], Any]


def make_head(**options: Any) -> Eagle3Head:
    settings = SIZES | {"draft_vocab_size": 12, "own_lm_head": True} | options
    return Eagle3Head(EagleConfig(layer=LAYER, **settings))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A good EAGLE-3 checkpoint in the original layout."""
    export_head(make_head(), tmp_path / "head", "eagle")
    return tmp_path / "head"


def config(**values: Any) -> Damage:
    """Replaces fields of config.json."""

    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def tensors(change: Callable[[Tensors], Any]) -> Damage:
    """Changes the tensors."""

    def change_file(folder: Path) -> None:
        content = load_file(folder / "model.safetensors")
        change(content)
        save_file(content, folder / "model.safetensors")

    return change_file


def packed_by(method: str) -> Damage:
    """Quantises a matrix as a library does: config and names show it."""
    name = "midlayer.mlp.up_proj.weight"
    changes = (
        config(quantization_config={"quant_method": method}),
        tensors(lambda t: t.update({f"{name}_packed": t.pop(name)})),
    )
    return lambda folder: [change(folder) for change in changes]


def text(content: str, name: str = "config.json") -> Damage:
    """Replaces a file."""
    return lambda folder: (folder / name).write_text(content, encoding="utf-8")


def removed(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


def truncated(size: int) -> Damage:
    path = "model.safetensors"
    return lambda folder: (folder / path).write_bytes((folder / path).read_bytes()[:size])


def absurd_header(folder: Path) -> None:
    header = json.dumps({"fc.weight": {"dtype": "F32", "shape": [HUGE, HUGE], "data_offsets": [0, 8]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))


class Malicious:
    """Would run code when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("code from a checkpoint was run",)


def pickled(content: Any) -> Damage:
    """Replaces the tensors by a file that torch.save or pickle writes."""

    def change(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        path = folder / "pytorch_model.bin"
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            torch.save(content, path)

    return change


NOT_TENSORS = r"cannot be read as tensors .*; download it again"
EAGLE_IDS = "eagle_aux_hidden_state_layer_ids"
DAMAGE: list[tuple[Damage, str]] = [
    (removed("config.json"), r"has no config\.json, so it is not a checkpoint"),
    (removed("model.safetensors"), r"it has no tensors: none of model\.safetensors\.index\.json"),
    *((truncated(size), rf"model\.safetensors {NOT_TENSORS}") for size in (0, 4, 8, 100, 2000)),
    (absurd_header, rf"model\.safetensors {NOT_TENSORS}"),
    *((text('{"a":' * n + "1" + "}" * n), r"nested too deeply to be a config\.json") for n in (10_000, 1_000_000)),
    *((text(content), r"config\.json (is not JSON|holds)") for content in ("", "{", "[1]", "null", '"a"')),
    (pickled({"fc.weight": Malicious()}), rf"pytorch_model\.bin {NOT_TENSORS}"),
    (pickled([torch.zeros(2)]), "not a dictionary of tensors"),
    # Four bytes that claim to be 4 million terabytes.
    (pickled({"fc.weight": torch.zeros(1).expand(HUGE, HUGE)}), "does not fit into the file"),
    (pickled(pickle.dumps(Malicious())), rf"pytorch_model\.bin {NOT_TENSORS}"),
    (
        text('{"weight_map": {"fc.weight": "../model.safetensors"}}', checkpoint.INDEX),
        "a file outside of the checkpoint",
    ),
    (text('{"weight_map": {"fc.weight": "a.safetensors"}}', checkpoint.INDEX), r"the file a\.safetensors is missing"),
    (config(speculators_model_type="hydra"), "type 'hydra' are not a draft head of a known format; known are Medusa"),
    (config(model_type=[]), r"model_type must be a string, got list '\[\]'"),
    (config(model_type={}), "model_type must be a string, got dict '{}'"),
    (config(hidden_size=HUGE), "config.json has hidden_size 1000000000, but the tensors have 16"),
    (config(intermediate_size=HUGE), "config.json has intermediate_size 1000000000, but the tensors have 24"),
    (config(num_hidden_layers=HUGE), "config.json has 1000000000 layers, but the tensors have 1"),
    (config(num_attention_heads=HUGE), "config.json has 1000000000 attention heads"),
    (config(num_attention_heads=0), "num_attention_heads must be a whole number between 1"),
    (config(num_key_value_heads=3), "config.json has 2 attention heads and 3 key/value heads"),
    (config(vocab_size=HUGE), r"t2d has shape \(40,\), but config.json has vocab_size 1000000000"),
    (config(draft_vocab_size=HUGE), "draft_vocab_size must be between 1 and the target's vocabulary size 40"),
    (config(draft_vocab_size=13), "a draft vocabulary of 13 tokens needs an integer tensor d2t of that size"),
    (config(target_hidden_size=HUGE), "make a state of width 16 out of states of width 1000000000"),
    (config(rms_norm_eps="small"), "rms_norm_eps must be a positive number, got str 'small'"),
    (config(rms_norm_eps=float("nan")), "rms_norm_eps must be a positive number"),
    (config(rope_theta=-1), "rope_theta must be a positive number"),
    (config(rope_scaling={"rope_type": "spiral"}), "the rotary parameters .*spiral.* cannot be used"),
    (config(rope_scaling={"rope_type": "llama3"}), "the rotary parameters .* cannot be used"),
    (config(rope_scaling=[1]), "rope_scaling must be an object"),
    (config(hidden_act="square"), "unknown activation 'square'"),
    (config(hidden_act=None, model_type="mamba"), "model_type 'mamba' are not supported, only llama, qwen2, qwen3"),
    (config(norm_before_residual="yes"), "norm_before_residual must be true or false"),
    (config(eagle_config={EAGLE_IDS: [1, "x"]}), "must be a list of layer numbers"),
    (config(eagle_config={EAGLE_IDS: [1, 2]}), "reads 3 hidden states of the target, but aux_hidden_state_layers are"),
    (config(target_layer_ids=[1, 2, 3], **{EAGLE_IDS: [1, 2, 3]}), "twice, and differently"),
    (tensors(lambda t: t.pop("fc.weight")), "the tensor fc.weight is missing"),
    (tensors(lambda t: t.pop("midlayer.mlp.up_proj.weight")), "1 tensors are missing, such as layers.0.mlp.up_proj"),
    (packed_by("compressed-tensors"), "the head is quantised by 'compressed-tensors', which is not read"),
    (tensors(lambda t: t.pop("midlayer.self_attn.q_proj.weight")), "layers.0.self_attn.q_proj.weight is missing"),
    (tensors(lambda t: t.pop("d2t")), "needs an integer tensor d2t of that size, found none"),
    (tensors(lambda t: t.update(d2t=torch.zeros(12))), "needs an integer tensor d2t .* dtype torch.float32"),
    (tensors(lambda t: t.update(d2t=torch.full((12,), 40))), "d2t maps draft tokens to ids outside"),
    (tensors(lambda t: t.update(d2t=torch.full((12,), -20))), "d2t maps draft tokens to ids outside"),
    (tensors(lambda t: t.update(d2t=torch.zeros(3, dtype=torch.long))), r"found one of shape \(3,\)"),
    (tensors(lambda t: t.update({"norm.weight": torch.ones(17)})), r"tensor norm.weight has shape \(17,\)"),
    (tensors(lambda t: t.update({"norm.weight": torch.ones(16, dtype=torch.int8)})), "int8; quantised heads"),
    (tensors(lambda t: t.update({"fc.weight": torch.ones(16, 47)})), "it has to make a state of width 16"),
    (tensors(lambda t: t.update({"fc.weight": torch.ones(48)})), "it has to make a state of width 16"),
    (tensors(lambda t: t.update({"markov.weight": torch.ones(4)})), "has no tensors such as markov.weight"),
    (tensors(lambda t: t.update({"layers.7.norm.weight": torch.ones(4)})), "no complete sequence of layers"),
]


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize(("damage", "reason"), DAMAGE, ids=[str(index) for index in range(len(DAMAGE))])
def test_load_head_damaged_files_raise_one_sentence_that_names_the_folder(
    folder: Path, damage: Damage, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(folder)
    with pytest.raises(ValueError, match=reason) as error:
        load_head(folder)
    assert str(error.value).startswith(str(folder)) and "\n" not in str(error.value)
    assert "code from a checkpoint" not in capsys.readouterr().out


def test_load_head_with_the_quantisation_of_its_target_in_the_config_loads(folder: Path) -> None:
    """Would catch: a head refused because its config is a copy of that of a quantised target."""
    config(quantization_config={"quant_method": "fp8"})(folder)
    load_head(folder)


def set_field(*path: str, value: Any) -> Damage:
    """Replaces a field inside the objects of config.json."""

    def change(folder: Path) -> None:
        content = part = json.loads((folder / "config.json").read_text())
        for name in path[:-1]:
            part = part[name]
        part[path[-1]] = value
        (folder / "config.json").write_text(json.dumps(content))

    return change


LAYERS_OF = "transformer_layer_config"
PATH_DAMAGE: list[tuple[str, Damage, str]] = [
    ("domino_specforge", set_field("dflash_config", "gru_hidden_dim", value=2**31 - 1), "a head that cannot be built"),
    ("domino_specforge", set_field("dflash_config", "emb_dim", value=10**18), "emb_dim must be a whole number between"),
    ("domino_specforge", set_field("dflash_config", "shift_label", value=1), "shift_label must be true or false"),
    (
        "domino_specforge",
        set_field("dflash_config", "projector_type", value="x"),
        "projector_type 'x' are not supported",
    ),
    ("dflash2_zlab", set_field("dflash_config", "conv_group_size", value=7), "conv_group_size 7 does not divide"),
    (
        "dflash2_zlab",
        set_field("dflash_config", "conv_kernel_size", value=9),
        "conv_kernel_size 9 exceeds block_size 8",
    ),
    ("dflash2_zlab", set_field("dflash_config", "selector_rank", value=HUGE), "but config.json makes it"),
    ("dflash2_zlab", set_field("dflash_config", "output_multiplier", value=[]), "output_multiplier must be a positive"),
    ("speculators_dspark_rnn", set_field("markov_rank", value=HUGE), "markov_rank 1000000000, but the tensors have 16"),
    ("speculators_dspark_rnn", set_field("markov_head_type", value="lstm"), "markov_head_type must be one of vanilla"),
    ("speculators_dspark_rnn", set_field("markov_head_type", value="gated"), "markov_head.gate_proj.bias"),
    ("deepspec_dspark_qwen3_rnn", set_field("target_layer_ids", value=[0, 3]), "reads 3 hidden states of the target"),
    ("deepspec_dspark_qwen3_rnn", set_field("model_type", value="gemma4_text"), "'gemma4_text' are not supported"),
    ("gemma4_assistant", set_field("text_config", "head_dim", value=HUGE), "but config.json makes it"),
    ("gemma4_assistant", set_field("text_config", "num_hidden_layers", value=HUGE), "but the tensors have"),
    ("gemma4_assistant", set_field("text_config", "hidden_activation", value="square"), "cannot be built"),
    ("gemma4_assistant", set_field("text_config", "num_attention_heads", value="x"), "cannot be used"),
    ("gemma4_assistant", set_field("text_config", "rope_parameters", value={}), "cannot be"),
    ("speculators_mtp_qwen3", set_field(LAYERS_OF, "intermediate_size", value=HUGE), "but the file holds 40,112"),
    ("speculators_mtp_qwen3", set_field(LAYERS_OF, "num_attention_heads", value=0), "cannot be used"),
    ("speculators_mtp_qwen3", set_field(LAYERS_OF, "hidden_act", value="square"), "cannot be used"),
    ("speculators_mtp_qwen3", set_field(LAYERS_OF, "hidden_size", value=32), "hidden_size 32, but this target has 64"),
]


@pytest.mark.parametrize(("name", "damage", "reason"), PATH_DAMAGE)
def test_load_later_formats_with_damaged_configs_raise_one_sentence(
    tmp_path: Path, name: str, damage: Damage, reason: str
) -> None:
    shutil.copytree(HEAD_FIXTURES / name / "head", tmp_path / "head")
    damage(tmp_path / "head")
    with pytest.raises(ValueError, match=reason) as error:
        if name == "speculators_mtp_qwen3":
            load_mtp(target_of(HEAD_FIXTURES / "targets" / "qwen3"), str(tmp_path / "head"))
        else:
            load_head(tmp_path / "head").bind(target_of(HEAD_FIXTURES / "targets" / "qwen3"))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("model_type", [[], {}, 3])
def test_auto_assistant_with_a_malformed_model_type_raises(tmp_path: Path, model_type: Any) -> None:
    shutil.copytree(GEMMA_ASSISTANT, tmp_path / "head")
    config(model_type=model_type)(tmp_path / "head")
    with pytest.raises(ValueError, match=r"head/config\.json: model_type must be a string"):
        AutoCandidates.from_pretrained(tmp_path / "head")


def test_load_unknown_formats_list_the_known_ones(tmp_path: Path) -> None:
    """Would catch: a plain model taken for a head."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    LlamaForCausalLM(LlamaConfig(vocab_size=8, **sizes)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="not a draft head of a known format") as error:
        load_head(tmp_path)
    assert all(known.name in str(error.value) for known in FORMATS)


@pytest.mark.parametrize("missing", [EntryNotFoundError("404"), LocalEntryNotFoundError("offline")])
def test_load_from_the_hub_passes_on_its_arguments(
    folder: Path, monkeypatch: pytest.MonkeyPatch, missing: Exception
) -> None:
    requests: list[Any] = []

    def download(repository: str, name: str, **where: Any) -> str:
        requests.append((repository, where))
        if not (folder / name).exists():
            raise missing
        return str(folder / name)

    monkeypatch.setattr(checkpoint, "hf_hub_download", download)
    where: dict[str, Any] = {"revision": "v2", "token": "t", "subfolder": "draft", "cache_dir": "/cache"}
    assert isinstance(load_head("org/head", **where), Eagle3Head)
    assert requests and all(entry == ("org/head", where) for entry in requests)


@pytest.mark.parametrize("layout", ["safetensors", "subfolder", "pickled", "sharded"])
def test_load_head_from_each_layout_of_files(folder: Path, layout: str) -> None:
    content = load_file(folder / "model.safetensors")
    if layout == "pickled":
        pickled(content)(folder)
    if layout == "sharded":
        parts = {"a.safetensors": list(content)[:4], "b.safetensors": list(content)[4:]}
        for file, names in parts.items():
            save_file({name: content[name] for name in names}, folder / file)
        weight_map = {name: file for file, names in parts.items() for name in names}
        text(json.dumps({"weight_map": weight_map}), checkpoint.INDEX)(folder)
        removed("model.safetensors")(folder)
    head: Any = load_head(folder.parent, subfolder="head") if layout == "subfolder" else load_head(folder)
    assert torch.equal(head.fc.weight, content["fc.weight"])
    assert not head.training and not any(parameter.requires_grad for parameter in head.parameters())


def target(**changes: Any) -> LlamaForCausalLM:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 8}
    return LlamaForCausalLM(LlamaConfig(**({"vocab_size": 40} | sizes | changes)))


def test_bind_layers_are_those_given_then_configured_then_default(folder: Path) -> None:
    assert load_head(folder).bind(target()).aux_hidden_state_layers == (2, 4, 5)
    configured = load_head(folder, aux_hidden_state_layers=[1, 2, 3])
    assert configured.bind(target()).aux_hidden_state_layers == (1, 2, 3)
    assert configured.bind(target(), [1, 2, 8]).aux_hidden_state_layers == (1, 2, 8)


@pytest.mark.parametrize(
    ("changes", "layers", "reason"),
    [
        ({"hidden_size": 32}, None, "a hidden size of 16, but this target has 32; load the head that belongs to it"),
        ({"vocab_size": 41}, None, "with a vocabulary of 40, but this target has 41"),
        ({"num_hidden_layers": 6}, None, r"reads 3 hidden states .* aux_hidden_state_layers are \(2, 3\)"),
        ({}, [1, 2], r"reads 3 hidden states of the target, but aux_hidden_state_layers are \(1, 2\)"),
        ({}, [1, 2, 9], "not all between 0 and 8"),
        ({}, [-1, 2, 3], "not all between 0 and 8"),
    ],
)
def test_bind_to_a_target_that_does_not_fit_raises(
    folder: Path, changes: dict[str, Any], layers: list[int] | None, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        load_head(folder).bind(target(**changes), layers)


def test_bind_shares_what_the_head_lacks_and_saves_none_of_it(tmp_path: Path) -> None:
    head = make_head(draft_vocab_size=40, own_lm_head=False)
    model = target()
    bound = head.bind(model)
    tokens, states = torch.tensor([[3, 5]]), torch.randn(1, 2, 16)
    assert torch.equal(bound.embed(tokens), model.model.embed_tokens(tokens))
    assert torch.equal(bound.logits(states), model.lm_head(states))
    save_head(head, tmp_path)
    assert not {"embed_tokens.weight", "lm_head.weight"} & load_file(tmp_path / "model.safetensors").keys()


# MTP layers of a target's own checkpoint


@pytest.mark.parametrize(
    ("part", "value", "reason"),
    [
        ("eh_proj.weight", None, r"no MTP layers: neither .* nor mtp\.fc\.weight"),
        ("hnorm.weight", None, r"has no hnorm\.weight"),
        ("self_attn.o_proj.weight", None, "missing_keys: .*o_proj"),
        ("mlp.experts.1.up_proj.weight", None, "do not fit this target"),
        ("eh_proj.weight", torch.zeros(32, 32), r"has shape \(32, 32\)"),
        ("enorm.weight", torch.zeros(32, dtype=torch.int8), "dtype torch.int8"),
        ("self_attn.o_proj.weight", torch.zeros(3, 3), "do not fit this target"),
        ("self_attn.o_proj.weight", torch.zeros(32, 16, dtype=torch.int8), "quantised MTP layers"),
        ("self_attn.extra.weight", torch.zeros(2), "unexpected_keys: .*extra"),
    ],
)
def test_mtp_with_a_missing_or_wrong_tensor_raises(tmp_path: Path, part: str, value: Any, reason: str) -> None:
    """Would catch: a target that is changed by the attempt, or an error from deep inside."""
    folder = MTP.target_folder
    tensors = load_file(folder / "model.safetensors")
    (name,) = [name for name in tensors if name.endswith("eh_proj.weight")]
    tensors[name.replace("eh_proj.weight", part)] = value
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    shutil.copy(folder / "config.json", tmp_path)
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    before = MTP.target.config.to_dict(), [name for name, _ in MTP.target.named_modules()]
    with pytest.raises(ValueError, match=reason):
        load_mtp(MTP.target, str(tmp_path))
    assert before == (MTP.target.config.to_dict(), [name for name, _ in MTP.target.named_modules()])


def test_mtp_of_target_without_a_name_raises() -> None:
    with pytest.raises(ValueError, match="name its checkpoint"):
        load_mtp(target())
