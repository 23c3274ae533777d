"""Tokenizers: text to token ids and back, by the files of a model's directory."""

import json
import re
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Callable, Iterable, Iterator, NamedTuple

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
            kind = JsonTokens if self.file.suffix == ".json" else SentencePieceTokens
            self.beside = (added_tokens(path), blanks(path))  # what other files say of it
            self.tokens = kind(self.file, *self.beside)
            puts_blank = self.tokens.encode("x") != self.tokens.encode("x", continues=True)
            if self.beside[1].first and not puts_blank:
                raise ValueError("add_prefix_space of tokenizer_config.json is not implemented")
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
        prefix itself, as those of a chat template do, has it once. Raises UserError if the
        model has no row for a special token."""
        ids = self.with_rows(self.tokens.encode(plain(text), special))
        begun = special and ids[: len(self.prefix)] == self.prefix
        return ids if begun else self.prefix + ids

    def continued(self, text: str, special: bool = False) -> list[int]:
        """The ids of a text that continues another one: without the prefix, and without the
        blank that some tokenizers put in front of a text. Raises UserError as `encode`."""
        return self.with_rows(self.tokens.encode(plain(text), special, continues=True))

    def with_rows(self, ids: list[int]) -> list[int]:
        """The same ids. Raises UserError if `fit` has left out one of them."""
        if max(ids, default=0) >= self.vocab_size:
            name = self.tokens.name(max(ids))
            raise UserError(f"{self.file}: the model has no row for {name}; leave it out")
        return ids

    def special_in(self, text: str) -> list[str]:
        """The special tokens whose names are in a text."""
        return [name for name in self.tokens.special if name in text]

    def decode(self, ids: list[int]) -> str:
        return self.tokens.decode(ids)

    def added(self, ids: list[int], before: list[int]) -> str:
        """The text that tokens add to that of others. A part of a character gives
        U+FFFD."""
        return self.decode([*before, *ids]).removeprefix(self.decode(before))

    def texts(self, ids: Iterable[int], before: list[int] = []) -> Iterator[str]:
        """The text that each of the ids adds to those before. Of the tokens of one
        character the last one has the character, and the others have no text. U+FFFD at
        the end of a text has none, either."""
        waiting = []  # the tokens of a character that is not complete
        for i in ids:
            waiting.append(i)
            added = self.added(waiting, before)
            if added.endswith("\ufffd"):
                yield ""
            else:
                yield added
                # "x" stands in front, as a tokenizer may drop the first blank of a text.
                before, waiting = [*self.x, *waiting], []

    def piece(self, i: int) -> str:
        """The text that token i adds, with its leading blank if it has one. A part of a
        character gives U+FFFD, and a token without text gives its name."""
        return self.added([i], self.x) or self.tokens.name(i)


def plain(text: str) -> str:
    """Half of a surrogate pair, which tokenizers refuse, becomes a question mark."""
    return text.encode("utf-8", "replace").decode()


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


class Added(NamedTuple):
    """A token that files add to a tokenizer. One that is not special is a token in every
    text."""

    id: int
    special: bool
    flags: dict[str, bool]  # such as {"rstrip": True}


def added_tokens(folder: Path) -> dict[str, Added]:
    """The tokens that files add to those of a tokenizer's own file, by their names."""

    def roles(content: dict) -> list:  # such as "eos_token": "<end>"
        found = []
        for key, value in content.items():
            if key == "extra_special_tokens" and isinstance(value, dict):
                value = [*value.values()]
            if key.endswith(("_token", "_special_tokens")):
                found += value if isinstance(value, list) else [value]
        named = [token["content"] if isinstance(token, dict) else token for token in found]
        return [name for name in named if isinstance(name, str)]  # "add_bos_token" is a bool

    def added(content: dict) -> list[tuple[str, Added]]:
        return [(name, Added(int(i), name in special, {})) for name, i in content.items()]

    def configured(content: dict) -> list[tuple[str, Added]]:
        tokens = []
        for i, token in content.get("added_tokens_decoder", {}).items():
            flags = {flag: True for flag in ("lstrip", "rstrip", "single_word") if token.get(flag)}
            is_special = bool(token.get("special")) or token["content"] in special
            tokens.append((token["content"], Added(int(i), is_special, flags)))
        return tokens

    special = from_files(folder, ["tokenizer_config.json", "special_tokens_map.json"], roles)
    older = from_files(folder, ["added_tokens.json"], added)
    return dict(older + from_files(folder, ["tokenizer_config.json"], configured))


class Blanks(NamedTuple):
    """Where a tokenizer that puts a blank in front of a text does so, as the files beside
    it say. None: they do not say it."""

    first: bool | None  # at the beginning (None: yes)
    later: bool | None  # behind a token that was added, too (None: yes)


def blanks(folder: Path) -> Blanks:
    def said(content: dict) -> list[Blanks]:
        return [Blanks(content.get("add_prefix_space"), content.get("legacy"))]

    return [Blanks(None, None), *from_files(folder, ["tokenizer_config.json"], said)][-1]


# --- The two kinds ----------------------------------------------------------------------


class SentencePieceTokens:
    """A tokenizer.model, and the tokens that other files add to it. Raises ValueError if it
    cannot be used."""

    def __init__(self, file: Path, added: dict[str, Added], blanks: Blanks):
        model = file.read_bytes()
        try:
            self.sp = SentencePieceProcessor(model_proto=model)
            # The same without a blank in front of a text. What follows a protobuf message
            # replaces its fields: here normalizer_spec.add_dummy_prefix becomes false.
            self.bare = SentencePieceProcessor(model_proto=model + b"\x1a\x02\x18\x00")
        except (RuntimeError, OSError) as error:
            raise ValueError(error) from None
        self.blanks = blanks
        self.puts_blank = self.sp.encode("x") != self.bare.encode("x")
        self.size = size = self.sp.vocab_size()
        self.names = {token.id: name for name, token in added.items() if token.id >= size}
        self.vocab_size = 1 + max(self.names, default=size - 1)
        self.begins = {self.sp.bos_id()} - {-1}  # -1: there is none
        self.ends = {self.sp.eos_id()} - {-1}
        for name, token in added.items():
            if token.flags:
                raise ValueError(f"{', '.join(token.flags)} of {name} is not implemented")
            if token.id < size and self.sp.id_to_piece(token.id) != name:
                raise ValueError(f"{name} is added as {token.id}, which is another token")
        control = {self.sp.id_to_piece(i): i for i in range(size) if self.sp.is_control(i)}
        self.special = control | {name: t.id for name, t in added.items() if t.special}
        self.ordinary = {name: t.id for name, t in added.items() if not t.special}
        # The largest id that a plain text can have.
        self.largest = max(size - 1, *self.ordinary.values(), 0)

    def name(self, i: int) -> str:
        return self.sp.id_to_piece(i) if i < self.size else self.names.get(i, f"<{i}>")

    def id_of(self, name: str) -> int | None:
        known = self.special | self.ordinary
        if name in known:
            return known[name]
        i = self.sp.piece_to_id(name)  # that of <unk> if there is none
        return i if self.sp.id_to_piece(i) == name else None

    def encode(self, text: str, special: bool = False, continues: bool = False) -> list[int]:
        tokens = self.special | self.ordinary if special else self.ordinary
        ids = []
        for n, part in enumerate(split_at(tokens, text)):
            bare = self.blanks.later is False
            if n == 0:
                bare = continues or self.blanks.first is False
            if part in tokens:
                ids.append(tokens[part])
            elif bare and self.puts_blank and part.startswith(" ") and part.strip(" "):
                ids += self.sp.encode(part[1:])  # its own blank: it may drop that of a text
            else:
                ids += (self.bare if bare else self.sp).encode(part)
        return ids

    def decode(self, ids: list[int]) -> str:
        """A blank in front of the first tokens is the tokenizer's. Behind an added token
        it is the text's, if the tokenizer puts none there."""
        text = ""
        for own, run in groupby(ids, lambda i: i < self.size):
            run = [*run]
            if own and text and self.puts_blank and self.blanks.later is False:
                text += self.sp.decode([*self.sp.encode("x"), *run]).removeprefix("x")
            else:
                text += self.sp.decode(run) if own else "".join(map(self.name, run))
        return text


def split_at(names: Iterable[str], text: str) -> list[str]:
    """The parts of a text between these names, and the names, which have odd places."""
    longest_first = sorted(names, key=len, reverse=True)
    return re.split(f"({'|'.join(map(re.escape, longest_first))})", text) if names else [text]


class JsonTokens:
    """A tokenizer.json, and the tokens that other files add to it. Raises ValueError if it
    cannot be used."""

    def __init__(self, file: Path, added: dict[str, Added], blanks: Blanks):
        try:
            import tokenizers  # not in requirements.txt
        except ImportError:
            package = "one more package is needed: pip install tokenizers"
            raise UserError(f"{file}: to read this tokenizer {package}") from None
        self.package, self.blanks = tokenizers, blanks
        self.content, self.added = read_text(file), added
        self.tokenizer = self.load(self.content)
        own = self.tokenizer.get_added_tokens_decoder()
        self.special = {token.content: i for i, token in own.items() if token.special}
        self.ordinary = {token.content: i for i, token in own.items() if not token.special}
        every = self.tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = 1 + max(every.values())
        # The largest id that a plain text can have.
        self.largest = max(i for name, i in every.items() if name not in self.special)
        self.begins, self.ends = set(), set()  # other files name them
        self.id_of = self.tokenizer.token_to_id

    def load(self, content: str):
        """A Tokenizer of the package, to which the tokens of other files are added."""
        try:
            tokenizer = self.package.Tokenizer.from_str(content)
        except Exception as error:
            # The package raises plain Exceptions, for which there is no narrower name.
            # Errors of any other type are not about the file, and pass on.
            if type(error) is not Exception:
                raise
            raise ValueError(error) from None
        tokenizer.no_truncation()  # a file may ask for texts of one length
        tokenizer.no_padding()
        there = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
        for name, token in sorted(self.added.items(), key=lambda item: item[1].id):
            if name not in there:
                new = self.package.AddedToken(
                    name, normalized=False, special=token.special, **token.flags)
                tokenizer.add_tokens([new])
            i = tokenizer.token_to_id(name)
            if i != token.id:
                raise ValueError(f"{name} is added as {token.id}, and here it is {i}")
        return tokenizer

    @cached_property
    def bare(self):
        """The same without a blank in front of a text."""

        def without(keys: dict) -> dict:
            changed = {
                "Prepend": {"type": "Sequence", "normalizers": []},
                "Metaspace": keys | {"prepend_scheme": "never", "add_prefix_space": False},
                "ByteLevel": keys | {"add_prefix_space": False},
            }
            return changed.get(str(keys.get("type")), keys)

        return self.load(json.dumps(json.loads(self.content, object_hook=without)))

    def name(self, i: int) -> str:
        return self.tokenizer.id_to_token(i) or f"<{i}>"

    def encode(self, text: str, special: bool = False, continues: bool = False) -> list[int]:
        def ids_of(tokenizer) -> list[int]:
            tokenizer.encode_special_tokens = not special  # True: as plain text
            return tokenizer.encode(text, add_special_tokens=False).ids

        added = {*self.special.values(), *self.ordinary.values()}

        def before(ids: list[int]) -> int:  # how many ids stand before the first that was added
            return next((n for n, i in enumerate(ids) if i in added), len(ids))

        ids = ids_of(self.tokenizer)
        if continues or self.blanks.first is False:
            # The blank before a text is left out, up to the first token that was added.
            bare = ids_of(self.bare)
            ids = bare[: before(bare)] + ids[before(ids) :]
        return ids

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)
