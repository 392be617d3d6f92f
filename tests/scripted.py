"""The scripted environment of the conformance cases, under the name that tests import it by."""

from relive.conformance.scripted import (
    Script,
    Scripted,
    ScriptedDict,
    Transition,
    act,
    critic,
    step_and_reset,
    transitions,
    vector,
)

__all__ = [
    "Script", "Scripted", "ScriptedDict", "Transition", "act", "critic", "step_and_reset", "transitions", "vector",
]  # fmt: skip
