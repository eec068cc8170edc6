"""The pipeline engine, with steps that only hash what they read."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.corpora.pipeline.conftest import changed, small_step
from tests.killing import run_and_kill, tree
from ziggurat.config.section import Section
from ziggurat.corpora.pipeline.engine import TIMES, Pipeline, PipelineEnd, Selection
from ziggurat.corpora.pipeline.step import (
    BEGUN,
    MANIFEST,
    Fingerprints,
    Step,
    read_manifest,
    settings_changed,
    settings_of,
)
from ziggurat.system.errors import ConfigError, DataError
from ziggurat.system.files import write_atomically


@dataclass
class Fake:
    """A step that writes its dependencies into two files; a `coarse` one outputs a single bit of them."""

    name: str
    after: tuple[str, ...] = ()
    files: tuple[Path, ...] = ()
    setting: int = 0
    coarse: bool = False
    ran: list[str] = field(default_factory=list)

    def value(self, inputs: Sequence[bytes]) -> bytes:
        whole = xxhash.xxh3_128_hexdigest(b"\0".join([str(self.setting).encode(), *inputs]))
        return (str(int(whole, 16) % 2) if self.coarse else whole).encode()

    def work(self, folder: Path) -> None:
        self.ran.append(self.name)
        inputs = [path.read_bytes() for path in self.files]
        inputs += [(folder.parent / name / "out" / "b").read_bytes() for name in self.after]
        (folder / "out").mkdir(exist_ok=True)
        for part in ("a", "b"):  # resumes after the interruption
            if not (folder / "out" / part).exists():
                write_atomically(folder / "out" / part, self.value(inputs))
        (folder / "log").write_text(f"{time.time_ns()}")  # differs every time, but is not an output

    def step(self) -> Step:
        return small_step(
            self.name,
            self.work,
            title=f"does {self.name}",
            settings={"setting": self.setting},
            after={name: ["out/b"] for name in self.after},
            inputs=lambda: {str(number): [path] for number, path in enumerate(self.files)},
            outputs=("out/*",),
        )


def pipeline(folder: Path, fakes: Sequence[Fake]) -> Pipeline:
    return Pipeline(folder, [fake.step() for fake in fakes])


def diamond(folder: Path, ran: list[str] | None = None) -> list[Fake]:
    ran = [] if ran is None else ran
    paths = [folder / "x", folder / "y"]
    for path in paths:
        if not path.exists():
            path.write_bytes(path.name.encode())
    return [
        Fake("fetch", files=(paths[0],), ran=ran),
        Fake("left", after=("fetch",), ran=ran),
        Fake("right", after=("fetch",), files=(paths[1],), ran=ran),
        Fake("last", after=("left", "right"), ran=ran),
    ]


@pytest.fixture(autouse=True, scope="module")
def _no_waiting_for_disks() -> Iterator[None]:
    """Only a power cut loses data that was already written; a kill does not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture
def ran() -> list[str]:
    return []


def test_all_steps_run_once_in_order(tmp_path: Path, ran: list[str]) -> None:
    fakes = diamond(tmp_path, ran)
    assert pipeline(tmp_path / "w", fakes).run().done == ("fetch", "left", "right", "last")
    assert pipeline(tmp_path / "w", fakes).run().done == ()
    assert ran == ["fetch", "left", "right", "last"]
    assert [found.state for found in pipeline(tmp_path / "w", fakes).statuses()] == ["done"] * 4


def test_impossible_steps_are_refused_before_anything_is_done(tmp_path: Path, ran: list[str]) -> None:
    """This also holds for a step that was done earlier with other settings, but not for one whose result stays."""
    fakes = diamond(tmp_path, ran)

    def checked(selection: Selection | None = None) -> PipelineEnd:
        def refuse() -> None:
            raise ConfigError("no such metric")

        steps = [fake.step() for fake in fakes]
        return Pipeline(tmp_path / "w", [*steps[:-1], changed(steps[-1], check=refuse)]).run(selection)

    with pytest.raises(ConfigError, match="no such metric"):
        checked()
    assert ran == []
    pipeline(tmp_path / "w", fakes).run()
    assert checked().done == ()
    with pytest.raises(ConfigError, match="no such metric"):
        checked(Selection(forced=frozenset(["last"])))
    ran.clear()
    (tmp_path / "x").write_bytes(b"other")
    fakes[-1].setting = 1
    with pytest.raises(ConfigError, match="no such metric"):
        checked()
    assert ran == []


CHANGES: Mapping[str, Callable[[Path, list[Fake]], object]] = {
    "an input of one": lambda folder, fakes: (folder / "y").write_bytes(b"other"),
    "an input of the first": lambda folder, fakes: (folder / "x").write_bytes(b"other"),
    "a setting": lambda folder, fakes: setattr(fakes[1], "setting", 1),
    "an output edited": lambda folder, fakes: (folder / "w/left/out/b").write_bytes(b"other"),
    "an output of the same size": lambda folder, fakes: (folder / "w/left/out/b").write_bytes(b"0" * 32),
    "an output gone": lambda folder, fakes: (folder / "w/left/out/a").unlink(),
    "a manifest gone": lambda folder, fakes: (folder / "w/right" / MANIFEST).unlink(),
    "a manifest cut": lambda folder, fakes: (folder / "w/right" / MANIFEST).write_bytes(b"{"),
    "an input touched": lambda folder, fakes: os.utime(folder / "x"),
    "a log": lambda folder, fakes: (folder / "w/left/log").write_text("other"),
}
REDONE = {
    "an input of one": ["right", "last"],
    "an input of the first": ["fetch", "left", "right", "last"],
    "a setting": ["left", "last"],
    # Steps that depend on it find their inputs unchanged.
    "an output edited": ["left"],
    "an output of the same size": ["left"],
    "an output gone": ["left"],
    "a manifest gone": ["right"],
    "a manifest cut": ["right"],
    "an input touched": [],
    "a log": [],
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_redoes_what_depends_on_it(change: str, tmp_path: Path, ran: list[str]) -> None:
    fakes = diamond(tmp_path, ran)
    pipeline(tmp_path / "w", fakes).run()
    CHANGES[change](tmp_path, fakes)
    ran.clear()
    unsettled = [found for found in pipeline(tmp_path / "w", fakes).statuses() if not found.settled]
    pipeline(tmp_path / "w", fakes).run()
    assert ran == REDONE[change]
    # The plan may name more steps, because it cannot know the results.
    assert set(ran) <= {found.step.name for found in unsettled}
    assert pipeline(tmp_path / "w", fakes).run().done == ()


def test_a_missing_page_is_rebuilt_from_existing_results(tmp_path: Path, ran: list[str]) -> None:
    fakes = diamond(tmp_path, ran)

    def steps() -> list[Step]:
        return [changed(fake.step(), pages=("log",) if fake.name == "left" else ()) for fake in fakes]

    Pipeline(tmp_path / "w", steps()).run()
    handed_on = (tmp_path / "w/left/out/a").stat().st_ino
    for name in ("left", "right"):
        (tmp_path / "w" / name / "log").unlink()
    (found,) = (status for status in Pipeline(tmp_path / "w", steps()).statuses() if status.step.name == "left")
    assert (found.state, found.why) == ("page", f"{tmp_path / 'w/left/log'} is gone: it is made again")
    assert Pipeline(tmp_path / "w", steps()).run().done == ("left",)
    assert (tmp_path / "w/left/log").is_file()
    assert (tmp_path / "w/left/out/a").stat().st_ino == handed_on
    assert Pipeline(tmp_path / "w", steps()).run().done == ()


@st.composite
def graphs(draw: st.DrawFn) -> list[dict[str, object]]:
    """Steps as keywords for `Fake`; `files` are numbers."""
    count = draw(st.integers(1, 6))
    return [
        {
            "name": f"s{n}",
            "after": tuple(f"s{m}" for m in range(n) if draw(st.booleans())),
            "files": tuple(sorted(draw(st.sets(st.integers(0, 3), max_size=2)))),
            "coarse": draw(st.booleans()),
        }
        for n in range(count)
    ]


CHANGE = st.tuples(
    st.sampled_from(["file", "setting", "damage", "lose", "force"]), st.integers(0, 5), st.integers(0, 3)
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(graph=graphs(), changes=st.lists(st.lists(CHANGE, max_size=3), min_size=1, max_size=4))
def test_any_changes_redo_exactly_the_dependants(
    graph: list[dict[str, object]], changes: list[list[tuple[str, int, int]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The expected rule: a step is redone if its inputs differ from the last time, or its own result was lost."""
    folder = tmp_path_factory.mktemp("graph")
    paths = [folder / f"f{n}" for n in range(4)]
    for path in paths:
        path.write_bytes(b"0")
    ran: list[str] = []
    fakes = [Fake(**{**keywords, "files": tuple(paths[n] for n in keywords["files"])}, ran=ran) for keywords in graph]  # type: ignore[arg-type, attr-defined]
    known: dict[str, tuple[object, ...]] = {}
    for round_of in [[], *changes]:
        lost: set[str] = set()
        forced: set[str] = set()
        for kind, number, value in round_of:
            fake = fakes[number % len(fakes)]
            if kind == "file":
                paths[number % 4].write_bytes(str(value).encode())
            elif kind == "setting":
                fake.setting = value
            elif kind == "force":
                forced.add(fake.name)
            else:
                out = folder / "w" / fake.name / "out" / "b"
                out.write_bytes(b"damage") if kind == "damage" else out.unlink(missing_ok=True)
                lost.add(fake.name)
        values: dict[str, bytes] = {}
        expected = []
        for fake in fakes:
            inputs = [path.read_bytes() for path in fake.files] + [values[name] for name in fake.after]
            values[fake.name] = fake.value(inputs)
            now = (fake.setting, *inputs)
            if known.get(fake.name) != now or fake.name in lost | forced:
                expected.append(fake.name)
            known[fake.name] = now
        ran.clear()
        assert list(pipeline(folder / "w", fakes).run(Selection(forced=frozenset(forced))).done) == expected == ran
        for fake in fakes:
            assert (folder / "w" / fake.name / "out" / "b").read_bytes() == values[fake.name]


def results(folder: Path) -> dict[str, object]:
    """Everything that steps leave behind, except logs with times."""
    return {
        name: content
        for name, content in tree(folder).items()
        if not name.endswith("log") and name not in ("hashes.json", "times.json", ".lock")
    }


def _go(folder: Path, fakes: Sequence[Fake]) -> object:
    return pipeline(folder / "w", fakes).run()


@pytest.mark.slow
def test_a_kill_at_any_file_operation_gives_the_same_bytes(tmp_path: Path) -> None:
    """A first run, and a second one after changes that redo three of four steps."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for folder in (whole, cut):
        folder.mkdir()
    for other in (False, True):
        fakes = {folder: diamond(folder) for folder in (whole, cut)}
        for folder in (whole, cut) if other else ():
            (folder / "y").write_bytes(b"other")
            fakes[folder][1].setting = 1
        _go(whole, fakes[whole])
        operation = 1
        while run_and_kill(partial(_go, cut, fakes[cut]), str(cut), operation):
            operation += 1
        _go(cut, fakes[cut])
        assert operation > 20
        assert results(cut / "w") == results(whole / "w")


def test_a_step_killed_in_the_middle_resumes(tmp_path: Path, ran: list[str]) -> None:
    fakes = diamond(tmp_path, ran)

    def stopped(folder: Path) -> None:
        fakes[1].work(folder)
        raise KeyboardInterrupt

    steps = [fake.step() for fake in fakes]
    steps[1] = changed(steps[1], work=stopped)
    with pytest.raises(KeyboardInterrupt):
        Pipeline(tmp_path / "w", steps).run()
    before = (tmp_path / "w/left/out/a").stat().st_ino
    again = pipeline(tmp_path / "w", fakes)
    assert [found.state for found in again.statuses()] == ["done", "begun", "new", "new"]
    assert again.run().done == ("left", "right", "last")
    assert (tmp_path / "w/left/out/a").stat().st_ino == before
    assert pipeline(tmp_path / "w", fakes).statuses()[1].spent.calls == 2


def test_a_step_started_with_other_settings_restarts(tmp_path: Path, ran: list[str]) -> None:
    fakes = diamond(tmp_path, ran)
    Pipeline(tmp_path / "w", [fake.step() for fake in fakes[:1]]).run()
    step = fakes[1].step()
    assert Pipeline(tmp_path / "w", [fakes[0].step(), changed(step, work=lambda folder: 15)]).run().signal == 15
    (tmp_path / "w/left/half").write_text("of the first settings")
    fakes[1].setting = 2
    (found,) = (f for f in pipeline(tmp_path / "w", fakes).statuses() if f.step.name == "left")
    assert found.state == "changed"
    assert "setting: 0 -> 2" in found.why
    pipeline(tmp_path / "w", fakes).run()
    assert not (tmp_path / "w/left/half").exists()


@pytest.mark.parametrize("killed", [False, True])
def test_results_that_took_long_are_set_aside(killed: bool, tmp_path: Path, ran: list[str]) -> None:
    times = tmp_path / "p" / TIMES
    log = tmp_path / "p" / "fetch" / "log"
    fakes = diamond(tmp_path, ran)[:2]
    pipeline(tmp_path / "p", fakes).run()
    for number in (1, 2):
        spent = json.loads(times.read_text())
        spent["fetch"] |= {"running": log.stat().st_mtime - 601} if killed else {"seconds": 601}
        times.write_text(json.dumps(spent))
        was, said = log.read_bytes(), list[str]()
        fakes[0].setting = fakes[1].setting = number
        pipeline(tmp_path / "p", fakes).run(say=said.append)
        kept = tmp_path / "p" / "earlier" / f"fetch-{number}"
        assert (kept / "log").read_bytes() == was
        assert read_manifest(kept) is not None
        assert any(str(kept) in line and "took 10:01" in line for line in said)
        assert log.read_bytes() != was
    assert [path.name for path in sorted((tmp_path / "p" / "earlier").iterdir())] == ["fetch-1", "fetch-2"]
    assert pipeline(tmp_path / "p", fakes).left_over() == []


def test_work_lost_by_a_change_is_reported(tmp_path: Path, ran: list[str]) -> None:
    fakes = diamond(tmp_path, ran)[:2]
    pipeline(tmp_path / "p", fakes).run()
    times = tmp_path / "p" / TIMES
    spent = json.loads(times.read_text())

    def explanations(seconds: float) -> list[str]:
        spent["fetch"]["seconds"] = seconds
        times.write_text(json.dumps(spent))
        return [state.explanation for state in pipeline(tmp_path / "p", fakes).statuses()]

    assert explanations(90.0) == ["up to date"] * 2
    fakes[0].setting = 1
    why = "settings changed (there -> now): setting: 0 -> 1"
    assert explanations(0.2)[0] == why
    assert explanations(90.0)[0] == f"{why}; it starts over, and work that took 1:30 is discarded"
    assert explanations(3600.0)[0] == f"{why}; it starts over, and work that took 1:00:00 moves to `earlier`"
    selection = Selection(forced=frozenset(["fetch"]))
    found = pipeline(tmp_path / "p", fakes).statuses(selection)[0].explanation
    assert found == "to be done again; it starts over, and work that took 1:00:00 moves to `earlier`"


def test_a_signal_in_a_step_ends_the_call(tmp_path: Path, ran: list[str]) -> None:
    fakes = diamond(tmp_path, ran)
    steps = [fakes[0].step(), changed(fakes[1].step(), work=lambda folder: 2), fakes[2].step()]
    end = Pipeline(tmp_path / "w", steps).run()
    assert (end.done, end.stopped, end.signal) == (("fetch",), "left", 2)


def test_selections(tmp_path: Path, ran: list[str]) -> None:
    fakes = diamond(tmp_path, ran)
    with pytest.raises(DataError, match=r"fetch: not done yet; leave out `--from`"):
        pipeline(tmp_path / "w", fakes).run(Selection(first="left"))
    assert pipeline(tmp_path / "w", fakes).run(Selection(last="right")).done == ("fetch", "left", "right")
    (tmp_path / "x").write_bytes(b"other")  # a file of a step that is reused unchanged
    assert pipeline(tmp_path / "w", fakes).run(Selection(first="right")).done == ("last",)
    assert pipeline(tmp_path / "w", fakes).run(Selection("left", "left", frozenset({"left"}))).done == ("left",)
    (tmp_path / "w/fetch/out/b").write_bytes(b"other")
    with pytest.raises(DataError, match=r"fetch/out/b changed since it was made; leave out"):
        pipeline(tmp_path / "w", fakes).run(Selection(first="right"))
    with pytest.raises(
        ConfigError, match=r"no step `lats` in this pipeline; did you mean `last`\? It has fetch, left, right, last"
    ):
        pipeline(tmp_path / "w", fakes).run(Selection(last="lats"))
    with pytest.raises(ConfigError, match="`left` comes before `right`"):
        pipeline(tmp_path / "w", fakes).run(Selection("right", "left"))
    with pytest.raises(ConfigError, match="`--force last`: this step is not among those chosen"):
        pipeline(tmp_path / "w", fakes).run(Selection(last="left", forced=frozenset({"last"})))


def test_missing_inputs_of_any_step_are_reported_before_the_first_step(tmp_path: Path, ran: list[str]) -> None:
    def missing() -> dict[str, list[Path]]:
        raise DataError("no such file: z")

    steps = [fake.step() for fake in diamond(tmp_path, ran)]
    with pytest.raises(DataError, match="no such file: z"):
        Pipeline(tmp_path / "w", [*steps[:3], changed(steps[3], inputs=missing)]).run()
    assert ran == []


def test_files_of_others_are_not_removed(tmp_path: Path, ran: list[str]) -> None:
    (tmp_path / "w/left").mkdir(parents=True)
    (tmp_path / "w/left/thesis.txt").write_text("years of work")
    with pytest.raises(DataError, match="left: is in the way, and no pipeline made it"):
        pipeline(tmp_path / "w", diamond(tmp_path, ran)).run()
    assert (tmp_path / "w/left/thesis.txt").exists()


def test_two_at_once_are_refused(tmp_path: Path, ran: list[str]) -> None:
    fakes = diamond(tmp_path, ran)

    def second(folder: Path) -> None:
        with pytest.raises(DataError, match="another pipeline, or a part of a step, is at work here"):
            pipeline(tmp_path / "w", fakes).run()
        ran.append("refused")

    Pipeline(tmp_path / "w", [changed(fakes[0].step(), work=second, outputs=())]).run()
    assert ran == ["refused"]


def test_steps_that_the_pipeline_no_longer_has_are_named(tmp_path: Path, ran: list[str]) -> None:
    fakes = diamond(tmp_path, ran)
    pipeline(tmp_path / "w", fakes).run()
    assert pipeline(tmp_path / "w", fakes[:2]).left_over() == ["last", "right"]


def test_manifests_hold_dependencies_and_outputs(tmp_path: Path, ran: list[str]) -> None:
    fakes = diamond(tmp_path, ran)
    pipeline(tmp_path / "w", fakes).run()
    found = json.loads((tmp_path / "w/right" / MANIFEST).read_bytes())
    fetched = read_manifest(tmp_path / "w/fetch")
    assert fetched is not None
    assert found["settings"] == {"setting": 0}
    assert found["files"] == {"0": [xxhash.xxh3_128_hexdigest(b"y")]}
    assert found["after"] == {"fetch": fetched.fingerprint(["out/b"])}
    content = (tmp_path / "w/right/out/b").read_bytes()
    assert found["outputs"]["out/b"] == {"bytes": 32, "xxh3_128": xxhash.xxh3_128_hexdigest(content)}
    assert set(found["outputs"]) == {"out/a", "out/b"}
    assert {key: found[key] for key in found if key != "outputs"} == json.loads(
        (tmp_path / "w/right" / BEGUN).read_bytes()
    )


def test_a_step_depends_only_on_the_parts_it_reads(tmp_path: Path, ran: list[str]) -> None:
    def two(folder: Path) -> None:
        for name in ("train/a", "test/a"):
            (folder / name).parent.mkdir()
            (folder / name).write_bytes((tmp_path / name.partition("/")[0]).read_bytes())

    def steps() -> list[Step]:
        files = {"all": [tmp_path / "train", tmp_path / "test"]}
        readers = [
            small_step(f"of-{part}", lambda folder, part=part: ran.append(part), after={"two": [f"{part}/*"]})  # type: ignore[misc]
            for part in ("train", "test")
        ]
        return [small_step("two", two, inputs=lambda: files), *readers]

    for part in ("train", "test"):
        (tmp_path / part).write_bytes(b"")
    Pipeline(tmp_path / "w", steps()).run()
    (tmp_path / "test").write_bytes(b"other")
    assert Pipeline(tmp_path / "w", steps()).run().done == ("two", "of-test")
    assert ran == ["train", "test", "test"]


def test_later_steps_depend_only_on_what_they_read_of_a_file(tmp_path: Path, ran: list[str]) -> None:
    source, content_of = tmp_path / "source", tmp_path / "w/first/made"

    def steps() -> list[Step]:
        def work(folder: Path) -> None:
            (folder / "made").write_bytes(source.read_bytes())

        def read_hash(name: str, path: Path) -> str:
            return path.read_text().partition(" ")[0]

        later = small_step("later", lambda folder: ran.append("later"), after={"first": ["*"]})
        return [small_step("first", work, inputs=lambda: {"source": [source]}, read_hash=read_hash), later]

    for content, done in [("a 1", ("first", "later")), ("a 2", ("first",)), ("b 2", ("first", "later"))]:
        source.write_text(content)
        assert Pipeline(tmp_path / "w", steps()).run().done == done
    content_of.write_text("b 3")  # damage counts wherever it is
    assert Pipeline(tmp_path / "w", steps()).run().done == ("first",)
    assert content_of.read_text() == "b 2"


def test_fingerprints_are_remembered_until_a_file_is_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, memory = tmp_path / "a", tmp_path / "memory.json"
    file.write_bytes(b"one")
    read: list[Path] = []

    def counting(path: Path) -> str:
        read.append(path)
        return xxhash.xxh3_128_hexdigest(path.read_bytes())

    monkeypatch.setattr("ziggurat.corpora.pipeline.step.fingerprint", counting)
    first = Fingerprints(memory)
    assert [first.of(file), first.of(file)] == [xxhash.xxh3_128_hexdigest(b"one")] * 2
    assert len(read) == 2  # too fresh to be trusted
    monkeypatch.setattr("ziggurat.corpora.pipeline.step._SETTLED_NS", -(10**12))
    first.of(file)
    first.keep()
    again = Fingerprints(memory)
    assert again.of(file) == xxhash.xxh3_128_hexdigest(b"one")
    assert len(read) == 3
    stamp = file.stat()
    file.write_bytes(b"two")
    os.utime(file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # same size, same modification time
    assert again.of(file) == xxhash.xxh3_128_hexdigest(b"two")
    memory.write_bytes(b"[1")
    assert Fingerprints(memory).of(file) == xxhash.xxh3_128_hexdigest(b"two")


@pytest.mark.parametrize("taken_back", [False, True])
def test_a_file_that_changes_while_it_is_read_is_read_again(taken_back: bool, tmp_path: Path, ran: list[str]) -> None:
    fakes = diamond(tmp_path, ran)[:1]
    os.utime(tmp_path / "x", (0, 0))  # long ago, beyond the clock's resolution

    def edited(folder: Path) -> None:
        (tmp_path / "x").write_bytes(b"y")
        fakes[0].work(folder)
        if taken_back:
            (tmp_path / "x").write_bytes(b"x")

    with pytest.raises(DataError, match="x: changed while being read; the same command does the step again"):
        Pipeline(tmp_path / "w", [changed(fakes[0].step(), work=edited)]).run()
    assert [found.state for found in pipeline(tmp_path / "w", fakes).statuses()] == ["new"]
    assert pipeline(tmp_path / "w", fakes).run().done == ("fetch",)
    assert (tmp_path / "w/fetch/out/b").read_bytes() == fakes[0].value([b"x" if taken_back else b"y"])


def test_permissions_may_change_while_it_is_read(tmp_path: Path, ran: list[str]) -> None:
    (fake, *_) = diamond(tmp_path, ran)

    def opened(folder: Path) -> None:
        (tmp_path / "x").chmod(0o600)
        fake.work(folder)

    assert Pipeline(tmp_path / "w", [changed(fake.step(), work=opened)]).run().done == ("fetch",)


class Earlier(Section):
    """A section of an earlier version."""

    ratio: float = 1.5
    gone: int = 0


class Later(Section):
    """The same section with another default, a new key, and without one of the keys."""

    ratio: float = 2.0
    added: int = 3


def test_a_changed_default_is_a_change_and_a_new_key_at_its_default_is_not() -> None:
    def changes(before: Section, now: Section) -> list[str]:
        return settings_changed(json.loads(json.dumps({"of": [settings_of(before)]})), {"of": [settings_of(now)]})

    assert changes(Later(), Later()) == []
    assert changes(Earlier(), Later()) == ["of.0.ratio: 1.5 -> 2.0", "of.0.gone: 0 -> (not given)"]
    kept = json.loads(json.dumps(settings_of(Earlier(ratio=2.0), exclude={"gone"})))
    assert settings_changed(kept, settings_of(Later())) == []
    assert settings_changed(kept, settings_of(Later(added=4))) == ["added: (not given) -> 4"]


def reasons_to_run(folder: Path, steps: Sequence[Step]) -> dict[str, str]:
    return {found.step.name: found.why for found in Pipeline(folder / "w", steps).statuses() if not found.settled}


def test_results_of_another_version_are_redone_with_a_message(tmp_path: Path, ran: list[str]) -> None:
    fakes = diamond(tmp_path, ran)
    steps = [fake.step() for fake in fakes]
    Pipeline(tmp_path / "w", steps).run()
    newer = [changed(step, version=2) if step.name == "left" else step for step in steps]
    assert reasons_to_run(tmp_path, newer)["left"].startswith(
        "done by an earlier version of ziggurat, which gives another result"
    )
    assert Pipeline(tmp_path / "w", newer).run().done == ("left",)
    assert reasons_to_run(tmp_path, steps)["left"].startswith("done by a later version of ziggurat")
    manifest = tmp_path / "w/left" / MANIFEST
    manifest.write_text(json.dumps(json.loads(manifest.read_bytes()) | {"format": 2}))
    assert reasons_to_run(tmp_path, newer)["left"].startswith("done by another version of ziggurat")


def test_reported_reasons_are_the_true_ones(tmp_path: Path, ran: list[str]) -> None:
    fakes = diamond(tmp_path, ran)
    pipeline(tmp_path / "w", fakes).run()

    def why(**changes: object) -> str:
        return reasons_to_run(tmp_path, [*(fake.step() for fake in fakes[:-1]), changed(fakes[-1].step(), **changes)])[
            "last"
        ]  # type: ignore[arg-type]

    assert why(after={"fetch": ["out/b"], "right": ["out/b"]}) == "now reads fetch instead of left"
    assert why(after={"left": ["out/b"]}) == "no longer reads right"
    both = {"left": ["out/b"], "right": ["out/b"]}
    assert why(after={**both, "fetch": ["*"]}) == "now reads fetch"
    assert why(after={**both, "left": ["*"]}) == "reads other files of left"
    gone = why(after={"left": ["out/b"]}, inputs=lambda: {"key": [tmp_path / "x"]})
    assert gone == "no longer reads right; key: 0 input files before, 1 now"
    (tmp_path / "y").write_bytes(b"other")
    pipeline(tmp_path / "w", fakes[:3]).run()
    assert why() == "right gave another result"


def test_a_file_that_goes_from_one_key_to_the_next_is_a_change(tmp_path: Path, ran: list[str]) -> None:
    one, two, three = (tmp_path / name for name in ("one", "two", "three"))
    for path in (one, two, three):
        path.write_text(path.name)

    def why(**files: list[Path]) -> str | None:
        return reasons_to_run(tmp_path, [changed(Fake("of", ran=ran).step(), inputs=lambda: files)]).get("of")

    Pipeline(
        tmp_path / "w", [changed(Fake("of", ran=ran).step(), inputs=lambda: {"a": [one, two], "b": [three]})]
    ).run()
    assert why(a=[one, two], b=[three]) is None
    assert why(a=[one], b=[two, three]) == "a: 2 input files before, 1 now"
    assert why(a=[one, two], b=[two]) == f"{two} changed"
    assert why(a=[one, two]) == "b: 1 input files before, 0 now"


def test_on_another_machine_results_stay_and_unfinished_steps_restart(tmp_path: Path, ran: list[str]) -> None:
    step = Fake("one", ran=ran).step()
    on_one, on_two = (changed(step, machine=lambda n=n: {"threads": n}) for n in (1, 2))
    Pipeline(tmp_path / "w", [changed(on_one, work=lambda folder: 15)]).run()
    assert reasons_to_run(tmp_path, [on_one]) == {"one": "resumes where it was interrupted"}
    (tmp_path / "w/one/half").write_text("by one thread")
    said = "settings changed (there -> now), and it was not finished: threads: 1 -> 2"
    assert reasons_to_run(tmp_path, [on_two]) == {"one": said}
    assert Pipeline(tmp_path / "w", [on_two]).run().done == ("one",)
    assert not (tmp_path / "w/one/half").exists()
    assert reasons_to_run(tmp_path, [on_one]) == {}


def test_a_step_that_another_call_works_on_is_running(tmp_path: Path, ran: list[str]) -> None:
    fakes = diamond(tmp_path, ran)

    def look(folder: Path) -> None:
        found = pipeline(tmp_path / "w", fakes).statuses()
        assert [(state.state, state.why) for state in found[:2]] == [("running", "is running"), ("new", "not done yet")]
        fakes[0].setting = 1
        changed = "settings changed (there -> now): setting: 0 -> 1"
        said = f"is running with settings other than this call's (this call: {changed})"
        assert pipeline(tmp_path / "w", fakes).statuses()[0].why == said
        ran.append("looked")

    Pipeline(tmp_path / "w", [changed(fakes[0].step(), work=look, outputs=())]).run()
    assert ran == ["looked"]
