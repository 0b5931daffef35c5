"""A call of a dataset's method, as it travels to workers and is carried out there.

Owns its arguments on the wire, which take what a `FactorySpec` takes, and its errors in words.
"""

from __future__ import annotations

from typing import Any

from ringloader._core import messages as msg
from ringloader._core import values
from ringloader._runtime.words import format_traceback, run_user_code, safe_text, type_name
from ringloader.errors import ConfigError, LoaderError, RemoteError
from ringloader.factory import FactorySpec


class Arguments:
    """The arguments of a call, rebuilt."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args, self.kwargs = args, kwargs


def pack(method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Return the arguments as they travel. Raises ConfigError, naming it, for one that cannot."""
    if not isinstance(method, str) or not method.isidentifier():
        raise ConfigError(f"method is {method!r}; give the name of a method of the dataset", option="method", value=method)
    return FactorySpec(Arguments, *args, **kwargs).to_wire()


def carry_out(dataset: Any, call: msg.Call) -> msg.Called:
    """Run the method on a dataset."""
    try:
        arguments: Arguments = FactorySpec.from_wire(call.arguments).build()
        result = run_user_code(getattr(dataset, call.method), *arguments.args, **arguments.kwargs)
        return msg.Called(call.call_id, "", "", "", values.encode(result))
    except (Exception, SystemExit) as error:
        return msg.Called(call.call_id, type_name(error), safe_text(error), format_traceback(error), b"")


def results(method: str, answers: dict[int, msg.Called]) -> list[Any]:
    """Return what the workers' methods returned, by worker id. Raises LoaderError for the first that raised."""
    for worker_id, answer in sorted(answers.items()):
        if answer.error_type:
            error = LoaderError(
                f"the dataset's {method} raised {answer.error_type}: {answer.error} (worker {worker_id})\n\n{answer.traceback}",
                worker=worker_id,
                original_type=answer.error_type,
                original_message=answer.error,
            )
            error.__cause__ = RemoteError(answer.traceback)
            raise error
    return [values.decode(answer.value) for _, answer in sorted(answers.items())]
