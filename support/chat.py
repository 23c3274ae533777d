"""Questions to a model, as its own chat template writes them."""

import json
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import jinja2
import jinja2.sandbox

from support.files import FOREIGN, UserError, read_json, read_text

MARKS = ("\ue000", "\ue001", "\ue002")  # stand for words in a chat; no text has them


class Chat(NamedTuple):
    """What a template puts around the words of a user."""

    opens: str  # before the first words
    closes: str  # behind words, up to where the answer begins
    between: str  # behind an answer, up to the next words


def read_chat(folder: Path) -> Chat | None:
    """What the template of a model's directory puts around words, None if there is no
    template. Raises UserError."""
    file = folder / "tokenizer_config.json"
    try:
        config = read_json(file) if file.is_file() else {}
        text, names = template_in(config), names_in(config)
        own = folder / "chat_template.jinja"
        if own.is_file():
            file = own
            text = read_text(file)
    except FOREIGN as error:
        raise UserError(f"{file}: its chat template cannot be read ({error!r})") from None
    if text is None:
        return None
    chat = rendered(text, names, file)
    if [chat.count(mark) for mark in MARKS] != [1, 1, 1]:
        fault = "its chat template does not have each message once"
        raise UserError(f"{file}: {fault}; write the chat into --prompt")
    opens, rest = chat.split(MARKS[0])
    between, closes = rest.split(MARKS[1])[1].split(MARKS[2])
    return Chat(opens, closes, between)


def rendered(text: str, names: dict[str, str], file: Path) -> str:
    """A chat of three turns, whose words are MARKS, by this template of `file`. It is
    rendered as transformers does, in jinja2's sandbox: jinja2 comes with torch. Raises
    UserError if it does not render."""
    roles = ("user", "assistant", "user")
    messages = [{"role": role, "content": mark} for role, mark in zip(roles, MARKS)]
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = json.dumps
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.globals["raise_exception"] = refuse
    try:
        template = environment.from_string(text)
        return template.render(messages=messages, add_generation_prompt=True, **names)
    except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
        fault = f"its chat template does not render ({error})"
        raise UserError(f"{file}: {fault}; write the chat into --prompt") from None


def refuse(sentence: str) -> None:
    """What templates call raise_exception."""
    raise jinja2.TemplateError(sentence)


def template_in(config: dict) -> str | None:
    """The template of tokenizer_config.json. Of several it is the one called default."""
    found = config.get("chat_template")
    if isinstance(found, list):
        named = {entry["name"]: entry["template"] for entry in found}
        found = named.get("default")
    return found


def names_in(config: dict) -> dict[str, str]:
    """The special tokens that templates may name, such as bos_token."""
    tokens = {key: value for key, value in config.items() if key.endswith("_token") and value}
    return {key: t["content"] if isinstance(t, dict) else t for key, t in tokens.items()}
