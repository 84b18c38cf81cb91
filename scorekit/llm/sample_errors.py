"""Turn a failure of the server behind a service into the error that its caller may see."""

from __future__ import annotations

from scorekit.errors import SampleError, UserError
from scorekit.llm.errors import (
    CAUSES,
    LLM_ERROR_TYPES,
    MISTAKES,
    LLMError,
    OperatorMistake,
    late_retry,
)


def sample_error(error: LLMError | UserError, model: str, request_id: str) -> SampleError:
    """Return the error that a caller may see for a failure of the upstream server.

    It contains neither the upstream's address nor its answer; both are in the service's log, under
    the id that the message names."""
    log_reference = f"(the service's log: {request_id})"
    if isinstance(error, UserError):  # the operator must fix it
        mistake_kind = error.kind if isinstance(error, OperatorMistake) else "setup"
        mistake = MISTAKES[mistake_kind] + (f" {model!r}" if mistake_kind == "model" else "")
        return SampleError(
            "upstream", f"the upstream server: {mistake} {log_reference}", retryable=False
        )
    if error.cause == "left":
        return SampleError("cancelled", CAUSES["left"])
    if error.type == "overlong":
        return SampleError("overlong", f"{LLM_ERROR_TYPES['overlong']} {log_reference}")
    message = LLM_ERROR_TYPES[error.type]
    if error.status is not None:
        message += f", HTTP {error.status}"
    if error.cause is not None:
        message += f": {CAUSES[error.cause]}"
    if error.late_pause_s is not None:
        message += f"; {late_retry(error.late_pause_s)}"
    return SampleError("upstream", f"{message} {log_reference}", retryable=error.retryable)
