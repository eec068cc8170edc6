"""`ziggurat fetch`: from names and recipes to files, records, and the licences in a store's manifest."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Result
from tests.corpora.fetch import server as behaving
from tests.corpora.fetch.material import PAIRS, packed_tar, packed_zip, serve
from tests.corpora.fetch.server import Server
from ziggurat.cli import main
from ziggurat.corpora.fetch import pairs as corpus_module
from ziggurat.data.inputs import write_origin
from ziggurat.system.compressed import byte_stream

Fetch = Callable[..., Result]

CONFIG = """
data:
  source_language: en  # the corpora are de-en
  target_language: de
  store: store
  train: [{source: data/local-de-en/train.en.zst, target: data/local-de-en/train.de.zst}]
  dev: [{source: data/local-de-en/dev.en, target: data/local-de-en/dev.de}]
  subword: {vocabulary_size: 300}
"""


def exit_status(*arguments: str) -> int:
    """Return the exit status of a command."""
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    return int(exit.value.code or 0)


@pytest.fixture
def fetch(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Fetch:
    """Run `ziggurat fetch` in an empty folder, with a registry of the server's files and without pauses."""
    registry = serve(server, tmp_path)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("ZIGGURAT_DOWNLOADS", str(tmp_path / "downloads"))
    monkeypatch.setattr("time.sleep", lambda seconds: None)

    def call(*arguments: str) -> Result:
        proxy = () if "--proxy" in arguments else ("--proxy", "")
        status = exit_status("fetch", "--registry", str(registry), *proxy, *arguments)
        return Result(status, *capfd.readouterr())

    return call


def lines(path: str) -> list[str]:
    with byte_stream(Path(path)) as file:
        return file.read().decode().splitlines()


def tree() -> list[str]:
    return sorted(str(path) for path in Path().rglob("*") if path.is_file())


@pytest.mark.parametrize("kind", ["zip", "tgz", "sgm", "tsv", "tmx", "xml"])
def test_every_layout_gives_the_same_text(kind: str, fetch: Fetch) -> None:
    done = fetch(f"local/{kind}/en-de")
    assert done.status == 0, done.err
    stem = f"data/local/{kind}/de-en"
    assert tree() == [f"{stem}.de.zst", f"{stem}.en.zst", f"{stem}.fetched.json"]
    assert [lines(f"{stem}.{code}.zst") for code in ("de", "en")] == [[pair[side] for pair in PAIRS] for side in (0, 1)]
    assert f"{stem}.de.zst and {stem}.en.zst: 3 pairs, written" in done.out
    assert f"local/{kind}/de-en: licence of {kind} (http://example.invalid/)" in done.out
    assert ("1 line without both sides left out" in done.out) == (kind == "tsv")


def test_text_of_one_language(fetch: Fetch) -> None:
    assert fetch("local/mono/de", "-o", "mono").status == 0
    assert tree() == ["mono/local/mono/de.de.zst", "mono/local/mono/de.fetched.json"]
    assert lines("mono/local/mono/de.de.zst") == [pair[0] for pair in PAIRS]


def test_repeating_the_command_does_nothing(fetch: Fetch, server: Server) -> None:
    first = fetch("local/zip/de-en", "--json")
    requests, before = len(server.requests), {path: Path(path).stat().st_mtime_ns for path in tree()}
    again = fetch("local/zip/de-en", "--json")
    assert {path: Path(path).stat().st_mtime_ns for path in tree()} == before
    assert [json.loads(one.out)[0]["reused"] for one in (first, again)] == [False, True]
    assert json.loads(first.out)[0]["terms"] == {"local/zip/de-en: LICENSE": "CC0", "local/zip/de-en: README": "Hello"}
    content = {path: Path(path).read_bytes() for path in tree()}
    assert fetch("local/zip/de-en", "--force").status == 0
    assert {path: Path(path).read_bytes() for path in tree()} == content, "the same bytes each time"
    assert len(server.requests) == requests


def test_each_archive_has_its_terms(fetch: Fetch, server: Server, tmp_path: Path) -> None:
    urls = [
        server.add(f"{code}/t.zip", packed_zip({f"t.{code}": b"one\n", "LICENSE": f"of {code}".encode()}))
        for code in ("de", "en")
    ]
    registry = tmp_path / "registry.yaml"
    of_two = f"""corpora:
  local/two/{{a}}-{{b}}:
    title: Two archives
    files: [{{url: "{urls[0]}"}}, {{url: "{urls[1]}"}}]
    take: ["*.{{a}}", "*.{{b}}"]
    licence: two
    known_from: this test
"""
    registry.write_text(registry.read_text().replace("corpora:\n", of_two, 1))
    assert json.loads(fetch("local/two/de-en", "--json").out)[0]["terms"] == {
        f"local/two/de-en: {url}: LICENSE": f"of {code}" for url, code in zip(urls, ("de", "en"), strict=True)
    }


@pytest.mark.slow
def test_changed_files_and_the_users_own_files(fetch: Fetch) -> None:
    assert fetch("local/zip/de-en").status == 0
    path = Path("data/local/zip/de-en.en.zst")
    whole = path.read_bytes()
    path.write_bytes(b"mine")
    done = fetch("local/zip/de-en")
    assert done.status == 2
    assert f"{path}: changed since it was fetched; `--force`" in done.err
    Path("data/local/zip/de-en.fetched.json").unlink()
    done = fetch("local/zip/de-en")
    assert done.status == 2
    assert "no record says that it was fetched" in done.err
    assert path.read_bytes() == b"mine"
    assert fetch("local/zip/de-en", "--force").status == 0
    assert path.read_bytes() == whole


def test_a_changed_file_stays_even_if_the_other_side_is_gone(fetch: Fetch) -> None:
    assert fetch("local/zip/de-en").status == 0
    path = Path("data/local/zip/de-en.en.zst")
    whole = path.read_bytes()
    path.write_bytes(b"mine")
    Path("data/local/zip/de-en.de.zst").unlink()
    done = fetch("local/zip/de-en")
    assert done.status == 2
    assert f"{path}: changed since it was fetched; `--force`" in done.err
    assert path.read_bytes() == b"mine"
    assert fetch("local/zip/de-en", "--force").status == 0
    assert path.read_bytes() == whole


@pytest.mark.slow
def test_a_kill_between_two_files_is_resumed(fetch: Fetch, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record and the files get their final names one by one, the record first."""
    assert fetch("local/zip/de-en").status == 0
    content = {path: Path(path).read_bytes() for path in tree()}
    shutil.rmtree("data")

    def killed(*arguments: Any) -> None:
        write_origin(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(corpus_module, "write_origin", killed)
    assert fetch("local/zip/de-en").status == 130
    assert tree() == ["data/local/zip/de-en.fetched.json"]
    Path("data/local/zip/de-en.en.zst").write_bytes(content["data/local/zip/de-en.en.zst"])
    monkeypatch.setattr(corpus_module, "write_origin", write_origin)
    assert fetch("local/zip/de-en").status == 0
    assert {path: Path(path).read_bytes() for path in tree()} == content


def test_the_data_of_a_configuration_and_its_licences_in_the_store(
    fetch: Fetch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    Path("my.yaml").write_text(CONFIG)
    done = fetch("my.yaml")
    assert done.status == 0, done.err
    folder = "data/local-de-en"
    assert tree() == sorted(
        [f"{folder}/{one}.{code}" for one in ("dev", "held", "test") for code in ("de", "en")]
        + [f"{folder}/train.{code}.zst" for code in ("de", "en")]
        + [f"{folder}/{one}.fetched.json" for one in ("dev", "held", "test", "train")]
        + ["my.yaml"]
    )
    german = [pair[0] for pair in PAIRS]
    assert lines(f"{folder}/train.de.zst") == [german[0], german[2], german[1]]
    assert lines(f"{folder}/held.de") == [german[1], german[0], german[2]], "every second, counted over both corpora"
    assert lines(f"{folder}/test.en") == [pair[1] for pair in PAIRS]

    assert exit_status("prepare", "my.yaml") == 0
    assert "of local/zip/de-en: licence of zip" in capfd.readouterr().out
    entries = json.loads(Path("store/manifest.json").read_text())["corpora"]
    assert [part["licence"] for part in entries["train"][0]["origin"]] == ["licence of zip", "licence of tsv"]
    (dev,) = entries["dev"][0]["origin"]
    assert dev["files"][0]["url"].endswith("/f/s.tgz")
    assert len(dev["files"][0]["sha256"]) == 64

    Path(f"{folder}/dev.en").write_text("Other .\n" * 3)
    assert exit_status("prepare", "my.yaml", "--force") == 0
    assert "dev.en changed since they were fetched; licences still apply" in capfd.readouterr().out
    entries = json.loads(Path("store/manifest.json").read_text())["corpora"]
    assert [(part["licence"], part["changed"]) for part in entries["dev"][0]["origin"]] == [
        ("licence of sgm", ["dev.en"])
    ]
    assert all("changed" not in part for part in entries["train"][0]["origin"])
    Path(f"{folder}/dev.de").write_text("Anders .\n" * 3)  # neither is the fetched file any more
    assert exit_status("prepare", "my.yaml", "--force") == 0
    assert "origin" not in json.loads(Path("store/manifest.json").read_text())["corpora"]["dev"][0]
    registry = tmp_path / "registry.yaml"
    registry.write_text(registry.read_text().replace("[local/zip/de-en, local/tsv/de-en]", "[local/zip/de-en]"))
    done = fetch("my.yaml")
    assert done.status == 2
    assert "dev.en: changed since it was fetched" in done.err
    assert "train.fetched.json: was made from local/zip/de-en, local/tsv/de-en; `--force` writes it again" in done.err


@pytest.mark.slow
def test_a_store_records_an_origin_that_was_unknown(fetch: Fetch, capfd: pytest.CaptureFixture[str]) -> None:
    Path("my.yaml").write_text(CONFIG)
    assert fetch("my.yaml").status == 0
    record = Path("data/local-de-en/train.fetched.json")
    record.rename("aside")
    assert exit_status("prepare", "my.yaml") == 0
    known = json.loads(Path("store/manifest.json").read_text())
    assert "origin" not in known["corpora"]["train"][0]
    Path("aside").rename(record)
    assert exit_status("prepare", "my.yaml") == 0
    assert "already there" in capfd.readouterr().out
    learned = json.loads(Path("store/manifest.json").read_text())
    assert learned["corpora"]["train"][0]["origin"]
    assert learned["fingerprint"] == known["fingerprint"], "a licence changes nothing that training depends on"


def test_data_that_the_user_must_provide_is_reported(fetch: Fetch) -> None:
    bought = CONFIG.replace("local-de-en/train.de.zst", "local-de-en/bought.de").replace("train.en.zst", "bought.en")
    Path("my.yaml").write_text(bought)
    done = fetch("my.yaml")
    assert done.status == 2
    assert "data/local-de-en/bought.en and data/local-de-en/bought.de: sold by Someone" in done.err
    assert Path("data/local-de-en/dev.de").exists()
    for code in ("de", "en"):
        Path(f"data/local-de-en/bought.{code}").write_text("x\n")
    done = fetch("my.yaml")
    assert done.status == 0, done.err
    assert "local-de-en/bought: exists and was not fetched, so it is left alone" in done.err


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        (
            ("local-de-en/dev", "local-de-en/tuning"),
            "the registry has no set `tuning` of local-de-en; it has train, dev",
        ),
        (("local-de-en", "elsewhere"), "no registry says what the folder `elsewhere` holds"),
        (("dev.de", "dev.german"), "data.dev.0: only files of one side"),
    ],
)
def test_configurations_that_no_registry_knows(wanted: tuple[str, str], says: str, fetch: Fetch) -> None:
    Path("my.yaml").write_text(CONFIG.replace(*wanted))
    done = fetch("my.yaml")
    assert done.status == 2
    assert says in done.err
    assert tree() == ["my.yaml"]


@pytest.mark.slow
def test_a_truncated_download_is_removed_and_fetched_again(fetch: Fetch, server: Server) -> None:
    """If a server lies about the length, only the file's own checksum shows that it is cut."""
    content = server.files["f/t.tmx.gz"].content
    server.next["f/t.tmx.gz"] = [behaving.claiming(len(content) - 20)]
    done = fetch("local/tmx/de-en")
    assert done.status == 2
    assert "ends early" in done.err
    assert "it was removed: run this again to fetch it again" in done.err
    assert not tree()
    assert fetch("local/tmx/de-en").status == 0
    server.next["f/m.zip"] = [behaving.claiming(len(server.files["f/m.zip"].content) - 30)]
    assert "m.zip: damaged" in fetch("local/zip/de-en").err
    assert fetch("local/zip/de-en").status == 0


def test_truncated_plain_text(fetch: Fetch, server: Server, tmp_path: Path) -> None:
    """Only a length or checksum in the registry shows that it was; without either, the message names the way out."""
    plain = tmp_path / "plain.yaml"
    files: list[dict[str, Any]] = [{"url": server.add(f"f/p.{code}", b"text\n" * 40)} for code in ("de", "en")]
    entry = {"title": "t", "licence": "none", "known_from": "this test", "files": files}
    server.next["f/p.en"] = [behaving.claiming(100)]
    plain.write_text(json.dumps({"corpora": {"plain/{a}-{b}": entry}}))
    done = fetch("plain/de-en", "--registry", str(plain))
    assert done.status == 2
    assert "p.en has 20" in done.err
    downloads = tmp_path / "downloads" / f"127.0.0.1_{server.port}" / "f"
    assert f"if it was cut, remove {downloads / 'p.de'} or {downloads / 'p.en'} and run this again" in done.err
    files[1]["bytes"] = 200
    plain.write_text(json.dumps({"corpora": {"plain/{a}-{b}": entry}}))
    done = fetch("plain/de-en", "--registry", str(plain))
    assert "the download has the length 100 bytes, but the registry says 200 bytes" in done.err
    assert fetch("plain/de-en", "--registry", str(plain)).status == 0


@pytest.mark.parametrize(
    ("members", "says"),
    [
        ({"dev/s-deen-src.de.sgm": b'<seg id="1">x</seg>'}, "found dev/s-deen-src.de.sgm: 1, dev/s-deen-ref.en.sgm: 0"),
        (
            {"dev/s-deen-src.de.sgm": b'<seg id="1">x</seg>', "dev/s-deen-ref.en.sgm": b"\xff"},
            "s.tgz, member dev/s-deen-ref.en.sgm, line 1: not valid UTF-8",
        ),
        (
            {"dev/s-deen-src.de.sgm": b'<seg id="1">x</seg>', "dev/s-deen-ref.en.sgm": b""},
            "member dev/s-deen-ref.en.sgm: ends after 0 segments",
        ),
    ],
)
def test_faults_are_reported_by_archive_and_member(
    members: dict[str, bytes], says: str, fetch: Fetch, server: Server, tmp_path: Path
) -> None:
    server.add("f/s.tgz", packed_tar(members))
    done = fetch("local/sgm/de-en", "--cache", str(tmp_path / "damaged"))
    assert done.status == 2
    assert says in done.err
    assert "Traceback" not in done.err
    assert not tree()
    assert list((tmp_path / "damaged").rglob("s.tgz")), "what came whole stays, whatever words a message has"


def test_one_failing_corpus_does_not_stop_the_others(fetch: Fetch, server: Server) -> None:
    del server.files["f/m.zip"]
    done = fetch("local/zip/de-en", "local/tsv/de-en")
    assert done.status == 2
    assert "there is no such file" in done.err
    assert Path("data/local/tsv/de-en.fetched.json").exists()


@pytest.mark.slow
def test_without_a_network(fetch: Fetch, tmp_path: Path, server: Server) -> None:
    assert "`--offline` forbids the network" in fetch("local/zip/de-en", "--offline").err
    assert fetch("local/zip/de-en").status == 0
    shutil.rmtree("data")
    requests = len(server.requests)
    assert fetch("local/zip/de-en", "--offline", "--cache", "none", "--mirror", str(tmp_path / "downloads")).status == 0
    assert len(server.requests) == requests
    assert lines("data/local/zip/de-en.de.zst") == [pair[0] for pair in PAIRS]


def test_lists(fetch: Fetch) -> None:
    every = fetch("--list")
    assert every.status == 0
    assert "europarl/v7/{a}-{b}" in every.out
    assert "657.6 MB" in every.out
    of_pair = fetch("--list", "en-de", "newstest")
    assert "newstest/2013/en-de" in of_pair.out
    assert "Any pair" not in of_pair.out
    unknown = fetch("--list", "xx-yy").out.splitlines()
    assert unknown[0] == "Any pair that the source offers; whether it has these languages is not known here:"
    assert all("{a}-{b}" in line for line in unknown[1:])
    assert all(one["any_pair"] for one in json.loads(fetch("--list", "xx-yy", "--json").out))
    assert "multi30k/{set}/{a}-{b}" in every.out
    assert "(any pair that its origin has)" in every.out
    assert "europarl" not in of_pair.out
    one = json.loads(fetch("--list", "local/zip/de-en", "--json").out)
    assert [entry["name"] for entry in one] == ["local/zip/de-en"]
    assert one[0]["bytes"] > 100
    assert "no corpus, recipe or file `nothing/x`" in fetch("--list", "nothing/x").err
    for words in (["babel"], ["demo"], ["qlo-qhi"], ["synthetic", "Babel"]):
        listed = json.loads(fetch("--list", *words, "--json").out)
        assert "babel" in [entry["name"] for entry in listed]
    assert "babel" in every.out
    assert "babel" not in of_pair.out
    assert "generated, not downloaded" in fetch("--list", "babel").out
    assert not tree()


OPUS = {
    "corpora": [
        {"corpus": "X", "version": "v2", "source": "de", "target": "en", "url": "u", "size": 5, "alignment_pairs": 7},
        {"corpus": "Y", "version": "v1", "source": "de", "target": "en", "url": "u", "size": 9, "alignment_pairs": 99},
    ]
}


def test_opus_names_its_newest_version(fetch: Fetch, server: Server, tmp_path: Path) -> None:
    """The mirror is a folder, in which the API's answers are stored under their addresses, like all files."""
    api = tmp_path / "mirror" / "opus.nlpl.eu"
    api.mkdir(parents=True)
    query = "source=de&target=en&preprocessing=moses&version=latest"
    (api / f"opusapi?corpus=X&{query}").write_text(json.dumps({"corpora": OPUS["corpora"][:1]}))
    (api / f"opusapi?{query}").write_text(json.dumps(OPUS))
    moses = tmp_path / "mirror" / "object.pouta.csc.fi" / "OPUS-X" / "v2" / "moses"
    moses.mkdir(parents=True)
    (moses / "de-en.txt.zip").write_bytes(server.files["f/m.zip"].content)
    mirror = ("--offline", "--mirror", str(tmp_path / "mirror"))
    done = fetch("opus/X/latest/en-de", *mirror)
    assert done.status == 0, done.err
    assert lines("data/opus/X/v2/de-en.en.zst") == [pair[1] for pair in PAIRS]
    listed = fetch("--list", "opus", "en-de", *mirror).out.splitlines()
    assert [line.split()[0] for line in listed] == ["opus/Y/v1/de-en", "opus/X/v2/de-en"]
    assert "99 pairs" in listed[0]
    (api / f"opusapi?corpus=X&{query}").write_text('{"corpora": [{"corpus": "X"}]}')
    assert "the OPUS API may have changed" in fetch("opus/X/latest/en-de", *mirror).err


def test_a_test_set_of_sacrebleu(fetch: Fetch, tmp_path: Path, server: Server) -> None:
    """Its checksum is that of the real file, which is not here, so another file is refused."""
    place = tmp_path / "mirror" / "statmt.org" / "wmt14"
    place.mkdir(parents=True)
    (place / "test-full.tgz").write_bytes(server.files["f/s.tgz"].content)
    done = fetch("sacrebleu/wmt14/full/de-en", "--offline", "--mirror", str(tmp_path / "mirror"))
    assert done.status == 2
    assert "but the registry says a8cd784e006feb32ac6f3d9ec7eb389a" in done.err
    assert "has no xx-en; it has cs-en" in fetch("sacrebleu/wmt14/full/xx-en").err
    assert "sets are wmt14, wmt14/full" in fetch("sacrebleu/wmt14/de-en/x").err


def test_without_a_name_nothing_is_done(fetch: Fetch) -> None:
    done = fetch()
    assert done.status == 2
    assert "nothing to fetch" in done.err
    assert "expected an address such as http://host:3128" in fetch("local/zip/de-en", "--proxy", "socks5://x").err
