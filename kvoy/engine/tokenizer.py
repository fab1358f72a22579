"""Text to token ids and back, with the model's own tokenizer and chat template.

Owns the two readings of special tokens. ``encode`` of a raw prompt reads them as the model's tokenizer does, since
whoever writes a raw prompt writes its turns. In ``chat`` only the template writes turns: a special token spelled
inside a message (any of its values) is plain text there and cannot open or close a turn. Tokens that the model's
files do not mark as special (``<think>`` of some models) are left to the template. Torch-free.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, models, normalizers

from kvoy.core.errors import InvalidRequest, ModelError
from kvoy.engine import gguf_tokenizer, hf_config
from kvoy.engine.cache import remembered_sha256
from kvoy.engine.chat import ChatTemplate
from kvoy.engine.detokenizer import Detokenizer, Vocabulary
from kvoy.engine.fields import Fields
from kvoy.engine.gguf_file import GgufFile
from kvoy.engine.models import ModelFiles, ModelKind

BREAK = "\ufdd0"
"""Put into a special token's spelling to make it plain text, and dropped again before the text is cut up. Unicode
keeps this code point free for uses inside a program; it is removed from what users send."""

_LONG_CHARS = 8192
"""Text that takes longer than some 2 ms."""

_SPECIAL_VARIABLES = ("bos_token", "eos_token", "unk_token", "pad_token")


@dataclass(frozen=True, slots=True)
class _Parts:
    """What the files of a model give for its text side."""

    backend: tokenizers.Tokenizer
    special_tokens: Mapping[str, str]
    """bos_token, eos_token, …: variables of the template."""
    template: str | None
    adds_bos: bool | None
    """None: as ``backend`` has it."""


class Tokenizer:
    """One model's tokenizer; any number of threads may use it."""

    def __init__(self, name: str, parts: _Parts, eos_token_ids: tuple[int, ...]) -> None:
        self.eos_token_ids = eos_token_ids
        self._name = name
        self._backend = parts.backend
        self._backend.no_truncation()
        self._backend.no_padding()
        self._adds_bos = parts.adds_bos
        self._bos_id = self._backend.token_to_id(parts.special_tokens.get("bos_token", ""))
        added = self._backend.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._finder = _special_finder(added)
        self._plain = _plain_twin(self._backend, added)
        self._template = None if parts.template is None else ChatTemplate(parts.template, parts.special_tokens)
        self._vocabulary = Vocabulary.of(self._backend, self._special_ids, name)

    @classmethod
    def load(cls, files: ModelFiles) -> "Tokenizer":
        """From the model's files; ModelError when they have no tokenizer that kvoy can use."""
        parts = _gguf_parts(files) if files.kind is ModelKind.GGUF else _hugging_face_parts(files)
        return cls(files.name, parts, files.eos_token_ids())

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    @property
    def vocab_tokens(self) -> int:
        """How many tokens there are; the model may have rows for more (padding)."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Ids of a raw prompt, with BOS in front when the model wants one. ``special`` False: spelled out special
        tokens are plain text."""
        if special:
            ids = self._ids(self._backend, text, with_bos=self._adds_bos is not False)
        else:
            ids = self._ids(self._plain, self._broken(text), with_bos=self._adds_bos is not False)
        if self._adds_bos and self._bos_id is not None and ids[:1] != [self._bos_id]:
            ids.insert(0, self._bos_id)
        return ids

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Ids of a conversation up to where the assistant answers. The template writes BOS, if the model wants one."""
        if self._template is None:
            raise InvalidRequest(
                f"the model {self._name} has no chat template; send the whole prompt as a completion instead",
                "messages",
            )
        broken = [{name: self._broken(value) for name, value in message.items()} for message in messages]
        text = self._template.render(broken)
        if BREAK not in text:
            return self._ids(self._backend, text, with_bos=False)
        return self._ids(self._plain, text, with_bos=False)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``, special tokens left out."""
        detokenizer = self.detokenizer()
        return "".join([*map(detokenizer.push, ids), detokenizer.flush()])

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for, which need not be whole characters; empty for special tokens."""
        return self._vocabulary.bytes_of(token_id)

    def detokenizer(self, *, continuing: bool = False) -> Detokenizer:
        """For one output. ``continuing``: the text goes on from a prompt, so a space at its start is kept."""
        return Detokenizer(self._vocabulary, continuing=continuing)

    def _broken(self, text: str) -> str:
        """``text`` with no special token spelled in it, for ``_plain``."""
        text = text.replace(BREAK, "")
        # A second round: a broken token may have hidden another that overlaps it.
        while found := _encoded(self._finder, text).offsets:
            starts = [0, *(start + 1 for start, _ in found)]
            text = BREAK.join(text[start:end] for start, end in pairwise([*starts, len(text)]))
        return text

    def _ids(self, backend: tokenizers.Tokenizer, text: str, *, with_bos: bool) -> list[int]:
        encoding = _encoded(backend, text, with_bos=with_bos)
        if backend is self._plain:
            self._refuse_forged(text, encoding)
        return encoding.ids

    def _refuse_forged(self, text: str, encoding: tokenizers.Encoding) -> None:
        """Some vocabularies lead from plain characters to a special token; better no answer than a forged turn."""
        for token_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token_id in self._special_ids and BREAK in text[start:end]:
                spelled = text[start:end].replace(BREAK, "")
                raise InvalidRequest(f"the text spells {spelled!r}, which this model cannot read as plain text")


def _encoded(backend: tokenizers.Tokenizer, text: str, *, with_bos: bool = False) -> tokenizers.Encoding:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest("the text has half of a surrogate pair, which is no character") from error
    if len(text) > _LONG_CHARS:
        # Of the two, only this one lets other threads of the process run meanwhile.
        return backend.encode_batch([text], add_special_tokens=with_bos)[0]
    return backend.encode(text, add_special_tokens=with_bos)


def _special_finder(added: Mapping[int, AddedToken]) -> tokenizers.Tokenizer:
    """A tokenizer that has the special tokens only: its offsets are where they are spelled. Linear in the text."""
    finder = tokenizers.Tokenizer(models.BPE())
    # A token of a single character cannot be broken in two.
    spellings = [token.content for token in added.values() if token.special and len(token.content) > 1]
    finder.add_tokens([AddedToken(text, normalized=False) for text in spellings])
    return finder


def _plain_twin(backend: tokenizers.Tokenizer, added: Mapping[int, AddedToken]) -> tokenizers.Tokenizer:
    """As ``backend``, but BREAK is dropped after special tokens are found and before anything else happens."""
    twin = tokenizers.Tokenizer(backend.model)
    drop = normalizers.Replace(BREAK, "")
    twin.normalizer = drop if backend.normalizer is None else normalizers.Sequence([drop, backend.normalizer])
    if backend.pre_tokenizer is not None:
        twin.pre_tokenizer = backend.pre_tokenizer
    if backend.post_processor is not None:
        twin.post_processor = backend.post_processor
    twin.add_tokens([_found_in_raw_text(added[token_id]) for token_id in sorted(added)])
    return twin


def _found_in_raw_text(token: AddedToken) -> AddedToken:
    """Special tokens are looked for in the text as it came: once it is normalised, BREAK is gone."""
    return AddedToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized and not token.special,
        special=token.special,
    )


def _gguf_parts(files: ModelFiles) -> _Parts:
    file = GgufFile(files.path)
    fields = Fields(str(files.path), file.metadata, "tokenizer.")
    return _Parts(
        backend=gguf_tokenizer.load(file, remembered_sha256(files.path, files.cache_dir), files.cache_dir),
        special_tokens=gguf_tokenizer.special_tokens(file),
        template=fields.text("chat_template") if fields.has("chat_template") else None,
        adds_bos=None,
    )


def _hugging_face_parts(files: ModelFiles) -> _Parts:
    path = files.path / "tokenizer.json"
    if not path.is_file():
        raise ModelError(
            f"{files.path} has no tokenizer.json; load the tokenizer once with transformers and save it there"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no narrower class
        raise ModelError(f"cannot read {path}: {error}") from error
    config_path = files.path / "tokenizer_config.json"
    config = Fields.of_json(config_path) if config_path.is_file() else Fields(str(config_path), {})
    tokens = {name: hf_config.special_token(config, name) for name in _SPECIAL_VARIABLES}
    return _Parts(
        backend=backend,
        special_tokens={name: token for name, token in tokens.items() if token is not None},
        template=_template(files.path, config),
        adds_bos=config.flag("add_bos_token") if config.has("add_bos_token") else None,
    )


def _template(directory: Path, config: Fields) -> str | None:
    """From its own file, as it is kept today, or from where it was kept before."""
    own = directory / "chat_template.jinja"
    if own.is_file():
        return own.read_text(encoding="utf-8")
    older = directory / "chat_template.json"
    if older.is_file():
        config = Fields.of_json(older)
    value = config.values.get("chat_template")
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None
