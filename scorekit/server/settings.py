"""Settings of a service: every field is a flag (`--max-samples`), an environment variable with the
service's prefix (`METRICX_MAX_SAMPLES`), and documented here. Secrets are never flags.
"""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, CliToggleFlag, SettingsConfigDict, SettingsError

from scorekit.config import nearest
from scorekit.errors import UserError
from scorekit.matmul import MatmulSetting
from scorekit.net.addresses import host_names, is_loopback


class ServiceSettings(BaseSettings):
    """Settings of every service."""

    model_config = SettingsConfigDict(
        env_prefix="SCOREKIT_SERVICE_",
        cli_kebab_case=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        extra="ignore",
        allow_inf_nan=False,
    )

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0: any free one.")
    no_auth: CliToggleFlag[bool] = Field(
        False, description="Allow an address that others can reach without an API key."
    )
    allow_host: str = Field(
        "",
        description="Further names of this service, separated by commas. Without API keys it "
        "answers to loopback names, addresses and these alone. Web pages on them may ask it, too.",
    )
    page: CliToggleFlag[bool] = Field(
        True, description="Serve a page at / to try the service by hand; --no-page: none."
    )
    api_keys_file: Path | None = Field(
        None, description="File with one API key a line; keys may also come from SCOREKIT_API_KEYS."
    )
    revision: str | None = Field(None, description="Revision of a hub model; null: its newest.")
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N.")
    threads: int | None = Field(
        None, ge=1, description="CPU threads of the model; null: what this process may really use."
    )
    max_batch_tokens: int | None = Field(
        None,
        ge=16,
        description="Most tokens in one batch of the model, padding included; null: 256 on a "
        "CPU, 16,384 on a GPU.",
    )
    max_queue_items: int = Field(
        32768, ge=1, description="Most samples waiting for the model; more are refused with 429."
    )
    max_queue_tokens: int = Field(
        8_388_608, ge=1, description="Most tokens waiting for the model; more are refused with 429."
    )
    bulk_patience_s: float = Field(
        10.0,
        ge=0,
        description="Seconds after which waiting `bulk` samples get every other batch of the "
        "model, however many `interactive` ones there are.",
    )
    max_samples: int = Field(10_000, ge=1, description="Most samples in one request.")
    max_field_chars: int = Field(
        100_000, ge=1, description="Most characters of one text; a longer one fails its sample."
    )
    max_body_bytes: int = Field(16 * 2**20, ge=1024, description="Largest request body in bytes.")
    max_inflight_bytes: int = Field(
        64 * 2**20,
        ge=2048,
        description="Most bytes of all requests that are being received or in work; more are "
        "refused with 429. Bodies of more than 1 MiB may take three quarters of it.",
    )
    timeout_s: float = Field(
        600.0, gt=0, description="Seconds until an answer is due, where a request names none."
    )
    receive_timeout_s: float = Field(
        30.0, gt=0, description="Seconds a client may take to send a request, to its last byte."
    )
    max_connections: int | None = Field(
        None,
        ge=1,
        description="Most open connections. Beyond it the oldest that has not sent its request is "
        "closed, and a few more are taken for health checks; null: 8,192, or what the limit of "
        "open files allows.",
    )
    stall_after: float | None = Field(
        None,
        gt=0,
        description="Seconds in one batch after which the model counts as hung; null: the larger "
        "of 5 and 5 times what the batch should take.",
    )
    unready_after: float | None = Field(
        None,
        gt=0,
        description="Seconds that a small interactive request may wait for the model before "
        "/health/ready is 503; null: half of timeout_s.",
    )
    drain_s: float = Field(
        60.0, ge=0, description="Seconds that accepted work may take after SIGTERM."
    )
    cache: str = Field(
        "sqlite",
        description="memory; sqlite (a file in the user's cache folder); sqlite:///PATH (from the "
        "root), sqlite://PATH (from here); redis://HOST:PORT/DB.",
    )
    cache_memory_items: int = Field(
        100_000, ge=0, description="Most scores kept in this process, before the second tier."
    )
    cache_max_bytes: int = Field(
        2**30, ge=2**20, description="Size at which the SQLite cache drops its oldest scores."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least severity of the log lines."
    )

    @classmethod
    def print_help(cls, program: str) -> None:
        """Print the help, and end the process. It needs no package of an extra."""
        parse_settings(cls, ["--help"], program)

    @property
    def allowed_hosts(self) -> tuple[str, ...]:
        """Return the names in `allow_host`."""
        return host_names(self.allow_host)

    @field_validator("allow_host")
    @classmethod
    def _bare_names(cls, value: str) -> str:
        host_names(value)
        return value


class ModelSettings(ServiceSettings):
    """Settings of a service that runs a network in its process."""

    matmul: MatmulSetting | None = Field(
        None,
        description="Who multiplies float32 matrices on a CPU: torch; onednn, with packed weights; "
        "or auto: onednn where it is at least 1.3 times as fast, as measured at the start. Scores "
        "differ by less than 1e-5 of their range. null: what SCOREKIT_MATMUL says, else auto.",
    )
    own_batches: CliToggleFlag[bool] = Field(
        False,
        description="A batch of the model holds samples of one request only, so the last bits of a "
        "score do not depend on who else asks, or when: a run can repeat itself. It holds for "
        "requests of up to 256 samples that fit without windows. Small requests cost more.",
    )


class Secrets(BaseSettings):
    """Values that must not appear in `ps`, a log or a saved config: from the environment only."""

    model_config = SettingsConfigDict(env_prefix="SCOREKIT_", extra="ignore")

    api_keys: SecretStr = Field(SecretStr(""), description="API keys, separated by commas.")
    redis_password: SecretStr | None = Field(None, description="Password of the Redis cache.")
    cache_secret: SecretStr | None = Field(
        None, description="Authenticates cached scores: only who knows it can store one."
    )


S = TypeVar("S", bound=ServiceSettings)


def parse_settings(
    settings_type: type[S], args: list[str] | None = None, program: str | None = None
) -> S:
    """Return settings from flags, then environment, then defaults.

    args: None: those of this process.
    program: the command's name in its help; None: the service's module.
    Raises UserError for a bad value or an unknown flag."""
    try:
        return settings_type(
            _cli_parse_args=True if args is None else args,
            _cli_exit_on_error=False,
            _cli_prog_name=program,
        )
    except SettingsError as error:
        problem = str(error).removeprefix("error parsing CLI: ")
        raise UserError(f"{problem}{_flag_meant(settings_type, problem)}; see --help") from None
    except ValidationError as error:
        prefix = settings_type.model_config.get("env_prefix", "")
        messages = "; ".join(
            f"--{_flag(settings_type, name)} ({prefix}{name.upper()}): {problem['msg']}"
            for problem in error.errors(include_input=False, include_url=False)
            for name in [".".join(map(str, problem["loc"]))]
        )
        raise UserError(messages) from None


def _flag_meant(settings_type: type[ServiceSettings], message: str) -> str:
    unknown = [word.partition("=")[0] for word in message.split() if word.startswith("--")]
    if not unknown or not message.startswith("unrecognized"):
        return ""
    flags = [_flag(settings_type, name) for name in settings_type.model_fields]
    suggestion = nearest(unknown[0].removeprefix("--"), dict(zip(flags, flags, strict=True)))
    return f" (did you mean --{suggestion}?)" if suggestion else ""


def _flag(settings_type: type[ServiceSettings], name: str) -> str:
    """Return a setting's flag without dashes: if it is on by default, the one to turn it off."""
    field = settings_type.model_fields.get(name)
    prefix = "no-" if field is not None and field.default is True else ""
    return prefix + name.replace("_", "-")


def load_api_keys(settings: ServiceSettings, secrets: Secrets) -> tuple[bytes, ...]:
    """Return all configured keys.

    Raises UserError if the address needs one and there is none, and if keys are configured but none
    is found: a service that should be closed must not be open.
    """
    keys: list[str] = []
    if "api_keys" in secrets.model_fields_set:
        keys += _keys_in(secrets.api_keys.get_secret_value().split(","), "SCOREKIT_API_KEYS")
    if settings.api_keys_file is not None:
        keys += _keys_in(_lines_of(settings.api_keys_file), f"{settings.api_keys_file}")
    if not keys and not settings.no_auth and not is_loopback(settings.host):
        raise UserError(
            f"--host {settings.host} can be reached by others: set SCOREKIT_API_KEYS or "
            "--api-keys-file, or say --no-auth"
        )
    return tuple(key.encode() for key in keys)


def _keys_in(parts: list[str], source: str) -> list[str]:
    keys = [part.strip() for part in parts if part.strip()]
    if not keys:
        raise UserError(f"{source}: no key in it; put one there, or do not set it")
    return keys


def _lines_of(path: Path) -> list[str]:
    try:
        if path.stat().st_mode & stat.S_IROTH:
            import structlog  # not for `--help`

            log = structlog.get_logger()
            log.warning("key_file_readable_by_everyone", path=f"{path}", hint="chmod 600")
        return path.read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8 text") from None
