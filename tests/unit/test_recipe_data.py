"""What recipes read: formats of conversations, labels, packing, the order of rows; arguments; resumed answers."""

import re
import signal
import sys
import time
import weakref
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from datasets import Dataset
from safetensors import SafetensorError

import generate_answers
from arguments import SIGNALS, Options, calling_at_signals, expected_errors, launch, parse, preset
from conversations import (
    IGNORED,
    ChatFormat,
    StepSampler,
    check_row_count,
    collate,
    encoded,
    first_of_domains,
    messages_of,
    prompt_of,
    read_rows,
)
from drafter import answer_numbers, choose_anchors, with_lora
from generate_answers import AnswerArguments, ask_server, chosen_prompts, folder_of, server_settings
from losses import later_pairs
from target import weights_version
from tests.helpers.paths import ROOT
from tests.helpers.recipes import write_rows
from train_dflash import BlockArguments
from train_draft import DraftArguments
from train_dspark import SparkArguments
from train_eagle import EagleArguments
from train_layer_skip import ExitArguments
from train_medusa import MedusaArguments
from training import check_arguments

LAUNCH = ROOT / "recipes" / "configs" / "fsdp.yaml"
HI, YES = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}
THREE = [HI, YES, {"role": "user", "content": "and?"}, {"role": "assistant", "content": "no"}]
THINKING = (
    "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' and m.thought and loop.last %}{{ m.thought }}"
    "{% endif %}{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% if quick %}-{% endif %}{% endif %}"
)

PARTS = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}</s>"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
REWRITING = "{% if add_generation_prompt %}-{% endif %}"


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": [HI, YES]}, [HI, YES]),
        ({"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]}, [HI, YES]),
        ({"prompt": "hi", "response": "yes"}, [HI, YES]),
        ({"prompt": [HI], "completion": [YES]}, [HI, YES]),
        ({"messages": [{**HI, "tool_calls": None}], "system": "S"}, [{"role": "system", "content": "S"}, HI]),
        ({"text": "plain"}, []),
    ],
)
def test_messages_of_every_format_are_the_same(row: dict[str, Any], expected: list[Any]) -> None:
    """Would catch: a role or a system prompt of one format that is dropped, or plain text taken for a chat."""
    assert messages_of(row) == expected
    assert prompt_of(row)[-1]["role"] == "user"


def test_every_answer_of_a_conversation_is_learnt_as_it_is_generated(tokenizer: Any) -> None:
    """Catches: a loss on prompts, on one answer only, or on a prompt other than the one the model sees."""
    (row,) = ChatFormat(tokenizer).encode({"messages": THREE}, 200)
    ids, labels = row["input_ids"], row["labels"]
    first = next(place for place, label in enumerate(labels) if label >= 0)
    assert ChatFormat(tokenizer).prompt({"messages": THREE[:2]}) == ids[: first + 1]
    runs = answer_numbers({"labels": torch.tensor([labels])})
    learnt = torch.tensor(labels)[torch.tensor(labels) != IGNORED]
    texts = [tokenizer.decode(learnt[runs == number]) for number in (1, 2)]
    assert [text.replace(tokenizer.eos_token, "").strip() for text in texts] == ["yes", "no"]
    assert all(ids[t + 1] == label for t, label in enumerate(labels) if label != IGNORED)
    assert int(learnt[-1]) == tokenizer.eos_token_id
    cut_off = next(iter(ChatFormat(tokenizer).encode({"messages": THREE, "finished": False}, 200)))
    cut = cut_off["input_ids"]
    assert cut == ids[: len(cut)] and tokenizer.eos_token_id != cut[-1]


@pytest.mark.parametrize("template", [None, PARTS, PARTS + REWRITING], ids=["none", "plain", "rewriting"])
@pytest.mark.parametrize("finished", [True, False])
def test_contents_of_several_text_parts_are_encoded_as_one_text(
    tokenizer: Any, monkeypatch: Any, template: str | None, finished: bool
) -> None:
    """Would catch: a TypeError without the number of the row, or other labels than those of the same text."""
    monkeypatch.setattr(tokenizer, "chat_template", template)
    parts = [{**HI, "content": [{"type": "text", "text": "hi"}]}]
    parts.append({**YES, "content": [{"type": "text", "text": "ye"}, {"type": "text", "text": "s"}]})
    chat = ChatFormat(tokenizer)
    of_parts, of_texts = (list(chat.encode({"messages": m, "finished": finished}, 50)) for m in (parts, [HI, YES]))
    assert of_parts == of_texts and of_texts


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": []}, "its conversation has no messages; remove the row"),
        ({"text": 5}, "text must be a text, got 5"),
        ({"messages": [{"role": ["user"], "content": "hi"}]}, "a message needs a role and its content, got"),
        ({"messages": [HI, YES], "system": 5}, "the content of a message must be a text, or a list of parts, got 5"),
        ({"prompt": "\ud800", "response": "yes"}, "surrogates not allowed"),
    ],
)
@pytest.mark.parametrize("template", [None, PARTS], ids=["none", "plain"])
def test_row_that_is_no_conversation_raises_a_value_error(
    tokenizer: Any, monkeypatch: Any, template: str | None, row: dict[str, Any], message: str
) -> None:
    """Would catch: a KeyError or TypeError, which does not get the number of the row."""
    monkeypatch.setattr(tokenizer, "chat_template", template)
    chat = ChatFormat(tokenizer)
    for read in (chat.prompt, lambda row: list(chat.encode(row, 50))):
        with pytest.raises(ValueError, match=re.escape(message)):
            read(row)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "row 1: the parts of this content must be texts {type, text}, got [{'type': 'image'}]"),
        ("{% for m in messages %}{{ ': ' + m.content }}{% endfor %}", "row 1: the chat template cannot format this"),
    ],
)
def test_contents_that_cannot_be_a_text_name_the_row(
    tokenizer: Any, monkeypatch: Any, template: str | None, message: str
) -> None:
    """Would catch: a TypeError of one in 500,000 rows."""
    monkeypatch.setattr(tokenizer, "chat_template", template)
    rows = Dataset.from_list([{"messages": [{**HI, "content": [{"type": "image"}]}, {**YES, "content": []}]}])
    with pytest.raises(ValueError, match=re.escape(message)):
        encoded(rows, ChatFormat(tokenizer), 50)


def test_answers_that_a_template_rewrites_later_get_rows_of_their_own(tokenizer: Any, monkeypatch: Any) -> None:
    """Catches: reasoning that earlier turns lose in later prompts, learnt there or not learnt at all."""
    monkeypatch.setattr(tokenizer, "chat_template", THINKING)
    messages = [HI, {**YES, "thought": "t1"}, THREE[2], {**THREE[3], "thought": "t2"}]
    first, second = ChatFormat(tokenizer).encode({"messages": messages}, 200)
    assert "t1" in tokenizer.decode(first["input_ids"]) and "t1" not in tokenizer.decode(second["input_ids"])
    quick = ChatFormat(tokenizer, {"quick": True}).prompt({"messages": [HI]})
    assert tokenizer.decode(quick).endswith("[assistant]-")


def test_packed_rows_keep_conversations_apart(tokenizer: Any) -> None:
    """Would catch: positions or answers that go on into the next conversation of a packed row."""
    rows = Dataset.from_list([{"messages": [HI, YES]}, {"messages": THREE}, {"messages": [HI, YES]}])
    chat = ChatFormat(tokenizer)
    plain, packed = encoded(rows, chat, 64), encoded(rows, chat, 64, packing=True)
    assert len(packed) == 1 and packed[0]["length"] == sum(plain["length"][:])
    batch = collate([packed[0]])
    assert int((batch["position_ids"] == 0).sum()) == 3
    assert len(answer_numbers(batch).unique()) == 4


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_local_files_of_every_kind_are_read(tmp_path: Path, suffix: str) -> None:
    """Would catch: a type of file, a slice or a stream that gives other rows."""
    rows = [{"prompt": "a", "response": "b"}, {"prompt": "c", "response": "d"}]
    path, data = str(tmp_path / f"rows{suffix}"), Dataset.from_list(rows)
    {".csv": data.to_csv, ".parquet": data.to_parquet}.get(suffix, data.to_json)(path)
    assert list(read_rows(path)) == rows and list(read_rows(path, "train[1:]", streaming=False)) == rows[1:]
    assert list(read_rows(path, streaming=True)) == rows
    assert first_of_domains(read_rows(path), {"default": 1}) == rows[:1]


def test_files_without_rows_or_answers_are_refused(tmp_path: Path, tokenizer: Any) -> None:
    """Would catch: a training on nothing, or an error without the name of the file."""
    with pytest.raises(FileNotFoundError, match=r"nothing\.jsonl does not exist"):
        read_rows(str(tmp_path / "nothing.jsonl"))
    write_rows(tmp_path / "prompts.jsonl", [{"prompt": "a", "response": "b"}])
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ValueError, match=r"empty\.jsonl cannot be read: it is empty"):
        read_rows(str(tmp_path / "empty.jsonl"))
    with pytest.raises(ValueError, match="no conversation has an answer within max_length=2 tokens"):
        encoded(read_rows(str(tmp_path / "prompts.jsonl")), ChatFormat(tokenizer), 2)


@pytest.mark.parametrize("streaming", [False, True])
def test_rows_fewer_than_a_step_are_refused(streaming: bool) -> None:
    """Would catch: streamed rows fewer than a micro-batch, of which every epoch has no batch."""
    rows = Dataset.from_list([{"input_ids": [1]}] * 3)
    with pytest.raises(ValueError, match="the data have 3 rows to train on, fewer than the 4 of one step"):
        check_row_count(rows.to_iterable_dataset() if streaming else rows, 4)


def test_steps_have_the_same_rows_for_any_micro_batch_and_others_in_each_epoch() -> None:
    """Would catch: a row drawn twice, rows of very different lengths together, or the same order in each epoch."""
    lengths = torch.randint(10, 500, (2001,), generator=torch.Generator().manual_seed(0)).tolist()
    sampler = StepSampler(lengths, 32, seed=0)
    first = list(sampler)
    assert len(first) == len(sampler) == 1984 and len(set(first)) == 1984
    steps = torch.tensor(lengths)[first].view(-1, 32)
    spread = (steps.max(dim=1).values - steps.min(dim=1).values).tolist()
    assert sum(spread) / len(spread) < 50
    sampler.set_epoch(1)
    assert list(sampler) != first


def test_anchors_are_predicting_positions_and_those_of_their_row_in_any_batch() -> None:
    """Would catch: blocks that begin inside of a prompt, or that depend on the other rows of a batch."""
    labels = torch.full((2, 30), IGNORED)
    labels[0, 3:20], labels[1, 5:29] = 7, 8
    batch = {"labels": labels}
    places, valid, numbers = choose_anchors(batch, 4, step=3)
    rows = torch.arange(2)[:, None].expand_as(places)
    assert (labels[rows[valid], places[valid]] != IGNORED).all()
    assert torch.equal((labels != IGNORED).nonzero()[numbers], torch.stack([rows[valid], places[valid]], dim=1))
    assert torch.equal(choose_anchors({"labels": labels[1:]}, 4, step=3).places[0], places[1])
    assert not torch.equal(choose_anchors(batch, 4, step=4).places, places)


def test_later_pairs_stay_inside_an_answer() -> None:
    """Would catch: a token of the next answer as the target of this one."""
    index, learns = later_pairs(torch.tensor([0, 0, 0, 1, 1]), 2)
    assert index.tolist() == [0] and learns.tolist() == [2]


REQUIRED = ["--target", "t", "--data", "d", "--output", "o"]


def test_flags_override_the_file_and_the_file_the_preset(tmp_path: Path) -> None:
    """Would catch: a value of the preset that overrules a flag, or a list read as text."""
    file = tmp_path / "run.yaml"
    file.write_text(
        "target: t\ndata: d\noutput: o\nsteps: 2\nlayers: [1, 2]\nlearning_rate: 3e-4\nloss: {tv: 1}\nresume: true\n"
    )
    args = parse(EagleArguments, None, ["--preset", "8b", "--config", str(file), "--steps", "3"])
    assert (args.max_steps, args.layers, args.learning_rate, args.resume) == (3, [1, 2], 3e-4, True)
    assert args.loss == {"tv": 1} and args.max_length == preset("8b", "EagleArguments")["max_length"]
    assert parse(EagleArguments, None, ["--config", str(file), "--layers", "4", "5"]).layers == [4, 5]
    assert isinstance(parse(DraftArguments, None, [*REQUIRED, "--draft", "x", "--lora", "{r: 2}"]).lora, Options)


@pytest.mark.parametrize("recipe", [EagleArguments, BlockArguments, SparkArguments, MedusaArguments])
@pytest.mark.parametrize("name", ["0.5b", "8b", "70b"])
def test_presets_are_valid_for_every_recipe(recipe: Any, name: str) -> None:
    """Would catch: a preset with a name that a recipe does not have."""
    args = parse(recipe, None, [*REQUIRED, "--preset", name])
    assert args.max_length >= 2048 and args.learning_rate > 0


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--stesp", "3"], "unknown option --stesp"),
        (["--steps", "many"], "invalid int value: 'many'"),
        (["--steps", "0"], "max_steps must be at least 1"),
        (["--steps", "-5"], "max_steps must be at least 1, or -1 for num_train_epochs, got -5"),
        (["--learning-rate", "-1"], "learning_rate must be at least 0, got -1.0"),
        (["--learning-rate", "nan"], "learning_rate must be at least 0, got nan"),
        (["--batch-size", "4", "--micro-batch-size", "3"], "batch_size 4 must be a multiple of"),
        (["--config", str(LAUNCH)], "unknown key 'compute_environment'"),
        (["--config", "no-such-file.yaml"], "no-such-file.yaml"),
        (["--preset", "9b"], "unknown preset '9b'; there are 0.5b, 8b, 70b, reference"),
        (["--lora", "16"], "argument --lora: write a mapping such as {r: 16}, not '16'"),
        (["--loss", "{mse: 1}"], "loss must weigh some of kl, ce, tv and lk"),
        (["--eval-strategy", "steps"], "needs evaluation, a file of held-out prompts"),
        (["--push-to-hub", "true"], "push_to_hub needs hub_model_id"),
        (["--layers", "0"], "give either `layers` of the target, or `draft`"),
    ],
)
def test_bad_arguments_get_one_sentence(capsys: Any, more: list[str], message: str) -> None:
    """Catches: a mistyped key that is dropped silently, and an invalid value that is noticed after data were read."""
    with pytest.raises(SystemExit) as ended:
        parse(DraftArguments, None, [*REQUIRED, "--draft", "x", *more])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and message in error and len(error.splitlines()) < 5


@pytest.mark.parametrize(
    "recipe",
    [AnswerArguments, BlockArguments, DraftArguments, EagleArguments, ExitArguments, MedusaArguments, SparkArguments],
)
def test_the_reference_preset_is_whole_for_every_recipe_and_names_files_that_exist(recipe: Any) -> None:
    """Catches: a preset that outlived a renamed key or a moved file."""
    args = parse(recipe, None, ["--preset", "reference", "--output", "o"])
    for key in ("target", "data", "prompts", "exclude", "evaluation", "draft", "head"):
        if value := getattr(args, key, None):
            assert (ROOT / value).exists(), f"{key}: {value}"


PROMPTS = [{"domain": "math", "prompt": "1 + 1?"}, {"domain": "code", "prompt": "Sort a list."}, {"prompt": "Hi."}]


def answer_arguments(**changed: Any) -> AnswerArguments:
    return AnswerArguments(**{"target": "org/model", "prompts": "prompts.jsonl", "output": "answers.jsonl", **changed})


@pytest.mark.parametrize(
    ("changed", "is_continued"),
    [
        ({"drafter": "org/head", "batch_size": 4}, True),
        ({"prompts": "more.jsonl", "limit": 5, "per_domain": {"code": 1}}, True),
        ({"seed": 1}, False),
        ({"max_new_tokens": 9}, False),
        ({"generation": {"default": {}}}, False),
    ],
)
def test_interrupted_answers_continue_with_their_own_settings(changed: Any, is_continued: bool) -> None:
    """Would catch: answers of two settings in one file, or a run of more prompts that begins anew."""
    assert (folder_of(answer_arguments(**changed)) == folder_of(answer_arguments())) == is_continued


def test_interrupted_answers_of_a_local_target_with_new_weights_begin_anew(tmp_path: Path) -> None:
    """Would catch: answers of the weights that a folder had before."""
    (tmp_path / "model.safetensors").write_bytes(b"old")
    args = answer_arguments(target=str(tmp_path))
    earlier = folder_of(args)
    assert folder_of(args) == earlier
    (tmp_path / "model.safetensors").write_bytes(b"newer")
    assert folder_of(args) != earlier


@pytest.mark.parametrize(
    ("generation", "sent"),
    [
        (
            {"do_sample": True, "top_k": 20, "temperature": 0.6, "top_p": None},
            {"temperature": 0.6, "extra_body": {"top_k": 20}},
        ),
        ({"top_k": 0, "top_p": 0.9}, {"top_p": 0.9, "extra_body": {"top_k": -1}}),
        ({"min_p": 0.1, "repetition_penalty": 1.1}, {"extra_body": {"min_p": 0.1, "repetition_penalty": 1.1}}),
        ({"do_sample": False}, {"temperature": 0.0, "extra_body": None}),
    ],
)
def test_settings_of_generation_are_sent_to_a_server(generation: dict[str, Any], sent: dict[str, Any]) -> None:
    """Would catch: a setting that is dropped, so that answers are of another distribution."""
    assert server_settings(generation, {}) == sent


@pytest.mark.parametrize("name", ["typical_p", "num_beams", "extra_body", "max_tokens", "seed"])
def test_settings_of_generation_that_a_server_cannot_take_are_refused(name: str) -> None:
    """Would catch: an argument of `generate` that the server never receives, or a bare TypeError of a thread."""
    with pytest.raises(ValueError, match=f"generation has {name}, which --server cannot send; remove it"):
        server_settings({"temperature": 1.0, name: 2}, {})


def test_answers_of_a_server_are_kept_when_another_request_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch: answers that arrive after the one that a failed request should have had, and are dropped."""
    sent, failed = Event(), Event()  # that the slow request was sent, and that the other one failed

    class Client:
        def __init__(self, base_url: str):
            pass

        def chat_completion(self, messages: Any, **settings: Any) -> Any:
            if messages[0]["content"] == "fails":
                assert sent.wait(timeout=10)
                failed.set()
                raise OSError("the server has no answer")
            sent.set()
            assert failed.wait(timeout=10)
            message = SimpleNamespace(content="yes")
            return SimpleNamespace(choices=[SimpleNamespace(message=message, finish_reason="stop")])

    monkeypatch.setattr(generate_answers, "InferenceClient", Client)
    args = AnswerArguments(target="name", prompts="", output="", server="http://localhost/v1", batch_size=2)
    rows = [(number, {"prompt": prompt, "response": ""}) for number, prompt in enumerate(["fails", "slow"])]
    arrived = []
    with pytest.raises(OSError, match="the server has no answer"):
        for number, row in ask_server(args, rows):
            arrived.append((number, row["response"]))
    assert arrived == [(1, "yes")]


def test_a_prompt_keeps_its_number_whatever_else_is_answered(tmp_path: Path) -> None:
    """Would catch: the answer to another prompt, or one with another domain's settings, after the list has changed."""
    write_rows(tmp_path / "few.jsonl", PROMPTS[1:])
    write_rows(tmp_path / "all.jsonl", [PROMPTS[0], {**PROMPTS[1], "domain": "math"}, PROMPTS[2]])
    few, more = (chosen_prompts(answer_arguments(prompts=str(tmp_path / f"{name}.jsonl"))) for name in ("few", "all"))
    assert len(few) == 2 and len(more) == 3
    assert [few[number]["prompt"] for number in few.keys() & more.keys()] == ["Hi."]
    limited = chosen_prompts(answer_arguments(prompts=str(tmp_path / "all.jsonl"), limit=2))
    assert list(limited.items()) == list(more.items())[:2]


def test_errors_in_data_name_the_row(tokenizer: Any, tmp_path: Path) -> None:
    """Would catch: an error in one of 500,000 rows that says nothing of where it is."""
    rows = [{"prompt": "a", "response": "b", "text": None}, {"prompt": None, "response": "b", "text": None}]
    with pytest.raises(ValueError, match="row 2: the data have the columns prompt, response, text, but"):
        encoded(Dataset.from_list(rows), ChatFormat(tokenizer), 50)
    write_rows(tmp_path / "numbers.jsonl", [{"prompt": 4}, {"prompt": 5}])
    with pytest.raises(ValueError, match="row 1: the content of a message must be a text, or a list of parts, got 4"):
        chosen_prompts(answer_arguments(prompts=str(tmp_path / "numbers.jsonl")))


def failing(error: BaseException) -> Any:
    def main() -> None:
        raise error

    return main


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OSError(28, "No space left on device"), "the disk is full"),
        (SafetensorError("I/O error: No space left on device (os error 28)"), "the disk is full"),
        (RuntimeError("PytorchStreamWriter failed writing file data/3"), "the disk is full"),
        (ValueError("depth must be at least 1"), "depth must be at least 1"),
    ],
)
def test_launch_ends_with_one_sentence(error: Exception, code: str) -> None:
    """Would catch: a traceback of 60 lines at the end of a run of hours, whose disk became full."""
    with pytest.raises(SystemExit, match=code):
        launch(failing(error))


def test_launch_ends_with_one_sentence_at_sigterm(capsys: Any) -> None:
    """Would catch: a scheduler's signal that ends a run without a word, and a handler that outlives it."""
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        launch(lambda: signal.raise_signal(signal.SIGTERM))
    assert ended.value.code == 130 and "the same command goes on" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_a_request_and_the_second_one_ends(first: signal.Signals) -> None:
    """Would catch: a checkpoint that Ctrl-C interrupts, or a run that Ctrl-C cannot end."""
    requests: list[int] = []
    before = [signal.getsignal(one) for one in SIGNALS]  # shells start background jobs with SIGINT ignored
    for second in (signal.SIGINT, signal.SIGTERM):
        with pytest.raises(KeyboardInterrupt), calling_at_signals(lambda: requests.append(1)):
            signal.raise_signal(first)
            signal.raise_signal(second)
    assert requests == [1, 1]
    assert [signal.getsignal(one) for one in SIGNALS] == before


class SignalWhenPickled(dict[str, Any]):
    """Settings of a chat template; a signal arrives while datasets computes the digest of `encode`."""

    def __reduce__(self) -> Any:
        signal.raise_signal(signal.SIGTERM)
        return dict, ()


def test_encoded_ends_at_a_signal_that_datasets_catches(tokenizer: Any) -> None:
    """Would catch: Ctrl-C that is lost in `except:` of datasets, so that the run goes on to its end."""
    chat = ChatFormat(tokenizer)
    chat._kwargs = SignalWhenPickled()
    with pytest.raises(KeyboardInterrupt), expected_errors():
        encoded(Dataset.from_list([{"prompt": "a", "response": "b"}] * 4), chat, 50)


def signal_in_a_callback() -> None:
    """A signal while a weak reference's callback runs, then work that nothing else ends."""
    referent = SignalWhenPickled()
    reference = weakref.ref(referent, lambda _: signal.raise_signal(signal.SIGINT))
    del referent
    assert reference() is None
    for _ in range(500):
        time.sleep(0.01)
    raise ValueError("the signal was lost")


def test_launch_ends_at_a_signal_that_python_drops(capsys: Any) -> None:
    """Would catch: Ctrl-C in a weak reference's callback, which Python only reports, so that the run goes on."""
    before, hook = signal.signal(signal.SIGINT, signal.default_int_handler), sys.unraisablehook
    try:
        with pytest.raises(SystemExit) as ended:
            launch(signal_in_a_callback)
    finally:
        signal.signal(signal.SIGINT, before)
    printed = capsys.readouterr().err
    assert ended.value.code == 130 and "the same command goes on" in printed and "Traceback" not in printed
    assert sys.unraisablehook is hook


def test_launch_refuses_what_accelerate_starts_once_on_cpus(monkeypatch: Any) -> None:
    """Would catch: `accelerate launch --cpu --num_processes 2` that trains in one process without a word."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(SystemExit, match=r"starts one process, whatever --num_processes says; .* use torchrun"):
        launch(failing(AssertionError("it ran")))


def test_check_arguments_to_resume_a_result_without_checkpoints_is_refused(tmp_path: Path) -> None:
    """Would catch: a finished head that is trained anew from its first step, and replaced."""
    (tmp_path / "model.safetensors").touch()
    args = parse(DraftArguments, None, [*REQUIRED, "--draft", "x", "--output", str(tmp_path), "--resume", "true"])
    with pytest.raises(
        ValueError, match=r"holds a finished result without a checkpoint .* replace it with --overwrite"
    ):
        check_arguments(args)


def test_with_lora_refuses_for_a_head_what_its_loader_refuses() -> None:
    """Would catch: an adapter that is trained for hours, and then loads as another one or not at all."""
    with pytest.raises(ValueError, match="lora: init_lora_weights='pissa' is not supported"):
        with_lora(torch.nn.Sequential(torch.nn.Linear(2, 2)), {"init_lora_weights": "pissa"}, target_modules=["0"])


def test_weights_version_changes_with_the_commit_and_with_the_weights(tmp_path: Path, monkeypatch: Any) -> None:
    """Would catch: a run that goes on with another commit under the same revision, or with an overwritten folder."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    cached = tmp_path / "models--org--target"
    for commit in ("a" * 40, "b" * 40):
        write(cached / "snapshots" / commit / "config.json", "{}")
        write(cached / "refs" / "main", commit)
        assert weights_version("org/target") == commit
    versions = []
    for weights in ("x" * 9_000, "x" * 8_999 + "y", "x" * 8_999):
        write(tmp_path / "folder" / "model.safetensors", weights)
        versions.append(weights_version(str(tmp_path / "folder")))
    assert len(set(versions)) == 3


def write(file: Path, text: str) -> None:
    """Write a file, whose folder is made."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
