# SPDX-License-Identifier: Apache-2.0
"""The error that users see: one line that says what is wrong, where, and what to do."""

from pydantic import ValidationError


class DpaError(ValueError):
    """Bad input. A ValueError, so that vLLM reports it as a configuration error."""


def one_line(error: ValidationError, where: str) -> DpaError:
    """Fold a pydantic error into one line: ``where: field: problem; field: problem``."""
    problems = []
    for item in error.errors():
        field = ".".join(str(part) for part in item["loc"])
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            message = "unknown option"
        elif field and item["type"] != "missing":
            message += f" (got {item['input']!r})"
        problems.append(f"{field}: {message}" if field else message)
    return DpaError(f"{where}: {'; '.join(problems)}")
