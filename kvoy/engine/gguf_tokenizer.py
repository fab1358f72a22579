"""A tokenizer from the vocabulary in a GGUF file: BPE over bytes (model "gpt2") or sentencepiece (model "llama").

Owns how each ``tokenizer.ggml.pre`` splits text and how sentencepiece scores become merges; follows llama.cpp, and
the model's own tokenizer where the two differ (NFC of Qwen). What is built goes to the cache: the JSON of the
tokenizers library and its sha256. Torch-free.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from operator import itemgetter
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from kvoy.core.errors import ModelError
from kvoy.engine.cache import cache_folder, locked, replacing
from kvoy.engine.fields import Fields
from kvoy.engine.gguf_file import GgufFile

BUILDER_VERSION = 1
"""Grows when the same file comes to give another tokenizer: the cache is keyed by it, and by the library's version."""

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3_SPLIT = rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2_SPLIT = rf"{_WORDS}|\p{{N}}|{_REST}"
_TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class TokenType(IntEnum):
    """llama.cpp's classes of token."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class _Split:
    """How text is cut before BPE. ``regex`` None is GPT-2's own; ``whole_words``: a word in the vocabulary is one
    token even when no merges lead to it."""

    regex: str | None = None
    single_digits: bool = False
    whole_words: bool = False
    adds_bos: bool = False
    """When the file does not say."""
    nfc: bool = False


_GPT2 = _Split()
_LLAMA3 = _Split(_LLAMA3_SPLIT, whole_words=True, adds_bos=True)
_QWEN2 = _Split(_QWEN2_SPLIT, nfc=True)
_SPLITS = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "smollm": _Split(single_digits=True),
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _Split(_TEKKEN_SPLIT, whole_words=True, adds_bos=True),
}


@dataclass(frozen=True, slots=True)
class _Pieces:
    """The vocabulary of a file: token ``i`` is ``tokens[i]``."""

    fields: Fields
    tokens: list[str]
    types: list[TokenType]

    def of_type(self, kind: TokenType) -> Iterator[str]:
        return (token for token, its_kind in zip(self.tokens, self.types, strict=True) if its_kind == kind)

    def named(self, name: str) -> str | None:
        """The token that ``<name>_token_id`` points to."""
        ids = self.fields.ids(f"{name}_token_id")
        return self.tokens[ids[0]] if ids and ids[0] < len(self.tokens) else None


def special_tokens(file: GgufFile) -> dict[str, str]:
    """bos_token, eos_token, unk_token, pad_token, where the file has them."""
    pieces = _pieces(file)
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    return {variable: token for variable, name in names.items() if (token := pieces.named(name)) is not None}


def load(file: GgufFile, digest: str, cache_dir: Path) -> tokenizers.Tokenizer:
    """The tokenizer of ``file`` (whose content has ``digest``), from the cache when it was built before."""
    with cache_folder(cache_dir / "tokenizers") as folder:
        target = folder / f"{digest[:32]}-{BUILDER_VERSION}-{tokenizers.__version__}.tokenizer"
        if (known := _read(target)) is not None:
            return known
        with locked(target):
            if (known := _read(target)) is not None:
                return known
            built = build(file)
            with replacing(target) as part:
                _write(part, built)
            return built


def _read(path: Path) -> tokenizers.Tokenizer | None:
    """The tokenizer saved in ``path``; None when there is none or not as it was written."""
    if not path.is_file():
        return None
    content, _, digest = path.read_bytes().rpartition(b"\n")
    if hashlib.sha256(content).hexdigest().encode() != digest:
        return None
    return tokenizers.Tokenizer.from_str(content.decode())


def _write(path: Path, backend: tokenizers.Tokenizer) -> None:
    content = backend.to_str().encode()
    path.write_bytes(content + b"\n" + hashlib.sha256(content).hexdigest().encode())


def build(file: GgufFile) -> tokenizers.Tokenizer:
    """Takes up to a few seconds, most of it for sentencepiece merges."""
    pieces = _pieces(file)
    model = pieces.fields.text("model")
    if model not in ("gpt2", "llama"):
        raise ModelError(f"{file.path} has a {model!r} tokenizer; kvoy builds gpt2 and llama (sentencepiece) ones")
    try:
        backend, adds_bos = _byte_level(pieces) if model == "gpt2" else _sentencepiece(pieces)
    except ModelError:
        raise
    except Exception as error:  # the library raises no narrower class
        raise ModelError(f"{file.path} has a tokenizer that contradicts itself: {error}") from error
    for kind, special in ((TokenType.CONTROL, True), (TokenType.UNKNOWN, True), (TokenType.USER_DEFINED, False)):
        backend.add_tokens([AddedToken(token, special=special, normalized=False) for token in pieces.of_type(kind)])
    bos = pieces.named("bos")
    if bos is not None and pieces.fields.flag("add_bos_token", adds_bos):
        backend.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], special_tokens=[(bos, pieces.tokens.index(bos))]
        )
    return backend


def _pieces(file: GgufFile) -> _Pieces:
    fields = Fields(str(file.path), file.metadata, "tokenizer.ggml.")
    tokens = fields.texts("tokens")
    types = [int(kind) for kind in fields.numbers("token_type", [TokenType.NORMAL] * len(tokens))]
    if len(types) != len(tokens) or not set(types) <= set(TokenType):
        raise ModelError(f"{file.path}: tokenizer.ggml.token_type does not fit tokenizer.ggml.tokens")
    return _Pieces(fields, tokens, [TokenType(kind) for kind in types])


def _byte_level(pieces: _Pieces) -> tuple[tokenizers.Tokenizer, bool]:
    pre = pieces.fields.text("pre", "default")
    split = _SPLITS.get(pre)
    if split is None:
        raise ModelError(f"{pieces.fields.source} splits text by {pre!r} rules; kvoy knows {', '.join(_SPLITS)}")
    vocabulary = {token: index for index, token in enumerate(pieces.tokens)}
    merges = [_pair(merge, pieces) for merge in pieces.fields.texts("merges")]
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=split.whole_words))
    if split.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _pre_tokenizer(split)
    backend.decoder = decoders.ByteLevel()
    return backend, split.adds_bos


def _pair(merge: str, pieces: _Pieces) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not (left and space and right):
        raise ModelError(f"{pieces.fields.source}: {merge!r} in tokenizer.ggml.merges is no pair")
    return left, right


def _pre_tokenizer(split: _Split) -> pre_tokenizers.PreTokenizer:
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.regex is None)
    if split.regex is not None:
        return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(split.regex), behavior="isolated"), to_bytes])
    if split.single_digits:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), to_bytes])
    return to_bytes


def _sentencepiece(pieces: _Pieces) -> tuple[tokenizers.Tokenizer, bool]:
    vocabulary = {token: index for index, token in enumerate(pieces.tokens)}
    unknown = next(pieces.of_type(TokenType.UNKNOWN), None) or pieces.named("unknown")
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=_merges(pieces), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    escape = normalizers.Replace(" ", "\u2581")
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    if pieces.fields.flag("add_space_prefix", True):
        # Before the text and after each special token, as llama.cpp and the models' makers have it.
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), escape])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = escape
    backend.decoder = decoders.Sequence(steps)
    return backend, True


def _merges(pieces: _Pieces) -> list[tuple[str, str]]:
    """Every way to make a piece of two others, best score first: what sentencepiece does with its scores."""
    scores = pieces.fields.numbers("scores")
    if len(scores) != len(pieces.tokens):
        raise ModelError(f"{pieces.fields.source}: tokenizer.ggml.scores does not fit tokenizer.ggml.tokens")
    normal = {
        token: score
        for token, kind, score in zip(pieces.tokens, pieces.types, scores, strict=True)
        if kind == TokenType.NORMAL
    }
    ranked: list[tuple[float, int, str]] = []
    for token, score in normal.items():
        cuts = (cut for cut in range(1, len(token)) if token[:cut] in normal and token[cut:] in normal)
        ranked.extend((-score, -cut, token) for cut in cuts)
    # Of the ways to make one piece, the one with the longest left part comes first.
    ranked.sort(key=itemgetter(0, 1))
    return [(token[:-cut], token[-cut:]) for _, cut, token in ranked]
