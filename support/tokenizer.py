"""Tokenizers: text to token ids and back, by the files of a model's directory."""

import re
from itertools import groupby
from pathlib import Path
from typing import Callable, Iterable, Iterator

from sentencepiece import SentencePieceProcessor

from support.files import FOREIGN, UserError, read_given, read_json, read_text, why


class Tokenizer:
    """The tokenizer of a model, of either kind.

    sentencepiece reads `tokenizer.model` (Llama 2 and its relatives). Where there is none,
    the package tokenizers reads `tokenizer.json` (Llama 3, SmolLM2). What looks like a
    special token in a text, such as "<s>", is plain text if `encode` is not told otherwise.
    """

    def __init__(self, path: Path):
        """`path`: the model's directory; Meta keeps tokenizer.model in its parent."""
        self.file = tokenizer_file(path)
        try:
            if self.file.suffix == ".json":
                self.tokens = JsonTokens(self.file)
            else:
                self.tokens = SentencePieceTokens(self.file, added_tokens(path))
            self.vocab_size = self.tokens.vocab_size
            # Each of these ids ends a text: the tokenizer's own, and those named beside it.
            self.ends = self.tokens.ends | {*named_ids(path, "eos", self.tokens.id_of)}
            self.prefix = self.begin(path)
        except ValueError as error:
            reason = why(self.file, error)
            sentence = f"{self.file.name} is not a readable tokenizer ({reason})"
            raise UserError(f"{path}: {sentence}") from None
        self.bos = self.prefix[0]  # begins each text
        self.x = self.tokens.encode("x")[-1:]  # a list of one id, that of "x"

    def begin(self, path: Path) -> list[int]:
        """The ids that begin a text: those of prefix.json, or else the BOS alone. Where no
        file names a BOS, the smallest id that ends a text begins the next one."""
        if (path / "prefix.json").is_file():
            ids = read_json(path / "prefix.json")
            if not isinstance(ids, list) or not ids:
                raise ValueError("prefix.json must be a list of ids")
            if not all(isinstance(i, int) and i >= 0 for i in ids):
                raise ValueError("prefix.json has what is no id")
            return ids
        named = named_ids(path, "bos", self.tokens.id_of)
        begins = [*self.tokens.begins, *named, *sorted(self.ends)]
        if not begins:
            raise ValueError("no file names a token that begins or ends a text")
        return begins[:1]

    def fit(self, rows: int) -> None:
        """Leave out what a model of so many rows has not, such as a [PAD] that was added to
        the tokenizer alone. Raises UserError if a text may have it."""
        largest = max(self.tokens.largest, *self.prefix)
        if largest >= rows:
            token = f"{self.tokens.name(largest)} has id {largest}"
            more = f"it has more tokens than the model: {token}, the model has {rows:,} rows"
            remedy = "remove it from the tokenizer, or resize the model's embeddings"
            raise UserError(f"{self.file}: {more}; {remedy}")
        self.vocab_size = min(self.vocab_size, rows)

    def encode(self, text: str, special: bool = False) -> list[int]:
        """The ids of a whole text: the prefix (usually the BOS alone), then those of the
        text. `special`: what looks like a special token is one. A text that begins with the
        prefix itself, as those of a chat template do, has it once."""
        ids = self.continued(text, special)
        begun = special and ids[: len(self.prefix)] == self.prefix
        return ids if begun else self.prefix + ids

    def continued(self, text: str, special: bool = False) -> list[int]:
        """The ids of a text that continues another one: without the prefix."""
        # Half of a surrogate pair, which tokenizers refuse, becomes a question mark.
        return self.tokens.encode(text.encode("utf-8", "replace").decode(), special)

    def special_in(self, text: str) -> list[str]:
        """The special tokens whose names are in a text."""
        return [name for name in self.tokens.special if name in text]

    def decode(self, ids: list[int]) -> str:
        return self.tokens.decode(ids)

    def added(self, ids: list[int], before: list[int]) -> str:
        """The text that tokens add to that of others. A part of a character gives U+FFFD."""
        return self.decode([*before, *ids]).removeprefix(self.decode(before))

    def texts(self, ids: Iterable[int], before: list[int] = []) -> Iterator[str]:
        """The text that each of the ids adds to those before. Of the tokens of one character
        the last one has the character, and the others have no text. U+FFFD at the end of a
        text has none, either."""
        waiting = []  # the tokens of a character that is not complete
        for i in ids:
            waiting.append(i)
            added = self.added(waiting, before)
            if added.endswith("\ufffd"):
                yield ""
            else:
                yield added
                before, waiting = self.x, []  # a tokenizer may drop the first blank of a text

    def piece(self, i: int) -> str:
        """The text that token i adds, with its leading blank if it has one. A part of a
        character gives U+FFFD, and a token without text gives its name."""
        return self.added([i], self.x) or self.tokens.name(i)


def tokenizer_file(path: Path) -> Path:
    """The tokenizer's file: in the model's directory or, as Meta has it, in the parent
    directory. For "." or a link it may also be the parent of the directory itself."""
    parents = (path.parent, path.resolve().parent)
    places = [path / "tokenizer.model", path / "tokenizer.json"]
    for file in places + [parent / "tokenizer.model" for parent in parents]:
        if file.is_file():
            return file
    raise UserError(f"{path}: there is no tokenizer.model and no tokenizer.json in it")


# --- What the files beside a tokenizer say ----------------------------------------------


def from_files(folder: Path, names: list[str], values: Callable[[dict], list]) -> list:
    """The values that are found in those of the files that are there. Raises ValueError."""
    found = []
    for name in names:
        if (folder / name).is_file():
            try:
                found += values(read_given(folder / name))
            except FOREIGN as error:
                raise ValueError(f"{name} is of another form ({error!r})") from None
    return found


def named_ids(folder: Path, role: str, id_of: Callable[[str], int | None]) -> list[int]:
    """The ids of role "bos" or "eos" that files name, by the token's name or by its id."""

    def ids_in(content: dict) -> list[int]:
        token = content.get(f"{role}_token")  # "<s>", or {"content": "<s>", ...}
        named = token["content"] if isinstance(token, dict) else token
        ids = content.get(f"{role}_token_id", [])  # 1, or [1, 2]
        found = ids if isinstance(ids, list) else [ids]
        found = [id_of(named), *found] if named else found
        return [i for i in found if i is not None and i >= 0]  # -1: there is none

    names = ["tokenizer_config.json", "special_tokens_map.json"]
    return from_files(folder, names + ["config.json", "generation_config.json"], ids_in)


def added_tokens(folder: Path) -> dict[str, int]:
    """The ids of the tokens that files add to a tokenizer.model, by their names."""

    def added(content: dict) -> list[tuple[str, int]]:
        return [(name, int(i)) for name, i in content.items()]

    def configured(content: dict) -> list[tuple[str, int]]:
        tokens = content.get("added_tokens_decoder", {})
        return [(token["content"], int(i)) for i, token in tokens.items()]

    older = from_files(folder, ["added_tokens.json"], added)
    return dict(older + from_files(folder, ["tokenizer_config.json"], configured))


# --- The two kinds ----------------------------------------------------------------------


class SentencePieceTokens:
    """A tokenizer.model, and the tokens that other files add to it. Raises ValueError if it
    cannot be used."""

    def __init__(self, file: Path, added: dict[str, int]):
        try:
            self.sp = SentencePieceProcessor(model_file=str(file))
        except (RuntimeError, OSError) as error:
            raise ValueError(error) from None
        size = self.sp.vocab_size()
        self.names = {i: name for name, i in added.items() if i >= size}
        self.vocab_size = 1 + max(self.names, default=size - 1)
        self.largest = size - 1  # the largest id that a plain text can have
        self.begins = {self.sp.bos_id()} - {-1}  # -1: there is none
        self.ends = {self.sp.eos_id()} - {-1}
        control = {self.sp.id_to_piece(i): i for i in range(size) if self.sp.is_control(i)}
        self.special = control | added

    def name(self, i: int) -> str:
        own = i <= self.largest
        return self.sp.id_to_piece(i) if own else self.names.get(i, f"<{i}>")

    def id_of(self, name: str) -> int | None:
        if name in self.special:
            return self.special[name]
        i = self.sp.piece_to_id(name)  # that of <unk> if there is none
        return i if self.sp.id_to_piece(i) == name else None

    def encode(self, text: str, special: bool = False) -> list[int]:
        if not special or not self.special:
            return self.sp.encode(text)
        longest_first = sorted(self.special, key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, longest_first))})", text)
        ids = []
        for part in parts:
            ids += [self.special[part]] if part in self.special else self.sp.encode(part)
        return ids

    def decode(self, ids: list[int]) -> str:
        text = ""
        for own, run in groupby(ids, lambda i: i <= self.largest):
            text += self.sp.decode([*run]) if own else "".join(map(self.name, run))
        return text


class JsonTokens:
    """A tokenizer.json. Raises ValueError if it cannot be used."""

    def __init__(self, file: Path):
        try:
            from tokenizers import Tokenizer as JsonTokenizer  # not in requirements.txt
        except ImportError:
            package = "one more package is needed: pip install tokenizers"
            raise UserError(f"{file}: to read this tokenizer {package}") from None
        text = read_text(file)
        try:
            self.tokenizer = JsonTokenizer.from_str(text)
        except Exception as error:
            # The package raises plain Exceptions, for which there is no narrower name.
            # Errors of any other type are not about the file, and pass on.
            if type(error) is not Exception:
                raise
            raise ValueError(error) from None
        self.tokenizer.no_truncation()  # a file may ask for texts of one length
        self.tokenizer.no_padding()
        added = self.tokenizer.get_added_tokens_decoder()
        self.special = {token.content: i for i, token in added.items() if token.special}
        every = self.tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = 1 + max(every.values())
        # The largest id that a plain text can have.
        self.largest = max(i for name, i in every.items() if name not in self.special)
        self.begins, self.ends = set(), set()  # other files name them
        self.id_of = self.tokenizer.token_to_id

    def name(self, i: int) -> str:
        return self.tokenizer.id_to_token(i) or f"<{i}>"

    def encode(self, text: str, special: bool = False) -> list[int]:
        self.tokenizer.encode_special_tokens = not special  # True: as plain text
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)
