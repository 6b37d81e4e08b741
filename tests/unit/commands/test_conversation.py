import pytest

from triptych.commands.client import MediaInput
from triptych.commands.conversation import Attachment, Conversation, Turn
from triptych.errors import InvalidMedia


def attachment(name):
    return Attachment(MediaInput("image", name, flagged=False), {"type": "image_url", "n": name})


def said(system=""):
    conversation = Conversation(system)
    conversation.turns.append(Turn((attachment("a.png"), "What?"), "A cat."))
    return conversation


def test_messages_are_the_turns_and_the_next_question():
    messages = said("Be brief.").messages(("Sure?", attachment("b.png")))
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
    assert messages[0]["content"] == "Be brief."
    assert messages[1]["content"][1] == {"type": "text", "text": "What?"}
    assert messages[2]["content"] == "A cat."
    assert [part["type"] for part in messages[3]["content"]] == ["text", "image_url"]
    assert [message["role"] for message in Conversation().messages(("Hi",))] == ["user"]


@pytest.mark.parametrize(
    ("system", "place", "named"),
    [
        ("", "messages[0].content[0]", "a.png: "),
        ("", "messages[0].content[0].image_url.url", "a.png: "),
        ("", "messages[2].content[1]", "b.png: "),
        ("Be brief.", "messages[3].content[1]", "b.png: "),
        ("", "messages[2].content[0]", ""),  # the text
        ("", "messages[1].content[0]", ""),  # the answer
        ("", "messages[4].content[0]", ""),
        ("", "messages[2].content[9]", ""),
        ("Be brief.", "messages[0].content[0]", ""),
        ("", "messages", ""),
    ],
)
def test_the_file_that_the_server_refuses_is_named(system, place, named):
    error = InvalidMedia("Not this.", param=place)
    told = said(system).name_file(error, ("Sure?", attachment("b.png")))
    assert isinstance(told, InvalidMedia)
    assert told.message == f"{named}Not this."


def test_a_transcript_names_files():
    assert said("Be brief.").transcript("demo") == (
        "**system**\n\nBe brief.\n\n**you**\n\n[image a.png]\nWhat?\n\n**demo**\n\nA cat.\n"
    )


def test_a_file_is_read_once(tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(b"picture")
    read = Attachment.read(MediaInput("image", str(path), flagged=False))
    path.unlink()
    conversation = Conversation()
    conversation.turns.append(Turn((read,), "A cat."))
    [part] = conversation.messages(("Sure?",))[0]["content"]
    assert part["image_url"]["url"].startswith("data:")
    assert str(read) == f"image {path}"
