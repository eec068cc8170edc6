"""Configuration of a server: what the options of `ziggurat serve` cannot say (docs/serve.md)."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, Field

from ziggurat.config.section import PathText, Section, Size, Threads
from ziggurat.serve.text.splitting import Protection


def _patterns(patterns: list[str]) -> list[str]:
    Protection(patterns)
    return patterns


class ModelConfigEntry(Section):
    """A model that is served."""

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
    """Limits of one request, and of one client in a minute."""

    characters: Size = Field(default=20_000, ge=1)
    """Most characters of all texts of a request together."""
    texts: Size = Field(default=500, ge=1)
    """Most texts of a request."""
    alternatives: int = Field(default=3, ge=0, le=20)
    """Most further translations of a text."""
    body_bytes: Size = Field(default=1 << 20, ge=1000)
    """Most bytes of a request without files."""
    file_bytes: Size = Field(default=20 << 20, ge=1000)
    """Most bytes of a document."""
    glossary_terms: Size = Field(default=1000, ge=1)
    """Most terms of a request's glossary."""
    seconds: float = Field(default=60.0, gt=0, le=86_400)
    """Seconds after which a request is given up."""
    reading_seconds: float = Field(default=20.0, gt=0, le=3600)
    """Seconds in which the head of a request must come, and in which its body must; a body has a second more for every
    10,000 bytes that have come."""
    writing_seconds: float = Field(default=30.0, gt=0, le=3600)
    """Seconds in which a client must read what of its answer does not fit into the system's buffers; it has a second
    more for every 10,000 bytes."""
    requests_per_minute: Size | None = Field(default=None, ge=1)
    """Requests of one client (its key, or its address) in a minute; null: no limit."""
    characters_per_minute: Size | None = Field(default=None, ge=1)
    """Characters of one client in a minute; null: no limit."""
    waiting: Size = Field(default=2000, ge=1)
    """Sentences that may wait for each model, and half as many of one client; beyond that requests are told to come
    back later (429)."""


class DocumentsConfig(Section):
    """Documents that are translated for clients."""

    enabled: bool = True
    """Whether documents are taken at all."""
    folder: PathText | None = None
    """Folder in which a temporary one is made for files; null: the system's."""
    keep_seconds: float = Field(default=3600.0, gt=0, le=31_536_000)
    """Seconds that a translated document can be fetched."""
    total_bytes: int = Field(default=1 << 30, ge=1000, le=1 << 50)
    """Most bytes of all documents that are kept; a client's own oldest results make room for its new ones."""
    at_once: int = Field(default=2, ge=1, le=64)
    """Documents that are translated at the same time, each of which is in memory."""
    uploads: int = Field(default=8, ge=1, le=1000)
    """Files that are received at the same time."""
    uploads_of_client: int = Field(default=4, ge=1, le=1000)
    """Of these, files of one client (its key in a header, or its address where no key is needed); all who have shown no
    key where one is needed count as one."""
    waiting: int = Field(default=50, ge=1, le=10_000)
    """Documents that may wait or be translated."""
    waiting_of_client: int = Field(default=10, ge=1, le=10_000)
    """Of these, documents of one client (its key, or its address)."""
    characters: Size = Field(default=2_000_000, ge=1)
    """Most characters of a document's text, counted before it is cut into sentences."""
    paragraphs: Size = Field(default=100_000, ge=1)
    """Most paragraphs, cells, strings or lines with text, which are all in memory together."""
    pieces: Size = Field(default=500_000, ge=1000)
    """Most tags and entities, lines or strings of a document, counted before it is read."""
    unpacked_bytes: Size = Field(default=64 << 20, ge=1000)
    """Most bytes of a document's members, unpacked."""
    seconds: float = Field(default=3600.0, gt=0, le=604_800)
    """Seconds in which a document must have been received, and then translated."""
    leave: list[str] = Field(default_factory=list)
    """Keys of JSON, Android, gettext, XLIFF and TMX whose text stays; `*` stands for any characters."""


class ServeConfig(Section):
    """A server."""

    models: list[ModelConfigEntry] = Field(default_factory=list)
    """The models; those of the command line come first."""
    host: str = "127.0.0.1"
    """Address to listen at. The default is this machine alone; `0.0.0.0` is every one that reaches it."""
    port: int = Field(default=5000, ge=0, le=65_535)
    """Port; 0: a free one, which the first message names."""
    proxies: list[str] = Field(default_factory=list)
    """Addresses, or networks such as `10.0.0.0/8`, of reverse proxies: from them, and from nobody else, the client's
    address is believed (`X-Forwarded-For`), and what it knows the server by: `X-Forwarded-Proto`, `X-Forwarded-Host`
    and `X-Forwarded-Prefix`. Where there are any, names of requests are taken over (`X-Request-ID`)."""
    memory: int | None = Field(default=None, ge=1, le=1 << 50)
    """Bytes that models which are open or being opened may take, by their size; null: no limit. A model is opened when
    it is first asked for."""
    names: dict[str, str] = Field(default_factory=dict)
    """Names of languages by code, where ISO 639-1 has none."""
    limits: LimitsConfig = LimitsConfig()
    """Limits of requests and clients."""
    documents: DocumentsConfig = DocumentsConfig()
    """Documents."""
    protect: Annotated[list[str], AfterValidator(_patterns)] = Field(default_factory=list)
    """Patterns (of the library `regex`) of what comes through unchanged in every text and document."""
    glossaries: PathText | None = None
    """File in which the glossaries of DeepL's interface are kept; null: in memory, until the server ends."""
    page: bool = True
    """Whether there is a page for people at `/`."""
    keys: PathText | None = None
    """File of API keys, as `ziggurat serve --new-key NAME` writes it; null: everybody may ask."""
    metrics_token: str | None = Field(default=None, min_length=8, max_length=200)
    """Token that /metrics asks for; null: it answers everybody who reaches the port."""
    log_requests: bool = False
    """Whether each request is a line of the log: its name, path, status and time, and nothing that it holds."""
    drain_seconds: float = Field(default=30.0, ge=0, le=3600)
    """Seconds in which requests under way are finished when the server is told to end; then they are refused (503)."""
