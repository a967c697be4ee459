"""`hf-specgen chat`: a streaming chat that shows which tokens were drafted, and compares strategies."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from hf_specgen.call import Call
from hf_specgen.candidates import Candidates
from hf_specgen.candidates.combined import default_candidates
from hf_specgen.cli.settings import ChatSettings
from hf_specgen.counters import StepRecord
from hf_specgen.evaluation import workloads
from hf_specgen.evaluation.workloads import DEFAULT, PLAIN, chat_text, load_model, maybe_prepacked, strategies
from hf_specgen.monitoring import Monitor, MonitorSession

ACCEPTED = "green"
"""Style of accepted draft tokens."""
HELP = """\
/plain            answer with plain generate from now on
/strategy [NAME]  answer with this strategy; without a name, list them
/again            answer the last question again, to compare strategies
/new              forget the conversation
/quit             leave (or Ctrl-D)"""
Write = Callable[[str, bool], None]
"""Receives a piece of text, and whether it is an accepted draft token."""


class Conversation:
    """Messages, and the key/value cache of the tokens that were read and generated for them.

    Attributes:
        text: `[1, tokens]` what the cache holds; None if the cache is not used again.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        generation: dict[str, Any],
        seed: int = 0,
        system: str = "",
    ):
        self._model, self._tokenizer, self._generation, self._seed = model, tokenizer, generation, seed
        self._begin = [{"role": "system", "content": system}] if system else []
        self.clear()

    def clear(self) -> None:
        """Forget everything but the system prompt."""
        self.messages: list[dict[str, str]] = list(self._begin)
        self.forget_cache()

    def forget_cache(self) -> None:
        """Read the conversation anew for the next answer."""
        self.text: torch.Tensor | None = None
        self.cache: Any = None

    def answer(self, name: str, candidates: Candidates | None, write: Write) -> str:
        """Answer the last message; returns a line about strategy, speed, and accepted draft tokens."""
        ids = self._prompt()
        if self.text is None or not torch.equal(ids[:, : self.text.shape[1]], self.text):
            self.forget_cache()  # the template or the tokenizer writes earlier turns in another way now
        writer = AnswerWriter(self._tokenizer, write)
        arguments = {**self._generation, "past_key_values": self.cache, "return_dict_in_generate": True}
        arguments |= {"streamer": writer} if candidates is None else {"monitor": writer}
        torch.manual_seed(self._seed)
        begin = perf_counter()
        generate: Any = self._model.generate
        output = generate(ids, attention_mask=torch.ones_like(ids), candidate_generator=candidates, **arguments)
        seconds = perf_counter() - begin
        writer.end()
        self.text, self.cache = output.sequences, output.past_key_values
        tokens = output.sequences[0, ids.shape[1] :]
        answer = str(self._tokenizer.decode(tokens, skip_special_tokens=True))
        self.messages.append({"role": "assistant", "content": answer})
        parts = [name, f"{len(tokens)} tokens", f"{len(tokens) / seconds:.1f} tokens/s"]
        if candidates is not None:
            counts = output.speculation
            parts += [f"{counts.tokens_per_step:.2f} per step", f"{counts.acceptance_rate:.0%} accepted"]
        return " · ".join(parts)

    def _prompt(self) -> torch.Tensor:
        """`[1, tokens]` the conversation so far, in the model's chat format if it has one."""
        has_template = bool(self._tokenizer.chat_template)
        plain = "\n".join(message["content"] for message in self.messages)
        text = chat_text(self._tokenizer, self.messages) if has_template else plain
        ids: Any = self._tokenizer(text, return_tensors="pt", add_special_tokens=not has_template)["input_ids"]
        return torch.as_tensor(ids, device=self._model.device)


class AnswerWriter(BaseStreamer, Monitor, MonitorSession):
    """Writes an answer token by token: as the streamer of a plain call, or as the monitor of one that speculates."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, write: Write):
        self._tokenizer, self._write = tokenizer, write
        self._generated: list[int] = []
        self._done = 0  # tokens that were written
        self._line: list[int] = []  # tokens of the current line
        self._written = ""  # what has been written of it
        self._has_prompt = False

    def put(self, value: torch.Tensor) -> None:
        """Receive the prompt, then every token of a plain call."""
        if self._has_prompt:
            self._generated += value.flatten().tolist()
            self._write_tokens()
        self._has_prompt = True

    def start(self, call: Call) -> MonitorSession:
        self._generated = call.state.generated[0]
        return self

    def observe(self, step: StepRecord) -> None:
        (row,) = step.rows
        assert row is not None
        self._write_tokens(row.accepted, row.emitted)

    def end(self) -> None:
        """Write what is left."""
        self._write_tokens()
        self._decode(False, final=True)

    def _write_tokens(self, accepted: int = 0, emitted: int = 0) -> None:
        """Write the new tokens; the last `emitted` are those of a step that accepted so many draft tokens."""
        first = max(self._done, len(self._generated) - emitted)
        for place in range(self._done, len(self._generated)):
            self._line.append(self._generated[place])
            self._decode(first <= place < first + accepted)
        self._done = len(self._generated)

    def _decode(self, accepted: bool, *, final: bool = False) -> None:
        """Write what the last token adds to the text, once its characters are complete."""
        text = str(self._tokenizer.decode(self._line, skip_special_tokens=True))
        if text.endswith("\ufffd") and not final:  # the first bytes of a character
            return
        if text[len(self._written) :]:
            self._write(text[len(self._written) :], accepted)
        self._written = text
        if text.endswith("\n"):
            self._line, self._written = [], ""


class Chat:
    """Reads lines, answers them, and carries out commands that begin with a slash."""

    def __init__(self, conversation: Conversation, choices: dict[str, Candidates | None], console: Console):
        self.conversation, self.choices, self.console = conversation, choices, console
        self.strategy = next(reversed(choices))

    def run(self, read: Callable[[], str]) -> None:
        """Chat until `read` raises EOFError or KeyboardInterrupt, or until /quit."""
        while True:
            try:
                line = read().strip()
            except (EOFError, KeyboardInterrupt):
                self.console.print()
                return
            if line in ("/quit", "/exit"):
                return
            if line.startswith("/"):
                self._command(*line[1:].split(maxsplit=1))
            elif line:
                line = line.encode("utf-8", "replace").decode("utf-8")  # lone surrogates, which no tokenizer takes
                self._answer([*self.conversation.messages, {"role": "user", "content": line}])

    def _answer(self, messages: list[dict[str, str]]) -> None:
        """Answer the last of these messages and print the answer; the conversation stays as it was if that fails."""
        before, self.conversation.messages = self.conversation.messages, messages
        try:
            status = self.conversation.answer(self.strategy, self.choices[self.strategy], self._print)
        except (KeyboardInterrupt, ValueError) as error:
            self.conversation.messages = before
            self.conversation.forget_cache()
            reason = f"{self.strategy} cannot be used: {error}" if str(error) else "interrupted"
            self.console.print(f"\n[red]{reason}[/]; the conversation is as before\n", highlight=False)
        else:
            self.console.print(f"\n[dim]{status}[/]\n", highlight=False)

    def _print(self, text: str, accepted: bool) -> None:
        style = ACCEPTED if accepted else None
        self.console.print(text, style=style, end="", markup=False, highlight=False, soft_wrap=True)

    def _command(self, name: str = "", argument: str = "") -> None:
        if name == "plain":
            name, argument = "strategy", PLAIN
        if name == "strategy" and argument in self.choices:
            self.strategy = argument
            message = f"strategy: {argument}"
        elif name == "strategy":
            unknown = f"there is no strategy {argument!r}; " if argument else ""
            message = f"{unknown}strategies: {', '.join(self.choices)}; now: {self.strategy}"
        elif name == "again":
            *messages, last = self.conversation.messages or [{"role": ""}]
            if last["role"] == "assistant":
                self.conversation.forget_cache()
                return self._answer(messages)
            message = "there is no answer to repeat"
        elif name == "new":
            self.conversation.clear()
            message = "a new conversation"
        else:
            message = HELP
        self.console.print(f"[dim]{message}[/]\n", highlight=False)


def show(settings: ChatSettings) -> None:
    """Load the models and chat on the terminal."""
    model, tokenizer = load_model(settings.model, settings.dtype, settings.device)
    named = strategies(settings.draft, settings.heads, settings.adapter, tokenizer=tokenizer)[1:]
    choices: dict[str, Candidates | None] = {PLAIN: None, DEFAULT: default_candidates()}
    choices |= {strategy.name: strategy.candidates for strategy in named}
    generation = workloads.generation_settings(settings.max_new_tokens, settings.temperature)
    console = Console()
    console.print(
        f"[bold]{settings.model}[/]. [{ACCEPTED}]Accepted draft tokens[/] are coloured; /help lists commands.\n"
    )
    conversation = Conversation(model, tokenizer, generation, settings.seed, settings.system)
    with maybe_prepacked(model, settings.pack_weights):
        Chat(conversation, choices, console).run(lambda: console.input("[bold cyan]>[/] "))
