"""Forms as clients send them."""


def form(fields, boundary="xYz"):
    """The headers and the body of a form; a value of bytes is a file."""
    body = b""
    for name, value in fields:
        extra = '; filename="a.wav"\r\nContent-Type: audio/wav' if isinstance(value, bytes) else ""
        head = f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"{extra}\r\n\r\n'
        body += head.encode() + (value if isinstance(value, bytes) else value.encode()) + b"\r\n"
    return {"Content-Type": f"multipart/form-data; boundary={boundary}"}, (
        body + f"--{boundary}--\r\n".encode()
    )
