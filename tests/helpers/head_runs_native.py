"""As `head_runs`, for heads that only exist inside their targets' families: MTP layers, Gemma assistants, Medusa."""

from typing import Any

import torch

from hf_specgen.heads.gemma_assistant import source_layers
from hf_specgen.heads.head_formats import load_head
from hf_specgen.heads.mtp import load_mtp
from tests.helpers.head_fixtures import Comparison, Fixture, features_of
from tests.helpers.head_runs import Rounds, captured_features
from tests.helpers.head_sessions import Assistant, Autoregressive, LayeredMTP, RaggedCache


@torch.no_grad()
def run_mtp_recursive(fixture: Fixture, prompts: list[str], comparison: Comparison) -> None:
    """One MTP layer applied again and again, like an EAGLE head; fed with the state after or before the final norm."""
    bound = load_mtp(fixture.target, str(fixture.checkpoint_folder)).bind(fixture.target)
    for part in ("chain.", "chain_prenorm."):
        rounds, session = Rounds(fixture, prompts, bound, comparison), Autoregressive(bound, len(prompts))
        for number in (1, 2):
            if part == "chain.":
                features, tokens = rounds.inputs(number, part)
            else:
                features, tokens = given_before_norm(fixture, prompts, number, comparison)
            outputs = session.read(features, tokens)
            steps = fixture.get(f"{prompts[0]}.round{number}.{part}tokens").shape[1]
            for row, (output, chain) in enumerate(zip(outputs, session.chain(steps), strict=True)):
                logits = bound.logits(output.output)
                rounds.check(number, row, f"{part}first_pass_hidden", output.hidden)
                rounds.check(number, row, f"{part}first_pass_logits", logits)
                rounds.check(number, row, f"{part}hidden", chain.hidden)
                rounds.check(number, row, f"{part}logits", chain.draft_logits)
                rounds.check(number, row, f"{part}tokens", chain.tokens)
                if part == "chain.":
                    rounds.check(number, row, "training_forward.step0.logits", logits[-3:])


def given_before_norm(
    fixture: Fixture, prompts: list[str], number: int, comparison: Comparison
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The recorded states before the final norm; normalised, they have to be those after it."""
    features, tokens = [], []
    for prompt in prompts:
        prefix = f"{prompt}.round{number}."
        before = fixture.get(f"{prefix}chain_prenorm.features")
        comparison.check(f"{prefix}chain.features", fixture.target.get_decoder().norm(before))
        comparison.compared.add(f"{prefix}chain_prenorm.features")
        text = fixture.get(f"{prefix}input_ids")
        text = torch.cat((text, fixture.get(f"{prefix}next_token")), dim=1) if number == 1 else text
        features.append(before[0])
        tokens.append(text[0, -before.shape[1] :])
    return features, tokens


@torch.no_grad()
def run_mtp(fixture: Fixture, prompts: list[str], comparison: Comparison) -> None:
    """As many draft tokens as there are MTP layers, each layer with keys and values of its own."""
    bound = load_mtp(fixture.target, str(fixture.target_folder)).bind(fixture.target)
    layers = bound.head.config.num_layers
    assert layers == fixture.expected["num_mtp_layers"]
    session = LayeredMTP(bound, len(prompts))
    known = [0] * len(prompts)
    numbers = sorted({int(name.split(".")[1][5:]) for name in fixture.tensors if ".round" in name})
    for number in numbers:
        features, tokens = [], []
        for row, prompt in enumerate(prompts):
            text = fixture.get(f"{prompt}.round{number}.input_ids")
            rows = text.shape[1] - 1 - known[row]
            states, _ = captured_features(fixture, {"output_hidden_states": True}, text[:, :-1], rows)
            features.append(features_of(bound, states)[0])
            tokens.append(text[0, -rows:])
            known[row] += rows
            comparison.check_end(f"{prompt}.round{number}.features", features[-1][None])
        hidden, logits, drafted = session.round(features, tokens)
        for row, prompt in enumerate(prompts):
            prefix = f"{prompt}.round{number}."
            for layer in range(layers):
                comparison.check_end(f"{prefix}layer{layer}.hidden", hidden[layer][row][None])
            comparison.check(f"{prefix}logits", logits[row])
            comparison.check(f"{prefix}tokens", drafted[row])


@torch.no_grad()
def run_assistant(fixture: Fixture, prompts: list[str], comparison: Comparison) -> None:
    """A Gemma 4 assistant, with the target's keys and values of the accepted text and of nothing else."""
    bound = load_head(fixture.head_folder).bind(fixture.target)
    steps = fixture.expected["num_assistant_tokens"]
    for number in (1, 2):
        states, keys_values, last = [], [], []
        for prompt in prompts:
            text = fixture.get(f"{prompt}.round{number}.input_ids")
            cache = RaggedCache()
            output = fixture.target(text[:, :-1], past_key_values=cache, output_hidden_states=True)
            states.append(features_of(bound, output.hidden_states)[0, -1])
            held = {kind: cache.layers[index] for kind, index in source_layers(fixture.target.config).items()}
            rows = text.shape[1] - 1
            keys_values.append(
                {kind: (layer.keys[:, :, :rows], layer.values[:, :, :rows]) for kind, layer in held.items()}
            )
            last.append(int(text[0, -1]))
            comparison.check(f"{prompt}.round{number}.clean.features", states[-1])
            comparison.check(f"{prompt}.round{number}.next_token", output.logits[0, -1].argmax())
        drafted = Assistant(bound).chain(states, keys_values, last, steps)
        for prompt, chain in zip(prompts, drafted, strict=True):
            prefix = f"{prompt}.round{number}.clean."
            comparison.check(f"{prefix}fed_back_hidden", chain.hidden)
            comparison.check(f"{prefix}logits", chain.draft_logits)
            comparison.check(f"{prefix}tokens", chain.tokens)


@torch.no_grad()
def run_medusa(fixture: Fixture, prompts: list[str], comparison: Comparison) -> None:
    """Medusa heads on the target's last state."""
    heads: Any = load_head(fixture.head_folder)
    layers = fixture.expected["taps_hf_tuple_index"]
    for prompt in prompts:
        for number in (1, 2):
            prefix = f"{prompt}.round{number}."
            text = fixture.get(f"{prefix}input_ids")
            text = text if number == 1 else text[:, :-1]
            rows = fixture.get(f"{prefix}features").shape[1]
            states, logits = captured_features(fixture, {"output_hidden_states": layers}, text, rows)
            features = torch.cat([states[layer] for layer in layers], dim=-1)
            comparison.check(f"{prefix}features", features)
            comparison.check(f"{prefix}target_logits", logits)
            hidden = torch.stack([heads.head_state(head, features[0]) for head in range(heads.config.num_heads)], dim=1)
            matrices = heads.lm_heads if heads.config.own_outputs else [fixture.target.lm_head] * hidden.shape[1]
            own = torch.stack([matrix(hidden[:, head]) for head, matrix in enumerate(matrices)])
            comparison.check(f"{prefix}heads.logits", own)
            comparison.check(f"{prefix}heads.tokens", own[:, -1].argmax(-1))
