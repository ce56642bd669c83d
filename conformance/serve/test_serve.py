"""`sam3-tvm serve` as its clients meet it: what `segment` finds, a sentence at each limit, and nothing at its end."""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest
from PIL import Image
from pycocotools.coco import COCO

from conformance.support.remotes import free_port, until
from conformance.support.sentences import sentence
from harness.app.results.objects import decode_mask
from harness.app.serve.gate import Gate
from harness.app.serve.replica import Answerer, Found, Question
from harness.runtime import ObjectPrompt, Prompt, Sam3

ROOT = Path(__file__).resolve().parents[2]
CAT = ROOT / "fixtures" / "images" / "cat.png"
THRESHOLD = 0.45


def png(level: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (64, 48), (level, 0, 0)).save(buffer, "PNG")
    return buffer.getvalue()


def text_of(content: bytes) -> str:
    return base64.b64encode(content).decode()


def test_questions_about_one_image_are_answered_on_one_encoding(tiny_artifact: Path, tmp_path: Path) -> None:
    """A question that is wrong does not reach the others, and the image that was used last stays."""
    answerer = Answerer(Sam3.load(tiny_artifact), tmp_path, most_encoded=1)
    cat, dog = ((Prompt(text),) for text in ("cat", "dog"))
    click = (ObjectPrompt([(10, 10)]),)
    questions = [
        Question(png(9), cat, THRESHOLD),
        Question(png(9), (ObjectPrompt([(1000, 10)]),), THRESHOLD),
        Question(b"no image", cat, THRESHOLD),
        Question(png(9), (*dog, *cat), THRESHOLD),
        Question(png(9), click, THRESHOLD),
        Question(png(9), cat, 0.9),
    ]
    answers = answerer.answer(questions)
    assert re.fullmatch(sentence("outside", index=1, x=1000, y=10, width=64, height=48), answers[1])
    assert re.fullmatch(sentence("unknown-format", name="The image of the request"), answers[2])
    assert answerer.encoded == 1
    assert [answerer.answer([question])[0] for question in questions] == answers
    assert answerer.encoded == 1
    first = answers[0]
    assert isinstance(first, Found) and first.size == (64, 48) and first.annotations
    answerer.answer([Question(png(99), cat, THRESHOLD)])
    assert answerer.encoded == 2
    answerer.answer([Question(png(9), cat, THRESHOLD)])
    assert answerer.encoded == 3


class Handle:
    """In place of the model's handle: returns, or raises, an answer after some seconds."""

    def __init__(self, answer: Any, seconds: float = 0) -> None:
        self.answer, self.seconds = answer, seconds
        self.keys: list[str] = []

    def options(self, session_id: str, multiplexed_model_id: str) -> Handle:
        assert session_id == multiplexed_model_id
        self.keys.append(session_id)
        return self

    def remote(self, _question: Question) -> asyncio.Future[Any]:
        async def answer() -> Any:
            await asyncio.sleep(self.seconds)
            if isinstance(self.answer, Exception):
                raise self.answer
            return self.answer

        return asyncio.ensure_future(answer())


def post(handle: Handle, path: str, **request: Any) -> httpx.Response:
    async def send() -> httpx.Response:
        gate = Gate(handle, 0.2, {})
        transport = httpx.ASGITransport(app=gate.__serve_build_asgi_app__())
        async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
            return await client.post(path, **request)

    return asyncio.run(send())


CATS = {"image": text_of(png(0)), "texts": ["cat"]}


@pytest.mark.parametrize(
    ("path", "request_body", "expected"),
    [
        ("/segment", {"texts": ["cat"]}, "image: Field required"),
        ("/segment", {"image": "?", "texts": 7}, "texts: Input should be a valid list"),
        ("/segment", {**CATS, "threshold": 2}, sentence("bad-threshold", threshold="2.0")),
        ("/segment", {**CATS, "texts": ["a", "b"], "boxes": [[0, 0, 1, 1]]}, sentence("several-texts", distinct=2)),
        ("/predict", {"image": text_of(png(0)), "points": "here"}, "points: Input should be a valid list"),
    ],
)
def test_a_request_that_is_wrong(path: str, request_body: dict[str, Any], expected: str) -> None:
    pytest.importorskip("ray")
    answer = post(Handle("unused"), path, json=request_body)
    assert answer.status_code == 422
    assert re.search(expected, answer.json()["error"])


def test_limits_are_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    from ray.exceptions import RayActorError
    from ray.serve.exceptions import BackPressureError

    refused = BackPressureError(num_queued_requests=1, max_queued_requests=1)
    for handle, status, expected in (
        (Handle(Found((64, 48), [], ()), seconds=1), 504, "There was no answer within 0.2 seconds"),
        (Handle(refused), 429, "Too many requests wait already"),
        (Handle(RayActorError()), 503, "The process of the model was lost"),
        (Handle("The image is bad."), 422, "The image is bad."),
    ):
        answer = post(handle, "/segment", json=CATS)
        assert (answer.status_code, list(answer.json())) == (status, ["error"])
        assert answer.json()["error"].startswith(expected)
    monkeypatch.setattr("harness.app.serve.gate.LARGEST_REQUEST", 2**20)
    answer = post(Handle("unused"), "/segment", content=b"x" * (2**20 + 1))
    assert (answer.status_code, answer.json()) == (413, {"error": "The request has more than 1 MB; send less."})


def test_an_image_goes_to_one_replica_whatever_its_name() -> None:
    pytest.importorskip("ray")
    handle = Handle(Found((64, 48), [], ("note",)))
    names = []
    for name in ("folder/cat.png", "dog.png"):
        answer = post(handle, "/segment", json={**CATS, "name": name}).json()
        names.append(answer["images"][0]["file_name"])
        assert answer["notes"] == ["note"]
    post(handle, "/segment", json={**CATS, "image": text_of(png(1))})
    assert names == ["cat.png", "dog.png"]
    assert len(handle.keys) == 3 and len(set(handle.keys)) == 2


def command(model: Path, port: int, *arguments: str) -> list[str]:
    first = [sys.executable, "-m", "harness", "serve", "--model", str(model), "--threads", "1"]
    return [*first, "--port", str(port), *arguments]


def environment() -> dict[str, str]:
    return {**os.environ, "COLUMNS": "200", "PYTHONPATH": str(ROOT)}


def refusal(arguments: list[str]) -> str:
    finished = subprocess.run(arguments, capture_output=True, text=True, env=environment(), timeout=300, check=False)
    assert (finished.returncode, finished.stderr.count("\n")) == (2, 1), finished.stderr
    return finished.stderr


def test_ray_is_not_installed(tmp_path: Path) -> None:
    program = "import sys; sys.modules['ray'] = None; from harness.cli.main import main; main()"
    arguments = command(tmp_path, free_port())
    assert re.search(sentence("no-ray-serve"), refusal([sys.executable, "-c", program, *arguments[3:]]))


def test_a_service_that_cannot_start(tiny_artifact: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    port = free_port()
    assert "manifest.json" in refusal(command(tmp_path, port))
    refused = refusal(command(tiny_artifact, port, "--ray-address", "127.0.0.1:9"))
    assert re.search(sentence("no-ray-cluster", place="127.0.0.1:9"), refused)
    assert "Ray has room for" in refusal(command(tiny_artifact, port, "--replicas", "1000"))
    folder = Path(shutil.copytree(tiny_artifact, tmp_path / "damaged", copy_function=os.link))
    weights = folder / "ground.safetensors"
    weights.unlink()  # a hard link
    weights.write_bytes(b"no weights")
    assert f"A replica does not start: {weights} is damaged" in refusal(command(folder, port))


class Service:
    """A running service."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process, self.url = process, url

    def ask(self, path: str, request: dict[str, Any] | None = None) -> tuple[int, str]:
        content = None if request is None else json.dumps(request).encode()
        sent = urllib.request.Request(f"{self.url}{path}", content, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(sent, timeout=100) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()


@pytest.fixture(scope="module")
def service(tiny_artifact: Path) -> Iterator[Service]:
    pytest.importorskip("ray")
    port = free_port()
    before = set(Path(tempfile.gettempdir()).glob("sam3-tvm-serve-*"))
    with subprocess.Popen(
        command(tiny_artifact, port, "--keep", "2"),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            ready = f"Serving {tiny_artifact} at http://127.0.0.1:{port}/, described at /docs; Ctrl-C ends it.\n"
            lines = list(takewhile(lambda line: line != ready, process.stdout))
            assert lines == ["The weights are untrained (seed 0): the masks are meaningless.\n"]
            yield Service(process, f"http://127.0.0.1:{port}")
            family = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
            assert process.stdout.read() == "Stopped; nothing is served any more.\n"
            until(lambda: not any(member.is_running() for member in family), 30)
            assert set(Path(tempfile.gettempdir()).glob("sam3-tvm-serve-*")) <= before
        finally:
            process.kill()


def test_the_answer_is_what_segment_writes(service: Service, tiny_artifact: Path, tmp_path: Path) -> None:
    arguments = ["--text", "cat", "--text", "dog", "--threshold", str(THRESHOLD), "--threads", "1"]
    arguments += ["--model", str(tiny_artifact), "--out", str(tmp_path)]
    segment = [sys.executable, "-m", "harness", "segment", str(CAT), *arguments]
    subprocess.run(segment, env=environment(), check=True, capture_output=True)
    written = json.loads((tmp_path / "annotations.json").read_text())
    request = {"image": text_of(CAT.read_bytes()), "texts": ["cat", "dog"], "threshold": THRESHOLD, "name": "cat.png"}
    status, text = service.ask("/segment", request)
    assert (status, json.loads(text)) == (200, written | {"notes": []})
    assert len(written["annotations"]) > 0
    path = tmp_path / "answer.json"
    path.write_text(text)
    assert COCO(path).annToMask(COCO(path).anns[1]).shape == (300, 451)


def metric(service: Service, name: str) -> float:
    lines = [line for line in service.ask("/metrics")[1].splitlines() if line.startswith(name)]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def test_many_clients_share_an_encoding(service: Service) -> None:
    image = text_of(png(77))
    requests = [{"image": image, "points": [[x, 20]], "labels": [1]} for x in range(8)]
    with ThreadPoolExecutor(len(requests)) as clients:
        answers = list(clients.map(lambda request: service.ask("/predict", request), requests))
    assert {status for status, _ in answers} == {200}
    assert [service.ask("/predict", request) for request in requests[:2]] == answers[:2]


def test_health_metrics_and_schema(service: Service) -> None:
    status, text = service.ask("/health")
    health = json.loads(text)
    assert (status, health["status"], health["replicas"], health["model"]["scale"]) == (200, "RUNNING", 1, "tiny")
    schema = json.loads(service.ask("/openapi.json")[1])
    assert schema["paths"].keys() == {"/segment", "/predict", "/health", "/metrics"}
    assert {"image", "texts", "boxes", "threshold"} <= schema["components"]["schemas"]["SegmentRequest"][
        "properties"
    ].keys()
    service.ask("/predict", {"image": text_of(png(78)), "points": [[1, 1]]})
    until(lambda: metric(service, "ray_sam3_tvm_encoded_images") >= 1, 60)
    until(lambda: metric(service, "ray_serve_num_http_requests") >= 1, 60)


def test_a_replica_that_is_killed_is_started_again(service: Service) -> None:
    children = psutil.Process(service.process.pid).children(recursive=True)
    (replica,) = [child for child in children if "ServeReplica:sam3-tvm:model" in " ".join(child.cmdline())]
    replica.kill()
    request = {"image": text_of(png(79)), "points": [[1, 1]]}
    answers: list[tuple[int, str]] = []

    def is_answered() -> bool:
        answers.append(service.ask("/predict", request))
        return answers[-1][0] == 200

    until(is_answered)
    assert all(json.loads(text)["error"].endswith("scale the image down.") for status, text in answers if status != 200)


def example(path: str, url: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("SAM3_TVM_URL", url)
    specification = importlib.util.spec_from_file_location(Path(path).stem, ROOT / "examples" / path)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def found_by(service: Service) -> dict[str, Any]:
    request = {"image": text_of(CAT.read_bytes()), "texts": ["cat", "dog"]}
    found: dict[str, Any] = json.loads(service.ask("/segment", request)[1])
    assert found["annotations"]
    return found


def test_label_studio(service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server of Label Studio's library asks the example, which asks the service."""
    api = pytest.importorskip("label_studio_ml.api")
    brush = pytest.importorskip("label_studio_sdk.converter.brush")
    backend = example("07_label_studio/model.py", service.url, monkeypatch).Sam3Backend
    monkeypatch.setattr(backend, "get_local_path", lambda _backend, url: url)  # instead of a download
    control = "<BrushLabels name='brush' toName='image'><Label value='cat'/><Label value='dog'/></BrushLabels>"
    config = f"<View><Image name='image' value='$picture'/>{control}</View>"
    client = api.init_app(backend, model_dir=str(tmp_path)).test_client()
    assert client.post("/setup", json={"project": "1", "schema": config}).status_code == 200
    answer = client.post("/predict", json={"tasks": [{"data": {"picture": str(CAT)}}], "label_config": config})
    assert answer.status_code == 200
    (prediction,) = answer.get_json()["results"]
    found = found_by(service)
    assert len(prediction["result"]) == len(found["annotations"])
    first, annotation = prediction["result"][0], found["annotations"][0]
    assert (first["from_name"], first["to_name"], first["value"]["brushlabels"]) == ("brush", "image", ["cat"])
    pixels = brush.decode_rle(first["value"]["rle"]).reshape(300, 451, 4)[..., 3]
    assert ((pixels > 0) == decode_mask(annotation["segmentation"])).all()


def test_cvat(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shapes are those of CVAT's library, and it decodes the masks."""
    masks = pytest.importorskip("cvat_sdk.masks")
    function = example("08_cvat/function.py", service.url, monkeypatch).create("cat,dog")
    assert [label.name for label in function.spec.labels] == ["cat", "dog"]
    context = SimpleNamespace(frame_name="cat.png", conf_threshold=None, conv_mask_to_poly=False)
    with Image.open(CAT) as image:
        shapes = function.detect(context, image)
    found = [annotation for annotation in found_by(service)["annotations"] if annotation["area"]]
    assert [shape.label_id for shape in shapes] == [annotation["category_id"] - 1 for annotation in found]
    pixels = masks.decode_mask(shapes[0].points, image_width=451, image_height=300)
    assert (pixels == decode_mask(found[0]["segmentation"])).all()
