"""The files of deploy/: their commands run, except those that need Docker or systemd's own process."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from benchmarks.serve import free_port
from tests.serve.programs import running
from ziggurat.cli import main
from ziggurat.exchange.exporter import export_model
from ziggurat.serve.app import CLOSING
from ziggurat.serve.config import ServeConfig
from ziggurat.serve.server import ANSWERING, app_of
from ziggurat.system.yaml_text import parse_yaml

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"


def instructions() -> list[tuple[str, str]]:
    """Return the instructions of the Dockerfile with their arguments."""
    lines = (DEPLOY / "Dockerfile").read_text("utf-8").splitlines()
    found = [line.partition(" ") for line in lines if line and not line.startswith("#")]
    return [(name, rest) for name, _, rest in found]


def test_the_dockerfile_copies_existing_files_and_starts_an_existing_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = instructions()
    assert [name for name, _ in found] == [
        "FROM",
        "COPY",
        "COPY",
        "RUN",
        "RUN",
        "USER",
        "EXPOSE",
        "HEALTHCHECK",
        "ENTRYPOINT",
    ]
    for paths in (rest.split()[:-1] for name, rest in found if name == "COPY"):
        assert all((ROOT / path).exists() for path in paths)
    entry = json.loads(dict(found)["ENTRYPOINT"])
    assert entry[:2] == ["ziggurat", "serve"]
    with pytest.raises(SystemExit) as ended:  # the image's command without a model names what is missing
        main(entry[1:])
    assert ended.value.code == 2
    assert "name at least one model" in capsys.readouterr().err


def test_the_unit_is_well_formed_and_its_command_is_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (DEPLOY / "ziggurat.service").read_text("utf-8")
    command = shlex.split(re.search(r"^ExecStart=(.*)$", text, re.M)[1])  # type: ignore[index]
    assert command[:2] == ["/opt/ziggurat/bin/ziggurat", "serve"]
    (empty := tmp_path / "serve.yaml").write_text("models: []\n", encoding="utf-8")
    with pytest.raises(SystemExit):
        main([str(empty) if part.endswith("serve.yaml") else part for part in command[1:]])
    assert "name at least one model" in capsys.readouterr().err
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze on PATH")
    unit = tmp_path / "ziggurat.service"
    unit.write_text(text.replace("/opt/ziggurat/bin/ziggurat", sys.executable), encoding="utf-8")
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, timeout=60)
    assert "ziggurat.service" not in done.stderr, done.stderr


def test_the_unit_has_one_writable_folder_and_enough_time(
    folders: dict[tuple[str, str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (DEPLOY / "ziggurat.service").read_text("utf-8")
    unit = dict(re.findall(r"^(\w+)=(.*)$", text, re.M))
    assert unit["WorkingDirectory"] == f"%S/{unit['StateDirectory']}"
    ends = ServeConfig().drain_seconds + 2 * ANSWERING + CLOSING
    assert float(unit["TimeoutStopSec"]) > ends
    (state := tmp_path / "state").mkdir()
    monkeypatch.chdir(state)
    (recipe,) = re.findall(r"`(glossaries:\s+#?\s*glossaries\.json)`", text)
    config = parse_yaml(recipe.replace("\n#", ""), "unit")[0]
    config |= {"models": [{"path": str(folders["de", "en"]), "threads": 1}]}
    app_of(ServeConfig.model_validate(config), lambda text: None)
    assert [path.name for path in state.iterdir()] == ["glossaries.json"]


def test_the_proxy_has_the_servers_limits_and_timeouts() -> None:
    text = (DEPLOY / "nginx.conf").read_text("utf-8")
    config = ServeConfig()
    (size,) = re.findall(r"client_max_body_size (\d+)m;", text)
    assert int(size) << 20 >= config.limits.file_bytes + config.limits.body_bytes
    waits = dict(re.findall(r"location =? ?(\S+) \{[^}]*proxy_read_timeout (\d+)s;", text))
    assert float(waits["/"]) > config.limits.seconds
    # A document may take as long to receive as to translate.
    assert float(waits["/translate_file"]) > 2 * config.documents.seconds


@pytest.mark.slow
def test_the_steps_of_the_image_give_a_server_without_torch(
    folders: dict[tuple[str, str], Path], tmp_path: Path
) -> None:
    """The image's RUN lines run in a new environment, then its entry point and health check."""
    (text := tmp_path / "text").write_text("A dog runs.\n", encoding="utf-8")
    export_model(folders["en", "de"], "ctranslate2", tmp_path / "served", verify=text)
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "image"], check=True)
    found = instructions()
    for paths in (rest.split() for name, rest in found if name == "COPY"):
        for path in paths[:-1]:
            target = tmp_path / "source" / (path if Path(path).is_dir() else Path(path).name)
            target.parent.mkdir(exist_ok=True)
            (shutil.copytree if (ROOT / path).is_dir() else shutil.copy)(ROOT / path, target)
    environment = {**os.environ, "PATH": f"{tmp_path}/image/bin:{os.environ['PATH']}"}
    environment.pop("PYTHONPATH", None)
    (install, _) = [rest for name, rest in found if name == "RUN"]  # the other one would create a user on this machine
    command = install.replace("/source", str(tmp_path / "source"))
    subprocess.run(command, shell=True, check=True, env=environment, capture_output=True, timeout=600)
    missing = subprocess.run([tmp_path / "image/bin/python", "-c", "import torch"], capture_output=True)
    assert missing.returncode != 0
    port = free_port()
    entry = [part.replace("5000", str(port)) for part in json.loads(dict(found)["ENTRYPOINT"])]
    with running(
        [str(tmp_path / "image/bin" / entry[0]), *entry[1:], str(tmp_path / "served")], f"http://127.0.0.1:{port}"
    ):
        answer = httpx.post(
            f"http://127.0.0.1:{port}/translate", json={"q": "A dog runs.", "source": "en", "target": "de"}
        )
        assert answer.status_code == 200
        check = json.loads(dict(found)["HEALTHCHECK"].partition("CMD ")[2].replace("5000", str(port)))
        subprocess.run([tmp_path / "image/bin/python", *check[1:]], check=True, capture_output=True)


@pytest.mark.slow
def test_the_proxy_s_recipe(folders: dict[tuple[str, str], Path], tmp_path: Path) -> None:
    """Clients behind nginx have separate limits, and none can pose as another."""
    nginx = shutil.which("nginx") or pytest.skip("no nginx on PATH")
    port, front = free_port(), free_port()
    config = tmp_path / "serve.yaml"
    model = json.dumps({"path": str(folders["en", "de"])})
    limits = "{requests_per_minute: 3}"
    config.write_text(f"models: [{model}]\nport: {port}\nproxies: [127.0.0.1]\nlimits: {limits}\n", encoding="utf-8")
    recipe = (DEPLOY / "nginx.conf").read_text("utf-8").replace("127.0.0.1:5000", f"127.0.0.1:{port}")
    folders_of_nginx = "".join(
        f"{kind}_temp_path {tmp_path}/{kind}; " for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    user = "" if os.geteuid() else "user root; "  # otherwise its workers run as the user nobody, who may not write here
    seen = "add_header X-Seen-By-Proxy $request_id always;"
    (tmp_path / "nginx.conf").write_text(
        f"{user}daemon off; pid {tmp_path}/pid; error_log {tmp_path}/errors; events {{}}\n"
        f"http {{ access_log off; {seen} {folders_of_nginx}\nserver {{ listen 127.0.0.1:{front};\n{recipe}\n}} }}\n",
        encoding="utf-8",
    )
    ours, address = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{front}"
    text = {"q": "A dog runs.", "source": "en", "target": "de"}
    with (
        running([sys.executable, "-m", "ziggurat", "serve", "--config", str(config)], ours),
        running([nginx, "-p", str(tmp_path), "-c", str(tmp_path / "nginx.conf")], address),
    ):
        assert httpx.get(f"{address}/metrics").status_code == 403
        assert httpx.post(f"{address}/translate", json=text, timeout=60).status_code == 200
        forged = {"X-Forwarded-For": "203.0.113.9"}
        for _ in range(2):
            assert httpx.post(f"{address}/translate", json=text, headers=forged).status_code == 200
        assert httpx.post(f"{address}/translate", json=text, headers=forged).status_code == 429
        # Files up to the server's limit pass; refusing larger ones is up to the server.
        most = ServeConfig().limits.file_bytes
        other = httpx.Client(transport=httpx.HTTPTransport(local_address="127.0.0.2"), base_url=address, timeout=60)
        for content, said in (
            (b"a" * most, "more than 2,000,000 characters"),
            (b"a" * (most + 1), "larger than 20,971,520"),
        ):
            file = {"file": ("f.txt", content)}
            answer = other.post("/translate_file", files=file, data=text)
            assert said in answer.json()["error"], answer.text
        # Addresses of translated files have the proxy's port, and answers have the id that the proxy gave the request.
        answer = other.post("/translate_file", files={"file": ("f.txt", b"17")}, data=text)
        assert answer.json()["translatedFileUrl"].startswith(f"{address}/download_file/")
        assert httpx.get(answer.json()["translatedFileUrl"]).content == b"17"
        assert answer.headers["x-request-id"] == answer.headers["x-seen-by-proxy"]
        # The proxy itself is trusted, so another client has its own turns.
        assert httpx.post(f"{ours}/translate", json=text, headers=forged).status_code == 200
