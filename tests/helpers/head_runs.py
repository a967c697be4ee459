"""Runs a head of each format on the inputs of its fixtures, and compares it with its original implementation."""

from typing import Any

import torch

from hf_specgen.heads.head_formats import load_head
from tests.helpers.head_fixtures import Comparison, Fixture, features_of
from tests.helpers.head_sessions import Autoregressive, Block, Parallel, corrected

Rows = list[torch.Tensor]


def captured_features(fixture: Fixture, capture: dict[str, Any], input_ids: torch.Tensor, rows: int) -> Any:
    """The target's hidden states and logits at the last `rows` positions of a text without its pending last token."""
    with torch.no_grad():
        output = fixture.target(input_ids, **capture)
    states = tuple(None if state is None else state[:, -rows:] for state in output.hidden_states)
    return states, output.logits[:, -rows:]


class Rounds:
    """The two rounds of a fixture for some of its prompts, with features captured by the package."""

    def __init__(self, fixture: Fixture, prompts: list[str], bound: Any, comparison: Comparison) -> None:
        self.fixture, self.prompts, self.bound, self.comparison = fixture, prompts, bound, comparison

    def inputs(self, number: int, part: str = "") -> tuple[Rows, Rows]:
        """For each prompt the features of the positions that are new in a round, and the token after each of them."""
        features, tokens = [], []
        for prompt in self.prompts:
            own = f"{prompt}.round{number}.{part}"
            prefix = own if f"{own}input_ids" in self.fixture.tensors else f"{prompt}.round{number}."
            text = self.fixture.get(f"{prefix}input_ids")
            if number == 1:
                text = torch.cat((text, self.fixture.get(f"{prefix}next_token")), dim=1)
            rows = self.fixture.get(f"{own}features").shape[1]
            states, logits = captured_features(self.fixture, {"output_hidden_states": True}, text[:, :-1], rows)
            features.append(features_of(self.bound, states)[0])
            tokens.append(text[0, -rows:])
            self.comparison.check(f"{own}features", features[-1])
            self.comparison.check(f"{prefix}next_token", logits[0, -1].argmax())
            self.comparison.check_end(f"{prefix}target_logits", logits)
        return features, tokens

    def check(self, number: int, row: int, name: str, actual: torch.Tensor) -> None:
        """Compare with the ground truth of one prompt, where the fixture has it."""
        self.comparison.check_if_there(f"{self.prompts[row]}.round{number}.{name}", actual)


def scattered(bound: Any, draft_logits: torch.Tensor) -> torch.Tensor:
    """Logits over the draft vocabulary at the target's ids, -inf elsewhere."""
    head = bound.head
    logits = draft_logits.new_full((*draft_logits.shape[:-1], head.config.vocab_size), -torch.inf)
    ids = head.target_ids(torch.arange(head.config.draft_vocab_size))
    logits[..., ids] = draft_logits
    return logits


def bind(fixture: Fixture, comparison: Comparison) -> Any:
    """The head on its target, with the layers and the draft vocabulary that the fixture records."""
    bound: Any = load_head(fixture.head_folder).bind(fixture.target)
    if (expected := fixture.expected.get("taps_hf_tuple_index")) is not None:
        assert list(bound.aux_hidden_state_layers) == expected
    ids = bound.target_ids(torch.arange(bound.head.config.draft_vocab_size))
    comparison.check_if_there("kept_target_ids", ids)
    return bound


@torch.no_grad()
def run_autoregressive(fixture: Fixture, prompts: list[str], comparison: Comparison) -> None:
    bound = bind(fixture, comparison)
    rounds, session = Rounds(fixture, prompts, bound, comparison), Autoregressive(bound, len(prompts))
    raw: list[torch.Tensor] = []
    if hasattr(bound.head, "norm"):
        bound.head.norm.register_forward_pre_hook(lambda module, arguments: raw.append(arguments[0]))
    for number in (1, 2):
        features, tokens = rounds.inputs(number)
        raw.clear()
        outputs = session.read(features, tokens)
        steps = fixture.get(f"{prompts[0]}.round{number}.chain.tokens").shape[1]
        chains = session.chain(steps)
        for row, (output, chain) in enumerate(zip(outputs, chains, strict=True)):
            before_norm = raw[0][row, : len(output.hidden)] if raw else output.hidden
            rounds.check(number, row, "chain.first_pass_hidden", before_norm)
            rounds.check(number, row, "chain.first_pass_logits", bound.logits(output.output))
            rounds.check(number, row, "chain.hidden", chain.hidden)
            rounds.check(number, row, "chain.draft_logits", chain.draft_logits)
            rounds.check(number, row, "chain.logits", scattered(bound, chain.draft_logits))
            rounds.check(number, row, "chain.tokens", chain.tokens)
            if raw:
                steps_before_norm = [before_norm[-1], *(step[row, -1] for step in raw[1:])]
                rounds.check(number, row, "chain.prenorm_hidden", torch.stack(steps_before_norm))
            keys, values = session.keys_values(0, row)
            rounds.check(number, row, "draft_kv.key", keys)
            rounds.check(number, row, "draft_kv.value", values)


@torch.no_grad()
def run_parallel(fixture: Fixture, prompts: list[str], comparison: Comparison) -> None:
    bound = bind(fixture, comparison)
    assert bound.head.config.mask_token_id == fixture.expected["mask_token_id"]
    rounds, session = Rounds(fixture, prompts, bound, comparison), Parallel(bound, len(prompts))
    raw: list[torch.Tensor] = []
    bound.head.norm.register_forward_pre_hook(lambda module, arguments: raw.append(arguments[0]))
    for number in (1, 2):
        features, tokens = rounds.inputs(number)
        raw.clear()
        outputs = session.read_and_draft(features, tokens, fixture.expected["block_size"])
        for row, output in enumerate(outputs):
            last = len(features[row]) - 1
            rounds.check(number, row, "block.hidden", output.output)
            rounds.check(number, row, "block.prenorm_hidden", raw[0][row, last : last + len(output.output)])
            check_block_logits(rounds, number, row, output.output, fixture.expected["first_proposing_position"])


def check_block_logits(rounds: Rounds, number: int, row: int, output: torch.Tensor, first: int) -> None:
    logits = rounds.bound.logits(output)
    rounds.check(number, row, "block.draft_logits", logits)
    rounds.check(number, row, "block.logits", scattered(rounds.bound, logits))
    rounds.check(number, row, "block.tokens", rounds.bound.target_ids(logits[first:].argmax(-1)))


@torch.no_grad()
def run_block(fixture: Fixture, prompts: list[str], comparison: Comparison) -> None:
    """Block heads; those that are corrected by the path: the greedy path and one with another first token."""
    bound, expected = bind(fixture, comparison), fixture.expected
    config, is_path = bound.head.config, fixture.family == "path"
    first = config.first_proposing_position
    assert config.block_size == expected["block_size"] and first == expected.get("first_proposing_position", 1)
    assert config.mask_token_id == expected.get("mask_token_id", config.mask_token_id)
    assert not is_path or config.depth == expected["drafted_tokens"]
    if "batch.input_ids" in fixture.tensors:
        check_batch(fixture, bound, comparison)
    rounds, session = Rounds(fixture, prompts, bound, comparison), Block(bound, len(prompts))
    for number in (1, 2):
        features, tokens = rounds.inputs(number)
        session.read(features)
        blocks = torch.full((len(prompts), config.block_size), config.mask_token_id)
        blocks[:, 0] = torch.stack([row[-1] for row in tokens])
        output = session.draft(blocks)
        for row, prompt in enumerate(prompts):
            rounds.check(number, row, "block.input_ids", blocks[row])
            rounds.check(number, row, "block.hidden", output.output[row])
            rounds.check(number, row, "block.prenorm_hidden", output.hidden[row])
            if not is_path:
                check_block_logits(rounds, number, row, output.output[row], first)
                continue
            base = bound.logits(output.output[row])
            for name in ("block.base_logits", "block.logits"):
                rounds.check(number, row, name, base)
            for part in ("greedy", "second"):
                check_path(rounds, number, row, part, output.output[row : row + 1])
            if f"{prompt}.round{number}.selector.candidates" in fixture.tensors:
                check_selector(rounds, number, row, output.output[row])
        if f"{prompts[0]}.round{number}.conditioned.path" in fixture.tensors:
            paths = torch.cat([fixture.get(f"{prompt}.round{number}.conditioned.path") for prompt in prompts])
            blocks[:, 1 : 1 + paths.shape[1]] = paths
            logits = bound.logits(session.draft(blocks).output)
            for row in range(len(prompts)):
                rounds.check(number, row, "conditioned.logits", scattered(bound, logits[row, first:]))


def check_path(rounds: Rounds, number: int, row: int, part: str, block: torch.Tensor) -> None:
    """The corrected logits along one path of a block `[1, block, hidden]`."""
    bound, prefix = rounds.bound, f"{rounds.prompts[row]}.round{number}."
    head, path = bound.head, rounds.fixture.get(f"{prefix}{part}.tokens")
    previous = torch.cat((rounds.fixture.get(f"{prefix}next_token"), path[:, :-1]), dim=1)
    base, logits, confidence = corrected(bound, block, previous)
    chosen = bound.target_ids(logits.topk(2, dim=-1).indices)[0]
    best = chosen[:, 0] if part == "greedy" else torch.cat((chosen[:1, 1], chosen[1:, 0]))
    rounds.check(number, row, f"{part}.tokens", best)
    rounds.check(number, row, f"{part}.prev_tokens", previous)
    rounds.check(number, row, f"{part}.draft_logits", logits)
    rounds.check(number, row, f"{part}.logits", bound.to_target_vocabulary(logits))
    rounds.check(number, row, f"{part}.markov_bias", logits - base)
    if confidence is not None:
        rounds.check(number, row, f"{part}.confidence_logits", confidence)
        rounds.check(number, row, f"{part}.confidence", confidence.sigmoid())
    if f"{prefix}selector.candidates" in rounds.fixture.tensors:
        scores = logits[0].gather(-1, rounds.fixture.get(f"{prefix}selector.candidates")[0])
        rounds.check(number, row, f"{part}.scores", scores)
        rounds.check(number, row, f"{part}.q", scores.softmax(dim=-1))
    if f"{prefix}{part}.gru_states" in rounds.fixture.tensors:
        state, states = block.new_zeros(1, head.state_size), []
        for token in previous[0]:
            state = head.step(block[:, 0], token[None], state, torch.zeros(1), bound.embed).state
            states.append(state)
        rounds.check(number, row, f"{part}.gru_states", torch.stack(states))


def check_selector(rounds: Rounds, number: int, row: int, block: torch.Tensor) -> None:
    """The candidates of each position, and the scores of all pairs of a position's and the next one's."""
    bound, prefix = rounds.bound, f"{rounds.prompts[row]}.round{number}."
    head, first = bound.head, bound.head.config.first_proposing_position
    candidates = rounds.fixture.get(f"{prefix}selector.candidates")[0]
    base = bound.logits(block[first:])
    own = base.topk(candidates.shape[-1], dim=-1).indices
    assert torch.equal(own.sort(dim=-1).values, candidates.sort(dim=-1).values)
    rounds.comparison.compared.add(f"{prefix}selector.candidates")
    rounds.check(number, row, "selector.unary", base.gather(-1, candidates))

    def scores(position: int, token: torch.Tensor) -> torch.Tensor:
        query = head.step(block[first + position], token, block[:0, 0], token, bound.embed).query
        return (base[position] + query @ head.keys().T)[candidates[position]]

    rounds.check(number, row, "selector.first_scores", scores(0, rounds.fixture.get(f"{prefix}next_token")[0, 0]))
    edges = torch.stack(
        [torch.stack([scores(slot + 1, token) for token in row]) for slot, row in enumerate(candidates[:-1])]
    )
    rounds.check(number, row, "selector.edges", edges)
    rounds.check(number, row, "selector.edge_q", edges.softmax(dim=-1))


def check_batch(fixture: Fixture, bound: Any, comparison: Comparison) -> None:
    """The rows of a batch of equally long prompts, drafted in one pass."""
    texts, next_tokens = fixture.get("batch.input_ids"), fixture.get("batch.next_token")
    states, logits = captured_features(fixture, {"output_hidden_states": True}, texts, texts.shape[1])
    features, session = features_of(bound, states), Block(bound, len(texts))
    comparison.check("batch.features", features)
    comparison.check("batch.next_token", logits[:, -1].argmax(-1))
    session.read(list(features))
    blocks = torch.full((len(texts), bound.head.config.block_size), bound.head.config.mask_token_id)
    blocks[:, :1] = next_tokens
    output = session.draft(blocks).output
    path = torch.cat((next_tokens, fixture.get("batch.greedy.tokens")[:, :-1]), dim=1)
    base, logits, confidence = corrected(bound, output, path)
    comparison.check("batch.block.hidden", output)
    comparison.check("batch.block.base_logits", base)
    comparison.check("batch.greedy.logits", logits)
    comparison.check("batch.greedy.tokens", logits.argmax(-1))
    comparison.check("batch.greedy.confidence_logits", confidence)
