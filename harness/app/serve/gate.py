"""Defines the routes of the service: requests are checked here, and answered by replicas of the model."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from typing import Any
from urllib.request import urlopen

from fastapi import FastAPI, Response
from pydantic import Base64Bytes, BaseModel
from starlette.exceptions import HTTPException

from harness import __version__
from harness.app.results.coco import AnnotatedImage, data_set
from harness.app.segment.prompts import category_name
from harness.app.serve.replica import Answer, Question
from harness.app.ui.errors import add_error_handlers
from harness.app.ui.guard import BodyLimit
from harness.app.ui.photographs import plain_name
from harness.app.ui.questions import KindsFields, ObjectFields, Text
from harness.core.errors import HarnessError
from harness.runtime.sam3.image_model import THRESHOLD

APPLICATION, MODEL = "sam3-tvm", "model"
"""Names of the application and of the model's deployment in Ray Serve."""
LARGEST_REQUEST = 64 * 2**20
"""Maximum size of a request in bytes; an image of 48 MB is as large in base64."""
TOO_MANY, LOST, TOO_LATE = 429, 503, 504


class ImageFields(BaseModel):
    """An image.

    Attributes:
        image: Its file in base64: PNG, JPEG, or another format that `sam3-tvm segment` reads.
        name: Its file name in the answer.
    """

    image: Base64Bytes
    name: Text = "image"


class SegmentRequest(KindsFields, ImageFields):
    """A prompt for all objects of one or several kinds in an image; see `sam3-tvm segment --text --box`."""


class PredictRequest(ObjectFields, ImageFields):
    """A prompt for one object in an image; see `sam3-tvm segment --click --click-out --click-box`."""


class DataSet(BaseModel):
    """A data set of one image in COCO's format, as in `annotations.json` of `sam3-tvm segment`.

    Attributes:
        images: The image.
        categories: The categories of the prompts.
        annotations: The objects; `segmentation` is a run-length encoding, and `score` the object's score.
        notes: A sentence for each part of a prompt that was changed or ignored.
    """

    info: dict[str, Any]
    licenses: list[dict[str, Any]]
    images: list[dict[str, Any]]
    categories: list[dict[str, Any]]
    annotations: list[dict[str, Any]]
    notes: list[str]


class Health(BaseModel):
    """The state of the service.

    Attributes:
        status: The state in Ray Serve's words; `RUNNING` if the service answers.
        replicas: Number of replicas of the model that run.
        model: The model: its folder, scale, target, precision, and the origin of its weights.
    """

    status: str
    replicas: int
    model: dict[str, str]


class Gate:
    """The deployment that requests reach first."""

    def __init__(self, model: Any, seconds: float, description: Mapping[str, str]) -> None:
        """Stores a handle of the model, the limit of time for an answer, and the description for `Health.model`."""
        self._model = model
        self._seconds = seconds
        self._description = description

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Returns the application; Ray Serve calls this."""
        app = FastAPI(title="sam3-tvm", version=__version__, description="Finds objects in images with SAM 3.")
        app.add_middleware(BodyLimit, question=LARGEST_REQUEST)
        add_error_handlers(app)
        app.add_api_route("/segment", self.segment, methods=["POST"])
        app.add_api_route("/predict", self.predict, methods=["POST"])
        app.add_api_route("/health", self.health)
        app.add_api_route("/metrics", self.metrics)
        return app

    async def segment(self, request: SegmentRequest) -> DataSet:
        """Finds all objects of one or several kinds: texts, boxes around examples, or both."""
        return await self._ask(Question(request.image, tuple(request.prompts()), request.threshold), request.name)

    async def predict(self, request: PredictRequest) -> DataSet:
        """Finds the one object of clicks and a box."""
        return await self._ask(Question(request.image, (request.prompt(),), THRESHOLD), request.name)

    async def _ask(self, question: Question, name: str) -> DataSet:
        from ray.exceptions import RayActorError
        from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

        # Requests about one image go to one replica, which has it encoded, and are a batch of their own there.
        key = hashlib.sha256(question.image).hexdigest()
        response = self._model.options(session_id=key, multiplexed_model_id=key).remote(question)
        try:
            answer: Answer = await asyncio.wait_for(response, self._seconds)
        except TimeoutError:
            response.cancel()
            raise HTTPException(
                TOO_LATE, f"There was no answer within {self._seconds:g} seconds; ask later, or start more --replicas"
            ) from None
        except BackPressureError:
            raise HTTPException(
                TOO_MANY, "Too many requests wait already; ask later, or start more --replicas"
            ) from None
        except (RayActorError, DeploymentUnavailableError):
            raise HTTPException(
                LOST, "The process of the model was lost, killed or out of memory; ask again, or scale the image down"
            ) from None
        if isinstance(answer, str):
            raise HarnessError(answer)
        image = AnnotatedImage(plain_name(name), answer.size, answer.annotations)
        categories = [category_name(prompt) for prompt in question.prompts]
        return DataSet(**data_set([image], categories), notes=list(answer.notes))

    def health(self, response: Response) -> Health:
        """Returns the state of the service, with the status 503 if it does not answer."""
        from ray import serve

        application = serve.status().applications[APPLICATION]
        replicas = application.deployments[MODEL].replica_states.get("RUNNING", 0)
        if not replicas:
            response.status_code = LOST
        return Health(status=application.status.value, replicas=replicas, model=dict(self._description))

    def metrics(self) -> Response:
        """Returns the metrics of Ray and Ray Serve on the machine that answers, in Prometheus' format."""
        import ray

        here = ray.get_runtime_context().get_node_id()
        node = next(node for node in ray.nodes() if node["NodeID"] == here)
        url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        with urlopen(url, timeout=self._seconds) as metrics:
            return Response(metrics.read(), media_type=metrics.headers["Content-Type"])
