"""``triptych chat``: a conversation in the terminal, with files dropped into the text.

Answers stream to stdout, everything else goes to stderr. An error ends a question, not the chat.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from triptych.commands.ask import length_note
from triptych.commands.asked_server import ServerChoice, asked_server
from triptych.commands.attachments import file_kind, find_files, media_input
from triptych.commands.client import GREEDY, Client, MediaInput
from triptych.commands.command_parser import suggest
from triptych.commands.conversation import Attachment, Content, Conversation, Turn
from triptych.commands.drawing import draw_figures
from triptych.commands.line_input import LineInput
from triptych.commands.terminal import (
    Terminal,
    replace_unencodable,
    stdout,
    strip_controls,
    write_answer,
    write_stdout,
)
from triptych.config import Config
from triptych.errors import InvalidConfig, StartError, TriptychError
from triptych.observe.log import print_status

_COMMAND = re.compile(r"/([a-z]*)(?:\s+(.*))?", re.DOTALL)


class ChatSettings(Struct, frozen=True):
    system: str = ""
    parameters: Mapping[str, Any] = GREEDY  # of every request
    history: bool = True


def run(config: Config, options: ChatSettings, choice: ServerChoice) -> int:
    replace_unencodable(stdout())
    with asked_server(config, choice, "chat") as server:
        model = strip_controls(server.client.model())  # fails here if nobody answers
        lines = LineInput([f"/{name}" for name in COMMANDS_IN_CHAT], history=options.history)
        session = ChatSession(server.client, model, options, interactive=lines.interactive)
        if lines.interactive:
            print_status(
                f"chat with {model} at {server.client.url}. /help lists the commands, Ctrl-D ends."
            )
        session.run(lines)
    return 1 if session.failed and not lines.interactive else 0


class _Ended(Exception):
    """``/quit``."""


class ChatSession:
    """Questions and commands of one chat."""

    def __init__(
        self, client: Client, model: str, options: ChatSettings, *, interactive: bool = True
    ) -> None:
        self._client = client
        self._model = model
        self._parameters = options.parameters
        self._conversation = Conversation(options.system)
        self._attached: list[Attachment] = []  # for the next question
        self._stages = True
        self._interactive = interactive  # Ctrl-C stops an answer, and not the chat
        self.failed = False  # some input was refused, or got no answer

    def run(self, lines: LineInput) -> None:
        """Until the end of the input or /quit."""
        while True:
            try:
                line = lines.read()
                if line is None:
                    break
                self.handle(line)
            except KeyboardInterrupt:
                if not self._interactive:
                    raise
                print_status("\nCtrl-D or /quit ends the chat.")
            except _Ended:
                return
        if self._interactive:
            print_status("")

    def handle(self, line: str) -> None:
        """One input: a command, files, or a question."""
        try:
            command = _COMMAND.fullmatch(line.strip())
            if command is not None and file_kind(Path(line.strip())) is None:
                self._run_command(command[1], (command[2] or "").strip())
            elif line.strip():
                self._read(line)
        except TriptychError as error:
            self.failed = True
            code = "" if isinstance(error, StartError) else f" ({error.code})"
            print_status(f"error: {strip_controls(' '.join(str(error).split()))}{code}")

    def _run_command(self, name: str, argument: str) -> None:
        if name not in COMMANDS_IN_CHAT:
            known = [f"/{one}" for one in COMMANDS_IN_CHAT]
            hint = suggest(f"/{name}", known) or ". /help lists them."
            raise InvalidConfig(f"there is no command /{name}{hint}")
        COMMANDS_IN_CHAT[name].run(self, argument)

    def _read(self, line: str) -> None:
        named = find_files(line)
        for name in named.missing:
            print_status(f"no file {strip_controls(name)}: it is sent as text")
        content = tuple(one if isinstance(one, str) else self._attach(one) for one in named.content)
        if any(isinstance(one, str) for one in content):
            self._ask((*self._attached, *content))
        else:
            self._attached += [one for one in content if not isinstance(one, str)]

    def _attach(self, medium: MediaInput) -> Attachment:
        attachment = Attachment.read(medium)
        print_status(strip_controls(f"attached {attachment}"))
        return attachment

    def _ask(self, content: Content) -> None:
        self._attached = []  # also if the server refuses one of them
        said: list[str] = []

        def on_text(text: str) -> None:
            said.append(text)
            write_answer(text)

        try:
            answer = self._client.chat(
                self._conversation.messages(content), self._parameters, on_text
            )
        except KeyboardInterrupt:
            if not self._interactive:
                raise
            self._stop(content, "".join(said))
            return
        except TriptychError as error:
            if said:
                write_stdout("")
            raise self._conversation.name_file(error, content) from None
        write_stdout("")
        self._conversation.turns.append(Turn(content, answer.answer))
        for note in length_note(answer):
            print_status(note)
        if self._stages and answer.timings:
            print_status(draw_figures(answer.timings, Terminal.of(sys.stderr)))

    def _stop(self, content: Content, said: str) -> None:
        """After Ctrl-C. What the model has said so far belongs to the conversation."""
        if said:
            self._conversation.turns.append(Turn(content, said))
            write_stdout("")
            print_status("stopped; the answer so far is kept")
        else:
            print_status("\nstopped before the answer; the question is forgotten")

    def attach(self, argument: str) -> None:
        if not argument:
            raise InvalidConfig("name a file: /attach PATH")
        named = find_files(argument).content
        media = [one for one in named if not isinstance(one, str)]
        if len(media) < len(named) or not media:
            media = [media_input(argument)]
        self._attached += [self._attach(medium) for medium in media]

    def forget(self, argument: str) -> None:
        self._conversation.turns.clear()
        self._attached.clear()
        print_status("a new conversation")

    def undo(self, argument: str) -> None:
        if not self._conversation.turns:
            raise InvalidConfig("there is nothing to undo")
        self._conversation.turns.pop()
        print_status("the last question and its answer are forgotten")

    def save(self, argument: str) -> None:
        if not argument:
            raise InvalidConfig("name a new file: /save FILE")
        path = Path(argument).expanduser()
        try:
            with path.open("x", encoding="utf-8", errors="replace") as file:
                file.write(self._conversation.transcript(self._model))
        except OSError as error:
            raise InvalidConfig(f"{argument} cannot be written: {error.strerror}") from None
        print_status(f"saved as {argument}")

    def set_system(self, argument: str) -> None:
        self._conversation.system = argument
        print_status("the system message is set" if argument else "there is no system message")

    def toggle_stages(self, argument: str) -> None:
        self._stages = not self._stages
        print_status(f"stage times are {'shown' if self._stages else 'hidden'}")

    def help(self, argument: str) -> None:
        for name, command in COMMANDS_IN_CHAT.items():
            print_status(f"  {f'/{name} {command.argument}':14} {command.about}")
        print_status(_HELP)

    def quit(self, argument: str) -> None:
        raise _Ended


class ChatCommand(Struct, frozen=True):
    run: Callable[[ChatSession, str], None]
    about: str
    argument: str = ""


COMMANDS_IN_CHAT = {
    "attach": ChatCommand(ChatSession.attach, "a file or a URL for the next question", "PATH"),
    "new": ChatCommand(ChatSession.forget, "forget the conversation and start again"),
    "undo": ChatCommand(ChatSession.undo, "forget the last question and its answer"),
    "system": ChatCommand(ChatSession.set_system, "how to answer; empty: no such message", "TEXT"),
    "save": ChatCommand(ChatSession.save, "write the conversation to a new file", "FILE"),
    "stages": ChatCommand(ChatSession.toggle_stages, "show or hide the stage times"),
    "help": ChatCommand(ChatSession.help, "this list"),
    "quit": ChatCommand(ChatSession.quit, "end the chat, as Ctrl-D does"),
}
_HELP = """\
  Drop a file into the line, or type its path, quoted or with \\ before spaces:
  cat.png What is this?
  Files inside a sentence keep their place, others come before the text. A \\ at the end of a line
  continues it. Ctrl-C stops an answer."""
