"""What the plugins say of a version of vLLM or SGLang that they were not tried with."""

import logging
import os
import re


def is_tried(version: str, tried: tuple[str, ...]) -> bool:
    """Whether a version is one of those, a later patch or another build of one: 0.32.1 and 0.32+cpu are of 0.32."""
    return any(re.match(rf"{re.escape(v)}(?!\d)", version) for v in tried)


def either(versions: tuple[str, ...]) -> str:
    *most, last = versions
    return f"{', '.join(most)} or {last}" if most else last


def what_to_install(program: str, tried: tuple[str, ...], error: Exception | None = None) -> str:
    """What to install where a plugin misses something: the other package that `error` says is absent, if it does so,
    or else a version of the program that was tried."""
    absent = error.name if isinstance(error, ModuleNotFoundError) and error.name else program
    package = absent.partition(".")[0]
    return f"Install {program} {either(tried)}." if package == program else f"Install {package}."


def warn_of_untried(
    logger: logging.Logger, program: str, version: str, tried: tuple[str, ...], where: str = ""
) -> None:
    """Warns that a plugin was never tried with this version of a program. Once: not again in processes that this one
    starts."""
    variable = f"MLA_BACKEND_WARNED_OF_{program.upper()}"
    if not is_tried(version, tried) and os.environ.get(variable) != version:
        os.environ[variable] = version
        told = "mla-backend has not been tried with %s %s%s; it was with %s."
        logger.warning(told, program, version, where, either(tried))
