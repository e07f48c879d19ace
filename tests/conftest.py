"""For all tests: no time limit on generated examples, and shapes in signatures are checked."""

import dataclasses
import functools
import inspect
import os
from collections.abc import Callable
from typing import Any, get_args, get_origin

import jaxtyping
import numpy as np
import torch
from beartype import BeartypeConf
from beartype.door import die_if_unbearable
from hypothesis import settings

# A busy machine is no failure. In continuous integration the examples are the same in every run, so
# that a failure belongs to a change; `HYPOTHESIS_PROFILE=search` looks for new ones, and many.
settings.register_profile("untimed", deadline=None, derandomize="CI" in os.environ)
settings.register_profile("search", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "untimed"))


# --- shapes ---------------------------------------------------------------------------------------

Function = Callable[..., Any]
NUMBERS = BeartypeConf(is_pep484_tower=True)  # an integer is a float
jaxtyped = jaxtyping.jaxtyped


def judged(thing: Any = None, **_: Any) -> Any:
    """Fail where an array that a function took or gave, or a dataclass holds, is not as declared.

    In the place of jaxtyping's decorator, which looks at every argument of every function, twice,
    and would make the tests take a third longer; mypy sees the other types. What is made anew in
    every call of another function is left alone: decorating it takes longer than it does.
    """
    if thing is None:  # the hook passes a type checker first
        return judged
    if dataclasses.is_dataclass(thing):
        thing.__init__ = _judged(thing.__init__, lambda made, *_, **__: vars(made))
    if isinstance(thing, type) or "<locals>" in thing.__qualname__:
        return thing
    signature = inspect.signature(thing)
    return _judged(thing, lambda *args, **kwargs: signature.bind(*args, **kwargs).arguments)


def _judged(function: Function, given: Function) -> Function:
    hints = {name: _hint(text, function) for name, text in function.__annotations__.items()}
    arrays = {name: hint for name, hint in hints.items() if _has_array(hint)}

    @functools.wraps(function)
    def judge(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)  # first, to refuse in its own words what it does
        if not torch.compiler.is_compiling():  # which cannot follow what comes
            seen = {**given(*args, **kwargs), "return": result}
            with jaxtyped("context"):  # a name of a size means the same all along
                for name in filter(seen.__contains__, arrays):
                    told = f"{function.__qualname__}, {name}: "
                    die_if_unbearable(seen[name], arrays[name], conf=NUMBERS, exception_prefix=told)
        return result

    return judge if arrays else function


def _hint(declared: Any, function: Function) -> Any:
    try:
        return eval(declared, function.__globals__) if isinstance(declared, str) else declared
    except (NameError, TypeError):  # what is defined below, or for mypy alone
        return None


def _has_array(hint: Any) -> bool:
    shaped = isinstance(hint, type) and issubclass(hint, jaxtyping.AbstractArray)
    return shaped or get_origin(hint) is np.dtype or any(map(_has_array, get_args(hint)))


if not jaxtyping.config.jaxtyping_disable:  # by JAXTYPING_DISABLE=1
    jaxtyping.jaxtyped = judged
    jaxtyping.install_import_hook("kappascope", None)
