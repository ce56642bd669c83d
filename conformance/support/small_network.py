"""Defines a model from outside the package with a component and an entry point that name its parts differently.

PyTorch is imported when the model is opened, because every command imports this module.
"""

from __future__ import annotations

from collections.abc import Iterator

from harness.compiler.deployment.deployable import Deployable
from harness.core.case import Case
from harness.core.program import Call, Program
from harness.core.settings import Settings
from harness.models.model import Model
from harness.models.subject import Subject, Workload
from harness.models.traced import open_trace

NAME, TOKENS, CHANNELS = "small_network", 160, 64
GROUPS = ("trunk.0", "trunk.2", "head", "scale")
"""Paths of the layers in the model, in the order in which they are computed."""


def open_perceptron(case: Case, _settings: Settings) -> Workload:
    from conformance.support.perceptron import Perceptron, network, tokens

    program = Program("run", Perceptron(network(case.seed)), {"tokens": tokens()}, OUTPUTS)
    return open_trace(case, {program.name: program}, [Call("only", program.name, (tokens(),))])


def programs(case: Case, _settings: Settings, _options: object = None) -> Iterator[Program]:
    from conformance.support.perceptron import Deployed, network, tokens

    yield Program("deployed", Deployed(network(case.seed)), {"tokens": tokens()}, ("features",))


OUTPUTS = ("features", "scales")
PERCEPTRON = Subject("perceptron", "two layers and two heads", ("tokens",), OUTPUTS, open_perceptron, NAME)
MODEL = Model(NAME, {PERCEPTRON.name: PERCEPTRON}, Deployable(NAME, programs))
