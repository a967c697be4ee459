"""DSpark, DFlash2, Domino and layered MTP in the decoding loop: the numbers of the originals, and the same tokens."""

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import DeepseekV3Config, Gemma4TextConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Model
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextModel

from hf_specgen import DFlashCandidates, MTPCandidates
from hf_specgen.heads.base import HeadInputs
from hf_specgen.heads.block_drafter import BlockDrafter
from hf_specgen.heads.head_formats import load_head
from hf_specgen.heads.head_text import HeadText
from hf_specgen.heads.mtp import load_mtp
from hf_specgen.heads.mtp_drafter import LayeredDrafter
from hf_specgen.heads.path_head import PathDrafter
from hf_specgen.targets.cache import RaggedCache
from hf_specgen.tree import DraftTree
from tests.helpers import SAMPLING, assert_same_tokens, prompts
from tests.helpers.calls import frontier_of, with_sessions
from tests.helpers.head_fixtures import FIXTURES, Fixture, features_of

HEADS = {name: fixture for name, fixture in FIXTURES.items() if fixture.family == "path"}
LAYERED = FIXTURES["mtp_transformers_glm4_moe_2layers"]
pytestmark = pytest.mark.filterwarnings("ignore")


def level_by_level(drafter: Any, first: torch.Tensor, paths: list[list[int]]) -> torch.Tensor:
    """`[batch, paths, depths, vocab]` logits along chains beside each other in one tree that grows level by level."""
    batch, tokens = len(first), torch.tensor(paths)
    found, root = [first[:, None].expand(-1, len(paths), -1)], torch.zeros(batch, len(paths), dtype=torch.long)
    for level in range(1, tokens.shape[1]):
        above = root if level == 1 else torch.arange(len(paths)).expand(batch, -1)
        last = tokens[:, level - 1].expand(batch, -1)
        found.append(drafter.forward_nodes(frontier_of(last, level, level * len(paths), above)))
    return torch.stack(found, dim=2)


@pytest.mark.parametrize(
    ("name", "limited"),
    [*((name, False) for name in HEADS), ("domino_specforge", True), ("speculators_dspark_rnn", True)],
)
@torch.no_grad()
def test_path_drafter_has_the_logits_of_the_original_on_two_paths(name: str, limited: bool) -> None:
    """The greedy path and another one, in one tree. Would catch: the state of another path or depth."""
    fixture = HEADS[name]
    bound: Any = load_head(fixture.head_folder).bind(fixture.target)
    if limited:
        bound.head.max_candidates = 10
    for prompt in fixture.prompts:
        drafter = PathDrafter(bound, None, 1)
        features, tokens = states_of(fixture, bound, fixture.text(prompt, 1))
        recorded = [fixture.drafted(prompt, 1, part) for part in ("greedy.", "second.")]
        first = drafter.forward_text(HeadText([features], [tokens], [True]))
        logits = level_by_level(drafter, first, [one.tokens for one in recorded])[0]
        for ours, one in zip(logits, recorded, strict=True):
            ours = ours if one.candidates is None else ours.gather(-1, one.candidates)
            ours, kept = ours.softmax(dim=-1) if one.is_normalised else ours, ours > -torch.inf
            assert not limited or (kept.sum(dim=-1) == min(drafter.max_candidates, 10)).all()
            torch.testing.assert_close(ours[kept], one.logits[kept], atol=2e-4, rtol=1e-4)


def states_of(fixture: Fixture, bound: Any, text: list[int]) -> tuple[torch.Tensor, list[int]]:
    """The hidden states of a text without its last token, and the token after each of these positions."""
    states = fixture.target(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
    return features_of(bound, states)[0], text[1:]


@torch.no_grad()
def test_layered_drafter_tree_has_the_logits_of_each_path_alone() -> None:
    """Would catch: a node that reads the tokens or states of a sibling."""
    bound = load_mtp(LAYERED.target, str(LAYERED.target_folder)).bind(LAYERED.target)
    for number in LAYERED.rounds:
        features, tokens = states_of(LAYERED, bound, LAYERED.text("a", number))

        def after(paths: list[list[int]], features: Any = features, tokens: Any = tokens) -> torch.Tensor:
            drafter = LayeredDrafter(bound, None, 1)
            return level_by_level(drafter, drafter.forward_text(HeadText([features], [tokens], [True])), paths)[0]

        paths = [[token, 0] for token in (5, 17, 40)]
        for path, logits in zip(paths, after(paths), strict=True):
            torch.testing.assert_close(logits, after([path])[0], atol=2e-4, rtol=1e-4)


def strategy(fixture: Fixture, **settings: Any) -> Any:
    return (MTPCandidates if fixture is LAYERED else DFlashCandidates)(fixture.checkpoint_folder, **settings)


@pytest.mark.parametrize("tree", [None, 8])
@pytest.mark.parametrize(
    "name",
    ["speculators_dspark_rnn", "dflash2_zlab", "domino_specforge", "dflash_zlab", "lilicorr", LAYERED.folder.name],
)
def test_path_head_rejection_gives_q_of_every_node(name: str, tree: int | None) -> None:
    """q is the corrected distribution: of each node's own path, and zero where the head never proposes."""
    fixture = FIXTURES[name]
    drafts = list[DraftTree]()

    def record(session: Any) -> None:
        draft = session.draft
        session.draft = lambda depths: drafts.append(draft(depths)) or drafts[-1]

    candidates = with_sessions(strategy(fixture, k=4, tree=tree), record)
    sampling = {"do_sample": True, "verification": "rejection", "max_new_tokens": 8}
    fixture.target.generate(**prompts(2), candidate_generator=candidates, **sampling)
    assert any(tree.nodes for tree in drafts)
    for one in drafts:
        for row, parents in enumerate(one.parents if one.nodes else ()):
            q = one.q[row, : len(parents)]
            torch.testing.assert_close(q.sum(dim=-1), torch.ones(len(parents)))
            assert (q.gather(1, one.tokens[row, : len(parents), None]) > 0).all()
            if name == "dflash2_zlab":
                assert ((q > 0).sum(dim=-1) <= 6).all()
            if name.startswith("dflash"):  # branches with the same draws would not be independent
                continued = [node for node in {*parents} if node >= 0]
                drawn = [one.tokens[row, node].item() * (name == "dflash2_zlab") for node in continued]
                groups = [(one.depths(row)[1 + node], token) for node, token in zip(continued, drawn, strict=True)]
                assert len(set(groups)) == len(groups)


DSPARK = {"projector_type": "dspark"}
MODELOPT = {"markov_head.": "", "confidence_head.proj": "confidence_proj"}
LAYOUTS: list[tuple[str, dict[str, str], dict[str, Any], dict[str, Any], tuple[int, bool]]] = [
    ("deepspec_dspark_qwen3_vanilla", MODELOPT, {}, DSPARK | {"shift_label": True}, (0, False)),
    ("deepspec_dspark_qwen3_vanilla", MODELOPT, {}, DSPARK | {"shift_label": False}, (1, False)),
    ("deepspec_dspark_qwen3_rnn", {"markov_head": "logit_head.markov_head"}, {}, DSPARK, (0, True)),
    ("deepspec_dspark_qwen3_rnn", {}, {}, {}, (0, False)),
    ("speculators_dspark_vanilla", {}, {"sample_from_anchor": None}, {}, (0, True)),
    ("speculators_dspark_gated_noanchor_sliding", {}, {"sample_from_anchor": None}, {}, (1, True)),
    ("speculators_dspark_vanilla", {}, {"sample_from_anchor": None, "dspark_bonus_anchor": True}, {}, (1, False)),
]


@pytest.mark.parametrize(("name", "renamed", "changes", "dflash", "layout"), LAYOUTS)
@torch.no_grad()
def test_dspark_in_the_layouts_of_other_programs(
    name: str, renamed: dict[str, str], changes: Any, dflash: Any, layout: tuple[int, bool], tmp_path: Path
) -> None:
    """The tensors of a fixture under other names and another config: the same head, and which layout it has."""
    folder = FIXTURES[name].head_folder
    config = json.loads((folder / "config.json").read_text()) | changes
    if dflash:
        config |= {"architectures": ["DSparkDraftModel"], "dflash_config": dflash}
    tensors = load_file(folder / "model.safetensors")
    for before, after in renamed.items():
        tensors = {key.replace(before, after): tensor for key, tensor in tensors.items()}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    head: Any = load_head(tmp_path)
    assert (head.config.first_proposing_position, head.config.layout_undecided) == layout
    original = load_head(folder).state_dict()
    assert all(torch.equal(tensor, original[key]) for key, tensor in head.state_dict().items())


class Beside(nn.Module):
    """The input of EAGLE-3's attention, in place of a layer's first norm."""

    def __init__(self, embeddings: torch.Tensor, norms: list[nn.Module]) -> None:
        super().__init__()
        self.embeddings, self.norms = embeddings, nn.ModuleList(norms)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.norms[0](self.embeddings), self.norms[1](hidden)], dim=-1)


@pytest.mark.parametrize("name", ["Gemma4DSparkModel", "Gemma4Eagle3Model"])
@torch.no_grad()
def test_deepspec_heads_with_layers_of_gemma_have_their_outputs(name: str, tmp_path: Path) -> None:
    """Transformers' layers are the reference; embeddings are scaled, logits capped."""
    is_eagle = name == "Gemma4Eagle3Model"
    count = 1 if is_eagle else 2
    types = {"layer_types": ["full_attention"] * count, "num_hidden_layers": count, "num_kv_shared_layers": 0}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 60, "num_attention_heads": 4}
    heads = {"num_key_value_heads": 4, "num_global_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16}
    other = {"attention_k_eq_v": True, "hidden_size_per_layer_input": 0, "final_logit_softcapping": 30.0}
    text = Gemma4TextConfig(**types, **sizes, **heads, **other, attn_implementation="sdpa")
    torch.manual_seed(0)
    model: Any = Gemma4TextModel(text)
    if is_eagle:
        wide: Any = Gemma4TextModel(Gemma4TextConfig(**types, **sizes | {"hidden_size": 64}, **heads, **other))
        attention, norms = wide.layers[0].self_attn, [type(model.norm)(32), type(model.norm)(32)]
        attention.config._attn_implementation, attention.o_proj = "sdpa", nn.Linear(64, 32, bias=False)
        model.layers[0].self_attn, model.layers[0].hidden_norm = attention, norms[1]
    tensors = {name: tensor for name, tensor in model.state_dict().items() if "per_layer" not in name}
    tensors |= {name: 1 + torch.rand_like(one) for name, one in tensors.items() if "norm" in name or "scalar" in name}
    model.load_state_dict(tensors, strict=False)
    tensors |= {"fc.weight": torch.randn(32, 64), "lm_head.weight": torch.randn(60, 32)}
    own: dict[str, Any] = {"architectures": [name], "target_layer_ids": [0, 1]}
    if not is_eagle:
        own |= {"mask_token_id": 3, "block_size": 5}
        tensors |= {"markov_head.markov_w1.weight": torch.randn(60, 4), "hidden_norm.weight": torch.ones(32)}
        tensors |= {"markov_head.markov_w2.weight": torch.randn(60, 4)}
    (tmp_path / "config.json").write_text(json.dumps(text.to_dict() | own))
    save_file(tensors, tmp_path / "model.safetensors")
    head: Any = load_head(tmp_path)
    ids, positions = torch.randint(60, (1, 5)), torch.arange(5)[None]
    embeddings, mask = model.embed_tokens(ids), torch.ones(1, 1, 5, 5, dtype=torch.bool)
    states = hidden = torch.randn(1, 5, 32) if is_eagle else embeddings
    if is_eagle:
        mask = mask.tril()
        norms[0].weight = model.layers[0].input_layernorm.weight
        model.layers[0].input_layernorm = Beside(embeddings, norms)
    rotary = model.rotary_emb(states, positions, "full_attention")
    for layer in model.layers:
        states = layer(states, position_embeddings=rotary, attention_mask=mask, shared_kv_states={})
    embedded = head.embed_tokens(ids)
    read = [HeadInputs(embedded, hidden, positions, mask)] if is_eagle else [embedded, positions, RaggedCache(), [0]]
    output = head(*read).output
    torch.testing.assert_close(output, model.norm(states), atol=1e-4, rtol=1e-4)
    logits = head.lm_head(output)
    torch.testing.assert_close(head.scale_logits(logits), 30 * (logits / 30).tanh())


@torch.no_grad()
def test_block_head_with_latent_attention_has_the_outputs_of_deepseek(tmp_path: Path) -> None:
    """Transformers' layers are the reference. Would catch: context or block keys rotated in another layout."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 60, "num_attention_heads": 4}
    latent = {"kv_lora_rank": 12, "q_lora_rank": 20, "qk_nope_head_dim": 6, "qk_rope_head_dim": 8, "v_head_dim": 10}
    layers = {"num_hidden_layers": 2, "first_k_dense_replace": 2, "num_key_value_heads": 4}
    config = DeepseekV3Config(**sizes, **latent, **layers, attn_implementation="sdpa")
    torch.manual_seed(0)
    model: Any = DeepseekV3Model(config)
    tensors = {name: 1 + torch.rand_like(one) if "norm" in name else one for name, one in model.state_dict().items()}
    model.load_state_dict(tensors)
    own = {"architectures": ["DFlashDraftModel"], "mask_token_id": 3, "block_size": 5, "target_layer_ids": [0]}
    # A gate of one half, and weights of twice the size behind it.
    tensors = {name: 2 * one if "o_proj" in name else one for name, one in tensors.items()}
    tensors |= {f"layers.{layer}.self_attn.g_proj.weight": torch.zeros(40, 32) for layer in (0, 1)}
    tensors |= {"fc.weight": torch.randn(32, 32), "hidden_norm.weight": torch.rand(32)}
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict() | own | {"mla_use_output_gate": True}))
    save_file(tensors, tmp_path / "model.safetensors")
    head: Any = load_head(tmp_path)
    embeddings, features, cache = model.embed_tokens(torch.randint(60, (1, 5))), torch.randn(1, 7, 32), RaggedCache()
    head.extend(features, torch.arange(7)[None], cache)
    output = head(embeddings, torch.arange(7, 12)[None], cache, [7]).output
    context, states = head.hidden_norm(head.fc(features)), embeddings
    rotary = model.rotary_emb(states, torch.arange(12)[None])
    for layer in model.layers:
        attention = layer.self_attn
        both = torch.cat((context, layer.input_layernorm(states)), dim=1)
        attended = attention(both, rotary, torch.zeros(1, 1, 12, 12))[0][:, 7:]
        states = states + attended
        states = states + layer.mlp(layer.post_attention_layernorm(states))
    torch.testing.assert_close(output, model.norm(states), atol=1e-4, rtol=1e-4)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict() | own | {"qk_rope_head_dim": 4}))
    with pytest.raises(ValueError, match="qk_rope_head_dim 4, but the tensors make it 8"):
        load_head(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict() | own | {"is_neox_style": True}))
    with pytest.raises(ValueError, match="latent attention with these rotary parameters is not supported"):
        load_head(tmp_path)


@torch.no_grad()
def test_lilicorr_has_the_scores_of_all_pairs_of_its_original() -> None:
    """Two texts in one batch. Would catch: candidates in another order, or the context entry of another text."""
    fixture = FIXTURES["lilicorr"]
    bound: Any = load_head(fixture.head_folder).bind(fixture.target)
    texts = [states_of(fixture, bound, fixture.text(prompt, 1)) for prompt in fixture.prompts]
    text = HeadText([features for features, _ in texts], [tokens for _, tokens in texts], [True, True])
    source: Any = None  # the text is given
    scores, candidates = BlockDrafter(bound, source, 2).forward_depths(text, 4)
    for row, prompt in enumerate(fixture.prompts):
        recorded = {name: fixture.get(f"{prompt}.round1.selector.{name}")[0] for name in LATTICE}
        assert torch.equal(candidates[row], recorded["candidates"])
        torch.testing.assert_close(scores[row, 0, 0], recorded["first_scores"], atol=2e-4, rtol=1e-4)
        torch.testing.assert_close(scores[row, 1:], recorded["edges"], atol=2e-4, rtol=1e-4)


LATTICE = ("candidates", "first_scores", "edges")
CONVOLVED = {"conv_kernel_size": 2, "conv_group_size": 16}


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("tree", [None, 8])
def test_lilicorr_of_the_width_of_its_block_with_convolutions_same_tokens(
    tree: int | None, sampling: str, tmp_path: Path
) -> None:
    """Would catch: a head without `token_proj` refused, DFlash2's layers taken for those of DFlash."""
    folder = FIXTURES["lilicorr"].head_folder
    config = json.loads((folder / "config.json").read_text())
    config["dflash_config"] |= CONVOLVED | {"lilicorr_hidden_size": 0}
    tensors = load_file(folder / "model.safetensors")
    kernels = {"base_kernel": torch.rand(2, 2, 64), "kernel_projection.weight": torch.rand(16, 64)}
    places = ("attention_conv", "mlp_conv")
    tensors |= {f"layers.0.{place}.{name}": one.clone() for place in places for name, one in kernels.items()}
    del tensors["lilicorr.token_proj.weight"], tensors["lilicorr.token_proj.bias"]
    for name, one in tensors.items():  # from width 16 to 64, the MLP from 32 to 128
        if name.startswith("lilicorr."):
            tensors[name] = torch.randn([4 * size if size in (16, 32, 48) else size for size in one.shape])
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    target = FIXTURES["lilicorr"].target
    drafts = DFlashCandidates(tmp_path, k=4, tree=tree)
    assert assert_same_tokens(target, prompts(3), drafts, max_new_tokens=16, **SAMPLING[sampling]).drafted > 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"lilicorr_logit_scale": None}, "lilicorr_logit_scale must be a positive number"),
        ({"lilicorr_candidate_topk": 32}, "lilicorr_candidate_topk must be between 1 and 16, got 32"),
        ({"lilicorr_enabled": False}, "lilicorr_enabled is false, but there are tensors"),
        ({"lilicorr_num_heads": 3}, "lilicorr_num_heads 3 does not divide the width 16"),
        ({"output_multiplier": 0.5}, "output_multiplier = '0.5', which may change"),
        ({"sample_from_anchor": True}, "whose anchor's position proposes a token is not supported"),
    ],
)
def test_lilicorr_that_would_compute_something_else_raises(change: dict[str, Any], reason: str, tmp_path: Path) -> None:
    """Would catch: a head that loads and drafts as if untrained."""
    folder = FIXTURES["lilicorr"].head_folder
    config = json.loads((folder / "config.json").read_text())
    config["dflash_config"] |= change
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    with pytest.raises(ValueError, match=reason):
        load_head(tmp_path)


def test_domino_of_early_specforge_is_the_same_head(tmp_path: Path) -> None:
    """Would catch: a head refused because its correction lies in `logit_head`, or because the class alone names it."""
    folder = HEADS["domino_specforge"].head_folder
    config = json.loads((folder / "config.json").read_text())
    del config["dflash_config"]["projector_type"]
    tensors = load_file(folder / "model.safetensors")
    moved = [name for name in tensors if name.startswith(("prefix_gru", "embed_proj"))]
    early = tensors | {f"logit_head.{name}": tensors.pop(name) for name in moved}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(early, tmp_path / "model.safetensors")
    head, original = load_head(tmp_path), load_head(folder)
    assert head.config == original.config
    assert all(torch.equal(tensor, original.state_dict()[key]) for key, tensor in head.state_dict().items())


@pytest.mark.parametrize("first", [0, 1])
def test_layout_that_the_file_leaves_open_is_measured(first: int) -> None:
    """The head proposes what follows only in one layout; whichever it is, the session finds it, and stays with it."""
    fixture = FIXTURES["speculators_dspark_vanilla"]
    head: Any = copy.deepcopy(load_head(fixture.head_folder))
    head.config = dataclasses.replace(head.config, first_proposing_position=1 - first, layout_undecided=True)
    text = fixture.target.generate(**prompts(1), max_new_tokens=24, do_sample=False)
    sessions: list[Any] = []

    class Recording(DFlashCandidates):
        def begin(self, *arguments: Any) -> Any:
            sessions.append(super().begin(*arguments))
            bound, state = sessions[-1].drafter.bound, sessions[-1].batch.state

            def logits(output: torch.Tensor) -> torch.Tensor:
                """Position `first` of the block prefers the next token, the other positions token 0."""
                known = len(state.prompts[0]) + len(state.generated[0])
                preferred = torch.zeros(output.shape[:-1], dtype=torch.long)
                if output.dim() == 3:
                    preferred[:, first - sessions[-1].drafter.proposes_from] = text[0, min(known, text.shape[1] - 1)]
                elif (calls.append(1) or len(calls) % 2) == 1 - first:
                    preferred[:] = text[0, min(known, text.shape[1] - 1)]
                return 99.0 * torch.nn.functional.one_hot(preferred, head.config.vocab_size)

            calls: list[int] = []
            bound.logits = logits
            return sessions[-1]

    for _ in range(2):
        assert_same_tokens(fixture.target, prompts(1), Recording(head, k=3), max_new_tokens=24)
        assert sessions[-1].drafter.proposes_from == first and abs(sessions[-1].drafter.layout.lead) >= 4


def test_path_head_counts_one_pass_of_its_block_per_draft() -> None:
    """Would catch: a pass counted for each depth of the draft, so that the policy takes the head for slow."""
    fixture = HEADS["domino_specforge"]
    statistics = assert_same_tokens(fixture.target, prompts(2), strategy(fixture, k=5, tree=8), max_new_tokens=8)
    assert {tuple(step.tokens_per_pass) for step in statistics.batch_steps if step.tokens_per_pass} <= {(8,), (16,)}
