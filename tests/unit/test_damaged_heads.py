"""Damaged or hostile files of draft heads are refused with one clear sentence, before memory is taken."""

import json
import pickle
import shutil
import tracemalloc
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_specgen import AutoCandidates, DraftModelCandidates
from hf_specgen.evaluation.workloads import BUNDLED_ADAPTER, BUNDLED_DRAFT, BUNDLED_HEADS
from hf_specgen.heads import checkpoint, load_exit_head
from hf_specgen.heads.export import export_head
from hf_specgen.heads.head_formats import load_head
from hf_specgen.heads.mtp import load_mtp
from tests.helpers import prompts, tiny_model
from tests.helpers.head_fixtures import FIXTURES, small_eagle, target_of
from tests.helpers.medusa import random_heads
from tests.helpers.paths import HEAD_FIXTURES

HUGE = 10**9
QWEN3 = HEAD_FIXTURES / "targets" / "qwen3"
MTP = FIXTURES["mtp_transformers_deepseek_v3"]
Tensors = dict[str, torch.Tensor]
Damage = Callable[[Path], Any]


def config(file: str = "config.json", **values: Any) -> Damage:
    """Replaces fields of a configuration; of an object only those that are given."""

    def change(folder: Path) -> None:
        content = json.loads((folder / file).read_text())
        for name, value in values.items():
            old = content.get(name)
            content[name] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value
        (folder / file).write_text(json.dumps(content))

    return change


def tensors(change: Callable[[Tensors], Any]) -> Damage:
    """Changes the tensors, in place or to those that are returned; None removes one."""

    def change_file(folder: Path) -> None:
        file = next(folder.glob("*.safetensors"))
        content = load_file(file)
        changed = change(content)
        content = changed if isinstance(changed, dict) else content
        kept = {name: tensor for name, tensor in content.items() if tensor is not None}
        save_file(kept, file, metadata={"format": "pt"})

    return change_file


def partially_rotated(factor: Any) -> dict[str, Any]:
    """Rotary settings by layer type, as those of a Gemma 4 assistant."""
    full = {"partial_rotary_factor": factor, "rope_theta": 1e6, "rope_type": "proportional"}
    return {"full_attention": full, "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"}}


def mtp_tensor(part: str, value: torch.Tensor | None) -> Damage:
    """Replaces or removes a tensor of the MTP layer."""

    def change(content: Any) -> None:
        (name,) = [name for name in content if name.endswith("eh_proj.weight")]
        content[name.replace("eh_proj.weight", part)] = value

    return tensors(change)


def mtp_layer_copies(*indices: int) -> Damage:
    """Adds copies of the MTP layer as the layers of these indices; it is layer 0 itself."""
    first = MTP.target.config.num_hidden_layers

    def change(content: Any) -> None:
        prefix = f"model.layers.{first}."
        for index, name in product(indices, [name for name in content if name.startswith(prefix)]):
            content[name.replace(prefix, f"model.layers.{first + index}.")] = content[name].clone()

    return tensors(change)


def both(*damages: Damage) -> Damage:
    return lambda folder: [damage(folder) for damage in damages]


def packed_by(method: str, *parts: str) -> Damage:
    """Puts the tensors of a library that quantises, named in the config, in place of a matrix."""
    module = "midlayer.mlp.up_proj"
    added = {f"{module}.{part}": torch.ones(1) for part in parts}
    changes = (
        config(quantization_config={"quant_method": method}),
        tensors(lambda t: (t.pop(f"{module}.weight"), t.update(added))),
    )
    return lambda folder: [change(folder) for change in changes]


def text(content: str, name: str = "config.json") -> Damage:
    """Replaces a file."""
    return lambda folder: (folder / name).write_text(content, encoding="utf-8")


def removed(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


def truncated(size: int, file: str = "model.safetensors") -> Damage:
    return lambda folder: (folder / file).write_bytes((folder / file).read_bytes()[:size])


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


DEEP = "[" * 100_000 + "]" * 100_000
NOT_TENSORS = r"cannot be read as tensors .*; download it again"
EAGLE_IDS = "eagle_aux_hidden_state_layer_ids"
EAGLE: list[tuple[Damage, str]] = [
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
    (text('{"weight_map": {"fc.weight": "../model.safetensors"}}', checkpoint.INDEX), "outside of the checkpoint"),
    (text('{"weight_map": {"fc.weight": "a.safetensors"}}', checkpoint.INDEX), r"the file a\.safetensors is missing"),
    (config(speculators_model_type="hydra"), "type 'hydra' are not a draft head of a known format; known are Medusa"),
    (config(model_type=[]), r"model_type must be a string, got list '\[\]'"),
    (config(model_type={}), "model_type must be a string, got dict '{}'"),
    (config(hidden_size=HUGE), "but config.json makes it"),
    (config(intermediate_size=HUGE), "but config.json makes it"),
    (config(num_hidden_layers=HUGE), "config.json has 1000000000 layers, but the tensors have 1"),
    (config(num_attention_heads=HUGE), "config.json has 1000000000 attention heads"),
    (config(num_attention_heads=0), "num_attention_heads must be a whole number between 1"),
    (config(num_key_value_heads=3), "2 attention heads cannot share 3 key/value heads evenly"),
    (config(vocab_size=HUGE), r"t2d has shape \(40,\), but config.json has vocab_size 1000000000"),
    (config(draft_vocab_size=HUGE), "draft_vocab_size must be between 1 and the target's vocabulary size 40"),
    (config(draft_vocab_size=13), "a draft vocabulary of 13 tokens needs an integer tensor d2t of that size"),
    (config(target_hidden_size=HUGE), "but config.json makes it"),
    (config(rms_norm_eps="small"), "rms_norm_eps must be a positive number, got str 'small'"),
    (config(rms_norm_eps=float("nan")), "rms_norm_eps must be a positive number"),
    (config(rope_theta=-1), "rope_theta must be a positive number"),
    (config(rope_scaling={"rope_type": "spiral"}), "the rotary parameters .*spiral.* cannot be used"),
    (config(rope_scaling={"rope_type": "llama3"}), "the rotary parameters .* cannot be used"),
    (config(rope_scaling=[1]), "rope_scaling must be an object"),
    (config(hidden_act="square"), "cannot be built .*square"),
    (config(hidden_act=None, model_type="mamba"), "model_type 'mamba' are not supported, only llama, qwen2, qwen3"),
    (config(norm_before_residual="yes"), "norm_before_residual must be true or false"),
    (config(eagle_config={EAGLE_IDS: [1, "x"]}), "must be a list of layer numbers"),
    (config(target_layer_ids=[1, 2, 3], **{EAGLE_IDS: [1, 2, 3]}), "twice, and differently"),
    (tensors(lambda t: t.pop("fc.weight")), "the tensor fc.weight is missing"),
    (tensors(lambda t: t.pop("midlayer.mlp.up_proj.weight")), "1 tensors are missing, such as layers.0.mlp.up_proj"),
    (packed_by("compressed-tensors", "weight_packed", "weight_scale"), "install compressed-tensors|cannot be read"),
    (packed_by("compressed-tensors", "weight_packed"), "quantised by 'compressed-tensors', which is not read"),
    (packed_by("torchao", "_weight_qdata"), "metadata do not describe midlayer.mlp.up_proj.weight|install torchao"),
    (tensors(lambda t: t.pop("midlayer.self_attn.q_proj.weight")), "layers.0.self_attn.q_proj.weight is missing"),
    (tensors(lambda t: t.pop("d2t")), "needs an integer tensor d2t of that size, found none"),
    (tensors(lambda t: t.update(d2t=torch.zeros(12))), "needs an integer tensor d2t .* dtype torch.float32"),
    (tensors(lambda t: t.update(d2t=torch.full((12,), 40))), "d2t maps draft tokens to ids outside"),
    (tensors(lambda t: t.update(d2t=torch.full((12,), -20))), "d2t maps draft tokens to ids outside"),
    (tensors(lambda t: t.update(d2t=torch.zeros(3, dtype=torch.long))), r"found one of shape \(3,\)"),
    (tensors(lambda t: t.update({"norm.weight": torch.ones(17)})), r"tensor norm.weight has shape \(17,\)"),
    (tensors(lambda t: t.update({"norm.weight": torch.ones(16, dtype=torch.int8)})), "int8; quantised heads"),
    (tensors(lambda t: t.update({"fc.weight": torch.ones(16, 47)})), "but config.json makes it"),
    (tensors(lambda t: t.update({"fc.weight": torch.ones(48)})), "fc.weight must be a matrix"),
    (tensors(lambda t: t.update({"markov.weight": torch.ones(4)})), "has no tensors such as markov.weight"),
    (tensors(lambda t: t.update({"layers.7.norm.weight": torch.ones(4)})), "no complete sequence of layers"),
]
LATER: dict[str, list[tuple[Damage, str]]] = {
    "domino_specforge": [
        (config(dflash_config={"gru_hidden_dim": 2**31 - 1}), "a head that cannot be built"),
        (config(dflash_config={"emb_dim": 10**18}), "emb_dim must be a whole number between"),
        (config(dflash_config={"shift_label": 1}), "shift_label must be true or false"),
        (config(dflash_config={"projector_type": "x"}), "projector_type 'x' are not supported"),
    ],
    "dflash2_zlab": [
        (config(dflash_config={"conv_group_size": 7}), "conv_group_size 7 does not divide"),
        (config(dflash_config={"conv_kernel_size": 9}), "conv_kernel_size 9 exceeds block_size 8"),
        (config(dflash_config={"selector_rank": HUGE}), "but config.json makes it"),
        (config(dflash_config={"output_multiplier": []}), "output_multiplier must be a positive"),
    ],
    "speculators_dspark_rnn": [
        (config(markov_rank=HUGE), "markov_rank 1000000000, but the tensors have 16"),
        (config(markov_head_type="lstm"), "markov_head_type must be one of vanilla"),
        (config(markov_head_type="gated"), "markov_head.gate_proj.bias"),
    ],
    "deepspec_dspark_qwen3_rnn": [
        (config(target_layer_ids=[0, 3]), "reads 3 hidden states of the target"),
        (config(model_type="gemma3_text"), "'gemma3_text' are not supported"),
        (config(model_type="gemma4_text", layer_types=["sliding_attention"] * 2), "have to be of type full_attention"),
    ],
    "gemma4_assistant": [
        (config(text_config={"head_dim": HUGE}), "but config.json makes it"),
        (config(text_config={"num_hidden_layers": HUGE}), "but the tensors have"),
        (config(text_config={"hidden_activation": "square"}), "cannot be built"),
        (config(text_config={"num_attention_heads": "x"}), "cannot be used"),
        (config(text_config={"rope_parameters": {}}), "cannot be"),
        (config(text_config={"rope_parameters": partially_rotated(HUGE)}), "must be above 0 and at most 1, got 1000"),
        (config(text_config={"rope_parameters": partially_rotated("x")}), "cannot be|must be above 0"),
    ],
}
SPECULATORS_MTP: list[tuple[Damage, str]] = [
    (config(transformer_layer_config={"intermediate_size": HUGE}), "but the file holds 40,112"),
    (config(transformer_layer_config={"num_attention_heads": 0}), "cannot be used"),
    (config(transformer_layer_config={"hidden_act": "square"}), "cannot be used"),
    (config(transformer_layer_config={"hidden_size": 32}), "hidden_size 32, but this target has 64"),
]
OTHER_KEYS: list[tuple[Damage, str]] = [
    *(
        (
            config(text_config={"num_key_value_heads": heads}),
            "reads keys of size 16, .* this target have 2 heads of size",
        )
        for heads in (1, 3, 4, 10**30)
    ),
    (
        config(text_config={"per_layer_config": {"3": {"head_dim": 24, "num_key_value_heads": 1}}}),
        "full_attention .* 24",
    ),
]
INCOMPLETE = "is missing|are missing, such as|must be a matrix|of a variant that is not supported"
MEDUSA: list[tuple[Damage, str]] = [
    (tensors(lambda t: {"something": torch.zeros(2)}), "not a draft head of a known format"),
    (tensors(lambda t: t | {"1.0.linear.weight": None}), INCOMPLETE),
    (tensors(lambda t: t | {"1.1.weight": None}), INCOMPLETE),
    (tensors(lambda t: {name: t[name] for name in t if not name.startswith("0.")}), INCOMPLETE),
    (tensors(lambda t: t | {"3000.0.linear.weight": t["0.0.linear.weight"].clone()}), INCOMPLETE),
    (tensors(lambda t: {name: t[name].long() for name in t}), "quantised heads are not supported"),
    (tensors(lambda t: {name: torch.zeros(()) for name in t}), INCOMPLETE),
]
DAMAGED_HEADS: list[tuple[Damage, str]] = [
    (config(num_heads=HUGE), "num_heads is 1000000000"),
    (config(num_layers=HUGE), "num_layers is 1000000000"),
    (config(vocab_size=HUGE), "vocab_size 1000000000|should be|makes it"),
    *((config(base=value), "base must be an object") for value in ("zzz", [1])),
    *((config(num_heads=value), "num_heads must be a whole number") for value in ("4", True, -1)),
    (config(num_layers=None), "has no num_layers"),
    (config(lora_rank="x"), "lora_rank must be a whole number"),
]
ADAPTER, EXIT = "adapter_config.json", "exit_config.json"
DAMAGED_ADAPTER: list[tuple[Damage, str]] = [
    (config(ADAPTER, r=HUGE), "1000000000"),  # would catch: PEFT building LoRA matrices of 10**9 rows, 1.5 TB
    (config(ADAPTER, r=0), "r must be a whole number between 1 and"),
    (config(ADAPTER, r="64"), "r must be a whole number .* got str '64'"),
    (config(ADAPTER, r=32), "lora_A"),
    *((config(ADAPTER, peft_type=value), "peft_type must be 'LORA'") for value in ("PREFIX_TUNING", None)),
    (config(ADAPTER, rank_pattern={"head": HUGE}), "rank_pattern"),
    (config(ADAPTER, use_dora=True), "use_dora=True is not supported"),
    (config(ADAPTER, lora_alpha="x"), "lora_alpha must be a positive number"),
    (config(EXIT, exit_layer=99), "exit_layer must be between 1 and 7"),
    (config(EXIT, exit_layer="4"), "exit_layer must be a whole number .* got str '4'"),
    (config(EXIT, exit_layer=None), "the config has no exit_layer"),
    (config(EXIT, hidden_size=[384]), "hidden_size must be a whole number"),
    (config(EXIT, vocab_size=5), "vocab_size 5, but this target has 8192"),
    (tensors(lambda t: {name: one.char() for name, one in t.items()}), "of torch.int8; load one that is not quantised"),
    (tensors(lambda t: {name: one.to(torch.float8_e4m3fn) for name, one in t.items()}), "of torch.float8_e4m3fn; load"),
]
# Would catch: RecursionError, JSONDecodeError, KeyError or AttributeError from deep inside.
for content in (DEEP, "", "{", '"text"', "\x00", '{"model_type": "medusa_heads"}'):
    DAMAGED_HEADS.append((text(content), "{folder}"))
    DAMAGED_ADAPTER.extend((text(content, file), "{folder}") for file in (ADAPTER, EXIT))
for size in (0, 7, 100, 500_000):
    for file in ("model.safetensors", "lora/adapter_model.safetensors"):
        DAMAGED_HEADS.append((truncated(size, file), f"{{folder}}/{file} cannot be read as tensors"))
    file = "adapter_model.safetensors"
    DAMAGED_ADAPTER.append((truncated(size, file), f"{{folder}}/{file} cannot be read as tensors"))
MTP_LAYERS: list[tuple[Damage, str]] = [
    (mtp_tensor("eh_proj.weight", None), r"no MTP layers: neither .* nor mtp\.fc\.weight"),
    (mtp_layer_copies(1), "config.json has num_nextn_predict_layers = 1, but the file has 2 MTP layers; name a"),
    (config(num_nextn_predict_layers=2), "config.json has num_nextn_predict_layers = 2, but the file has 1 MTP layers"),
    (config(text_config={"mtp_num_hidden_layers": 3}), "has mtp_num_hidden_layers = 3, but the file has 1 MTP"),
    (config(num_mtp_layers="x"), "num_mtp_layers must be a whole number"),
    (
        both(config(num_nextn_predict_layers=2), mtp_layer_copies(2)),
        r"the file has MTP layers \[0, 2\], counted from 0, so that some are missing",
    ),
    (mtp_tensor("hnorm.weight", None), r"has no hnorm\.weight"),
    (mtp_tensor("self_attn.o_proj.weight", None), "missing_keys: .*o_proj"),
    (mtp_tensor("mlp.experts.1.up_proj.weight", None), "do not fit this target"),
    (mtp_tensor("eh_proj.weight", torch.zeros(32, 32)), r"has shape \(32, 32\)"),
    (mtp_tensor("enorm.weight", torch.zeros(64, dtype=torch.int8)), "dtype torch.int8"),
    (mtp_tensor("self_attn.o_proj.weight", torch.zeros(3, 3)), "do not fit this target"),
    (mtp_tensor("self_attn.o_proj.weight", torch.zeros(32, 16, dtype=torch.int8)), "quantised MTP layers"),
    (mtp_tensor("self_attn.extra.weight", torch.zeros(2)), "unexpected_keys: .*extra"),
    (config(mtp_hidden_states_first=True), "config.json has mtp_hidden_states_first = 'True', which is not read"),
    (config(text_config={"mtp_use_dedicated_embeddings": True}), "mtp_use_dedicated_embeddings = 'True'"),
]


def adapter_of_itself(folder: Path) -> None:
    (folder / ADAPTER).write_text(json.dumps({"base_model_name_or_path": str(folder)}))


KNOWN = "none of the known formats, which are: exit adapters; Medusa heads; .*EAGLE"
AUTOMATIC: list[tuple[Damage, str]] = [
    *((config(model_type=value), r"head/config\.json: model_type must be a string") for value in ([], {}, 3)),
    (adapter_of_itself, "is an adapter itself"),
    *((text(one), KNOWN) for one in ("{}", '{"speculators_model_type": "hydra"}')),
]


PROJECTION = {"target_proj.weight": torch.ones(64, 192, dtype=torch.int8)}
PARD: list[tuple[Damage, str]] = [
    (config(attention_wobble=0.7), "config.json has attention_wobble = '0.7', which may change what"),
    (config(pard_token=4096), "pard_token 4096, but the model has 128 embeddings"),
    (config(pard2_target_layers=[-1, 4]), r"has the tensors .* need a weight of \(64, 128\)"),
    (config(pard2_target_layers=[-1, 9, 4]), r"reads layers \[-1, 9, 4\] of its target"),
    (config(pard2_target_layers="all"), "{folder}: pard2_target_layers must be a list of layers, got 'all'"),
    (config(pard2_scale=None), "{folder}: pard2_scale must be a positive number"),
    (config(hidden_size="x"), "cannot load .*Field 'hidden_size' expected int, got str"),
    (config(intermediate_size=7), "cannot load .*RuntimeError"),
    (config(head_dim=0), "cannot load .*ZeroDivisionError"),
    (removed("warp_model.bin"), "PARD-2 needs it"),
    (lambda folder: torch.save(PROJECTION, folder / "warp_model.bin"), r"tensor 'weight' of torch\.int8; load one"),
]


def load_layers(folder: Path, _: Any) -> None:
    """Load MTP layers, which leaves the target as it was."""
    before = MTP.target.config.to_dict(), [name for name, _ in MTP.target.named_modules()]
    try:
        load_mtp(MTP.target, str(folder))
    finally:
        assert before == (MTP.target.config.to_dict(), [name for name, _ in MTP.target.named_modules()])


def draft_with(folder: Path, _: Any) -> None:
    candidates = DraftModelCandidates(str(folder), k=3)
    FIXTURES["pard2_llama"].target.generate(**prompts(1), max_new_tokens=4, candidate_generator=candidates)


def copied(source: Path) -> Damage:
    return lambda folder: shutil.copytree(source, folder)


Checkpoint = tuple[Damage, Callable[[Path, Any], Any], list[tuple[Damage, str]]]
CHECKPOINTS: dict[str, Checkpoint] = {
    "EAGLE": (lambda folder: export_head(small_eagle(), folder, "eagle"), lambda folder, _: load_head(folder), EAGLE),
    "Medusa": (
        lambda folder: export_head(random_heads(tiny_model("llama"), own_outputs=True), folder, "tgi"),
        lambda folder, _: load_head(folder),
        MEDUSA,
    ),
    "bundled heads": (copied(BUNDLED_HEADS), lambda folder, model: load_head(folder).bind(model), DAMAGED_HEADS),
    "bundled adapter": (copied(BUNDLED_ADAPTER), lambda folder, model: load_exit_head(model, folder), DAMAGED_ADAPTER),
    "MTP layers": (copied(MTP.target_folder), load_layers, MTP_LAYERS),
    "PARD-2": (copied(FIXTURES["pard2_llama"].head_folder), draft_with, PARD),
    "automatic": (
        copied(HEAD_FIXTURES / "gemma4_assistant" / "head"),
        lambda folder, _: AutoCandidates.from_pretrained(folder),
        AUTOMATIC,
    ),
    "a model": (copied(BUNDLED_DRAFT), lambda folder, _: load_head(folder), [(lambda _: None, "not a draft head")]),
    **{
        name: (copied(HEAD_FIXTURES / name / "head"), lambda folder, _: load_head(folder).bind(target_of(QWEN3)), rows)
        for name, rows in LATER.items()
    },
    **{
        f"assistant of {target}": (
            copied(HEAD_FIXTURES / "gemma4_assistant" / "head"),
            lambda folder, _, target=target: load_head(folder).bind(target_of(HEAD_FIXTURES / "targets" / target)),
            rows,
        )
        for target, rows in {
            "gemma4_text": OTHER_KEYS,
            "llama": [(lambda _: None, "this target have no such layer; load the assistant that belongs to it")],
        }.items()
    },
    "MTP of speculators": (
        copied(HEAD_FIXTURES / "speculators_mtp_qwen3" / "head"),
        lambda folder, _: load_mtp(target_of(QWEN3), str(folder)),
        SPECULATORS_MTP,
    ),
}
"""How a checkpoint is made and loaded, and what happens to it with which words."""


@pytest.mark.parametrize(
    ("name", "number"), [(name, number) for name, (*_, rows) in CHECKPOINTS.items() for number in range(len(rows))]
)
def test_load_damaged_files_raise_one_sentence_and_take_no_memory(
    tmp_path: Path, name: str, number: int, reference_model: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Would catch: errors from deep inside, 10**9 modules that are built one after the other, code that is run."""
    (make, load, rows), folder = CHECKPOINTS[name], tmp_path / "head"
    damage, words = rows[number]
    make(folder)
    damage(folder)
    tracemalloc.start()
    try:
        with pytest.raises((ValueError, FileNotFoundError), match=words.replace("{folder}", str(folder))) as error:
            load(folder, reference_model)
        assert tracemalloc.get_traced_memory()[1] < 50 * 2**20
    finally:
        tracemalloc.stop()
    assert isinstance(error.value, ValueError) or "has no config.json" in str(error.value) or name == "PARD-2"
    assert "\n" not in str(error.value) or name in ("bundled adapter", "MTP layers")
    assert str(error.value).startswith(str(folder)) or name != "EAGLE"
    assert "code from a checkpoint" not in capsys.readouterr().out
