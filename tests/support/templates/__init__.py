"""Short chat templates in the manner of several families, for tests of tools and reasoning."""

from pathlib import Path

TEMPLATES = ("hermes", "llama3", "mistral", "deepseek")


def template(name: str) -> Path:
    return Path(__file__).parent / f"{name}.jinja"
