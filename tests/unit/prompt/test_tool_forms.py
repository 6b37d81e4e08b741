"""What is found out about templates by probing them."""

import pytest

from support.templates import TEMPLATES, template
from triptych.prompt.template import ChatTemplate
from triptych.prompt.tool_forms import ToolForms, find_tool_forms

FORMS = {
    "hermes": ToolForms(True, True, False, False, True, True, True),
    "llama3": ToolForms(True, True, False, False, True, False, True),
    "mistral": ToolForms(True, True, False, True, True, False, True),
    "deepseek": ToolForms(True, True, True, False, True, False, True),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_forms(name):
    assert find_tool_forms(ChatTemplate(template(name).read_text(), {})) == FORMS[name]


@pytest.mark.parametrize(
    ("source", "forms"),
    [
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", ToolForms()),
        ("{{ tools | tojson if tools }}{{ messages[0].content }}", ToolForms(describes=True)),
        ("{{ raise_exception('no') if tools }}{{ messages[0].content }}", ToolForms()),
        (  # arguments that are printed as Python prints a dict are not taken for JSON
            "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
            "{{ c.function.name }}{{ c.function.arguments }}{% endfor %}{% endfor %}",
            ToolForms(calls=True, text_arguments=True, results=True),
        ),
        (  # parts in results, but no string
            "{% for m in messages %}{% if m.role == 'tool' %}{{ m.content[0].text }}{% else %}"
            "{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}{% endif %}{% endfor %}",
            ToolForms(calls=True, results=True, result_parts=True, result_text=False),
        ),
    ],
)
def test_less_common_forms(source, forms):
    assert find_tool_forms(ChatTemplate(source, {})) == forms


def test_ids_are_shortened_only_where_the_template_needs_it():
    assert ToolForms().id("call_123") == "call_123"
    short = ToolForms(short_ids=True)
    assert short.id("abc123DEF") == "abc123DEF"
    assert short.id("call_123") == short.id("call_123") != short.id("call_124")
    assert len(short.id("call_123")) == 9
    assert short.id("call_123").isalnum()
