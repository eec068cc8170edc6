"""Configuration of a server, including what the options of `ziggurat serve` cannot express (docs/serve.md)."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, Field

from ziggurat.config.section import PathText, Section, Size, Threads
from ziggurat.serve.text.splitting import Protection


def _patterns(patterns: list[str]) -> list[str]:
    Protection(patterns)
    return patterns


class ModelConfigEntry(Section):
    """A served model."""

    path: PathText = Field(min_length=1)
    """Run, model directory, or exported CTranslate2 directory."""
    name: str = Field(default="", max_length=100)
    """Name in the API; default: `source-target`."""
    which: str | None = None
    """Checkpoint of a run: `averaged`, `best`, `last` or an update's number."""
    threads: Threads | None = Field(default=None, ge=1)
    """CPU threads; null: as many as there are cores, or half of them for an exported model, at least one."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda`, `cuda:1`, ..."""
    decoding: dict[str, Any] = Field(default_factory=dict)
    """Keys of the `decoding` section that replace the model's own."""


class LimitsConfig(Section):
    """Limits per request, and per client and minute."""

    characters: Size = Field(default=20_000, ge=1)
    """Maximum number of characters in all texts of a request together."""
    texts: Size = Field(default=500, ge=1)
    """Maximum number of texts in a request."""
    alternatives: int = Field(default=3, ge=0, le=20)
    """Maximum number of alternative translations of a text."""
    body_bytes: Size = Field(default=1 << 20, ge=1000)
    """Maximum size in bytes of a request without files."""
    file_bytes: Size = Field(default=20 << 20, ge=1000)
    """Maximum size in bytes of a document."""
    glossary_terms: Size = Field(default=1000, ge=1)
    """Maximum number of terms in a request's glossary."""
    seconds: float = Field(default=60.0, gt=0, le=86_400)
    """Seconds after which a request is abandoned."""
    reading_seconds: float = Field(default=20.0, gt=0, le=3600)
    """Seconds in which the headers of a request must arrive, and again its body; a body gets one more second for every
    10,000 bytes received."""
    writing_seconds: float = Field(default=30.0, gt=0, le=3600)
    """Seconds in which a client must read the part of its answer that exceeds the system's buffers; it gets one more
    second for every 10,000 bytes."""
    requests_per_minute: Size | None = Field(default=None, ge=1)
    """Requests per minute of one client (its key, or its address); null: no limit."""
    characters_per_minute: Size | None = Field(default=None, ge=1)
    """Characters per minute of one client; null: no limit."""
    waiting: Size = Field(default=2000, ge=1)
    """Sentences that may wait for each model; one client may have half as many. Requests beyond that are refused with
    429 and can be repeated later."""


class DocumentsConfig(Section):
    """Documents that clients have translated."""

    enabled: bool = True
    """Whether documents are accepted."""
    folder: PathText | None = None
    """Folder in which a temporary folder for files is created; null: the system's."""
    keep_seconds: float = Field(default=3600.0, gt=0, le=31_536_000)
    """Seconds for which a translated document can be downloaded."""
    total_bytes: int = Field(default=1 << 30, ge=1000, le=1 << 50)
    """Maximum size in bytes of all stored documents; a client's oldest results are removed to make room for its new
    ones."""
    at_once: int = Field(default=2, ge=1, le=64)
    """Number of documents that are translated at the same time; each is held in memory."""
    uploads: int = Field(default=8, ge=1, le=1000)
    """Number of files that are received at the same time."""
    uploads_of_client: int = Field(default=4, ge=1, le=1000)
    """Share of `uploads` for one client (its key in a header, or its address if no key is needed). If keys are needed,
    all clients that have not shown one count as one."""
    waiting: int = Field(default=50, ge=1, le=10_000)
    """Number of documents that may wait or be translated."""
    waiting_of_client: int = Field(default=10, ge=1, le=10_000)
    """Share of `waiting` for one client (its key, or its address)."""
    characters: Size = Field(default=2_000_000, ge=1)
    """Maximum number of characters in a document's text, counted before it is split into sentences."""
    paragraphs: Size = Field(default=100_000, ge=1)
    """Maximum number of paragraphs, cells, strings or lines with text, which are all in memory together."""
    pieces: Size = Field(default=500_000, ge=1000)
    """Maximum number of tags and entities, lines or strings in a document, counted before it is read."""
    unpacked_bytes: Size = Field(default=64 << 20, ge=1000)
    """Maximum unpacked size in bytes of a document's members."""
    seconds: float = Field(default=3600.0, gt=0, le=604_800)
    """Seconds in which a document must be received, and again in which it must be translated."""
    leave: list[str] = Field(default_factory=list)
    """Keys in JSON, Android, gettext, XLIFF and TMX whose text is left untranslated; `*` stands for any characters."""


class ServeConfig(Section):
    """A server."""

    models: list[ModelConfigEntry] = Field(default_factory=list)
    """The models; those named on the command line come first."""
    host: str = "127.0.0.1"
    """Address to listen on. The default accepts connections from this machine only, `0.0.0.0` from everywhere."""
    port: int = Field(default=5000, ge=0, le=65_535)
    """Port; 0: a free one, which the first message shows."""
    proxies: list[str] = Field(default_factory=list)
    """Addresses of reverse proxies, or networks such as `10.0.0.0/8`. Only from them are these headers trusted: the
    client's address (`X-Forwarded-For`) and the server's public address (`X-Forwarded-Proto`, `X-Forwarded-Host`,
    `X-Forwarded-Prefix`). If there are any proxies, their request names are used (`X-Request-ID`)."""
    memory: int | None = Field(default=None, ge=1, le=1 << 50)
    """Bytes that open models, or models being opened, may take, estimated from their size; null: no limit. A model is
    opened when it is first requested."""
    names: dict[str, str] = Field(default_factory=dict)
    """Names of languages by code, for codes that ISO 639-1 lacks."""
    limits: LimitsConfig = LimitsConfig()
    """Limits of requests and clients."""
    documents: DocumentsConfig = DocumentsConfig()
    """Documents."""
    protect: Annotated[list[str], AfterValidator(_patterns)] = Field(default_factory=list)
    """Patterns (for the library `regex`) of text that is left unchanged in every text and document."""
    glossaries: PathText | None = None
    """File that stores the glossaries of the DeepL interface; null: they are kept in memory until the server ends."""
    page: bool = True
    """Whether `/` shows a web page."""
    keys: PathText | None = None
    """File of API keys, as written by `ziggurat serve --new-key NAME`; null: no key is needed."""
    metrics_token: str | None = Field(default=None, min_length=8, max_length=200)
    """Token that /metrics requires; null: it answers everybody who reaches the port."""
    log_requests: bool = False
    """Whether each request gets a line in the log: name, path, status and time, but none of its content."""
    drain_seconds: float = Field(default=30.0, ge=0, le=3600)
    """Seconds for finishing running requests when the server is stopped; after that they are refused (503)."""
