"""Tokenizers: text to token ids and back, by the files of a model's directory."""

from pathlib import Path

from sentencepiece import SentencePieceProcessor

from support.files import FOREIGN, UserError, read_json, read_text, refuse_missing_model, why


class Tokenizer:
    """The tokenizer of a model, of either kind.

    sentencepiece reads `tokenizer.model` (Llama 2 and its relatives). Where there is none,
    the package tokenizers reads `tokenizer.json` (Llama 3, SmolLM2). What looks like a
    special token in a text, such as "<s>", is plain text.
    """

    def __init__(self, path: Path):
        """`path`: the model's directory; Meta keeps tokenizer.model in its parent."""
        self.file = tokenizer_file(path)
        reader = JsonTokens if self.file.suffix == ".json" else SentencePieceTokens
        # Ids that begin a text, where these are not the BOS alone.
        prefix = path / "prefix.json"
        try:
            self.tokens = reader(self.file)
            self.vocab_size = self.tokens.vocab_size
            self.prefix = read_json(prefix) if prefix.is_file() else [self.tokens.bos]
            refuse_prefix(self.prefix)
        except ValueError as error:
            reason = why(self.file, error)
            sentence = f"{self.file.name} is not a readable tokenizer ({reason})"
            raise UserError(f"{path}: {sentence}") from None
        self.bos = self.prefix[0]  # begins each text
        self.ends = self.tokens.ends  # ids, each of which ends a text
        self.letter = self.tokens.encode("x")[-1:]  # what `piece` puts in front of a token

    def encode(self, text: str) -> list[int]:
        """The ids of a whole text: the prefix (usually the BOS alone), then those of the
        text."""
        # Half of a surrogate pair, which tokenizers refuse, becomes a question mark.
        return self.prefix + self.tokens.encode(text.encode("utf-8", "replace").decode())

    def decode(self, ids: list[int]) -> str:
        return self.tokens.decode(ids)

    def piece(self, i: int) -> str:
        """The text that token i adds, with its leading blank if it has one. A part of a
        character gives U+FFFD, and a token without text gives its name."""
        if i >= self.vocab_size:
            return f"<{i}>"
        added = self.decode([*self.letter, i]).removeprefix(self.decode(self.letter))
        return added or self.tokens.name(i)


def refuse_prefix(prefix: list[int]) -> None:
    """Raises ValueError if these are no ids that can begin a text."""
    ids = isinstance(prefix, list) and prefix
    if not ids or not all(type(i) is int and i >= 0 for i in prefix):
        raise ValueError(f"no ids that begin a text: {prefix!r}")


def tokenizer_file(path: Path) -> Path:
    """The tokenizer's file: in the model's directory or, as Meta has it, in the parent
    directory. For "." or a link it may also be the parent of the directory itself."""
    parents = (path.parent, path.resolve().parent)
    places = [path / "tokenizer.model", path / "tokenizer.json"]
    for file in places + [parent / "tokenizer.model" for parent in parents]:
        if file.is_file():
            return file
    refuse_missing_model(path)
    raise UserError(f"{path}: there is no tokenizer.model and no tokenizer.json in it")


class SentencePieceTokens:
    """A tokenizer.model. Raises ValueError if it cannot be used."""

    def __init__(self, file: Path):
        try:
            self.sp = SentencePieceProcessor(model_file=str(file))
        except (RuntimeError, OSError) as error:
            raise ValueError(error) from None
        self.vocab_size = self.sp.vocab_size()
        self.ends = {self.sp.eos_id()} - {-1}  # -1: there is none
        begins = [self.sp.bos_id()] if self.sp.bos_id() >= 0 else sorted(self.ends)
        if not begins:
            raise ValueError("it names no token that begins or ends a text")
        self.bos = begins[0]
        self.encode = self.sp.encode
        self.decode = self.sp.decode
        self.name = self.sp.id_to_piece


class JsonTokens:
    """A tokenizer.json. Which tokens begin and end a text is taken from the files beside
    it: by name (tokenizer_config.json) or by id (config.json, generation_config.json).
    Where they name none that begins a text, the one with the smallest id that ends a text
    does. Raises ValueError if it cannot be used."""

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
        self.tokenizer.encode_special_tokens = True  # as plain text
        self.tokenizer.no_truncation()  # a file may ask for texts of one length
        self.tokenizer.no_padding()
        self.vocab_size = 1 + max(self.tokenizer.get_vocab(with_added_tokens=True).values())
        self.name = self.tokenizer.id_to_token
        self.ends = set(self.special_ids(file.parent, "eos"))
        begins = self.special_ids(file.parent, "bos") or sorted(self.ends)
        if not begins:
            raise ValueError("no file beside it names a token that begins or ends a text")
        self.bos = begins[0]

    def special_ids(self, folder: Path, role: str) -> list[int]:
        """The ids of role "bos" or "eos" that the files name, the tokenizer's own first."""
        found = []
        for name in ("tokenizer_config.json", "config.json", "generation_config.json"):
            file = folder / name
            content = read_json(file) if file.is_file() else {}
            try:
                token = content.get(f"{role}_token")  # "<s>", or {"content": "<s>", ...}
                if token:
                    text = token["content"] if isinstance(token, dict) else token
                    found.append(self.tokenizer.token_to_id(text))
                ids = content.get(f"{role}_token_id")  # 1, or [1, 2]
            except FOREIGN as error:
                raise ValueError(f"{name} is of another form ({error!r})") from None
            found += ids if isinstance(ids, list) else [ids]
        return [i for i in dict.fromkeys(found) if i is not None]

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)
