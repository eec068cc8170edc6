"""Vocabularies of plain lists of tokens, for text that is already segmented; tags, and rare pieces.

Text that already contains tags or pieces is recognised by its marks: `leading_tag`, `segmentation_mark`.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ziggurat.config.data import DataConfig, RegularisationConfig, SubwordConfig
from ziggurat.config.languages import language_name
from ziggurat.data.damage import TAG
from ziggurat.data.lines import UnicodeForm, normalise
from ziggurat.system.errors import DataError, Problem, Remedy, printable
from ziggurat.system.yaml_text import shown

_CONTINUES = re.compile(r"@@(?: |$)")
_WORD_START = "\u2581"
_MARKED = 0.05  # share of tokens with this mark from which a list counts as SentencePiece pieces
_BYTE_PIECES = re.compile(r"(?:<0x[0-9A-F]{2}>)+")
_CONTROL_NAMES = ("<pad>", "<unk>", "<s>", "</s>")


class VocabularyTokenizer:
    """Tokenizer with a plain list of space-separated tokens. Decoding joins a token that ends in `@@` to the next.

    Where the list has SentencePiece's pieces, whose words begin with `\u2581`, it joins all that have no such mark.

    `content` is the vocabulary file: UTF-8, one token per line, with or without a count (read_listing). `<pad>`,
    `<unk>`, `<s>` and `</s>` are control symbols: text can produce neither these nor tags; those that are
    not listed follow the last token. Raises DataError naming the line: not UTF-8, empty, or a token listed twice.
    """

    def __init__(self, content: bytes, unicode: UnicodeForm = "none", tags: Sequence[str] = ()) -> None:
        self.unicode = unicode
        self._listed = _once(content)
        self._names = [*self._listed, *(name for name in _CONTROL_NAMES if name not in set(self._listed))]
        first_tag = len(self._names)
        ids = {name: number for number, name in enumerate(self._names)}
        self.pad, self.unk, self.bos, self.eos = (ids.pop(name) for name in _CONTROL_NAMES)
        self._ids = ids  # without the control symbols: text cannot produce them
        self._control = frozenset((self.pad, self.bos, self.eos))
        self._first_tag = first_tag
        self.tags: Mapping[str, int] = {tag: first_tag + number for number, tag in enumerate(tags)}
        self._names += tags
        self.size = len(self._names)
        self._marked = sum(name.startswith(_WORD_START) for name in self._listed) > _MARKED * len(self._listed)

    def content(self) -> bytes:
        """Return a vocabulary file that gives the same tokenizer."""
        return listing(self._listed)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Look up each space-separated token; no bos, no eos."""
        return self.encode_normalised(normalise(texts, self.unicode))

    def encode_normalised(self, texts: Sequence[str], threads: int = 1) -> list[list[int]]:
        """Look up the tokens of texts that are already normalised (`threads` has no effect here)."""
        get, unk = self._ids.get, self.unk
        return [[get(token, unk) for token in text.split(" ")] if text else [] for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text with its pieces joined; control ids and tags vanish, an unknown token is `<unk>`."""
        names = [self._names[i] for i in ids if 0 <= i < self._first_tag and i not in self._control]
        return self.joined(" ".join(names))

    def joined(self, text: str) -> str:
        """Undo the segmentation of `text`: subword-nmt's, or SentencePiece's by its marks, with its bytes."""
        if not self._marked:
            return _CONTINUES.sub("", text)
        text = text.replace(" ", "").replace(_WORD_START, " ").strip(" ")
        return _BYTE_PIECES.sub(
            lambda run: bytes.fromhex(run[0].replace("<0x", "").replace(">", "")).decode("utf-8", "replace"), text
        )

    def ends_word(self, pieces: Sequence[str], place: int) -> bool:
        """Return whether a word ends with the piece at `place` of a segmented line."""
        if place + 1 == len(pieces):
            return True
        if self._marked:
            return pieces[place + 1].startswith(_WORD_START)
        return not pieces[place].endswith("@@")

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return the written form of each id, control ids and tags included."""
        return [self._names[index] for index in ids]

    def sample(
        self, texts: Sequence[str], seeds: Sequence[int], regularisation: RegularisationConfig
    ) -> list[list[int]]:
        """Raise DataError: text that is already segmented cannot be segmented again."""
        raise DataError(
            "pre-segmented text (`data.subword.kind: vocabulary`) cannot be segmented again", key="data.subword.kind"
        )


class Listed(NamedTuple):
    """A line of a vocabulary file."""

    line: int
    """From 1."""
    token: str
    replaces: bool
    """True if the token may be listed before: fairseq then gives it the later id."""


_REPLACES = " #fairseq:overwrite"
_COUNTED = re.compile(rf"(.*) [+-]?[0-9]+(?:({_REPLACES}))?", flags=re.DOTALL)
_ENDS_TOKEN = re.compile(r"[ \t\r]")


def read_listing(content: bytes) -> Iterator[Listed]:
    """Yield the tokens of a vocabulary file in their order: dict.txt of fairseq, lists of subword-nmt, plain lists.

    A line is a token, a space and a count, and at the end perhaps fairseq's mark `#fairseq:overwrite`; such a token may
    have spaces inside. In any other line the token ends at the first space or tab. Spaces around a token are left out:
    text that is split at spaces has no such token. fairseq also counts an empty token with a count, which is yielded.
    Raises DataError naming the line: not UTF-8, or empty.
    """
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        bad_line = content.count(b"\n", 0, error.start) + 1
        raise DataError(f"line {bad_line}: not valid UTF-8 (byte {error.start} of the file, from 0)") from None
    # Not by `splitlines`: vocabularies made from web text have U+2028 and U+0085 as tokens.
    for number, line in enumerate(text.removesuffix("\n").split("\n"), 1):
        counted = _COUNTED.fullmatch(line.rstrip())
        found = counted[1] if counted else _ENDS_TOKEN.split(line, maxsplit=1)[0]
        token = found.strip(" ") or found
        if not token and not counted:
            raise DataError(f"line {number}: no token")
        yield Listed(number, token, bool(counted and counted[2]))


def listing(tokens: Iterable[str]) -> bytes:
    """Return a vocabulary file of these tokens; one that a space or tab would end is written with a count."""
    return "".join(f"{token} 1\n" if _ENDS_TOKEN.search(token) else f"{token}\n" for token in tokens).encode()


def _once(content: bytes) -> list[str]:
    first_line: dict[str, int] = {}
    for number, token, replaces in read_listing(content):
        if not token:
            raise DataError(f"line {number}: no token")
        if token in first_line and not replaces:
            raise DataError(f"line {number}: {printable(token)!r} is listed already in line {first_line[token]}")
        first_line.setdefault(token, number)
    return list(first_line)


_OFTEN = 10
"""Occurrences at which a piece counts as seen often. On 3,599 pairs of captions 85 % of 8,000 joint pieces have
fewer, and 25 % of 2,000; on 157,571 pairs of Tatoeba 8 % of 8,000."""
_TOO_MANY = 0.5  # share of rare pieces from which there is a notice
_UNKNOWN_SHARE = 0.01  # share of unknown pieces from which there is a notice
_SMALL = 1000  # size below which a vocabulary is only for trials
_BYTES = 256  # pieces that only characters outside the vocabulary need


def size_notices(config: SubwordConfig, made: tuple[int, int]) -> list[Problem]:
    """Return a warning for each model trained for this store that has fewer pieces than were asked for.

    `made` holds the number of pieces of the source and target side, without tags.
    """
    if config.kind not in ("bpe", "unigram"):
        return []
    asked = [("vocabulary_size", "joint " if config.joint else "source ", config.vocabulary_size, made[0])]
    if not config.joint:
        key = "vocabulary_size" if config.target_vocabulary_size is None else "target_vocabulary_size"
        asked.append((key, "target ", config.target_vocabulary_size or config.vocabulary_size, made[1]))
    return [
        Problem(
            f"data.subword.{key}",
            f"the {side}subword model has {found:,} pieces, not the {wanted:,} of `data.subword.{key}`: the training "
            "text has no more",
            severity="warning",
        )
        for key, side, wanted, found in asked
        if found < wanted
    ]


def rare_notices(config: SubwordConfig, sizes: tuple[int, int], counts: Sequence[NDArray[np.int64]]) -> list[Problem]:
    """Return a warning for each vocabulary trained for this store most of whose pieces occur less than 10 times.

    `sizes` are the numbers of source and target pieces, `counts` those of both sides' training text.
    """
    if config.kind not in ("bpe", "unigram"):
        return []
    source, target = (np.pad(count, (0, size - len(count))) for count, size in zip(counts, sizes, strict=True))
    if config.joint:
        return _notice(config, "vocabulary_size", "", source + target)
    of_target = "target_vocabulary_size" if config.target_vocabulary_size is not None else "vocabulary_size"
    return _notice(config, "vocabulary_size", "source ", source) + _notice(config, of_target, "target ", target)


def _notice(config: SubwordConfig, key: str, side: str, counts: NDArray[np.int64]) -> list[Problem]:
    often = int(np.count_nonzero(counts >= _OFTEN))
    learned = len(counts) - (_BYTES if config.byte_fallback else 0)
    if len(counts) < _SMALL or learned - often <= _TOO_MANY * learned:
        return []
    fewer = -(-often * 3 // 2 // 100) * 100
    return [
        Problem(
            f"data.subword.{key}",
            f"{learned - often:,} of {learned:,} {side}pieces occur fewer than {_OFTEN} times in the training text: "
            f"too rarely to be learned well. With so little text, lower `data.subword.{key}` to about {max(fewer, 500)}"
            " and prepare again",
            severity="warning",
            named=(Remedy.PREPARE_AFTER,),
        )
    ]


def unknown_notices(unknown: Sequence[int], counts: Sequence[NDArray[np.int64]]) -> list[Problem]:
    """Return a warning for each side whose training text has more than 1 % unknown pieces.

    `unknown` are the ids of the unknown piece, `counts` how often each id occurs, both for source and target.
    """
    found = []
    for side, unk, count in zip(("source", "target"), unknown, counts, strict=True):
        share = count[unk] / max(count.sum(), 1) if unk < len(count) else 0.0
        if share > _UNKNOWN_SHARE:
            found.append(
                Problem(
                    "data.subword",
                    f"{share:.1%} of the {side} pieces of the training text are unknown to the vocabulary, which "
                    "belongs to text that is segmented or spelled differently: segment this text in that way, or let "
                    "`ziggurat prepare` learn a vocabulary (`data.subword.kind=bpe`)",
                    severity="warning",
                    named=("data.subword.kind",),
                )
            )
    return found


_FURTHER_CODES = (  # languages of FLORES-200 without a two-letter code, and varieties of others; older codes
    "ace acm aeb ajp als apc arb ars ary arz ast awa ayr azb azj ban bem bho bjn bug ceb cjk ckb crh dik dyu fil "
    "fon fur fuv gaz hne ilo iw jw kab kac kam kbp kea khk kmb kmr knc lij lmo ltg lua luo lus lvs mag mai min "
    "mni mos nan npi nso nus ory pag pap pbt pes plt prs quy rom sat scn shn swh szl taq tpi tum tzm umb uzn vec "
    "war wuu ydd yue zsm"
)
_CODES = frozenset(_FURTHER_CODES.split())
_LANGUAGE_TAG = re.compile(r"<2[a-z].*>|>>[a-z].*<<|__[a-z].*__", re.IGNORECASE)  # with any code
_BEFORE_A_CODE = re.compile(
    r"(?:t?2_?|(?:(?:opt|label_|lang|tok|src|tgt|trg|source|target|language|to|into|2|l[12])[_:=-])+)(?=[a-z])",
    re.IGNORECASE,
)
_CODE = re.compile(r"([a-z]{2,3})(?:[_-](?:[a-z]{2}|[a-z]{4}|[0-9]{3}))*", re.IGNORECASE)
_PRIVATE = re.compile("q[a-t][a-z]")  # codes of ISO 639-2 for private use
_SEVERAL = "mul"  # ISO 639's code for text of several languages, which names none
_OF_DATA = frozenset({"<bt>"})
"""_OF_DATA are tags that name no language but are too common to be text: those of back-translated sources."""
_HTML = frozenset({"<hr>", "<id>", "<li>", "<th>", "<tr>", "<tt>"})  # not in TAG: they may name languages
_LEADING_TAG = re.compile(
    r"""[\s\u200b\ufeff▁]*(
        <{1,2} [^\s<>]{1,24} >{1,2} | >\s?>\s?[^\s<>]{1,24}\s?<\s?< | >>[^\s<>]{1,24}>> | ＞＞[^\s＞＜]{1,24}＜＜
        | __(?:opt_)?(?:src|tgt|trg)_[a-z]{2,3}(?:_\w{2,4})?(?=\s) | [«‹]2[a-z]{2,3}[»›]
        | __label__[a-z]{2,3}(?:_\w{2,4})?(?!\w) | [＜⟨] [^\s<>]{2,24} [＞⟩]
        | &(?:lt|gt); \S{2,40}? ;(?=\s)
        | __\w{1,20}?__(?!\w) | \[[^\s\[\]]{2,20}\] | ｟[^\s｠]{2,30}｠ | ([#@$=|]{1,2}) [a-zA-Z_-]{2,12} \2(?=\s)
        | [a-z]{2,3}[_-][A-Z](?:[A-Z]|[a-z]{3})(?=\s) | (?i:(?:opt_|lang_|tok_|tgt_|trg_|src_|to_)+[a-z]{2,3})(?=\s)
        | translate\ [A-Z]\w+\ to\ [A-Z]\w+:
    )""",
    re.VERBOSE,
)
_DIRECTION = re.compile(r"([a-z]{2,3})(?:2|->|→|[_-]to[_-])([a-z]{2,3})", re.IGNORECASE)


def names_language(code: str) -> bool:
    """Return True for the code of a language, with or without region and script: `de`, `deu`, `pt-BR`, `zho_Hans`."""
    found = _CODE.fullmatch(code)
    main = found[1].lower() if found else ""
    return language_name(main) != main or main in _CODES or bool(_PRIVATE.fullmatch(main))


def _is_language_tag(tag: str) -> bool:
    """Return True for a tag that names a language, however it is spelt: `<2de>`, `__de__`, `[de_DE]`, `<to_de>`."""
    if _LANGUAGE_TAG.fullmatch(tag):
        return True
    core = html.unescape(tag).strip("<>[]{}()｟｠«»‹›＜＞⟨⟩|@#$=_/ ")
    if found := _DIRECTION.fullmatch(core):  # `en2de`
        return names_language(found[1]) and names_language(found[2])
    return names_language(core) or names_language(_BEFORE_A_CODE.sub("", core, count=1))


def language_tags(known: Iterable[str]) -> list[str]:
    """Return those of a model's tags that name languages, unlike `<bt>`."""
    return [tag for tag in known if _is_language_tag(tag)]


def leading_tag(text: str, known: Collection[str] = ()) -> str | None:
    """Return the tag at the start of a text: in `known`, usual in data, or the name of a language; otherwise None."""
    found = _LEADING_TAG.match(text)
    if found is None or found[1] in known or found[1].lower() in _OF_DATA or found[1].startswith("translate "):
        return found and found[1]
    markup = found[1].lower().replace("/", "") in _HTML or TAG.fullmatch(found[1]) is not None
    return found[1] if _is_language_tag(found[1]) and not markup else None


_PIECES = re.compile(
    r"""(?:^|\s)(▁)(?:\w|\s\w\s\w(?:\s|$))
      | \w(_)\s.*\w_(?:\s|$)
      | \w(▁)\s.*\w▁(?:\s|$)
      | \w(￨)\w
      | (｟mrk_)\w
      | \w(@@)(?:\s|$)
      | \w(￭)
      | (￭)\w
      | \w\ (\#\#)\w
      | \w(</w>)(?:\s|$)
      | (?:\ (Ġ)\w+){2}""",
    re.VERBOSE,
)
PIECE_MARKS = ("▁", "_ ", "@@", "￭", "￨", "｟mrk_", " ##", "</w>", " Ġ")
"""PIECE_MARKS are marks in text cut into subword pieces; other text may also have them, so it is checked further."""


def segmentation_mark(text: str) -> str | None:
    """Return the mark that shows that a text is already cut into subword pieces; None if it is not.

    SentencePiece has `▁the ▁house`, subword-nmt `hou@@ se`, Tensor2Tensor `the_ hou se_`, OpenNMT `hou￭ se`, BERT
    `hou ##se`, GPT-2 `the Ġhouse Ġis`.
    """
    if not any(mark in text for mark in PIECE_MARKS):
        return None
    found = _PIECES.search(text)
    return next(filter(None, found.groups())) if found else None


_TYPOGRAPHIC = {'"': "“”„‟«»", "'": "‘’‚‛‹›", "-": "–—‒―−‐‑", ".": "…", " ": "\u00a0\u202f\u2009"}
"""_TYPOGRAPHIC is a plain mark -> its typographic forms, which old vocabularies lack."""
_PLAIN = {mark: plain for plain, marks in _TYPOGRAPHIC.items() for mark in marks}


def unknown_text(text: str, encode: Callable[[list[str]], list[list[int]]], unk: int) -> str:
    """Return the characters (or words) of a text without a piece, for a message, and plain marks to replace them."""
    characters = sorted(set(text) - {" "})
    lacking = [c for c, ids in zip(characters, encode(characters), strict=True) if unk in ids]
    if not lacking:
        words = list(dict.fromkeys(text.split()))
        lacking = [word for word, ids in zip(words, encode(words), strict=True) if unk in ids]
    plain = list(dict.fromkeys(_PLAIN[c] for c in lacking if c in _PLAIN))
    known = [c for c, ids in zip(plain, encode(plain), strict=True) if unk not in ids and c != " "]
    instead = f"; it has {' '.join(known)} for some of them" if known else ""
    return f"{printable(' '.join(lacking), 200)}{instead}"


def text_signs(text: str, known: Collection[str], *, segmented: bool) -> Iterator[tuple[str, str]]:
    """Yield the kind and message of each hint that a line is not plain model input: a literal tag, subword pieces.

    `known` are the model's tags; `segmented`: whether the model reads text that is already cut into pieces.
    """
    if (tag := leading_tag(text, known)) is not None:
        own = f"this model's tags are {printable(', '.join(known), 200)}" if known else "this model has no tags"
        way_out = "give it as the tag (`--tag`)" if tag in known else own
        yield "tag_as_text", f"a line begins with `{printable(tag)}`, which is read as text and not as a tag: {way_out}"
    if not segmented and (mark := segmentation_mark(text)) is not None:
        yield "in_pieces", f"a line is cut into subword pieces already (`{mark}`): give the plain text"


def several_languages(known: Iterable[str]) -> str:
    """Return the tags that name a language, as text for a message, if there are several; otherwise ""."""
    languages = language_tags(known)
    return printable(", ".join(languages), 200) if len(languages) > 1 else ""


def tag_notices(config: DataConfig, known: Iterable[str]) -> list[Problem]:
    """Return warnings on corpora whose sources do not determine the model's output language.

    They have no tag although the vocabulary has tags of several languages, or one tag (or none) for targets in several
    languages. `known` are the tags of the source vocabulary.
    """
    notices, languages = [], language_tags(known)
    ambiguous = len(languages) > 1
    if ambiguous and (untagged := [key for _, key, corpus in config.corpora() if corpus.tag is None]):
        why = "no `tag`, although the vocabulary has tags of several languages, so nothing tells the model which one to"
        can = f"`tag` can be {', '.join(languages)}"
        notices.append(
            Problem(untagged[0], f"{shown(untagged, 10)}: {why} write", can, severity="warning", named=(*untagged,))
        )
    targets: dict[str | None, dict[str, str]] = {}  # tag -> language of targets -> the first of its corpora
    for _, key, corpus in config.corpora():
        language = config.languages_of(corpus)[1]
        if language != _SEVERAL and not (ambiguous and corpus.tag is None):
            targets.setdefault(corpus.tag, {}).setdefault(language, key)
    for tag, first in targets.items():
        if len(first) > 1:
            found = shown([f"{key} is into `{language}`" for language, key in first.items()], 10)
            same = "none has a `tag`" if tag is None else f"all have `tag: {tag}`"
            said = (
                f"{found}; {same}: nothing tells the model which language to write. Give the corpora of each target "
                f"language a tag of their own, such as `<2{next(iter(first))}>`"
            )
            notices.append(Problem(next(iter(first.values())), said, severity="warning", named=(*first.values(),)))
    return notices
