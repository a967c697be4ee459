"""`hf-specgen demo`, and the workloads that demo, doctor, tuning and benchmarks share."""

import copy
import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from rich.console import Console
from safetensors.torch import load_file
from transformers import GenerationMixin, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from benchmarks.harness.wide import widen
from hf_specgen import FixedDepth, MedusaCandidates, NgramCandidates
from hf_specgen.call_statistics import RowStep, Statistics
from hf_specgen.cli import demo, doctor
from hf_specgen.cli.__main__ import app
from hf_specgen.cli.chat import AnswerWriter, Chat
from hf_specgen.evaluation.measure import Comparison, Sample, Variant
from hf_specgen.evaluation.published import NAME, PUBLISHED
from hf_specgen.evaluation.workloads import ASSETS, domain_prompts, everyday_prompts
from hf_specgen.heads.head_formats import load_head
from tests.helpers import fresh_model
from tests.helpers.cli import run

SHOWN = ("plain", "prompt lookup", "auto", "n-grams  ", "EAGLE", "draft model", "n-grams + draft")
SHORT = ("demo", "--bundled", "--device", "cpu", "--max-new-tokens", "4")


def test_demo_of_the_bundled_model_in_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch: a wrapped or cut table, a strategy left out, tokens that differ, time limits that are ignored."""
    monkeypatch.setenv("COLUMNS", "80")
    result = CliRunner().invoke(app, [*SHORT, "--seconds", "0"])
    assert result.exit_code == 0, result.output
    lines, text = result.output.splitlines(), " ".join(result.output.split())
    assert max(map(len, lines)) <= 80
    # The table lies between its header and the sentence below; the bar of a slow variant may be less than one column.
    header = next(place for place, line in enumerate(lines) if line.split()[:2] == ["tokens/s", "over"])
    rows = lines[header + 1 : header + 1 + len(SHOWN)]
    assert all(sum(row.startswith(name) for row in rows) == 1 for name in SHOWN)
    assert not lines[header + 1 + len(SHOWN)].rstrip().endswith(("✓", "✗")), "a row that is not known"
    assert all(row.rstrip().endswith("✓") for row in rows if not row.startswith("prompt lookup"))  # it samples others
    assert "reference-lm, float32" in text and "tokens per second: plain " in text
    assert f"the tokens of all {len(SHOWN) - 2} answers are those of plain generate" in text
    assert "(1 task, each answered once)" in text and "All variants run eagerly" in text
    assert "The other tasks were left out" in text and "T(1)" in text


def test_demo_shows_everyday_tasks_of_a_published_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reference_model: Any, tokenizer: Any
) -> None:
    """The model is the bundled one in the folder to which the published one would be unpacked.

    Would catch: a task that is not shown, an answer of another variant, a second download.
    """
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path))
    reference_model.save_pretrained(tmp_path / "hf-specgen" / NAME)
    tokenizer.save_pretrained(tmp_path / "hf-specgen" / NAME)
    output = run("demo", "--device", "cpu", "--max-new-tokens", "4")
    assert f"{PUBLISHED}: weights of 4 bits" in output and f"{NAME}, float32" in output
    assert all(f"{name} (" in output for name in everyday_prompts()) and len(everyday_prompts()) == 5
    assert "(5 tasks, each answered once)" in output
    assert "the tokens of all 10 answers are those of plain generate" in output


def target_of_published_sizes(num_layers: int = 30) -> Any:
    """A random target to which the heads for the published model can be bound."""
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=8, num_hidden_layers=num_layers, num_attention_heads=9,
        num_key_value_heads=3,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def test_head_for_the_published_model_reads_and_drafts() -> None:
    """Would catch: a file that the reader refuses, rounded weights that overflow, a head shown for another model."""
    target = target_of_published_sizes()
    (strategy,) = demo.published_drafts(target)
    assert strategy.name == "n-grams + EAGLE" and "smollm2-eagle3-head" in strategy.code
    ids = torch.arange(5, 14)[None]
    plain = target.generate(ids, max_new_tokens=6, do_sample=False)
    assert torch.equal(plain, target.generate(ids, max_new_tokens=6, do_sample=False, **strategy.variant().arguments()))
    assert demo.published_drafts(target_of_published_sizes(2)) == []


def test_medusa_heads_for_the_published_model_read_and_draft() -> None:
    """Would catch: a file that the reader refuses, float8 weights read without scales, heads bound to another model."""
    target = target_of_published_sizes()
    folder = ASSETS / "smollm2-medusa-heads"
    heads: Any = load_head(folder)
    config = heads.config
    assert (config.num_heads, config.num_layers, config.own_outputs, config.reads_path) == (4, 1, False, False)
    stored = load_file(folder / "model.safetensors")
    name = "blocks.3.layers.0.weight"
    scale = stored[f"{name}_scale_inv"].repeat_interleave(128, 0)[:576].repeat_interleave(128, 1)[:, :576]
    torch.testing.assert_close(heads.get_parameter(name).float(), stored[name].float() * scale, rtol=0.01, atol=0)
    candidates = MedusaCandidates.from_pretrained(folder, policy=FixedDepth())
    ids = torch.arange(5, 14)[None]
    plain = target.generate(ids, max_new_tokens=6, do_sample=False)
    assert torch.equal(plain, target.generate(ids, max_new_tokens=6, do_sample=False, candidate_generator=candidates))
    assert candidates.speculation.drafted > 0
    with pytest.raises(ValueError, match="layers"):
        heads.bind(target_of_published_sizes(2))


def measured_with(seconds: dict[str, float], calls: int = 1) -> Comparison:
    """A comparison in which every call of a variant took its number of seconds for ten tokens, on a GPU."""
    measured = Comparison([Variant(name, dict) for name in seconds])
    counts = Statistics([[RowStep(4, 4, 3, 5)] * 2])
    measured.samples = {
        name: [Sample(10, s, torch.ones(1), counts, thread_seconds=0.9)] * calls for name, s in seconds.items()
    }
    return measured


def shown(table: Any) -> str:
    console = Console(file=io.StringIO(), width=80)
    console.print(table)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_demo_is_level_and_honest_where_nothing_gains(reference_model: Any, tokenizer: Any) -> None:
    """Would catch: graphs on our side only, one call of each taken for a tie; other choices: `test_doctor.py`."""
    shown_variants = demo.Demo(reference_model, tokenizer, [], Console(quiet=True)).measured.variants
    assert len(shown_variants) == 4 and all(one.arguments().get("compile", False) is False for one in shown_variants)
    faster = measured_with({"plain": 1.0, "prompt lookup": 2.0, "x": 0.5})
    one_prompt, two_prompts = (measured_with({"plain": 1.0, "x": 0.98}, calls) for calls in (1, 2))
    assert doctor.recommend(one_prompt, ["x"])[0] == "plain" and doctor.recommend(two_prompts, ["x"])[0] == "x"
    lines = [line.split()[0] for line in shown(doctor.ranking(faster)).splitlines() if "█" in line]
    assert lines == ["x", "plain", "prompt"]


def test_demo_names_rounding_and_a_busy_machine() -> None:
    """Would catch: differences without a judgement; figures of a busy machine presented like any other."""
    measured = measured_with({"plain": 1.0, "x": 1.0}, calls=2)
    measured.device = "cpu"
    measured.different["x"], measured.unexplained["x"] = 2, 1
    (found,) = doctor.judge(measured, ["x"], exact=True)
    assert "2 of 2 answers differ" in found.found and "rounding explains 1 of them" in found.found
    assert found.result == "bad"
    measured.plain.append(Sample(10, 2.0, torch.ones(1), None, thread_seconds=0.7))
    measured.unexplained.clear()
    same, times = doctor.judge(measured, ["x"], exact=False)
    assert "rounding explains all of them" in same.found and same.result == "warning"
    assert "took 1.6 times as long as it ran" in times.found and "less reliable" in times.found
    measured.plain[-1] = Sample(10, 2.0, torch.ones(1), None, thread_seconds=2.0, others_share=0.4)
    *_, times = doctor.judge(measured, ["x"], exact=False)
    assert "other programs used 20% of the processor, so these figures are less reliable" in times.found


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_widen_computes_the_same_function(reference_model, dtype: torch.dtype | None) -> None:
    """Would catch: memory that is not initialised, or rotary frequencies that were rounded with the weights."""
    wide = widen(reference_model, 20 * 10**6, dtype)
    block = 3 * wide.config.hidden_size * wide.config.num_hidden_layers * 128
    assert 0 <= 20 * 10**6 - sum(p.numel() for p in wide.parameters()) < block
    assert wide.config.intermediate_size % 128 == 0
    assert wide.dtype == (dtype or reference_model.dtype)
    same = copy.deepcopy(reference_model)
    for parameter in same.parameters():
        parameter.data = parameter.data.to(wide.dtype)
    if dtype is None:  # so that the order of sums, which depends on the threads, decides nothing
        wide, same = wide.double(), same.double()
    ids = torch.arange(40)[None] * 31 % 1000
    with torch.no_grad():
        torch.testing.assert_close(wide(ids).logits, same(ids).logits, atol=0.25 if dtype else 1e-8, rtol=0)
    with pytest.raises(ValueError, match="parameters must be at least the model's"):
        widen(reference_model, 10)


def test_demo_without_the_data_package_in_an_installed_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch: a message about a draft model's folder where the whole package is missing."""
    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda path: not path.is_relative_to(ASSETS) and exists(path))
    assert "pip install 'hf-specgen[demo]'" in run("demo", "--bundled", exit_code=2)


def test_demo_fails_if_a_token_differs_and_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch: another answer that is not named, or no failure; a demo of minutes on a busy machine."""
    generate = GenerationMixin.generate

    def disturbed(model: Any, **arguments: Any) -> Any:
        ids = generate(model, **arguments)
        ids[0, -1] += isinstance(arguments.get("candidate_generator"), NgramCandidates)
        return ids

    monkeypatch.setattr(GenerationMixin, "generate", disturbed)
    output = run(*SHORT, "--seconds", "0.1", exit_code=1)
    assert "1 of 5 answers differ from plain generate, of n-grams; rounding explains" in output
    assert "The other tasks were left out" in output


def test_domain_prompts_come_in_the_order_of_the_domains() -> None:
    """Would catch: a domain left out, or more prompts of one than of another."""
    found = domain_prompts(2)
    assert list(found) == ["math", "code", "edit", "json", "prose"] and all(len(texts) == 2 for texts in found.values())


# `hf-specgen chat`: the same answers with every strategy, coloured as they were drafted, over several turns

EDIT = "Rename `x` to `total`: def add(x, y): return x + y"

CHOICES = {"plain": None, "n-grams": NgramCandidates(k=4)}


@pytest.fixture
def chat(reference_model: Any, tokenizer: Any) -> Chat:
    console = Console(file=io.StringIO(), width=80)
    return Chat(reference_model, tokenizer, CHOICES, console, max_new_tokens=24, do_sample=False)


def ask(chat: Chat, question: str) -> tuple[str, str, list[tuple[str, bool]]]:
    """The answer, the line about it, and the pieces that were written."""
    pieces: list[tuple[str, bool]] = []
    status = chat.generate([*chat.messages, {"role": "user", "content": question}], lambda *piece: pieces.append(piece))
    return chat.messages[-1]["content"], status, pieces


def test_answers_over_two_turns_same_text_as_plain_and_cache_is_kept(chat: Chat) -> None:
    """Would catch: a cache that does not belong to the text, and a conversation that is read anew in every turn."""
    texts = []
    for chat.strategy in CHOICES:
        chat.clear()
        first, *_ = ask(chat, EDIT)
        text, cache = chat.cached
        assert cache.get_seq_length() >= text.shape[1] - 1
        texts.append((first, ask(chat, "And now rename `y`.")[0]))
        assert chat.cached[1] is cache
    assert texts[0] == texts[1] and all(texts[0])


def test_streamed_pieces_are_the_answer_and_mark_accepted_draft_tokens(chat: Chat) -> None:
    """Would catch: text that is shown twice or not at all, or the target's own tokens marked as drafted."""
    answer, status, pieces = ask(chat, EDIT)
    assert "".join(text for text, _ in pieces) == answer
    accepted = sum(is_accepted for _, is_accepted in pieces)
    assert 0 < accepted <= CHOICES["n-grams"].speculation.accepted
    assert "tokens/s" in status and "% accepted" in status


def test_streamer_waits_for_the_last_byte_of_a_character(tokenizer: Any) -> None:
    """Would catch: replacement characters on the terminal."""
    text = "naïve 日本 🙂\nnext"
    pieces: list[tuple[str, bool]] = []
    streamer = AnswerWriter(tokenizer, lambda *piece: pieces.append(piece))
    streamer.put(torch.tensor([[0]]))
    for token in tokenizer(text, add_special_tokens=False)["input_ids"]:
        streamer.put(torch.tensor([token]))
    streamer.end()
    assert "".join(piece for piece, _ in pieces) == text


def dialogue(chat: Chat, *lines: str) -> str:
    """What the chat prints for these lines."""
    waiting = iter(lines)

    def read() -> str:
        try:
            return next(waiting)
        except StopIteration:
            raise EOFError from None

    chat.run(read)
    return chat.console.file.getvalue()


def test_again_with_another_strategy_gives_the_same_answer(chat: Chat) -> None:
    """Would catch: an answer that is appended to the conversation each time it is repeated."""
    output = dialogue(chat, EDIT, "/plain", "/again", "/strategy n-grams", "/again")
    status = re.findall(r"^(.*) · (\d+) tokens · .*/s", output, flags=re.M)
    assert [name for name, _ in status] == ["n-grams", "plain", "n-grams"] and len({count for _, count in status}) == 1
    answers = re.findall(r"^(def .*)$", output, flags=re.M)
    assert len(answers) == 3 and len(set(answers)) == 1
    assert [message["role"] for message in chat.messages] == ["user", "assistant"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/strategy", "strategies: plain, n-grams; now: n-grams"),
        ("/strategy medusa", "there is no strategy 'medusa'; strategies: plain, n-grams"),
        ("/strategy [/x] [dim]", "there is no strategy '[/x] [dim]'; strategies"),
        ("/again", "there is no answer to repeat"),
        ("/help", "answer the last question again"),
        ("/nonsense", "there is no command /nonsense"),
        ("/", "/strategy [NAME]"),
    ],
)
def test_command_prints_one_answer(chat: Chat, line: str, message: str) -> None:
    """Would catch: a command that is sent to the model, or an unknown one that is passed over."""
    assert message in dialogue(chat, line)


def test_conversation_that_is_too_long_for_the_model_goes_on(tokenizer: Any) -> None:
    """Would catch: a chat that ends with an error of PyTorch, and the conversation with it."""
    model = fresh_model("gpt2", vocab_size=8192, n_positions=32)
    chat = Chat(model, tokenizer, CHOICES, Console(file=io.StringIO(), width=200), max_new_tokens=4, do_sample=False)
    printed = dialogue(chat, "Hello", "And a much longer text. " * 10)
    assert "n-grams cannot be used: IndexError" in printed and "as before, /new forgets it" in printed
    assert [message["content"] for message in chat.messages][::2] == ["Hello"]


def test_new_forgets_the_conversation_but_not_the_system_prompt(reference_model: Any, tokenizer: Any) -> None:
    """Would catch: a cache or a message of the conversation before."""
    chat = Chat(reference_model, tokenizer, CHOICES, Console(file=io.StringIO()), "Be brief.", max_new_tokens=2)
    dialogue(chat, "Hello", "/new", "/again", "/quit", "never read")
    assert chat.messages == [{"role": "system", "content": "Be brief."}] and chat.cached is None
