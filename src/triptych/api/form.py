"""Forms (multipart/form-data) in memory: their fields as views of the body, nothing copied.

Strict and bounded: few fields, short heads, no nested forms, no transfer encodings. A body that is
not exactly a form is refused. What a file holds is not examined.
"""

from __future__ import annotations

import re

from msgspec import Struct

from triptych.api.content import RawBody
from triptych.errors import InvalidForm

MAX_FORM_FIELDS = 32
MAX_FIELD_HEAD = 4096  # bytes before a field's content
MAX_FIELD_TEXT = 64 << 10  # bytes of a field that is no file
FORM_STEP = 256 << 10  # bytes that are searched while no other thread can run
_HEAD_END = b"\r\n\r\n"

_BOUNDARY = re.compile(
    rb"""multipart/form-data[ \t]*(?:;[ \t]*[\w-]+=[^;"]*)*?;[ \t]*boundary="""
    rb"""(?:"([^"\\\r\n]{1,70})"|([^\s;,"]{1,70}))[ \t]*(?:;.*)?""",
    re.IGNORECASE,
)
_DISPOSITION = re.compile(rb"content-disposition[ \t]*:[ \t]*form-data[ \t]*;(.*)", re.IGNORECASE)
_PARAMETER = re.compile(rb'[ \t]*([\w*-]+)=(?:"([^"\r\n]*)"|([^\s;"]*))[ \t]*(?:;|$)')


class FormField(Struct, frozen=True):
    name: str
    data: memoryview
    is_file: bool  # it has a filename; the filename itself means nothing here

    def text(self) -> str:
        if self.is_file or len(self.data) > MAX_FIELD_TEXT:
            raise InvalidForm(f"The field '{self.name}' must be text.", param=self.name)
        try:
            return bytes(self.data).decode()
        except UnicodeDecodeError:
            raise InvalidForm(f"The field '{self.name}' is not UTF-8.", param=self.name) from None


def is_form(content_type: bytes) -> bool:
    return content_type.lower().startswith(b"multipart/")


def parse_form(content_type: bytes, body: RawBody, size: int) -> list[FormField]:
    """The fields in the first ``size`` bytes of the body, in their order.

    Every byte is searched once. Raises InvalidForm.
    """
    match = _BOUNDARY.fullmatch(content_type)
    if match is None:
        raise InvalidForm("Send a form as multipart/form-data with a boundary.")
    mark = b"--" + (match[1] or match[2])
    view = memoryview(body)[:size]
    if bytes(view[: len(mark)]) != mark:
        raise InvalidForm("The form does not begin with its boundary.")
    fields: list[FormField] = []
    at = len(mark)
    while (line := bytes(view[at : at + 2])) == b"\r\n":
        if len(fields) == MAX_FORM_FIELDS:
            raise InvalidForm(f"The form has more than {MAX_FORM_FIELDS} fields.")
        start = _head_end(view, at + 2)
        end = _find(body, b"\r\n" + mark, start - 2, size)
        if end < 0:
            raise InvalidForm("The form ends within a field.")
        # An empty field may share its line feed with the head before it.
        fields.append(_field(bytes(view[at + 2 : start]), view[start : max(start, end)]))
        at = end + 2 + len(mark)
    if line != b"--" or bytes(view[at + 2 : at + 5]) not in (b"", b"\r\n"):
        raise InvalidForm("The form does not end with its boundary.")
    return fields


def _head_end(view: memoryview, at: int) -> int:
    """Where the content of the field begins whose head is at ``at``."""
    found = bytes(view[at : at + MAX_FIELD_HEAD]).find(_HEAD_END)
    if found < 0:
        raise InvalidForm(f"The head of a field has no end, or over {MAX_FIELD_HEAD} bytes.")
    return at + found + len(_HEAD_END)


def _field(head: bytes, data: memoryview) -> FormField:
    parameters: dict[bytes, bytes] = {}
    for line in head.split(b"\r\n"):
        header = line.partition(b":")[0].strip().lower()
        if header in (b"content-transfer-encoding", b"content-encoding"):
            raise InvalidForm("Fields of a form must not be encoded.")
        if disposition := _DISPOSITION.fullmatch(line):
            parameters = _parameters(disposition[1])
    try:
        name = parameters[b"name"].decode()
    except (KeyError, UnicodeDecodeError):
        raise InvalidForm("A field of the form has no name.") from None
    if not 0 < len(name) <= 64:
        raise InvalidForm("A field of the form has an empty or a long name.")
    return FormField(name, data, b"filename" in parameters or b"filename*" in parameters)


def _parameters(text: bytes) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = {}
    at = 0
    while at < len(text):
        match = _PARAMETER.match(text, at)
        if match is None:
            raise InvalidForm("The Content-Disposition of a field is not valid.")
        name = match[1].lower()
        if name in found:
            raise InvalidForm("The Content-Disposition of a field repeats a parameter.")
        found[name] = match[3] if match[2] is None else match[2]
        at = match.end()
    return found


def _find(body: RawBody, mark: bytes, start: int, size: int) -> int:
    """Where the mark is, in steps between which other threads can run; -1: nowhere."""
    while start < size:
        end = min(start + FORM_STEP, size)
        found = body.find(mark, start, end)
        if found >= 0:
            return found
        if end == size:
            return -1
        start = end - len(mark) + 1
    return -1
